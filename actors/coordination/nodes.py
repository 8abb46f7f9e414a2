"""The cluster's nodes, as Ray and the coordinator's own agents report them.

Functions that are not `async` block on Ray: the coordinator runs them in a thread.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from actors.coordination import spawn
from actors.coordination.model_record import ModelRecord
from actors.coordination.planner import in_message
from actors.links import PackedCalls, ask_agent
from cluster.config import Config
from cluster.errors import (
    AgentEnded,
    ClusterError,
    ClusterLost,
    ConfigError,
    NodeLost,
    NotEnoughResources,
    PackageMissing,
)
from cluster.joining.ray_private import available_resources_per_node
from cluster.messages import NodeFacts, unpack_message
from cluster.node_settings import node_name
from cluster.planning.chunk_keys import MOST_ASKED, HeldChunks, sampled_keys
from cluster.planning.packed_plan import PackedPlan, unpack_shared
from cluster.request import LoadRequest
from cluster.scheduling.topology import NodeInfo, show_bundles
from cluster.units import show_some
from storage.errors import ArenaError, LongshoreError

FACTS_S = 10.0  # an agent that is well answers at once
GROUP_GRACE_S = 10.0  # resources that are free are given within seconds

Bundle = tuple[PlacementGroup, int]  # (group, bundle index)
Place = tuple[str, str, Bundle | None]  # (node id, host, bundle)


def this_node() -> str:
    """Return the name of the node that this actor or task runs on, for messages."""
    return node_name(socket.gethostname(), ray.get_runtime_context().get_node_id())


def cluster_nodes(cpu_placements: Iterable[str], cpu_ranks_per_node: int) -> list[NodeInfo]:
    """Return living nodes in the order of their ids, with what is free. `cpu_placements`: nodes of placed CPU ranks."""
    placements = Counter(cpu_placements)
    free = available_resources_per_node()
    found = []
    for node in sorted(_ray_nodes(), key=lambda node: str(node["NodeID"])):
        if not node["Alive"]:
            continue
        node_id = node["NodeID"]
        found.append(
            NodeInfo(
                node_id=node_id,
                host=node["NodeManagerHostname"],
                gpus_free=int(free.get(node_id, {}).get("GPU", 0)),
                gpus_total=int(node["Resources"].get("GPU", 0)),
                cpu_ranks_free=max(0, cpu_ranks_per_node - placements[node_id]),
            )
        )
    return found


def living_nodes() -> dict[str, str]:
    """node id -> host of the nodes that Ray takes for living. A dead one is among them until Ray has found out."""
    return {node["NodeID"]: node["NodeManagerHostname"] for node in _ray_nodes() if node["Alive"]}


async def facts_of(
    node_ids: Iterable[str], ask: Callable[[str, Callable[[Any], Any]], Awaitable[Any]]
) -> dict[str, NodeInfo]:
    """Return what each agent reports of its node; `ask` is `NodeAgents.ask`. Raises an agent's error: ArenaTooLarge...

    An agent that cannot have its arena, or whose settings are bad, is ended, so that the next load tries anew.
    """
    node_ids = list(node_ids)
    asked = (ask(node_id, lambda agent: agent.facts.remote()) for node_id in node_ids)
    answers: list[NodeFacts | BaseException] = await asyncio.gather(*asked, return_exceptions=True)
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    for node_id, answer in zip(node_ids, answers, strict=True):
        cannot = isinstance(getattr(answer, "cause", answer), ArenaError | ConfigError)
        if cannot and (agent := await asyncio.to_thread(spawn.find_agent, node_id)) is not None:
            await asyncio.to_thread(spawn.end_actor, agent)
    if failures:
        raise failures[0]
    return {
        node_id: NodeInfo(
            node_id=node_id,
            host=facts.host,
            memory_free_bytes=min(pool.free_bytes for pool in facts.pools),
            pools=facts.pools,
            gpus=facts.gpus,
            arena_bytes=facts.arena_bytes,
            window_bytes=facts.window_bytes,
            slot_bytes=facts.slot_bytes,
            peer=facts.peer,
            peer_bytes_per_s=facts.peer_bytes_per_s,
            peer_measured_bytes_per_s=facts.peer_measured_bytes_per_s,
        )
        for node_id, facts in zip(node_ids, answers, strict=True)
        if isinstance(facts, NodeFacts)
    }


async def rooms(cpu_ranks_per_node: int) -> list[NodeInfo]:
    """Living nodes with what their agents see there; of a node without one, only what Ray knows. Starts nothing."""
    infos = await asyncio.to_thread(cluster_nodes, (), cpu_ranks_per_node)
    return list(await asyncio.gather(*(_with_room(info) for info in infos)))


async def _with_room(info: NodeInfo) -> NodeInfo:
    agent = await asyncio.to_thread(spawn.find_agent, info.node_id)
    if agent is None:
        return info
    try:
        facts: NodeFacts = await ask_agent(agent, FACTS_S, f"the agent on {info.host}", "facts")
    except (RayError, TimeoutError, LongshoreError):
        return info  # an agent that is not well is as good as none
    return replace(
        info,
        gpus=facts.gpus,
        pools=facts.pools,
        arena_bytes=facts.arena_bytes,
        window_bytes=facts.window_bytes,
        slot_bytes=facts.slot_bytes,
    )


HELD_S = 2.0  # for their answers: other loads wait meanwhile


async def with_held(infos: Sequence[NodeInfo], plan: PackedPlan, store_identity: str) -> list[NodeInfo]:
    """Return the nodes with the part of the model that each has. Those that do not answer have nothing."""

    def keys() -> bytes:
        tables = unpack_shared(plan.shared)
        return sampled_keys(tables.shards, tables.chunks, store_identity)

    asked = [info.node_id for info in infos if info.alive][:MOST_ASKED]
    if len(asked) < 2:
        return list(infos)
    try:
        held = await asyncio.wait_for(held_on(asked, await asyncio.to_thread(keys)), HELD_S)
    except TimeoutError:
        return list(infos)
    shares = {node_id: answer.share for node_id, answer in held.items() if isinstance(answer, HeldChunks)}
    return [replace(info, held_share=shares.get(info.node_id, 0.0)) for info in infos]


async def held_on(node_ids: Iterable[str], keys: bytes) -> dict[str, HeldChunks | str]:
    """Return which of those chunks each node has, or a sentence when it is not known. Starts and moves nothing."""
    order = list(node_ids)
    sent = await in_message(keys)
    return dict(zip(order, await asyncio.gather(*(_held_on(node_id, sent) for node_id in order)), strict=True))


async def _held_on(node_id: str, keys: Any) -> HeldChunks | str:
    agent = await asyncio.to_thread(spawn.find_agent, node_id)
    if agent is None:
        return "no agent runs there yet"
    try:
        held: HeldChunks = await ask_agent(agent, FACTS_S, "its agent", "holds", keys)
    except TimeoutError:
        return f"its agent does not answer within {FACTS_S:.0f} s"
    except (RayError, LongshoreError) as error:
        return f"its agent does not answer ({type(error).__name__})"
    return held


async def groups_ready(groups: Sequence[PlacementGroup], holders: list[str]) -> None:
    """Return when the bundles have their GPUs, which are free as far as was seen. Raises NotEnoughResources."""
    give_up_s = time.monotonic() + GROUP_GRACE_S
    for group in groups:
        if await asyncio.to_thread(group.wait, max(0.0, give_up_s - time.monotonic())):
            continue
        sizes = [size for each in groups for size in bundle_sizes(each)]
        raise NotEnoughResources(
            f"{sum(sizes)} GPUs were not given within {GROUP_GRACE_S:.0f} s (asked for: {show_bundles(sizes)})",
            hint="release a model, or wait longer with wait_for_resources_s",
            models_that_hold_some=", ".join(holders) or None,
        )


def bundle_sizes(group: PlacementGroup) -> list[int]:
    """GPUs of each bundle of a group that is our own."""
    return [int(bundle["GPU"]) for bundle in group.bundle_specs]


def are_placed(groups: Sequence[PlacementGroup]) -> bool:
    """Return whether there are groups, and Ray has reserved all their bundles."""
    return bool(groups) and all(placement_group_table(group).get("state") == "CREATED" for group in groups)


def bundles_of_ranks(groups: Iterable[PlacementGroup], gpus_per_rank: int = 1) -> list[Bundle]:
    """Return the bundle of each rank in groups that are our own, in the order of ranks."""
    return [
        (group, bundle)
        for group in groups
        for bundle, gpus in enumerate(bundle_sizes(group))
        for _ in range(gpus // gpus_per_rank)
    ]


def places_of(bundles: Sequence[Bundle]) -> list[Place]:
    """Return the node of each rank's bundle."""
    if not bundles:
        return []
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in _ray_nodes()}
    where = {group: placement_group_table(group)["bundles_to_node_id"] for group in {group for group, _ in bundles}}
    node_ids = [where[group][bundle] for group, bundle in bundles]
    return [(node_id, hosts.get(node_id, ""), bundle) for node_id, bundle in zip(node_ids, bundles, strict=True)]


