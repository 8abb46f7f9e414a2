"""Results for callers: progress while a load runs, its report at the end, status of all models.

Plain frozen data; `as_dict` of each is what `--json` prints.

Which stage a load spent its time on: the one that has to get faster if the load is to. Pure.

    start-up   planning and starting workers took longer than moving bytes
    store      requests waited for the store's bytes, or before another try
    disk       reading chunks of the disk tier, and checking them
    cache      copying chunks to and from the kept slots of the arena
    verify     hashing
    memory     making host memory present that tensors are the first to use
    place      copying to where tensors live; also when fetching waits because placing keeps the slots
    device     the device's own copies, likewise
    slots      fetching waited for slots of the arena though nothing keeps them for long: the arena is small
    control    fetching waited for the agent to hand out leases
    cpu        all of these wanted more processor than there is

Streaming stages overlap, so the limit is the one that is busy for the largest part of the ranks' load time; the
others wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cluster.fit.options import FitTry, what_was_taken
from cluster.layouts.mesh import Layout
from cluster.precision.recipes import Precision
from cluster.telemetry.saves import SaveStatus
from cluster.telemetry.stats import (
    SOURCES,
    Jsonable,
    NodeReport,
    ObjectCheck,
    ProcessMemory,
    RankReport,
    RankStatus,
    StageTimes,
    join_checks,
    unchecked_counts,
)
from cluster.units import show_bytes, show_rate

MUCH = 0.25  # of the load time waited for slots: what keeps them is looked for
BUSY = 0.6  # of the load time at work while slots were waited for: that is what keeps them
FULL = 0.9  # of the host's processor time in use
OURS = 0.4  # of it in use by the load's own ranks

_DOING = {
    "store": "reading",
    "disk": "reading from disk",
    "cache": "copying to and from kept slots",
    "verify": "hashing",
    "memory": "mapping fresh memory",
    "place": "placing",
}


@dataclass(frozen=True, slots=True)
class LoadLimit:
    """The limit of one load."""

    stage: str  # see the module; "resident" for a load that moved nothing
    share: float  # of the load time that stage was busy; of the whole time for "start-up"; of all processors for "cpu"
    sentence: str  # for people
    shares: dict[str, float] = field(default_factory=dict)  # of every streaming stage, in the ranks' load time


def find_limit(
    ranks: Sequence[RankReport],
    *,
    connect_s: float = 0.0,
    plan_s: float,
    start_s: float,
    load_s: float,
    total_s: float,
    resident: bool,
) -> LoadLimit:
    """Return the stage that limited a load of these ranks. The times are those of `LoadReport`."""
    if resident:
        return LoadLimit("resident", 0.0, "the model was there already: nothing had to move")
    shares = stage_shares(ranks)
    before_s = connect_s + plan_s + start_s
    if before_s > load_s:
        text = (
            f"start-up: {before_s:.2f} of {total_s:.2f} s had passed before bytes moved "
            f"(cluster {connect_s:.2f} s, planning {plan_s:.2f} s, workers {start_s:.2f} s)"
        )
        return LoadLimit("start-up", min(1.0, before_s / total_s), text, shares)
    host_busy, ours = _processors(ranks)
    stages = sum((rank.stages for rank in ranks), start=StageTimes())
    if host_busy >= FULL and ours >= OURS:
        largest = max(_DOING, key=lambda stage: shares[stage])
        doing = _DOING[largest]
        text = (
            f"cpu: the processors were {host_busy:.0%} busy, {ours:.0%} with this load's ranks; "
            f"the largest part of their time went into {doing} ({shares[largest]:.0%})"
        )
        return LoadLimit("cpu", host_busy, text, shares)
    stage = _busiest(shares)
    return LoadLimit(stage, shares[stage], _sentence(stage, shares, stages, ranks), shares)


def stage_shares(ranks: Sequence[RankReport]) -> dict[str, float]:
    """Part of the ranks' load time that each stage was busy, 0 to 1; stages overlap."""
    stages = sum((rank.stages for rank in ranks), start=StageTimes())
    wall_s = sum(rank.load_s for rank in ranks)
    # What requests work on, divided as their threads' time is; the thread that only places is one of its own.
    streaming_s = stages.fetch_s + stages.disk_s + stages.cache_s + stages.verify_s + stages.place_fetching_s
    on_disk = stages.disk_s / streaming_s if streaming_s else 0.0
    in_cache = stages.cache_s / streaming_s if streaming_s else 0.0
    verifying = stages.verify_s / streaming_s if streaming_s else 0.0
    placing = stages.place_fetching_s / streaming_s if streaming_s else 0.0
    placing_s = stages.working_s * placing + max(0.0, stages.place_s - stages.place_fetching_s)
    fresh = min(1.0, stages.fresh_s / stages.place_s) if stages.place_s else 0.0
    seconds = {
        "store": stages.working_s * (1 - on_disk - in_cache - verifying - placing) + stages.wait_retry_s,
        "disk": stages.working_s * on_disk,
        "cache": stages.working_s * in_cache,
        "verify": stages.working_s * verifying,
        "memory": placing_s * fresh,
        "place": placing_s * (1 - fresh),
        "device": stages.device_s,
        "slots": stages.wait_slot_s,
        "control": stages.wait_lease_s,
    }
    return {stage: min(1.0, max(0.0, spent_s / wall_s)) if wall_s else 0.0 for stage, spent_s in seconds.items()}


