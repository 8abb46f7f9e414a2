"""A read whose answers break off continues at the byte it reached, and restarts when the bytes are wrong."""

from __future__ import annotations

import itertools
import mmap
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rank import chunk_fetcher
from actors.rank.chunk_fetcher import ChunkFetcher, FetchedChunk, StageClock, next_source
from cluster.messages import PEER_READ, LeaseOrder, PeerSource
from cluster.planning.packed_plan import SharedTables
from storage.checkpoints.model_index import ChunkTable, Shard
from storage.checksum import digest_of
from storage.errors import (
    IntegrityError,
    ObjectChanged,
    ObjectNotFound,
    PeerUnavailable,
    RangeMismatch,
    ReadEnded,
    StoreUnavailable,
)
from storage.peers import Peer
from storage.peers.peer_client import PeerClient
from storage.store_ref import Credentials, StoreRef
from storage.stores.local import LocalStore
from storage.stores.object_store import PIECE_BYTES, ByteRange, MemoryStore, ObjectStore
from storage.stores.requests import ReadLimit
from storage.stores.s3.store import S3Store
from tests.support.faulty_stores import FailingStore
from tests.support.node_simulation import NO_TENSORS
from tests.support.scripted_server import ScriptedServer, answer

pytestmark = pytest.mark.slow

SIZE_BYTES = 2 * PIECE_BYTES + PIECE_BYTES // 2
DATA = np.random.default_rng(1).integers(0, 256, SIZE_BYTES + 200, np.uint8).tobytes()
CHUNK = ByteRange(100, 100 + SIZE_BYTES)
ATTEMPTS = 4
PATIENCE_S = 60.0
NEVER_S = 1000.0

Cut = Callable[[ByteRange], bytes]  # the part of the range that is sent before the connection ends


def tables(etag: str | None = "v1", digest: bool = True) -> SharedTables:
    found = digest_of("blake3", DATA[CHUNK.start : CHUNK.end])
    table = ChunkTable(
        np.zeros(1, np.int32),
        np.array([CHUNK.start], np.int64),
        np.array([CHUNK.end], np.int64),
        "blake3" if digest else None,
        np.frombuffer(found, np.uint8).reshape(1, -1) if digest else None,
    )
    return SharedTables((Shard("model", len(DATA), etag),), table, NO_TENSORS)


class BreakingServer:
    """Serves `DATA`. The n-th of `cuts` changes the n-th answer; later answers are whole."""

    def __init__(self, cuts: Sequence[Cut] = (), reset: bool = False) -> None:
        self._cuts, self._reset = list(cuts), reset
        self.asked: list[ByteRange] = []
        self.server = ScriptedServer(self._play)

    def store(self) -> S3Store:
        ref = StoreRef("s3", "bucket", "", endpoint_url=f"http://127.0.0.1:{self.server.port}", region="us-east-1")
        return S3Store(ref, Credentials("AKIDTEST", "secret"), read_timeout_s=NEVER_S)

    def close(self) -> None:
        self.server.close()

    def _play(self, sock: socket.socket, _: int) -> None:
        found = re.search(r"Range: bytes=(\d+)-(\d+)", self.server.heads[-1])
        assert found is not None
        asked = ByteRange(int(found[1]), int(found[2]) + 1)
        self.asked.append(asked)
        sock.sendall(answer("206 P", head_of(asked)))
        if not self._cuts:
            sock.sendall(DATA[asked.start : asked.end])
            return
        body = self._cuts.pop(0)(asked)
        sock.sendall(body)
        if len(body) < asked.size_bytes:
            if self._reset:  # closing with a zero linger time sends RST
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise OSError


def head_of(asked: ByteRange) -> dict[str, str]:
    return {
        "Content-Length": str(asked.size_bytes),
        "Content-Range": f"bytes {asked.start}-{asked.end - 1}/{len(DATA)}",
        "ETag": '"v1"',
    }


