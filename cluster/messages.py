"""What actors say to each other: small frozen data. Bytes of weights are never in a message.

    coordinator --NodeJob--> agent      which ranks of the load the node has
    coordinator --RankJob--> worker     one rank's share
    worker --RankHello, RankUpdate--> agent --JoinReply, Orders--> worker
    agent --AgentBeat--> coordinator --BeatReply--> agent

Every message of a load carries its attempt and, where a rank speaks, the rank's incarnation: by these numbers late and
repeated messages are told apart, never by arrival. Messages are pickled by position, so processes of different
versions would misread each other: the sender's version comes first (`pack_message`). The tables that all of a load have
in common (`shared`) stay packed, as no event loop needs them, and go into Ray's object store once per load: nodes get
them from each other, once each.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import VersionMismatch
from cluster.request import StoreAccess
from cluster.telemetry.report import SettingStatus
from cluster.telemetry.stats import ArenaUse, LoadCounters, NodeStats, RankStats
from longshore.installation import VERSION
from storage.checksum import Span
from storage.errors import LongshoreError
from storage.host.memory import GpuMemory, MemoryPool
from storage.host.processes import ProcessId

UNVERSIONED = (4, "an earlier version")  # of processes that cannot say it

Version = tuple[int, str]  # see `longshore.installation.VERSION`


def check_version(theirs: Version, sender: str, receiver: str) -> None:
    """Raise VersionMismatch unless the sender runs the same Longshore as this process, which is the receiver."""
    if tuple(theirs) == VERSION:
        return
    raise VersionMismatch(
        f"{sender} runs longshore {theirs[1]} (protocol {theirs[0]}), {receiver} {VERSION[1]} (protocol {VERSION[0]})",
        hint="install one version on every node and for every client, then end what still runs with "
        "`longshore release --shutdown`",
    )


def pack_message(message: object) -> bytes:
    """Return the message pickled, after a line with this process's version that every receiver can read."""
    return b"%d %s\n" % (VERSION[0], VERSION[1].encode()) + pickle.dumps(message, protocol=5)


def unpack_message(packed: bytes, sender: str, receiver: str) -> Any:
    """Return the message. Raises VersionMismatch, before anything is unpickled, when the versions differ."""
    line, _, message = packed.partition(b"\n")
    protocol, _, release = line.decode().partition(" ")
    check_version((int(protocol), release), sender, receiver)
    return pickle.loads(message)


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """How a rank reads from the store (see `cluster.config.Config`)."""

    threads: int
    attempts: int
    read_timeout_s: float
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A process that hosts a rank (`actors.hosting`) and belongs to others: all of a group load the same revision."""

    load_id: str
    group: str  # as its processes call it
    uri: str  # of the model
    revision: str
    process: ProcessId


@dataclass(frozen=True, slots=True, eq=False)
class NodeJob:
    """One node's share of a load."""

    load_id: str
    attempt: int
    shared: bytes  # SharedTables, packed; empty when they come beside the message
    store_identity: str  # part of the cache key of chunks without a collision-resistant digest
    ranks: tuple[int, ...]  # of the load, on this node
    done: frozenset[int]  # ranks that have everything already: not none only when an agent was restarted
    min_slots: int  # slots without which this load could not go on
    chunk_attempts: int  # workers that may fail on one chunk before the load fails
    lease_deadline_s: float
    record: bytes  # the coordinator's own notes, handed back to a coordinator that lost them
    placement: str = "via_arena"  # see LoadRequest
    most_requests: int = 16  # in flight, of one rank
    hedge_factor: float = 0.0  # see cluster.scheduling.concurrency; 0: no chunk is fetched by two at once
    hedge_after_s: float = 0.0
    incarnations: tuple[int, ...] = ()  # of `ranks`: earlier ones have nothing to say, also to an agent that is new
    again: bool = False  # an agent was told this before, and was restarted
    replaced: bool = False  # before that, some rank's process was replaced
    model: str = ""  # what it is counted under (`cluster.telemetry.metrics`)
    process: ProcessId | None = None  # that hosts its rank and ends it, by its death at the latest
    group: GroupMember | None = None  # of that process

    @property
    def part(self) -> tuple[str, int]:
        """(load, attempt). A node that takes ranks of a lost node over gets a part more: its first goes on as it is."""
        return self.load_id, self.attempt