def _busiest(shares: dict[str, float]) -> str:
    if shares["slots"] >= MUCH:
        keepers = ("device", "place", "memory")
        if sum(shares[keeper] for keeper in keepers) >= BUSY:
            return max(keepers, key=lambda keeper: shares[keeper])
    return max(shares, key=lambda stage: shares[stage])


def _processors(ranks: Sequence[RankReport]) -> tuple[float, float]:
    """(part of the processors that was busy, and with the ranks), on the host where that was most."""
    found = [(0.0, 0.0)]
    for host in {rank.host for rank in ranks}:
        there = [rank for rank in ranks if rank.host == host and rank.cpus and rank.load_s]
        if there:
            ours = sum(rank.cpu_s / rank.load_s for rank in there) / max(rank.cpus for rank in there)
            found.append((max(rank.host_busy for rank in there), min(1.0, ours)))
    return max(found)


def _sentence(stage: str, shares: dict[str, float], stages: StageTimes, ranks: Sequence[RankReport]) -> str:
    share = f"{shares[stage]:.0%} of the load time"
    if stage == "store":
        requests = sum(rank.requests for rank in ranks)
        throttles = sum(rank.throttles for rank in ranks)
        refused = f"; it asked for fewer requests {throttles} times" if throttles else ""
        rate = show_rate(stages.fetch_bytes, max((rank.load_s for rank in ranks), default=0.0))
        return f"store: requests waited for its bytes in {share}, {rate} with {requests} requests in flight{refused}"
    if stage == "disk":
        return f"disk: reading and checking chunks there took {share}, {show_bytes(stages.disk_bytes)} in all"
    if stage == "cache":
        return f"cache: copying chunks to the arena's kept slots and from there took {share}, " + show_rate(
            stages.cache_bytes, stages.cache_s
        )
    if stage == "verify":
        return f"verify: hashing took {share}, {show_rate(stages.verify_bytes, stages.verify_s)} per thread"
    if stage == "place":
        return f"place: copying to the tensors' memory took {share}, {show_rate(stages.place_bytes, stages.place_s)}"
    if stage == "memory":
        return (
            f"memory: mapping fresh host memory took {share}; workers that are kept warm reuse theirs "
            "(LONGSHORE_WARM_WORKERS_S)"
        )
    if stage == "device":
        return f"device: its copies took {share}, {show_bytes(stages.place_bytes)} in all"
    if stage == "slots":
        return f"slots: fetching waited for a free slot in {share}; a larger window helps (LONGSHORE_WINDOW_BYTES)"
    return f"control: fetching waited for leases from the node's agent in {share}"


DEFAULT = "default"  # source of a setting that nobody has given

__all__ = [
    "ClusterStatus",
    "LoadLimit",
    "LoadProgress",
    "LoadReport",
    "ModelStatus",
    "NodeReport",
    "NodeStatus",
    "ObjectCheck",
    "ProcessMemory",
    "RankReport",
    "RankStatus",
    "SettingStatus",
    "StageTimes",
    "WorkerGroupStatus",
]


