"""Chunks from one node to another, over real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.errors import PeerUnavailable, ReadEnded, StoreError
from storage.peers import Asker, NoChunk, Peer, chunk_path, chunk_server, peer_client, proof
from storage.peers.chunk_server import ChunkServer, ServedChunk, Turns
from storage.peers.peer_client import ENOUGH_BODIES, GRACE_S, MAX_IDLE, Pace, PeerClient
from storage.stores.object_store import ByteRange, cut
from storage.stores.requests import ReadLimit
from tests.support.ray_clusters import eventually

MIB = 1 << 20
KEY = b"k" * 32
CHUNK_BYTES = 3 * MIB + 5
WHOLE = ByteRange(0, CHUNK_BYTES)


class Shelf:
    """Chunks in a file, those of one load."""

    node = "agent-1"

    def __init__(self, folder: Path) -> None:
        self.data = os.urandom(CHUNK_BYTES)
        self.descriptor = os.open(folder / "arena", os.O_RDWR | os.O_CREAT)
        os.pwrite(self.descriptor, self.data, 4096)
        self.held = 0
        self.taken = 0
        self.received = 0
        self.askers: list[Asker] = []
        self.waits = threading.Event()
        self.waits.set()
        self._lock = threading.Lock()

    def load_key(self, load_id: str) -> bytes | None:
        return KEY if load_id == "llama" else None

    def take(self, load_id: str, chunk: int, asker: Asker, wait_s: float) -> ServedChunk | NoChunk:
        self.askers.append(asker)
        if not self.waits.wait(wait_s):
            return NoChunk.COMING
        if chunk > 9:
            return NoChunk.MISSING if chunk == 10 else NoChunk.TOO_SLOW
        with self._lock:
            self.held += 1
            self.taken += 1
        return ServedChunk(self.descriptor, 4096, CHUNK_BYTES, b"", self._release)

    def _release(self, received: bool) -> None:
        with self._lock:
            self.held -= 1
            self.received += received


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path)
    yield shelf
    os.close(shelf.descriptor)


@pytest.fixture
def server(shelf: Shelf) -> Iterator[ChunkServer]:
    server = ChunkServer(shelf, "127.0.0.1", 0, patience_s=1.0)
    yield server
    server.close()
    assert shelf.held == 0


@pytest.fixture
def client() -> Iterator[PeerClient]:
    client = PeerClient("asker", read_timeout_s=5.0)
    yield client
    client.close()


def peer_of(server: ChunkServer, node: str = "agent-1") -> Peer:
    return Peer("127.0.0.1", server.port, node)


def read(
    client: PeerClient,
    peer: Peer,
    byte_range: ByteRange = WHOLE,
    *,
    load_id: str = "llama",
    chunk: int = 1,
    key: bytes = KEY,
    limit: ReadLimit | None = None,
    asker: Asker | None = None,
) -> bytes:
    buffer = bytearray(byte_range.size_bytes)
    client.read(peer, load_id, chunk, key, byte_range, cut(memoryview(buffer)), asker=asker, limit=limit)
    return bytes(buffer)


def test_a_chunk_and_its_parts(server: ChunkServer, client: PeerClient, shelf: Shelf):
    assert read(client, peer_of(server)) == shelf.data
    for start, end in ((0, 1), (CHUNK_BYTES - 1, CHUNK_BYTES), (5, 2 * MIB)):
        assert read(client, peer_of(server), ByteRange(start, end)) == shelf.data[start:end]
    assert server.connections == 1  # the same for all
    eventually(lambda: shelf.held == 0, "the chunk stays held")
    assert shelf.received == 4
    assert server.sent_bytes == CHUNK_BYTES + 2 + 2 * MIB - 5


@pytest.mark.parametrize("why_not", [NoChunk.COMING, NoChunk.LATE])
def test_a_chunk_that_does_not_come_in_time_may_come_yet(
    server: ChunkServer, client: PeerClient, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, why_not: NoChunk
):
    monkeypatch.setattr(shelf, "take", lambda *_: why_not)
    with pytest.raises(PeerUnavailable) as raised:
        read(client, peer_of(server))
    assert raised.value.details["status"] == why_not.value
    assert server.connections == 1  # it is used for the next request
    monkeypatch.undo()
    assert read(client, peer_of(server)) == shelf.data


def test_the_rate_of_the_link_is_measured(shelf: Shelf, client: PeerClient):
    rate_bytes_per_s, part = 8e6, ByteRange(0, 1 << 16)
    server = ChunkServer(shelf, "127.0.0.1", 0, rate_bytes_per_s=rate_bytes_per_s)
    try:
        for _ in range(ENOUGH_BODIES):
            assert server.bytes_per_s == 0.0
            read(client, peer_of(server), part)
        eventually(lambda: server.bytes_per_s, "it knows no rate")
        assert server.bytes_per_s < 1.5 * rate_bytes_per_s
    finally:
        server.close()


def test_many_readers(server: ChunkServer, client: PeerClient, shelf: Shelf):
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda: found.append(read(client, peer_of(server)) == shelf.data)) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 12
    eventually(lambda: server.connections <= MAX_IDLE, "too many idle connections")


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"key": b"x" * 32}, 401),
        ({"load_id": "other"}, 401),
        ({"chunk": 10}, 404),
        ({"chunk": 11}, 503),
        ({"byte_range": ByteRange(0, CHUNK_BYTES + 1)}, None),
    ],
)
def test_what_is_refused(server: ChunkServer, client: PeerClient, shelf: Shelf, wrong: dict, status: int | None):
    with pytest.raises(PeerUnavailable) as caught:
        read(client, peer_of(server), **wrong)
    assert caught.value.details.get("status") == status or status is None
    assert read(client, peer_of(server)) == shelf.data


def test_a_restarted_agent_is_not_taken_for_the_former(server: ChunkServer, client: PeerClient):
    with pytest.raises(PeerUnavailable, match="restarted"):
        read(client, peer_of(server, node="agent-0"))


def test_a_proof_is_of_no_use_on_another_connection(server: ChunkServer, client: PeerClient):
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        between = threading.Thread(target=_between, args=(listening, server.port, said))
        between.start()
        read(client, Peer("127.0.0.1", listening.getsockname()[1], "agent-1"))
    client.close()
    between.join()
    proved = next(head for head in said if b"Authorization" in head)
    with socket.create_connection(("127.0.0.1", server.port)) as other:
        other.sendall(proved)
        assert other.recv(100).startswith(b"HTTP/1.1 401")


def _between(listening: socket.socket, port: int, said: list[bytes]) -> None:
    """Pass one connection on, and note what its client says."""
    here, _ = listening.accept()
    there = socket.create_connection(("127.0.0.1", port))

    def back() -> None:
        while data := there.recv(MIB):
            here.sendall(data)

    with here, there:
        backwards = threading.Thread(target=back)
        backwards.start()
        while data := here.recv(MIB):
            said.append(data)
            there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        backwards.join()


def test_a_few_send_at_a_time_and_in_the_order_of_coming():
    turns, went, inside = Turns(2, patience_s=30.0), [], threading.Semaphore(0)

    def go(number: int) -> None:
        with turns.turn(lambda: None):
            went.append(number)
            inside.acquire()

    threads = [threading.Thread(target=go, args=(number,)) for number in range(6)]
    for number, thread in enumerate(threads):
        thread.start()
        eventually(lambda number=number: len(went) + len(turns._waiting) == number + 1, "it does not come")
    assert went == [0, 1]
    for number in range(2, 6):
        inside.release()
        eventually(lambda number=number: len(went) == number + 1, "nobody follows")
    inside.release(2)
    for thread in threads:
        thread.join()
    assert went == list(range(6))


def test_nobody_waits_for_ever_for_a_receiver_that_has_stopped():
    turns = Turns(1, patience_s=0.05)
    with turns.turn(lambda: None), turns.turn(lambda: None):
        assert not turns._waiting
    with turns.turn(lambda: None):
        assert turns._free == 0
    assert turns._free == 1  # who went on without a turn gave none back


def test_who_leaves_the_line_takes_no_turn_from_others():
    turns = Turns(1, patience_s=30.0)

    def gone() -> None:
        raise ConnectionResetError

    with turns.turn(lambda: None):
        with pytest.raises(ConnectionResetError), turns.turn(gone):
            pass
        assert (turns._free, len(turns._waiting)) == (0, 0)
    with turns.turn(gone):
        assert turns._free == 0


@pytest.mark.slow
def test_a_node_that_is_far_slower_than_others_is_given_up(
    server: ChunkServer, client: PeerClient, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peer_client, "GRACE_S", 0.2)
    for _ in range(3):
        read(client, peer_of(server))
    slow = ChunkServer(shelf, "127.0.0.1", 0, rate_bytes_per_s=CHUNK_BYTES / 50)
    ended, others = threading.Event(), []

    def read_others() -> None:
        while not ended.is_set():
            others.append(read(client, peer_of(server)) == shelf.data)

    thread = threading.Thread(target=read_others)
    thread.start()
    try:
        with pytest.raises(PeerUnavailable, match="did not send") as caught:
            read(client, peer_of(slow))
        assert 0 < caught.value.details["received_bytes"] < CHUNK_BYTES
    finally:
        ended.set()
        thread.join()
        slow.close()
    assert all(others)


def test_what_is_slow_depends_on_how_many_share_the_link():
    pace = Pace()
    for _ in range(10):  # so far, one chunk of 10 MB a second comes at a time
        pace.begin(0.0)
        pace._since_s = 0.0
        pace.end(1.0, 10_000_000)
    pace.begin(1.0)
    assert not pace.is_slow(0, GRACE_S)
    assert not pace.is_slow(5 * 430_000, 5.0)
    assert pace.is_slow(5 * 400_000, 5.0)
    for _ in range(9):
        pace.begin(1.0)
    assert not pace.is_slow(5 * 43_000, 5.0)  # a tenth is enough now
    assert pace.is_slow(5 * 40_000, 5.0)


def test_bodies_of_a_slow_link_are_not_slow():
    pace = Pace()
    pace.begin(0.0)
    assert not pace.is_slow(1000, 100.0)  # it is all that comes


def test_a_receiver_that_says_nothing_loses_its_hold(server: ChunkServer, shelf: Shelf):
    """It asks for a chunk, and takes no byte of it."""
    client = PeerClient("asker")
    asked = threading.Event()

    def pieces() -> Iterator[memoryview]:
        asked.set()
        time.sleep(3)
        yield memoryview(bytearray(CHUNK_BYTES))

    def ask() -> None:
        with contextlib.suppress(PeerUnavailable):  # unless all of it is in the connection's buffers
            client.read(peer_of(server), "llama", 1, KEY, WHOLE, pieces())

    thread = threading.Thread(target=ask)
    thread.start()
    asked.wait()
    eventually(lambda: shelf.held == 0, "the chunk stays held", timeout_s=2.5)
    thread.join()
    client.close()


def test_a_read_that_waits_is_ended(server: ChunkServer, client: PeerClient, shelf: Shelf):
    shelf.waits.clear()
    limit = ReadLimit()
    threading.Timer(0.2, limit.end).start()
    with pytest.raises(ReadEnded):
        read(client, peer_of(server), limit=limit)
    shelf.waits.set()


def test_a_peer_that_lives_is_waited_for(server: ChunkServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch):
    """It says so, however long its chunk takes. One that says nothing is given up."""
    client, asker = PeerClient("asker", read_timeout_s=0.5), Asker("asker", 0.25, 15.5, hands_over=True)
    shelf.waits.clear()
    with pytest.raises(PeerUnavailable, match="did not send"):
        read(client, peer_of(server), asker=asker)
    client._avoid.clear()
    shelf.askers.clear()
    monkeypatch.setattr(chunk_server, "ALIVE_S", 0.1)
    threading.Timer(1.5, shelf.waits.set).start()
    assert read(client, peer_of(server), asker=asker) == shelf.data
    assert shelf.askers
    assert set(shelf.askers) == {asker}
    client.close()


def test_a_server_that_ends_ends_its_readers(shelf: Shelf, client: PeerClient):
    server = ChunkServer(shelf, "127.0.0.1", 0)
    assert read(client, peer_of(server)) == shelf.data
    server.close()
    with pytest.raises(PeerUnavailable) as caught:
        read(client, peer_of(server))
    assert caught.value.details["cause"] == "ConnectionRefusedError"
    with pytest.raises(PeerUnavailable, match="just before"):
        read(client, peer_of(server))
    server.close()


def test_too_many_connections_in_use_are_closed(shelf: Shelf):
    server = ChunkServer(shelf, "127.0.0.1", 0, most_connections=2)
    clients = [PeerClient(f"asker-{at}") for at in range(3)]
    shelf.waits.clear()
    threads = [threading.Thread(target=read, args=(client, peer_of(server))) for client in clients[:2]]
    for thread in threads:
        thread.start()
    eventually(lambda: {asker.node_id for asker in shelf.askers} == {"asker-0", "asker-1"}, "they do not wait")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as third:
        assert third.recv(1) == b""
    shelf.waits.set()
    for thread in threads:
        thread.join()
    for client in clients[:2]:
        assert read(client, peer_of(server)) == shelf.data
        client.close()
    eventually(lambda: server.connections == 0, "closed connections count")
    assert read(clients[2], peer_of(server)) == shelf.data
    clients[2].close()
    server.close()


def test_the_node_that_was_idle_longest_makes_room_for_another(shelf: Shelf):
    """There are more nodes than connections. All are served, and connect again without taking the peer for gone."""
    server = ChunkServer(shelf, "127.0.0.1", 0, most_connections=2)
    clients = [PeerClient(f"asker-{at}") for at in range(4)]
    idle = server._server._idle

    def read_with(client: PeerClient) -> socket.socket:
        """Return the server's end of the connection that it has used."""
        assert read(client, peer_of(server), ByteRange(0, 1)) == shelf.data[:1]
        eventually(lambda: server.connections == len(idle), "the connection is in use")
        return list(idle)[-1]

    first, second = (read_with(client) for client in clients[:2])
    assert read_with(clients[0]) is first
    third = read_with(clients[2])  # in place of the second
    assert list(idle) == [first, third]
    for client in clients * 2:
        read_with(client)
    assert second not in idle
    assert not any(client._avoid for client in clients)
    for client in clients:
        client.close()
    server.close()