@dataclass(frozen=True, slots=True, eq=False)
class RankJob:
    """One rank's share of a load."""

    load_id: str
    attempt: int
    rank: int
    incarnation: int
    shared: bytes  # SharedTables, packed; empty when they come beside the message
    store: StoreAccess
    fetch: FetchSettings
    placement: str = "via_arena"  # see LoadRequest
    mapped: bool = False  # the plan has a device map
    offload_folder: str = ""  # of the device map
    logs: tuple[str, str] = ("", "")  # see cluster.telemetry.logs.LogSettings


Words = tuple[tuple[str, str], ...]  # (arena path, agent) by whose word ranks of a process use that arena


@dataclass(frozen=True, slots=True)
class RankHello:
    """A rank's process introduces itself to the agent of its node: this rank has nothing of the arena in use."""

    load_id: str
    attempt: int
    rank: int
    incarnation: int
    process: ProcessId
    placed: tuple[int, ...] = ()  # chunks it already has: empty at first, not after the agent restarted
    number: int = 0  # counts the messages of one process: an older one that arrives late changes nothing
    others: Words = ()  # of other ranks of the process
    direct: tuple[int, ...] = ()  # chunks that it can receive in its own memory
    fetched: dict[str, tuple[int, ...]] = field(default_factory=dict)  # chunks that it has fetched, by source


@dataclass(frozen=True, slots=True)
class JoinReply:
    """Where the arena is."""

    arena_path: str
    known: bool = True  # False: the agent does not (yet) know this load; say hello again later
    arena_epoch: str = ""  # of the arena at that path now: a restarted agent may have had to make a new one
    agent: str = ""  # the agent's incarnation
    stop: LongshoreError | None = None  # the load is over for this rank
    batch: int = 1  # chunks worth a message: many where messages cost more than the slots that they hold up
    disk_path: str = ""  # the node's folder of chunks on disk; empty: none


DIRECT = -1  # in place of a slot
DISK_READ, DISK_UNUSABLE = "read", "unusable"  # what became of a chunk that the disk was said to have


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """The right to write one chunk into one slot, or (DIRECT) the order to receive it in the rank's own memory."""

    lease_id: str
    chunk: int
    slot: int
    deadline_s: float  # seconds from now; a commit after that changes nothing
    on_disk: bytes = b""  # the key under which the node's disk has it; empty: it has not


@dataclass(frozen=True, slots=True)
class Commit:
    """A chunk stands in its slot, or in the rank's memory, whole and verified."""

    lease_id: str
    chunk: int
    spans: tuple[Span, ...] = ()  # of a chunk without a digest, where the store has a checksum of the whole object
    disk: str = ""  # DISK_READ: it came from there; DISK_UNUSABLE: it could not, and came from the store


@dataclass(frozen=True, slots=True)
class FetchFailure:
    """A worker gave a chunk up. Its connection is closed: nothing more is written to the slot."""

    lease_id: str
    chunk: int
    error: LongshoreError
    tries: int


@dataclass(frozen=True, slots=True)
class RankUpdate:
    """What a rank did since its last update, and what it can take on."""

    load_id: str
    attempt: int
    rank: int
    incarnation: int
    process: ProcessId
    number: int = 0  # see RankHello
    committed: tuple[Commit, ...] = ()
    failed: tuple[FetchFailure, ...] = ()
    placed: tuple[int, ...] = ()  # chunks copied to the device: their slots are not read any more
    returned: tuple[str, ...] = ()  # lease ids handed back unused, or closed on the agent's demand
    want_leases: int = 0
    wait_s: float = 0.0  # how long the agent may hold the answer when it has no orders
    placed_bytes: int = 0  # so far
    retries: dict[str, int] = field(default_factory=dict)  # since the last update, by cause
    requests: tuple[tuple[int, float, float], ...] = ()  # that brought a chunk: its bytes, seconds, how long ago
    throttled: int = 0  # answers of the store since the last update that asked for fewer requests
    leaving: bool = False  # the last message: nothing of the arena is in use any more, done or not
    others: Words = ()  # see RankHello; when leaving
    stats: RankStats | None = None  # once a heartbeat, and when leaving

    def lease_ids(self) -> list[str]:
        """The leases that ended with it."""
        committed = [commit.lease_id for commit in self.committed]
        return [*committed, *(failure.lease_id for failure in self.failed), *self.returned]


