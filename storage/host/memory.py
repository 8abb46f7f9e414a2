"""Memory of this host, its control groups, file systems, processes and GPUs, read from the kernel and the GPU driver.

Pools: a process takes memory from several pools at once. These are the host's memory, and each control group around
the process that has a limit (a container, a pod, a batch job, a service). Versions 1 and 2 count, and so does
`memory.high`, although it only throttles. Processes that share a pool see the same id, in whatever namespace they are.

Own memory: `own_bytes` counts a process's private pages and mapped files (libraries) from the kernel's counters, in
some 15 microseconds at any size. That is a slight overestimate, because libraries are shared. The proportional set size
is more precise. But it walks the page tables, which takes 15 to 20 ms of CPU per mapped GB with the address space
locked.
The kernel's own high-water mark is no use here, because it includes the arena that many processes share.

GPUs: the driver is asked without a CUDA context, which would take hundreds of megabytes of the memory in question. The
driver's management library (NVML) answers in milliseconds. Its command, nvidia-smi, takes most of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """A pool of memory that several processes share."""

    pool_id: str
    free_bytes: int  # can be taken without swapping
    total_bytes: int
    reserve_bytes: int = 0  # of the free bytes, to be left free by the caller


def memory_pools(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> tuple[MemoryPool, ...]:
    """Return the host's memory, then that of each control group around this process that has a limit.

    Raises OSError if the kernel does not report it.
    """
    found = {}
    for line in Path(proc, "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemAvailable", "MemTotal"):
            found[name] = int(rest.split()[0]) * 1024
    if "MemAvailable" not in found:
        raise OSError(f"{proc}/meminfo has no MemAvailable")
    total_bytes = found.get("MemTotal", found["MemAvailable"])
    boot = _text(Path(proc, "sys/kernel/random/boot_id"))
    pools = {f"host {boot}": MemoryPool(f"host {boot}", found["MemAvailable"], total_bytes)}
    for folder, version in _groups(Path(proc), Path(cgroup)):
        pool = _limited(folder, version, boot)
        if pool is not None and pool.total_bytes < total_bytes:
            pools[pool.pool_id] = pool
    return tuple(pools.values())


def available_host_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int:
    """Return the memory that can be taken without swapping: the least that is free in any pool.

    Raises OSError if the kernel does not report it.
    """
    return min(pool.free_bytes for pool in memory_pools(proc, cgroup))


def _groups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, int]]:
    """Yield (folder, version) of this process's control group and of each visible one around it."""
    own = {}  # version -> path
    for line in _text(proc / "self/cgroup").split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own[2] = path
        elif "memory" in controllers.split(","):
            own[1] = path
    for root, version in ((cgroup, 2), (cgroup / "unified", 2), (cgroup / "memory", 1)):
        parts = [part for part in own.get(version, "").split("/") if part]
        # In a namespace, or if only this process's group is mounted, the path does not exist below the root.
        if ".." in parts or not root.joinpath(*parts).is_dir():
            parts = []
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth]), version


def _limited(folder: Path, version: int, boot: str) -> MemoryPool | None:
    """Return the pool of a control group, page cache counted as free; None without a limit."""
    names = {
        1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
        2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    }
    limit_names, used_name, cache_name = names[version]
    limits = [int(text) for name in limit_names if (text := _text(folder / name)).isdigit()]  # "max" is no limit
    used = _text(folder / used_name)
    if not limits or not used.isdigit():
        return None
    stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    # The limit of outer groups that are not visible from here.
    limits += [int(stat[name]) for name in ("hierarchical_memory_limit",) if stat.get(name, "").isdigit()]
    limit = min(limits)
    free = limit - int(used) + int(stat.get(cache_name, 0))
    return MemoryPool(f"cgroup{version} {boot} {folder.stat().st_ino}", max(0, min(limit, free)), limit)


def _text(path: Path) -> str:
    """Return the text of a kernel file; empty if it cannot be read. It may contain folder names with any bytes."""
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""


def free_bytes(directory: str | os.PathLike[str]) -> int:
    """Return the bytes that an ordinary user can still write in the file system of `directory`."""
    info = os.statvfs(directory)
    return info.f_bavail * info.f_frsize


def is_memory_backed(directory: str | os.PathLike[str]) -> bool:
    """Return whether files in `directory` are in memory (tmpfs), so that they count as host memory, too."""
    return _mount(directory)[:1] in (["tmpfs"], ["ramfs"], ["devtmpfs"])


def huge_pages(directory: str | os.PathLike[str], proc: str = "/proc") -> str:
    """Return the mount option `huge=` of the tmpfs of `directory`: "never" (the default), "within_size", "always"..."""
    options = ",".join(_mount(directory, proc)[2:]).split(",")
    return next((option[5:] for option in options if option.startswith("huge=")), "never")


def _mount(directory: str | os.PathLike[str], proc: str = "/proc") -> list[str]:
    """Return kind, source and options of the file system of `directory`; nothing where the kernel does not tell."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path(proc, "self/mountinfo").read_bytes().split(b"\n")[:-1]:  # folder names may be any bytes
        left, _, right = line.partition(b" - ")
        if left.split()[2].decode() == wanted:
            return os.fsdecode(right).split()
    return []


def own_bytes(pid: int | None = None) -> int:
    """Return a process's resident memory without shared memory (default: the caller's); 0 if unknown."""
    total = 0
    try:
        with open(f"/proc/{'self' if pid is None else pid}/status", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith(("RssAnon:", "RssFile:")):
                    total += int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
    return total


def high_water_bytes() -> int:
    """Return the caller's peak memory since `reset_high_water`, shared memory included; 0 if unknown."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    except (OSError, ValueError, IndexError):
        return 0


