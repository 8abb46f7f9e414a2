"""Carries chunks between nodes by RDMA, through NIXL (the optional package `nixl-cu12`), beside the HTTP exchange.

    server    RegisteredWindow   the arena's window, registered with NIXL as one block
    receiver  NixlReader         READs a range that the server named, into a buffer of its own, and copies it from there

A READ that was abandoned may still write. So no READ goes to a slot, which others would get next. It goes to a buffer,
and a buffer whose READ has not ended well is never used again.

An agent of NIXL has no thread here: NIXL's own would keep one core busy. The receiver makes progress while it waits for
its READ, the server while it holds the chunk.

NIXL is not imported before it is used. Everything that fails in it is NixlFailed. Then bytes come over HTTP.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from storage.host.memory import address_of
from storage.peers import Peer
from storage.stores.object_store import PIECE_BYTES, cut

_LOG = logging.getLogger("longshore.peers")
MOST_METADATA_BYTES = 64 << 10  # NIXL's own description of an agent, about 300 bytes for each network device
# Without such a device there is no agent. UCX over TCP would be slower than sendfile, and its port lets anyone who
# reaches it write to this process. UCX_TLS in the environment is stronger.
_TRANSPORTS = "TLS=ib"
_POLL_S = 5e-5
_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")  # the first is in a package of its own, which chooses between the others


class NixlFailed(Exception):
    """NIXL cannot be used here, or with this peer."""


class _Buffer:
    """A registered piece of this process's own memory."""

    def __init__(self, agent: Any) -> None:
        self._memory = mmap.mmap(-1, PIECE_BYTES)
        self.address = address_of(self._memory)
        agent.register_memory([(self.address, PIECE_BYTES, 0, "")], "DRAM")


@dataclass(frozen=True, slots=True)
class Place:
    """A range in the registered memory of another node, as that node named it."""

    peer: Peer
    metadata: bytes  # of its agent
    address: int  # there


def open_agent(name: str) -> Any:
    """Return a new agent of NIXL. Raises NixlFailed."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # else it writes to stdout
    try:
        nixl = _nixl()
        agent = nixl.nixl_agent(
            name,
            nixl.nixl_agent_config(
                enable_prog_thread=False, backends=[], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            ),
        )
        agent.create_backend("UCX", {"engine_config": _TRANSPORTS})
    except Exception as error:  # those of NIXL have no class in common
        raise NixlFailed(f"NIXL does not start: {error!r}") from error
    return agent


def _nixl() -> ModuleType:
    missing: ImportError | None = None
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing = missing or error
    raise missing or ImportError("nixl")


class RegisteredWindow:
    """Memory that other nodes may READ. Registered when it is first needed. Thread-safe."""

    def __init__(
        self, node: str, address: int, size_bytes: int, make_agent: Callable[[str], Any] | None = None
    ) -> None:
        """`node`: incarnation of this node's agent. `make_agent`: default `open_agent`."""
        self._node, self._address, self._size_bytes = node, address, size_bytes
        self._make_agent = make_agent or open_agent
        self._lock = threading.Lock()
        self._agent: Any = None
        self._registered: Any = None
        self._metadata = b""
        self._failed = False

    def metadata(self) -> bytes:
        """Return what a receiver must know of this agent. Empty: it cannot READ from here, or not yet.

        The first call takes as long as registering does. Calls in the meantime do not wait for it.
        """
        if not self._metadata and not self._failed and self._lock.acquire(blocking=False):
            try:
                self._register()
            finally:
                self._lock.release()
        return self._metadata

    def _register(self) -> None:
        if self._metadata or self._failed:
            return
        begun_s = time.monotonic()
        try:
            self._agent = self._make_agent(self._node)
            self._registered = self._agent.register_memory([(self._address, self._size_bytes, 0, "")], "DRAM")
            metadata = bytes(self._agent.get_agent_metadata())
            if not 0 < len(metadata) <= MOST_METADATA_BYTES:
                raise NixlFailed(f"its metadata have {len(metadata)} bytes")
            self._metadata = metadata
            took_s = time.monotonic() - begun_s
            _LOG.info("NIXL has the window: %d MiB are pinned, in %.1f s", self._size_bytes >> 20, took_s)
        except Exception as error:
            self._give_up(error)

    def progress(self) -> None:
        """Answer what receivers' agents ask of this one. Call it often while one reads."""
        try:
            self._agent.get_new_notifs()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            _LOG.warning("other nodes get chunks over HTTP, not by NIXL: %s", error)
        self._failed, self._metadata = True, b""

    def close(self) -> None:
        """Let nobody READ any more. Call it when nobody does. Idempotent."""
        with self._lock:
            self._failed, self._metadata = True, b""
            agent, registered, self._agent, self._registered = self._agent, self._registered, None, None
            if registered is not None:
                with contextlib.suppress(Exception):
                    agent.deregister_memory(registered)


