"""The store's own checksums of whole objects, combined on a node from the chunks that its ranks fetched. Pure.

    chunk fetched --its spans--> object: chunks missing? --none--> combined with the header that planning read --> same?
    chunk found in the arena --spans of the rank that fetched it, while this agent remembers them--^

Only loads without a manifest need this. Chunks with digests are checked one by one, before any rank may read them.
Here the last chunk of an object decides, so a load's error comes after bytes were placed and before it is READY.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from actors.node.chunk_flow import ChunkKeys
from cluster.messages import Commit
from cluster.telemetry.stats import ONLY_PART, ObjectCheck
from storage.checkpoints.model_index import Shard
from storage.checksum import NO_CHECKSUM, Span
from storage.errors import IntegrityError

NOT_KNOWN = "parts of it were fetched earlier, and their checksums are no longer known"
NO_MD5 = "its ETag is not the MD5 of its bytes"
_HINT = "the object was damaged in the store or in transit; publish the model to have every chunk checked"

Spans = tuple[Span, ...]


class KeptSpans:
    """Checksums of the chunks that a node's ranks fetched, by cache key.

    They also describe a chunk found in the arena, because some rank fetched it.
    """

    def __init__(self, most: int) -> None:
        self._most = most  # beyond it, the least recently stored are dropped
        self._kept: OrderedDict[bytes, tuple[str, Spans]] = OrderedDict()

    def put(self, key: bytes, hash_name: str, spans: Spans) -> None:
        """Remember the spans of a chunk, and drop the oldest beyond the limit."""
        self._kept[key] = hash_name, spans
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def get(self, key: bytes, hash_name: str) -> Spans | None:
        """Return the chunk's spans, or None when they are not known or were made with another hash."""
        name, spans = self._kept.get(key, ("", ()))
        return spans if name == hash_name else None


@dataclass(slots=True)
class _Object:
    shard: Shard
    chunks: tuple[int, ...]  # that the node needs
    missing: set[int]  # those of them whose spans are not known (yet)
    spans: dict[int, Spans] = field(default_factory=dict)  # by chunk
    outcome: ObjectCheck | None = None  # None until it is known


class ObjectChecks:
    """Checks of one load's objects on one node. `kept` is shared with the node's other loads.

    `forget`: functions that drop the node's copies under a key.
    """

    def __init__(
        self,
        keys: ChunkKeys,
        needed: Iterable[int],
        kept: KeptSpans,
        forget: Iterable[Callable[[bytes], object]] = (),
    ) -> None:
        tables = keys.tables
        self.error: IntegrityError | None = None  # an object does not match its checksum
        self._keys = keys
        self._kept = kept
        self._forget = tuple(forget)
        self._damaged: tuple[int, ...] = ()  # chunks of the object that does not match its checksum
        self._objects: dict[int, _Object] = {}
        if tables.chunks.hash_name is not None:
            return
        chunks: dict[int, list[int]] = {}
        for chunk in needed:
            chunks.setdefault(int(tables.chunks.shard[chunk]), []).append(chunk)
        for number, mine in chunks.items():
            shard = tables.shards[number]
            self._objects[number] = made = _Object(shard, tuple(mine), set(mine))
            if shard.checksum is None:
                made.outcome = ObjectCheck(shard.key, reason=shard.unchecked or NO_CHECKSUM)

    def fetched(self, commits: Iterable[Commit]) -> None:
        """Record chunks that a rank fetched. Every fetch counts, also one that came too late or twice."""
        for commit in commits:
            self._fetched(commit.chunk, commit.spans)

    def settle(self) -> None:
        """Complete the checks when every rank has all it needs: chunks not fetched were found in the arena."""
        for found in self._objects.values():
            if (checksum := found.shard.checksum) is None:
                continue
            for chunk in sorted(found.missing):
                spans = self._kept.get(self._keys[chunk], checksum.hash_name)
                if spans is not None:
                    self._take(found, chunk, spans)

    def forget_damaged(self, *, last: bool = False) -> None:
        """Drop damaged chunks from this node, or the next load would find the same bytes and fail as well.

        `last`: this load commits nothing more. From now on the keys may stand for good bytes.
        """
        for chunk in self._damaged:
            for forget in self._forget:
                forget(self._keys[chunk])
        self._damaged = () if last else self._damaged

    def report(self) -> tuple[ObjectCheck, ...]:
        """Return what is known now about every object. Empty when chunks have digests."""
        return tuple(
            found.outcome or ObjectCheck(found.shard.key, reason=NOT_KNOWN) for found in self._objects.values()
        )

    def _fetched(self, chunk: int, spans: Spans) -> None:
        found = self._objects.get(int(self._keys.tables.chunks.shard[chunk]))
        if found is None or found.shard.checksum is None or not spans:
            return
        self._kept.put(self._keys[chunk], found.shard.checksum.hash_name, spans)
        before = found.spans.get(chunk)
        if before is not None and before != spans:
            byte_range = self._keys.tables.chunks.byte_range(chunk)
            self._fail(
                found,
                "two readings of the same bytes differ",
                expected=_shown(before),
                found=_shown(spans),
                chunk=chunk,
                range=str(byte_range),
            )
        self._take(found, chunk, spans)

    def _take(self, found: _Object, chunk: int, spans: Spans) -> None:
        found.spans[chunk] = spans
        found.missing.discard(chunk)
        checksum = found.shard.checksum
        if found.missing or found.outcome is not None or checksum is None:
            return
        all_spans = [span for chunk in found.chunks for span in found.spans[chunk]]
        digest = checksum.found(found.shard.size_bytes, (*checksum.known, *all_spans))
        if digest is None:
            found.outcome = ObjectCheck(found.shard.key, reason=ONLY_PART)
        elif digest == checksum.digest:
            found.outcome = ObjectCheck(found.shard.key, checksum.hash_name)
        elif not checksum.certain:
            found.outcome = ObjectCheck(found.shard.key, reason=NO_MD5)
        else:
            name = f"{'composite ' if checksum.part_ends else ''}{checksum.hash_name}"
            self._fail(
                found,
                f"the fetched bytes do not match the {name} that the store keeps for the object",
                expected=f"{checksum.hash_name}:{checksum.digest.hex()}",
                found=f"{checksum.hash_name}:{digest.hex()}",
            )

    def _fail(self, damaged: _Object, message: str, **details: object) -> None:
        if self.error is not None:
            return
        self._damaged = damaged.chunks
        self.error = IntegrityError(message, hint=_HINT, shard=damaged.shard.key, load=self._keys.load_id, **details)


def _shown(spans: Spans) -> str:
    return " ".join(digest.hex() for _, _, digest in spans)
