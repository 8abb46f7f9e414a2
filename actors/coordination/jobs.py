"""Builds the messages of a load for agents and workers, and the record that agents keep for a coordinator.

The plan's shared tables go beside these messages: see `actors.coordination.load_run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import RayError

from actors.coordination import nodes, spawn
from actors.coordination.model_changes import SavedUpdate
from actors.coordination.model_record import ModelRecord, Placement
from cluster.config import Config
from cluster.fit.needs import min_slots
from cluster.messages import Members, NodeJob, NodePeer, OlderLoad, RankJob, SlotHolder, UpdateJob
from cluster.planning.packed_plan import PackedPlan
from cluster.request import LoadRequest
from cluster.scheduling import load_state
from cluster.scheduling.holders import Holders
from cluster.scheduling.topology import sending_weights
from cluster.telemetry.metrics import model_label
from storage.errors import ArenaBusy

SAVED_S = 5.0  # an agent that has not answered by then is not well, and is told all when it begins again
ANSWER_S = 60.0  # a worker that is well answers at once
LOOKED_FOR_S = 120.0  # a head that has just come back, or is busy, does not always say at once which actors there are
LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class SavedLoad:
    """Record that agents keep for a coordinator that loses its memory: enough to find every actor again."""

    request: LoadRequest
    attempt: int
    revision: str
    signed_by: str
    outline: PackedPlan | None  # what the report needs of the plan
    total_bytes: int
    placements: tuple[tuple[int, str, str, int], ...]  # (rank, node id, host, attempt that brought it there)
    worker_group_id: str  # its workers are named by it
    groups: tuple[Any, ...]  # our own placement groups
    has_credentials: bool  # the client passed some; they are not kept here
    host_bytes: dict[int, int]
    pools: dict[str, tuple[str, ...]]
    peer_key: bytes = field(repr=False)  # of `Members`: agents that go on prove themselves with it
    update: SavedUpdate | None = None  # that is under way
    broken: str = ""  # see `ModelRecord`
    next_incarnations: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(record: ModelRecord) -> SavedLoad:
        """Return what is to be saved of the record, without credentials."""
        return SavedLoad(
            replace(record.request, store=record.request.store.without_credentials(), keep=record.holders.keep),
            record.life.attempt,
            record.revision,
            record.signed_by,
            record.plan.outline() if record.plan is not None else record.outline,
            record.total_bytes,
            tuple(
                (placement.rank, placement.node_id, placement.host, placement.attempt)
                for placement in record.placements.values()
            ),
            record.worker_group_id,
            record.groups,
            record.request.store.credentials is not None or record.had_credentials,
            dict(record.host_bytes),
            dict(record.pools),
            record.peer_key,
            None if record.changes.update is None else record.changes.update.saved(),
            record.broken,
            dict(record.next_incarnations),
        )

    def pack(self) -> bytes:
        """Return the saved load as bytes, for `unpack`."""
        return pickle.dumps(self, protocol=5)

    @staticmethod
    def unpack(data: bytes) -> SavedLoad:
        """Return the saved load that `pack` made into bytes."""
        saved: SavedLoad = pickle.loads(data)
        return saved

    def restore(self, load_id: str, now_s: float) -> ModelRecord:
        """The record as far as it is known. The client that asked is taken to hold it, until it lapses."""
        record = ModelRecord(
            model_id=load_id,
            request=self.request,
            life=replace(load_state.Life.new(self.request.world_size), attempt=self.attempt),
            holders=Holders().hold(self.request.client_id, now_s, keep=self.request.keep),
            total_bytes=self.total_bytes,
            revision=self.revision,
            signed_by=self.signed_by,
            outline=self.outline,
            worker_group_id=self.worker_group_id,
            groups=self.groups,
            next_incarnations=dict(self.next_incarnations),
            restored=True,
            had_credentials=self.has_credentials,
            host_bytes=self.host_bytes,
            pools=self.pools,
            peer_key=self.peer_key,
            broken=self.broken,
        )
        record.changes.found(self.update)
        bundles = _bundles(self.groups, self.request)
        for rank, node_id, host, attempt in self.placements:
            bundle = bundles[rank] if rank < len(bundles) else None
            record.place([Placement(rank, node_id, host, bundle, attempt, replaced=True)])
            record.begun_on(node_id, attempt)
        return record


async def save(record: ModelRecord) -> None:
    """Tell the agents what to keep. Returns when those that are well have it."""
    packed = SavedLoad.of(record).pack()

    async def tell(node_id: str) -> None:
        agent = await asyncio.to_thread(spawn.find_agent, node_id)
        if agent is not None:
            await asyncio.wait_for(agent.keep_record.remote(record.model_id, packed), SAVED_S)

    await asyncio.gather(*(tell(node_id) for node_id in record.nodes), return_exceptions=True)


async def find_workers_again(record: ModelRecord, incarnations: dict[int, int]) -> None:
    """Find the living workers of its ranks by their names, and learn from one of them how the store is read.

    A rank without a worker is placed again later, under the incarnation (in `incarnations`) that its agent expects. A
    worker without a rank was to join, or its rank was removed: it is ended.
    Raises RayError when Ray cannot say for long which workers there are.
    """
    workers = await _find_workers(record.worker_group_id)
    for rank in workers.keys() - record.placements.keys():
        incarnation, worker = workers[rank]
        record.skip_incarnations(rank, incarnation + 1)  # Ray may give its name back late
        await asyncio.to_thread(spawn.end_actor, worker)
    for placement in record.placements.values():
        placement.incarnation, placement.worker = workers.get(
            placement.rank, (incarnations.get(placement.rank, 0), None)
        )
    await asyncio.gather(
        *(_ask(record, placement) for placement in record.placements.values() if placement.worker is not None)
    )
    for placement in record.placements.values():
        # A kept model may have no client that could supply credentials again.
        if placement.assignment is not None and placement.assignment.revision in ("", record.revision):
            record.proven(record.request.client_id, placement.assignment.store)
    await record.touch()


async def _find_workers(worker_group_id: str) -> dict[int, tuple[int, Any]]:
    give_up_s = time.monotonic() + LOOKED_FOR_S
    while True:
        try:
            return await asyncio.to_thread(spawn.find_workers, worker_group_id)
        except RayError:
            if time.monotonic() > give_up_s:
                raise
        await asyncio.sleep(LOOK_AGAIN_S)


async def _ask(record: ModelRecord, placement: Placement) -> None:
    """Ask what the worker works on, if on anything: one that idles gets its job (again) from who tends it."""
    with contextlib.suppress(RayError, TimeoutError):  # dead or not well: who tends it finds out
        await spawn.meet_worker(placement.worker, placement.host, ANSWER_S)
        asked = placement.worker.assignment.options(concurrency_group="control").remote()
        placement.find(await asyncio.wait_for(asked, ANSWER_S), record.model_id)


def _bundles(groups: Sequence[Any], request: LoadRequest) -> list[Any]:
    """Return the bundle of each rank that is in a placement group, ours or the caller's."""
    if request.placement_group is not None:
        return [bundle for _, _, bundle in nodes.places_in_group(request.placement_group, request)]
    return nodes.bundles_of_ranks(groups, request.gpus_per_rank)


