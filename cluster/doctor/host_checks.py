"""Checks of the machine that `longshore doctor` runs on, and of the store as it is seen from there.

The store answers with these credentials, and its clock agrees with this machine's. Nothing here needs Ray.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from cluster.config import Config
from cluster.fit.needs import min_slots, planned_arena_bytes, planned_window_bytes
from cluster.node_settings import node_name
from cluster.request import StoreOptions
from cluster.units import show_bytes, show_rate
from longshore.installation import probe
from storage.arena.arena_files import SHM_DIRECTORY, sweep
from storage.checkpoints.manifest import MANIFEST_KEY
from storage.disk.tier import DiskTier
from storage.errors import LongshoreError
from storage.host.memory import available_host_bytes, free_bytes, huge_pages, is_memory_backed
from storage.problems import install_hint
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, read_bytes
from storage.stores.open_store import open_store

Outcome = Literal["ok", "warn", "fail", "skip"]


def name_of(node: Mapping[str, Any]) -> str:
    """Return the node's name in messages."""
    return node_name(node["NodeManagerHostname"], node["NodeID"])


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    outcome: Outcome
    detail: str  # what was found, with numbers
    hint: str = ""  # what to do about it

    def as_dict(self) -> dict[str, str]:
        """Return plain strings, ready for `json.dumps`."""
        return asdict(self)


PROGRAM_TIMEOUT_S = 60.0
LITTLE_MEMORY_BYTES = 2 << 30
DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")
# asked of a process of its own: a broken driver can end the process, and a CUDA context would take device memory
TORCH_QUESTION = """
import json, warnings
warnings.simplefilter("ignore")
import torch
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))
"""


def check_packages_here() -> Iterator[Check]:
    """Check that the packages are Longshore's, and that Longshore supports this Python."""
    found = probe()
    if found["problem"]:
        yield Check("packages", "fail", str(found["problem"]))
    else:
        yield Check("packages", "ok", f"longshore {found['version']} from {Path(found['origins']['cluster']).parent}")
    yield Check("python", "ok", f"{found['python']} at {sys.executable}")


def check_settings(environ: Mapping[str, str]) -> Iterator[Check]:
    """Return the settings of the environment, and variables that only look like settings. Raises ConfigError."""
    changed = Config.from_env(environ).model_dump(exclude_unset=True)
    shown = ", ".join(f"{name}={value}" for name, value in changed.items())
    yield Check("settings", "ok", shown or "all at their defaults")
    if unknown := Config.unknown_variables(environ):
        known = "docs/settings.md lists the settings; these change nothing"
        yield Check("unknown settings", "warn", ", ".join(unknown), known)


def check_memory() -> Iterator[Check]:
    """Return the memory that a load may take, of the host or the container, whichever has less."""
    available = available_host_bytes()
    enough = available >= LITTLE_MEMORY_BYTES
    yield Check(
        "memory",
        "ok" if enough else "warn",
        f"{show_bytes(available)} available",
        "" if enough else "a worker needs about 0.3 GB before the first byte of a model, and the arena comes on top",
    )


def check_arena(config: Config, directory: str = SHM_DIRECTORY) -> Iterator[Check]:
    """Check that /dev/shm has room for the arena of these settings."""
    free = free_bytes(directory)
    available = available_host_bytes() if is_memory_backed(directory) else None
    room = free if available is None else min(free, available)
    detail = f"{show_bytes(free)} free in {directory}"
    enlarge = "enlarge it: docker --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    arena, window = planned_arena_bytes(room, config), planned_window_bytes(room, config)
    if window > room:
        yield Check(
            "/dev/shm",
            "fail",
            f"{detail}, the arena's window takes {show_bytes(window)}",
            f"set LONGSHORE_WINDOW_BYTES or LONGSHORE_ARENA_BYTES to less than {room}, or {enlarge}",
        )
        return
    slots = window // config.slot_bytes
    detail += f", arena up to {show_bytes(arena)}, window {slots} slots of {show_bytes(config.slot_bytes)}"
    detail += f", mounted with huge={huge_pages(directory)}"
    if slots < min_slots(1):
        yield Check("/dev/shm", "fail", f"{detail}, too few for one rank", enlarge)
    elif arena > room:
        hint = f"set LONGSHORE_ARENA_BYTES to less than {room}, or {enlarge}"
        yield Check("/dev/shm", "warn", f"{detail}; it will keep fewer chunks than that, for lack of memory", hint)
    elif slots < min_slots(config.cpu_ranks_per_node):
        yield Check("/dev/shm", "warn", f"{detail}, too few for {config.cpu_ranks_per_node} ranks at once", enlarge)
    else:
        yield Check("/dev/shm", "ok", detail)


