"""A conversion: parts of the new files, each put together from ranges of the old ones, in bounded memory.

    Source (places of numbers) --lay_out--> files, parts
    each part, in a thread of one of the worker processes, on this machine or on the nodes of a cluster:
        reads of the source --> strided copies (and casts) --> part --> CheckpointWriter: digests, store
    records of all parts --> commit: other files, index, manifest

A thread has one part and one buffer of `READ_BYTES`, whatever the size of the model. A conversion that was interrupted
continues: `begin_save` finds its journal. If the files of the source have the same versions, parts that the store has
are neither read nor sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

import numpy as np

from actors.saving.reporting import SaveReporter
from actors.saving.writer import Begun, CheckpointWriter, begin_save
from cluster.converting.assembly import Copy, copies_of, coverage_problems
from cluster.converting.source import Source, SourceTensor
from cluster.errors import ConvertError, SaveError, SaveRefused
from cluster.saving.shards import DEFAULT_SHARD_BYTES, ShardLayout, TensorSpec, lay_out
from cluster.telemetry.saves import PUBLISHING, WRITING
from storage.checkpoints.safetensors_header import DTYPE_BITS, HeaderTensor
from storage.problems import Problems, quote
from storage.publishing.one_object import PublishProgress
from storage.publishing.saves import PartRecord
from storage.store_ref import Credentials, StoreRef
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore
from storage.stores.open_store import open_store
from storage.stores.requests import RetryPolicy, with_retries

READ_BYTES = 8 << 20  # at most, at once, of a thread
THREADS = 4  # of a worker process
MAX_GROWTH = (
    16  # of the result, in times of the source. A small hostile file can name the same bytes any number of times
)
SMALL_RESULT_BYTES = 64 << 20  # a result that may have this size in any case
# Safetensors' name of a dtype that values can be cast to -> torch's
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_POLL_S = 0.5

Progress = Callable[[PublishProgress], object]
PartPlace = tuple[int, int]  # number of the file, and of the part in it
Unit = tuple[PartPlace, ...]  # parts that one thread makes, one after the other


@dataclass(frozen=True, slots=True)
class Place:
    """How a worker process opens a store. It travels through a pipe to child processes only."""

    ref: StoreRef
    credentials: Credentials | None = field(repr=False)
    read_timeout_s: float = 30.0

    def open(self) -> ObjectStore:
        """Return the open store, which the caller closes."""
        return open_store(self.ref, self.credentials, read_timeout_s=self.read_timeout_s)


@dataclass(frozen=True)
class Conversion:
    """What is to be done: for each file its layout, and where the numbers of its tensors are."""

    layouts: tuple[ShardLayout, ...]
    tensors: Mapping[str, SourceTensor]  # by name, with the dtypes of the source
    etags: Mapping[str, str | None]  # of the files of the source

    @property
    def parts(self) -> list[PartPlace]:
        """Return shard and number of each part, in order."""
        return [(shard, part) for shard, one in enumerate(self.layouts) for part in range(len(one.parts))]

    @property
    def files(self) -> set[str]:
        """Return the files of the source that have numbers of the tensors."""
        return {piece.file for tensor in self.tensors.values() for piece in tensor.pieces}

    def contents(self) -> str:
        """Return a digest of where each number comes from, with the versions of the files, for `begin_save`.

        A store that names no versions makes it a random text, so that nothing of an earlier conversion is kept.
        """
        etags = {file: self.etags[file] for file in sorted(self.files)}
        if None in etags.values():
            return secrets.token_hex(16)
        digest = hashlib.sha256(json.dumps(etags).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(repr((name, tensor.dtype, tensor.pieces)).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PartDone:
    """The result of one part. Its record is None if it was not written, because numbers in it are refused."""

    place: PartPlace
    record: PartRecord | None
    read_bytes: int
    written_bytes: int
    nans: tuple[tuple[str, str], ...] = ()  # tensors that must not have NaN and do, each with a file


# Does parts somewhere and calls the function for each, one call at a time. It gets the places of source and result.
RunParts = Callable[[Place, Place, Conversion, Begun, Sequence[Unit], Callable[[PartDone], object]], None]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of a conversion."""

    source: str
    dest: str
    format: str  # of the source
    revision: str  # of the manifest; "" for a plan
    shards: int  # files
    tensors: int
    size_bytes: int  # of the tensors
    read_bytes: int  # from the source
    written_bytes: int
    reused_bytes: int  # of parts that an interrupted conversion had written
    seconds: float
    workers: int
    files: tuple[str, ...]  # copied beside the weights
    dtypes: dict[str, int]  # dtype -> number of tensors in the result
    cast: int  # tensors that have another dtype than in the source
    source_files: int  # that have numbers of the tensors
    verified: bool = False  # read back and compared
    dry_run: bool = False  # nothing was written

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def plan_conversion(
    source: Source,
    listing: Mapping[str, ObjectInfo],
    *,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    chunk_bytes: int,
) -> Conversion:
    """Return the plan of a conversion, after all checks that need no bytes of weights.

    Args:
        source: What a format has found.
        listing: Objects of the source by key.
        dtype: Safetensors' name of the dtype that floating-point tensors get. None: they keep theirs.
        max_shard_bytes: Most bytes of tensors in a file.
        chunk_bytes: Most bytes of a chunk.

    Raises:
        ConvertError: Parts of tensors are missing, overlap, or are outside their files, or the tensors cannot be
            stored, or repeat the same bytes without end. All problems are listed.
    """
    problems = Problems()
    for tensor in source.tensors:
        for problem in (*coverage_problems(tensor), *_outside(tensor, listing)):
            problems.add(problem)
    if problems:
        raise ConvertError(f"this {source.format} checkpoint is not whole: {problems}", problems=len(problems))
    specs = [TensorSpec(tensor.name, _target(tensor.dtype, dtype), tensor.shape) for tensor in source.tensors]
    try:
        layouts = lay_out(specs, revision="0", max_shard_bytes=max_shard_bytes, chunk_bytes=chunk_bytes)
    except SaveRefused as error:
        raise ConvertError(error.message, hint=error.hint, **error.details) from error
    conversion = Conversion(
        layouts,
        {tensor.name: tensor for tensor in source.tensors},
        {key: info.etag for key, info in listing.items()},
    )
    stored = sum(listing[file].size_bytes for file in conversion.files)
    wanted = sum(layout.size_bytes for layout in layouts)
    if wanted > MAX_GROWTH * stored + SMALL_RESULT_BYTES:
        raise ConvertError(
            f"the result would have {wanted} bytes, its source has {stored}; at most {MAX_GROWTH} times is possible",
            hint="its tensors repeat the same numbers, as torch's expand() does; save contiguous() copies of them",
        )
    return conversion