def reset_high_water() -> None:
    """Restart the measurement of `high_water_bytes`, if the kernel allows it."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as mark:
        mark.write("5")


class PeakMemory:
    """The calling process's memory from now on, and its peak.

    `kept_bytes` are memory that will be reused or freed, which the baseline does not include.
    """

    def __init__(self, kept_bytes: int = 0) -> None:
        self.baseline_bytes = self.peak_bytes = max(0, own_bytes() - kept_bytes)

    def sample(self) -> None:
        """Measure now. Call this repeatedly while the work that is measured is running."""
        self.peak_bytes = max(self.peak_bytes, own_bytes())


_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 has no name for it
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15
_PAGE = mmap.PAGESIZE

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # releases the GIL, which mmap.madvise does not
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise.restype = ctypes.c_int


_collecting = threading.Lock()
_pauses: list[bool] = []  # one for each `without_collector` that runs: whether the collector ran before it


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector while 100,000 objects are made that all stay.

    Its scans would find nothing, and take more time than making the objects.
    Thread-safe: the last of several blocks that overlap restores the state before the first.
    """
    with _collecting:
        _pauses.append(gc.isenabled() if not _pauses else _pauses[0])
        gc.disable()
    try:
        yield
    finally:
        with _collecting:
            if _pauses.pop() and not _pauses:
                gc.enable()


def populate(address: int, size_bytes: int) -> bool:
    """Map the pages of `[address, address + size_bytes)` writable, without changing their contents.

    Every page of the range must belong to a writable mapping of the caller. Returns False if the kernel cannot,
    which only costs time later. Releases the GIL.
    """
    if size_bytes <= 0:
        return True
    return bool(_madvise(*_whole_pages(address, size_bytes), _MADV_POPULATE_WRITE) == 0)


def advise_huge(address: int, size_bytes: int, *, huge: bool) -> bool:
    """Ask for huge pages, or for small ones, where pages of a range are made present later. See `populate`."""
    start, size_bytes = _whole_pages(address, size_bytes)
    return bool(_madvise(start, size_bytes, _MADV_HUGEPAGE if huge else _MADV_NOHUGEPAGE) == 0)


def _whole_pages(address: int, size_bytes: int) -> tuple[int, int]:
    start = address - address % _PAGE
    return start, -(-(address + size_bytes) // _PAGE) * _PAGE - start


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Return the address of a writable buffer in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


NVML = "libnvidia-ml.so.1"
MOST_GPUS = 1024  # a larger count is an error
_ASK = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of one GPU."""

    total_bytes: int
    free_bytes: int | None = None  # at the time of the call; None if unknown


def gpu_memory(library: str = NVML) -> tuple[GpuMemory, ...]:
    """Return the memory of each GPU of the host, in the driver's order; empty without a driver or an answer."""
    try:
        return _ask_library(library)
    except (OSError, AttributeError, ValueError):
        return _ask_command()


@dataclass(frozen=True, slots=True)
class GpuDriver:
    """The NVIDIA driver of this host."""

    version: str  # "580.95.05"
    cuda: str  # "13.0": the newest CUDA that it supports


def gpu_driver(library: str = NVML) -> GpuDriver | None:
    """Return the driver's versions; None if there is no working driver."""
    try:
        nvml = ctypes.CDLL(library)
        with _initialized(nvml):
            text, cuda = ctypes.create_string_buffer(96), ctypes.c_int()
            _check(nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))))
            _check(nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)))
        return GpuDriver(text.value.decode(errors="replace"), f"{cuda.value // 1000}.{cuda.value % 1000 // 10}")
    except (OSError, AttributeError):
        return None


class _Memory(ctypes.Structure):
    """The C struct nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _ask_library(library: str) -> tuple[GpuMemory, ...]:
    nvml = ctypes.CDLL(library)
    with _initialized(nvml):
        count = ctypes.c_uint()
        _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        if count.value > MOST_GPUS:
            raise ValueError(f"{count.value} GPUs")
        found = []
        for index in range(count.value):
            device, memory = ctypes.c_void_p(), _Memory()
            _check(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)))
            _check(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)))
            found.append(GpuMemory(int(memory.total), min(int(memory.free), int(memory.total))))
    return tuple(found)


@contextmanager
def _initialized(nvml: ctypes.CDLL) -> Iterator[None]:
    _check(nvml.nvmlInit_v2())
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _check(code: int) -> None:
    if code != 0:
        raise OSError(f"NVML error {code}")


def _ask_command() -> tuple[GpuMemory, ...]:
    try:
        answer = subprocess.run(_ASK, capture_output=True, text=True, timeout=_ASK_S, check=True)
        return tuple(_parsed(line) for line in answer.stdout.splitlines() if line.strip())
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def _parsed(line: str) -> GpuMemory:
    total, _, free = (part.strip() for part in line.partition(","))
    return GpuMemory(int(total) << 20, int(free) << 20 if free.isdecimal() else None)
