"""The messages between actors: small frozen data. Bytes of weights are never in a message.

    coordinator --NodeJob--> agent      which ranks of the load the node has
    coordinator --RankJob--> worker     one rank's share
    coordinator --UpdateJob--> worker   what changed of a rank's share in another revision
    worker --RankHello, RankUpdate--> agent --JoinReply, Orders--> worker
    agent --AgentBeat--> coordinator --BeatReply--> agent

Every message of a load carries its attempt. A message of a rank also carries the rank's incarnation. Receivers
recognize late and repeated messages by these numbers, never by arrival.

Messages are pickled by position, so processes of different versions would misread each other. So the sender's version
comes first (`pack_message`). The tables that all ranks of a load share (`shared`) stay packed, as no event loop needs
them. They go into Ray's object store once per load, and nodes copy them from each other, once each.
"""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.errors import VersionMismatch
from cluster.telemetry.stats import ArenaUse, LoadCounters, NodeStats, RankStats
from longshore.installation import VERSION
from storage.checksum import Span
from storage.errors import LongshoreError
from storage.host.memory import GpuMemory, MemoryPool
from storage.host.processes import ProcessId
from storage.peers import Peer, PeerCarrier
from storage.store_ref import StoreAccess

if TYPE_CHECKING:
    from cluster.telemetry.report import SettingStatus

UNVERSIONED = (4, "an earlier version")  # version of processes that do not report one

Version = tuple[int, str]  # see `longshore.installation.VERSION`


