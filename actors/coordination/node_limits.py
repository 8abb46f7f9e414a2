"""The limits of a device map that was asked for without any: what the node that will have the rank has, and may give.

Asked before the load is planned, because the map is a part of the plan. Whether it fits is checked again, as for any
load, when the rank has its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.coordination import nodes
from actors.coordination.model_record import ModelRecord
from actors.coordination.nodes import NodeAgents
from cluster.config import Config
from cluster.device_map.deciding import DeviceKey
from cluster.device_map.options import DeviceMapOptions
from cluster.errors import ConfigError, DoesNotFit, DoesNotFitNow, NotEnoughResources
from cluster.fit.needs import (
    WORKER_BYTES,
    NodeNeed,
    gpu_bytes,
    host_bytes,
    misfit_text,
    planned_arena_bytes,
    room_on,
    room_problems,
)
from cluster.fit.options import FitOptions
from cluster.plans.rank_plans import RankFacts
from cluster.scheduling.topology import NodeInfo
from storage.host.gpu_memory import GpuMemory
from storage.host.memory import MemoryPool, available_host_bytes


async def node_memory(
    record: ModelRecord, agents: NodeAgents, config: Config, admission: asyncio.Lock
) -> tuple[tuple[DeviceKey, int], ...]:
    """Limits in bytes by device; none when the request has its own. Raises what agents raise, NotEnoughResources.

    While `admission` is held no agent ends as an idle one, and this load has no seat yet that would keep it.
    """
    request, options = record.request, record.request.device_map
    if options is None or options.modules or options.max_memory is not None:
        return ()
    if request.placement_group is not None:
        ((node_id, host, bundle), *_) = await asyncio.to_thread(nodes.places_in_group, request.placement_group, request)
        gpus = int(request.placement_group.bundle_specs[bundle[1] if bundle else 0].get("GPU", 0))
    else:
        node_id, host, gpus = roomiest(await asyncio.to_thread(nodes.cluster_nodes, (), config.cpu_ranks_per_node))
    async with admission:
        await agents.of({node_id: host})
        facts = await nodes.facts_of([node_id], agents.ask)
    return node_limits(facts[node_id], gpus if request.device == "cuda" else 0, options, request.fit, config)


def roomiest(infos: list[NodeInfo]) -> tuple[str, str, int]:
    """(id, host, GPUs) of the node with most GPUs that are free, else that it has; the first of equals."""
    living = [info for info in infos if info.alive]
    if not living:
        raise NotEnoughResources("the cluster has no living node")
    best = max(living, key=lambda info: (info.gpus_free, info.gpus_total))
    return best.node_id, best.host, best.gpus_free or best.gpus_total


def node_limits(
    node: NodeInfo, gpus: int, options: DeviceMapOptions, fit: FitOptions, config: Config
) -> tuple[tuple[DeviceKey, int], ...]:
    """What a rank with so many of the node's GPUs may fill.

    Ray says how many it gets, not which: each counts as the least roomy of the `gpus` roomiest. Raises ConfigError when
    nobody knows their memory.
    """
    rooms = sorted((room_on(gpu, fit, config).have_bytes for gpu in node.gpus), reverse=True)
    if len(rooms) < gpus:
        raise ConfigError(
            f"the memory of the GPUs of {node.host} is not known",
            hint='say what may be used: max_memory={0: "70GB", "cpu": "100GB"}',
        )
    reserve_bytes = fit.host_reserve_bytes(config)
    left_bytes = min(
        (pool.free_bytes - max(reserve_bytes, pool.reserve_bytes) for pool in node.pools),
        default=node.memory_free_bytes - reserve_bytes,
    )
    left_bytes -= WORKER_BYTES + (0 if node.arena_bytes else planned_arena_bytes(node.shm_free_bytes, config))
    limits = options.on_node(rooms[gpus - 1 : gpus] * gpus, left_bytes).max_memory
    return () if limits is None else limits


def own_limits(
    options: DeviceMapOptions, device: str, fit: FitOptions, config: Config
) -> tuple[tuple[DeviceKey, int], ...]:
    """The same for the calling process, of the GPUs that it sees."""
    have_bytes = [room_on(gpu, fit, config).have_bytes for gpu in own_gpus(device)]
    limits = options.on_node(have_bytes, available_host_bytes() - fit.host_reserve_bytes(config)).max_memory
    return () if limits is None else limits


def own_device(device: str) -> str:
    """The device of a rank in the calling process: for "auto" it is "cuda" where the process sees a GPU, else "cpu"."""
    return ("cuda" if own_gpus("cuda") else "cpu") if device == "auto" else device


def own_gpus(device: str) -> list[GpuMemory]:
    """Those that the calling process sees, when it is to use them."""
    if device != "cuda":
        return []
    from actors.devices.cuda_device import free_memory

    return [GpuMemory(total_bytes, free_bytes) for free_bytes, total_bytes in free_memory()]


def own_misfit(
    rank: int,
    facts: RankFacts,
    gpus: Sequence[GpuMemory],
    pools: tuple[MemoryPool, ...],
    device: str,
    fit: FitOptions,
    config: Config,
) -> DoesNotFit | None:
    """The error for a rank in the calling process, which has these GPUs by number and is on a host with those pools.

    None when it fits. Counted is this rank only: nobody promises memory to ranks that are their own hosts.
    """
    needs = {(rank, gpu): size_bytes for gpu, size_bytes in gpu_bytes(facts, device).items()}
    rooms = {(rank, number): room_on(gpu, fit, config) for number, gpu in enumerate(gpus)}
    seats = {place: rooms[place] for place in needs if place in rooms}
    in_memory = NodeInfo("here", "this host", pools=pools)
    kept = config.model_copy(update={"host_reserve_bytes": fit.host_reserve_bytes(config)})
    need = NodeNeed(1, host_bytes(facts, device), 0, 0)
    on_gpus = misfit_text("", needs, seats)
    problems = [on_gpus] * bool(on_gpus) + room_problems(
        [in_memory], {0: need}, (), kept if device == "cpu" else config
    )
    if not problems:
        return None
    emptied = misfit_text("", needs, {place: room.emptied() for place, room in seats.items()})
    kind = DoesNotFitNow if on_gpus and not emptied and len(problems) == 1 else DoesNotFit
    return kind(
        f"the rank does not fit: {'; '.join(problems)}",
        hint="`longshore plan` shows what would: more ranks, a dtype, a quantization, a device_map",
        rank=rank,
    )
