"""Checks that an object store answers with these credentials, and that its clock agrees with this machine's."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any

from cluster.config import Config
from cluster.doctor.host_checks import Check
from cluster.request import StoreOptions
from cluster.units import show_bytes, show_rate
from storage.checkpoints.manifest import MANIFEST_KEY
from storage.errors import LongshoreError
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, read_bytes
from storage.stores.open_store import open_store

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