def first(count: int) -> Cut:
    """Return that many bytes, or all but one."""
    return lambda asked: DATA[asked.start : asked.start + min(count, asked.size_bytes - 1)]


def flipped(count: int, at: int) -> Cut:
    def cut(asked: ByteRange) -> bytes:
        body = bytearray(DATA[asked.start : asked.start + count])
        body[at] ^= 1
        return bytes(body)

    return cut


@contextmanager
def fetching(store: ObjectStore, shared: SharedTables) -> Iterator[ChunkFetcher]:
    fetcher = ChunkFetcher(store, shared, ATTEMPTS)
    fetcher.pause = lambda *_: None
    try:
        yield fetcher
    finally:
        fetcher.close()
        store.close()


def fetch(
    store: ObjectStore, shared: SharedTables, splits: Sequence[int] = (), deadline_s: float = NEVER_S
) -> tuple[FetchedChunk, bytes, StageClock]:
    memory = bytearray(b"\xaa" * SIZE_BYTES)
    ends = [0, *sorted(splits), SIZE_BYTES]
    parts = [memoryview(memory)[start:end] for start, end in itertools.pairwise(ends)]
    with fetching(store, shared) as fetcher:
        clock = fetcher.clock()
        result = fetcher.fetch(LeaseOrder("lease", 0, 0, deadline_s), parts, clock)
    return result, bytes(memory), clock


@pytest.mark.parametrize(("pinned", "kind"), [(True, ObjectChanged), (False, RangeMismatch)])
def test_a_file_truncated_in_the_middle_of_a_chunk_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool, kind: type[Exception]
) -> None:
    store = LocalStore(tmp_path)
    etag = store.put("model", DATA).etag
    left_bytes, preadv = CHUNK.start + PIECE_BYTES + 7, os.preadv

    def truncate_first(file: int, buffers: list[memoryview], offset: int) -> int:
        if offset > CHUNK.start:
            os.truncate(tmp_path / "model", left_bytes)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", truncate_first)
    result, memory, _ = fetch(store, tables(etag if pinned else None))
    assert result.commit is None
    assert result.failure is not None
    assert isinstance(result.failure.error, kind)
    assert result.retries["short_read"] == 1
    assert memory[PIECE_BYTES + 7 :] == b"\xaa" * (SIZE_BYTES - PIECE_BYTES - 7)


@pytest.mark.parametrize(("status", "cause", "times"), [(425, "peer_waits", 8), (504, "peer_late", 4)])
def test_a_node_that_waits_for_the_store_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, status: int, cause: str, times: int
) -> None:
    """The rank asks for four times as long as a chunk takes, and leaves the store its time in each lease.

    It asks twice as long a node that waits for a third one.
    """
    begun_s, asked, comes_at = time.monotonic(), 0, 3

    def read(*about: Any, **_: Any) -> None:
        nonlocal asked
        asked += 1
        if asked != comes_at:
            raise PeerUnavailable("it does not have the chunk yet", status=status)
        at = CHUNK.start
        for piece in about[-1]:
            piece[:] = DATA[at : at + len(piece)]
            at += len(piece)

    monkeypatch.setattr(PeerClient, "read", read)
    monkeypatch.setattr(chunk_fetcher, "time", SimpleNamespace(monotonic=lambda: begun_s + 5.0 * asked))
    source = PeerSource(Peer("10.0.0.1", 1, "agent"), "llama", b"key")
    memory = bytearray(SIZE_BYTES)
    with fetching(MemoryStore({"model": DATA}), tables(None)) as fetcher:

        def fetch_once(lease_id: str) -> FetchedChunk:
            order = LeaseOrder(lease_id, 0, 0, 60.0, peers=(source,))
            return fetcher.fetch(order, [memoryview(memory)], fetcher.clock())

        first = fetch_once("lease")
        assert first.commit is not None
        assert (first.commit.source, first.retries) == (PEER_READ, {})
        assert memory == DATA[CHUNK.start : CHUNK.end]
        # It took 15 s. Each lease is returned after a third of its 60 s.
        assert fetch_once("returned") == fetch_once("returned") == FetchedChunk("returned")
        assert asked == 3 + 2 * 20 / 5
        while (last := fetch_once("last")).commit is None:
            assert last == FetchedChunk("last")
        assert (last.commit.source, last.retries) == ("", {cause: 1})
        assert last.commit.failed_peers == (() if cause == "peer_waits" else (0,))
        assert asked == 3 + times * 15 / 5