@pytest.mark.slow
def test_a_receiver_that_has_died_does_not_slow_its_sender(
    shelf: Shelf, client: PeerClient, monkeypatch: pytest.MonkeyPatch
):
    """In the next load the node would only receive."""
    monkeypatch.setattr(chunk_server, "LOOK_S", 0.02)
    part = ByteRange(0, 1 << 16)
    server = ChunkServer(shelf, "127.0.0.1", 0, rate_bytes_per_s=1e6, patience_s=4.0)
    for _ in range(ENOUGH_BODIES):
        read(client, peer_of(server), part)
    eventually(lambda: server.bytes_per_s, "it knows no rate")
    before_bytes_per_s = server.bytes_per_s
    asking = Asking(server)
    with asking.sock:
        assert asking.ask().startswith("HTTP/1.1 206")  # and it never says that it has the bytes
        eventually(lambda: shelf.held == 0, "the chunk stays held", timeout_s=20)
    assert server.bytes_per_s > before_bytes_per_s / 2
    server.close()


def test_strangers_keep_no_node_out(shelf: Shelf, client: PeerClient):
    """They take all connections, and prove nothing. Each node that comes takes the place of the first of them."""
    server = ChunkServer(shelf, "127.0.0.1", 0, most_connections=2)
    with contextlib.ExitStack() as stack:
        address = "127.0.0.1", server.port
        strangers = [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(2)]
        eventually(lambda: server.connections == 2, "they are not served")
        assert read(client, peer_of(server)) == shelf.data
        assert strangers[0].recv(1) == b""
        strangers += [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(5)]
        assert strangers[-3].recv(1) == b""  # the last takes its place
        eventually(lambda: server.connections == 2, "there are more than may be")
        assert read(client, peer_of(server), ByteRange(0, 1)) == shelf.data[:1]
        assert strangers[-2].recv(1) == b""
    server.close()


