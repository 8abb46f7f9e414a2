"""The hand-written limits: plain processes and threads that do the same work as a load, and no more.

    parent --fork--> processes: memory mapped and touched, then they wait
    measured:        go --> threads: next chunk: range GET --> memory, hashed while a piece is warm, compared [, copied]
                     <-- done

No Ray, no leases, no retries, no reports: the rest is the cost of the hardware, the kernel and Python's socket and hash
calls. Chunks are those of the manifest, dealt out to the processes in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import multiprocessing
import os
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from urllib.parse import urlsplit

import blake3
import numpy as np

from bench.contenders.buffers import in_threads, read_exactly
from bench.harness.contender import BenchFile, Spec
from bench.harness.measure import measured
from storage.stores.http_get import usable_receive_buffer_bytes

ARENA_BYTES = 256 << 20  # of all processes together
SLOT_BYTES = 8 << 20
_HEAD_BYTES = 512  # of the first receive: the head of nginx's answer, and little of the body, which is copied
_MAX_HEAD_BYTES = 8192

Sink = Callable[[memoryview], object]  # gets each piece as soon as it has arrived


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk and its place in the private memory of its process."""

    file: BenchFile
    start: int
    size_bytes: int
    digest: bytes
    at: int


def load_limits(spec: Spec) -> None:
    """Do a load's work, verified and not verified, into memory that was touched before.

    Options: "ranks" processes, "connections" of each, "piece_bytes". With "arena", chunks are received in slots of
    shared memory and copied out; else straight into the private memory of each process.
    """
    _load(spec, "warm", verify=True)
    _load(spec, "warm_unverified", verify=False)


def _load(spec: Spec, case: str, *, verify: bool) -> None:
    count = int(spec.options["ranks"])
    parts = read_pieces(spec, count)
    # Forked while this process has one thread; nothing is left to import.
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count + 1)
    workers = [context.Process(target=_worker, args=(spec, pieces, verify, barrier), daemon=True) for pieces in parts]
    for worker in workers:
        worker.start()
    try:
        barrier.wait()  # their memory is mapped
        with measured(spec, case, fresh=False, watch_memory=False):
            barrier.wait()  # go
            barrier.wait()  # done
        barrier.wait()  # they were measured
    except threading.BrokenBarrierError:  # a worker prints why
        raise SystemExit(1) from None
    except BaseException:
        barrier.abort()  # or the workers would wait for ever
        raise
    finally:
        for worker in workers:
            worker.join()


def read_pieces(spec: Spec, processes: int) -> list[list[Piece]]:
    """Return each process's chunks, by the manifest in the model's folder."""
    manifest = json.loads((Path(spec.folder) / "longshore.manifest.json").read_text())
    files = {Path(file.path).name: file for file in spec.files}
    parts: list[list[Piece]] = [[] for _ in range(processes)]
    ends, turns = [0] * processes, itertools.cycle(range(processes))
    for shard in manifest["shards"]:
        bounds = itertools.pairwise((0, *shard["chunk_ends"]))
        for (start, end), digest in zip(bounds, shard["chunk_digests"], strict=True):
            part = next(turns)
            parts[part].append(Piece(files[shard["path"]], start, end - start, bytes.fromhex(digest), ends[part]))
            ends[part] += end - start
    return parts


