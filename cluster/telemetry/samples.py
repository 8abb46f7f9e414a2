"""What is exposed: the counters of the tally, and gauges of what is now. Pure: from a copy of the tally's books."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.messages import AgentBeat, RankBeat
from cluster.telemetry import families
from cluster.telemetry.families import OTHER, Family, Kind
from cluster.telemetry.figures import NodeFigures
from cluster.telemetry.tally import UNDER_WAY, Books, Durations, Key


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
    found: dict[Family, list[Sample]] = {family: [] for family in families.FAMILIES}
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
    memory = families.PROCESS_MEMORY, (coordinator.host, "coordinator", "")
    return {**sums, **most, memory: coordinator.own_bytes, (families.BUILD_INFO, (coordinator.version,)): 1.0}


def _put(key: Key, value: float, sums: defaultdict[Key, float], most: dict[Key, float]) -> None:
    if key[0].kind is not Kind.GAUGE:
        raise ValueError(f"{key[0].name} is no gauge")
    if key[0] in _MOST:
        most[key] = max(value, most.get(key, value))
    else:
        sums[key] += value


# Of several agents of one host, or loads of one model: these are not added up.
_MOST = {
    families.LOAD_ELAPSED,
    families.LOAD_IDLE,
    families.RANK_SILENT,
    families.PROCESS_MEMORY,
    families.HOST_FREE,
    families.HOST_TOTAL,
    families.SHM_FREE,
    families.SHM_TOTAL,
    families.GPU_FREE,
    families.GPU_TOTAL,
    families.HEARTBEAT_AGE,
}


def _of_loads(books: Books, now_s: float) -> Iterator[tuple[Key, float]]:
    for load in books.loads:
        state, model = load.view.state, load.model
        yield (families.LOADS, (model, state.value)), 1
        if state.is_terminal:
            continue
        yield (families.MODEL_SIZE, (model,)), load.view.size_bytes
        yield (families.MODEL_PLACED, (model,)), 0  # heartbeats have the rest
        if state in UNDER_WAY:
            yield (families.LOAD_ELAPSED, (model, state.value)), now_s - load.state_s
            yield (families.LOAD_IDLE, (model, state.value)), now_s - load.moved_s
        placed = Counter(
            (host, "ready" if rank.ready else "lost" if rank.lost else "loading")
            for rank, host in zip(load.view.ranks, load.view.hosts, strict=True)
            if host
        )
        for (host, of), count in placed.items():
            yield (families.RANKS, (host, model, of)), count


def _of_agent(beat: AgentBeat, age_s: float, books: Books) -> Iterator[tuple[Key, float]]:
    host = beat.host
    models = {(load.load_id, load.attempt): books.models.get(load.model, OTHER) for load in beat.loads}
    yield (families.HEARTBEAT_AGE, (host,)), age_s
    yield (families.CACHE_BYTES, (host, "arena")), beat.arena.committed_bytes
    yield (families.CACHE_LIMIT, (host, "arena")), beat.arena.arena_bytes
    for rank in beat.ranks:
        model = models.get((rank.load_id, rank.attempt))
        if model is not None:
            for family, value in _of_rank(rank, age_s):
                yield (family, (host, str(rank.rank), model)), value
            yield (families.MODEL_PLACED, (model,)), rank.placed_bytes
            if rank.own_bytes:
                yield (families.PROCESS_MEMORY, (host, f"rank {rank.rank}", model)), rank.own_bytes
    if beat.figures is not None:
        yield from _of_node(host, beat.figures)


def _of_rank(rank: RankBeat, age_s: float) -> Iterator[tuple[Family, float]]:
    yield families.RANK_PLACED, rank.placed_bytes
    yield families.RANK_REQUESTS, rank.requests
    yield families.RANK_ALLOWED_REQUESTS, rank.allowed_requests
    if rank.pid and not rank.done:
        yield families.RANK_SILENT, rank.silent_s + age_s


def _of_node(host: str, figures: NodeFigures) -> Iterator[tuple[Key, float]]:
    cache, disk, memory = figures.cache, figures.disk, figures.memory
    slots = {
        "free": cache.free_slots,
        "leased": cache.leased_slots,
        "in_use": cache.in_use_slots,
        "evictable": cache.committed_slots - cache.in_use_slots,
        "quarantined": cache.quarantined_slots,
    }
    for state, count in slots.items():
        yield (families.SLOTS, (host, state)), count
    if disk is not None:
        yield (families.CACHE_BYTES, (host, "disk")), disk.used_bytes
        yield (families.CACHE_LIMIT, (host, "disk")), disk.budget_bytes
        yield (families.DISK_FILES, (host,)), disk.files
    known = {
        families.HOST_FREE: (memory.host_free_bytes, memory.host_total_bytes),
        families.HOST_TOTAL: (memory.host_total_bytes, memory.host_total_bytes),
        families.SHM_FREE: (memory.shm_free_bytes, memory.shm_total_bytes),
        families.SHM_TOTAL: (memory.shm_total_bytes, memory.shm_total_bytes),
    }
    for family, (value, total_bytes) in known.items():
        if total_bytes:
            yield (family, (host,)), value
    if memory.agent_bytes:
        yield (families.PROCESS_MEMORY, (host, "agent", "")), memory.agent_bytes
    for number, gpu in enumerate(memory.gpus):
        yield (families.GPU_TOTAL, (host, str(number))), gpu.total_bytes
        if gpu.free_bytes is not None:
            yield (families.GPU_FREE, (host, str(number))), gpu.free_bytes
