"""Everything that the coordinator's page of metrics shows. Pure; the caller passes the time.

    received(beat) --> the counters of one agent's process, kept beside those of the others
    load(view)     --> the coordinator's own counters: loads, ranks lost, durations
    saves          --> those of saves (`cluster.telemetry.saves`)
    snapshot()     --> copies, from which `samples` makes the page, elsewhere

Each agent counts by model for as long as its process lives, and is a series of its own: the labels `node` and
`incarnation` name it. Nobody adds agents up before Prometheus does, because the restart of one would look like a reset
of all. So a restarted agent begins a series, and a restarted coordinator goes on with those that there are.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from cluster.messages import AgentBeat, RankBeat
from cluster.scheduling.load_state import LoadState, RankLife
from cluster.telemetry import metrics
from cluster.telemetry.metrics import BUCKETS_S, MOST_PAIRS, BoundedLabels, Family, Kind
from cluster.telemetry.saves import UNDER_WAY as SAVE_UNDER_WAY
from cluster.telemetry.saves import SaveNow, Saves
from cluster.telemetry.stats import SOURCES, LoadCounters, NodeStats

UNDER_WAY = (
    LoadState.PLANNING,
    LoadState.WAITING,
    LoadState.STARTING,
    LoadState.LOADING,
    LoadState.DEGRADED,
)  # not usable now, and not over
OUTCOMES = ("ready", "failed", "cancelled", "lost")


@dataclass(frozen=True, slots=True)
class LoadView:
    """A load as the coordinator knows it."""

    load_id: str
    model: str  # see cluster.telemetry.metrics
    state: LoadState
    ranks: tuple[RankLife, ...]
    hosts: tuple[str, ...]  # of each rank; "" before it has a place
    size_bytes: int  # 0 until planned
    error: str = ""  # type of what it failed with
    change: str = ""  # state of its update or change of replicas that runs


@dataclass(frozen=True, slots=True)
class LoadNow:
    """A load, with the times of what it did."""

    view: LoadView
    model: str  # the label's value
    begun_s: float
    state_s: float  # since when it has been in its state
    moved_s: float  # when it last placed a byte or changed its state
    was_ready: bool
    adopted: bool  # an earlier coordinator began it: nobody knows when


@dataclass(frozen=True, slots=True)
class Durations:
    """A histogram: how many were at most each of BUCKETS_S, and longer than all; not cumulative."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    sum_s: float = 0.0

    def plus(self, duration_s: float) -> Durations:
        """Return the histogram with one duration more."""
        at = bisect.bisect_left(BUCKETS_S, duration_s)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :])
        return Durations(counts, self.sum_s + duration_s)


class LoadMetrics:
    """The coordinator's own counters: how many loads ended how, and how long they took."""

    def __init__(self, add: Callable[[Family, tuple[str, ...], float], None]) -> None:
        """`add(metric, labels, value)` adds to a counter, or makes it."""
        self.durations: dict[tuple[Family, tuple[str, ...]], Durations] = {}
        self._add = add
        self._loads: dict[str, LoadNow] = {}

    def now(self) -> tuple[LoadNow, ...]:
        """Return every load that is known."""
        return tuple(self._loads.values())

    def keep(self, load_ids: Collection[str]) -> None:
        """Forget all other loads."""
        for load_id in [load_id for load_id in self._loads if load_id not in load_ids]:
            del self._loads[load_id]

    def moved(self, load_id: str, now_s: float) -> None:
        """Note that the number of its placed bytes has changed."""
        load = self._loads.get(load_id)
        if load is not None:
            self._loads[load_id] = replace(load, moved_s=now_s)

    def note(self, view: LoadView, model: str, now_s: float, *, adopted: bool) -> None:
        """Note the load's state. One that is over stays over. `adopted` counts when it is noted for the first time."""
        load = self._loads.get(view.load_id)
        if load is None:
            self._loads[view.load_id] = LoadNow(view, model, now_s, now_s, now_s, False, adopted)
            self._add(metrics.RANKS_LOST, (model,), 0)  # Prometheus sees a counter grow only if it was there before
            for outcome in OUTCOMES:
                self._add(metrics.LOADS_FINISHED, (model, outcome), 0)
            return
        before = load.view
        if before == view or before.state.is_terminal:
            return
        if before.ranks is not view.ranks:
            lost = sum(rank.lost and not was.lost for was, rank in zip(before.ranks, view.ranks, strict=False))
            self._add(metrics.RANKS_LOST, (load.model,), lost)
        load = replace(load, view=view)
        if view.state is not before.state:
            load = self._entered(load, before.state, now_s)
        self._loads[view.load_id] = load

    def _entered(self, load: LoadNow, before: LoadState, now_s: float) -> LoadNow:
        view = load.view
        if before in UNDER_WAY and not load.adopted:
            self.observe(metrics.LOAD_STATE_DURATION, (before.value,), now_s - load.state_s)
        outcome = ""
        if view.state is LoadState.READY and not load.was_ready:
            outcome = "ready"
        elif view.state is LoadState.FAILED:
            outcome = "lost" if load.was_ready else "failed"
            self._add(metrics.LOAD_FAILURES, (load.model, view.error or "unknown"), 1)
        elif view.state is LoadState.RELEASED and not load.was_ready:
            outcome = "cancelled"
        if outcome and (outcome == "lost" or not load.adopted):  # an earlier coordinator may have counted that
            self._add(metrics.LOADS_FINISHED, (load.model, outcome), 1)
            if outcome != "lost":
                self.observe(metrics.LOAD_DURATION, (load.model, outcome), now_s - load.begun_s)
        was_ready = load.was_ready or view.state is LoadState.READY
        return replace(load, state_s=now_s, moved_s=now_s, was_ready=was_ready)

    def observe(self, family: Family, labels: tuple[str, ...], duration_s: float) -> None:
        """Add a duration to a histogram."""
        key = family, labels
        self.durations[key] = self.durations.get(key, Durations()).plus(max(0.0, duration_s))


