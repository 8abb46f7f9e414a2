"""What a running cluster has of a planned model: asked of its node agents; nothing is started, and no weight moves.

joined or named cluster --rooms--> nodes --keys of the model's chunks--> what arenas and disks hold --> ClusterView
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.config import Config
from cluster.errors import NoCoordinator, NotEnoughResources
from cluster.joining.connection import Connection, connect, joined
from cluster.plans.chunk_keys import HeldChunks, Holdings, lasting_keys
from cluster.plans.load_plan import LoadPlan
from cluster.preview.plan_summary import PlanSummary, spread_evenly, summarize_plan
from cluster.request import LoadRequest
from cluster.scheduling.topology import NodeInfo, assign_gpus, assign_ranks, places_free, resolve_device
from cluster.telemetry.report import ModelStatus
from cluster.units import show_some
from storage.errors import LongshoreError

NAMED = 20  # nodes in one note


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A plan's ranks on the nodes of a cluster, and what those have."""

    address: str
    rank_nodes: tuple[int, ...]
    node_names: tuple[str, ...]  # by node index; ranks may be on nodes beyond them, which the cluster has not got yet
    held: Mapping[int, HeldChunks]  # by node index
    arena_bytes: Mapping[str, int]  # by node name, of agents that have one
    resident: ModelStatus | None  # the READY model that a load would be given
    notes: tuple[str, ...]

    def summarize(self, plan: LoadPlan, signed_by: str) -> PlanSummary:
        """The numbers of `plan` there. A resident model takes nothing from anywhere."""
        summary = summarize_plan(plan, self.rank_nodes, self.node_names, signed_by=signed_by, held=self.held)
        nodes = tuple(replace(node, arena_bytes=self.arena_bytes.get(node.node, 0)) for node in summary.nodes)
        if self.resident is not None:
            nodes = tuple(replace(node, store_bytes=0, cached_bytes=0, disk_bytes=0) for node in nodes)
        resident = "" if self.resident is None else self.resident.progress.model_id
        return replace(summary, nodes=nodes, cluster=self.address, resident=resident, notes=self.notes)


@dataclass(frozen=True, slots=True)
class AskedCluster:
    """A cluster that can be asked."""

    connection: Connection
    infos: tuple[NodeInfo, ...]  # of its living nodes

    def view(self, request: LoadRequest, plan: LoadPlan, ranks_per_node: int | None, config: Config) -> ClusterView:
        """Raises ClusterLost."""
        infos = self.infos
        device = resolve_device(infos, request.device)
        asked = replace(request, device=device)
        seats = seat_ranks(infos, asked, ranks_per_node, config.cpu_ranks_per_node)
        there = [index for index in sorted(set(seats)) if index < len(infos)]
        found: Holdings = self.connection.call(
            "holdings",
            asked.identity(),
            plan.revision,
            [infos[index].node_id for index in there],
            lasting_keys(plan.shards, plan.chunks, request.store.ref.identity()),
        )
        names = node_names(infos)
        answers = {index: found.nodes[infos[index].node_id] for index in there}
        return ClusterView(
            address=self.connection.address,
            rank_nodes=seats,
            node_names=names,
            held={index: held for index, held in answers.items() if isinstance(held, HeldChunks)},
            arena_bytes={names[index]: infos[index].arena_bytes for index in there},
            resident=found.resident,
            notes=_notes({names[index]: held for index, held in answers.items()}, len(set(seats)) - len(there)),
        )


def find_cluster(address: str | None, config: Config) -> AskedCluster | None:
    """The cluster at `address`; without one, that which this process works with already. None: there is none.

    Raises ClusterLost, as NoCoordinator when none runs at the address.
    """
    if address is None:
        with contextlib.suppress(LongshoreError):  # nobody asked for it: a plan can do without
            connection = joined(config)
            return None if connection is None else AskedCluster(connection, tuple(connection.call("rooms")))
        return None
    connection = connect(address, config, start=False)
    if connection is None:
        raise NoCoordinator(
            "no Longshore coordinator runs in this cluster", hint='the first load starts one; memory="4x24GB" asks none'
        )
    return AskedCluster(connection, tuple(connection.call("rooms")))


def seat_ranks(
    infos: Sequence[NodeInfo], request: LoadRequest, ranks_per_node: int | None, cpu_ranks_per_node: int
) -> tuple[int, ...]:
    """Index of each rank's node, as a load would have it; beyond the nodes that there are, when they are too few.

    By what is free; when that is not enough, as if all were. `ranks_per_node`: as somebody wants it. Pure.
    """
    if ranks_per_node is not None or not infos:
        return spread_evenly(request.world_size, ranks_per_node or request.world_size)
    emptied = [replace(info, gpus_free=info.gpus_total) for info in infos]
    for nodes in (infos, emptied):
        with contextlib.suppress(NotEnoughResources):
            if request.gpus_per_rank > 1:
                return assign_gpus(nodes, request.gpus_per_rank)
            return assign_ranks(nodes, request.layout, request.device, cpu_ranks_per_node)
    most = max(places_free(info, request.device, cpu_ranks_per_node) for info in emptied)
    return spread_evenly(request.world_size, most or request.world_size)


def node_names(infos: Sequence[NodeInfo]) -> tuple[str, ...]:
    """Hosts; where several nodes are on one, with the beginning of their ids."""
    times = Counter(info.host for info in infos)
    return tuple(info.host if times[info.host] == 1 else f"{info.host} {info.node_id[:8]}" for info in infos)


def _notes(answers: Mapping[str, HeldChunks | str], beyond: int) -> tuple[str, ...]:
    silent: defaultdict[str, list[str]] = defaultdict(list)
    for name, answer in answers.items():
        if isinstance(answer, str):
            silent[answer].append(name)
    if beyond:
        silent["the cluster has not got them yet"].append(f"{beyond} nodes")
    return tuple(
        f"counted as having nothing of the model: {show_some(names, NAMED)} ({why})" for why, names in silent.items()
    )
