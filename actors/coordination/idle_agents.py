"""Ends agents that nobody needs, after `Config.idle_agent_s`: Ray's autoscaler takes no node away that has an actor.

A node is needed while a model has ranks there, workers wait there for the next load, or its agent tells of a load
(`actors.hosting` begins some that no coordinator knows). What an agent has told may be old, so it says itself whether
it has a load, and does not end then. An agent that ends takes its arena along, and what was cached in it; what is on
disk stays. The next load on the node starts another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from actors.coordination import spawn
from actors.coordination.agent_watch import AgentWatch
from actors.coordination.gangs import Gangs
from actors.coordination.model_record import ModelRecord
from cluster.config import Config
from cluster.scheduling.warm_pool import IdleNodes


class IdleAgents:
    """`models` is the coordinator's table. Nobody is given a seat while `admission` is held."""

    def __init__(
        self,
        config: Config,
        agents: AgentWatch,
        gangs: Gangs,
        models: Mapping[str, ModelRecord],
        admission: asyncio.Lock,
    ) -> None:
        self._agents = agents
        self._gangs = gangs
        self._models = models
        self._admission = admission
        self._nodes = IdleNodes(config.idle_agent_s)

    def needed(self, node_id: str) -> None:
        """Somebody asks for the node's agent, and is to find it at work for a while."""
        self._nodes.needed(node_id, time.monotonic())

    async def look(self) -> None:
        """End those whose time is over. While a load takes its seats: the next time."""
        if not self._due() or self._admission.locked():
            return
        async with self._admission:
            if due := self._due():
                ended = await asyncio.gather(*(spawn.shut_agent(node_id, only_idle=True) for node_id in due))
                self._agents.ended(node_id for node_id, is_ended in zip(due, ended, strict=True) if is_ended)

    def _due(self) -> list[str]:
        seated = {node for model in self._models.values() if not model.life.is_over for node in model.nodes}
        warm = {node for gang in self._gangs.idle() for node in gang.node_ids}
        needed = seated | warm | self._agents.busy_node_ids
        return self._nodes.due(self._agents.node_ids, needed, time.monotonic())
