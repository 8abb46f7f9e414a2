"""A load while it runs, for people who watch it: its events, and each node's chunks and where they came from. Pure.

Events are in order, bounded, numbered, and never have a secret. The places are small enough to fetch once a second: a
node says for each chunk of the model one letter, in runs of equal ones; a million chunks of a load that goes in order
are a few runs.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cluster.scheduling.lease_queue import ChunkState
from cluster.telemetry.stats import Jsonable, NodeReport, NodeTraffic, named_senders
from cluster.units import printable, show_bytes
from storage.checkpoints.model_index import ChunkTable, Shard

if TYPE_CHECKING:
    from cluster.scheduling.load_state import Life


MAX_EVENTS = 1000  # of one load; older ones are forgotten
MAX_TEXT = 500  # characters of one event's message
MOST_NODES = 32  # of a load: on more, one event has the bytes of all, and only the report those of each
MOST_SENDERS = 4  # that an event's message names


@dataclass(frozen=True, slots=True)
class LoadEvent(Jsonable):
    """One thing that happened to a load."""

    number: int  # from 1 on, without gaps: a gap seen by a reader is what was forgotten
    at_s: float  # seconds since the epoch, by the clock of the coordinator's host
    # "state", "rank_ready", "rank_lost", "rank_replaced", "moved", "note"; "peer_left_out": a node reads nothing from
    # others for a while; "sources": where the bytes of the load or of a node came from, at the end of the load;
    # "update": what an update in place does; "save": what a save does, which has a log of its own
    kind: str
    message: str
    rank: int | None = None
    host: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class EventLog:
    """The last MAX_EVENTS events of one load."""

    def __init__(self, most: int = MAX_EVENTS) -> None:
        self._events: deque[LoadEvent] = deque(maxlen=most)
        self._numbers = itertools.count(1)
        self._note = ""

    @property
    def last_number(self) -> int:
        """Return the number of the newest event; 0 if there is none."""
        return self._events[-1].number if self._events else 0

    def add(
        self, at_s: float, kind: str, message: str, *, rank: int | None = None, host: str = "", **details: Any
    ) -> None:
        """One more event. Text that came from elsewhere loses its control characters, and what is too long of it."""
        text = printable(message)[:MAX_TEXT]
        self._events.append(LoadEvent(next(self._numbers), at_s, kind, text, rank, host, details))

    def note(self, at_s: float, message: str) -> None:
        """Note what the load waits for. The same text again, or an empty one, adds no event."""
        if message and message != self._note:
            self.add(at_s, "note", message)
        self._note = message

    def left_out(self, at_s: float, host: str, others: Sequence[str]) -> None:
        """Note that a node reads no chunks from these other hosts for a while."""
        text = f"{host} reads nothing from {_listed(others)} for a while: no answer, a very slow one, or other bytes"
        self.add(at_s, "peer_left_out", text, host=host, others=list(others))

    def serves_nothing(self, at_s: float, host: str) -> None:
        """Note that a node serves no chunks though other nodes of the load do."""
        why = "its port is taken (the log of its agent says so), or LONGSHORE_PEER_PORT is -1 there"
        text = f"{host} serves no chunks to other nodes, which read from the store what it would have sent: {why}"
        self.add(at_s, "peer_left_out", text, host=host, others=[])

    def sources(self, at_s: float, nodes: Sequence[NodeReport], hosts: Mapping[str, str]) -> None:
        """Note where the bytes of a load that is done came from: all, then those of each of up to MOST_NODES nodes.

        `hosts`: names of hosts by the address at which they serve chunks.
        """
        if len(nodes) != 1:
            total: Counter[str] = Counter()
            for node in nodes:
                total.update(node.bytes_by_source)
            self.add(at_s, "sources", f"all nodes: {_sources_text(total)}", bytes_by_source=dict(total))
        for node in nodes if len(nodes) <= MOST_NODES else ():
            senders = named_senders(node.peer_bytes_from, hosts)
            named = [f"{host} {show_bytes(size_bytes)}" for host, size_bytes in senders.items()]
            received = f" ({_listed(named)})" if named else ""
            sent = f"; sent {show_bytes(node.sent_bytes)} to other nodes" if node.sent_bytes else ""
            self.add(
                at_s,
                "sources",
                f"{node.host}: {_sources_text(node.bytes_by_source)}{received}{sent}",
                host=node.host,
                bytes_by_source=node.bytes_by_source,
                peer_bytes_from=senders,
                sent_bytes=node.sent_bytes,
            )

    def moved(self, at_s: float, before: Life, after: Life, hosts: Mapping[int, str]) -> None:
        """All that differs between two moments of the load's life. `hosts`: where each rank sits."""
        if after.attempt > before.attempt:
            grows = len(after.ranks) > len(before.ranks)
            message = "ranks of further replicas join" if grows else "ranks of a lost node get other places"
            self.add(at_s, "moved", message, attempt=after.attempt)
        for rank, (was, now) in enumerate(zip(before.ranks, after.ranks, strict=False)):  # replicas come and go
            for kind, message in _of_rank(was.ready, was.lost, was.incarnation, now.ready, now.lost, now.incarnation):
                self.add(at_s, kind, message, rank=rank, host=hosts.get(rank, ""), incarnation=now.incarnation)
        if after.state is not before.state:
            words = f"{before.state.value} -> {after.state.value}"
            self.add(at_s, "state", f"{words}: {after.error}" if after.error else words, state=after.state.value)

    def after(self, number: int) -> tuple[LoadEvent, ...]:
        """Events with a higher number, oldest first."""
        return tuple(event for event in self._events if event.number > number)


def _of_rank(
    was_ready: bool, was_lost: bool, was: int, is_ready: bool, is_lost: bool, incarnation: int
) -> Iterator[tuple[str, str]]:
    if is_lost and not was_lost:
        yield "rank_lost", "its worker is gone"
    if incarnation > was and not is_lost:
        yield "rank_replaced", "it has a new worker, which loads its slices again"
    if is_ready and not was_ready:
        yield "rank_ready", "it holds all its slices"


def _listed(names: Sequence[str]) -> str:
    """Return the first MOST_SENDERS names, and how many more there are."""
    more = len(names) - MOST_SENDERS
    return ", ".join(names[:MOST_SENDERS]) + (f" and {more} more" if more > 0 else "")


def _sources_text(bytes_by_source: Mapping[str, int]) -> str:
    """Return `1.2 GB from the store, 3 GB from other nodes`; the peers come last."""
    store_bytes = bytes_by_source.get("store_via_arena", 0) + bytes_by_source.get("store_direct", 0)
    sizes = {
        "from the store": store_bytes,
        "from disk": bytes_by_source.get("disk", 0),
        "from the arena": bytes_by_source.get("arena", 0),
        "from store or cache, not known": bytes_by_source.get("unknown", 0),
        "from other nodes": bytes_by_source.get("peer", 0),
    }
    return ", ".join(f"{show_bytes(size_bytes)} {name}" for name, size_bytes in sizes.items() if size_bytes) or "0 B"


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

# (the model's shards, letters, bytes so far) of a part of a load
PartView = tuple[tuple["ShardChunks", ...], NDArray[np.uint8], NodeTraffic]
# what one node says: the model's shards, its own runs, and bytes so far by the address of the sender
NodeView = tuple[tuple["ShardChunks", ...], "Runs", NodeTraffic]
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
    traffic: NodeTraffic = field(default_factory=NodeTraffic)  # where they came from; senders by host name


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
            "nodes": [
                {"node": node.node, "host": node.host, "runs": node.runs, "traffic": node.traffic.as_dict()}
                for node in self.nodes
            ],
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
