"""Ranks of a lost node go on elsewhere: places are found, the plan is checked against them, agents are told.

    ranks without a living node --> places (free ones, or where Ray has put their bundles again) --> fit
       |  none: wait, Config.node_wait_s at most, then NodeLost
       `--> a new attempt for these ranks --> saved with the agents --> begun on the nodes they come to

Ranks on other nodes notice nothing: their part of the load is the one that it was (`NodeJob.part`). Late messages of
the lost node, which may live on in a partition, change nothing: its agent is told to forget the load, and its workers
have names, an attempt and incarnations that nobody goes by any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ray.exceptions import RayError

from actors.coordination import nodes, spawn
from actors.coordination.attaching import PlanSource
from actors.coordination.fit import fit_on
from actors.coordination.jobs import save
from actors.coordination.model_record import ModelRecord, Placement
from actors.coordination.nodes import NodeAgents
from actors.coordination.tending import alongside, finished
from actors.coordination.worker_groups import WorkerGroups
from cluster.config import Config
from cluster.errors import ClusterLost, DoesNotFit, NodeLost, NotEnoughResources
from cluster.planning.packed_plan import PackedPlan
from cluster.scheduling import load_state
from cluster.scheduling.topology import lost_ranks, no_place, place_again
from storage.errors import LongshoreError

TRY_AGAIN_S = 0.5


class Relocation:
    """Acts for one model, whose `begin_on(node id)` tells an agent its share."""

    def __init__(
        self,
        record: ModelRecord,
        config: Config,
        models: Mapping[str, ModelRecord],
        admission: asyncio.Lock,
        worker_groups: WorkerGroups,
        agents: NodeAgents,
        source: PlanSource,
        begin_on: Callable[[str], Awaitable[None]],
    ) -> None:
        self._record = record
        self._config = config
        self._models = models
        self._admission = admission
        self._worker_groups = worker_groups
        self._agents = agents
        self._source = source
        self._begin_on = begin_on

    async def is_needed(self, error: BaseException) -> bool:
        """Whether the error came from the death of a node. Takes as long as Ray takes to find that out."""
        if isinstance(error, NodeLost):
            return True
        said = getattr(error, "cause", None)
        if isinstance(said, LongshoreError) and not isinstance(said, ClusterLost):
            return False  # an agent that has answered; to ask it again could start one anew that was just ended
        try:
            await self._agents.check_nodes()
        except NodeLost:
            return True
        except (ClusterLost, RayError, TimeoutError):
            pass
        return False

    async def run(self) -> set[int]:
        """Move every rank whose node is dead; these ranks. Raises NodeLost when there is no place for them in time."""
        moved: set[int] = set()
        while lost := await self._lost():
            await self._placement(lost)
            moved |= lost.keys()
            await save(self._record)  # before anybody acts on it
            begun = {self._record.placements[rank].node_id for rank in lost}
            try:
                await alongside(*(self._begin(node_id) for node_id in sorted(begun)))
            except NodeLost:
                continue  # one of these too
        if self._record.message:
            await self._record.touch("")
        return moved

    async def _begin(self, node_id: str) -> None:
        await self._begin_on(node_id)

    async def _lost(self) -> dict[int, str]:
        """rank -> host, of the ranks whose node is dead."""
        placements = self._record.placements
        living = await asyncio.to_thread(nodes.living_nodes)
        return {rank: placements[rank].host for rank in lost_ranks(_node_ids(placements), living)}

    async def _placement(self, lost: dict[int, str]) -> None:
        record, began_s = self._record, time.monotonic()
        plan = await self._source.plan()
        group = record.group or record.request.placement_group
        # Ray puts bundles elsewhere by itself, but not at once.
        wait_s = max(self._config.node_wait_s, nodes.GROUP_GRACE_S if group is not None else 0.0)
        while True:
            async with self._admission:
                try:
                    await self._take(await self._places(lost), plan)
                    return
                except (NotEnoughResources, DoesNotFit) as error:
                    problem = error.message
                except (NodeLost, RayError, TimeoutError) as error:  # a node that they were to go to
                    problem = type(error).__name__
            waited_s = time.monotonic() - began_s
            if waited_s >= wait_s:
                raise no_place(lost, waited_s, problem)
            hosts = ", ".join(sorted(set(lost.values())))
            await record.touch(f"{hosts} was lost, {len(lost)} ranks wait for a place: {problem}")
            await asyncio.sleep(TRY_AGAIN_S)

    async def _places(self, lost: dict[int, str]) -> dict[int, nodes.Place]:
        """Where each of these ranks can go. Raises NotEnoughResources."""
        record = self._record
        group = record.group or record.request.placement_group
        if group is not None:
            bundles = {rank: bundle[1] for rank in lost if (bundle := record.placements[rank].bundle) is not None}
            return await asyncio.to_thread(nodes.places_again, group, bundles)
        while True:
            taken = [
                placement.node_id
                for model in self._models.values()
                if model.request.device == "cpu" and not model.life.is_over
                for placement in model.placements.values()
            ]
            taken += [node_id for worker_group in self._worker_groups.idle() for node_id in worker_group.node_ids]
            infos = await asyncio.to_thread(nodes.cluster_nodes, taken, self._config.cpu_ranks_per_node)
            try:
                placements = place_again(
                    infos,
                    _node_ids(record.placements),
                    list(lost),
                    record.request.layout.tensor_parallel_size,
                    record.request.device,
                    self._config.cpu_ranks_per_node,
                )
                return {rank: (node.node_id, node.host, None) for rank, node in placements.items()}
            except NotEnoughResources:
                if not await finished(self._worker_groups.end_all()):  # they never stand in a load's way
                    raise

    async def _take(self, places: dict[int, nodes.Place], plan: PackedPlan) -> None:
        """The ranks sit there from now on. Raises DoesNotFit, and what agents raise."""
        record = self._record
        attempt = record.life.attempt + 1
        placements = {
            rank: Placement(rank, node_id, host, bundle, attempt, incarnation=record.placements[rank].incarnation + 1)
            for rank, (node_id, host, bundle) in places.items()
        }
        misfit = await fit_on(record, placements, plan, self._agents, self._config, self._models.values())
        if misfit is not None:
            raise misfit
        gone: list[Any] = [record.placements[rank].worker for rank in placements]
        record.place(placements.values())
        again = [load_state.RankReplaced(rank, record.placements[rank].incarnation, attempt=attempt) for rank in places]
        await record.advance(load_state.Replanned(tuple(sorted(places)), attempt=attempt), *again)
        for worker in filter(None, gone):
            await asyncio.to_thread(spawn.end_actor, worker)


def _node_ids(placements: Mapping[int, Placement]) -> dict[int, str]:
    return {rank: placement.node_id for rank, placement in placements.items()}