def check_stale_arenas(directory: str = SHM_DIRECTORY) -> Iterator[Check]:
    """Remove arenas that no process has mapped, because a killed cluster cannot do it itself."""
    swept = sweep(directory)
    freed = sum(arena.freed_bytes for arena in swept)
    detail = f"removed {len(swept)}, {show_bytes(freed)} freed" if swept else "none"
    yield Check("stale arenas", "ok", detail)


def check_driver() -> Iterator[Check]:
    """Return NVIDIA's driver and the GPUs that it finds here."""
    program = shutil.which("nvidia-smi")
    if program is None:
        if DRIVER_VERSION_FILE.exists():
            yield Check("gpu driver", "warn", "a driver is loaded, nvidia-smi is not on PATH", "look at the image")
        else:
            yield Check("gpu driver", "skip", "no NVIDIA driver here; device='cpu' works without")
        return
    done = subprocess.run(
        [program, "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        message = (done.stderr.strip() or done.stdout.strip() or "no GPU listed").splitlines()[0]
        yield Check("gpu driver", "fail", f"nvidia-smi: {message}", "the driver is missing, too old or not passed in")
        return
    yield Check("gpu driver", "ok", f"{len(lines)} GPU: " + "; ".join(lines))


def check_torch(python: str = sys.executable) -> Iterator[Check]:
    """Check that torch is installed, and finds the GPUs that the driver finds."""
    done = subprocess.run(
        [python, "-c", TORCH_QUESTION], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False
    )
    if done.returncode:
        message = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        if "No module named 'torch'" in message:
            hint = f"only workers need it, on the nodes: {install_hint('cluster')}"
            yield Check("torch", "warn", "not installed here", hint)
        else:
            yield Check("torch", "fail", message, "import torch by hand to see the whole error")
        return
    found = json.loads(done.stdout.splitlines()[-1])
    devices = found["devices"]
    detail = f"{found['version']}, " + (", ".join(devices) if devices else "no CUDA device")
    detail += f", NCCL {found['nccl']}" if found.get("nccl") else ""
    if not devices and shutil.which("nvidia-smi"):
        build = "this is a CPU build" if found["cuda"] is None else f"built for CUDA {found['cuda']}"
        yield Check("torch", "warn", detail, f"a driver is here, but torch sees no device: {build}")
    else:
        yield Check("torch", "ok", detail)


NAME = "disk tier"


def check_disk_tier(config: Config) -> Iterator[Check]:
    """Open the disk tier as an agent does. It removes leftovers of killed writers, but never a chunk."""
    if config.disk_folder is None:
        yield Check(NAME, "skip", "off; LONGSHORE_DISK_CACHE_DIR names a folder that keeps chunks for the next cluster")
        return
    tier = DiskTier(config.disk_folder, config.disk_cache_bytes)  # its exception becomes the check's result
    try:
        free = free_bytes(tier.path)
        detail = (
            f"{len(tier)} chunks in {tier.path}, {show_bytes(tier.used_bytes)} of {show_bytes(tier.budget_bytes)}, "
            f"{show_bytes(free)} free"
        )
        if is_memory_backed(tier.path):
            yield Check(
                NAME, "warn", f"{detail}, in memory", "name a folder on a disk: this one takes the host's memory"
            )
        elif tier.budget_bytes - tier.used_bytes > free:
            yield Check(NAME, "warn", detail, "the disk is full before the budget is: set LONGSHORE_DISK_CACHE_BYTES")
        elif tier.budget_bytes < config.slot_bytes:
            yield Check(NAME, "warn", detail, "no chunk fits: raise LONGSHORE_DISK_CACHE_BYTES, or free some space")
        else:
            yield Check(NAME, "ok", detail)
    finally:
        tier.close()


READ_TIMEOUT_S = 10.0
LISTED = 1000  # objects that are listed
READ_BYTES = 16
MAX_SKEW_S = 300.0  # S3 refuses signatures that are 15 minutes off; this leaves a margin


def check_store(uri: str | None, store_args: dict[str, Any]) -> Iterator[Check]:
    """List, stat and read a few bytes under `uri`. Raises the StoreError of the first step that fails."""
    if uri is None:
        yield Check("store", "skip", "no URI was given: longshore doctor s3://bucket/model")
        return
    ref, _ = StoreOptions(**store_args).resolve(uri)
    Config.from_env().source_rules().check(ref)
    if ref.scheme == "s3" and ref.endpoint_url:
        yield check_clock(ref.endpoint_url)
    with closing(open_store(ref, read_timeout_s=READ_TIMEOUT_S)) as store:
        yield from check_objects(store)


def check_objects(store: ObjectStore) -> Iterator[Check]:
    """Return which objects are under the store's root, and whether they can be read."""
    found = list(islice(store.list(), LISTED))
    if not found:
        yield Check("store", "warn", f"{store.uri} answers and lists nothing", "is the path right?")
        return
    more = "at least " if len(found) == LISTED else ""
    yield Check("store", "ok", f"{store.uri}: {more}{len(found)} objects")
    keys = {info.key: info for info in found}
    shards = [key for key in keys if key.endswith(".safetensors")]
    wanted = MANIFEST_KEY if MANIFEST_KEY in keys else next(iter(shards), found[0].key)
    info = store.stat(wanted)
    started_s = time.monotonic()
    read_bytes(store, wanted, ByteRange(0, min(READ_BYTES, info.size_bytes)), etag=info.etag)
    took_ms = 1000 * (time.monotonic() - started_s)
    yield Check("read", "ok", f"{wanted} ({show_bytes(info.size_bytes)}) in {took_ms:.0f} ms, version {info.etag}")
    if MANIFEST_KEY in keys:
        yield Check("model", "ok", "published: chunks have digests")
    elif shards:
        hint = "`longshore publish` writes a manifest; without one a load can check lengths and versions only"
        yield Check("model", "warn", f"{len(shards)} safetensors files, no manifest", hint)
    else:
        yield Check("model", "skip", "no safetensors files directly under this URI")


def check_clock(endpoint_url: str) -> Check:
    """Return the check of the store's Date header against this machine's clock. Signatures depend on it."""
    request = urllib.request.Request(endpoint_url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=READ_TIMEOUT_S) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:  # refused without a signature, but it has a Date header
        with error:
            date = error.headers.get("Date")
    except (OSError, ValueError) as error:
        return Check("clock", "skip", f"{endpoint_url} gave no answer to compare with: {error}")
    try:
        skew_s = time.time() - parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return Check("clock", "skip", "the store sends no date")
    detail = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the store"
    if abs(skew_s) > MAX_SKEW_S:
        return Check("clock", "fail", detail, "signed requests will be refused: set this machine's clock (NTP)")
    return Check("clock", "ok", detail)


PROBE_S = 5.0
MOST_BYTES = 4 << 30  # limit of one probe
THREADS = 16  # requests in flight, as for a rank
LEAST_READ_BYTES, MOST_READ_BYTES = 1 << 18, 8 << 20
QUICK_S = 0.25  # a read that takes less is followed by one twice as long
LARGE_BYTES = 1 << 20  # smaller objects are skipped if there are larger ones


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The result of a probe of the bandwidth."""

    read_bytes: int
    elapsed_s: float
    requests: int
    threads: int
    error: str = ""  # message of the first failed read, which ended the probe

    @property
    def text(self) -> str:
        """Return the result as a sentence for people."""
        rate = show_rate(self.read_bytes, self.elapsed_s)
        return f"{rate} ({show_bytes(self.read_bytes)} in {self.elapsed_s:.1f} s, {self.threads} requests at once)"


def measure_bandwidth(
    store: ObjectStore,
    objects: Sequence[ObjectInfo],
    *,
    probe_s: float = PROBE_S,
    most_bytes: int = MOST_BYTES,
    threads: int = THREADS,
    clock: Callable[[], float] = time.monotonic,
) -> Bandwidth:
    """Read ranges of `objects` repeatedly, the largest first, until the time or the bytes are spent.

    No read begins after `probe_s`, but running ones are finished. Errors of the store are in the result.
    """
    chosen = [info for info in objects if info.size_bytes >= LARGE_BYTES] or [
        info for info in objects if info.size_bytes
    ]
    probe = _Probe(sorted(chosen, key=lambda info: -info.size_bytes), most_bytes)
    started_s = clock()

    def work() -> None:
        buffer = memoryview(bytearray(MOST_READ_BYTES))
        want_bytes = LEAST_READ_BYTES
        while clock() - started_s < probe_s and (taken := probe.take(want_bytes)) is not None:
            info, byte_range = taken
            begun_s = clock()
            try:
                store.read_into(info.key, byte_range, buffer[: byte_range.size_bytes], etag=info.etag)
            except Exception as error:  # an exception in a thread would be lost
                probe.fail(error)
                return
            probe.done(byte_range.size_bytes, clock() - started_s)
            if clock() - begun_s < QUICK_S:
                want_bytes = min(MOST_READ_BYTES, 2 * want_bytes)

    workers = [threading.Thread(target=work, name=f"longshore-probe-{n}", daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return Bandwidth(probe.read_bytes, probe.last_s, probe.requests, threads, probe.error)


class _Probe:
    """A source of ranges to read, which also counts. Thread-safe."""

    def __init__(self, objects: Sequence[ObjectInfo], most_bytes: int) -> None:
        self._lock = threading.Lock()
        self._ranges = _positions(objects)
        self._left_bytes = most_bytes if objects else 0
        self._at: tuple[ObjectInfo, int] | None = None
        self.read_bytes = 0
        self.requests = 0
        self.last_s = 0.0  # time from the start to the last byte
        self.error = ""

    def take(self, most_bytes: int) -> tuple[ObjectInfo, ByteRange] | None:
        """Return the next range, or None if there are enough or a read has failed."""
        with self._lock:
            if self._left_bytes <= 0 or self.error:
                return None
            info, start = self._at or next(self._ranges)
            end = min(info.size_bytes, start + min(most_bytes, self._left_bytes))
            self._at = (info, end) if end < info.size_bytes else None
            self._left_bytes -= end - start
            return info, ByteRange(start, end)

    def done(self, read_bytes: int, at_s: float) -> None:
        with self._lock:
            self.read_bytes += read_bytes
            self.requests += 1
            self.last_s = max(self.last_s, at_s)

    def fail(self, error: Exception) -> None:
        text = str(error) if isinstance(error, LongshoreError) else f"{type(error).__name__}: {error}"
        with self._lock:
            self.error = self.error or text


def _positions(objects: Sequence[ObjectInfo]) -> Iterator[tuple[ObjectInfo, int]]:
    while True:
        yield from ((info, 0) for info in objects)
