"""The record of one model: the request, the pure state of its life, and handles to the actors it has.

`ModelRecord` owns its fields: other modules read them, and change them by its methods only. (A test holds this.)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import secrets
import time
import uuid
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actors.coordination.model_changes import UPDATE, Changed, ModelChanges, SavedUpdate, details_of, taken_bytes
from cluster.errors import LoadCancelled, ModelBroken, RankLost, UnknownFamily
from cluster.fit.options import what_was_taken
from cluster.layouts.mesh import Layout
from cluster.messages import Assignment
from cluster.planning.packed_plan import PackedPlan
from cluster.request import LoadRequest, StoreAccess
from cluster.scheduling import load_state
from cluster.scheduling.holders import Holders, ProvenAccess
from cluster.scheduling.load_state import Event, Life, LoadState, RankLife
from cluster.scheduling.topology import NodeInfo
from cluster.telemetry.chunk_map import EventLog, LoadEvent
from cluster.telemetry.counters import ClusterMetrics, LoadView
from cluster.telemetry.logs import log_events
from cluster.telemetry.metrics import model_label
from cluster.telemetry.report import LoadProgress, LoadReport, ModelStatus, RankReport, RankStatus
from cluster.telemetry.update_report import UpdateReport
from storage.errors import LongshoreError
from storage.host.memory import PeakMemory
from storage.peers import Peer

_LOG = logging.getLogger("longshore.load")
CANCEL_AGAIN_S = 1.0


async def stopped(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks, and return when all have ended, however.

    A task may lose its cancellation to an error or a result that came at the same moment, and go on. So it is repeated.
    """
    ended = list(tasks)
    while running := [task for task in ended if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
    for task in ended:
        if not task.cancelled():
            task.exception()  # seen: nobody is told of it any more


@dataclass(slots=True)
class Placement:
    """One rank's place: the node it is on and the worker that sits there now."""

    rank: int
    node_id: str
    host: str
    bundle: tuple[Any, int] | None  # (placement group, bundle index)
    attempt: int = 1  # that brought the rank to the node: its messages carry it
    incarnation: int = 0  # of its worker; in a worker group that was taken over it goes on counting
    worker: Any = None
    is_up: bool = False  # the worker's process has answered
    started: bool = False  # the worker has its job
    job_sent_s: float = 0.0  # when it was given it
    asked_s: float = math.inf  # when it was asked for its outcome
    placed_bytes: int = 0
    own_bytes: int = 0  # its worker's memory when its agent last looked; 0: not known
    report: RankReport | None = None
    replaced: bool = False  # its worker is not the load's first one, or may be another
    assignment: Assignment | None = None  # what a restarted coordinator found its worker working on

    def advance(self, placed_bytes: int, own_bytes: int) -> bool:
        """Note what its agent counted. Return True when bytes were placed since the last time."""
        moved = placed_bytes != self.placed_bytes
        self.placed_bytes, self.own_bytes = placed_bytes, own_bytes
        return moved

    def find(self, assignment: Assignment | None, model_id: str) -> None:
        """Note what a restarted coordinator found the worker working on."""
        self.started = assignment is not None and assignment.load_id == model_id
        self.assignment = assignment if self.started else None

    def give_job(self) -> None:
        """Its worker, which has answered, is about to get its job."""
        self.is_up, self.job_sent_s = True, time.monotonic()

    def vacate(self) -> None:
        """Its worker is gone. The next one has another incarnation, and nothing yet."""
        self.worker = self.report = self.assignment = None
        self.is_up = self.started = False
        self.placed_bytes, self.asked_s = 0, math.inf
        self.incarnation += 1
        self.replaced = True


_BEFORE_READY = (LoadState.PLANNING, LoadState.WAITING, LoadState.STARTING, LoadState.LOADING)


@dataclass(slots=True)
class ModelRecord:
    """One model. `life` and `holders` decide, and are pure; the rest is for acting."""

    model_id: str
    request: LoadRequest
    life: Life
    holders: Holders
    created_s: float = field(default_factory=time.monotonic)
    planned_s: float = 0.0
    ended_s: float = 0.0  # READY, or over
    memory: PeakMemory = field(default_factory=PeakMemory)  # the coordinator's
    plan: PackedPlan | None = None
    outline: PackedPlan | None = None  # of the plan: a restarted coordinator knows it without asking the store
    shared: Any = None  # the plan's tables in Ray's object store, for agents and workers
    total_bytes: int = 0
    revision: str = ""
    signed_by: str = ""  # id of the trusted key that signed its manifest
    note: str = ""  # for people, about its placements
    placements: dict[int, Placement] = field(default_factory=dict)
    host_bytes: dict[int, int] = field(default_factory=dict)  # by rank: of its host's memory, as was found to fit
    pools: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by node: ids of what its memory comes out of
    kept_bytes: dict[str, int] = field(default_factory=dict)  # by node: that the worker group taken over had there
    worker_group_id: str = (
        ""  # its workers and its placement groups are named by it: the model's id, or that of an earlier one
    )
    groups: tuple[Any, ...] = ()  # the placement groups that are ours
    begun: set[tuple[str, int]] = field(default_factory=set)  # (node, attempt): parts that agents were told
    store_bytes: dict[str, int] = field(default_factory=dict)  # by node
    peers: dict[str, Peer | None] = field(default_factory=dict)  # by node: where it serves chunks to the others
    left_out: dict[str, tuple[Peer, ...]] = field(default_factory=dict)  # by node: that it reads nothing from now
    peer_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)  # with which they prove it
    report: LoadReport | None = None
    error: LongshoreError | None = None
    message: str = ""
    access: ProvenAccess = field(default_factory=ProvenAccess)  # of each client, as far as it has worked
    restored: bool = False  # by a coordinator that was restarted: clients must supply their credentials again
    had_credentials: bool = False  # restored, and some client had passed credentials, which are in no saved state
    broken: str = ""  # why ranks have contents of two revisions
    joined: asyncio.Event = field(default_factory=asyncio.Event)  # set: there are placements that nobody tends yet
    join_error: LongshoreError | None = None  # why ranks that join cannot be filled
    next_incarnations: dict[int, int] = field(default_factory=dict)  # of ranks that were removed
    task: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None  # frees what the model has: from then on no load is given it
    events: EventLog = field(default_factory=EventLog)  # for who watches
    metrics: ClusterMetrics | None = None  # that count this load
    peer_rates: dict[str, tuple[float, float]] = field(default_factory=dict)  # by node id, as for `sending_weights`
    silent_ports: set[str] = field(default_factory=set)  # nodes that serve no chunks; see `note_ports`
    version: int = 0  # grows with every change a waiting client would want to see
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    changes: ModelChanges = field(init=False, repr=False)  # updates, and other numbers of replicas

    def __post_init__(self) -> None:
        self.worker_group_id = self.worker_group_id or self.model_id
        self.changes = ModelChanges(self.model_id, self.changed, self._note_change, self.count)

    def explain(self, note: str) -> None:
        """Note for people why the load is placed where it is; empty: for no reason of its own."""
        self.note = note

    def note_peers(self, infos: Iterable[NodeInfo]) -> None:
        """Note where these nodes serve chunks to others, and how fast."""
        infos = list(infos)
        self.peers |= {info.node_id: info.peer for info in infos}
        self.peer_rates |= {info.node_id: (info.peer_bytes_per_s, info.peer_measured_bytes_per_s) for info in infos}

    def peer_moved(self, node_id: str, peer: Peer | None) -> bool:
        """Note where a node serves chunks, by its heartbeat. Return whether the load's other nodes should be told."""
        if node_id not in self.nodes or self.peers.get(node_id) == peer:
            return False
        was_known = node_id in self.peers
        self.peers[node_id] = peer
        return was_known and bool(self.begun)

    def note_ports(self) -> None:
        """Make an event of nodes that serve no chunks though others of the load do; one for each of these nodes."""
        nodes = self.nodes
        silent = {node_id for node_id in nodes if self.peers.get(node_id) is None}
        silent = silent if len(silent) < len(nodes) else set()  # else no node is to serve any
        for node_id in sorted(silent - self.silent_ports):
            with self._logged():
                self.events.serves_nothing(time.time(), nodes[node_id])
        self.silent_ports = silent

    def lose_peers(self, living: Collection[str]) -> bool:
        """Note that nodes which live no more serve nothing. Return whether the others should be told."""
        lost = {node_id for node_id, peer in self.peers.items() if peer is not None and node_id not in living}
        self.peers |= dict.fromkeys(lost)
        return bool(lost)

    def leaves_out(self, node_id: str, peers: Iterable[Peer], records: Iterable[ModelRecord]) -> None:
        """Note which nodes this one reads nothing from for now. Those that no other left out before are an event.

        `records`: models whose nodes they may be.
        """
        now = tuple(dict.fromkeys(peers))
        if now == self.left_out.get(node_id, ()):
            return
        nodes = self.nodes
        before = {each: left_out for each, left_out in self.left_out.items() if each in nodes}
        self.left_out = {each: left_out for each, left_out in {**before, node_id: now}.items() if left_out}
        new = set(now).difference(*before.values())
        if new and self.is_usable:
            hosts = hosts_by_address(records)
            others = sorted({hosts.get(peer.host, peer.host) for peer in new})
            with self._logged():
                self.events.left_out(time.time(), nodes.get(node_id, node_id), others)

    @property
    def nodes(self) -> dict[str, str]:
        """node id -> host, of the nodes that have ranks."""
        return {placement.node_id: placement.host for placement in self.placements.values()}

    def beyond(self) -> list[Placement]:
        """Return the placements of ranks that are not the layout's: they join, or are about to be removed."""
        return [placement for rank, placement in sorted(self.placements.items()) if rank >= self.request.world_size]

    def has(self, placement: Placement) -> bool:
        """Return False when the rank was removed, or was placed anew."""
        return placement.rank < len(self.life.ranks) and self.placements.get(placement.rank) is placement

    def joins(self, rank: int) -> bool:
        """Return whether the model is ready without that rank, which was not removed."""
        return len(self.life.ranks) - self.life.joining <= rank < len(self.life.ranks)

    def awaits(self, node_id: str) -> bool:
        """Return True while a rank on that node has not reported that it is complete."""
        return any(placement.report is None for placement in self.on(node_id))

    @property
    def is_planned(self) -> bool:
        """True once the model was read: its revision is known, and the access that read it has worked."""
        return bool(self.revision)

    @property
    def is_usable(self) -> bool:
        """True while a load may be given this model."""
        return self.ending is None and not self.life.is_over

    @property
    def credentials_missing(self) -> bool:
        """True while a restarted coordinator waits for a client to supply its credentials again."""
        return self.had_credentials and not self.access.proofs

    def serves(self, request: LoadRequest) -> bool:
        """Return True when this model is what the request asks for, as far as the request says."""
        return self.is_usable and not self.broken and self.request.identity() == request.identity()

    # -- clients -----------------------------------------------------------------------------------------------

    def hold(self, client_id: str, *, keep: bool = False) -> bool:
        """A client wants the model. Return True when it asks to keep one that was not kept."""
        kept = self.holders.keep
        self.holders = self.holders.hold(client_id, time.monotonic(), keep=keep)
        return self.holders.keep and not kept

    def drop(self, client_id: str) -> None:
        """A client wants the model no more."""
        self.holders = self.holders.drop(client_id)

    def drop_all(self) -> None:
        """No client wants the model any more, and it is not kept."""
        self.holders = Holders()

    def unkeep(self, client_id: str) -> None:
        """A client wants the model no more, and it is not kept."""
        self.holders = Holders(False, self.holders.drop(client_id).heard_s)

    def forget_lapsed(self, now_s: float, holder_ttl_s: float, access_grace_s: float) -> None:
        """Forget clients that have not renewed their hold, and then the access of clients that are gone."""
        self.holders = self.holders.without_lapsed(now_s, holder_ttl_s)
        self.access = self.access.without_gone(self.holders.ids, now_s - access_grace_s)

    def proven(self, client_id: str, access: StoreAccess, at_s: float | None = None) -> None:
        """Note that the store accepted a client's access, now or at `at_s`; the model is read with it from now on."""
        self.access = self.access.proven(client_id, access, time.monotonic() if at_s is None else at_s)
        self.read_with(self.access.candidates({*self.holders.ids, client_id})[0])

    def read_with(self, access: StoreAccess) -> None:
        """Let whoever reads for this model next use that access."""
        self.change_request(store=access)

    # -- the load ----------------------------------------------------------------------------------------------

    def change_request(self, **changes: Any) -> None:
        """Make a decision part of the request: whoever asks for the same gets this model."""
        self.request = replace(self.request, **changes)

    def planned(self, plan: PackedPlan) -> None:
        """The model was read and planned for the first time."""
        self.revision, self.signed_by, self.planned_s = plan.revision, plan.signed_by, time.monotonic()
        self.use_plan(plan)
        for client_id in self.holders.ids:  # whoever attached before asked with the same access
            self.proven(client_id, self.request.store)

    def use_plan(self, plan: PackedPlan) -> None:
        """Load by this plan from now on."""
        self.plan, self.shared = plan, None
        self.total_bytes = sum(rank.read_bytes for rank in plan.ranks[: self.request.world_size])

    def share(self, tables: Any) -> None:
        """Note where the plan's tables are for agents and workers."""
        self.shared = tables

    def promise(self, ranks: Mapping[int, int], nodes: Iterable[NodeInfo]) -> None:
        """Note that these ranks (and the memory that each takes of its host) have been found to fit on the nodes."""
        self.host_bytes = {**self.host_bytes, **ranks}
        for node in nodes:
            self.pools[node.node_id] = tuple(pool.pool_id for pool in node.pools)
            self.kept_bytes[node.node_id] = node.kept_bytes

    def place(self, placements: Iterable[Placement]) -> None:
        """Place these ranks; others stay where they are."""
        self.placements.update({placement.rank: placement for placement in placements})

    def take_over(self, worker_group_id: str, groups: tuple[Any, ...], placements: Iterable[Placement]) -> None:
        """Place the ranks in an idle worker group. Its workers keep their names, so the load goes by its id."""
        self.worker_group_id, self.groups = worker_group_id, groups
        self.place(placements)

    def add_group(self, group: Any) -> None:
        """Note a placement group of the model's own."""
        self.groups = (*self.groups, group)

    def drop_groups(self, *, unused_only: bool = False) -> tuple[Any, ...]:
        """Forget the model's own placement groups, or those that no rank is in. Return them."""
        bundles = [place.bundle for place in self.placements.values() if place.bundle is not None]
        in_use = [group for group, _ in bundles] if unused_only else []
        dropped = tuple(group for group in self.groups if group not in in_use)
        self.groups = tuple(group for group in self.groups if group in in_use)
        return dropped

    def skip_incarnations(self, rank: int, until: int) -> None:
        """Note that workers of a rank that the model does not have were named by incarnations below `until`."""
        self.next_incarnations[rank] = max(until, self.next_incarnations.get(rank, 0))

    def begun_on(self, node_id: str, attempt: int) -> None:
        """The node's agent has received what this attempt brings to it."""
        self.begun.add((node_id, attempt))

    def fetched(self, node_id: str, size_bytes: int) -> None:
        """The node has fetched so many bytes from the store for this load."""
        self.store_bytes[node_id] = size_bytes

    def finish(self, report: LoadReport, records: Iterable[ModelRecord]) -> None:
        """The load is done, unless it was before. `records`: models whose nodes may have sent chunks to its own."""
        if self.report is not None:
            return  # two of its ranks were ready at one time, and each asked for the report
        self.report, self.ended_s = report, time.monotonic()
        with self._logged():
            self.events.sources(time.time(), report.nodes, hosts_by_address(records))

    async def end(self, error: LongshoreError) -> None:
        """The model is over, released or with this error."""
        self.error, self.ended_s, self.plan, self.shared = error, time.monotonic(), None, None
        attempt = self.life.attempt
        if isinstance(error, LoadCancelled):
            await self.advance(load_state.Released(attempt=attempt))
        else:
            await self.advance(load_state.Failed(str(error), attempt=attempt))

    def lead(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the task that leads the load."""
        self.task = asyncio.get_running_loop().create_task(work)

    async def free(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the task that frees what the model has, once; no load is given the model from now on."""
        if self.ending is None:
            self.ending = asyncio.get_running_loop().create_task(work)
        else:
            work.close()
        await asyncio.shield(self.ending)

    async def stop_task(self) -> None:
        """Cancel whoever leads the load, and an update of it; return when they have ended."""
        await stopped(task for task in (self.changes.task, self.task) if task is not None)

    @property
    def is_found(self) -> bool:
        """Return whether the coordinator knows what the ranks have: False for a while after its restart."""
        return not self.restored or self.life.state not in _BEFORE_READY

    async def note_save(self, save_id: str, events: Iterable[LoadEvent]) -> None:
        """Note what happens to a save of this model by its own ranks."""
        for each in events:
            text = f"{save_id}: {each.message}"
            self.events.add(time.time(), each.kind, text, rank=each.rank, host=each.host, **each.details)
        await self.touch()

    # -- replicas ------------------------------------------------------------------------------------------------------

    def grow(self, plan: PackedPlan, placements: Iterable[Placement]) -> None:
        """Ranks of further replicas join. `plan`: with theirs. The layout stays until all of them are ready."""
        self.plan, self.shared, self.join_error = plan, None, None
        self.place(placements)

    def tend_joined(self) -> None:
        """Let whoever tends the ranks look for further ones."""
        self.joined.set()

    async def fail_join(self, error: LongshoreError) -> None:
        """Note why ranks that join cannot be filled, and wake whoever waits for them."""
        self.join_error = self.join_error or error
        await self.touch()

    def scale_to(self, layout: Layout, plan: PackedPlan | None) -> None:
        """The model has this layout from now on. `plan`: None when it is made when it is needed."""
        if layout != self.request.layout:
            self.change_request(layout=layout, auto_identity="")
        self.plan = self.shared = None
        if plan is not None:
            self.use_plan(plan)
        if self.report is not None:
            reports = [self.placements[rank].report for rank in range(layout.ranks) if rank in self.placements]
            ranks = tuple(report for report in reports if report is not None)
            placed_bytes = sum(rank.size_bytes for rank in ranks)
            self.report = replace(self.report, layout=layout, ranks=ranks, placed_bytes=placed_bytes)

    def remove(self, placements: Iterable[Placement]) -> None:
        """Forget ranks whose workers were ended. The next worker of such a rank has another name."""
        for placement in placements:
            if self.placements.get(placement.rank) is placement:
                del self.placements[placement.rank]
                self.host_bytes.pop(placement.rank, None)
                self.skip_incarnations(placement.rank, placement.incarnation + 1)
        self.begun = {(node_id, attempt) for node_id, attempt in self.begun if self.ranks_on(node_id, attempt)}

    # -- updates -------------------------------------------------------------------------------------------------------

    async def _note_change(self, text: str, outcome: Changed | LongshoreError | None) -> None:
        """Note for people what an update or change of replicas does, or its outcome, and wake whoever waits."""
        failed = isinstance(outcome, LongshoreError)
        if outcome is not None and self.metrics is not None and self.changes.kind == UPDATE:
            how = ("broken" if self.broken else "failed") if failed else "done"
            changed_bytes = outcome.changed_bytes if isinstance(outcome, UpdateReport) else 0
            self.metrics.updated(model_label(self.request.uri), how, changed_bytes)
        rank = outcome.details.get("rank") if isinstance(outcome, LongshoreError) else None
        with self._logged():
            self.events.add(time.time(), "update", text, rank=rank, **details_of(outcome))
        await self.touch(text if outcome is None else "")

    def adopt(self, update: SavedUpdate, plan: PackedPlan | None, stores: Iterable[StoreAccess]) -> None:
        """From now on the model is the update's new revision: whoever replaces a rank loads that.

        `plan`: None after a restart, then it is made when it is needed. `stores`: accesses that read the revision.
        """
        self.changes.decided(update)
        self.broken = ""
        self.request, self.revision, self.signed_by = update.request, update.revision, update.signed_by
        self.plan = self.shared = None
        if plan is not None:
            self.use_plan(plan)
            self.outline = plan.outline()
        elif self.outline is not None:
            self.outline = replace(self.outline, revision=update.revision, signed_by=update.signed_by)
        if self.report is not None:
            uri, revision = update.request.uri, update.revision
            self.report = replace(self.report, uri=uri, revision=revision, signed_by=update.signed_by)
        self.access = ProvenAccess()  # others proved theirs at the old place
        for store in stores:
            self.proven(self.request.client_id, store)

    def break_contents(self, error: LongshoreError) -> None:
        """A streaming update failed: ranks have contents of two revisions."""
        self.broken = str(error)

    async def planned_or_over(self) -> None:
        """Return when the model was planned, or no load can be given it any more."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.is_planned or not self.is_usable)

    def attempts_on(self, node_id: str) -> tuple[int, ...]:
        """Attempts that brought ranks to the node, ascending: each is a part of the load there.

        Ranks that are about to be removed do not count: agents are given no job for them any more.
        """
        return tuple(sorted({placement.attempt for placement in self.on(node_id) if self.has(placement)}))

    def on(self, node_id: str) -> list[Placement]:
        """Return the placements that are on the node."""
        return [placement for placement in self.placements.values() if placement.node_id == node_id]

    def bytes_to_take(self, placements: Sequence[Placement]) -> int:
        """Return the host memory that these ranks, all of one node, have still to take for tensors."""
        left = [placement for placement in placements if placement.report is None]  # the others have it all
        wanted_bytes = sum(self.host_bytes.get(placement.rank, 0) for placement in left)
        taken_bytes = sum(self._taken_bytes(placement) for placement in left)
        kept_bytes = self.kept_bytes.get(placements[0].node_id, 0) if placements else 0
        return max(0, wanted_bytes - max(taken_bytes, kept_bytes))

    def _taken_bytes(self, placement: Placement) -> int:
        """Return what a rank has of its host's memory at least, by what it placed: that may be on its other devices,
        and takes less when it is converted.
        """
        host_bytes = self.host_bytes.get(placement.rank, 0)
        # After the coordinator was restarted there is no plan, and ranks that are about to be removed are not in it.
        if self.plan is None or placement.rank >= len(self.plan.ranks):
            return min(placement.placed_bytes, host_bytes)
        return taken_bytes(host_bytes, self.plan.ranks[placement.rank], placement.placed_bytes)

    def ranks_on(self, node_id: str, attempt: int) -> tuple[int, ...]:
        """Those that this attempt brought there, and that are not about to be removed."""
        return tuple(
            sorted(
                placement.rank
                for placement in self.placements.values()
                if (placement.node_id, placement.attempt) == (node_id, attempt) and self.has(placement)
            )
        )

    def workers(self) -> list[Any]:
        """Handles by rank. Raises RankLost while one is not ready, or the error that ended the model."""
        if self.error is not None:
            raise self.error
        if self.broken:
            raise ModelBroken(
                "a streaming update failed, and the ranks have contents of two revisions",
                hint="update the model again, or release it",
                model=self.model_id,
                cause=self.broken[:300],
            )
        if not self.life.is_ready:
            raise RankLost(
                "a rank of the model is being filled again",
                hint="longshore status shows when it is ready",
                model=self.model_id,
                state=self.life.state.value,
                rank=next((rank for rank, life in enumerate(self.life.ranks) if not life.ready), None),
            )
        return [self.placements[rank].worker for rank in range(self.request.world_size)]

    async def advance(self, *events: Event) -> None:
        """Apply the events (`cluster.scheduling.load_state`), and wake whoever waits."""
        before = self.life
        self.life = functools.reduce(load_state.advance, events, before)
        if self.life is not before:
            self.count()
        with self._logged():
            self.events.moved(
                time.time(),
                before,
                self.life,
                {placement.rank: placement.host for placement in self.placements.values()},
            )
        await self.touch()

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """Events that come meanwhile are logged too."""
        last = self.events.last_number
        yield
        log_events(_LOG, self.model_id, self.life.attempt, self.events.after(last))

    def count_in(self, metrics: ClusterMetrics, *, adopted: bool) -> None:
        """Count the load there from now on. `adopted`: an earlier coordinator began it."""
        self.metrics = metrics
        self.count(adopted=adopted)

    def count(self, *, adopted: bool = False) -> None:
        """Count the state that the load is in now."""
        if self.metrics is None:
            return
        life, model = self.life, model_label(self.request.uri)
        hosts = tuple(self.placements[rank].host if rank in self.placements else "" for rank in range(len(life.ranks)))
        error = type(self.error).__name__ if self.error is not None else ""
        view = LoadView(
            self.model_id, model, life.state, life.ranks, hosts, self.total_bytes, error, self.changes.state
        )
        self.metrics.load(view, time.monotonic(), adopted=adopted)

    def is_at_hand(self, identity: str, revision: str) -> bool:
        """Return whether a load of that identity and revision would attach to this model at once."""
        ready = self.is_usable and self.life.is_ready
        return ready and self.revision == revision and self.request.identity() == identity

    def is_answered_by(self, request: LoadRequest) -> bool:
        """Return whether this load failed for lack of layout rules, and `request` is the same load with rules.

        Then its client has answered a question, and the failure need not be shown. False while a holder is left.
        """
        if not (isinstance(self.error, UnknownFamily) and request.layout_rules) or len(self.holders):
            return False
        return replace(request, layout_rules=self.request.layout_rules).identity() == self.request.identity()

    async def touch(self, message: str | None = None) -> None:
        """Wake whoever waits for this model."""
        if self.report is None:
            self.memory.sample()
        if message is not None:
            with self._logged():
                self.events.note(time.time(), message)
        async with self.changed:
            self.version += 1
            if message is not None:
                self.message = message
            self.changed.notify_all()

    def progress(self) -> LoadProgress:
        """Return the progress of the load, as clients see it."""
        serving = [place for rank, place in self.placements.items() if rank < self.request.world_size]
        placed = sum(self._placed_bytes(placement) for placement in serving)
        end_s = self.ended_s or time.monotonic()
        store_bytes = sum(self.store_bytes.values())
        if self.report is not None and self.life.state is LoadState.READY:
            store_bytes = self.report.store_bytes  # the last heartbeat is older
        return LoadProgress(
            model_id=self.model_id,
            uri=self.request.uri,
            state=self.life.state.value,
            placed_bytes=placed,
            total_bytes=self.total_bytes,
            store_bytes=store_bytes,
            ranks_ready=sum(placement.report is not None for placement in serving),
            ranks_total=self.request.world_size,
            elapsed_s=max(0.0, end_s - self.created_s),
            message=self.message,
        )

    def _placed_bytes(self, placement: Placement) -> int:
        """Return the placed bytes of what the rank reads, counted as `total_bytes` is."""
        if placement.report is None:
            return placement.placed_bytes
        return placement.report.size_bytes if self.plan is None else self.plan.ranks[placement.rank].read_bytes

    def status(self) -> ModelStatus:
        """Return the status of the model, as `cluster.status` shows it."""
        request = self.request
        return ModelStatus(
            progress=self.progress(),
            revision=self.revision,
            layout=request.layout,
            device=request.device,
            keep=self.holders.keep,
            holders=len(self.holders),
            rank_hosts=tuple(self.placements[rank].host for rank in sorted(self.placements)),
            error=str(self.error) if self.error else "",
            signed_by=self.signed_by,
            taken=what_was_taken(request.tried),
            ranks=tuple(self._rank_status(rank) for rank in range(len(self.life.ranks))),
            ended_age_s=time.monotonic() - self.ended_s if self.life.is_over else 0.0,
            update=self.changes.text,
            updating=self.changes.progress(len(self.placements)),
        )

    def as_asked(self) -> LoadRequest:
        """Return what is loaded and how it is cut, so that it can be planned again. No credentials, no handles."""
        return replace(self.request, store=self.request.store.without_credentials(), placement_group=None)

    def _rank_status(self, rank: int) -> RankStatus:
        life, placement = self.life.ranks[rank], self.placements.get(rank)
        total_bytes = self.plan.ranks[rank].read_bytes if self.plan is not None else 0
        if placement is None:
            return RankStatus(rank, "", "lost" if life.lost else "waiting", 0, 0, total_bytes, 0, self.request.device)
        return RankStatus(
            rank,
            placement.host,
            _state_of(life, placement),
            life.incarnation,
            self._placed_bytes(placement),
            total_bytes,
            0 if life.lost or self.life.is_over else placement.own_bytes,
            placement.report.device if placement.report else self.request.device,
        )


def hosts_by_address(records: Iterable[ModelRecord]) -> dict[str, str]:
    """Return host names of the nodes of these models, by the address at which they serve chunks."""
    found: dict[str, str] = {}
    for record in records:
        nodes = record.nodes
        found |= {
            peer.host: nodes[node_id] for node_id, peer in record.peers.items() if peer is not None and node_id in nodes
        }
    return found


def _state_of(life: RankLife, placement: Placement) -> str:
    if life.lost or life.ready:
        return "lost" if life.lost else "ready"
    if placement.started:
        return "loading"
    return "waiting" if placement.worker is None else "starting"


def new_model_id(request: LoadRequest) -> str:
    """Readable, and unique for each load: "llama-7b-3f9a21c4"."""
    last = request.uri.rstrip("/").rsplit("/", 1)[-1].lower()
    name = "".join(char if char.isalnum() and char.isascii() else "-" for char in last).strip("-")[:32]
    return f"{name or 'model'}-{uuid.uuid4().hex[:8]}"