@dataclass(frozen=True, slots=True)
class Orders:
    """The agent's answer."""

    leases: tuple[LeaseOrder, ...] = ()
    readable: tuple[tuple[int, int], ...] = ()  # (chunk, slot): committed chunks this rank still needs
    closed_leases: tuple[str, ...] = ()  # expired: stop writing, close the connection, return the id
    short_of: str = ""  # why there are fewer leases than were wanted: "slots", or "chunks" that nobody fetches yet
    requests: int = 0  # the rank may have so many in flight from now on; 0: as before
    rejoin: bool = False  # the agent restarted or the rank is not known: say hello again
    stop: LongshoreError | None = None  # the load is over for this rank


@dataclass(frozen=True, slots=True)
class RankBeat:
    """A rank as its agent sees it."""

    load_id: str
    attempt: int
    rank: int
    incarnation: int
    pid: int  # 0: its worker has not said hello yet
    placed_bytes: int
    silent_s: float  # since it last spoke, or was expected to
    done: bool = False  # it has everything: nothing more is expected of it here
    requests: int = 0  # in flight when it last told
    allowed_requests: int = 0  # that it may have in flight
    own_bytes: int = 0  # its process's memory, the arena not counted; 0: not known


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a plan needs to know of a node."""

    node_id: str
    host: str
    arena_bytes: int
    pools: tuple[MemoryPool, ...]  # its memory comes out of them; untouched pages of arenas are taken off
    gpus: tuple[GpuMemory, ...]  # in the order of the driver; empty where unknown
    version: str
    slot_bytes: int = 0  # of its arena; 0: as the coordinator's settings say


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """A load's slots on one node: those that it uses, or may use whenever it wants to."""

    load_id: str
    slots: int
    model: str = ""  # what the load is counted under
    pid: int = 0  # of the process that hosts the rank (`actors.hosting`)
    waits: bool = False  # it has none yet, and asked before

    def __str__(self) -> str:
        who = f"{self.load_id} (process {self.pid})" if self.pid else self.load_id
        return f"{who}: {'waits for ' if self.waits else ''}{self.slots}"


@dataclass(frozen=True, slots=True)
class LoadBeat:
    """One load on one node."""

    load_id: str
    attempt: int
    store_bytes: int
    error: LongshoreError | None  # the load cannot go on here
    complete: bool
    model: str = ""  # what it is counted under


@dataclass(frozen=True, slots=True)
class AgentBeat:
    """Heartbeat of an agent, with the progress of its ranks in it."""

    node_id: str
    host: str
    incarnation: str  # a new one each time the agent's process starts
    loads: tuple[LoadBeat, ...]
    ranks: tuple[RankBeat, ...]
    arena: ArenaUse
    records: dict[str, bytes] = field(default_factory=dict)  # load id -> record, when asked for
    number: int = 0  # counts the heartbeats of one incarnation: an older one that arrives late changes no counter
    # By model, since the agent began: those that have grown since a coordinator last answered, which has the others
    counters: dict[str, LoadCounters] = field(default_factory=dict)
    counted_by: str = ""  # incarnation of that coordinator; empty: none, these are all
    stats: NodeStats | None = None
    settings: tuple[SettingStatus, ...] = ()  # that the agent goes by: until this coordinator has answered them
    members: tuple[GroupMember, ...] = ()  # of groups, until they let go of their rank or are dead


@dataclass(frozen=True, slots=True)
class BeatReply:
    """The coordinator's answer to a heartbeat."""

    coordinator: str  # its incarnation
    unknown_loads: tuple[str, ...] = ()  # send their records next time
    ended_loads: tuple[str, ...] = ()  # forget them
    node_dead: bool = False  # Ray has given the node up, and all on it: end yourself
    members: tuple[GroupMember, ...] = ()  # an earlier agent of the node told of them: they are yours if they live
