"""Whether the memory of every device and host holds its share of a plan. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from cluster.config import Config
from cluster.device_map.deciding import CPU, DISK
from cluster.errors import DoesNotFit, DoesNotFitNow
from cluster.fit.device_fit import device_problem, room_on
from cluster.fit.host_room import Claim, NodeNeed, room_problems
from cluster.fit.options import FitOptions
from cluster.plans.rank_plans import RankFacts
from cluster.scheduling.topology import NodeInfo, ranks_by_node
from cluster.units import show_bytes
from storage.arena.arena_files import default_arena_bytes

SHOWN = 4  # problems in one message: it is to be read on one screen
ANY_FIT = FitOptions()


def min_slots(ranks_on_node: int) -> int:
    """Arena slots without which ranks of one load on one node could not go on.

    Each rank fills one slot while it copies out of another; one more stays usable when a slot is quarantined.
    """
    return 2 * ranks_on_node + 1


def planned_arena_bytes(shm_free_bytes: int, config: Config) -> int:
    """Size of a node's new arena, in whole slots: as configured, else the default for what /dev/shm has free."""
    if config.arena_bytes:
        return config.arena_bytes // config.slot_bytes * config.slot_bytes
    return default_arena_bytes(shm_free_bytes, slot_bytes=config.slot_bytes)


class PlannedRanks(Protocol):
    """What fitting needs of a plan: the digest of one that travels has it."""

    @property
    def ranks(self) -> Sequence[RankFacts]: ...


def gpu_bytes(rank: RankFacts, device: str) -> dict[int, int]:
    """What a rank takes of GPUs, by their number among its own; the tensor that is just converted included."""
    if rank.devices:
        sizes = {on: size_bytes for on, size_bytes in rank.devices if isinstance(on, int)}
    else:
        sizes = {0: rank.device_bytes} if device == "cuda" else {}
    return {on: size_bytes + rank.staging_bytes for on, size_bytes in sizes.items()}


def host_bytes(rank: RankFacts, device: str) -> int:
    """What a rank takes of its host's memory, beside its process; the tensor that is just converted included."""
    if not rank.devices:
        return rank.device_bytes + rank.staging_bytes if device == "cpu" else 0
    sizes = dict(rank.devices)
    converts = CPU in sizes or DISK in sizes  # (what goes to disk is converted in host memory)
    return sizes.get(CPU, 0) + (rank.staging_bytes if converts else 0)


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
    """The error to raise, listing every device and host that lacks memory for its ranks; None when all fit.

    `rank_nodes[i]` is the index into `nodes` of rank i (a mapping: of the ranks that come), `device` "cuda" or "cpu".
    What ranks have in host memory counts against their host, what they have on GPUs against those of their node
    (`cluster.fit.device_fit`; not checked when their memory is unknown). An arena that is still to be made counts
    against its host and /dev/shm, and must have `min_slots` slots. `claims`: what other loads were promised;
    `new_workers`: ranks whose processes are still to come; `options`: what was asked to stay free.
    """
    problems: list[str] = []
    hints: list[str] = []
    in_use: list[bool] = []  # of each problem with devices: only because others have their memory in use
    needs: dict[int, NodeNeed] = {}
    for index, ranks in ranks_by_node(rank_nodes).items():
        node = nodes[index]
        arena_bytes = node.arena_bytes or planned_arena_bytes(node.shm_free_bytes, config)
        slot_bytes = node.slot_bytes or config.slot_bytes
        slots, need_slots = arena_bytes // slot_bytes, min_slots(len(ranks))
        if slots < need_slots:
            problems.append(
                f"{node.host}: {len(ranks)} ranks need {need_slots} arena slots "
                f"of {show_bytes(slot_bytes)}, the arena has {slots}"
            )
            hints.append("Raise LONGSHORE_ARENA_BYTES (and the container's /dev/shm) or lower LONGSHORE_SLOT_BYTES")
        new_arena_bytes = 0 if node.arena_bytes else arena_bytes
        if new_arena_bytes > node.shm_free_bytes:
            problems.append(
                f"{node.host}: the arena needs {show_bytes(new_arena_bytes)} of /dev/shm, "
                f"{show_bytes(node.shm_free_bytes)} are free"
            )
            hints.append("Enlarge /dev/shm (docker --shm-size, in Kubernetes an emptyDir in memory there)")
        tensor_bytes = sum(host_bytes(plan.ranks[rank], device) for rank in ranks)
        starting = sum(rank in new_workers for rank in ranks)
        needs[index] = NodeNeed(len(ranks), tensor_bytes, starting, new_arena_bytes)
        rooms = [room_on(gpu, options, config) for gpu in node.gpus]
        on_gpus = {(rank, gpu): size for rank in ranks for gpu, size in gpu_bytes(plan.ranks[rank], device).items()}
        if problem := device_problem(node.host, on_gpus, rooms):
            problems.append(problem)
            in_use.append(not device_problem(node.host, on_gpus, [room.emptied() for room in rooms]))
            hints.append("End what else runs on the GPUs" if in_use[-1] else "Raise tensor_parallel_size")
    if device == "cpu":
        config = config.model_copy(update={"host_reserve_bytes": options.host_reserve_bytes(config)})
    if missing := room_problems(nodes, needs, claims, config):
        problems += missing
        if device == "cpu" and (options.reserve_bytes or 0) >= config.host_reserve_bytes > 0:
            kept = show_bytes(config.host_reserve_bytes)
            hints.append(f"The reserve is reserve_bytes={options.reserve_bytes} ({kept} of each host): lower it")
        hints.append("Spread the model over more nodes, release another one, or use a smaller arena")
    if not problems:
        return None
    more = len(problems) - SHOWN
    shown = "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
    kind = DoesNotFitNow if len(problems) == sum(in_use) else DoesNotFit
    return kind(f"the load does not fit: {shown}", hint=". ".join(dict.fromkeys(hints)), problems=len(problems))
