"""Chunks from one node to another: what the server and its clients agree about.

`chunk_server` sends chunks out of the arena, `peer_client` reads them. `nixl_carrier` carries them by RDMA instead.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from dataclasses import dataclass
from typing import Literal

from storage.stores.requests import host_and_port

PeerCarrier = Literal["http", "nixl"]

REALM = "Longshore"
NODE_HEADER = "X-Longshore-Node"  # incarnation of the node that is meant
DIGEST_HEADER = "X-Longshore-Digest"  # of a chunk without a published one, in hex: that of the bytes its home read
PASSED_HASH = "xxh3_128"  # its algorithm: it is for accidents, since nodes of a load trust each other
ASKER_HEADER = "X-Longshore-Asker"  # id of the node that asks
LEFT_HEADER = "X-Longshore-Left"  # `Asker.share_left`, 0.0 to 1.0
SLOW_STORE_HEADER = "X-Longshore-Slow-Store"  # `Asker.slow_store_s`, in milliseconds
HANDED_OVER_HEADER = "X-Longshore-Handed-Over"  # "1": `Asker.hands_over`
CARRIER_HEADER = "X-Longshore-Carrier"  # "nixl": the receiver can use NIXL
PLACE_HEADER = "X-Longshore-Place"  # address of the range, for NIXL
WAIT_S = 5.0  # longest wait of one request for a chunk that is on its way to the node that was asked
ALIVE_S = 1.0  # a node says so often that it is alive, while the other waits for a chunk that is to come
READ_TIMEOUT_S = 4.0  # a node that says nothing for this long is left out
PATIENCE_S = 10.0  # a receiver that takes no byte, or does not say that it has all, loses its hold after this


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that serves chunks."""

    host: str
    port: int
    node: str  # incarnation of its agent

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class Asker:
    """The node that asks for a chunk."""

    node_id: str
    share_left: float | None = None  # which part of what it needs is missing there; None: it waits for slow nodes too
    slow_store_s: float | None = None  # a store that needs longer is far slower than its own; None: unknown
    hands_over: bool = False  # it is to read the chunk from the store: this node does that instead


class NoChunk(enum.Enum):
    """Reason why a node does not send a chunk now. The value is the status of its answer."""

    MISSING = 404  # it is not here, and does not come
    COMING = 425  # it is on its way to this node: the other waits, and asks again
    LATE = 504  # the same, and this node reads the store for it
    TOO_SLOW = 503  # this node, or the store for it, is far slower than for others, who should leave it out


def chunk_path(load_id: str, chunk: int) -> str:
    """Return the path of a chunk's URL."""
    return f"/chunks/{load_id}/{chunk}"


def proof(key: bytes, nonce: str, path: str, range_header: str) -> str:
    """Return the proof that a request for this range comes from a node with the load's key."""
    return hmac.new(key, "\n".join((nonce, path, range_header)).encode(), hashlib.sha256).hexdigest()
