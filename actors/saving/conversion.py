"""A conversion: parts of the new files, each put together from ranges of the old ones, in bounded memory.

    Source (places of numbers) --lay_out--> files, parts
    each part, in a thread of one of the worker processes:
        reads of the source --> strided copies (and casts) --> part --> CheckpointWriter: digests, store
    records of all parts --> commit: other files, index, manifest

A thread has one part and one buffer of `READ_BYTES`, whatever the size of the model. A conversion that was interrupted
continues: `begin_save` finds its journal, and what the store has is not sent again.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

import numpy as np

from actors.saving.writer import Begun, CheckpointWriter, PartsDiffer, begin_save
from cluster.converting.assembly import Copy, copies_of, coverage_problems
from cluster.converting.source import Source, SourceTensor
from cluster.errors import ConvertError, SaveError
from cluster.saving.shards import DEFAULT_SHARD_BYTES, ShardLayout, TensorSpec, lay_out
from storage.checkpoints.safetensors_header import DTYPE_BITS, HeaderTensor
from storage.problems import Problems
from storage.publishing.one_object import PublishProgress
from storage.publishing.saves import PartRecord
from storage.store_ref import Credentials, StoreRef
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore
from storage.stores.open_store import open_store
from storage.stores.requests import RetryPolicy, with_retries

READ_BYTES = 8 << 20  # at most, at once, of a thread
THREADS = 4  # of a worker process
# Safetensors' name of a dtype that values can be cast to -> torch's
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_POLL_S = 0.5

Progress = Callable[[PublishProgress], object]


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
    def parts(self) -> list[tuple[int, int]]:
        """Return shard and number of each part, in order."""
        return [(shard, part) for shard, one in enumerate(self.layouts) for part in range(len(one.parts))]


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
        ConvertError: Parts of tensors are missing, overlap, or are outside their files. All problems are listed.
        SaveRefused: The tensors cannot be stored.
    """
    problems = Problems()
    for tensor in source.tensors:
        for problem in (*coverage_problems(tensor), *_outside(tensor, listing)):
            problems.add(problem)
    if problems:
        raise ConvertError(f"this {source.format} checkpoint is not whole: {problems}", problems=len(problems))
    specs = [TensorSpec(tensor.name, _target(tensor.dtype, dtype), tensor.shape) for tensor in source.tensors]
    layouts = lay_out(specs, revision="0", max_shard_bytes=max_shard_bytes, chunk_bytes=chunk_bytes)
    tensors = {tensor.name: tensor for tensor in source.tensors}
    return Conversion(layouts, tensors, {key: info.etag for key, info in listing.items()})


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


class Assembler:
    """The parts of one process. Each thread has a buffer of its own."""

    def __init__(self, store: ObjectStore, conversion: Conversion, policy: RetryPolicy | None = None) -> None:
        self._store = store
        self._conversion = conversion
        self._policy = policy or RetryPolicy()
        self._local = threading.local()
        self._lock = threading.Lock()
        self.read_bytes = 0

    def assemble(self, shard: int, number: int) -> memoryview:
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
            self._copy(target, copy, tensor.dtype, stored.dtype)
        if not aligned:
            skipped = start - (stored.start + low * to_size)
            data[start - part.start : end - part.start] = target[skipped : skipped + end - start]

    def _copy(self, target: np.ndarray[Any, Any], copy: Copy, dtype: str, to_dtype: str) -> None:
        raw = self._read(copy.file, ByteRange(copy.offset_bytes, copy.offset_bytes + copy.read_bytes))
        size, to_size = DTYPE_BITS[dtype] // 8, DTYPE_BITS[to_dtype] // 8
        values = np.ndarray(copy.shape, f"V{size}", raw.data, 0, copy.from_strides)
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
        with self._lock:
            self.read_bytes += place.size_bytes
        return view


def _cast(values: np.ndarray[Any, Any], dtype: str, to_dtype: str) -> np.ndarray[Any, Any]:
    """Return the values in another floating-point dtype, rounded as torch rounds."""
    import torch

    plain = torch.from_numpy(values.view(np.uint8).reshape(-1).copy()).view(getattr(torch, FLOATS[dtype]))
    cast = plain.to(getattr(torch, FLOATS[to_dtype])).view(torch.uint8).numpy()
    return cast.view(f"V{DTYPE_BITS[to_dtype] // 8}").reshape(values.shape)