def _target(dtype: str, wanted: str | None) -> str:
    return wanted if wanted is not None and dtype in FLOATS else dtype


def _outside(tensor: SourceTensor, listing: Mapping[str, ObjectInfo]) -> list[str]:
    """Return the files that are missing, or too short for their part of a tensor."""
    found = []
    bits = DTYPE_BITS[tensor.dtype]
    for piece in tensor.pieces:
        if not math.prod(piece.shape):
            continue
        strides = piece.strides
        count = math.prod(piece.shape)
        if strides is not None:
            count = 1 + sum((size - 1) * step for size, step in zip(piece.shape, strides, strict=True))
        info = listing.get(piece.file)
        end = piece.offset_bytes + -(-count * bits // 8)
        if info is None:
            found.append(f"{piece.file!r} is missing")
        elif piece.offset_bytes < 0 or (strides and min(strides) < 0) or end > info.size_bytes:
            found.append(f"{piece.file!r} ends at {info.size_bytes}, and {tensor.name!r} is at [.., {end}) of it")
    return found


class PartMaker:
    """Assembles and writes the parts of one process. Each thread has a buffer and counters of its own."""

    def __init__(self, source: ObjectStore, dest: ObjectStore, conversion: Conversion, begun: Begun) -> None:
        self._store = source
        self._conversion = conversion
        self._writer = CheckpointWriter(dest, conversion.layouts, begun)
        self._policy = RetryPolicy()
        self._local = threading.local()
        self._refused = False  # NaN was found, so nothing will be published

    def make(self, place: PartPlace) -> PartDone:
        """Assemble a part and write it. After the first NaN the others are only read, so that every one is found."""
        self._local.read_bytes, self._local.nans = 0, {}
        data = self._assemble(*place)
        nans = tuple(self._local.nans)
        self._refused = self._refused or bool(nans)
        record = None if self._refused else self._writer.write_part(*place, data)
        return PartDone(place, record, self._local.read_bytes, 0 if record is None else len(data), nans)

    def _assemble(self, shard: int, number: int) -> memoryview:
        """Return the bytes of one part, the header included if it begins the file."""
        layout = self._conversion.layouts[shard]
        part = layout.parts[number]
        data = np.zeros(part.size_bytes, np.uint8)
        if part.start < len(layout.header):
            data[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
        for stored in layout.tensors:
            start, end = max(stored.start, part.start), min(stored.end, part.end)
            if start < end:
                self._fill(data, part, stored, start, end)
        return data.data

    def _fill(self, data: np.ndarray[Any, Any], part: ByteRange, stored: HeaderTensor, start: int, end: int) -> None:
        tensor = self._conversion.tensors[stored.name]
        if DTYPE_BITS[tensor.dtype] % 8:  # one dense piece (`coverage_problems`)
            (piece,) = tensor.pieces
            place = piece.offset_bytes + start - stored.start
            for one in ByteRange(place, place + end - start).split(READ_BYTES):
                at = start - part.start + one.start - place
                data[at : at + one.size_bytes] = self._read(piece.file, one)
            return
        to_size = DTYPE_BITS[stored.dtype] // 8
        # Chunks end at any byte, so the first and the last element may be in two parts.
        low, high = (start - stored.start) // to_size, -(-(end - stored.start) // to_size)
        aligned = stored.start + low * to_size == start and stored.start + high * to_size == end
        target, place = (data, start - part.start) if aligned else (np.zeros((high - low) * to_size, np.uint8), 0)
        limit = max(READ_BYTES * DTYPE_BITS[tensor.dtype] // DTYPE_BITS[stored.dtype] // 2, 16)
        for copy in copies_of(tensor, low, high, place, to_size, limit):
            self._copy(target, copy, tensor, stored.dtype)
        if not aligned:
            skipped = start - (stored.start + low * to_size)
            data[start - part.start : end - part.start] = target[skipped : skipped + end - start]

    def _copy(self, target: np.ndarray[Any, Any], copy: Copy, tensor: SourceTensor, to_dtype: str) -> None:
        dtype = tensor.dtype
        raw = self._read(copy.file, ByteRange(copy.offset_bytes, copy.offset_bytes + copy.read_bytes))
        size, to_size = DTYPE_BITS[dtype] // 8, DTYPE_BITS[to_dtype] // 8
        values = np.ndarray(copy.shape, f"V{size}", raw.data, 0, copy.from_strides)
        if tensor.refuses_nan and has_nan(values, dtype):
            self._local.nans[tensor.name, copy.file] = None
        if dtype != to_dtype:
            values = _cast(np.ascontiguousarray(values), dtype, to_dtype)
        np.ndarray(copy.shape, f"V{to_size}", target.data, copy.to_offset_bytes, copy.to_strides)[...] = values

    def _read(self, key: str, place: ByteRange) -> np.ndarray[Any, Any]:
        buffer: np.ndarray[Any, Any] | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < place.size_bytes:
            buffer = self._local.buffer = np.empty(max(READ_BYTES, place.size_bytes), np.uint8)
        view = buffer[: place.size_bytes]
        etag = self._conversion.etags[key]
        with_retries(lambda: self._store.read_into(key, place, view.data, etag=etag), self._policy)
        self._local.read_bytes += place.size_bytes
        return view


def has_nan(values: np.ndarray[Any, Any], dtype: str) -> bool:
    """Return whether raw elements of a dtype, as safetensors names it, have a NaN."""
    if dtype == "BF16":  # not of numpy: all bits of the exponent, and some of the fraction
        return bool(((values.view("<u2") & 0x7FFF) > 0x7F80).any())
    return dtype in FLOATS and bool(np.isnan(values.view(f"<f{DTYPE_BITS[dtype] // 8}")).any())


def _cast(values: np.ndarray[Any, Any], dtype: str, to_dtype: str) -> np.ndarray[Any, Any]:
    """Return the values in another floating-point dtype, rounded as torch rounds."""
    import torch

    plain = torch.from_numpy(values.view(np.uint8).reshape(-1).copy()).view(getattr(torch, FLOATS[dtype]))
    cast = plain.to(getattr(torch, FLOATS[to_dtype])).view(torch.uint8).numpy()
    return cast.view(f"V{DTYPE_BITS[to_dtype] // 8}").reshape(values.shape)


def units_of(parts: Sequence[PartPlace], begun: Begun) -> list[Unit]:
    """Return the parts as units: each alone, or all of a file in order if the store needs that."""
    if not begun.in_order:
        return [(place,) for place in parts]
    return [tuple(unit) for _, unit in itertools.groupby(parts, key=lambda place: place[0])]


def run_here(
    source: ObjectStore,
    dest: ObjectStore,
    conversion: Conversion,
    begun: Begun,
    units: Sequence[Unit],
    finished: Callable[[PartDone], object],
) -> None:
    """Make parts in threads of this process. `finished` is called from any thread, one call at a time."""
    maker = PartMaker(source, dest, conversion, begun)
    lock, broken = threading.Lock(), threading.Event()

    def make(unit: Unit) -> None:
        try:
            for place in unit:
                if broken.is_set():
                    return
                done = maker.make(place)
                with lock:
                    finished(done)
        except BaseException:
            broken.set()
            raise

    with ThreadPoolExecutor(THREADS, thread_name_prefix="longshore-convert") as pool:
        try:
            for done in [pool.submit(make, unit) for unit in units]:
                done.result()
        except BaseException:
            broken.set()  # of an interrupt, too: the pool waits for its threads
            raise


def _work(
    pipe: Connection, source: Place, dest: Place, conversion: Conversion, begun: Begun, units: Sequence[Unit]
) -> None:
    """Make parts in a worker process. It sends a PartDone for each, then None or the error."""
    try:
        with contextlib.closing(source.open()) as reads, contextlib.closing(dest.open()) as writes:
            run_here(reads, writes, conversion, begun, units, pipe.send)
            pipe.send(None)
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(error)


def run_conversion(
    source: Place,
    dest: Place,
    found: Source,
    conversion: Conversion,
    *,
    hash_name: str = "blake3",
    chunk_bytes: int,
    workers: int = 1,
    run_parts: RunParts | None = None,
    progress: Progress | None = None,
    reporter: SaveReporter | None = None,
) -> ConvertReport:
    """Write the checkpoint in safetensors, and publish it.

    Args:
        source: Where the old files are.
        dest: Where the new ones go. A revision that is there stays loadable until the new one is complete.
        found: The source as its format has described it.
        conversion: From `plan_conversion`.
        hash_name: Digest of the chunks.
        chunk_bytes: Size of chunks with which the conversion was planned.
        workers: Number of processes. With 1 this process does the work.
        run_parts: Does the work elsewhere, with as many workers. Default: `run_in_processes`.
        progress: Called with a `PublishProgress`.
        reporter: Reports the conversion to a coordinator.

    Raises:
        ConvertError: Weights have NaN where the optimizer keeps them. What was written is removed.
        SaveError: A worker process died.
        SaveConflict: Somebody else writes to the destination.
        StoreError: A store cannot be read or written. ObjectChanged: a file of the source was replaced.
    """
    begin_s = time.monotonic()
    with contextlib.closing(source.open()) as reads:
        extras = {
            name: _read_whole(reads, key, conversion.etags[key], RetryPolicy())
            for name, key in found.extra_files.items()
        }
    with contextlib.closing(dest.open()) as writes:
        layouts, begun = begin_save(
            writes,
            conversion.layouts,
            hash_name=hash_name,
            chunk_bytes=chunk_bytes,
            contents=conversion.contents(),
        )
        now = replace(conversion, layouts=layouts)
        writer = CheckpointWriter(writes, layouts, begun)
        writer.note(begun.known)
        known = {(record.shard, record.part) for record in begun.known}
        reused = sum(layouts[shard].parts[number].size_bytes for shard, number in known)
        counts = Counter(done=reused)
        total = sum(layout.size_bytes for layout in layouts)
        nans: set[tuple[str, str]] = set()
        if reporter is not None:
            reporter.enter(
                WRITING,
                lambda: {"total_bytes": total, "written_bytes": counts["written"], "reused_bytes": reused},
            )

        def finished(part: PartDone) -> None:
            shard, number = part.place
            counts.update(
                read=part.read_bytes, written=part.written_bytes, done=layouts[shard].parts[number].size_bytes
            )
            nans.update(part.nans)
            if part.record is not None:
                writer.note([part.record])
            if progress is not None:
                progress(PublishProgress(counts["done"], total, layouts[shard].file))

        parts = [place for place in now.parts if place not in known]
        run = run_parts or partial(run_in_processes, workers=workers)
        run(source, dest, now, begun, units_of(parts, begun), finished)
        if nans:
            writer.abandon()
            problems = Problems(f"{quote(name)} has NaN in {quote(file)}" for name, file in sorted(nans))
            raise ConvertError(
                f"weights that the optimizer keeps are no numbers: {problems}",
                hint="the training had failed when this was saved; convert an earlier step",
                problems=len(problems),
            )
        if reporter is not None:
            reporter.enter(PUBLISHING)
        manifest = writer.commit(extra_files=extras)
    return replace(
        report_of(source, dest, found, conversion, workers=workers),
        revision=manifest.revision,
        read_bytes=counts["read"],
        written_bytes=counts["written"],
        reused_bytes=reused,
        seconds=time.monotonic() - begin_s,
        dry_run=False,
    )


def report_of(source: Place, dest: Place, found: Source, conversion: Conversion, *, workers: int) -> ConvertReport:
    """Return the report of a plan, before anything is read or written."""
    stored = [tensor for layout in conversion.layouts for tensor in layout.tensors]
    return ConvertReport(
        source=source.ref.uri,
        dest=dest.ref.uri,
        format=found.format,
        revision="",
        shards=len(conversion.layouts),
        tensors=len(stored),
        size_bytes=sum(tensor.end - tensor.start for tensor in stored),
        read_bytes=0,
        written_bytes=0,
        reused_bytes=0,
        seconds=0.0,
        workers=workers,
        files=tuple(sorted(found.extra_files)),
        dtypes=dict(sorted(Counter(tensor.dtype for tensor in stored).items())),
        cast=sum(conversion.tensors[tensor.name].dtype != tensor.dtype for tensor in stored),
        source_files=len(conversion.files),
        dry_run=True,
    )


def run_in_processes(
    source: Place,
    dest: Place,
    conversion: Conversion,
    begun: Begun,
    units: Sequence[Unit],
    finished: Callable[[PartDone], object],
    *,
    workers: int,
) -> None:
    """Make parts in worker processes of this machine. Raises SaveError when one dies, and what one raised."""
    workers = min(workers, len(units))
    if workers <= 1:
        with contextlib.closing(source.open()) as reads, contextlib.closing(dest.open()) as writes:
            run_here(reads, writes, conversion, begun, units, finished)
        return
    with _processes(source, dest, conversion, begun, [units[at::workers] for at in range(workers)]) as pipes:
        open_pipes = list(pipes)
        while open_pipes:
            ready = set(wait_for(open_pipes, timeout=_POLL_S))
            for pipe in [one for one in open_pipes if one in ready]:
                try:
                    message = pipe.recv()
                except EOFError:
                    raise SaveError(
                        "a worker process died, maybe for lack of memory",
                        hint="run the same command again, with fewer workers; it continues where this one stopped",
                    ) from None
                if isinstance(message, BaseException):
                    raise message
                if message is None:
                    open_pipes.remove(pipe)
                else:
                    finished(message)


@contextlib.contextmanager
def _processes(
    source: Place, dest: Place, conversion: Conversion, begun: Begun, shares: Sequence[Sequence[Unit]]
) -> Iterator[list[Connection]]:
    """Start a process for each share of the parts. All are ended when the block ends."""
    context = multiprocessing.get_context("spawn")
    started, pipes = [], []
    try:
        for share in shares:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(theirs, source, dest, conversion, begun, share), daemon=True)
            process.start()
            theirs.close()
            started.append(process)
            pipes.append(ours)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in started:
            process.terminate()
        for process in started:
            process.join()
            process.close()


def _read_whole(store: ObjectStore, key: str, etag: str | None, policy: RetryPolicy) -> bytes:
    buffer = bytearray(with_retries(lambda: store.stat(key), policy).size_bytes)
    place = ByteRange(0, len(buffer))
    with_retries(lambda: store.read_into(key, place, memoryview(buffer), etag=etag), policy)
    return bytes(buffer)