def test_a_port_that_is_taken_is_an_error(server: ChunkServer, shelf: Shelf):
    with pytest.raises(StoreError, match="cannot be served") as caught:
        ChunkServer(shelf, "127.0.0.1", server.port)
    assert "LONGSHORE_PEER_PORT" in caught.value.hint


def test_the_rate_is_limited(shelf: Shelf, client: PeerClient):
    server = ChunkServer(shelf, "127.0.0.1", 0, rate_bytes_per_s=8 * MIB)
    begun_s = time.monotonic()
    for _ in range(2):
        read(client, peer_of(server))
    assert time.monotonic() - begun_s >= 0.5  # 6 MiB, the last piece at once
    server.close()


REQUESTS: list[Callable[[], bytes]] = [
    lambda: os.urandom(2000),
    lambda: b"GET " + chunk_path("llama", 1).encode() + b" HTTP/1.1\r\n" + b"A: b\r\n" * 500 + b"\r\n",
    lambda: b"GET /chunks/../../etc/passwd HTTP/1.1\r\nRange: bytes=0-1\r\n\r\n",
    lambda: b"GET " + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    lambda: b"POST " + chunk_path("llama", 1).encode() + b" HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    lambda: b"GET " + chunk_path("llama", 1).encode() + b" HTTP/1.1\r\n" + (b"A: " + b"b" * 60_000 + b"\r\n") * 90,
    lambda: b"GET " + chunk_path("llama", 1).encode() + b" HTTP/0.9\r\n\r\n",
    lambda: b"GET " + chunk_path("llama", 1).encode() + b"\r\n\r\n",
    lambda: b"GET " + chunk_path("llama", 1).encode() + b" HTTP/1.1\r\nAuthorization: Longshore \xff\xfe\r\n\r\n",
    lambda: b"\r\n" * 3000,
    lambda: b"GET " + chunk_path("llama", 99999999999).encode() + b" HTTP/1.1\r\nRange: bytes=9-1\r\n\r\n",
]


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_nothing_that_is_said_breaks_the_server(server: ChunkServer, client: PeerClient, shelf: Shelf, number: int):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        answer = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(REQUESTS[number]())
            sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(MIB):
                answer += data
    assert not answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 500"))
    assert read(client, peer_of(server)) == shelf.data
    assert shelf.taken == 1


