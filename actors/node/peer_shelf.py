"""The chunks that a node's agent has for other nodes (`storage.peers.chunk_server.ChunkShelf`)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from actors.node.node_ledger import NodeLedger
from actors.node.node_load import NodeLoad
from storage.arena.arena import Arena
from storage.arena.slots import CachedChunk
from storage.host.processes import ProcessId
from storage.peers import Peer
from storage.peers.chunk_server import ServedChunk

WAIT_S = 15.0  # for a chunk that this node is about to read; receivers wait a little longer for a byte


class PeerShelf:
    """Thread-safe: each call takes the agent's lock. A chunk is held, as for a rank, until its receiver has it."""

    def __init__(
        self, changed: threading.Condition, ledger: NodeLedger, usable: Callable[[], Arena], incarnation: str
    ) -> None:
        """`changed`: the agent's lock. `usable`: returns its arena, or raises LongshoreError when it ends."""
        self.node = incarnation
        self._changed = changed
        self._ledger = ledger
        self._usable = usable
        self._numbers = itertools.count(1)
        self._process = ProcessId.current()

    def load_key(self, load_id: str) -> bytes | None:
        """See `ChunkShelf`."""
        with self._changed:
            return self._ledger.peer_key(load_id) or None

    def take(self, load_id: str, chunk: int, asker: str) -> ServedChunk | Peer | None:
        """See `ChunkShelf`."""
        reader, give_up_s = f"peer-{next(self._numbers)}", time.monotonic() + WAIT_S
        with self._changed:
            while True:
                arena = self._usable()
                found = self._ledger.take_for_peer(load_id, chunk, self._process, reader, asker)
                if not isinstance(found, bool):
                    return self._served(*found, chunk, reader, arena, asker)
                left_s = give_up_s - time.monotonic()
                if not found or left_s <= 0:
                    return None
                self._changed.wait(left_s)

    def _served(
        self, load: NodeLoad, cached: CachedChunk, chunk: int, reader: str, arena: Arena, asker: str
    ) -> ServedChunk:
        def release(received: bool) -> None:
            with self._changed:
                load.peer_ended(chunk, cached, self._process, reader, asker if received else "")
                self._changed.notify_all()

        return ServedChunk(*arena.place(cached.slot), load.chunk_bytes(chunk), release)