def test_the_next_home_is_asked_only_if_the_home_cannot_read() -> None:
    """A home without the chunk had it, and nobody reads it in its place."""
    peers = [Peer("10.0.0.1", 1, f"{at}") for at in range(3)]
    sources = tuple(PeerSource(peer, "llama", b"key", in_place=at == 2) for at, peer in enumerate(peers))
    lease = LeaseOrder("lease", 0, 0, 60.0, peers=sources)
    assert next_source(lease, 0, "peer_without_chunk") == 1
    assert next_source(lease, 1, "peer_without_chunk") == 3
    assert next_source(lease, 1, "peer_slow") == 2
    assert next_source(lease, 2, "peer_slow") == 3


@pytest.mark.parametrize("arrived_bytes", [0, 12_345])
def test_a_stopped_fetch_finishes_only_reads_with_bytes(arrived_bytes: int) -> None:
    """A rank that has its own chunks leaves with its fetches for others, so that no rank fetches them again."""
    memory = bytearray(SIZE_BYTES)
    cuts: list[Cut] = [lambda asked: DATA[asked.start : asked.start + arrived_bytes]]
    with closing(BreakingServer(cuts)) as server, fetching(server.store(), tables()) as fetcher:
        draining = threading.Event()
        fetcher.pause = lambda *_: draining.set()
        fetcher.is_void = lambda _, arrived: draining.is_set() and not arrived
        result = fetcher.fetch(LeaseOrder("lease", 0, 0, NEVER_S), [memoryview(memory)], fetcher.clock())
    assert (result.commit is not None) == bool(arrived_bytes)
    assert result.failure is None
    starts = [asked.start - CHUNK.start for asked in server.asked]
    assert starts == ([0, arrived_bytes] if arrived_bytes else [0])


@settings(max_examples=25, deadline=None)
@given(
    points=st.sets(st.integers(1, SIZE_BYTES - 1) | st.sampled_from([PIECE_BYTES, 2 * PIECE_BYTES + 1]), max_size=6),
    splits=st.lists(st.integers(0, SIZE_BYTES), max_size=3),
    reset=st.booleans(),
)
def test_received_bytes_are_not_requested_again(points: set[int], splits: list[int], reset: bool) -> None:
    """The answers break off at `points` of the chunk."""
    # A reset may discard all that the answer carried; such tries are counted.
    points = set(sorted(points)[: ATTEMPTS - 1]) if reset else points
    cuts = [end - start for start, end in itertools.pairwise([0, *sorted(points)])]
    with closing(BreakingServer([first(count) for count in cuts], reset)) as server:
        result, memory, clock = fetch(server.store(), tables(), splits)
    assert result.commit is not None, result
    assert memory == DATA[CHUNK.start : CHUNK.end]
    starts = [asked.start for asked in server.asked]
    assert starts == sorted(starts)
    assert clock.bytes == clock.verify_bytes == SIZE_BYTES
    assert all(asked.end == CHUNK.end for asked in server.asked)
    if not reset:  # a reset may discard bytes that the reader had not taken yet
        reached = CHUNK.start
        for count, asked in zip([*cuts, 0], server.asked, strict=False):
            assert asked.start == reached
            reached += min(count, asked.size_bytes - 1)
        assert sum(result.retries.values()) == len(server.asked) - 1


