"""The coordinator's view of the agents: their heartbeats (`AgentWatch`), and those that nobody needs (`IdleAgents`).

beat.records --adopt--> a load that an earlier incarnation of the coordinator began goes on
beat.loads lacks a load that runs there --begin_on--> an agent that was restarted is told again; so is one that waits
                                                      for a rank whose worker had all before that, and is silent since
beat.ranks --> progress of each rank; one that is alive and silent for too long is killed, and thereby replaced

Ray may declare a node dead, and a partition that heals may let its agent speak again. Such an agent changes nothing and
is told to end itself: its loads have gone on without it, and its record of them is older than theirs.

An agent that nobody needs ends after `Config.idle_agent_s`, because Ray's autoscaler removes no node that has an actor.
One that only readers have used ends after 10 minutes at the latest.
A node is needed while a model has ranks there, workers wait there for the next load, or its agent reports a load
(`actors.hosting` begins some that no coordinator knows). The last heartbeat may be old, so the agent itself decides
whether it has a load, and then does not end. An agent that ends removes its arena with what was cached in it. Chunks on
disk stay. The next load on the node starts another agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from actors.coordination import nodes, spawn
from actors.coordination.jobs import SavedLoad
from actors.coordination.load_run import LoadRun
from actors.coordination.model_changes import is_update
from actors.coordination.model_record import ModelRecord, Placement
from actors.coordination.spawn import end_orphans
from actors.coordination.worker_groups import WorkerGroups
from actors.links import ask_agent
from cluster.config import Config
from cluster.messages import (
    AgentBeat,
    BeatReply,
    GroupMember,
    Lender,
    Lenders,
    Lends,
    LoadBeat,
    PeerSource,
    RankBeat,
)
from cluster.scheduling.load_state import LoadState
from cluster.scheduling.topology import IdleNodes, sending_weights
from cluster.telemetry.counters import ClusterMetrics
from cluster.telemetry.report import NodeStatus, SettingStatus
from storage.errors import ArenaBusy, LongshoreError
from storage.peers import Peer

SILENT_S = 5.0  # an agent that is well speaks more often
HELLO_S = 60.0  # a worker that is well has opened its device and its store by then, and speaks
ASKED_S = 1.0  # what Ray said of the nodes is that old at most: all agents of a new coordinator speak at once
BIND_S = 60.0  # a process that was told its group's revision has told its agent by then
TELL_S = 5.0  # an agent that is well takes a list of lenders within this; its next heartbeat brings it otherwise
_MOST_GONE = 64  # nodes that a list remembers beside those on it
REBUILD_S = 20.0  # an agent that has not told of its loads by then is gone


class LenderLists:
    """The nodes whose readers read a model now, for each model. Pure.

    A node that can send far less than the fastest one has no weight: it only receives. Nodes get what has changed since
    the list that they have, so what is sent grows with the nodes that come and go, for each node.
    """

    def __init__(self, first_version: int) -> None:
        """`first_version`: larger than those of an earlier coordinator."""
        self._versions = itertools.count(first_version)
        self._nodes: dict[str, tuple[Peer, tuple[Lends, ...]]] = {}
        self._lists: dict[bytes, _LenderList] = {}
        self._changed: set[bytes] = set()  # models whose lists have changed since `news`

    def note(self, node_id: str, peer: Peer | None, lends: tuple[Lends, ...]) -> None:
        """Take over what a node reports."""
        before = self._nodes.pop(node_id, None)
        if peer is not None and lends:
            self._nodes[node_id] = peer, lends
        if before is not None and (before[0], _unversioned(before[1])) == (peer, _unversioned(lends)):
            return
        for model in {each.model for each in (*lends, *(() if before is None else before[1]))}:
            self._make(model)

    def keep(self, node_ids: Collection[str]) -> None:
        """Forget all other nodes."""
        for node_id in self._nodes.keys() - set(node_ids):
            self.note(node_id, None, ())

    def newer(self, lends: Iterable[Lends]) -> tuple[Lenders, ...]:
        """Return what a node with these loads does not know yet of the lists of their models."""
        known: dict[bytes, int] = {}  # the oldest that one of its loads has
        for each in lends:
            if each.reads:
                known[each.model] = min(each.version, known.get(each.model, each.version))
        return tuple(
            found.since(model, version)
            for model, version in sorted(known.items())
            if (found := self._lists.get(model)) is not None and version < found.version
        )

    @property
    def has_news(self) -> bool:
        """True when a list has changed since the last call of `news`."""
        return bool(self._changed)

    def news(self) -> dict[str, tuple[Lenders, ...]]:
        """Return what nodes do not know yet of the lists that have changed since the last call, by node."""
        changed, self._changed = self._changed, set()
        if not changed:
            return {}
        found = {
            node_id: self.newer(each for each in lends if each.model in changed)
            for node_id, (_, lends) in self._nodes.items()
        }
        return {node_id: lists for node_id, lists in found.items() if lists}

    def _make(self, model: bytes) -> None:
        """Make the model's list anew."""
        first = {
            node_id: (peer, found)
            for node_id, (peer, lends) in sorted(self._nodes.items())
            if (found := next((each for each in lends if each.model == model), None)) is not None
        }
        if not any(lends.reads for _, lends in first.values()):
            self._lists.pop(model, None)
            return
        weights = sending_weights({node_id: lends.rates for node_id, (_, lends) in first.items()})
        now = {
            node_id: Lender(node_id, PeerSource(peer, lends.load_id, lends.key), weights[node_id], lends.reads)
            for node_id, (peer, lends) in first.items()
        }
        if self._lists.setdefault(model, _LenderList()).change(now, self._versions):
            self._changed.add(model)


