"""Memory needs of a load, checked against the memory of every device and host. Pure.

On GPUs:

    have = free now (all of it where that is not known) - the memory that the user keeps free
    need = the rank's slices, alignment included

Ray grants a number of GPUs on a node, but does not tell which ones. So ranks fit a node if they can be put on different
GPUs of it so that each has room.

On hosts, memory that other loads were promised and have not taken yet counts as used:

    need of a node = tensors of its CPU ranks, less memory that reused workers keep + processes to start + the window of
                     a new arena
    claim          = the same for a load that is still running, less what it has placed
    of each pool   the needs of all nodes that take from it, and all claims on it, fit beyond the reserve

A pool (`storage.host.memory`) is the memory of a host, or of a container around the node. Nodes on one host share it.
The kernel would kill a process that takes more. Ray also kills workers of a host that is nearly full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.config import Config
from cluster.errors import DoesNotFit, DoesNotFitNow
from cluster.fit.device_map import CPU, DISK
from cluster.fit.options import FitOptions
from cluster.planning.packed_plan import RankFacts
from cluster.scheduling.topology import NodeInfo, ranks_by_node
from cluster.units import show_bytes, show_some
from storage.arena.arena_files import default_arena_bytes, window_slots
from storage.host.memory import GpuMemory, MemoryPool

_SHOWN_RANKS = 8


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """The memory that one GPU has for a load."""

    total_bytes: int
    free_bytes: int | None  # None: not known; all of it counts as free
    kept_free_bytes: int  # bytes that the user keeps free

    @property
    def have_bytes(self) -> int:
        """Return the bytes that ranks can take."""
        free_bytes = self.total_bytes if self.free_bytes is None else self.free_bytes
        return max(0, free_bytes - self.kept_free_bytes)

    def emptied(self) -> DeviceRoom:
        """Return the room as if nothing else used the GPU."""
        return replace(self, free_bytes=None)


def room_on(gpu: GpuMemory, options: FitOptions, config: Config) -> DeviceRoom:
    """Return the memory of a GPU that the load can take."""
    return DeviceRoom(gpu.total_bytes, gpu.free_bytes, options.kept_free_bytes(gpu.total_bytes, config))


Place = tuple[int, int]  # (rank, number of the GPU among the rank's own)


def place_on_devices(needs: Mapping[Place, int], rooms: Sequence[DeviceRoom]) -> dict[Place, DeviceRoom]:
    """Return a GPU for each place, the largest need on the GPU with most room.

    `needs` are the bytes of each place on one node, `rooms` its GPUs. If there is any way that all fit, they fit this
    way. Places beyond the number of GPUs get the one with least room.
    """
    roomiest = sorted(rooms, key=lambda room: room.have_bytes, reverse=True)
    largest = sorted(needs, key=lambda place: (-needs[place], place))
    return {place: roomiest[min(at, len(roomiest) - 1)] for at, place in enumerate(largest)} if roomiest else {}


def device_problem(host: str, needs: Mapping[Place, int], rooms: Sequence[DeviceRoom]) -> str:
    """Return which ranks lack memory on the GPUs of a node, with need and have, or "" if none is known to."""
    return misfit_text(host, needs, place_on_devices(needs, rooms))


def misfit_text(host: str, needs: Mapping[Place, int], placements: Mapping[Place, DeviceRoom]) -> str:
    """Return the same text for places that already have their GPUs."""
    tight = [place for place, room in placements.items() if needs[place] > room.have_bytes]
    if not tight:
        return ""
    worst = max(sorted(tight), key=lambda place: needs[place] - placements[place].have_bytes)
    ranks = sorted({rank for rank, _ in tight})
    many = len(tight) > 1
    return (
        f"{host}{': ' * bool(host)}rank{'s' * (len(ranks) > 1)} {show_some(ranks, _SHOWN_RANKS)} "
        f"need{'s' * (len(ranks) == 1)} {'up to ' * many}{show_bytes(needs[worst])} of device memory, "
        f"{show_room(placements[worst])}"
    )


def show_room(room: DeviceRoom) -> str:
    """Return a text like `a GPU has 1.07 GB (of 2.15 GB; 0.5 GB in use, 0.57 GB kept free)`."""
    parts = []
    if room.free_bytes is not None and room.free_bytes < room.total_bytes:
        parts.append(f"{show_bytes(room.total_bytes - room.free_bytes)} in use")
    if room.kept_free_bytes:
        parts.append(f"{show_bytes(room.kept_free_bytes)} kept free")
    of = f" (of {show_bytes(room.total_bytes)}{'; ' * bool(parts)}{', '.join(parts)})" if parts else ""
    return f"a GPU has {show_bytes(room.have_bytes)}{of}"


WORKER_BYTES = 300 << 20  # a worker's process before the first byte of a model: Ray and torch


@dataclass(frozen=True, slots=True)
class NodeNeed:
    """The host memory that a load will take on a node."""

    ranks: int
    tensor_bytes: int  # bytes of its CPU ranks
    workers: int = 0  # processes that are not started yet
    window_bytes: int = 0  # window of an arena that does not exist yet

    def less(self, kept_bytes: int) -> int:
        """Return the bytes still to be taken, if reused workers keep `kept_bytes` for the tensors."""
        tensor_bytes = max(0, self.tensor_bytes - kept_bytes)
        return tensor_bytes + self.workers * WORKER_BYTES + self.window_bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """The host memory on a node that a load was promised and has not taken yet."""

    model_id: str
    node_id: str
    pool_ids: tuple[str, ...]
    size_bytes: int


def larger_claims(before: Iterable[Claim], after: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the claims of `after`, each with the larger size of before and after.

    Free memory was measured between the two, while the loads were taking memory.
    """
    then = {(claim.model_id, claim.node_id): claim.size_bytes for claim in before}
    return tuple(
        replace(claim, size_bytes=max(claim.size_bytes, then.get((claim.model_id, claim.node_id), 0)))
        for claim in after
    )


