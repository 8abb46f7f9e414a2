"""Whether a load's plan fits where its ranks sit; idle gangs give way where it does not."""

from __future__ import annotations

import asyncio
import time

from actors import nodes
from actors.finished import finished
from actors.gangs import Gangs
from actors.model_record import ModelRecord
from actors.node_agents import NodeAgents
from cluster.config import Config
from cluster.fit import check_fit
from cluster.packed_plan import PackedPlan
from cluster.warm_pool import IdleGang, in_the_way, with_kept_memory

FREED_S = 5.0  # the memory of a process that was killed is free again by then


async def fit_in(
    record: ModelRecord,
    plan: PackedPlan,
    agents: NodeAgents,
    config: Config,
    gangs: Gangs,
    taken: IdleGang | None,
) -> None:
    """Returns when every device and host has the memory. `taken`: the gang whose workers the load has.

    Raises DoesNotFit, and what an agent raises: ArenaTooLarge...
    """
    order = sorted(await agents.all())
    rank_nodes = [order.index(record.seats[rank].node_id) for rank in sorted(record.seats)]
    give_up_s = 0.0
    while True:
        facts = await nodes.facts_of(order, agents.ask)
        infos = with_kept_memory([facts[node_id] for node_id in order], taken)
        misfit = check_fit(plan, rank_nodes, infos, config, record.request.device)
        if misfit is None:
            return
        if ending := in_the_way(gangs.idle(), record.nodes):
            await finished(gangs.end(ending))
            give_up_s = time.monotonic() + FREED_S
        elif time.monotonic() >= give_up_s:
            raise misfit
        else:
            await asyncio.sleep(0.1)
