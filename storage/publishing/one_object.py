"""The reading, checking and copying of one object, for publish and verify.

    digest_object    reads once: digest of the whole and of each chunk, and compares the store's own checksum
    bad_chunks       reads again: yields the chunks whose digest differs

A publish handles each object in one of three ways:

    no destination:  read + hash --> the store's checksum agrees, or read + hash again
    destination:     read + hash + write --> as above --> read + hash what the destination has
    finished before: read + hash --> same digest as then; only to record the row maxima of its weights

AmaxScan finds the largest absolute value of each row of a shard's weights while the shard is read:

    bytes, in order, of any lengths --> elements of each weight --> rows --> the largest magnitude of each

Without its sign bit, a larger float is a larger integer, and NaNs are above infinity. So magnitudes are compared as
integers of the stored width, and a row with a NaN has the maximum NaN.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.checkpoints.amax import AMAX_KEY, Amax, is_recorded, read_amax
from storage.checkpoints.manifest import WRITTEN, BadTensor, Manifest, ManifestFile, ManifestShard, chunks_digest
from storage.checkpoints.model_index import OtherFile, Tensor
from storage.checksum import HASH_NAMES, digest_of, new_hasher
from storage.errors import IntegrityError, InvalidAmax, ManifestMismatch
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, RangeReader, ranges_of
from storage.stores.requests import RetryPolicy, with_retries

# Compared at a time, so that the copy without signs stays in the cache like the bytes just read.
BLOCK_BYTES = 128 << 10
_WORDS: dict[str, Any] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<u2"),
    "F32": np.dtype("<u4"),
    "F64": np.dtype("<u8"),
}

Words = NDArray[Any]


class AmaxScan:
    """The row maxima found while one shard is read once. Needs the memory of one element for each row."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """Set the weights of the shard, with dtypes of WEIGHT_DTYPES and in order of start."""
        self._weights = [weight for weight in weights if weight.size_bytes]
        self._most = [np.zeros(_rows(weight), _WORDS[weight.dtype]) for weight in self._weights]
        self._at = 0  # bytes of the shard that were added
        self._next = 0  # the first weight that is not complete
        self._part = b""  # beginning of an element that was split between two views

    def add(self, view: memoryview) -> None:
        """Take the next bytes of the shard."""
        first, self._at = self._at, self._at + len(view)
        while self._next < len(self._weights):
            weight = self._weights[self._next]
            low, high = max(weight.start, first), min(weight.end, self._at)
            if low < high:
                self._take(low - weight.start, view[low - first : high - first])
            if weight.end > self._at:
                return
            self._next += 1

    def rows(self) -> dict[str, Amax]:
        """Return the maxima of each weight by name, after the whole shard: float32, in the shape of its rows."""
        return {
            weight.name: _as_float32(weight.dtype, most).reshape(weight.shape[:-1])
            for weight, most in zip(self._weights, self._most, strict=True)
        }

    def _take(self, offset: int, view: memoryview) -> None:
        """Compare the bytes of the current weight that begin at `offset` in it."""
        word = self._most[self._next].dtype
        if self._part:
            missing = word.itemsize - len(self._part)
            self._part += bytes(view[:missing])
            view, offset = view[missing:], offset + missing
            if len(self._part) < word.itemsize:
                return
            self._compare(offset // word.itemsize - 1, np.frombuffer(self._part, word))
            self._part = b""
        whole = len(view) - len(view) % word.itemsize
        self._compare(offset // word.itemsize, np.frombuffer(view[:whole], word))
        self._part = bytes(view[whole:])

    def _compare(self, first: int, values: Words) -> None:
        """Compare elements of the current weight, from number `first`: end of a row, whole rows, start of a row."""
        most, columns = self._most[self._next], self._weights[self._next].shape[-1]
        row, column = divmod(first, columns)
        if column and len(values):
            end = min(columns - column, len(values))
            most[row] = max(most[row], _largest(values[:end].reshape(1, -1))[0])
            values, row = values[end:], row + 1
        count = len(values) // columns
        if count:
            most[row : row + count] = _largest(values[: count * columns].reshape(count, columns))
        rest = values[count * columns :]
        if len(rest):
            most[row + count] = _largest(rest.reshape(1, -1))[0]


def _largest(values: Words) -> Words:
    """Return the largest magnitude in each row of a (rows, columns) array."""
    without_sign = values.dtype.type((1 << (8 * values.dtype.itemsize - 1)) - 1)
    count, columns = BLOCK_BYTES // values.dtype.itemsize, values.shape[1]
    step = max(1, count // columns)
    found = np.zeros(len(values), values.dtype)
    for first in range(0, len(values), step):
        rows = values[first : first + step]
        so_far = found[first : first + step]
        for column in range(0, columns, count):
            np.maximum(so_far, (rows[:, column : column + count] & without_sign).max(axis=1), out=so_far)
    return found


def _rows(weight: Tensor) -> int:
    count = 1
    for size in weight.shape[:-1]:
        count *= size
    return count


def _as_float32(dtype: str, words: Words) -> Amax:
    """Convert words to float32: exact, except that F64 is rounded. Every NaN becomes Python's NaN."""
    if dtype == "BF16":
        found = (words.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "F32":
        found = words.view(np.float32).copy()
    else:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            found = words.view(np.float16 if dtype == "F16" else np.float64).astype(np.float32)
    found[np.isnan(found)] = np.nan
    return found


class Recorded:
    """The recorded maxima of one published model. Empty if its manifest lists none."""

    def __init__(self, manifest: Manifest) -> None:
        entry = next((file for file in manifest.files if file.path == AMAX_KEY), None)
        self._file = None
        self._weights: dict[str, list[Tensor]] = defaultdict(list)  # by path of the shard
        self._found: dict[str, Amax] = {}
        if entry is None:
            return
        self._file = OtherFile(AMAX_KEY, entry.size_bytes, f"{manifest.hash}:{entry.digest}")
        for t in manifest.tensors:
            if is_recorded(t):
                weight = Tensor(t.name, t.dtype, t.shape, t.shard, t.start, t.end)
                self._weights[manifest.shards[t.shard].path].append(weight)

    def weights_of(self, path: str) -> list[Tensor]:
        """Return the weights of a shard whose maxima must be compared."""
        return self._weights.get(path, [])

    def add(self, rows: dict[str, Amax]) -> None:
        """Add the maxima found in a shard whose chunks are all as published."""
        self._found.update(rows)

    def differences(self, store: ObjectStore, policy: RetryPolicy) -> list[BadTensor]:
        """Return the weights whose maxima differ from the recorded ones. Raises StoreError."""
        if self._file is None:
            return []
        shapes = {
            weight.name: weight.shape
            for weights in self._weights.values()
            for weight in weights
            if weight.name in self._found
        }
        try:
            recorded = read_amax(store, self._file, shapes, policy)
        except (InvalidAmax, ManifestMismatch, IntegrityError) as error:
            return [BadTensor(AMAX_KEY, "", "the largest values of weights", error.message)]
        return [
            BadTensor(AMAX_KEY, name, *_first_difference(recorded[name], found))
            for name, found in self._found.items()
            if not np.array_equal(recorded[name], found, equal_nan=True)
        ]


def _first_difference(recorded: Amax, found: Amax) -> tuple[str, str]:
    one, other = recorded.reshape(-1), found.reshape(-1)
    row = int(np.flatnonzero(~((one == other) | (np.isnan(one) & np.isnan(other))))[0])
    return f"{one[row]} as the largest value of row {row}", f"{other[row]}"


STORE_CHECKSUMS = ("crc64nvme", "crc32c", "crc32", "sha256", "md5")  # in order of preference, cheapest first

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ObjectDigests:
    """The digests from one reading of an object."""

    whole: str  # hex
    chunks: tuple[str, ...]  # hex, one for each range
    store_checksum: str | None  # name of the store's own checksum that agreed; None if it has none

    def comparable(self, entry: ManifestFile, hash_name: str) -> str:
        """Return the digest that the entry's must equal."""
        if isinstance(entry, ManifestShard) and entry.checked_by == WRITTEN:
            return chunks_digest(hash_name, self.chunks)
        return self.whole


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A range whose bytes are not the expected ones."""

    key: str
    chunk: int  # number within the object
    start: int
    end: int
    expected: str  # hex digests
    found: str


def store_checksum(info: ObjectInfo) -> str | None:
    """Return the name of a whole-object checksum that the store has and that can be computed here, or None."""
    return next((name for name in STORE_CHECKSUMS if name in info.checksums and name in HASH_NAMES), None)


def digest_object(
    reader: RangeReader,
    store: ObjectStore,
    info: ObjectInfo,
    ranges: Sequence[ByteRange],
    hash_name: str,
    *,
    sink: Callable[[memoryview], None] | None = None,
    on_bytes: OnBytes,
) -> ObjectDigests:
    """Read the object once, in the version that `info` describes. `sink` gets every range in order.

    Raises IntegrityError if the store's own checksum differs, and the store's errors.
    """
    whole = new_hasher(hash_name)
    name = store_checksum(info)
    check = new_hasher(name) if name else None
    chunks: list[str] = []
    # Closed at once if the sink fails, because the next try may need the ring of buffers.
    with closing(reader.read(store, info.key, ranges, etag=info.etag)) as views:
        for _, view in views:
            whole.update(view)
            chunks.append(digest_of(hash_name, view).hex())
            if check is not None:
                check.update(view)
            if sink is not None:
                sink(view)
            on_bytes(len(view))
    if name and check is not None and check.hexdigest() != info.checksums[name].lower():
        raise IntegrityError(
            f"the bytes that were read do not have the {name} that the store keeps for the object",
            hint="the object is damaged in the store, or was damaged on its way; try again, else upload it again",
            uri=store.uri,
            key=info.key,
            expected=info.checksums[name],
            found=check.hexdigest(),
        )
    return ObjectDigests(whole.hexdigest(), tuple(chunks), name)


def bad_chunks(
    reader: RangeReader,
    store: ObjectStore,
    info: ObjectInfo,
    ranges: Sequence[ByteRange],
    hash_name: str,
    expected: Sequence[str],
    *,
    on_bytes: OnBytes,
) -> Generator[BadChunk, None, None]:
    """Read the object and yield every chunk whose digest is not the expected one."""
    with closing(reader.read(store, info.key, ranges, etag=info.etag)) as views:
        for number, view in views:
            found = digest_of(hash_name, view).hex()
            on_bytes(len(view))
            if found != expected[number]:
                place = ranges[number]
                yield BadChunk(info.key, number, place.start, place.end, expected[number], found)


COPY_ATTEMPTS = 2  # of one whole object after writing failed; each read inside has its own retries


@dataclass(frozen=True, slots=True)
class PublishProgress:
    """One moment of a publish."""

    done_bytes: int  # read and hashed; every reading counts
    total_bytes: int  # of all planned readings
    key: str  # the object that was just read from


@dataclass(frozen=True, slots=True)
class PublishJob:
    """One object to publish."""

    source: ObjectInfo  # with the store's checksums
    ends: tuple[int, ...]  # of the object's chunks
    is_shard: bool
    weights: tuple[Tensor, ...] = ()  # of a shard, those whose row maxima are recorded, ordered by start
    finished: ManifestFile | None = None  # entry of an earlier publish; the object is read only for row maxima


class ObjectPublisher:
    """Publishes objects from several threads, and counts what it reads and writes."""

    def __init__(
        self,
        source: ObjectStore,
        dest: ObjectStore | None,
        hash_name: str,
        policy: RetryPolicy,
        progress: Callable[[PublishProgress], None] | None,
    ) -> None:
        """Set the stores. With `dest=None` the objects are published in place and not written."""
        self._source = source
        self._dest = dest
        self._hash_name = hash_name
        self._policy = policy
        self._progress = progress
        self._lock = threading.Lock()
        self.read_bytes = 0  # every reading counts
        self.copied_bytes = 0
        self.total_bytes = 0  # of all planned readings
        self.amax: dict[str, Amax] = {}  # row maxima by name of the weight

    def foresee(self, jobs: Sequence[PublishJob]) -> None:
        """Set how many bytes will be read, for the progress."""
        copying = self._dest is not None
        self.total_bytes = sum(
            job.source.size_bytes
            * (1 if job.finished is not None else (1 if store_checksum(job.source) else 2) + copying)
            for job in jobs
        )

    def publish(self, job: PublishJob, reader: RangeReader) -> ManifestFile:
        """Return the manifest's entry of one object that was read and checked. Raises IntegrityError, StoreError."""
        ranges = ranges_of(job.ends)
        if job.finished is not None:
            return self._read_again(job, job.finished, ranges, reader)
        if self._dest is None:
            digests, stored = self._digest(job, ranges, reader, None), job.source
            self._check_source(job, ranges, digests, reader)
        else:
            digests, stored = self._checked_copy(self._dest, job, ranges, reader)
        checked_by = f"store:{digests.store_checksum}" if digests.store_checksum else "read-twice"
        entry = ManifestFile(
            path=job.source.key,
            size_bytes=job.source.size_bytes,
            etag=stored.etag,
            source_etag=job.source.etag,
            checked_by=checked_by + ("+read-back" if self._dest is not None else ""),
            digest=digests.whole,
        )
        if not job.is_shard:
            return entry
        return ManifestShard(**entry.model_dump(), chunk_ends=job.ends, chunk_digests=digests.chunks)

    def _read_again(
        self, job: PublishJob, finished: ManifestFile, ranges: Sequence[ByteRange], reader: RangeReader
    ) -> ManifestFile:
        """Read an object of an earlier publish again, to record its row maxima, and return its entry."""
        found = self._digest(job, ranges, reader, None).comparable(finished, self._hash_name)
        if found != finished.digest:
            raise IntegrityError(
                "an object differs from what an earlier publish read",
                hint="publish again with force, which ignores the earlier publish",
                uri=self._source.uri,
                key=job.source.key,
                expected=finished.digest,
                found=found,
            )
        return finished

    def _checked_copy(
        self, dest: ObjectStore, job: PublishJob, ranges: Sequence[ByteRange], reader: RangeReader
    ) -> tuple[ObjectDigests, ObjectInfo]:
        """Copy and compare. A copy that may be wrong is removed, so that nobody uses it."""
        once_more = replace(self._policy, attempts=COPY_ATTEMPTS)
        digests, stored = with_retries(lambda: self._copy(dest, job, ranges, reader), once_more)
        try:
            self._check_source(job, ranges, digests, reader)
            self._compare(dest, stored, ranges, digests, reader, "the copy differs from its source")
        except IntegrityError:
            with_retries(lambda: dest.delete(job.source.key), self._policy)
            raise
        return digests, stored

    def _check_source(
        self, job: PublishJob, ranges: Sequence[ByteRange], digests: ObjectDigests, reader: RangeReader
    ) -> None:
        if digests.store_checksum is None:
            self._compare(self._source, job.source, ranges, digests, reader, "two readings of the same object differ")

    def _digest(
        self,
        job: PublishJob,
        ranges: Sequence[ByteRange],
        reader: RangeReader,
        sink: Callable[[memoryview], None] | None,
    ) -> ObjectDigests:
        scan = AmaxScan(job.weights)

        def scanned(view: memoryview) -> None:
            scan.add(view)
            if sink is not None:
                sink(view)

        digests = digest_object(
            reader,
            self._source,
            job.source,
            ranges,
            self._hash_name,
            sink=scanned if job.weights else sink,
            on_bytes=lambda count: self._count(count, job.source.key),
        )
        with self._lock:
            self.amax.update(scan.rows())
        return digests

    def _copy(
        self, dest: ObjectStore, job: PublishJob, ranges: Sequence[ByteRange], reader: RangeReader
    ) -> tuple[ObjectDigests, ObjectInfo]:
        """Write the object to the destination while it is read. Return its digests and the destination's facts."""
        key = job.source.key
        if len(ranges) <= 1:
            parts: list[bytes] = []
            digests = self._digest(job, ranges, reader, lambda view: parts.append(bytes(view)))
            dest.put(key, b"".join(parts))
        else:
            with dest.upload(key) as upload:
                digests = self._digest(job, ranges, reader, upload.write)
                upload.complete()
        with self._lock:
            self.copied_bytes += job.source.size_bytes
        stored = dest.stat(key)
        if stored.size_bytes != job.source.size_bytes:
            raise IntegrityError(
                "the copy has another size than its source",
                hint="nothing was published; check that nobody else writes to the destination, then publish again",
                uri=dest.uri,
                key=key,
                expected=job.source.size_bytes,
                found=stored.size_bytes,
            )
        return digests, stored

    def _compare(
        self,
        store: ObjectStore,
        info: ObjectInfo,
        ranges: Sequence[ByteRange],
        digests: ObjectDigests,
        reader: RangeReader,
        problem: str,
    ) -> None:
        """Read once more. Raises IntegrityError, which names the first chunk with another digest."""
        found = bad_chunks(
            reader,
            store,
            info,
            ranges,
            self._hash_name,
            digests.chunks,
            on_bytes=lambda count: self._count(count, info.key),
        )
        with closing(found):
            bad = next(found, None)
        if bad is not None:
            raise IntegrityError(
                problem,
                hint="nothing was published; check disks, memory and network, then publish again",
                uri=store.uri,
                key=bad.key,
                chunk=bad.chunk,
                range=str(ByteRange(bad.start, bad.end)),
                expected=bad.expected,
                found=bad.found,
            )

    def _count(self, size_bytes: int, key: str) -> None:
        with self._lock:
            self.read_bytes += size_bytes
            if self._progress is not None:
                # A copy that is written twice is read more often than planned.
                total = max(self.total_bytes, self.read_bytes)
                self._progress(PublishProgress(self.read_bytes, total, key))