def places_again(bundles: Mapping[int, Bundle]) -> dict[int, Place]:
    """Return the new nodes of ranks' bundles whose node was lost. Ray moves these and leaves the others in place.

    Raises NotEnoughResources while it has not.
    """
    found: dict[int, Place] = {}
    for group in {group for group, _ in bundles.values()}:
        found |= _places_again(group, {rank: bundle for rank, (of, bundle) in bundles.items() if of == group})
    return found


def _places_again(group: PlacementGroup, bundle_of_rank: dict[int, int]) -> dict[int, Place]:
    table, living = placement_group_table(group), living_nodes()
    where = table.get("bundles_to_node_id") or {}
    missing = sorted(rank for rank, bundle in bundle_of_rank.items() if where.get(bundle) not in living)
    if table.get("state") in (None, "REMOVED"):
        raise ClusterError("the placement group does not exist any more", group=group.id.hex())
    if missing or table.get("state") != "CREATED":
        raise NotEnoughResources(
            f"{len(missing) or len(bundle_of_rank)} bundles of the placement group have no node",
            group=group.id.hex(),
            state=table.get("state"),
        )
    return {rank: (where[bundle], living[where[bundle]], (group, bundle)) for rank, bundle in bundle_of_rank.items()}


def places_in_group(group: PlacementGroup, request: LoadRequest) -> list[Place]:
    """Ranks in the caller's own placement group, bundle by bundle: one per GPU, or one per bundle for CPU ranks."""
    table = placement_group_table(group)
    if table.get("state") != "CREATED":
        if table.get("state") in (None, "REMOVED"):
            raise ClusterError("the placement group does not exist any more", group=group.id.hex())
        asked = Counter(", ".join(f"{name}: {had:g}" for name, had in each.items()) for each in group.bundle_specs)
        missing = show_some((f"{count} x {{{what}}}" for what, count in asked.items()), 20, "other kinds")
        raise NotEnoughResources(
            f"the placement group has no resources yet; it asks for {missing}",
            group=group.id.hex(),
            state=str(table.get("state")).lower(),
        )
    gpus = request.gpus_per_rank
    per_bundle = [int(bundle.get("GPU", 0)) // gpus if request.device == "cuda" else 1 for bundle in group.bundle_specs]
    bundles = [index for index, ranks in enumerate(per_bundle) for _ in range(ranks)]
    if request.placement_group is not None and len(bundles) < request.world_size:
        raise NotEnoughResources(
            f"the placement group has room for {len(bundles)} ranks, the layout has {request.world_size}",
            hint=f"give one bundle per rank, with {gpus} GPUs in each for device='cuda'",
            state="too small",
        )
    return places_of([(group, bundle) for bundle in bundles[: request.world_size]])


def may_resolve(error: ClusterError) -> bool:
    """True when waiting can help: resources may be freed, or nodes may join."""
    return isinstance(error, NotEnoughResources) and error.details.get("state") != "too small"


def _ray_nodes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


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
        if node_id not in await asyncio.to_thread(living_nodes):
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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hint = "`longshore doctor` says what each node has installed"
    if any("No module named" in line for line in lines):
        return PackageMissing("a node does not have longshore installed", hint=hint, host=host)
    return ClusterError(
        "a node's agent could not start", hint=hint, host=host, cause=lines[-1][:300] if lines else None
    )
