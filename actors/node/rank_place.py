"""One rank of a load as its node sees it, and the names of chunks in the cache."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cluster.messages import RankHello, RankUpdate
from cluster.plans.chunk_keys import chunk_key
from cluster.plans.packed_plan import SharedTables
from cluster.telemetry.figures import RankFigures
from storage.arena.slots import CachedChunk
from storage.host.processes import ProcessId


@dataclass(slots=True)
class RankPlace:
    """Who has the rank, and what of the arena is in its hands."""

    rank: int
    incarnation: int = 0
    process: ProcessId | None = None  # None until its worker said hello
    number: int = 0  # of the last message of that process
    grantable: deque[int] = field(default_factory=deque)  # committed chunks it needs and was not told of
    granted: dict[int, CachedChunk] = field(default_factory=dict)  # it may be reading these
    leases: dict[str, int] = field(default_factory=dict)  # lease id -> chunk
    direct: frozenset[int] = frozenset()  # chunks that it can receive in its own memory
    taken_back: set[str] = field(default_factory=set)  # leases that ended before it gave them back
    to_close: list[str] = field(default_factory=list)  # those of them that it was not told of
    lost: bool = False  # nobody is at work for it: its process died or left
    left: bool = False  # its process said that it uses nothing of the arena any more
    placed_bytes: int = 0
    short_of: str = ""  # why its last answer had fewer leases than it wanted (see Orders)
    heard_s: float = 0.0  # when it last spoke
    figures: RankFigures | None = None  # when it last told any

    def expects(self, hello: RankHello) -> bool:
        """Whether the hello is from who may have the rank, and not an old one that arrives late."""
        if hello.process == self.process and hello.number <= self.number:
            return False
        return hello.incarnation >= self.incarnation

    def heard(self, update: RankUpdate, now_s: float) -> None:
        """It has spoken, and is not late."""
        self.number, self.heard_s, self.placed_bytes = update.number, now_s, update.placed_bytes
        self.figures = update.figures or self.figures

    def is_late(self, update: RankUpdate) -> bool:
        """Whether the update is from a process that was given up, or older than one that was taken in."""
        who = (self.incarnation, self.process)
        return self.left or who != (update.incarnation, update.process) or update.number <= self.number


class ChunkKeys:
    """Cache keys of a load's chunks (`cluster.plans.chunk_keys`), each made once."""

    def __init__(self, tables: SharedTables, store_identity: str, load_id: str) -> None:
        self.tables = tables
        self._store_identity = store_identity
        self.load_id = load_id
        self._keys: dict[int, bytes] = {}

    def __getitem__(self, chunk: int) -> bytes:
        key = self._keys.get(chunk)
        if key is None:
            key = self._keys[chunk] = self._make(chunk)
        return key

    def published(self, chunk: int) -> tuple[str, bytes]:
        """Hash name and digest of the chunk; both empty when it was published without."""
        digest, hash_name = self.tables.chunks.digest(chunk), self.tables.chunks.hash_name
        return ("", b"") if digest is None or hash_name is None else (hash_name, digest)

    def lasting(self, chunk: int) -> bool:
        """Whether the key means the same bytes for every load: not without a digest and without a version."""
        return bool(self.published(chunk)[0] or self.tables.shards[self.tables.chunks.shard[chunk]].etag)

    def _make(self, chunk: int) -> bytes:
        return chunk_key(self.tables.shards, self.tables.chunks, self._store_identity, chunk, self.load_id)
