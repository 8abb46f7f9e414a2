"""The place of every chunk of a load, on every node, small enough to fetch once a second. Pure.

A node says for each chunk of the model one letter, in runs of equal ones; a million chunks of a load that goes in order
are a few runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.scheduling.lease_queue import ChunkState
from cluster.telemetry.stats import Jsonable
from storage.checkpoints.model_index import ChunkTable, Shard

# from what is least done to what is most: of a chunk that two parts of a load need, the first counts
LETTERS: dict[ChunkState, str] = {
    ChunkState.PENDING: "p",
    ChunkState.WAITING: "w",
    ChunkState.LEASED: "l",
    ChunkState.COMMITTED: "c",
    ChunkState.DONE: "d",
}
NOT_NEEDED = "-"  # no rank of the node touches it
_ORDER = "".join(LETTERS.values()) + NOT_NEEDED
MEANINGS = {
    "p": "pending",
    "w": "waiting for another load's fetch",
    "l": "being fetched",
    "c": "verified, in the arena",
    "d": "placed",
    NOT_NEEDED: "not needed on this node",
}

PartView = tuple[tuple["ShardChunks", ...], NDArray[np.uint8]]  # (the model's shards, letters) of a part of a load
NodeView = tuple[tuple["ShardChunks", ...], "Runs"]  # what one node says: the model's shards, and its own runs
Runs = tuple[tuple[int, str], ...]  # (how many, letter), one after the other


@dataclass(frozen=True, slots=True)
class ShardChunks(Jsonable):
    """The chunks of one stored shard: a range of the model's."""

    key: str
    size_bytes: int
    first_chunk: int
    chunk_count: int


@dataclass(frozen=True, slots=True)
class NodeChunks(Jsonable):
    """One node's chunks."""

    node: str
    host: str
    runs: Runs


@dataclass(frozen=True, slots=True)
class ChunkMap(Jsonable):
    """The chunks of one load."""

    model_id: str
    chunk_count: int
    shards: tuple[ShardChunks, ...]
    nodes: tuple[NodeChunks, ...]
    silent_nodes: tuple[str, ...] = ()  # hosts whose agents did not answer in time

    def as_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`. Runs are not copied one by one: they may be very many, every second."""
        return {
            "model_id": self.model_id,
            "chunk_count": self.chunk_count,
            "shards": [shard.as_dict() for shard in self.shards],
            "nodes": [{"node": node.node, "host": node.host, "runs": node.runs} for node in self.nodes],
            "silent_nodes": list(self.silent_nodes),
        }


def shards_of(shards: Sequence[Shard], chunks: ChunkTable) -> tuple[ShardChunks, ...]:
    """Every shard that has chunks, in the order of the model's."""
    counts = np.bincount(chunks.shard, minlength=len(shards)).tolist()
    firsts = np.searchsorted(chunks.shard, np.arange(len(shards))).tolist()
    return tuple(
        ShardChunks(shard.key, shard.size_bytes, first, count)
        for shard, first, count in zip(shards, firsts, counts, strict=True)
        if count
    )


def letters_of(count: int, states: Iterable[tuple[int, ChunkState]]) -> NDArray[np.uint8]:
    """(count,) letters as bytes; chunks without a state are not needed."""
    letters = np.full(count, ord(NOT_NEEDED), np.uint8)
    for chunk, state in states:
        letters[chunk] = ord(LETTERS[state])
    return letters


def least_done(parts: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """One row of letters for several parts of a load."""
    ranks = np.zeros(256, np.uint8)
    for at, letter in enumerate(_ORDER):
        ranks[ord(letter)] = at
    letters: NDArray[np.uint8] = np.frombuffer(_ORDER.encode(), np.uint8)
    first: NDArray[np.uint8] = letters[np.min([ranks[part] for part in parts], axis=0)]
    return first


def runs_of(letters: NDArray[np.uint8]) -> Runs:
    """Equal neighbours as one run."""
    if not len(letters):
        return ()
    starts = np.concatenate([[0], np.flatnonzero(np.diff(letters)) + 1])
    counts = np.diff(np.concatenate([starts, [len(letters)]]))
    return tuple((int(count), chr(letter)) for count, letter in zip(counts, letters[starts], strict=True))