class NixlReader:
    """READs from other nodes. Thread-safe. What has failed once is not tried again."""

    def __init__(self, make_agent: Callable[[str], Any] | None = None) -> None:
        """`make_agent`: default `open_agent`."""
        self.read_bytes = 0
        self._make_agent = make_agent or open_agent
        self._lock = threading.Lock()
        self._agent: Any = None
        self._failed = False  # nothing can be read
        self._failed_peers: set[Peer] = set()
        self._known: dict[Peer, bytes] = {}  # metadata by which the agent knows them
        self._free: list[_Buffer] = []
        self._abandoned: list[tuple[_Buffer, Any]] = []  # READs may still write there

    def can_read(self, peer: Peer) -> bool:
        """Return whether this process can READ, and has not failed to do so from this peer."""
        if self._agent is None and not self._failed:
            with self._lock:
                self._start()
        return not self._failed and peer not in self._failed_peers

    def _start(self) -> None:
        if self._agent is None and not self._failed:
            try:
                self._agent = self._make_agent(f"longshore-{uuid.uuid4().hex}")
            except Exception as error:
                self._failed = True
                _LOG.warning("chunks of other nodes come over HTTP, not by NIXL: %s", error)

    def read(self, place: Place, piece: memoryview, give_up_s: float) -> None:
        """Fill `piece` from that place. `give_up_s`: on the monotonic clock.

        Raises NixlFailed. This peer is not to be read from again.
        """
        address = place.address
        try:
            name = self._name(place)
            for each in cut(piece):
                self._read(name, address, each, give_up_s)
                address += len(each)
        except Exception as error:
            with self._lock:
                first = place.peer not in self._failed_peers
                self._failed_peers.add(place.peer)
            if first:
                _LOG.warning("chunks come from %s over HTTP, not by NIXL: %s", place.peer, error)
            raise NixlFailed(str(error)) from error

    def _name(self, place: Place) -> str:
        """Return the name by which this agent knows the peer's."""
        with self._lock:
            if place.peer in self._failed_peers:
                raise NixlFailed("it has failed with this peer before")
            if place.peer not in self._known:
                if len(place.metadata) > MOST_METADATA_BYTES:
                    raise NixlFailed("its metadata are too long")
                found = self._agent.add_remote_agent(place.metadata)
                if (found.decode() if isinstance(found, bytes) else found) != place.peer.node:
                    raise NixlFailed("its agent has another name")
                self._known[place.peer] = place.metadata
            if self._known[place.peer] != place.metadata:
                raise NixlFailed("its metadata have changed")
        return place.peer.node

    def _read(self, name: str, address: int, piece: memoryview, give_up_s: float) -> None:
        with self._lock:
            buffer = self._free.pop() if self._free else _Buffer(self._agent)
        handle = None
        try:
            # NIXL refuses what is not within the memory that the peer has registered.
            ours, theirs = (
                self._agent.get_xfer_descs([(at, len(piece), 0)], "DRAM") for at in (buffer.address, address)
            )
            handle = self._agent.initialize_xfer("READ", ours, theirs, name)
            self._wait(handle, give_up_s)
        except Exception:
            with self._lock:
                self._abandoned.append((buffer, handle))
            raise
        self._agent.release_xfer_handle(handle)
        ctypes.memmove(address_of(piece), buffer.address, len(piece))
        with self._lock:
            self._free.append(buffer)
            self.read_bytes += len(piece)

    def _wait(self, handle: Any, give_up_s: float) -> None:
        state = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < give_up_s:
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise NixlFailed("a READ took too long" if state == "PROC" else "a READ failed")


PROCESS_NIXL = NixlReader()  # one agent for all loads of a process, as it takes half a second to make
