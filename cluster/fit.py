"""Whether the memory of every device and host holds its share of a plan. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from cluster.config import Config
from cluster.errors import DoesNotFit
from cluster.host_room import Claim, NodeNeed, room_problems
from cluster.topology import NodeInfo, ranks_by_node
from cluster.units import show_bytes
from storage.arena_files import default_arena_bytes


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


class _Rank(Protocol):
    @property
    def device_bytes(self) -> int: ...


class PlannedRanks(Protocol):
    """What fitting needs of a plan: a LoadPlan has it, and so has the digest of one that travels."""

    @property
    def ranks(self) -> Sequence[_Rank]: ...


def check_fit(
    plan: PlannedRanks,
    rank_nodes: Sequence[int] | Mapping[int, int],
    nodes: Sequence[NodeInfo],
    config: Config,
    device: str,
    claims: Collection[Claim] = (),
    new_workers: Collection[int] = (),
) -> DoesNotFit | None:
    """The error to raise, listing every device and host that lacks memory for its ranks; None when all fit.

    `rank_nodes[i]` is the index into `nodes` of rank i (a mapping: of the ranks that come), `device` "cuda" or "cpu".
    Ranks in CPU memory count against their host, ranks on GPUs against the smallest GPU of their node (not checked when
    its memory is unknown). An arena that is still to be made counts against its host and /dev/shm, and must have
    `min_slots` slots. `claims`: what other loads were promised; `new_workers`: ranks whose processes are still to come.
    """
    problems: list[str] = []
    hints: list[str] = []
    needs: dict[int, NodeNeed] = {}
    for index, ranks in ranks_by_node(rank_nodes).items():
        node = nodes[index]
        device_bytes = [plan.ranks[rank].device_bytes for rank in ranks]
        arena_bytes = node.arena_bytes or planned_arena_bytes(node.shm_free_bytes, config)
        slots, need_slots = arena_bytes // config.slot_bytes, min_slots(len(ranks))
        if slots < need_slots:
            problems.append(
                f"{node.host}: {len(ranks)} ranks need {need_slots} arena slots "
                f"of {show_bytes(config.slot_bytes)}, the arena has {slots}"
            )
            hints.append("Raise LONGSHORE_ARENA_BYTES (and the container's /dev/shm) or lower LONGSHORE_SLOT_BYTES")
        new_arena_bytes = 0 if node.arena_bytes else arena_bytes
        if new_arena_bytes > node.shm_free_bytes:
            problems.append(
                f"{node.host}: the arena needs {show_bytes(new_arena_bytes)} of /dev/shm, "
                f"{show_bytes(node.shm_free_bytes)} are free"
            )
            hints.append("Enlarge /dev/shm (docker --shm-size, in Kubernetes an emptyDir in memory there)")
        tensor_bytes = sum(device_bytes) if device == "cpu" else 0
        starting = sum(rank in new_workers for rank in ranks)
        needs[index] = NodeNeed(len(ranks), tensor_bytes, starting, new_arena_bytes)
        if device == "cuda" and node.gpu_memory_bytes is not None:
            gpu_have = node.gpu_memory_bytes - config.device_reserve_bytes
            tight = [rank for rank, need in zip(ranks, device_bytes, strict=True) if need > gpu_have]
            if tight:
                problems.append(
                    f"{node.host}: ranks {', '.join(map(str, tight[:20]))} need up to "
                    f"{show_bytes(max(device_bytes))} of device memory, "
                    f"a GPU has {show_bytes(max(gpu_have, 0))} beyond the reserve"
                )
                hints.append("Raise tensor_parallel_size or fsdp_size")
    if missing := room_problems(nodes, needs, claims, config):
        problems += missing
        hints.append("Spread the model over more nodes, release another one, or use a smaller arena")
    if not problems:
        return None
    shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
    return DoesNotFit(f"the load does not fit: {shown}", hint=". ".join(dict.fromkeys(hints)), problems=len(problems))