def room_problems(
    nodes: Sequence[NodeInfo], needs: Mapping[int, NodeNeed], claims: Collection[Claim], config: Config
) -> list[str]:
    """Return a text for each host that lacks memory. `needs` is keyed by index into `nodes`."""
    sharing: dict[str, list[int]] = defaultdict(list)  # pool id -> nodes
    pools: dict[str, MemoryPool] = {}
    for index in needs:
        for pool in _pools(nodes[index], index):
            known = pools.get(pool.pool_id, pool)
            pools[pool.pool_id] = min(pool, known, key=lambda seen: seen.free_bytes)
            sharing[pool.pool_id].append(index)
    problems: dict[tuple[int, ...], tuple[int, str]] = {}  # by nodes: the pool that lacks most
    for pool_id, sharers in sharing.items():
        pool = pools[pool_id]
        here = {nodes[index].node_id for index in sharers}
        promised = [claim for claim in claims if pool_id in claim.pool_ids or claim.node_id in here]
        have = pool.free_bytes - max(config.host_reserve_bytes, pool.reserve_bytes)
        have -= sum(claim.size_bytes for claim in promised)
        need = sum(needs[index].less(nodes[index].kept_bytes) for index in sharers)
        key = tuple(sharers)
        if need > have and need - have > problems.get(key, (0, ""))[0]:
            text = _shortage(", ".join(nodes[index].host for index in sharers), [needs[i] for i in sharers], need, have)
            problems[key] = need - have, text + _promises(promised)
    return [text for _, text in problems.values()]


def _pools(node: NodeInfo, index: int) -> tuple[MemoryPool, ...]:
    return node.pools or (MemoryPool(f"node {index}", node.memory_free_bytes, 0),)


def _shortage(hosts: str, needs: Sequence[NodeNeed], need: int, have: int) -> str:
    ranks, workers = sum(each.ranks for each in needs), sum(each.workers for each in needs)
    tensor_bytes, window_bytes = sum(each.tensor_bytes for each in needs), sum(each.window_bytes for each in needs)
    processes = f", {show_bytes(workers * WORKER_BYTES)} for {workers} new processes" if workers else ""
    return (
        f"{hosts}: needs {show_bytes(need)} of host memory ({show_bytes(tensor_bytes)} for {ranks} ranks, "
        f"{show_bytes(window_bytes)} for the arena's window{processes}), has {show_bytes(max(have, 0))} beyond the "
        "reserve"
    )


