"""A node that serves one chunk by NIXL, and one that reads it: `python -m tests.support.nixl_process serve FOLDER`.

Each ends without Python's usual cleaning up. NIXL 1.5.1 loads a second libnl-route, whose destructor then crashes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage.arena.arena import Arena
from storage.peers import Asker, Peer, peer_client
from storage.peers.chunk_server import ChunkServer, ServedChunk
from storage.peers.nixl_carrier import PROCESS_NIXL, RegisteredWindow
from storage.peers.peer_client import PeerClient
from storage.stores.object_store import ByteRange, cut

KEY = b"k" * 32
NODE = "agent-1"
CHUNK_BYTES = (3 << 20) + 5
THREADS = 4


class _Shelf:
    node = NODE

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def load_key(self, load_id: str) -> bytes:
        return KEY

    def take(self, load_id: str, chunk: int, asker: Asker, wait_s: float) -> ServedChunk:
        address = self._arena.window_address + chunk * self._arena.slot_bytes
        return ServedChunk(*self._arena.place(chunk), CHUNK_BYTES, b"", lambda _: None, address)


def serve(folder: Path) -> None:
    """Serve what is in FOLDER/data as chunk 1, until FOLDER/end is there."""
    with Arena.create(str(folder / "arena"), slot_count=2, slot_bytes=4 << 20) as arena:
        arena.reserve()
        arena.slot(1)[:CHUNK_BYTES] = (folder / "data").read_bytes()
        window = RegisteredWindow(NODE, arena.window_address, 2 * arena.slot_bytes)
        server = ChunkServer(_Shelf(arena), "127.0.0.1", 0, window=window)
        (folder / "port.new").write_text(str(server.port))
        (folder / "port.new").rename(folder / "port")
        while not (folder / "end").exists():
            time.sleep(0.05)
        server.close()


def read(folder: Path) -> None:
    """Read the chunk in several threads, and once more when no READ is in time. Print how it came."""
    peer = Peer("127.0.0.1", int((folder / "port").read_text()), NODE)
    client, data = PeerClient("asker", nixl=PROCESS_NIXL), (folder / "data").read_bytes()

    def is_same(start: int) -> bool:
        buffer = memoryview(bytearray(CHUNK_BYTES - start))
        client.read(peer, "llama", 1, KEY, ByteRange(start, CHUNK_BYTES), cut(buffer))
        return bytes(buffer) == data[start:]

    same = [is_same(0)]  # alone, as others would get bytes while the server registers its window
    with ThreadPoolExecutor(THREADS) as threads:
        same += threads.map(is_same, range(1, THREADS + 1))
    read_bytes = PROCESS_NIXL.read_bytes
    peer_client._READ_S = 0.0
    same.append(is_same(0))
    print(json.dumps({"same": same, "by_nixl": read_bytes, "can_read": PROCESS_NIXL.can_read(peer)}))


if __name__ == "__main__":
    {"serve": serve, "read": read}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