def _unversioned(lends: tuple[Lends, ...]) -> list[Lends]:
    return [replace(each, version=0) for each in lends]


class _LenderList:
    """The list of a model."""

    def __init__(self) -> None:
        self.version = -1
        self._lenders: dict[str, tuple[Lender, int]] = {}  # with the version since which it is so
        self._gone: dict[str, int] = {}  # nodes that were on it, and the first version without them
        self._forgotten = -1  # nodes that were gone at this version, or before, may not be known any more

    def change(self, now: dict[str, Lender], versions: Iterator[int]) -> bool:
        """Take over a list, with a new version. Return False if it is the same as before."""
        gone = self._lenders.keys() - now.keys()
        changed = {
            each for each, lender in now.items() if each not in self._lenders or self._lenders[each][0] != lender
        }
        if not gone and not changed:
            return False
        first, self.version = self.version < 0, next(versions)
        if first:
            self._forgotten = self.version - 1  # lists of an earlier coordinator named nodes that are not known here
        self._lenders = {
            each: (lender, self.version if each in changed else self._lenders[each][1]) for each, lender in now.items()
        }
        self._gone = {each: since for each, since in self._gone.items() if each not in now}
        self._gone |= dict.fromkeys(gone, self.version)
        while len(self._gone) > max(_MOST_GONE, len(now)):
            self._forgotten = max(self._forgotten, self._gone.pop(next(iter(self._gone))))
        return True

    def since(self, model: bytes, known: int) -> Lenders:
        """Return the list for a node that has the list `known`: what has changed; everything if that is too old."""
        base = known if known > self._forgotten else -1
        lenders = tuple(lender for lender, since in self._lenders.values() if since > base)
        gone = tuple(each for each, since in self._gone.items() if since > base) if base >= 0 else ()
        return Lenders(model, self.version, lenders, base, gone)