@dataclass(frozen=True, slots=True)
class LoadReport(Jsonable):
    """The report of a finished load. Times in seconds, sizes in bytes."""

    model_id: str
    uri: str
    revision: str
    # "blake3" / "xxh3_128": every chunk by digest. "store:crc64nvme": every object by the checksum that the store keeps
    # of it. "transport": length, range and ETag only, for some objects at least (see `objects`)
    verified: str
    placement_mode: str  # "via_arena"; "direct": chunks that one rank wanted whole went past the arena
    resident: bool  # True when an already loaded model was handed out: nothing moved
    layout: Layout
    model_bytes: int  # all tensors of the checkpoint
    placed_bytes: int  # slices of all ranks
    overfetch_bytes: int  # inside needed chunks, wanted by no rank of the node
    plan_s: float  # manifest read, checked and planned
    start_s: float  # from there until a rank had its first chunk to fetch or to copy: workers started, memory checked
    load_s: float  # from there to the last byte placed, replaced workers included
    total_s: float  # from the client's call to READY: connect_s + first_byte_s + load_s + ready_after_last_byte_s
    attempts: int
    ranks: tuple[RankReport, ...]
    nodes: tuple[NodeReport, ...]
    connect_s: float = 0.0  # from the client's call until the coordinator had it: a cluster started or joined
    first_byte_s: float = 0.0  # from there until a rank asked for its first bytes, or copied them: plan_s + start_s
    ready_after_last_byte_s: float = 0.0  # from the last byte placed until the client knew that the model was READY
    control_plane: tuple[ProcessMemory, ...] = ()  # coordinator and planning process
    # Id of the trusted key that signed the manifest; empty where no key is trusted: nobody asked whose it is.
    signed_by: str = ""
    placement_reason: str = ""  # for `placement_mode`
    fit: tuple[FitTry, ...] = ()  # of fit="auto": what was tried, the last of it taken
    precision: Precision = field(default_factory=Precision)  # what tensors were cast to, or quantized
    quantization_config: dict[str, Any] | None = None  # of config.json for an engine that takes the quantized weights

    def __str__(self) -> str:
        """The table that `longshore load` prints."""
        from cluster.command_line.tables import as_text, load_table

        return as_text(load_table(self))

    def __repr__(self) -> str:
        return f"LoadReport({self.model_id!r}, ranks={len(self.ranks)}, total_s={self.total_s:.2f})"

    def as_dict(self) -> dict[str, Any]:
        """With what follows from the rest."""
        derived = {
            "taken": self.taken,
            "limit": asdict(self.limit),
            "bytes_by_source": self.bytes_by_source,
            "retries": self.retries,
            "hedges": self.hedges,
            "store_bytes": self.store_bytes,
            "cached_bytes": self.cached_bytes,
            "disk_bytes": self.disk_bytes,
            "peer_bytes": self.peer_bytes,
            "verified_chunks": self.verified_chunks,
            "checked_objects": self.checked_objects,
            "unchecked_objects": self.unchecked_objects,
            "stages": self.stages.as_dict(),
            "processes": [process.as_dict() for process in self.processes],
            "converted_tensors": self.converted_tensors,
            "peak_staging_bytes": self.peak_staging_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "arena_bytes": self.arena_bytes,
            "host_bytes_beyond_destination": self.host_bytes_beyond_destination,
        }
        return {**asdict(self), **derived}

    def as_seen(self, total_s: float, connect_s: float, *, shared: bool, waited: bool) -> LoadReport:
        """Return the report as a client sees it.

        Args:
            total_s: Seconds that the client's call took.
            connect_s: Seconds of that until the coordinator was reached.
            shared: Somebody else had asked for the model before.
            waited: The load was not over when the client asked.

        Returns:
            A report with the client's times.
        """
        if shared:
            reason = self.placement_reason if waited else ""  # of another's request
            return replace(self, resident=not waited, total_s=total_s, placement_reason=reason)
        told_s = max(0.0, total_s - connect_s - self.total_s)
        after_s = self.ready_after_last_byte_s + told_s
        return replace(self, total_s=total_s, connect_s=connect_s, ready_after_last_byte_s=after_s)

    @property
    def taken(self) -> str:
        """The change that fit="auto" made, for example 'quantization="int8"'; "" if it made none."""
        return what_was_taken(self.fit)

    @property
    def limit(self) -> LoadLimit:
        """The stage that limited the load."""
        return find_limit(
            self.ranks,
            connect_s=self.connect_s,
            plan_s=self.plan_s,
            start_s=self.start_s,
            load_s=self.load_s,
            total_s=self.total_s,
            resident=self.resident,
        )

    @property
    def bytes_by_source(self) -> dict[str, int]:
        """Bytes of needed chunks, by where the nodes had them from; what was fetched again is counted again."""
        total = Counter(dict.fromkeys((*SOURCES, "unknown"), 0))
        for node in self.nodes:
            total.update(node.bytes_by_source)
        return dict(total)

    @property
    def retries(self) -> dict[str, int]:
        """By cause."""
        total: Counter[str] = Counter()
        for node in self.nodes:
            total.update(node.retries)
        return dict(total)

    @property
    def hedges(self) -> int:
        """Chunks that were fetched by two at once."""
        return sum(node.hedges for node in self.nodes)

    @property
    def store_bytes(self) -> int:
        """Bytes of committed chunks that left the store."""
        return sum(node.store_bytes for node in self.nodes)

    @property
    def cached_bytes(self) -> int:
        """Bytes that nodes had in their arenas already."""
        return sum(node.cached_bytes for node in self.nodes)

    @property
    def disk_bytes(self) -> int:
        """Bytes of committed chunks that were read from the nodes' disks."""
        return sum(node.disk_bytes for node in self.nodes)

    @property
    def peer_bytes(self) -> int:
        """Bytes of committed chunks that nodes read from each other."""
        return sum(node.peer_bytes for node in self.nodes)

    @property
    def verified_chunks(self) -> int:
        """Chunks whose digest was checked in this load."""
        if self.verified == "transport" or self.verified.startswith("store:"):
            return 0
        return sum(node.store_chunks + node.disk_chunks + node.peer_chunks for node in self.nodes)

    @property
    def objects(self) -> tuple[ObjectCheck, ...]:
        """Checks of each stored object, by key, for a load without a manifest."""
        return join_checks(check for node in self.nodes for check in node.objects)

    @property
    def checked_objects(self) -> int:
        """Objects that have the checksum which the store keeps of them."""
        return sum(bool(check.checked_by) for check in self.objects)

    @property
    def unchecked_objects(self) -> dict[str, int]:
        """Objects of which that cannot be said, by reason."""
        return unchecked_counts(self.objects)

    @property
    def stages(self) -> StageTimes:
        """Times and bytes of each stage, added up over all ranks."""
        return sum((rank.stages for rank in self.ranks), StageTimes())

    @property
    def converted_tensors(self) -> int:
        """Stored tensors that were cast or quantized on their way in, of all ranks."""
        return sum(rank.converted_tensors for rank in self.ranks)

    @property
    def peak_staging_bytes(self) -> int:
        """Memory for tensors that were still to be converted, on the rank that had most."""
        return max((rank.peak_staging_bytes for rank in self.ranks), default=0)

    @property
    def peak_host_bytes(self) -> int:
        """Highest memory of all our processes, tensors in CPU memory included, and each node's arena once."""
        return self.arena_bytes + sum(process.peak_bytes for process in self.processes)

    @property
    def processes(self) -> tuple[ProcessMemory, ...]:
        """The memory of every process that took part."""
        ranks = (
            ProcessMemory(
                f"rank {rank.rank}",
                rank.host,
                rank.baseline_host_bytes,
                rank.peak_host_bytes,
                rank.destination_host_bytes,
            )
            for rank in self.ranks
        )
        agents = (ProcessMemory("agent", n.host, n.baseline_host_bytes, n.peak_host_bytes) for n in self.nodes)
        return (*self.control_plane, *agents, *ranks)

    @property
    def host_bytes_beyond_destination(self) -> int:
        """Each node's arena once, and what every process took beyond its baseline and its tensors."""
        return self.arena_bytes + sum(process.beyond_bytes for process in self.processes)

    @property
    def arena_bytes(self) -> int:
        """Shared memory that the arenas of all its nodes took at its end. Other loads use them too."""
        return sum(node.arena_bytes for node in self.nodes)