class FailsAfterTheLastByte(MemoryStore):
    """The first read of it fails when all has come."""

    reads = 0

    def read_pieces(
        self,
        key: str,
        byte_range: ByteRange,
        pieces: Iterable[memoryview],
        *,
        etag: str | None = None,
        limit: ReadLimit | None = None,
    ) -> str | None:
        self.reads += 1
        at = byte_range.start
        for piece in pieces:
            piece[:] = DATA[at : at + len(piece)]
            at += len(piece)
        if self.reads == 1:
            raise StoreUnavailable("too late", received_bytes=byte_range.size_bytes)
        return etag


def test_a_read_that_fails_after_the_last_byte_asks_for_nothing_more() -> None:
    store = FailsAfterTheLastByte({"model": DATA})
    result, memory, _ = fetch(store, tables())
    assert result.commit is not None, result
    assert memory == DATA[CHUNK.start : CHUNK.end]
    assert store.reads == 1


def test_a_server_that_sends_nothing_uses_up_the_attempts() -> None:
    with closing(BreakingServer([first(0)] * 20)) as server:
        result, _, _ = fetch(server.store(), tables())
    assert result.failure is not None
    assert result.failure.tries == len(server.asked) == ATTEMPTS


def test_a_failure_keeps_no_memory_of_the_chunk(tmp_path: Path) -> None:
    """A message may never take it along: then an arena would stay mapped for as long as the load is known."""
    memory = mmap.mmap(-1, SIZE_BYTES)
    with fetching(LocalStore(tmp_path), tables()) as fetcher:
        parts = [memoryview(memory)]
        result = fetcher.fetch(LeaseOrder("lease", 0, 0, NEVER_S), parts, fetcher.clock())
        parts.pop().release()
    assert result.failure is not None
    assert isinstance(result.failure.error, ObjectNotFound)
    memory.close()  # a BufferError, as long as there is a view


def test_single_byte_answers_use_up_the_short_read_budget() -> None:
    with closing(BreakingServer([first(1)] * 100)) as server:
        result, _, _ = fetch(server.store(), tables())
    assert result.failure is not None
    assert ATTEMPTS < len(server.asked) == result.retries["short_read"] < 100


@pytest.mark.parametrize("count", [1000, SIZE_BYTES])
def test_wrong_bytes_discard_the_whole_read(count: int) -> None:
    """The flipped byte is in the part that was kept, so only the digest of the whole shows it."""
    with closing(BreakingServer([flipped(count, 500)])) as server:
        result, memory, clock = fetch(server.store(), tables())
    assert result.commit is not None
    assert result.retries["digest_mismatch"] == 1
    assert memory == DATA[CHUNK.start : CHUNK.end]
    assert server.asked[-1] == CHUNK
    assert clock.bytes == clock.verify_bytes == 2 * SIZE_BYTES


def test_bytes_that_stay_wrong_end_in_an_integrity_error() -> None:
    with closing(BreakingServer([flipped(SIZE_BYTES, 9)] * 20)) as server:
        result, _, _ = fetch(server.store(), tables())
    assert result.failure is not None
    assert isinstance(result.failure.error, IntegrityError)
    assert {"expected", "found", "shard", "chunk", "range"} <= result.failure.error.details.keys()


def test_without_version_or_digest_a_chunk_restarts_whole() -> None:
    with closing(BreakingServer([first(PIECE_BYTES + 7)])) as server:
        result, memory, _ = fetch(server.store(), tables(etag=None, digest=False))
    assert result.commit is not None
    assert memory == DATA[CHUNK.start : CHUNK.end]
    assert server.asked == [CHUNK, CHUNK]


def test_a_store_without_pieces_reads_whole_ranges_again() -> None:
    memory = MemoryStore()
    version = memory.put("model", DATA).etag
    store = FailingStore(memory, lambda *asked: asked[-1] < 3, lambda: StoreUnavailable("reset", received_bytes=0))
    result, found, _ = fetch(store, tables(etag=version), [77])
    assert result.commit is not None
    assert found == DATA[CHUNK.start : CHUNK.end]
    assert [byte_range for _, byte_range in store.reads] == [CHUNK] * 3