def check_version(theirs: Version, sender: str, receiver: str) -> None:
    """Raise VersionMismatch unless the sender runs the same Longshore as this process, which is the receiver."""
    if tuple(theirs) == VERSION:
        return
    raise VersionMismatch(
        f"{sender} runs longshore {theirs[1]} (protocol {theirs[0]}), {receiver} {VERSION[1]} (protocol {VERSION[0]})",
        hint="install one version on every node and for every client, then end all running processes with "
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
    """Settings of a rank's reads from the store (see `cluster.config.Config`)."""

    threads: int
    attempts: int
    read_timeout_s: float
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A process that hosts a rank (`actors.hosting`) and is in a group. All members load the same revision."""

    load_id: str
    group: str  # name of the group
    uri: str  # URI of the model
    revision: str
    process: ProcessId


@dataclass(frozen=True, slots=True)
class NodePeer:
    """A node that takes part in a load, with the ranks that one attempt brought there."""

    node_id: str
    ranks: tuple[int, ...]  # of the load, there
    peer: Peer | None  # where it serves chunks; None: nowhere
    attempt: int = 1  # nodes of one attempt feed each other; they ask those of earlier ones before the store
    filled: bool = False  # its ranks were complete when this was written: it may ask for nothing more


@dataclass(frozen=True, slots=True)
class PeerSource:
    """A node, and the load in whose name it is asked for chunks."""

    peer: Peer
    load_id: str
    key: bytes = field(repr=False)  # with which nodes of that load prove that they take part
    in_place: bool = False  # it reads the store if the chunk's home, named before it, cannot: else it is not asked


@dataclass(frozen=True, slots=True)
class Lender:
    """A node whose readers read a model now, as the other nodes with such readers see it (`actors.node.lending`)."""

    node_id: str
    source: PeerSource
    weight: float = 1.0  # the share of the chunks that it reads from the store, relative to the other nodes
    reads: bool = True  # False: its readers are done, and it lends what its arena still has


@dataclass(frozen=True, slots=True)
class Lends:
    """A load of readers that shares a model out with those of other nodes."""

    load_id: str
    model: bytes  # the same for loads that can share chunks (`actors.node.lending.model_key`)
    key: bytes = field(repr=False)  # of `PeerSource`
    rates: tuple[float, float] = (0.0, 0.0)  # see `cluster.scheduling.topology.sending_weights`
    version: int = -1  # of the list of lenders that it has
    reads: bool = True  # see `Lender`


@dataclass(frozen=True, slots=True)
class Lenders:
    """The nodes whose readers read a model now, as far as they have changed since an earlier list."""

    model: bytes
    version: int  # larger for a later list
    lenders: tuple[Lender, ...]
    since: int = -1  # version of the earlier list; -1: these are all nodes
    gone: tuple[str, ...] = ()  # nodes that are not on it any more


@dataclass(frozen=True, slots=True)
class OlderLoad:
    """An older load of the same revision, whose nodes may have the chunks of a later one."""

    load_id: str
    key: bytes = field(repr=False)  # of `PeerSource`
    nodes: tuple[NodePeer, ...]  # that serve, and have no ranks of the later load
    tables: bytes = field(default=b"", repr=False)  # packed SharedTables: which chunks each may have. Empty: unknown


@dataclass(frozen=True, slots=True)
class Members:
    """The nodes of a load, and those of others, as far as they may read chunks from each other."""

    nodes: tuple[NodePeer, ...] = ()  # all of the load; empty: each reads the store for itself
    key: bytes = field(default=b"", repr=False)  # of the load; see `PeerSource`
    older: tuple[OlderLoad, ...] = ()

    def pack(self) -> bytes:
        """Return the members as bytes, for `unpack`. Agents get them beside a `NodeJob`."""
        return pickle.dumps(self, protocol=5)

    @staticmethod
    def unpack(data: bytes) -> Members:
        """Return what `pack` made into bytes, in a process of our own. Without bytes: no members."""
        members: Members = pickle.loads(data) if data else Members()
        return members


@dataclass(frozen=True, slots=True, eq=False)
class NodeJob:
    """One node's share of a load."""

    load_id: str
    attempt: int
    shared: bytes  # packed SharedTables; empty if they are sent beside the message
    store_identity: str  # part of the cache key of chunks without a collision-resistant digest
    ranks: tuple[int, ...]  # ranks of the load on this node
    done: frozenset[int]  # ranks that are complete; empty unless an agent was restarted
    min_slots: int  # least slots with which this load makes progress
    chunk_attempts: int  # workers that may fail on one chunk before the load fails
    lease_deadline_s: float
    record: bytes  # the coordinator's own record; agents return it to a restarted coordinator
    placement: str = "via_arena"  # see LoadRequest
    most_requests: int = 16  # limit of requests in flight of one rank
    hedge_factor: float = 0.0  # see cluster.scheduling.concurrency; 0: no duplicate requests
    hedge_after_s: float = 0.0
    incarnations: tuple[int, ...] = ()  # of `ranks`; a new agent too ignores earlier ones
    again: bool = False  # an agent received this job before, and was restarted
    replaced: bool = False  # a rank's process was replaced before that
    model: str = ""  # label of its metrics (`cluster.telemetry.metrics`)
    host_bytes: int = 0  # host memory that its ranks have still to take for tensors
    process: ProcessId | None = None  # process that hosts the rank; the rank ends with it at the latest
    group: GroupMember | None = None  # membership of that process
    is_local: bool = False  # the model is local files
    on_demand: bool = False  # its ranks are readers, which get chunks only when they ask (`RankUpdate.asks`)
    revision: str = ""  # of the model; readers of a group read the same, and an update replaces that of a load
    group_patience_s: float = 5.0  # a chunk waits this long for readers without progress while others need its slot

    @property
    def part(self) -> tuple[str, int]:
        """Return (load, attempt). A node that takes over ranks of a lost node has a second share beside its first."""
        return self.load_id, self.attempt


@dataclass(frozen=True, slots=True, eq=False)
class RankJob:
    """One rank's share of a load."""

    load_id: str
    attempt: int
    rank: int
    incarnation: int
    shared: bytes  # packed SharedTables; empty if they are sent beside the message
    store: StoreAccess
    fetch: FetchSettings
    placement: str = "via_arena"  # see LoadRequest
    mapped: bool = False  # the plan has a device map
    offload_folder: str = ""  # folder for the modules on disk
    logs: tuple[str, str] = ("", "")  # see cluster.telemetry.logs.LogSettings
    revision: str = ""  # of the model; "" where nobody updates it


@dataclass(frozen=True, slots=True, eq=False)
class UpdateJob:
    """One rank's share of an update: its model's next revision, of which it reads what changed."""

    model_id: str  # the load that the rank holds
    update_id: str
    base: str  # revision that the rank must have
    streaming: bool  # place what comes into the model's own tensors; there is no exchange
    job: RankJob  # of the load that reads what changed (`cluster.planning.update_plan`)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker works on, for a restarted coordinator."""

    load_id: str
    store: StoreAccess  # how it reads; no saved state has its credentials
    revision: str  # of the contents that the rank has, or loads
    update_id: str = ""  # update that it stages, or has staged and not exchanged
    next_store: StoreAccess | None = None  # how that update reads


ArenaAccess = tuple[tuple[str, str], ...]  # arena path, and the incarnation of the agent that granted access


@dataclass(frozen=True, slots=True)
class RankHello:
    """The first message of a rank's process to the agent of its node. The rank uses no part of the arena then."""

    load_id: str
    attempt: int
    rank: int
    incarnation: int
    process: ProcessId
    placed: tuple[int, ...] = ()  # chunks it already has; empty unless the agent was restarted
    number: int = 0  # number of the process's message; a late older one changes nothing
    others: ArenaAccess = ()  # access of other ranks of the process
    direct: tuple[int, ...] = ()  # chunks that it can receive in its own memory
    fetched: dict[str, tuple[int, ...]] = field(default_factory=dict)  # chunks that it has fetched, by source
    revision: str = ""  # that it loads, where it may change: an agent with the tables of another does not know it

    def chunk_ids(self) -> Iterator[int]:
        """Iterate over the ids of all chunks that this message names."""
        yield from itertools.chain(self.placed, self.direct, *self.fetched.values())


@dataclass(frozen=True, slots=True)
class JoinReply:
    """The agent's answer to RankHello, with the path of the arena."""

    arena_path: str
    known: bool = True  # False: the agent does not know this load yet; send RankHello again later
    arena_epoch: str = ""  # identifies the arena; a restarted agent may have made a new one
    agent: str = ""  # the agent's incarnation
    stop: LongshoreError | None = None  # the load is over for this rank
    batch: int = 1  # chunks per message
    disk_path: str = ""  # the node's folder of chunks on disk; empty: none
    node_id: str = ""  # of the agent's node
    peer_carrier: PeerCarrier = "http"  # how chunks come from other nodes


DIRECT = NO_SLOT = -1  # instead of a slot number
# Where a chunk came from, if not simply from the store.
DISK_READ, DISK_UNUSABLE, ARENA_READ, PEER_READ = "disk", "disk_unusable", "arena", "peer"


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """The right to write one chunk into one slot, or (DIRECT) the order to receive it in the rank's own memory."""

    lease_id: str
    chunk: int
    slot: int
    deadline_s: float  # seconds from now; a commit after that changes nothing
    on_disk: bytes = b""  # key of the chunk on the node's disk; empty: not there
    read_slot: int = NO_SLOT  # kept slot with the chunk, held for this lease: read it from there
    keep_slot: int = NO_SLOT  # kept slot to copy the verified chunk to
    peers: tuple[PeerSource, ...] = ()  # nodes that have the chunk, or will, to be asked in this order; then the store
    pass_digest: bool = False  # it has no published digest, and other nodes get it with one by `PASSED_HASH`
    feeds: bool = False  # other nodes read the chunk from this one, and wait for the report that it is here
    share_left: float | None = None  # see `storage.peers.Asker`
    hands_over: bool = False  # the same


@dataclass(frozen=True, slots=True)
class Commit:
    """A report that a chunk is in its slot, or in the rank's memory, whole and verified."""

    lease_id: str
    chunk: int
    spans: tuple[Span, ...] = ()  # checksums of a chunk without digest, if the store has one of the object
    source: str = ""  # DISK_READ, ARENA_READ, PEER_READ; empty, or DISK_UNUSABLE if the disk failed: from the store
    kept: bool = False  # it is in the lease's kept slot too
    digest: bytes = b""  # that other nodes get with it (`LeaseOrder.pass_digest`)
    peer: int = -1  # which of the lease's peers sent the last byte; -1: none
    came: tuple[tuple[int, int], ...] = ()  # (which of the peers, bytes) of those that sent a part before it
    failed_peers: tuple[int, ...] = ()  # which of them did not answer, were far too slow, or sent other bytes


def credited(commit: Commit, sources: Sequence[PeerSource], size_bytes: int) -> dict[str, int]:
    """Return by host how many bytes of a committed chunk came from it. Empty: the last byte came from no other node."""
    found: Counter[str] = Counter()
    if not 0 <= commit.peer < len(sources):
        return found
    for at, sent_bytes in commit.came:
        if 0 <= at < len(sources) and at != commit.peer:
            found[sources[at].peer.host] += min(max(0, sent_bytes), size_bytes)
            size_bytes -= min(max(0, sent_bytes), size_bytes)
    found[sources[commit.peer].peer.host] += size_bytes
    return found


@dataclass(frozen=True, slots=True)
class FetchFailure:
    """A report that a worker failed on a chunk. Its connection is closed, so nothing more is written to the slot."""

    lease_id: str
    chunk: int
    error: LongshoreError
    tries: int


@dataclass(frozen=True, slots=True)
class RankUpdate:
    """A report of a rank's work since its last update, and of the leases that it wants."""

    load_id: str
    attempt: int
    rank: int
    incarnation: int
    process: ProcessId
    number: int = 0  # see RankHello
    committed: tuple[Commit, ...] = ()
    failed: tuple[FetchFailure, ...] = ()
    placed: tuple[int, ...] = ()  # chunks copied to the device: it no longer reads their slots
    returned: tuple[str, ...] = ()  # leases returned unused, or closed on the agent's demand
    want_leases: int = 0
    wait_s: float = 0.0  # how long the agent may hold the answer when it has no orders
    placed_bytes: int = 0  # so far
    retries: dict[str, int] = field(default_factory=dict)  # since the last update, by cause
    requests: tuple[tuple[int, float, float], ...] = ()  # successful requests: bytes, duration in s, age in s
    throttled: int = 0  # answers of the store since the last update that asked for fewer requests
    store_s: float | None = None  # that a chunk from the store takes it now; None: it is not known
    leaving: bool = False  # the last message: the rank no longer uses the arena, done or not
    others: ArenaAccess = ()  # see RankHello; when leaving
    stats: RankStats | None = None  # once a heartbeat, and when leaving
    asks: tuple[int, ...] = ()  # chunks that a reader on demand needs; it may have placed them before
    returned_unread: tuple[int, ...] = ()  # chunks that it asked for and may ask for again; it does not read them now
    passed: tuple[tuple[int, int], ...] = ()  # half-open ranges of ids of chunks that it will not ask for

    def chunk_ids(self) -> Iterator[int]:
        """Iterate over the ids of all chunks that this update names, those in ranges left out."""
        yield from (commit.chunk for commit in self.committed)
        yield from (failure.chunk for failure in self.failed)
        yield from (*self.placed, *self.asks, *self.returned_unread)

    def lease_ids(self) -> list[str]:
        """Return the ids of the leases that ended with this update."""
        committed = [commit.lease_id for commit in self.committed]
        return [*committed, *(failure.lease_id for failure in self.failed), *self.returned]


@dataclass(frozen=True, slots=True)
class Orders:
    """The agent's answer to RankUpdate."""

    leases: tuple[LeaseOrder, ...] = ()
    readable: tuple[tuple[int, int], ...] = ()  # (chunk, slot): committed chunks this rank still needs
    closed_leases: tuple[str, ...] = ()  # expired: stop writing, close the connection, return the id
    short_of: str = ""  # the reason for fewer leases than wanted: "slots", or "chunks" to fetch
    requests: int = 0  # new limit of requests in flight; 0: unchanged
    rejoin: bool = False  # the agent restarted or does not know the rank; send RankHello again
    stop: LongshoreError | None = None  # the load is over for this rank


@dataclass(frozen=True, slots=True)
class RankBeat:
    """The state of a rank, as its agent knows it."""

    load_id: str
    attempt: int
    rank: int
    incarnation: int
    pid: int  # 0: its worker has not sent RankHello yet
    placed_bytes: int
    silent_s: float  # time since its last message, or since one was due
    done: bool = False  # it has all its slices, and no further messages are due
    requests: int = 0  # requests in flight in its last message
    allowed_requests: int = 0  # its limit of requests in flight
    own_bytes: int = 0  # memory of its process without the arena; 0: not known


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts of a node that plans depend on."""

    node_id: str
    host: str
    arena_bytes: int  # limit of the arena
    pools: tuple[MemoryPool, ...]  # its memory: what windows of arenas have yet to take is not free, what is kept is
    gpus: tuple[GpuMemory, ...]  # in the order of the driver; empty where unknown
    version: str
    slot_bytes: int = 0  # slot size of its arena; 0: the coordinator's setting
    window_bytes: int = 0  # of the arena the window, which takes its memory at once
    peer: Peer | None = None  # where it serves chunks to other nodes; None: nowhere
    peer_bytes_per_s: float = 0.0  # that it may send to them; 0: not set
    peer_measured_bytes_per_s: float = 0.0  # that it sent to them before; 0: not known


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """The slots of a load on one node: used ones, and those that it may use at any time."""

    load_id: str
    slots: int
    model: str = ""  # label of the load's metrics
    pid: int = 0  # of the process that hosts the rank (`actors.hosting`)
    waits: bool = False  # it has no slots yet and waits for them

    def __str__(self) -> str:
        who = f"{self.load_id} (process {self.pid})" if self.pid else self.load_id
        return f"{who}: {'waits for ' if self.waits else ''}{self.slots}"


@dataclass(frozen=True, slots=True)
class LoadBeat:
    """The state of one load on one node."""

    load_id: str
    attempt: int
    store_bytes: int
    error: LongshoreError | None  # the load cannot go on here
    complete: bool
    model: str = ""  # label of its metrics
    left_out: tuple[Peer, ...] = ()  # nodes from which it reads nothing for a while, because they failed
    revision: str = ""  # of the tables that the agent has, as in `NodeJob`


@dataclass(frozen=True, slots=True)
class AgentBeat:
    """A heartbeat of an agent, with the progress of its ranks."""

    node_id: str
    host: str
    incarnation: str  # a new one each time the agent's process starts
    loads: tuple[LoadBeat, ...]
    ranks: tuple[RankBeat, ...]
    arena: ArenaUse
    records: dict[str, bytes] = field(default_factory=dict)  # load id -> record, on request
    number: int = 0  # number of the heartbeat of its incarnation; a late older one changes no counter
    started_ticks: int = 0  # when the agent's process started, in clock ticks after its host did
    # Totals by model since the agent began, of models whose totals grew since a coordinator last answered.
    counters: dict[str, LoadCounters] = field(default_factory=dict)
    counted_by: str = ""  # incarnation of that coordinator; empty: none, and these are all totals
    stats: NodeStats | None = None
    settings: tuple[SettingStatus, ...] = ()  # the agent's settings, until the coordinator answers
    members: tuple[GroupMember, ...] = ()  # members of groups, until they release their rank or die
    peer: Peer | None = None  # where it serves chunks to other nodes; None: nowhere
    lends: tuple[Lends, ...] = ()  # its loads of readers that share chunks with other nodes


@dataclass(frozen=True, slots=True)
class BeatReply:
    """The coordinator's answer to a heartbeat."""

    coordinator: str  # its incarnation
    unknown_loads: tuple[str, ...] = ()  # the agent sends their records next time
    ended_loads: tuple[str, ...] = ()  # the agent removes them
    node_dead: bool = False  # Ray counts the node as dead; the agent must end
    members: tuple[GroupMember, ...] = ()  # reported by an earlier agent of the node; adopt those that live
    lenders: tuple[Lenders, ...] = ()  # for the beat's `lends`, as far as their versions are old