def run_parts(
    source: ObjectStore,
    dest: ObjectStore,
    conversion: Conversion,
    begun: Begun,
    parts: Sequence[tuple[int, int]],
    finished: Callable[[list[PartRecord], int], object],
) -> tuple[int, int, int]:
    """Assemble and write parts in threads. Returns bytes read, written and reused.

    `finished` is called with new records and the bytes of their parts, from any thread, one call at a time.
    """
    assembler, writer = Assembler(source, conversion), CheckpointWriter(dest, conversion.layouts, begun)
    lock, broken = threading.Lock(), threading.Event()

    def one(place: tuple[int, int]) -> None:
        if broken.is_set():
            return
        try:
            shard, number = place
            part = conversion.layouts[shard].parts[number]
            writer.write(shard, part.start, assembler.assemble(shard, number))
            with lock:
                finished(writer.take_records(), part.size_bytes)
        except BaseException:
            broken.set()
            raise

    with ThreadPoolExecutor(THREADS, thread_name_prefix="longshore-convert") as pool:
        try:
            for done in [pool.submit(one, place) for place in parts]:
                done.result()
        except BaseException:
            broken.set()  # of an interrupt, too: the pool waits for its threads
            raise
    return assembler.read_bytes, writer.written_bytes, writer.reused_bytes


def _work(
    pipe: Connection, source: Place, dest: Place, conversion: Conversion, begun: Begun, parts: list[tuple[int, int]]
) -> None:
    """Run parts of the conversion in a worker process. It sends "records" messages, then one "done" or "error"."""
    try:
        with contextlib.ExitStack() as stack:
            stores = []
            for place in (source, dest):
                stores.append(place.open())
                stack.callback(stores[-1].close)

            def finished(records: list[PartRecord], size_bytes: int) -> None:
                pipe.send(("records", records, size_bytes))

            pipe.send(("done", *run_parts(stores[0], stores[1], conversion, begun, parts, finished)))
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(("error", error))


def run_conversion(
    source: Place,
    dest: Place,
    found: Source,
    conversion: Conversion,
    *,
    hash_name: str = "blake3",
    chunk_bytes: int,
    workers: int = 1,
    progress: Progress | None = None,
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
        progress: Called with a `PublishProgress`.

    Raises:
        SaveError: A worker process died.
        SaveConflict: Somebody else writes to the destination.
        StoreError: A store cannot be read or written. ObjectChanged: a file of the source was replaced.
    """
    begin_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        stores = []
        for place in (source, dest):
            stores.append(place.open())
            stack.callback(stores[-1].close)
        extras = {
            name: _read_whole(stores[0], key, conversion.etags[key], RetryPolicy())
            for name, key in found.extra_files.items()
        }
        for anew in (False, True):
            layouts, begun = begin_save(
                stores[1], conversion.layouts, hash_name=hash_name, chunk_bytes=chunk_bytes, anew=anew
            )
            now = Conversion(layouts, conversion.tensors, conversion.etags)
            writer = CheckpointWriter(stores[1], layouts, begun)
            try:
                read, written, reused = _all_parts(source, dest, stores, now, begun, writer, workers, progress)
                break
            except PartsDiffer:
                if anew:
                    raise
        manifest = writer.commit(extra_files=extras)
    plan = report_of(source, dest, found, conversion, workers=workers)
    return replace(
        plan,
        revision=manifest.revision,
        read_bytes=read,
        written_bytes=written,
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
        source_files=len({piece.file for tensor in found.tensors for piece in tensor.pieces}),
        dry_run=True,
    )


def _all_parts(
    source: Place,
    dest: Place,
    stores: Sequence[ObjectStore],
    conversion: Conversion,
    begun: Begun,
    writer: CheckpointWriter,
    workers: int,
    progress: Progress | None,
) -> tuple[int, int, int]:
    total, done = sum(layout.size_bytes for layout in conversion.layouts), 0

    def finished(records: list[PartRecord], size_bytes: int) -> None:
        nonlocal done
        writer.note(records)
        done += size_bytes
        if progress is not None:
            key = conversion.layouts[records[0].shard].file if records else ""
            progress(PublishProgress(done, total, key))

    parts = conversion.parts
    if workers == 1:
        return run_parts(stores[0], stores[1], conversion, begun, parts, finished)
    counts = [0, 0, 0]
    with _processes(source, dest, conversion, begun, [parts[at::workers] for at in range(workers)]) as pipes:
        open_pipes = list(pipes)
        while open_pipes:
            ready = set(wait_for(open_pipes, timeout=_POLL_S))
            for pipe in [one for one in open_pipes if one in ready]:
                try:
                    kind, *values = pipe.recv()
                except EOFError:
                    raise SaveError(
                        "a worker process died, maybe for lack of memory",
                        hint="run the same command again, with fewer workers; it continues where this one stopped",
                    ) from None
                if kind == "records":
                    finished(*values)
                elif kind == "error":
                    raise values[0]
                else:
                    counts = [one + other for one, other in zip(counts, values, strict=True)]
                    open_pipes.remove(pipe)
    return counts[0], counts[1], counts[2]


@contextlib.contextmanager
def _processes(
    source: Place, dest: Place, conversion: Conversion, begun: Begun, shares: Sequence[list[tuple[int, int]]]
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
