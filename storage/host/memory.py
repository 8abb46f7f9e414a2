"""Memory of this host, of its containers, of a folder's file system and of one process; pages mapped before use.

What a process takes comes out of several pools at once: the host's memory, and that of each control group around it
that has a limit (a container, a pod, a batch job, a service), of version 1 and 2, also where `memory.high` would only
throttle. Processes that share a pool know it by the same id, whatever namespace they look from.

Memory that a process has to itself, cheaply: what it holds apart from shared memory, now and at its highest.

Private pages and mapped files (libraries), from the kernel's counters: some 15 microseconds, whatever the size. The
proportional set size says it a little better (a library's pages are divided by those who map them) but walks the page
tables for it: 15 to 20 ms of CPU per mapped GB, with the address space locked. So this is what is sampled while bytes
stream, and a slight overestimate. The kernel's own high-water mark counts the arena in, which many processes share.

How much memory the GPUs of this host have, and have free, and which driver: asked of it, without a CUDA context.

A context would take hundreds of megabytes of the very memory that is asked about. The driver's management library
(NVML) answers in milliseconds where it is installed; its command, nvidia-smi, takes a good part of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """Memory that several processes share."""

    pool_id: str
    free_bytes: int  # that can be taken without swapping
    total_bytes: int
    reserve_bytes: int = 0  # of the free ones, to be left by whoever asked: above that it would be ended


def memory_pools(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> tuple[MemoryPool, ...]:
    """The host's memory, then that of each control group around this process that has a limit.

    Raises OSError when the kernel does not tell.
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
    """Memory that can be taken without swapping: what the host has, or the tightest limit leaves.

    Raises OSError when the kernel does not tell.
    """
    return min(pool.free_bytes for pool in memory_pools(proc, cgroup))


def _groups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, int]]:
    """(folder, version) of this process's control group and of each around it, as far as they can be seen."""
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
        # In a namespace of its own, or where only its own part is mounted, the path leads nowhere: the root is it.
        if ".." in parts or not root.joinpath(*parts).is_dir():
            parts = []
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth]), version


def _limited(folder: Path, version: int, boot: str) -> MemoryPool | None:
    """What the control group's limits leave, page cache counted as free; None without a limit."""
    names = {
        1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
        2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    }
    limit_names, used_name, cache_name = names[version]
    limits = [int(text) for name in limit_names if (text := _text(folder / name)).isdigit()]  # else "max": none
    used = _text(folder / used_name)
    if not limits or not used.isdigit():
        return None
    stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    # Of groups around it that cannot be seen from here.
    limits += [int(stat[name]) for name in ("hierarchical_memory_limit",) if stat.get(name, "").isdigit()]
    limit = min(limits)
    free = limit - int(used) + int(stat.get(cache_name, 0))
    return MemoryPool(f"cgroup{version} {boot} {folder.stat().st_ino}", max(0, min(limit, free)), limit)


def _text(path: Path) -> str:
    """What a file of the kernel says; empty where there is none. Names of folders in it may be any bytes."""
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""


def free_bytes(directory: str | os.PathLike[str]) -> int:
    """Bytes an ordinary user can still write in the file system of `directory`."""
    info = os.statvfs(directory)
    return info.f_bavail * info.f_frsize


def is_memory_backed(directory: str | os.PathLike[str]) -> bool:
    """Whether files in `directory` live in memory (tmpfs) and so count against the host's, too."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n")[:-1]:  # names of folders may be any bytes
        left, _, right = line.partition(b" - ")
        if left.split()[2].decode() == wanted:
            return right.split()[0] in (b"tmpfs", b"ramfs", b"devtmpfs")
    return False


def own_bytes(pid: int | None = None) -> int:
    """Resident memory apart from shared memory; of the calling process when `pid` is None. 0 where nothing tells."""
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
    """The most that the calling process ever held, shared memory included, since `reset_high_water`; 0 if unknown."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    except (OSError, ValueError, IndexError):
        return 0


def reset_high_water() -> None:
    """Where the kernel does not allow it, the mark is of the process's whole life."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as mark:
        mark.write("5")


class PeakMemory:
    """The calling process's memory since now. `kept_bytes` of it, to be reused or given back, are not counted before
    the first `sample`.
    """

    def __init__(self, kept_bytes: int = 0) -> None:
        self.baseline_bytes = self.peak_bytes = max(0, own_bytes() - kept_bytes)

    def sample(self) -> None:
        """Look now. Whoever wants the peak of something calls this while it goes on."""
        self.peak_bytes = max(self.peak_bytes, own_bytes())


_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 has no name for it
_PAGE = mmap.PAGESIZE

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # releases the GIL, which mmap.madvise does not
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise.restype = ctypes.c_int


def populate(address: int, size_bytes: int) -> bool:
    """Make the pages that hold `[address, address + size_bytes)` present and writable; what is in them stays.

    Every page of the range must belong to a writable mapping of the caller's. False where the kernel cannot: then
    nothing is lost but time. Releases the GIL.
    """
    if size_bytes <= 0:
        return True
    start = address - address % _PAGE
    end = -(-(address + size_bytes) // _PAGE) * _PAGE
    return bool(_madvise(start, end - start, _MADV_POPULATE_WRITE) == 0)


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Where a writable buffer begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


NVML = "libnvidia-ml.so.1"
MOST_GPUS = 1024  # a count above it is not believed
_ASK = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """One GPU's."""

    total_bytes: int
    free_bytes: int | None = None  # when it was asked; None: not known


def gpu_memory(library: str = NVML) -> tuple[GpuMemory, ...]:
    """Of each GPU of the host, in the order of the driver; empty where there is no driver, or it does not say."""
    try:
        return _ask_library(library)
    except (OSError, AttributeError, ValueError):
        return _ask_command()


@dataclass(frozen=True, slots=True)
class GpuDriver:
    """NVIDIA's, on this host."""

    version: str  # "580.95.05"
    cuda: str  # "13.0": the newest CUDA that it runs


def gpu_driver(library: str = NVML) -> GpuDriver | None:
    """None where there is no driver, or it does not work."""
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
    """nvmlMemory_t."""

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