MOST_OLDER_LOADS = 8  # whose nodes a load may read chunks from


def members_of(record: ModelRecord, others: Iterable[ModelRecord] = (), *, together: bool = False) -> Members:
    """Return the nodes that may read chunks from each other; none where no node serves any.

    Nodes of `others` lend their chunks if their load is of the same revision and older. So nodes of two loads never
    wait for each other. Nodes of the model's own earlier attempts do so too, unless all begin `together`.
    """
    found = _node_peers(record, together=together)
    same = (
        (other, tuple(node for node in _node_peers(other) if node.peer and node.node_id not in record.nodes))
        for other in others
        if other.is_usable and other.created_s < record.created_s and _have_same_chunks(record, other)
    )
    older = tuple(
        # While ranks come or go the plan may not know all of them.
        OlderLoad(
            other.model_id,
            other.peer_key,
            nodes,
            b"" if other.plan is None or other.beyond() else other.plan.shared,
        )
        for other, nodes in same
        if nodes
    )[:MOST_OLDER_LOADS]
    return Members(found, record.peer_key, older) if older or any(node.peer for node in found) else Members()


def _node_peers(record: ModelRecord, *, together: bool = False) -> tuple[NodePeer, ...]:
    """Return the nodes that have ranks, and where they serve chunks. `together`: as one attempt."""
    shares: dict[tuple[int, str], list[Placement]] = {}
    for _, placement in sorted(record.placements.items()):
        shares.setdefault((1 if together else placement.attempt, placement.node_id), []).append(placement)
    node_ids = {node_id for _, node_id in shares}
    weights = sending_weights({node_id: record.peer_rates.get(node_id, (0.0, 0.0)) for node_id in node_ids})
    sends = {node_id: record.peers.get(node_id) for node_id in node_ids if weights[node_id]}
    return tuple(
        NodePeer(
            node_id,
            tuple(placement.rank for placement in placements),
            sends.get(node_id),
            attempt,
            filled=not together and all(placement.report is not None for placement in placements),
        )
        for (attempt, node_id), placements in sorted(shares.items())
    )


