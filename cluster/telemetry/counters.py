"""One set of counters out of the heartbeats of many agents. Pure; the caller passes the time.

    heard(beat) ---> by how much has each figure of each part of a load grown?  added under (host, model)
    load(view)  ---> `cluster.telemetry.counters`
    books()     ---> copies, from which `cluster.telemetry.counters` makes gauges, elsewhere

Agents count from 0 since their process began, and number their heartbeats. So what is late or repeated is found by
its number and changes nothing; another incarnation of the agent begins at 0 again, and what it counts is added to
what there was. Of an agent that an earlier coordinator had answered only growth counts: it has counted the rest.

    heard(beat) ---> by how much has each figure of each part of a load grown?  added under (host, model)
    load(view)  ---> `cluster.telemetry.counters`
    books()     ---> copies, from which `cluster.telemetry.counters` makes gauges, elsewhere

Agents count from 0 since their process began, and number their heartbeats. So what is late or repeated is found by
its number and changes nothing; another incarnation of the agent begins at 0 again, and what it counts is added to
what there was. Of an agent that an earlier coordinator had answered only growth counts: it has counted the rest.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from cluster.messages import AgentBeat, LoadBeat, RankBeat
from cluster.scheduling.load_state import LoadState, RankLife
from cluster.telemetry import metrics
from cluster.telemetry.metrics import BUCKETS_S, MOST_PAIRS, OTHER, BoundedLabels, Family, Kind
from cluster.telemetry.stats import SOURCES, EndedPart, LoadCounters, NodeStats

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


@dataclass(frozen=True, slots=True)
class LoadNow:
    """What is known of a load besides."""

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
        """With one more."""
        at = bisect.bisect_left(BUCKETS_S, duration_s)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :])
        return Durations(counts, self.sum_s + duration_s)


class LoadTally:
    """See above."""

    def __init__(self, add: Callable[[Family, tuple[str, ...], float], None]) -> None:
        """`add(metric, labels, value)` adds to a counter, or makes it."""
        self.durations: dict[tuple[Family, tuple[str, ...]], Durations] = {}
        self._add = add
        self._loads: dict[str, LoadNow] = {}

    def now(self) -> tuple[LoadNow, ...]:
        """Every load that is known."""
        return tuple(self._loads.values())

    def keep(self, load_ids: Collection[str]) -> None:
        """No other load is listed any more."""
        for load_id in [load_id for load_id in self._loads if load_id not in load_ids]:
            del self._loads[load_id]

    def moved(self, load_id: str, now_s: float) -> None:
        """It has placed something, or gave something up."""
        load = self._loads.get(load_id)
        if load is not None:
            self._loads[load_id] = replace(load, moved_s=now_s)

    def note(self, view: LoadView, model: str, now_s: float, *, adopted: bool) -> None:
        """The load is so now. One that is over stays over. `adopted` counts when it is noted for the first time."""
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
            lost = sum(rank.lost and not was.lost for was, rank in zip(before.ranks, view.ranks, strict=True))
            self._add(metrics.RANKS_LOST, (load.model,), lost)
        load = replace(load, view=view)
        if view.state is not before.state:
            load = self._entered(load, before.state, now_s)
        self._loads[view.load_id] = load

    def _entered(self, load: LoadNow, before: LoadState, now_s: float) -> LoadNow:
        view = load.view
        if before in UNDER_WAY and not load.adopted:
            self._observe(metrics.LOAD_STATE_DURATION, (before.value,), now_s - load.state_s)
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
                self._observe(metrics.LOAD_DURATION, (load.model, outcome), now_s - load.begun_s)
        was_ready = load.was_ready or view.state is LoadState.READY
        return replace(load, state_s=now_s, moved_s=now_s, was_ready=was_ready)

    def _observe(self, family: Family, labels: tuple[str, ...], duration_s: float) -> None:
        key = family, labels
        self.durations[key] = self.durations.get(key, Durations()).plus(max(0.0, duration_s))


FORMER_KEPT = 8  # incarnations of one agent whose late words are known as such

Key = tuple[Family, tuple[str, ...]]  # a metric and its labels' values, in its order
Part = tuple[str, int]  # (load id, attempt)
_NOTHING = LoadCounters()


@dataclass(slots=True)
class _Node:
    """One agent: what it said last, and who it was before."""

    beat: AgentBeat
    heard_s: float
    parts: dict[Part, LoadCounters] = field(default_factory=dict)
    totals: dict[Key, float] = field(default_factory=dict)  # the agent's own
    placed: dict[str, int] = field(default_factory=dict)  # by load
    former: deque[str] = field(default_factory=lambda: deque(maxlen=FORMER_KEPT))


@dataclass(frozen=True, slots=True)
class Books:
    """The tally at a moment; nobody changes it."""

    totals: Mapping[Key, float]
    durations: Mapping[Key, Durations]
    nodes: tuple[tuple[AgentBeat, float], ...]  # last heartbeats, and when they came
    loads: tuple[LoadNow, ...]
    models: Mapping[str, str]  # label by what beats and loads say


class Tally:
    """See above. Not thread-safe."""

    def __init__(self) -> None:
        self._labels = BoundedLabels()
        self._models: dict[str, str] = {}
        self._totals: dict[Key, float] = {}
        self._pairs: dict[tuple[str, str], None] = {}  # (host, model) with counters, by when they last grew
        self._nodes: dict[str, _Node] = {}
        self._loads = LoadTally(self._add)

    def heard(self, beat: AgentBeat, now_s: float) -> None:
        """Take a heartbeat in."""
        node = self._nodes.get(beat.node_id)
        counted = True  # what it has counted so far is ours to count
        if node is None:
            node = self._nodes[beat.node_id] = _Node(beat, now_s)
            counted = not beat.answered
            self._add(metrics.AGENT_RESTARTS, (beat.host,), 0)
        elif beat.incarnation in node.former:
            return
        elif beat.incarnation != node.beat.incarnation:
            node.former.append(node.beat.incarnation)
            node.parts, node.totals = {}, {}
            self._add(metrics.AGENT_RESTARTS, (beat.host,))
        elif beat.number <= node.beat.number:
            return
        node.beat, node.heard_s = beat, now_s
        self._count_loads(node, beat, counted=counted)
        if beat.stats is not None:
            totals = {(family, (beat.host, *labels)): value for family, labels, value in _of_node(beat.stats)}
            for key, value in totals.items():
                self._add(*key, value - node.totals.get(key, 0) if counted else 0)
            node.totals = totals
        self._note_progress(node, beat, now_s)

    def load(self, view: LoadView, now_s: float, *, adopted: bool = False) -> None:
        """A load is in this state now; said again, it changes nothing. `adopted`: an earlier coordinator began it."""
        self._loads.note(view, self._label(view.model), now_s, adopted=adopted)

    def keep(self, node_ids: Collection[str], load_ids: Collection[str]) -> None:
        """All others are gone, or not listed any more; with the last agent of a host go the host's series."""
        self._loads.keep(load_ids)
        left = {self._nodes.pop(node_id).beat.host for node_id in self._nodes.keys() - node_ids}
        gone = left - {node.beat.host for node in self._nodes.values()}
        if gone:
            self._forget(lambda key: key[0].labels[:1] == ("node",) and key[1][0] in gone)
            self._pairs = {pair: None for pair in self._pairs if pair[0] not in gone}

    def books(self) -> Books:
        """Copies: cheap, as nothing in them is changed later."""
        return Books(
            dict(self._totals),
            dict(self._loads.durations),
            tuple((node.beat, node.heard_s) for node in self._nodes.values()),
            self._loads.now(),
            dict(self._models),
        )

    # -- inside ------------------------------------------------------------------------------------------------

    def _label(self, model: str) -> str:
        label = self._models.get(model)
        if label is None:
            label = self._labels(model)
            if label == model:  # "other" is not worth remembering for each
                self._models[model] = label
        return label

    def _add(self, family: Family, labels: tuple[str, ...], value: float = 1) -> None:
        """A counter is there from the first word of it on, and never falls."""
        key = family, labels
        self._totals[key] = self._totals.get(key, 0) + max(0, value)

    def _count_loads(self, node: _Node, beat: AgentBeat, *, counted: bool) -> None:
        parts: dict[Part, LoadCounters] = {}
        told: tuple[EndedPart | LoadBeat, ...] = (*beat.ended, *beat.loads)
        for load in told:
            part = load.load_id, load.attempt
            before = node.parts.get(part)
            parts[part] = load.counters
            if before == load.counters:
                continue
            old = {(family, labels): value for family, labels, value in _of_load(before or _NOTHING)}
            model = self._label(load.model)
            self._grew(beat.host, model)
            for family, labels, value in _of_load(load.counters):
                grown = value - old.get((family, labels), 0) if counted else 0
                self._add(family, (beat.host, model, *labels), grown)
                if family is metrics.CHUNKS:
                    self._count_cache(beat, labels[0], grown)
        node.parts = parts

    def _grew(self, host: str, model: str) -> None:
        """Of too many models over time, those that were loaded longest ago begin at 0 when they are loaded again."""
        self._pairs.pop((host, model), None)
        self._pairs[host, model] = None
        if len(self._pairs) > MOST_PAIRS:
            oldest = set(itertools.islice(self._pairs, MOST_PAIRS // 8))  # many at once: each time all series are seen
            self._forget(lambda key: key[0].labels[:2] == ("node", "model") and key[1][:2] in oldest)
            for pair in oldest:
                del self._pairs[pair]

    def _forget(self, which: Callable[[Key], bool]) -> None:
        self._totals = {key: value for key, value in self._totals.items() if not which(key)}

    def _count_cache(self, beat: AgentBeat, source: str, chunks: float) -> None:
        self._add(metrics.CACHE_HITS if source == "arena" else metrics.CACHE_MISSES, (beat.host, "arena"), chunks)
        if source != "arena" and beat.stats is not None and beat.stats.disk is not None:
            self._add(metrics.CACHE_HITS if source == "disk" else metrics.CACHE_MISSES, (beat.host, "disk"), chunks)

    def _note_progress(self, node: _Node, beat: AgentBeat, now_s: float) -> None:
        placed: dict[str, int] = {}
        for rank in beat.ranks:
            placed[rank.load_id] = placed.get(rank.load_id, 0) + rank.placed_bytes
        for load_id, placed_bytes in placed.items():
            if node.placed.get(load_id) != placed_bytes:
                self._loads.moved(load_id, now_s)
        node.placed = placed


def _of_load(counters: LoadCounters) -> Iterator[tuple[Family, tuple[str, ...], float]]:
    """(metric, labels after node and model, value)."""
    for source in SOURCES:
        yield metrics.CHUNK_BYTES, (source,), counters.bytes_by_source.get(source, 0)
        yield metrics.CHUNKS, (source,), counters.chunks_by_source.get(source, 0)
    for cause, count in counters.retries.items():
        yield metrics.RETRIES, (cause,), count
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
    yield metrics.STALL_SECONDS, ("slot",), times.wait_slot_s
    yield metrics.STALL_SECONDS, ("lease",), times.wait_lease_s
    yield metrics.STALL_SECONDS, ("retry",), times.wait_retry_s
    yield metrics.STALL_SECONDS, ("chunk",), times.wait_chunk_s


def _of_node(stats: NodeStats) -> Iterator[tuple[Family, tuple[str, ...], float]]:
    """(metric, labels after node, value)."""
    yield metrics.CACHE_EVICTIONS, ("arena",), stats.cache.evicted
    yield metrics.SLOTS_QUARANTINED, (), stats.cache.quarantined
    if stats.disk is not None:
        yield metrics.CACHE_EVICTIONS, ("disk",), stats.disk.evicted_chunks
        yield metrics.DISK_WRITTEN, (), stats.disk.written_chunks
        yield metrics.DISK_UNKEPT, (), stats.disk.unkept_chunks


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of a family; `value` is Durations for a histogram."""

    labels: tuple[str, ...]
    value: float | Durations


@dataclass(frozen=True, slots=True)
class Coordinator:
    """What the coordinator knows of itself."""

    host: str
    version: str
    own_bytes: int


def samples(books: Books, now_s: float, coordinator: Coordinator) -> dict[Family, list[Sample]]:
    """Every series, by metric, in the order of FAMILIES; a metric without a series too."""
    found: dict[Family, list[Sample]] = {family: [] for family in metrics.FAMILIES}
    values: dict[Key, float | Durations] = {**books.totals, **books.durations, **_gauges(books, now_s, coordinator)}
    for (family, labels), value in values.items():
        found[family].append(Sample(labels, value))
    return found


def _gauges(books: Books, now_s: float, coordinator: Coordinator) -> dict[Key, float]:
    sums: defaultdict[Key, float] = defaultdict(float)  # of loads and agents with the same labels
    most: dict[Key, float] = {}  # the largest of them says more
    for key, value in _of_loads(books, now_s):
        _put(key, value, sums, most)
    for beat, heard_s in books.nodes:
        for key, value in _of_agent(beat, now_s - heard_s, books):
            _put(key, value, sums, most)
    memory = metrics.PROCESS_MEMORY, (coordinator.host, "coordinator", "")
    return {**sums, **most, memory: coordinator.own_bytes, (metrics.BUILD_INFO, (coordinator.version,)): 1.0}


def _put(key: Key, value: float, sums: defaultdict[Key, float], most: dict[Key, float]) -> None:
    if key[0].kind is not Kind.GAUGE:
        raise ValueError(f"{key[0].name} is no gauge")
    if key[0] in _MOST:
        most[key] = max(value, most.get(key, value))
    else:
        sums[key] += value


# Of several agents of one host, or loads of one model: these are not added up.
_MOST = {
    metrics.LOAD_ELAPSED,
    metrics.LOAD_IDLE,
    metrics.RANK_SILENT,
    metrics.PROCESS_MEMORY,
    metrics.HOST_FREE,
    metrics.HOST_TOTAL,
    metrics.SHM_FREE,
    metrics.SHM_TOTAL,
    metrics.GPU_FREE,
    metrics.GPU_TOTAL,
    metrics.HEARTBEAT_AGE,
}


def _of_loads(books: Books, now_s: float) -> Iterator[tuple[Key, float]]:
    for load in books.loads:
        state, model = load.view.state, load.model
        yield (metrics.LOADS, (model, state.value)), 1
        if state.is_terminal:
            continue
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


def _of_agent(beat: AgentBeat, age_s: float, books: Books) -> Iterator[tuple[Key, float]]:
    host = beat.host
    models = {(load.load_id, load.attempt): books.models.get(load.model, OTHER) for load in beat.loads}
    yield (metrics.HEARTBEAT_AGE, (host,)), age_s
    yield (metrics.CACHE_BYTES, (host, "arena")), beat.arena.committed_bytes
    yield (metrics.CACHE_LIMIT, (host, "arena")), beat.arena.arena_bytes
    for rank in beat.ranks:
        model = models.get((rank.load_id, rank.attempt))
        if model is not None:
            for family, value in _of_rank(rank, age_s):
                yield (family, (host, str(rank.rank), model)), value
            yield (metrics.MODEL_PLACED, (model,)), rank.placed_bytes
            if rank.own_bytes:
                yield (metrics.PROCESS_MEMORY, (host, f"rank {rank.rank}", model)), rank.own_bytes
    if beat.stats is not None:
        yield from _node_samples(host, beat.stats)


def _of_rank(rank: RankBeat, age_s: float) -> Iterator[tuple[Family, float]]:
    yield metrics.RANK_PLACED, rank.placed_bytes
    yield metrics.RANK_REQUESTS, rank.requests
    yield metrics.RANK_ALLOWED_REQUESTS, rank.allowed_requests
    if rank.pid and not rank.done:
        yield metrics.RANK_SILENT, rank.silent_s + age_s


def _node_samples(host: str, stats: NodeStats) -> Iterator[tuple[Key, float]]:
    cache, disk, memory = stats.cache, stats.disk, stats.memory
    slots = {
        "free": cache.free_slots,
        "leased": cache.leased_slots,
        "in_use": cache.in_use_slots,
        "evictable": cache.committed_slots - cache.in_use_slots,
        "quarantined": cache.quarantined_slots,
    }
    for state, count in slots.items():
        yield (metrics.SLOTS, (host, state)), count
    if disk is not None:
        yield (metrics.CACHE_BYTES, (host, "disk")), disk.used_bytes
        yield (metrics.CACHE_LIMIT, (host, "disk")), disk.budget_bytes
        yield (metrics.DISK_FILES, (host,)), disk.files
    known = {
        metrics.HOST_FREE: (memory.host_free_bytes, memory.host_total_bytes),
        metrics.HOST_TOTAL: (memory.host_total_bytes, memory.host_total_bytes),
        metrics.SHM_FREE: (memory.shm_free_bytes, memory.shm_total_bytes),
        metrics.SHM_TOTAL: (memory.shm_total_bytes, memory.shm_total_bytes),
    }
    for family, (value, total_bytes) in known.items():
        if total_bytes:
            yield (family, (host,)), value
    if memory.agent_bytes:
        yield (metrics.PROCESS_MEMORY, (host, "agent", "")), memory.agent_bytes
    for number, gpu in enumerate(memory.gpus):
        yield (metrics.GPU_TOTAL, (host, str(number))), gpu.total_bytes
        if gpu.free_bytes is not None:
            yield (metrics.GPU_FREE, (host, str(number))), gpu.free_bytes