def _promises(claims: Sequence[Claim]) -> str:
    by_model: dict[str, int] = defaultdict(int)
    for claim in claims:
        by_model[claim.model_id] += claim.size_bytes
    lines = [f"{show_bytes(size)} to {model}" for model, size in sorted(by_model.items()) if size]
    return f" and memory promised to other loads ({show_some(lines, 5)})" if lines else ""


SHOWN = 4  # problems in one message, so that it fits a screen
ANY_FIT = FitOptions()


def min_slots(ranks_on_node: int) -> int:
    """Return the least arena slots with which the ranks of one load on one node can make progress.

    Each rank fills one slot while it copies out of another. One more stays usable when a slot is quarantined.
    """
    return 2 * ranks_on_node + 1


def planned_arena_bytes(shm_free_bytes: int, config: Config) -> int:
    """Return the bytes of a new arena in whole slots: as set, else the default for the free /dev/shm."""
    if config.arena_bytes:
        return config.arena_bytes // config.slot_bytes * config.slot_bytes
    return default_arena_bytes(shm_free_bytes, slot_bytes=config.slot_bytes)


def planned_window_bytes(shm_free_bytes: int, config: Config) -> int:
    """Return the bytes of a new arena's window in whole slots, which it takes at once; 0 for no arena."""
    arena_bytes = planned_arena_bytes(shm_free_bytes, config)
    slots = window_slots(arena_bytes, config.window_bytes, slot_bytes=config.slot_bytes) if arena_bytes else 0
    return slots * config.slot_bytes


class PlannedRanks(Protocol):
    """The part of a plan that fitting needs. A PackedPlan has it too."""

    @property
    def ranks(self) -> Sequence[RankFacts]: ...


def gpu_bytes(rank: RankFacts, device: str) -> dict[int, int]:
    """Return the bytes on each of a rank's GPUs, by number, with the tensors under conversion."""
    if rank.devices:
        sizes = {on: size_bytes for on, size_bytes in rank.devices if isinstance(on, int)}
    else:
        sizes = {0: rank.device_bytes} if device == "cuda" else {}
    return {on: size_bytes + rank.staging_bytes for on, size_bytes in sizes.items()}


def host_bytes(rank: RankFacts, device: str) -> int:
    """Return the bytes of host memory of a rank beside its process, with the tensors under conversion."""
    if not rank.devices:
        return rank.device_bytes + rank.staging_bytes if device == "cpu" else 0
    sizes = dict(rank.devices)
    converts = CPU in sizes or DISK in sizes  # tensors for the disk are converted in host memory
    return sizes.get(CPU, 0) + (rank.staging_bytes if converts else 0)


def check_update_fit(
    ranks: Mapping[int, RankFacts],
    rank_nodes: Mapping[int, int],
    nodes: Sequence[NodeInfo],
    config: Config,
    device: str,
    *,
    streaming: bool,
    claims: Collection[Claim] = (),
) -> DoesNotFit | None:
    """Return an error that lists every host that lacks memory for what an update stages, or None when all fit.

    `ranks` are the facts of what changed. It is staged in host memory, whatever the device. A streaming update needs
    memory only for tensors that are converted, on the rank's device.
    """
    needs: dict[int, NodeNeed] = {}
    problems: list[str] = []
    for index in sorted(set(rank_nodes.values())):
        here = [rank for rank, at in rank_nodes.items() if at == index]
        converted = {(rank, 0): ranks[rank].staging_bytes for rank in here if ranks[rank].staging_bytes}
        on_host = sum(ranks[rank].device_bytes + ranks[rank].staging_bytes for rank in here)
        if streaming:
            on_host = sum(converted.values()) if device == "cpu" else 0
        if on_host:  # else it also fits where less is free than must stay free
            needs[index] = NodeNeed(len(here), on_host)
        rooms = [room_on(gpu, ANY_FIT, config) for gpu in nodes[index].gpus]
        if streaming and device == "cuda" and (problem := device_problem(nodes[index].host, converted, rooms)):
            problems.append(problem)
    problems += room_problems(nodes, needs, claims, config)
    if not problems:
        return None
    hint = "release another model, or spread the model over more nodes"
    if not streaming:
        hint += ", or use streaming=True: it stages nothing, but a failure in its middle breaks the model"
    return DoesNotFit(
        f"the update does not fit beside the model: {'; '.join(problems[:SHOWN])}",
        hint=hint,
        need_bytes=sum(need.tensor_bytes for need in needs.values()),
    )