class AgentWatch:
    """The coordinator's view of the agents. `models` is the coordinator's table."""

    def __init__(
        self,
        coordinator: str,
        stuck_after_s: float,
        models: dict[str, ModelRecord],
        go_on: Callable[[ModelRecord, dict[int, int]], None],
        load_run: Callable[[ModelRecord], LoadRun],
        end: Callable[[ModelRecord, LongshoreError], Coroutine[Any, Any, None]],
    ) -> None:
        """`coordinator` is its incarnation; `go_on(record, incarnations)` tends an adopted load; `end` ends one."""
        self.rebuilt = asyncio.Event()  # before, a model that is not known may well be there
        self.metrics = ClusterMetrics(coordinator)
        self._coordinator = coordinator
        self._stuck_after_s = stuck_after_s
        self._models = models
        self._go_on = go_on
        self._load_run = load_run
        self._end = end
        self._beats: dict[str, tuple[AgentBeat, float]] = {}  # node id -> (the last one, when)
        self._settings: dict[str, tuple[SettingStatus, ...]] = {}  # node id -> that its agent goes by
        self._binding: dict[str, tuple[GroupMember, float]] = {}  # by load id: not known to an agent yet; since when
        self._refused: dict[str, float] = {}  # node id -> since when its agent has been one of another version
        self._reported: set[str] = set()  # nodes whose agents have reported all their loads
        self._report_came = asyncio.Condition()
        self._asking = asyncio.Lock()
        self._living: tuple[set[str], float] = set(), -math.inf  # nodes, and when Ray was asked
        self._telling: set[asyncio.Task[None]] = set()
        self._resending: dict[tuple[str, str], asyncio.Task[None]] = {}  # by (model id, node id)
        self._lenders = LenderLists(int(time.time() * 1e9))
        self._sends_lenders = False
        self._ending: asyncio.Task[None] | None = None  # the last one, as a loop keeps no tasks alive

    @property
    def node_ids(self) -> set[str]:
        """Nodes whose agents were heard."""
        return set(self._beats)

    @property
    def busy_node_ids(self) -> set[str]:
        """Those of them whose agents had a load, or a process that hosts a rank, when they were heard last."""
        return {node_id for node_id, (beat, _) in self._beats.items() if beat.loads or beat.members}

    def bind(self, member: GroupMember) -> str:
        """The revision that the member's group loads: that of its living processes, else the member's own."""
        now_s = time.monotonic()
        binding = {load_id: (m, since_s) for load_id, (m, since_s) in self._binding.items() if now_s - since_s < BIND_S}
        members = [*(m for beat, _ in self._beats.values() for m in beat.members), *(m for m, _ in binding.values())]
        same = (m.revision for m in members if (m.group, m.uri) == (member.group, member.uri))
        revision = next(same, member.revision)
        if revision == member.revision:
            binding[member.load_id] = member, now_s
        self._binding = binding
        return revision

    def ended(self, node_ids: Iterable[str]) -> None:
        """Their agents were ended: there is nothing to tell of these nodes."""
        for node_id in node_ids:
            self._beats.pop(node_id, None)

    def status(self) -> tuple[NodeStatus, ...]:
        """Return one status for each node whose agent was heard."""
        now_s = time.monotonic()
        return tuple(
            _status_of(beat, now_s - heard_s, self._settings.get(node_id, ()))
            for node_id, (beat, heard_s) in self._beats.items()
        )

    async def forget_dead_nodes(self) -> None:
        """Leave nodes out that Ray knows to be dead, which is asked only when somebody is silent; and what they and
        forgotten models had in the metrics.
        """
        self.metrics.keep(self._beats, self._models, time.monotonic())
        self._lenders.keep(self._beats)
        self._settings = {node_id: kept for node_id, kept in self._settings.items() if node_id in self._beats}
        now_s = time.monotonic()
        silent = [node_id for node_id, (_, heard_s) in self._beats.items() if now_s - heard_s > SILENT_S]
        if silent:
            living = await asyncio.to_thread(nodes.living_nodes)
            for node_id in silent:
                if node_id not in living:
                    self._beats.pop(node_id, None)  # a heartbeat may have been refused meanwhile

    async def rebuild(self) -> None:
        """Wait for the agents that are there already: there are some when an earlier incarnation was killed."""
        try:
            living = await asyncio.to_thread(nodes.living_nodes)
            agents = await asyncio.to_thread(spawn.agent_node_ids) & living.keys()
            async with self._report_came:
                all_reported = self._report_came.wait_for(lambda: agents <= self._reported)
                await asyncio.wait_for(all_reported, REBUILD_S)
            # Nobody was answered yet, so whatever is not known by now was forgotten: it must not hold its places.
            known = {record.worker_group_id for record in self._models.values() if not record.life.is_over}
            await asyncio.to_thread(lambda: end_orphans(known, end_orphans(known, set())))
        except (TimeoutError, RayError):
            pass  # an agent that has not told by now is gone
        finally:
            self.rebuilt.set()

    async def receive(self, beat: AgentBeat) -> BeatReply:
        """Take a heartbeat in; the answer says what the agent should report again or forget."""
        if await self._is_given_up(beat.node_id):
            self._beats.pop(beat.node_id, None)
            return BeatReply(self._coordinator, node_dead=True)
        members = self._members_of_agent_before(beat)
        beat = replace(beat, members=(*beat.members, *members))
        self._beats[beat.node_id] = (beat, time.monotonic())
        self._refused.pop(beat.node_id, None)
        if beat.settings:
            self._settings[beat.node_id] = beat.settings
        self.metrics.received(beat, time.monotonic())
        for member in beat.members:
            self._binding.pop(member.load_id, None)
        for load_id, packed in beat.records.items():
            if packed:  # else a load that no coordinator began (`actors.hosting`)
                self._adopt(load_id, packed, beat)
        loads = dict.fromkeys(load.load_id for load in beat.loads if not is_update(load.load_id))
        unknown = tuple(load_id for load_id in loads if load_id not in self._models)
        if set(unknown) <= set(beat.records):
            await self._note_report(beat.node_id)
        ended = self._ended_updates(beat)
        for load_id in loads:
            record = self._models.get(load_id)
            if record is not None and (record.life.is_over or beat.node_id not in record.nodes):
                ended.append(load_id)  # over, or its ranks were moved from there: the node was taken for dead
            elif record is not None:
                parts = [load for load in beat.loads if load.load_id == load_id]
                record.fetched(beat.node_id, sum(load.store_bytes for load in parts))
                left_out = (peer for load in parts for peer in load.left_out)
                record.leaves_out(beat.node_id, left_out, self._models.values())
                for attempt in {load.attempt for load in parts}.difference(record.attempts_on(beat.node_id)):
                    # Its ranks were removed, and the agent was not told in time, or began the share after that.
                    self._in_background(_tell(beat.node_id, "end", load_id, attempt))
        await self._note_progress(beat)
        self._begin_again(beat)
        for record in self._models.values():
            if record.changes.heard is not None:
                record.changes.heard(beat)
        for record in self._models.values():
            if record.peer_moved(beat.node_id, beat.peer):
                self._in_background(self._load_run(record).tell_members({beat.node_id}))
        self._lenders.note(beat.node_id, beat.peer, beat.lends)
        if self._lenders.has_news and not self._sends_lenders:
            self._sends_lenders = True
            self._in_background(self._send_lenders())
        return BeatReply(
            self._coordinator, unknown, tuple(ended), members=members, lenders=self._lenders.newer(beat.lends)
        )

    async def _send_lenders(self) -> None:
        """Tell nodes whose readers have come and gone, once for all that do so while others are told."""
        try:
            while news := self._lenders.news():
                await asyncio.gather(*(_tell(node_id, "use_lenders", lists) for node_id, lists in news.items()))
        finally:
            self._sends_lenders = False

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        telling = asyncio.get_running_loop().create_task(work)
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    def _ended_updates(self, beat: AgentBeat) -> list[str]:
        """Return the loads of updates that nobody leads any more, once every agent has reported its loads."""
        if not self.rebuilt.is_set():
            return []
        changes = [record.changes for record in self._models.values() if record.changes.is_running]
        live = {each.update.load_id for each in changes if each.update is not None}
        return [load_id for load_id in {each.load_id for each in beat.loads if is_update(each.load_id)} - live]

    def _members_of_agent_before(self, beat: AgentBeat) -> tuple[GroupMember, ...]:
        """Return processes of groups that the agent before this one told of, and that this one has not."""
        before, _ = self._beats.get(beat.node_id, (beat, 0.0))
        if before.incarnation == beat.incarnation:
            return ()
        reported = {member.load_id for member in beat.members}
        return tuple(member for member in before.members if member.load_id not in reported)

    async def refuse(self, node_id: str, error: LongshoreError) -> None:
        """Forget a node whose agent runs another Longshore: nothing that it says can be read, also not what it has.

        Its ranks end their loads with the same error. Loads of ranks that are stuck end here.
        """
        self._beats.pop(node_id, None)
        await self._note_report(node_id)
        now_s = time.monotonic()
        if now_s - self._refused.setdefault(node_id, now_s) > self._stuck_after_s:
            for record in list(self._models.values()):
                if record.life.state is LoadState.LOADING and record.awaits(node_id):
                    await self._end(record, error)

    async def _note_report(self, node_id: str) -> None:
        """Nothing more is to come from this node that `rebuild` waits for."""
        self._reported.add(node_id)
        async with self._report_came:
            self._report_came.notify_all()

    async def _is_given_up(self, node_id: str) -> bool:
        """Return whether Ray has declared the node dead. Asked at an agent's first message and after a silence."""
        _, heard_s = self._beats.get(node_id, (None, -math.inf))
        if time.monotonic() - heard_s < SILENT_S:
            return False
        async with self._asking:
            living, asked_s = self._living
            if node_id not in living or time.monotonic() - asked_s > ASKED_S:
                try:
                    self._living = set(await asyncio.to_thread(nodes.living_nodes)), time.monotonic()
                except RayError:
                    return False  # nobody says so
            return node_id not in self._living[0]

    async def _note_progress(self, beat: AgentBeat) -> None:
        for rank in beat.ranks:
            record = self._models.get(rank.load_id)
            placement = record.placements.get(rank.rank) if record is not None else None
            if record is None or placement is None or placement.incarnation != rank.incarnation:
                continue
            if (placement.node_id, placement.attempt) != (beat.node_id, rank.attempt):
                continue  # a node that was taken for dead
            moved = placement.advance(rank.placed_bytes, rank.own_bytes)
            if self._is_stuck(rank, placement) and placement.worker is not None:
                spawn.end_actor(
                    placement.worker
                )  # whoever tends the rank learns it from the pending call, and replaces it
            if moved:
                await record.touch()

    def _is_stuck(self, rank: RankBeat, placement: Placement) -> bool:
        if rank.done:
            # What is left is to say so to us: a worker that was stopped before it could, is not awaited by its agent.
            silent_s = min(rank.silent_s, time.monotonic() - placement.asked_s)
            return placement.report is None and silent_s > self._stuck_after_s
        if rank.pid:
            return rank.silent_s > self._stuck_after_s
        # It has its job and has not said hello to its agent; that may have been restarted in between.
        silent_s = min(rank.silent_s, time.monotonic() - placement.job_sent_s)
        return placement.started and placement.report is None and silent_s > self._stuck_after_s + HELLO_S

    def _adopt(self, load_id: str, packed: bytes, beat: AgentBeat) -> None:
        if load_id in self._models:
            return
        record = SavedLoad.unpack(packed).restore(load_id, time.monotonic())
        self._models[load_id] = record
        self._go_on(record, {rank.rank: rank.incarnation for rank in beat.ranks if rank.load_id == load_id})

    def _begin_again(self, beat: AgentBeat) -> None:
        known = {(load.load_id, load.attempt) for load in beat.loads if not self._is_outdated(load)}
        waits = {(rank.load_id, rank.attempt) for rank in beat.ranks if self._waits_in_vain(rank)}
        for record in self._models.values():
            begun = record.life.state in (LoadState.LOADING, LoadState.READY, LoadState.DEGRADED)
            parts = {(record.model_id, attempt) for attempt in record.attempts_on(beat.node_id)}
            part = record.model_id, beat.node_id
            if begun and (parts - known or parts & waits) and part not in self._resending:
                # One at a time: an agent that has no free slots refuses for as long as others hold them.
                again = asyncio.get_running_loop().create_task(self._load_run(record).begin_on(beat.node_id))
                self._resending[part] = again
                again.add_done_callback(functools.partial(self._was_resent, part))

    def _is_outdated(self, load: LoadBeat) -> bool:
        """Return whether the agent has the tables of the revision before an update."""
        record = self._models.get(load.load_id)
        return record is not None and bool(load.revision) and load.revision != record.revision

    def _was_resent(self, part: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._resending[part]
        error = None if task.cancelled() else task.exception()
        record = self._models.get(part[0])
        if isinstance(error, ArenaBusy) and record is not None and record.life.state is LoadState.LOADING:
            self._ending = asyncio.get_running_loop().create_task(self._end(record, error))

    def _waits_in_vain(self, rank: RankBeat) -> bool:
        """Return whether the agent waits for a rank that was removed, or that ended before the agent's restart,
        which was unknown when the agent got its ranks.
        """
        record = self._models.get(rank.load_id)
        placement = record.placements.get(rank.rank) if record is not None else None
        if placement is None:
            return record is not None
        if rank.pid or rank.done or placement.report is None:
            return False
        return (placement.incarnation, placement.attempt) == (rank.incarnation, rank.attempt)


async def _tell(node_id: str, call: str, *arguments: Any) -> None:
    agent = await asyncio.to_thread(spawn.find_agent, node_id)
    if agent is not None:
        with contextlib.suppress(Exception):  # after the agent's next heartbeat it is told again
            await ask_agent(agent, TELL_S, "a node's agent", call, *arguments)


def _status_of(beat: AgentBeat, age_s: float, settings: tuple[SettingStatus, ...]) -> NodeStatus:
    disk = beat.stats.disk if beat.stats is not None else None
    return NodeStatus(
        node=beat.node_id,
        host=beat.host,
        arena_bytes=beat.arena.arena_bytes,
        window_bytes=beat.arena.window_bytes,
        arena_taken_bytes=beat.arena.taken_bytes,
        used_bytes=beat.arena.committed_bytes,
        leased_slots=beat.arena.leased_slots,
        quarantined_slots=beat.arena.quarantined_slots,
        heartbeat_age_s=age_s,
        disk_unkept_chunks=beat.arena.disk_unkept_chunks,
        evicted_chunks=beat.stats.cache.evicted if beat.stats is not None else 0,
        disk_budget_bytes=disk.budget_bytes if disk is not None else 0,
        disk_used_bytes=disk.used_bytes if disk is not None else 0,
        disk_files=disk.files if disk is not None else 0,
        disk_evicted_chunks=disk.evicted_chunks if disk is not None else 0,
        settings=settings,
    )


class IdleAgents:
    """`models` is the coordinator's table. Nobody is given a placement while `admission` is held."""

    def __init__(
        self,
        config: Config,
        agents: AgentWatch,
        worker_groups: WorkerGroups,
        models: Mapping[str, ModelRecord],
        admission: asyncio.Lock,
    ) -> None:
        self._agents = agents
        self._worker_groups = worker_groups
        self._models = models
        self._admission = admission
        self._nodes = IdleNodes(config.idle_agent_s)
        self._of_readers: set[str] = set()  # nodes whose agents only readers have used

    def needed(self, node_id: str, *, by_reader: bool = False) -> None:
        """Somebody asks for the node's agent, and is to find it at work for a while."""
        self._nodes.needed(node_id, time.monotonic())
        if not by_reader:
            self._of_readers.discard(node_id)
        elif node_id not in self._agents.node_ids:
            self._of_readers.add(node_id)

    async def look(self) -> None:
        """End those whose time is over. While a load takes its placements: the next time."""
        if not self._due() or self._admission.locked():
            return
        async with self._admission:
            if due := self._due():
                ended = await asyncio.gather(*(spawn.shut_agent(node_id, only_idle=True) for node_id in due))
                self._agents.ended(node_id for node_id, is_ended in zip(due, ended, strict=True) if is_ended)

    def _due(self) -> list[str]:
        placed = {node for model in self._models.values() if not model.life.is_over for node in model.nodes}
        warm = {node for worker_group in self._worker_groups.idle() for node in worker_group.node_ids}
        needed = placed | warm | self._agents.busy_node_ids
        self._of_readers -= placed | warm
        return self._nodes.due(self._agents.node_ids, needed, time.monotonic(), self._of_readers)
