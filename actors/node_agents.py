"""The agents of a load's nodes, as who leads the load calls them: by handle, and again while Ray restarts one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError

from actors import spawn
from actors.model_record import ModelRecord
from cluster.config import Config
from cluster.errors import ClusterLost

CALL_TIMEOUT_S = 60.0  # agents that are well answer at once
ASK_AGAIN_S = 0.2


class NodeAgents:
    """Agents of the nodes that have ranks of one model."""

    def __init__(self, record: ModelRecord, config: Config) -> None:
        self._record = record
        self._config = config
        self._handles: dict[str, Any] = {}

    async def all(self) -> dict[str, Any]:
        """Handle of each node's agent; those that are missing are started."""
        wanted = self._record.nodes
        handles = await asyncio.gather(*(self._handle(node_id) for node_id in wanted))
        return dict(zip(wanted, handles, strict=True))

    async def ask(self, node_id: str, call: Callable[[Any], Any]) -> Any:
        """One answer of the agent to `call`, which is made again when the agent died of it or before.

        Raises what the agent raises; ClusterLost when it does not come back.
        """
        give_up_s = time.monotonic() + CALL_TIMEOUT_S
        while True:
            agent = await self._handle(node_id)
            try:
                return await asyncio.wait_for(call(agent), CALL_TIMEOUT_S)
            except RayActorError as error:
                self._handles.pop(node_id, None)
                if time.monotonic() > give_up_s:
                    raise ClusterLost(
                        "a node's agent is gone", host=self._record.nodes[node_id], cause=type(error).__name__
                    ) from error
            await asyncio.sleep(ASK_AGAIN_S)

    async def _handle(self, node_id: str) -> Any:
        if node_id not in self._handles:
            host = self._record.nodes[node_id]
            self._handles[node_id] = await asyncio.to_thread(spawn.start_agent, node_id, host, self._config)
        return self._handles[node_id]