@dataclass(frozen=True, slots=True)
class LoadProgress(Jsonable):
    """One moment of a load."""

    model_id: str
    uri: str
    state: str  # a state of cluster.scheduling.load_state
    placed_bytes: int
    total_bytes: int  # bytes all ranks will hold; 0 until planned
    store_bytes: int
    ranks_ready: int
    ranks_total: int
    elapsed_s: float
    message: str = ""  # what it waits for, when it waits


@dataclass(frozen=True, slots=True)
class UpdateProgress(Jsonable):
    """One moment of an update in place that is under way."""

    phase: str  # "planning", or a phase of cluster.scheduling.update_state
    ranks_done: int  # that have staged the new revision; in the phase "exchanging", that have it
    ranks_total: int
    read_bytes: int  # by all ranks, of what changed
    total_bytes: int  # that all ranks read; 0 until planned


@dataclass(frozen=True, slots=True)
class ModelStatus(Jsonable):
    """One model of the cluster."""

    progress: LoadProgress
    revision: str
    layout: Layout
    device: str
    keep: bool
    holders: int
    rank_hosts: tuple[str, ...]  # host of rank i
    error: str = ""
    signed_by: str = ""  # id of the trusted key that signed its manifest
    taken: str = ""  # what fit="auto" changed so that it fits
    ranks: tuple[RankStatus, ...] = ()
    ended_age_s: float = 0.0  # how long ago it failed or was released
    update: str = ""  # what an update in place does, or how the last one ended
    updating: UpdateProgress | None = None  # while one is under way


