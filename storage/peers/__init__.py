"""Chunks from one node to another: what the server and its clients agree about.

`chunk_server` sends chunks out of the arena, `peer_client` reads them. `nixl_carrier` carries them by RDMA instead.
"""

from __future__ import annotations

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
CARRIER_HEADER = "X-Longshore-Carrier"  # "nixl": who asks can READ by NIXL
PLACE_HEADER = "X-Longshore-Place"  # address of the range, for a READ
PATIENCE_S = 10.0  # a receiver that takes no byte, or does not say that it has all, loses its hold after this


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that serves chunks."""

    host: str
    port: int
    node: str  # incarnation of its agent

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)


def chunk_path(load_id: str, chunk: int) -> str:
    """Return the path of a chunk's URL."""
    return f"/chunks/{load_id}/{chunk}"


def proof(key: bytes, nonce: str, path: str, range_header: str) -> str:
    """Return the proof that a request for this range comes from a node with the load's key."""
    return hmac.new(key, "\n".join((nonce, path, range_header)).encode(), hashlib.sha256).hexdigest()
