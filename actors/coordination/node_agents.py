"""The agents of a load's nodes, as who leads the load calls them: by handle, and again while Ray restarts one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.exceptions import ActorUnschedulableError, RayActorError

from actors.agent_link import PackedCalls
from actors.coordination import nodes, spawn
from actors.coordination.model_record import ModelRecord
from cluster.config import Config
from cluster.errors import AgentEnded, ClusterError, ClusterLost, NodeLost, PackageMissing
from cluster.messages import unpack_message

CALL_TIMEOUT_S = 60.0  # agents that are well answer at once
ASK_AGAIN_S = 0.2
CHECK_EVERY_S = 2.0  # whether the node of an agent that does not answer still lives
ACTOR_GONE = (RayActorError, ActorUnschedulableError)  # the second: it was to be made on a node that died
AGENT_GONE = (*ACTOR_GONE, AgentEnded)  # the last: it is about to die


class NodeAgents:
    """Agents of the nodes that have ranks of one model."""

    def __init__(self, record: ModelRecord, given: Config | None) -> None:
        """`given`: see `spawn.start_agent`."""
        self._record = record
        self._given = given
        self._handles: dict[str, Any] = {}
        self._hosts: dict[str, str] = {}

    async def all(self) -> dict[str, Any]:
        """Handle of each node's agent; those that are missing are started."""
        return await self.of(self._record.nodes)

    async def of(self, hosts: Mapping[str, str]) -> dict[str, Any]:
        """The same for some nodes (id -> host), which the model may have no rank on yet."""
        self._hosts.update(hosts)
        handles = await asyncio.gather(*(self._handle(node_id) for node_id in hosts))
        return dict(zip(hosts, handles, strict=True))

    async def ask(self, node_id: str, call: Callable[[Any], Any]) -> Any:
        """One answer of the agent to `call`, which is made again when the agent died of it or before.

        Raises what the agent raises; NodeLost when its node is dead, ClusterLost when it does not come back,
        VersionMismatch when it runs another Longshore, PackageMissing when its node has none.
        """
        give_up_s = time.monotonic() + CALL_TIMEOUT_S
        while True:
            try:
                agent = await self._handle(node_id)
                answer = await self._answer(node_id, call(PackedCalls(agent)))
                return unpack_message(answer, f"the agent on {self._host(node_id)}", "the coordinator")
            except AGENT_GONE as error:
                self._handles.pop(node_id, None)
                await self._check_lives(node_id)
                if getattr(error, "actor_init_failed", False):  # so would the next one
                    raise _not_started(error, self._host(node_id)) from error
                if time.monotonic() > give_up_s:
                    raise ClusterLost(
                        "a node's agent is gone", host=self._host(node_id), cause=type(error).__name__
                    ) from error
            await asyncio.sleep(ASK_AGAIN_S)

    async def check_nodes(self) -> None:
        """Returns when every agent has answered. Raises NodeLost when a node is dead, ClusterLost."""
        node_ids = list(self._record.nodes)
        await asyncio.gather(
            *(self.ask(node_id, lambda agent: agent.coordinator_age_s.remote()) for node_id in node_ids)
        )

    async def _answer(self, node_id: str, reference: Any) -> Any:
        """An answer that may never come: calls to an actor that Ray cannot restart wait for ever."""
        asked = asyncio.ensure_future(reference)
        give_up_s = time.monotonic() + CALL_TIMEOUT_S
        try:
            while not (await asyncio.wait([asked], timeout=CHECK_EVERY_S))[0]:
                await self._check_lives(node_id)
                if time.monotonic() > give_up_s:
                    raise TimeoutError
            return asked.result()
        finally:
            asked.cancel()

    async def _check_lives(self, node_id: str) -> None:
        if node_id not in await asyncio.to_thread(nodes.living_nodes):
            self._handles.pop(node_id, None)
            raise NodeLost("a node died", host=self._host(node_id))

    async def _handle(self, node_id: str) -> Any:
        if node_id not in self._handles:
            host = self._host(node_id)
            try:
                self._handles[node_id] = await asyncio.to_thread(spawn.start_agent, node_id, host, self._given)
            except ClusterLost:
                await self._check_lives(node_id)
                raise
        return self._handles[node_id]

    def _host(self, node_id: str) -> str:
        return self._record.nodes.get(node_id) or self._hosts.get(node_id, "")


def _not_started(error: Exception, host: str) -> ClusterError:
    """Return why an agent could not be made, from what Ray says of its first moments."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    hint = "`longshore doctor` says what each node has installed"
    if any("No module named" in line for line in said):
        return PackageMissing("a node does not have longshore installed", hint=hint, host=host)
    return ClusterError("a node's agent could not start", hint=hint, host=host, cause=said[-1][:300] if said else None)