@dataclass(frozen=True, slots=True)
class SettingStatus(Jsonable):
    """One setting that is in force."""

    name: str  # of the variable: LONGSHORE_ARENA_BYTES
    value: str | int | float | bool  # of trusted keys their ids
    source: str  # "environment of node HOST ID", "the program that started the cluster" or DEFAULT

    @property
    def is_default(self) -> bool:
        """Return whether the setting has its default."""
        return self.source == DEFAULT


@dataclass(frozen=True, slots=True)
class NodeStatus(Jsonable):
    """One node agent and its arena."""

    node: str
    host: str
    arena_bytes: int  # limit of the arena
    used_bytes: int  # committed chunks that stay for later loads
    leased_slots: int
    quarantined_slots: int
    heartbeat_age_s: float
    disk_unkept_chunks: int = 0  # that its disk tier should have and has not, since the agent began
    evicted_chunks: int = 0  # from the arena, since the agent began
    window_bytes: int = 0  # of the arena: the memory that loads work in
    arena_taken_bytes: int = 0  # memory that the arena takes now: the window, and the chunks that it keeps
    disk_budget_bytes: int = 0  # 0: it has no disk tier
    disk_used_bytes: int = 0
    disk_files: int = 0  # chunks in it
    disk_evicted_chunks: int = 0  # since the agent began
    settings: tuple[SettingStatus, ...] = ()  # of the agent


@dataclass(frozen=True, slots=True)
class WorkerGroupStatus(Jsonable):
    """Workers of a released model that wait for the next load (`Config.warm_workers_s`)."""

    worker_group_id: str  # of the first model they had
    device: str
    rank_hosts: tuple[str, ...]  # host of worker i
    kept_bytes: int  # host memory that they keep for the next load
    idle_s: float


@dataclass(frozen=True, slots=True)
class ClusterStatus(Jsonable):
    """Everything `longshore status` shows."""

    version: str
    coordinator_incarnation: str
    models: tuple[ModelStatus, ...]
    nodes: tuple[NodeStatus, ...]
    worker_groups: tuple[WorkerGroupStatus, ...] = ()  # idle ones
    metrics_url: str = ""  # where Prometheus scrapes, as seen from the coordinator's host; empty: nowhere
    ended: tuple[ModelStatus, ...] = ()  # failed or released within the last five minutes
    settings: tuple[SettingStatus, ...] = ()  # of the coordinator
    saves: tuple[SaveStatus, ...] = ()  # those that run, and those that ended within the last five minutes

    def __str__(self) -> str:
        """The tables that `longshore status` prints."""
        from cluster.command_line.tables import as_text, status_table

        return as_text(status_table(self))

    @property
    def listed(self) -> tuple[ModelStatus, ...]:
        """All models, those that ended lately too."""
        return self.models + self.ended