def _worker(spec: Spec, pieces: list[Piece], verify: bool, barrier: Barrier) -> None:
    """Run one process: threads with a connection each, which take chunks until there are none."""
    threads, piece_bytes = int(spec.options["connections"]), int(spec.options["piece_bytes"])
    arena = None
    if spec.options["arena"]:
        arena = _memory(max(ARENA_BYTES // int(spec.options["ranks"]), threads * SLOT_BYTES), shared=True)
    private = _memory(sum(piece.size_bytes for piece in pieces), shared=False)
    todo = iter(pieces)
    numbers = itertools.count()

    def run() -> None:
        # Slots of this thread only: a slow one must not find its slot taken by another.
        own = range(next(numbers), len(arena) // SLOT_BYTES, threads) if arena is not None else (0,)
        slots = itertools.cycle(own)
        with contextlib.closing((_FileReader if spec.source == "file" else _HttpReader)(spec)) as reader:
            for piece in todo:  # next() of a list's iterator is atomic under the GIL
                slot = arena[(at := next(slots) * SLOT_BYTES) : at + SLOT_BYTES] if arena is not None else None
                _read_piece(reader, piece, slot, private, verify, piece_bytes)

    try:
        barrier.wait()
        barrier.wait()
        in_threads(threads, run)
        barrier.wait()
        barrier.wait()
    except BaseException:
        barrier.abort()
        raise


def _read_piece(
    reader: _HttpReader | _FileReader,
    piece: Piece,
    slot: memoryview | None,
    private: memoryview,
    verify: bool,
    piece_bytes: int,
) -> None:
    """Read one chunk, into the slot when there is one."""
    own = private[piece.at : piece.at + piece.size_bytes]
    target = own if slot is None else slot[: piece.size_bytes]
    hasher = blake3.blake3() if verify else None
    reader.read(piece.file, piece.start, target, piece_bytes, hasher.update if hasher is not None else None)
    if hasher is not None and hasher.digest() != piece.digest:
        raise ValueError(f"wrong digest of {piece.file.key} at {piece.start}")
    if target is not own:
        np.copyto(np.frombuffer(own, np.uint8), np.frombuffer(target, np.uint8))  # releases the GIL


def _memory(size_bytes: int, *, shared: bool) -> memoryview:
    """Return memory that was touched."""
    flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, size_bytes), flags=flags)
    if not shared:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    for at in range(0, size_bytes, mmap.PAGESIZE):
        view[at] = 1
    return view


class _HttpReader:
    """One kept-alive connection. No retries and no checks but the status and the length."""

    def __init__(self, spec: Spec) -> None:
        parts = urlsplit(spec.endpoint)
        self._host, self._bucket = parts.netloc, spec.bucket
        self._head = bytearray(_MAX_HEAD_BYTES)
        # No timeout: with one, Python would poll before every receive and could not wait for whole pieces.
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if buffer_bytes := usable_receive_buffer_bytes():  # as ours: fewer wakes, less processor time
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self._whole_pieces = int(socket.MSG_WAITALL)
        if spec.source == "https":
            context = ssl.create_default_context(cafile=spec.ca_bundle)
            self._socket = context.wrap_socket(self._socket, server_hostname=parts.hostname)
            self._whole_pieces = 0  # TLS gives one record at a time

    def read(self, file: BenchFile, start: int, target: memoryview, piece_bytes: int, sink: Sink | None) -> None:
        end = start + len(target)
        lines = [f"GET /{self._bucket}/{file.key} HTTP/1.1", f"Host: {self._host}", f"Range: bytes={start}-{end - 1}"]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        received = self._receive_head(target)
        given = 0
        while received < len(target):
            upto = min(given + piece_bytes, len(target))
            count = self._socket.recv_into(target[received:upto], upto - received, self._whole_pieces)
            if not count:
                raise ConnectionError("the answer ended early")
            received += count
            if received == upto:
                if sink is not None:
                    sink(target[given:upto])
                given = upto
        if sink is not None and given < len(target):
            sink(target[given:])

    def _receive_head(self, target: memoryview) -> int:
        """Read the head of the answer. Returns the number of bytes of the body that came with it, now in `target`."""
        filled = 0
        with memoryview(self._head) as head:
            while (end := self._head.find(b"\r\n\r\n", 0, filled)) < 0:
                if filled == len(head):
                    raise ConnectionError("no end of the answer's head")
                count = self._socket.recv_into(head[filled : filled + _HEAD_BYTES])
                if not count:
                    raise ConnectionError("no answer")
                filled += count
            text = bytes(head[:end]).decode("latin-1")
            if not text.startswith("HTTP/1.1 206 ") or f"content-length: {len(target)}\r" not in text.lower() + "\r":
                raise ConnectionError(f"not the range: {text.splitlines()[0]}")
            body = filled - end - 4
            target[:body] = head[end + 4 : filled]
            return body

    def close(self) -> None:
        self._socket.close()


class _FileReader:
    """The open files of one thread, read by positioned reads."""

    def __init__(self, spec: Spec) -> None:
        self._files = {file.key: os.open(file.path, os.O_RDONLY) for file in spec.files}

    def read(self, file: BenchFile, start: int, target: memoryview, piece_bytes: int, sink: Sink | None) -> None:
        for at in range(0, len(target), piece_bytes):
            piece = target[at : at + piece_bytes]
            read_exactly(self._files[file.key], piece, start + at)
            if sink is not None:
                sink(piece)

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