def _have_same_chunks(one: ModelRecord, other: ModelRecord) -> bool:
    return bool(one.revision) and (one.revision, one.request.uri) == (other.revision, other.request.uri)


def node_job(record: ModelRecord, node_id: str, attempt: int, config: Config) -> NodeJob:
    """One part of a node's share: the ranks that this attempt brought there.

    Those that are ready are told as done, for an agent that was restarted.
    """
    placements = [record.placements[rank] for rank in record.ranks_on(node_id, attempt)]
    return NodeJob(
        load_id=record.model_id,
        attempt=attempt,
        shared=b"",
        store_identity=record.request.store.ref.identity(),
        ranks=tuple(placement.rank for placement in placements),
        done=frozenset(placement.rank for placement in placements if placement.report is not None),
        min_slots=min_slots(len(placements)) if any(placement.report is None for placement in placements) else 0,
        chunk_attempts=config.chunk_attempts,
        lease_deadline_s=config.lease_deadline_s,
        placement=record.request.node_placement,
        is_local=record.request.is_local,
        record=SavedLoad.of(record).pack(),
        most_requests=config.fetch_threads,
        hedge_factor=config.hedge_factor,
        hedge_after_s=config.hedge_after_s,
        incarnations=tuple(placement.incarnation for placement in placements),
        again=(node_id, attempt) in record.begun,
        replaced=any(placement.replaced for placement in placements),
        model=model_label(record.request.uri),
        host_bytes=record.bytes_to_take(placements),
        revision=record.revision,
    )


def update_jobs(
    record: ModelRecord, update: SavedUpdate, host_bytes: dict[int, int], config: Config
) -> list[tuple[str, NodeJob]]:
    """Return the messages with which agents begin the load of what changed, each with its node.

    `host_bytes`: what each rank takes that has something to read.
    """
    found = []
    for node_id in record.nodes:
        for attempt in record.attempts_on(node_id):
            ranks = tuple(rank for rank in record.ranks_on(node_id, attempt) if rank in host_bytes)
            if ranks:
                job = replace(
                    node_job(record, node_id, attempt, config),
                    load_id=update.load_id,
                    store_identity=update.request.store.ref.identity(),
                    ranks=ranks,
                    done=frozenset(),
                    min_slots=min_slots(len(ranks)),
                    placement=update.request.node_placement,
                    is_local=update.request.is_local,
                    record=b"",
                    incarnations=tuple(record.placements[rank].incarnation for rank in ranks),
                    again=False,
                    replaced=False,
                    model=model_label(update.request.uri),
                    host_bytes=sum(host_bytes[rank] for rank in ranks),
                    revision=update.revision,
                )
                found.append((node_id, job))
    return found


def update_job(record: ModelRecord, placement: Placement, update: SavedUpdate, base: str, config: Config) -> UpdateJob:
    """Return one rank's share of an update. `base`: the revision that the rank must have; "": any."""
    job = rank_job(record, placement, config)
    job = replace(job, load_id=update.load_id, store=update.request.store, revision=update.revision)
    return UpdateJob(record.model_id, update.update_id, base, update.streaming, job)


def slots_taken(job: NodeJob, host: str, waited_s: float, holders: Sequence[SlotHolder]) -> ArenaBusy:
    """The error of a load that has waited for its slots for as long as it may."""
    others = [str(holder) for holder in holders if holder.load_id != job.load_id]
    return ArenaBusy(
        "the load did not get its arena slots in time: other loads hold them",
        hint="wait for them, release one (`longshore release`) or end its process, raise LONGSHORE_WINDOW_BYTES, or "
        "let loads wait longer (LONGSHORE_SLOTS_WAIT_S)",
        load=job.load_id,
        host=host,
        needed_slots=job.min_slots,
        waited_s=round(waited_s, 1),
        holders="; ".join(others) or "none any more",
    )


def rank_job(record: ModelRecord, placement: Placement, config: Config) -> RankJob:
    """One rank's share, for the worker that sits there now."""
    return RankJob(
        load_id=record.model_id,
        attempt=placement.attempt,
        rank=placement.rank,
        incarnation=placement.incarnation,
        shared=b"",
        store=record.request.store,
        fetch=config.fetch_settings(),
        placement=record.request.node_placement,
        mapped=record.request.device_map is not None,
        offload_folder=record.request.device_map.offload_folder if record.request.device_map else "",
        logs=config.logs,
        revision=record.revision,
    )