def check_fit(
    plan: PlannedRanks,
    rank_nodes: Sequence[int] | Mapping[int, int],
    nodes: Sequence[NodeInfo],
    config: Config,
    device: str,
    claims: Collection[Claim] = (),
    new_workers: Collection[int] = (),
    options: FitOptions = ANY_FIT,
) -> DoesNotFit | None:
    """Return an error that lists every device and host that lacks memory for its ranks, or None when all fit.

    `rank_nodes[i]` is the index into `nodes` of rank i; a mapping has only new ranks. `device` is "cuda" or "cpu".
    The host memory of ranks counts against their host. Their GPU memory counts against the GPUs of their node, unless
    the memory of those is not known. The window of a new arena counts against its host and /dev/shm, and must have
    `min_slots` slots. Chunks that an arena keeps count as free: it gives their memory back when it is needed.
    `claims` are promises to other loads. `new_workers` are ranks whose processes are not started yet. `options` has the
    memory that must stay free.
    """
    problems: list[str] = []
    hints: list[str] = []
    in_use: list[bool] = []  # for each problem with devices: caused only by other users of the GPUs
    needs: dict[int, NodeNeed] = {}
    for index, ranks in ranks_by_node(rank_nodes).items():
        node = nodes[index]
        window_bytes = node.window_bytes or planned_window_bytes(node.shm_free_bytes, config)
        slot_bytes = node.slot_bytes or config.slot_bytes
        slots, need_slots = window_bytes // slot_bytes, min_slots(len(ranks))
        if slots < need_slots:
            problems.append(
                f"{node.host}: {len(ranks)} ranks need {need_slots} arena slots "
                f"of {show_bytes(slot_bytes)}, its window has {slots}"
            )
            hints.append(
                "Raise LONGSHORE_WINDOW_BYTES, LONGSHORE_ARENA_BYTES and the container's /dev/shm, or lower "
                "LONGSHORE_SLOT_BYTES"
            )
        new_window_bytes = 0 if node.arena_bytes else window_bytes
        if new_window_bytes > node.shm_free_bytes:
            problems.append(
                f"{node.host}: the arena's window needs {show_bytes(new_window_bytes)} of /dev/shm, "
                f"{show_bytes(node.shm_free_bytes)} are free"
            )
            hints.append("Enlarge /dev/shm (docker --shm-size, in Kubernetes an emptyDir in memory there)")
        tensor_bytes = sum(host_bytes(plan.ranks[rank], device) for rank in ranks)
        starting = sum(rank in new_workers for rank in ranks)
        needs[index] = NodeNeed(len(ranks), tensor_bytes, starting, new_window_bytes)
        rooms = [room_on(gpu, options, config) for gpu in node.gpus]
        on_gpus = {(rank, gpu): size for rank in ranks for gpu, size in gpu_bytes(plan.ranks[rank], device).items()}
        if problem := device_problem(node.host, on_gpus, rooms):
            problems.append(problem)
            in_use.append(not device_problem(node.host, on_gpus, [room.emptied() for room in rooms]))
            hints.append("End other programs on the GPUs" if in_use[-1] else "Raise tensor_parallel_size")
    if device == "cpu":
        config = config.model_copy(update={"host_reserve_bytes": options.host_reserve_bytes(config)})
    if missing := room_problems(nodes, needs, claims, config):
        problems += missing
        if device == "cpu" and (options.reserve_bytes or 0) >= config.host_reserve_bytes > 0:
            kept = show_bytes(config.host_reserve_bytes)
            hints.append(f"The reserve is reserve_bytes={options.reserve_bytes} ({kept} of each host): lower it")
        hints.append("Spread the model over more nodes, release another one, or use a smaller LONGSHORE_WINDOW_BYTES")
    if not problems:
        return None
    more = len(problems) - SHOWN
    shown = "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
    kind = DoesNotFitNow if len(problems) == sum(in_use) else DoesNotFit
    return kind(f"the load does not fit: {shown}", hint=". ".join(dict.fromkeys(hints)), problems=len(problems))
