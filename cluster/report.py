"""What a load tells its caller: progress while it runs, a report when it is done, status of all models.

Plain frozen data; `as_dict` of each is what `--json` prints.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


class _Jsonable:
    """Adds `as_dict` to a dataclass."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, ready for `json.dumps`."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True, slots=True)
class StageTimes(_Jsonable):
    """Thread-seconds spent and bytes handled by the stages of one or more ranks."""

    fetch_s: float = 0.0  # inside the store's reads
    fetch_bytes: int = 0  # bytes that left the store, failed attempts included
    verify_s: float = 0.0  # hashing
    verify_bytes: int = 0
    place_s: float = 0.0  # copying from the arena to the device
    place_bytes: int = 0
    device_s: float = 0.0  # after a copy, until the device had done it
    wait_chunk_s: float = 0.0  # placer idle: no committed chunk to copy
    # What the requests that a rank may have in flight did: seconds of the rank, divided among so many requests. The
    # rest of its load time there was nothing left to fetch.
    working_s: float = 0.0  # reading and verifying
    wait_slot_s: float = 0.0  # idle: every slot of the arena was in use
    wait_lease_s: float = 0.0  # idle: the agent had not answered yet
    wait_retry_s: float = 0.0  # waiting before another try

    def __add__(self, other: StageTimes) -> StageTimes:
        mine, theirs = asdict(self), asdict(other)
        return StageTimes(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True, slots=True)
class RankReport(_Jsonable):
    """One rank, when it has all its slices."""

    rank: int
    node: str  # node id
    host: str
    pid: int
    device: str  # "cpu" or "cuda:0"
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
    requests: int = 0  # it ended with so many requests in flight
    peak_requests: int = 0
    throttles: int = 0  # answers of the store that asked for fewer

    @property
    def destination_host_bytes(self) -> int:
        """Host memory that the tensors take."""
        return self.device_bytes if self.device == "cpu" else 0


@dataclass(frozen=True, slots=True)
class NodeReport(_Jsonable):
    """One node's share of a load."""

    node: str
    host: str
    needed_chunks: int  # chunks that any rank of the node touches
    needed_bytes: int
    store_chunks: int  # fetched from the store and committed
    store_bytes: int
    cached_chunks: int  # found in the arena
    cached_bytes: int
    refetched_chunks: int  # fetched again because they had been evicted or their holder died
    corrupt_chunks: int  # fetched and thrown away: digest mismatch
    retries: dict[str, int] = field(default_factory=dict)  # by cause
    arena_bytes: int = 0
    peak_host_bytes: int = 0  # proportional set size of the node agent at its highest
    overfetch_bytes: int = 0  # inside the needed chunks, wanted by no rank of the node


@dataclass(frozen=True, slots=True)
class LoadReport(_Jsonable):
    """What a finished load did. Times in seconds, sizes in bytes."""

    model_id: str
    uri: str
    revision: str
    verified: str  # "blake3" / "xxh3_128": every chunk by digest; "transport": length, range and ETag only
    placement_mode: str  # "via_arena"
    resident: bool  # True when an already loaded model was handed out: nothing moved
    tensor_parallel_size: int
    fsdp_size: int
    data_parallel_size: int
    model_bytes: int  # all tensors of the checkpoint
    placed_bytes: int  # slices of all ranks
    overfetch_bytes: int  # inside needed chunks, wanted by no rank of the node
    plan_s: float  # manifest read, checked and planned
    start_s: float  # actors started, until a rank had its first chunk to fetch or to copy
    load_s: float  # of the slowest rank, from there to its last byte placed
    total_s: float  # from the client's call
    attempts: int
    ranks: tuple[RankReport, ...]
    nodes: tuple[NodeReport, ...]
    first_byte_s: float = 0.0  # from the call at the coordinator until a rank asked for its first bytes, or copied them
    ready_after_last_byte_s: float = 0.0  # from the last byte placed until the model was READY

    @property
    def store_bytes(self) -> int:
        """Bytes of committed chunks that left the store."""
        return sum(node.store_bytes for node in self.nodes)

    @property
    def cached_bytes(self) -> int:
        return sum(node.cached_bytes for node in self.nodes)

    @property
    def verified_chunks(self) -> int:
        """Chunks whose digest was checked in this load."""
        return 0 if self.verified == "transport" else sum(node.store_chunks for node in self.nodes)

    @property
    def stages(self) -> StageTimes:
        return sum((rank.stages for rank in self.ranks), StageTimes())

    @property
    def peak_host_bytes(self) -> int:
        """Sum over our processes of their highest proportional set sizes: tensors in CPU memory included."""
        ranks = sum(rank.peak_host_bytes for rank in self.ranks)
        return ranks + sum(node.peak_host_bytes for node in self.nodes)


@dataclass(frozen=True, slots=True)
class LoadProgress(_Jsonable):
    """One moment of a load."""

    model_id: str
    uri: str
    state: str  # a state of cluster.load_state
    placed_bytes: int
    total_bytes: int  # bytes all ranks will hold; 0 until planned
    store_bytes: int
    ranks_ready: int
    ranks_total: int
    elapsed_s: float
    message: str = ""  # what it waits for, when it waits


@dataclass(frozen=True, slots=True)
class ModelStatus(_Jsonable):
    """One model of the cluster."""

    progress: LoadProgress
    revision: str
    tensor_parallel_size: int
    fsdp_size: int
    data_parallel_size: int
    device: str
    keep: bool
    holders: int
    rank_hosts: tuple[str, ...]  # host of rank i
    error: str = ""


@dataclass(frozen=True, slots=True)
class NodeStatus(_Jsonable):
    """One node agent and its arena."""

    node: str
    host: str
    arena_bytes: int
    used_bytes: int  # committed chunks
    leased_slots: int
    quarantined_slots: int
    heartbeat_age_s: float


@dataclass(frozen=True, slots=True)
class GangStatus(_Jsonable):
    """Workers of a released model that wait for the next load (`Config.warm_workers_s`)."""

    gang_id: str  # of the first model they had
    device: str
    rank_hosts: tuple[str, ...]  # host of worker i
    kept_bytes: int  # host memory that they keep for the next load
    idle_s: float


@dataclass(frozen=True, slots=True)
class ClusterStatus(_Jsonable):
    """Everything `longshore status` shows."""

    version: str
    coordinator_incarnation: str
    models: tuple[ModelStatus, ...]
    nodes: tuple[NodeStatus, ...]
    gangs: tuple[GangStatus, ...] = ()  # idle ones