# --- ended from outside -----------------------------------------------------------------------------------------


def trickle(sock: socket.socket, over: threading.Event) -> None:
    while not over.wait(0.01):
        sock.sendall(b"x" * 1000)  # fast enough not to count as stuck


STALLS: dict[str, Callable[[socket.socket, threading.Event], object]] = {
    "no answer": lambda sock, over: over.wait(PATIENCE_S),
    "in the head": lambda sock, over: (sock.sendall(b"HTTP/1.1 206 P\r\nContent-"), over.wait(PATIENCE_S)),
    "before the body": lambda sock, over: (sock.sendall(answer("206 P", head_of(CHUNK))), over.wait(PATIENCE_S)),
    "in the body": lambda sock, over: (
        sock.sendall(answer("206 P", head_of(CHUNK), DATA[100:5000])),
        over.wait(PATIENCE_S),
    ),
    "last answer": lambda sock, over: (
        sock.sendall(answer("206 P", head_of(CHUNK) | {"Connection": "close"}, DATA[100:5000])),
        over.wait(PATIENCE_S),
    ),
    "trickle": lambda sock, over: (sock.sendall(answer("206 P", head_of(CHUNK))), trickle(sock, over)),
}


@contextmanager
def stalling(stall: Callable[[socket.socket, threading.Event], object]) -> Iterator[tuple[threading.Event, S3Store]]:
    """Return an event, set once a request is there, and the store."""
    asked = threading.Event()

    def play(sock: socket.socket, _: int) -> None:
        asked.set()
        stall(sock, server.over)

    server = ScriptedServer(play)
    ref = StoreRef("s3", "bucket", "", endpoint_url=f"http://127.0.0.1:{server.port}", region="us-east-1")
    try:
        # Only the limit can end these reads.
        yield asked, S3Store(ref, Credentials("AKIDTEST", "secret"), read_timeout_s=NEVER_S)
    finally:
        server.close()


@pytest.mark.parametrize("stall", STALLS.values(), ids=STALLS.keys())
def test_a_read_ends_at_the_deadline_of_its_lease(stall: Callable[[socket.socket, threading.Event], object]) -> None:
    with stalling(stall) as (_, store):
        result, _, _ = fetch(store, tables(), deadline_s=0.2)
    assert result.failure is not None
    assert isinstance(result.failure.error, ReadEnded)
    assert result.retries == {"lease_expired": 1}


@pytest.mark.parametrize("stall", STALLS.values(), ids=STALLS.keys())
@pytest.mark.parametrize("how", ["closed", "stopped"])
def test_an_unwanted_read_ends(stall: Callable[[socket.socket, threading.Event], object], how: str) -> None:
    found: list[FetchedChunk] = []
    with stalling(stall) as (asked, store), fetching(store, tables()) as fetcher:
        lease, memory = LeaseOrder("lease", 0, 0, NEVER_S), memoryview(bytearray(SIZE_BYTES))
        thread = threading.Thread(target=lambda: found.append(fetcher.fetch(lease, [memory], fetcher.clock())))
        thread.start()
        assert asked.wait(PATIENCE_S)
        fetcher.is_void = lambda *_: True
        fetcher.end_reads(["another", "lease"] if how == "closed" else None)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert found == [FetchedChunk("lease")]  # returned: counts as no failure


def test_a_lease_closed_before_its_start_sends_no_request() -> None:
    with closing(BreakingServer()) as server, fetching(server.store(), tables()) as fetcher:
        fetcher.is_void = lambda lease_id, _: lease_id == "lease"
        memory = memoryview(bytearray(SIZE_BYTES))
        assert fetcher.fetch(LeaseOrder("lease", 0, 0, NEVER_S), [memory], fetcher.clock()) == FetchedChunk("lease")
    assert server.asked == []