@pytest.mark.parametrize("again", [b"x", b"GET /chunks/llama/1 HTTP/1.1\r\n\r\n"], ids=["a byte", "a request"])
def test_a_stranger_that_sends_something_now_and_then_is_cut_off(
    server: ChunkServer, monkeypatch: pytest.MonkeyPatch, again: bytes
):
    monkeypatch.setattr(chunk_server, "HEAD_S", 0.3)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b"GET /chunks/llama/1 HTTP/1.1\r\n")

        def is_cut_off() -> bool:
            try:
                stranger.sendall(again)
            except OSError:
                return True
            return False

        eventually(is_cut_off, "who proves nothing is served for ever", timeout_s=5)
    eventually(lambda: not server.connections, "its thread is still there")


def test_a_head_takes_little_memory(server: ChunkServer):
    """The server reads no head to its end that is longer than any of ours."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
        stranger.sendall(b"GET /chunks/llama/1 HTTP/1.1\r\n" + b"A: " + b"b" * (2 * chunk_server.HEAD_BYTES))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # before the head's end, and before its time is over


class Asking:
    """A connection of a node with the load's key, which says what it likes."""

    def __init__(self, server: ChunkServer) -> None:
        self.sock = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        self.nonce = ""
        self.nonce = self.ask().partition('nonce="')[2].partition('"')[0]

    def ask(self, said: str = "/chunks/llama/1", proved: str = "", key: bytes = KEY, **about: str) -> str:
        """Return the head of the answer. `said`, `range`: what is asked for; `proved`: for what a proof is given."""
        range_said = about.get("range", "bytes=0-1")
        sign = proof(key, self.nonce, proved or said, about.get("range_proved", range_said))
        lines = [f"GET {said} HTTP/1.1", f"Range: {range_said}", f"X-Longshore-Node: {Shelf.node}"]
        self.sock.sendall("\r\n".join([*lines, f"Authorization: Longshore {sign}", "", ""]).encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self.sock.recv(4096)
        return answer.decode("latin-1")


@pytest.fixture
def asking(server: ChunkServer) -> Iterator[Asking]:
    asking = Asking(server)
    with asking.sock:
        yield asking


def test_a_proof_is_of_no_use_for_another_request(asking: Asking, shelf: Shelf):
    for other in (
        {"said": "/chunks/llama/2", "proved": "/chunks/llama/1"},
        {"said": "/chunks/other/1", "proved": "/chunks/llama/1"},
        {"range": "bytes=0-9", "range_proved": "bytes=0-1"},
        {"key": b""},
    ):
        assert asking.ask(**other).startswith("HTTP/1.1 401")  # type: ignore[arg-type]
    assert not shelf.taken
    assert asking.ask().startswith("HTTP/1.1 206")


def test_ranges_outside_a_chunk_are_refused(asking: Asking, shelf: Shelf):
    """The bytes after a chunk in the arena are those of another one, perhaps of another load."""
    nines = "9" * 19
    for asked, status in (
        (f"bytes=0-{CHUNK_BYTES}", 416),
        (f"bytes={CHUNK_BYTES}-{CHUNK_BYTES}", 416),
        ("bytes=9-1", 416),
        (f"bytes={nines}-{nines}", 416),
        (f"bytes=0-9{nines}", 400),
        ("bytes=-5", 400),
        ("bytes=5-", 400),
        ("bytes=0-1,4-5", 400),
        ("", 400),
    ):
        answer = asking.ask(range=asked)
        assert answer.startswith(f"HTTP/1.1 {status} "), asked
        assert answer.endswith("Content-Length: 0\r\n\r\n"), asked
        eventually(lambda: shelf.held == 0, "the chunk stays held")
    assert asking.ask().startswith("HTTP/1.1 206")
