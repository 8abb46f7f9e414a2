"""The ceiling and the hand-written limits: plain processes and threads that do the same work as a load, and no more.

    parent --fork--> processes: memory mapped (and touched where the mode says so), then they wait
    measured:        go --> threads: next chunk: range GET --> memory, hashed while a piece is warm, compared [, copied]
                     <-- done

No Ray, no leases, no retries, no reports: what is left is what the hardware, the kernel and Python's socket and hash
calls cost. Chunks are those of the manifest, dealt out to the processes in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash

from bench.contender import Case, Memory, sources_of
from bench.measure import measured
from bench.raw_reader import RawReader, Sink, open_reader
from bench.sample import MODEL
from bench.spec import BenchFile, Spec

ARENA_BYTES = 256 << 20  # of all processes together, as in our own contenders
SLOT_BYTES = 8 << 20
MANIFEST = "longshore.manifest.json"

_MEMORIES: tuple[Memory, ...] = ("fresh", "recycled")
# for the limits that end in private memory, each verified and not
KEEPING_CASES = tuple(
    Case(
        memory if verify else f"{memory}_unverified",
        "verified" if verify else "not verified",
        checks=verify,
        keeps=True,
        memory=memory,
        sources=sources_of(memory, verify),
        options={"verify": verify, "memory": memory},
    )
    for memory in _MEMORIES
    for verify in (True, False)
)
# connections are of each process
SETTINGS = tuple(
    {"connections": connections, "piece_bytes": piece_bytes}
    for connections in (2, 4)
    for piece_bytes in (512 << 10, 8 << 20)
)


@dataclass(frozen=True, slots=True)
class Work:
    """What a limit does with the bytes. Arena memory was always touched before."""

    arena: bool = False  # received in slots of shared memory
    private: bool = False  # at the end in private memory: received there, or copied there out of the arena
    recycled: bool = False  # that private memory was touched before
    verify: bool = False  # digests of all chunks computed and compared


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk and where it goes in the private memory of its process."""

    file: BenchFile
    start: int
    size_bytes: int
    digest: bytes
    at: int


def run_limit(spec: Spec, work: Work) -> None:
    """Measure `work` on the spec's model. Options: processes, connections (of each), piece_bytes, model."""
    options = spec.options
    count = int(options.get("processes", 2))
    hash_name, parts = read_pieces(spec, count)
    new_hash = {"blake3": blake3.blake3, "xxh3_128": xxhash.xxh3_128}[hash_name] if work.verify else None
    arena_bytes = int(options.get("arena_bytes", ARENA_BYTES)) // count
    # Forked while this process has one thread; nothing is left to import.
    context = multiprocessing.get_context("fork")
    workers: list[tuple[Any, Connection]] = []
    for pieces in parts:
        ours, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(spec, work, pieces, new_hash, arena_bytes, theirs), daemon=True)
        process.start()
        theirs.close()  # so that the death of the worker is the end of the line
        workers.append((process, ours))
    _expect("ready", workers)
    touched = sum(piece.size_bytes for pieces in parts for piece in pieces) if work.recycled else 0
    with measured(spec, touched_before_bytes=touched) as m:
        for _, line in workers:
            line.send("go")
        _expect("done", workers)
        m.extra["hash"] = hash_name if work.verify else ""
    for process, line in workers:
        line.send("end")
        process.join()


def read_pieces(spec: Spec, processes: int) -> tuple[str, list[list[Piece]]]:
    """The name of the hash, and each process's chunks, by the manifest in the model's folder."""
    published = Path(spec.folder).parent / spec.options.get("model", MODEL)
    manifest = json.loads((published / MANIFEST).read_text())
    files = {Path(file.path).name: file for file in spec.files}
    parts: list[list[Piece]] = [[] for _ in range(processes)]
    ends = [0] * processes
    turn = 0
    for shard in manifest["shards"]:
        bounds = itertools.pairwise((0, *shard["chunk_ends"]))
        for (start, end), digest in zip(bounds, shard["chunk_digests"], strict=True):
            part = turn % processes
            parts[part].append(Piece(files[shard["path"]], start, end - start, bytes.fromhex(digest), ends[part]))
            ends[part] += end - start
            turn += 1
    return manifest["hash"], parts


def _expect(word: str, workers: list[tuple[Any, Connection]]) -> None:
    """Wait for the word of every worker. Raises RuntimeError when one says something else or dies."""
    for _, line in workers:
        try:
            said = line.recv()
        except EOFError:
            said = "died"
        if said != word:
            raise RuntimeError(f"a worker of the limit: {said}")


def _worker(
    spec: Spec, work: Work, pieces: list[Piece], new_hash: Callable[[], Any] | None, arena_bytes: int, line: Connection
) -> None:
    """One process: threads with a connection each, which take chunks until there are none."""
    threads = int(spec.options.get("connections", 4))
    private_bytes = sum(piece.size_bytes for piece in pieces)
    arena = _memory(max(arena_bytes, threads * SLOT_BYTES), shared=True, touched=True) if work.arena else None
    private = _memory(private_bytes, shared=False, touched=work.recycled) if work.private else None
    piece_bytes = int(spec.options.get("piece_bytes", 1 << 20))
    todo = iter(pieces)
    lock = threading.Lock()
    failures: list[str] = []

    def run(number: int) -> None:
        # Slots of this thread only: one that is held up must not find its slot taken by another.
        slots = itertools.cycle(range(number, len(arena) // SLOT_BYTES, threads) if arena is not None else (0,))
        try:
            with contextlib.closing(open_reader(spec)) as reader:
                while (piece := _next(todo, lock)) is not None:
                    slot = arena[(at := next(slots) * SLOT_BYTES) : at + SLOT_BYTES] if arena is not None else None
                    _do(reader, piece, slot, private, new_hash, piece_bytes)
        except Exception as error:  # said to the parent, whatever it is
            failures.append(f"{type(error).__name__}: {error}")

    line.send("ready")
    if line.recv() == "go":
        running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        line.send(failures[0] if failures else "done")
        line.recv()  # memory stays until it was looked at


def _next(todo: Iterator[Piece], lock: threading.Lock) -> Piece | None:
    with lock:
        return next(todo, None)


def _do(
    reader: RawReader,
    piece: Piece,
    slot: memoryview | None,
    private: memoryview | None,
    new_hash: Callable[[], Any] | None,
    piece_bytes: int,
) -> None:
    """One chunk, into the slot when there is one."""
    own = None if private is None else private[piece.at : piece.at + piece.size_bytes]
    if slot is not None:
        target = slot[: piece.size_bytes]
    elif own is not None:
        target = own
    else:
        raise ValueError("neither arena nor private memory")
    hasher = new_hash() if new_hash is not None else None
    sink: Sink | None = hasher.update if hasher is not None else None
    reader.read(piece.file, piece.start, target, piece_bytes, sink)
    if hasher is not None and hasher.digest() != piece.digest:
        raise ValueError(f"wrong digest of {piece.file.key} at {piece.start}")
    if own is not None and target is not own:
        np.copyto(np.frombuffer(own, np.uint8), np.frombuffer(target, np.uint8))  # releases the GIL


def _memory(size_bytes: int, *, shared: bool, touched: bool) -> memoryview:
    flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, size_bytes), flags=flags)
    if not shared:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    if touched:
        for at in range(0, size_bytes, mmap.PAGESIZE):
            view[at] = 1
    return view
