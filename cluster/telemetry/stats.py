"""Counters and gauges of ranks and nodes, as messages carry them and as reports show them.

Counters are cumulative since the process that counts began, and only grow. Everything else describes a moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # every worker imports this module
    from storage.arena.chunk_cache import CacheStats
    from storage.disk.tier import DiskStats
    from storage.host.memory import GpuMemory


class Jsonable:
    """Mixin that adds `as_dict` to a dataclass."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, ready for `json.dumps`."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True, slots=True)
class StageTimes(Jsonable):
    """Thread-seconds spent and bytes handled by the stages of one or more ranks."""

    fetch_s: float = 0.0  # inside the store's reads
    fetch_bytes: int = 0  # of reads that came to their end, those with a wrong digest included
    verify_s: float = 0.0  # hashing
    verify_bytes: int = 0
    place_s: float = 0.0  # copying from the arena to the device, and what `fresh_s` has
    place_bytes: int = 0
    place_fetching_s: float = 0.0  # of place_s: by threads that placed at once what they had fetched
    fresh_s: float = 0.0  # of place_s: until host memory that was never used was present
    device_s: float = 0.0  # after a copy, until the device had done it
    wait_chunk_s: float = 0.0  # placer idle: no committed chunk to copy
    disk_s: float = 0.0  # reading and checking chunks on the node's disk
    disk_bytes: int = 0
    cache_s: float = 0.0  # copying chunks to kept slots of the arena, and from there
    cache_bytes: int = 0
    # What the requests that a rank may have in flight did: seconds of the rank, divided among so many requests. The
    # rest of its load time there was nothing left to fetch.
    working_s: float = 0.0  # reading, verifying, and placing at once
    wait_slot_s: float = 0.0  # idle: every slot of the arena was in use
    wait_lease_s: float = 0.0  # idle: the agent had not answered yet
    wait_retry_s: float = 0.0  # waiting before another try

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(**{name: getattr(self, name) + getattr(other, name) for name in _STAGE_FIELDS})

    def __sub__(self, other: StageTimes) -> StageTimes:
        return StageTimes(**{name: getattr(self, name) - getattr(other, name) for name in _STAGE_FIELDS})

    def exact(self) -> StageTimes:
        """Return the times rounded to 2**-20 s, so that sums do not depend on the order of their terms.

        A counter that falls by a rounding error would look to Prometheus like a restart.
        """
        times = {name: getattr(self, name) for name in _STAGE_FIELDS if name.endswith("_s")}
        return replace(self, **{name: round(spent_s * 2**20) / 2**20 for name, spent_s in times.items()})


_STAGE_FIELDS = tuple(item.name for item in fields(StageTimes))


@dataclass(frozen=True, slots=True)
class ProcessMemory(Jsonable):
    """One process's own memory in a load: what it holds apart from memory that it shares (the arena)."""

    role: str  # "coordinator", "planning", "agent" or "rank 3"
    host: str
    baseline_bytes: int  # before the load, everything imported
    peak_bytes: int
    destination_bytes: int = 0  # host memory of its tensors

    @property
    def beyond_bytes(self) -> int:
        """Memory that the load took beyond its destination."""
        return max(0, self.peak_bytes - self.baseline_bytes - self.destination_bytes)


@dataclass(frozen=True, slots=True)
class RankStatus(Jsonable):
    """One rank of a load or of a resident model at a moment."""

    rank: int
    host: str  # "" before it has a place
    # "waiting": for its place or its worker; "starting": that comes up; "loading"; "ready"; "lost": to be replaced
    state: str
    incarnation: int  # 0 for the first worker of the rank, one more for each replacement
    placed_bytes: int  # as LoadProgress has them, of this rank
    total_bytes: int  # likewise; 0: not known
    own_bytes: int  # the worker's own memory, the arena not counted; 0: not known
    device: str  # "cpu" or "cuda"; which one, when it has everything


@dataclass(frozen=True, slots=True)
class RankReport(Jsonable):
    """One rank, when it has all its slices."""

    rank: int
    node: str  # node id
    host: str
    pid: int
    device: str  # "cpu" or "cuda:0"; "cuda:0+cpu+disk" with a device map
    incarnation: int  # 0 for the first worker of the rank, one more for each replacement
    size_bytes: int  # bytes of its slices
    device_bytes: int  # memory taken for them, alignment included
    stages: StageTimes
    peak_host_bytes: int  # the worker's own memory at its highest, the arena not counted
    start_s: float  # from the coordinator's order to the first chunk to fetch or to copy
    load_s: float  # from there to the last byte placed
    baseline_host_bytes: int = 0  # the worker's own memory before the load, everything imported
    cpu_s: float = 0.0  # processor seconds of the worker during load_s
    host_busy: float = 0.0  # part of the host's processor time in load_s that anybody used, 0 to 1
    cpus: int = 0  # processors that the worker may use
    requests: int = 0  # allowed in flight at its end
    peak_requests: int = 0  # the most that were allowed at any time
    throttles: int = 0  # answers of the store that asked for fewer
    converted_tensors: int = 0  # stored tensors that were cast or quantized on their way in
    converted_bytes: int = 0  # what was read for them
    peak_staging_bytes: int = 0  # of device memory beside the slices, for tensors that were still to be converted
    convert_s: float = 0.0  # until they were
    bytes_by_device: dict[str, int] = field(default_factory=dict)  # of device_bytes, with a device map

    @property
    def destination_host_bytes(self) -> int:
        """Host memory that the tensors take."""
        if self.bytes_by_device:
            return self.bytes_by_device.get("cpu", 0)
        return self.device_bytes if self.device == "cpu" else 0