GONE_S = 300.0  # the counters of an agent that is gone stay for so long: a scrape gets the last of them

Key = tuple[Family, tuple[str, ...]]  # a metric and its labels' values, in its order


@dataclass(frozen=True, slots=True)
class AgentSeries:
    """One agent's process: its last heartbeat, and its counters."""

    beat: AgentBeat
    received_s: float
    counters: Mapping[str, LoadCounters]  # by model; those that grew last come last
    is_whole: bool  # False: an earlier coordinator has the others, which the next heartbeat brings
    gone_s: float = math.inf  # since when its node is gone, or has another agent

    @property
    def is_here(self) -> bool:
        """True until the agent has gone."""
        return self.gone_s == math.inf


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All metrics at a moment; nobody changes it."""

    totals: Mapping[Key, float]  # the coordinator's own counters
    durations: Mapping[Key, Durations]
    agents: tuple[AgentSeries, ...]
    loads: tuple[LoadNow, ...]
    saves: tuple[SaveNow, ...] = ()


class ClusterMetrics:
    """The agents' series side by side, and the coordinator's own counters. Not thread-safe."""

    def __init__(self, coordinator: str = "") -> None:
        """`coordinator` is its incarnation."""
        self._coordinator = coordinator
        self._labels = BoundedLabels()
        self._totals: dict[Key, float] = {}
        self._agents: dict[str, AgentSeries] = {}  # by incarnation
        self._current: dict[str, str] = {}  # node id -> incarnation of its agent
        self._loads = LoadMetrics(self._add)
        self.saves = Saves(self._add, self._loads.observe)

    def received(self, beat: AgentBeat, now_s: float) -> None:
        """Take a heartbeat in. One that is late or repeated, or of an agent that was replaced, changes nothing."""
        known = self._agents.get(beat.incarnation)
        before = self._agents.get(self._current.get(beat.node_id, ""))  # of the same node
        if known is not None and beat.number <= known.beat.number:
            return
        if before is not None and beat.started_ticks < before.beat.started_ticks:
            return
        if known is None:
            self._add(metrics.AGENT_RESTARTS, (beat.host,), 0 if before is None else 1)
            if before is not None:
                self._gone(before, now_s)
        counters = {} if known is None else known.counters
        same = {model: kept for model, kept in counters.items() if model not in beat.counters}
        self._current[beat.node_id] = beat.incarnation
        is_whole = beat.counted_by in ("", self._coordinator) or (known is not None and known.is_whole)
        self._agents[beat.incarnation] = AgentSeries(beat, now_s, {**same, **beat.counters}, is_whole)
        placed, placed_before = _placed_bytes(beat.ranks), _placed_bytes(before.beat.ranks if before else ())
        for load_id, size_bytes in placed.items():
            if placed_before.get(load_id) != size_bytes:
                self._loads.moved(load_id, now_s)

    def load(self, view: LoadView, now_s: float, *, adopted: bool = False) -> None:
        """Note the state of a load; again, it changes nothing. `adopted`: an earlier coordinator began it."""
        self._loads.note(view, self._labels(view.model), now_s, adopted=adopted)

    def updated(self, model: str, outcome: str, changed_bytes: int) -> None:
        """Note the end of an update of a model."""
        label = self._labels(model)
        for each in ("done", "failed", "broken"):
            self._add(metrics.UPDATES_FINISHED, (label, each), int(each == outcome))
        self._add(metrics.UPDATE_CHANGED_BYTES, (label,), changed_bytes)

    def keep(self, node_ids: Collection[str], load_ids: Collection[str], now_s: float) -> None:
        """All other nodes are gone, and other loads forgotten. Counters of agents stay for GONE_S after their end."""
        self._loads.keep(load_ids)
        for node_id in self._current.keys() - node_ids:
            self._gone(self._agents[self._current.pop(node_id)], now_s)
        self._agents = {name: agent for name, agent in self._agents.items() if now_s - agent.gone_s < GONE_S}
        hosts = {agent.beat.host for agent in self._agents.values()}
        for key in [key for key in self._totals if key[0] is metrics.AGENT_RESTARTS and key[1][0] not in hosts]:
            del self._totals[key]

    def snapshot(self) -> Snapshot:
        """Return copies: cheap, as nothing in them is changed later."""
        return Snapshot(
            dict(self._totals),
            dict(self._loads.durations),
            tuple(self._agents.values()),
            self._loads.now(),
            self.saves.now(),
        )

    def _gone(self, agent: AgentSeries, now_s: float) -> None:
        self._agents[agent.beat.incarnation] = replace(agent, gone_s=now_s)

    def _add(self, family: Family, labels: tuple[str, ...], value: float = 1) -> None:
        """Add to a counter. It is there from the first call on, so that Prometheus sees it grow."""
        key = family, labels
        self._totals[key] = self._totals.get(key, 0) + value


def _placed_bytes(ranks: Iterable[RankBeat]) -> Counter[str]:
    """By load."""
    placed: Counter[str] = Counter()
    for rank in ranks:
        placed[rank.load_id] += rank.placed_bytes
    return placed


def _counters(agents: Collection[AgentSeries]) -> Iterator[tuple[Key, float]]:
    """Every agent's, side by side. With too many models on too many nodes, each shows those that it loaded last."""
    share = max(1, MOST_PAIRS // max(1, len(agents)))
    for agent in agents:
        if not agent.is_whole:
            continue  # its sums would fall
        who = agent.beat.host, agent.beat.incarnation
        for model in list(agent.counters)[-share:]:
            for family, labels, value in _of_load(agent.counters[model]):
                yield (family, (*who, model, *labels)), value
        for family, labels, value in _of_node(agent):
            yield (family, (*who, *labels)), value


def _of_load(counters: LoadCounters) -> Iterator[tuple[Family, tuple[str, ...], float]]:
    """(metric, labels after node, incarnation and model, value)."""
    for source in SOURCES:
        yield metrics.CHUNK_BYTES, (source,), counters.bytes_by_source.get(source, 0)
        yield metrics.CHUNKS, (source,), counters.chunks_by_source.get(source, 0)
    for cause, count in counters.retries.items():
        yield metrics.RETRIES, (cause,), count
    yield metrics.SENT_BYTES, (), counters.sent_bytes
    yield metrics.CHUNKS_VERIFIED, (), counters.verified_chunks
    yield metrics.CHUNKS_CORRUPT, (), counters.corrupt_chunks
    yield metrics.LEASES_GRANTED, (), counters.leases_granted
    yield metrics.LEASES_TAKEN_BACK, (), counters.leases_taken_back
    yield metrics.HEDGES, (), counters.hedges
    yield metrics.HEDGES_WON, (), counters.hedges_won
    yield metrics.THROTTLES, (), counters.throttles
    times = counters.stages
    yield metrics.STAGE_SECONDS, ("fetch",), times.fetch_s
    yield metrics.STAGE_SECONDS, ("verify",), times.verify_s
    yield metrics.STAGE_SECONDS, ("place",), times.place_s
    yield metrics.STAGE_SECONDS, ("device",), times.device_s
    yield metrics.STAGE_SECONDS, ("disk",), times.disk_s
    yield metrics.STAGE_SECONDS, ("cache",), times.cache_s
    yield metrics.STALL_SECONDS, ("slot",), times.wait_slot_s
    yield metrics.STALL_SECONDS, ("lease",), times.wait_lease_s
    yield metrics.STALL_SECONDS, ("retry",), times.wait_retry_s
    yield metrics.STALL_SECONDS, ("chunk",), times.wait_chunk_s


def _of_node(agent: AgentSeries) -> Iterator[tuple[Family, tuple[str, ...], float]]:
    """(metric, labels after node and incarnation, value)."""
    chunks = sum((Counter(counters.chunks_by_source) for counters in agent.counters.values()), Counter())
    stats = agent.beat.stats
    yield metrics.CACHE_HITS, ("arena",), chunks["arena"]
    yield metrics.CACHE_MISSES, ("arena",), chunks.total() - chunks["arena"]
    if stats is None:
        return
    yield metrics.CACHE_EVICTIONS, ("arena",), stats.cache.evicted
    yield metrics.SLOTS_QUARANTINED, (), stats.cache.quarantined
    if stats.disk is not None:
        yield metrics.CACHE_HITS, ("disk",), chunks["disk"]
        yield metrics.CACHE_MISSES, ("disk",), chunks.total() - chunks["arena"] - chunks["disk"]
        yield metrics.CACHE_EVICTIONS, ("disk",), stats.disk.evicted_chunks
        yield metrics.DISK_WRITTEN, (), stats.disk.written_chunks
        yield metrics.DISK_UNKEPT, (), stats.disk.unkept_chunks


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of a family; `value` is Durations for a histogram."""

    labels: tuple[str, ...]
    value: float | Durations


@dataclass(frozen=True, slots=True)
class CoordinatorFacts:
    """Facts of the coordinator's own process."""

    host: str
    version: str
    own_bytes: int


def samples(snapshot: Snapshot, now_s: float, coordinator: CoordinatorFacts) -> dict[Family, list[Sample]]:
    """Return every series, by metric, in the order of FAMILIES; a metric without a series too."""
    found: dict[Family, list[Sample]] = {family: [] for family in metrics.FAMILIES}
    values: dict[Key, float | Durations] = {**snapshot.totals, **snapshot.durations}
    values.update(_counters(snapshot.agents))
    values.update(_gauges(snapshot, now_s, coordinator))
    for (family, labels), value in values.items():
        found[family].append(Sample(labels, value))
    return found


def _gauges(snapshot: Snapshot, now_s: float, coordinator: CoordinatorFacts) -> dict[Key, float]:
    sums: defaultdict[Key, float] = defaultdict(float)  # of loads of one model
    most: dict[Key, float] = {}  # the largest of them says more
    labels = {load.view.load_id: load.model for load in snapshot.loads}
    for key, value in _of_loads(snapshot.loads, now_s):
        _put(key, value, sums, most)
    for key, value in _of_saves(snapshot.saves, now_s):
        _put(key, value, sums, most)
    for agent in snapshot.agents:
        if agent.is_here:
            for key, value in _of_agent(agent.beat, now_s - agent.received_s, labels):
                _put(key, value, sums, most)
    memory = metrics.PROCESS_MEMORY, (coordinator.host, "", "coordinator", "")
    return {**sums, **most, memory: coordinator.own_bytes, (metrics.BUILD_INFO, (coordinator.version,)): 1.0}


def _put(key: Key, value: float, sums: defaultdict[Key, float], most: dict[Key, float]) -> None:
    if key[0].kind is not Kind.GAUGE:
        raise ValueError(f"{key[0].name} is no gauge")
    if key[0] in _MOST:
        most[key] = max(value, most.get(key, value))
    else:
        sums[key] += value


# Of several loads of one model: these are not added up.
_MOST = {
    metrics.LOAD_ELAPSED,
    metrics.LOAD_IDLE,
    metrics.RANK_SILENT,
    metrics.PROCESS_MEMORY,
    metrics.SAVE_IDLE,
    metrics.SAVE_FOREIGN,
}


def _of_saves(saves: Iterable[SaveNow], now_s: float) -> Iterator[tuple[Key, float]]:
    for save in saves:
        progress, model = save.progress, (save.model,)
        for state in SAVE_UNDER_WAY:  # 0 after its end, so that nobody takes it for running still
            yield (metrics.SAVES, (save.model, state)), int(state == progress.state)
        yield (metrics.SAVE_FOREIGN, model), progress.peak_foreign_bytes
        if not progress.is_over:
            yield (metrics.SAVE_SIZE, model), progress.total_bytes
            yield (metrics.SAVE_DONE, model), progress.done_bytes
            yield (metrics.SAVE_IDLE, model), now_s - save.moved_s


def _of_loads(loads: Iterable[LoadNow], now_s: float) -> Iterator[tuple[Key, float]]:
    for load in loads:
        state, model = load.view.state, load.model
        yield (metrics.LOADS, (model, state.value)), 1
        if state.is_terminal:
            continue
        if load.view.change:
            yield (metrics.CHANGES, (model, load.view.change)), 1
        yield (metrics.MODEL_SIZE, (model,)), load.view.size_bytes
        yield (metrics.MODEL_PLACED, (model,)), 0  # heartbeats have the rest
        if state in UNDER_WAY:
            yield (metrics.LOAD_ELAPSED, (model, state.value)), now_s - load.state_s
            yield (metrics.LOAD_IDLE, (model, state.value)), now_s - load.moved_s
        placed = Counter(
            (host, "ready" if rank.ready else "lost" if rank.lost else "loading")
            for rank, host in zip(load.view.ranks, load.view.hosts, strict=True)
            if host
        )
        for (host, of), count in placed.items():
            yield (metrics.RANKS, (host, model, of)), count


def _of_agent(beat: AgentBeat, age_s: float, labels: Mapping[str, str]) -> Iterator[tuple[Key, float]]:
    """`labels`: of the coordinator's loads, by id."""
    who = beat.host, beat.incarnation
    models = {(load.load_id, load.attempt): load.model for load in beat.loads}
    yield (metrics.HEARTBEAT_AGE, who), age_s
    yield (metrics.CACHE_BYTES, (*who, "arena")), beat.arena.committed_bytes
    yield (metrics.CACHE_LIMIT, (*who, "arena")), beat.arena.arena_bytes
    yield (metrics.ARENA_BYTES, (*who, "window")), beat.arena.window_bytes
    yield (metrics.ARENA_BYTES, (*who, "kept")), max(0, beat.arena.taken_bytes - beat.arena.window_bytes)
    for rank in beat.ranks:
        model = models.get((rank.load_id, rank.attempt))
        if model is not None:
            for family, value in _of_rank(rank, age_s):
                yield (family, (*who, str(rank.rank), model)), value
            yield (metrics.MODEL_PLACED, (labels.get(rank.load_id, model),)), rank.placed_bytes
            if rank.own_bytes:
                yield (metrics.PROCESS_MEMORY, (*who, f"rank {rank.rank}", model)), rank.own_bytes
    if beat.stats is not None:
        for family, of, value in _node_gauges(beat.stats):
            yield (family, (*who, *of)), value


def _of_rank(rank: RankBeat, age_s: float) -> Iterator[tuple[Family, float]]:
    yield metrics.RANK_PLACED, rank.placed_bytes
    yield metrics.RANK_REQUESTS, rank.requests
    yield metrics.RANK_ALLOWED_REQUESTS, rank.allowed_requests
    if rank.pid and not rank.done:
        yield metrics.RANK_SILENT, rank.silent_s + age_s


def _node_gauges(stats: NodeStats) -> Iterator[tuple[Family, tuple[str, ...], float]]:
    """(metric, labels after node and incarnation, value)."""
    cache, disk, memory = stats.cache, stats.disk, stats.memory
    slots = {
        "free": cache.free_slots,
        "leased": cache.leased_slots,
        "in_use": cache.in_use_slots,
        "evictable": cache.committed_slots - cache.in_use_slots,
        "quarantined": cache.quarantined_slots,
    }
    for state, count in slots.items():
        yield metrics.SLOTS, (state,), count
    if disk is not None:
        yield metrics.CACHE_BYTES, ("disk",), disk.used_bytes
        yield metrics.CACHE_LIMIT, ("disk",), disk.budget_bytes
        yield metrics.DISK_FILES, (), disk.files
    if memory.host_total_bytes:
        yield metrics.HOST_FREE, (), memory.host_free_bytes
        yield metrics.HOST_TOTAL, (), memory.host_total_bytes
    if memory.shm_total_bytes:
        yield metrics.SHM_FREE, (), memory.shm_free_bytes
        yield metrics.SHM_TOTAL, (), memory.shm_total_bytes
    if memory.agent_bytes:
        yield metrics.PROCESS_MEMORY, ("agent", ""), memory.agent_bytes
    for number, gpu in enumerate(memory.gpus):
        yield metrics.GPU_TOTAL, (str(number),), gpu.total_bytes
        if gpu.free_bytes is not None:
            yield metrics.GPU_FREE, (str(number),), gpu.free_bytes
