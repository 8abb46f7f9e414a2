"""Chunks from one node to another by NIXL: when it is used, what it may touch, and what happens when it fails."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from storage.arena.arena import Arena
from storage.errors import PeerUnavailable, ReadEnded
from storage.peers import Asker, Peer, nixl_carrier, peer_client
from storage.peers.chunk_server import ChunkServer, ServedChunk
from storage.peers.nixl_carrier import MOST_METADATA_BYTES, NixlFailed, NixlReader, RegisteredWindow, open_agent
from storage.peers.peer_client import PeerClient
from storage.stores.object_store import PIECE_BYTES, ByteRange, cut
from storage.stores.requests import ReadLimit
from tests.support.fake_nixl import NETWORK, FakeAgent
from tests.support.nixl_process import CHUNK_BYTES, KEY, NODE, THREADS
from tests.support.ray_clusters import eventually
from tests.support.shared_memory import REPOSITORY

SLOT_BYTES = 4 << 20


class Shelf:
    """The second slot of an arena is a chunk of every load."""

    node = NODE

    def __init__(self, folder: Path) -> None:
        self.arena = Arena.create(str(folder / "arena"), slot_count=2, slot_bytes=SLOT_BYTES)
        self.arena.reserve()
        self.data = os.urandom(CHUNK_BYTES)
        self.arena.slot(1)[:CHUNK_BYTES] = self.data
        self.address = self.arena.window_address + SLOT_BYTES
        self.held = self.received = 0

    def load_key(self, load_id: str) -> bytes:
        return KEY

    def take(self, load_id: str, chunk: int, asker: Asker, wait_s: float) -> ServedChunk:
        self.held += 1
        return ServedChunk(*self.arena.place(1), CHUNK_BYTES, b"", self._release, self.address)

    def _release(self, received: bool) -> None:
        self.held -= 1
        self.received += received


class Nodes:
    """A node that serves and one that reads, with agents of NIXL that are made by `server` and `reader`."""

    def __init__(self, shelf: Shelf, server: Callable[[str], Any], reader: Callable[[str], Any]) -> None:
        window = RegisteredWindow(NODE, shelf.arena.window_address, 2 * SLOT_BYTES, server)
        self.server = ChunkServer(shelf, "127.0.0.1", 0, window=window)
        self.reader = NixlReader(reader)
        self.client = PeerClient("asker", nixl=self.reader)
        self.peer = Peer("127.0.0.1", self.server.port, NODE)

    def read(self, start: int = 0, limit: ReadLimit | None = None) -> bytes:
        buffer = bytearray(CHUNK_BYTES - start)
        byte_range = ByteRange(start, CHUNK_BYTES)
        self.client.read(self.peer, "llama", 1, KEY, byte_range, cut(memoryview(buffer)), limit=limit)
        return bytes(buffer)

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path)
    yield shelf
    assert shelf.held == 0
    shelf.arena.close()


@pytest.fixture
def nodes_of(shelf: Shelf) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(server: Callable[[str], Any] = FakeAgent, reader: Callable[[str], Any] = FakeAgent) -> Nodes:
        made.append(Nodes(shelf, server, reader))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()
    NETWORK.clear()


def absent(name: str) -> Any:
    raise NixlFailed("there is no NIXL")


def agent_with(**fields: Any) -> Callable[[str], FakeAgent]:
    return lambda name: FakeAgent(name, **fields)


def test_a_chunk_is_read_by_nixl(nodes_of: Callable[..., Nodes], shelf: Shelf):
    nodes = nodes_of()
    assert nodes.read() == shelf.data
    assert nodes.read(5) == shelf.data[5:]
    assert nodes.reader.read_bytes == 2 * CHUNK_BYTES - 5
    assert nodes.server.connections == 1
    eventually(lambda: shelf.held == 0, "the chunk stays held")
    assert shelf.received == 2


def test_many_readers_share_the_buffers(nodes_of: Callable[..., Nodes], shelf: Shelf):
    nodes = nodes_of()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(nodes.read, range(64)))
    assert found == [shelf.data[start:] for start in range(64)]
    assert len(nodes.reader._free) <= 8


def test_the_window_is_one_block_until_the_server_ends(nodes_of: Callable[..., Nodes], shelf: Shelf):
    nodes = nodes_of()
    assert NODE not in NETWORK  # it registers nothing before a receiver asks for it
    nodes.read()
    assert NETWORK[NODE].memory == [(shelf.arena.window_address, 2 * SLOT_BYTES)]
    nodes.server.close()
    assert not NETWORK[NODE].memory


def test_reads_stay_within_the_named_range_and_own_buffers(nodes_of: Callable[..., Nodes], shelf: Shelf):
    nodes = nodes_of()
    nodes.read(7)
    (agent,) = (agent for name, agent in NETWORK.items() if name != NODE)
    read_bytes = 0
    for source, to, size_bytes in agent.reads:
        assert source == shelf.address + 7 + read_bytes
        assert to == agent.memory[0][0]  # one buffer, used again
        read_bytes += size_bytes
    assert read_bytes == CHUNK_BYTES - 7


@pytest.mark.parametrize(
    ("server", "reader"),
    [
        (absent, FakeAgent),
        (FakeAgent, absent),
        (agent_with(refuses="register_memory"), FakeAgent),
        (agent_with(metadata=b"m" * (MOST_METADATA_BYTES + 1)), FakeAgent),
        (agent_with(metadata=b"agent-2"), FakeAgent),
        (FakeAgent, agent_with(refuses="register_memory")),
        (FakeAgent, agent_with(refuses="add_remote_agent")),
        (FakeAgent, agent_with(refuses="transfer")),
        (FakeAgent, agent_with(state="ERR")),
    ],
)
def test_bytes_come_over_http_when_nixl_fails(
    nodes_of: Callable[..., Nodes],
    shelf: Shelf,
    server: Callable[[str], Any],
    reader: Callable[[str], Any],
    caplog: pytest.LogCaptureFixture,
):
    nodes = nodes_of(server, reader)
    with caplog.at_level(logging.WARNING, "longshore.peers"):
        for start in (0, 5, 9):
            assert nodes.read(start) == shelf.data[start:]
    assert nodes.reader.read_bytes == 0
    assert len(caplog.records) == 1
    assert "not by NIXL" in caplog.text


def test_the_rest_comes_over_http_when_nixl_fails_halfway(nodes_of: Callable[..., Nodes], shelf: Shelf):
    class Breaks(FakeAgent):
        def check_xfer_state(self, handle: tuple[int, int, int]) -> str:
            return "ERR" if len(self.reads) > 2 else super().check_xfer_state(handle)

    nodes = nodes_of(FakeAgent, Breaks)
    assert nodes.read() == shelf.data
    assert nodes.reader.read_bytes == 2 * PIECE_BYTES
    assert nodes.server.sent_bytes >= CHUNK_BYTES - 2 * PIECE_BYTES


def test_a_late_read_changes_no_bytes_of_ours(
    nodes_of: Callable[..., Nodes], shelf: Shelf, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peer_client, "_READ_S", 0.2)
    nodes = nodes_of(FakeAgent, agent_with(state="PROC"))
    found = nodes.read()
    (agent,) = (agent for name, agent in NETWORK.items() if name != NODE)
    agent.state = "DONE"
    for late in agent.reads:
        shelf.arena.slot(1)[:CHUNK_BYTES] = bytes(CHUNK_BYTES)
        agent.check_xfer_state(late)
    assert found == shelf.data
    assert not nodes.reader._free


def test_a_read_by_nixl_is_ended_between_two_pieces(nodes_of: Callable[..., Nodes]):
    limit = ReadLimit()

    class Ends(FakeAgent):
        def check_xfer_state(self, handle: tuple[int, int, int]) -> str:
            limit.end()
            return super().check_xfer_state(handle)

    nodes = nodes_of(FakeAgent, Ends)
    with pytest.raises(ReadEnded) as caught:
        nodes.read(limit=limit)
    assert caught.value.details["received_bytes"] == PIECE_BYTES


@pytest.mark.parametrize("address", [1, 1 << 40])
def test_nothing_beside_the_registered_memory_is_read(nodes_of: Callable[..., Nodes], shelf: Shelf, address: int):
    nodes, shelf.address = nodes_of(), address
    assert nodes.read() == shelf.data
    assert nodes.reader.read_bytes == 0


def test_a_chunk_outside_the_window_comes_over_http(nodes_of: Callable[..., Nodes], shelf: Shelf):
    nodes, shelf.address = nodes_of(), 0
    assert nodes.read() == shelf.data
    assert nodes.reader.can_read(nodes.peer)
    assert NODE not in NETWORK


@pytest.mark.parametrize("address", [-1, 1 << 70])
def test_an_answer_that_names_no_place_is_refused(nodes_of: Callable[..., Nodes], shelf: Shelf, address: int):
    nodes, shelf.address = nodes_of(), address
    with pytest.raises(PeerUnavailable) as caught:
        nodes.read()
    assert caught.value.details["cause"] == "RangeMismatch"


def test_without_nixl_nobody_asks_for_it(nodes_of: Callable[..., Nodes], shelf: Shelf):
    nodes = nodes_of()
    client = PeerClient("asker")
    buffer = bytearray(CHUNK_BYTES)
    client.read(nodes.peer, "llama", 1, KEY, ByteRange(0, CHUNK_BYTES), cut(memoryview(buffer)))
    client.close()
    assert buffer == shelf.data
    assert not NETWORK


def test_nixl_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl_carrier, "_MODULES", ("no_such_nixl",))
    with pytest.raises(NixlFailed, match="no_such_nixl"):
        open_agent("agent")


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(find_spec, ("nixl_cu12", "nixl_cu13"))), reason="NIXL is not installed (longshore[nixl])"
)
@pytest.mark.parametrize("transports", ["tcp", None])
def test_two_processes_over_the_real_nixl(tmp_path: Path, transports: str | None):
    """Over TCP. Without `UCX_TLS` only RDMA is allowed, which a machine of tests does not have."""
    (tmp_path / "data").write_bytes(os.urandom(CHUNK_BYTES))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environ.pop("UCX_TLS", None)
    environ |= {"UCX_TLS": transports} if transports else {}
    command = [sys.executable, "-m", "tests.support.nixl_process"]
    serving = subprocess.Popen([*command, "serve", str(tmp_path)], cwd=REPOSITORY, env=environ)
    try:
        eventually(lambda: (tmp_path / "port").exists() or serving.poll() is not None, "nobody serves", timeout_s=60)
        answer = subprocess.run(
            [*command, "read", str(tmp_path)], cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=60
        )
        assert answer.returncode == 0, answer.stderr
        found = json.loads(answer.stdout.splitlines()[-1])
        assert all(found["same"])
        if transports:
            assert found["by_nixl"] == sum(CHUNK_BYTES - start for start in range(THREADS + 1))
        elif not Path("/sys/class/infiniband").exists():
            assert found["by_nixl"] == 0
            assert "not by NIXL" in answer.stderr
        assert not found["can_read"]
    finally:
        (tmp_path / "end").touch()
        assert serving.wait(30) == 0