ONLY_PART = "only part of it is needed on the node"


@dataclass(frozen=True, slots=True)
class ObjectCheck:
    """The result of checking one object, on one node or on all that needed it."""

    key: str
    checked_by: str = ""  # name of the hash that the store keeps of it; empty when it was not checked
    reason: str = ""  # why it was not checked


def join_checks(checks: Iterable[ObjectCheck]) -> tuple[ObjectCheck, ...]:
    """One for each object, by key: checked when every node that needed it did."""
    joined: dict[str, ObjectCheck] = {}
    for check in checks:
        before = joined.get(check.key)
        if before is None or before.checked_by:
            joined[check.key] = check
    return tuple(joined[key] for key in sorted(joined))


def verified_by(checks: Iterable[ObjectCheck]) -> str:
    """Return the check that holds for all objects: "store:crc64nvme"; "transport" if any was not checked."""
    names = {check.checked_by for check in checks}
    return "transport" if not names or "" in names else f"store:{'+'.join(sorted(names))}"


def unchecked_counts(checks: Iterable[ObjectCheck]) -> dict[str, int]:
    """Return the number of objects that were not checked, by reason."""
    return dict(Counter(check.reason for check in checks if not check.checked_by))


_OF_THE_AGENT = {
    "arena_bytes",
    "window_bytes",
    "arena_limit_bytes",
    "peak_host_bytes",
    "baseline_host_bytes",
    "disk_unkept_chunks",
}


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """A node's arena and its disk tier at a moment."""

    arena_bytes: int  # its limit
    committed_bytes: int  # of chunks that stay for later loads
    leased_slots: int
    quarantined_slots: int
    disk_unkept_chunks: int = 0  # as in NodeReport
    window_bytes: int = 0  # of the limit: the memory that loads work in
    taken_bytes: int = 0  # memory that the arena takes now


@dataclass(frozen=True, slots=True)
class NodeReport(Jsonable):
    """One node's share of a load."""

    node: str
    host: str
    needed_chunks: int  # chunks that any rank of the node touches
    needed_bytes: int
    store_chunks: int  # fetched from the store and committed
    store_bytes: int
    cached_chunks: int  # found in the arena
    cached_bytes: int
    refetched_chunks: int  # fetched, though had before: they had been evicted, or their holder died
    corrupt_chunks: int  # fetched and thrown away: digest mismatch
    retries: dict[str, int] = field(default_factory=dict)  # by cause
    arena_bytes: int = 0  # memory that the arena took at the end of the load
    window_bytes: int = 0  # of it the window
    arena_limit_bytes: int = 0  # the most that it may take
    peak_host_bytes: int = 0  # the agent's own memory at its highest, the arena not counted
    baseline_host_bytes: int = 0  # and before the load
    overfetch_bytes: int = 0  # inside the needed chunks, wanted by no rank of the node
    direct: bool = False  # what one rank alone wants, and wants whole, was to be received in its memory
    direct_bytes: int = 0  # of store_bytes: received in the memory of ranks, past the arena
    refetched_bytes: int = 0  # had before: needed_bytes = store + disk + peer + cached + unknown - refetched bytes
    hedges: int = 0  # chunks that were fetched by two at once, because the first was far slower than others
    hedges_won: int = 0  # of those, how often the second brought the chunk
    disk_chunks: int = 0  # read from the node's disk, verified and committed
    disk_bytes: int = 0
    peer_chunks: int = 0  # read from other nodes, verified and committed
    peer_bytes: int = 0
    peer_bytes_from: dict[str, int] = field(default_factory=dict)  # of them, by the address of the node that sent them
    sent_bytes: int = 0  # to other nodes, which have received all of it
    disk_unkept_chunks: int = 0  # not written there for want of room or by a fault, of any load since the agent began
    unknown_chunks: int = 0  # had before the agent was restarted: fetched by a rank that is gone, or found in the arena
    unknown_bytes: int = 0
    objects: tuple[ObjectCheck, ...] = ()  # that any rank of the node touches, when there is no manifest

    @property
    def bytes_by_source(self) -> dict[str, int]:
        """Bytes of needed chunks, by where the node had them from: SOURCES and "unknown"."""
        return {
            "store_via_arena": self.store_bytes - self.direct_bytes,
            "store_direct": self.direct_bytes,
            "arena": self.cached_bytes,
            "disk": self.disk_bytes,
            "peer": self.peer_bytes,
            "unknown": self.unknown_bytes,
        }

    def plus(self, later: NodeReport) -> NodeReport:
        """Return this share of the load together with a later one of the same node.

        Integers are added and booleans joined by "or", unless `_OF_THE_AGENT` names them. A chunk that both shares need
        counts for each, because one of them found it in the arena.
        """
        names = [item.name for item in fields(self) if item.name not in _OF_THE_AGENT]
        pairs = {name: (getattr(self, name), getattr(later, name)) for name in names}
        sums: dict[str, Any] = {
            name: mine or theirs if isinstance(mine, bool) else mine + theirs
            for name, (mine, theirs) in pairs.items()
            if isinstance(mine, int)
        }
        return replace(
            self,
            **sums,
            retries=dict(Counter(self.retries) + Counter(later.retries)),
            peer_bytes_from=dict(Counter(self.peer_bytes_from) + Counter(later.peer_bytes_from)),
            objects=join_checks((*self.objects, *later.objects)),
        )


SOURCES = ("store_via_arena", "store_direct", "disk", "arena", "peer")  # as in LoadReport.bytes_by_source


@dataclass(frozen=True, slots=True)
class RankStats:
    """Stats that a rank sends its agent once a heartbeat."""

    stages: StageTimes  # so far
    requests: int  # in flight now
    allowed_requests: int  # that it may have in flight


@dataclass(frozen=True, slots=True)
class LoadCounters:
    """Counters of one load, or of all loads of one model, on one node: what this process of the agent saw happen."""

    bytes_by_source: Mapping[str, int] = field(default_factory=dict)  # SOURCES
    chunks_by_source: Mapping[str, int] = field(default_factory=dict)
    verified_chunks: int = 0  # fetched, and their digest was right
    corrupt_chunks: int = 0  # fetched and thrown away: it was wrong
    retries: Mapping[str, int] = field(default_factory=dict)  # by cause
    leases_granted: int = 0
    leases_taken_back: int = 0  # of ranks that died or took too long
    hedges: int = 0
    hedges_won: int = 0
    throttles: int = 0  # answers of the store that asked for fewer requests
    stages: StageTimes = field(default_factory=StageTimes)  # of its ranks, of those that are gone too
    sent_bytes: int = 0  # to other nodes, which have received all of it

    def __add__(self, other: LoadCounters) -> LoadCounters:
        return LoadCounters(
            **{item.name: _sum(getattr(self, item.name), getattr(other, item.name)) for item in fields(self)}
        )


@dataclass(frozen=True, slots=True)
class NodeTraffic(Jsonable):
    """Bytes of one load that a node has had so far, and that it has sent: what this process of its agent saw."""

    bytes_by_source: Mapping[str, int] = field(default_factory=dict)  # SOURCES
    peer_bytes_from: Mapping[str, int] = field(default_factory=dict)  # of "peer", by the sending node
    sent_bytes: int = 0  # to other nodes, which have received all of it

    def __add__(self, other: NodeTraffic) -> NodeTraffic:
        return NodeTraffic(
            **{item.name: _sum(getattr(self, item.name), getattr(other, item.name)) for item in fields(self)}
        )

    def named(self, hosts: Mapping[str, str]) -> NodeTraffic:
        """Return the same with names of hosts for the addresses of senders, as far as `hosts` has them by address."""
        return replace(self, peer_bytes_from=named_senders(self.peer_bytes_from, hosts))


def named_senders(bytes_from: Mapping[str, int], hosts: Mapping[str, str]) -> dict[str, int]:
    """Return bytes by the sender's host name instead of its address, the most first.

    Args:
        bytes_from: Bytes by the address of the node that sent them.
        hosts: Host names by address. An address that is missing stays as it is.

    Returns:
        Bytes by host.
    """
    found: Counter[str] = Counter()
    for address, size_bytes in bytes_from.items():
        found[hosts.get(address, address)] += size_bytes
    return dict(found.most_common())


def _sum(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, Mapping):
        return {key: mine.get(key, 0) + theirs.get(key, 0) for key in {**mine, **theirs}}
    return mine + theirs


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Memory of a node at a moment. 0: not known."""

    host_free_bytes: int = 0  # of the pool that has least: the host's, or that of a control group around the agent
    host_total_bytes: int = 0  # of that pool
    shm_free_bytes: int = 0  # of the file system of the arena
    shm_total_bytes: int = 0
    agent_bytes: int = 0  # the agent's own, the arena not counted
    gpus: tuple[GpuMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeStats:
    """Stats of a node, in its agent's heartbeat."""

    cache: CacheStats
    disk: DiskStats | None = None  # None: no disk tier
    memory: NodeMemory = field(default_factory=NodeMemory)
