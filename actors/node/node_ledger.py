"""All loads of one node over one cache: routes messages, and wakes loads that wait for each other. Pure.

A load has one node share here per attempt that brought ranks to this node (`NodeJob.part`). Ranks that come from a
lost node form a share of their own, which shares chunks with the first as any two loads do. So ranks that continue are
not notified of a new attempt, none of their messages is late, and none of their chunks is fetched again.

`actors.node_agent` adds the lock, the clock and the processes. Tests drive this class without any of them.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from actors.node.chunk_flow import JobTables, RankPlace
from actors.node.disk_backlog import DiskBacklog
from actors.node.lending import LENDS_S, Lending
from actors.node.node_load import NodeLoad
from actors.node.object_checks import KeptSpans
from cluster.errors import LoadCancelled, ModelNotFound, RankTaken
from cluster.messages import (
    AgentBeat,
    GroupMember,
    Lenders,
    Lends,
    LoadBeat,
    Members,
    NodeJob,
    Orders,
    RankBeat,
    RankHello,
    RankUpdate,
    SlotHolder,
)
from cluster.planning.packed_plan import SharedTables
from cluster.telemetry.chunk_map import NodeView, least_done, runs_of
from cluster.telemetry.metrics import BoundedLabels
from cluster.telemetry.report import NodeReport
from cluster.telemetry.stats import ArenaUse, LoadCounters, NodeStats, NodeTraffic
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import CachedChunk, Lease
from storage.errors import ArenaTooSmall, LongshoreError, RevisionMismatch
from storage.host.processes import ProcessId
from storage.peers import Asker, NoChunk


class ModelCounters:
    """The agent's counters by model, over the agent's whole life. They only grow.

    A heartbeat carries those that have grown since the coordinator last answered. A new coordinator gets all.
    """

    def __init__(self) -> None:
        self.label = BoundedLabels()
        self._finished: dict[str, LoadCounters] = {}  # of finished loads
        self._answered: dict[str, LoadCounters] = {}
        self.coordinator = ""  # incarnation of the coordinator that answered last

    def finish(self, load: NodeLoad) -> None:
        """Add the final counters of a load, which can be forgotten afterwards."""
        self._add(self._finished, load)

    def grown(self, loads: Iterable[NodeLoad]) -> dict[str, LoadCounters]:
        """Return the counters that the coordinator lacks; `loads` are those that still count."""
        totals = dict(self._finished)
        for load in loads:
            self._add(totals, load)
        return {model: counters for model, counters in totals.items() if self._answered.get(model) != counters}

    def answered(self, counters: Mapping[str, LoadCounters], coordinator: str) -> None:
        """Note that a coordinator's incarnation has these counters."""
        if coordinator != self.coordinator:
            self.coordinator, self._answered = coordinator, {}
        self._answered.update(counters)

    def _add(self, totals: dict[str, LoadCounters], load: NodeLoad) -> None:
        model = self.label(load.job.model)
        totals[model] = totals.get(model, LoadCounters()) + load.counters()


def rank_beats(loads: Collection[NodeLoad], now_s: float) -> tuple[RankBeat, ...]:
    """Return the heartbeat's entry for each rank."""
    return tuple(
        RankBeat(
            load.load_id,
            load.job.attempt,
            place.rank,
            place.incarnation,
            place.process.pid if place.process else 0,
            place.placed_bytes,
            silent_s=now_s - place.heard_s,
            done=not load.awaited(place),
            requests=place.stats.requests if place.stats else 0,
            allowed_requests=place.stats.allowed_requests if place.stats else 0,
        )
        for load in loads
        for place in load.ranks.values()
    )


QUARANTINE_GRACE_S = 30.0  # a holder that neither releases a revoked slot nor dies within this is killed
KEPT_PER_SLOT = 4  # chunks whose checksums are remembered: more than the arena can have
ASKS_AGAIN_S = 15.0  # a load that waits for slots asks far more often
ENDED_KEPT = 16  # ended loads whose ranks can still be ordered to stop and can report what they released


class NodeLedger:
    """The node's loads. `restored`: leases that an earlier agent granted, as `ChunkCache.restore` returned them."""

    def __init__(
        self,
        cache: ChunkCache,
        slot_bytes: int,
        chance: random.Random | None = None,
        restored: Iterable[Lease] = (),
        disk: DiskBacklog | None = None,
    ) -> None:
        self._cache = cache
        self._disk = DiskBacklog() if disk is None else disk
        self._slot_bytes = slot_bytes
        self._kept = KeptSpans(KEPT_PER_SLOT * cache.slot_count)
        self._chance = chance or random.Random()
        self._loads: dict[tuple[str, int], NodeLoad] = {}  # by load id and attempt
        self._ended: OrderedDict[tuple[str, int], NodeLoad] = OrderedDict()
        self._counters = ModelCounters()
        self._asking: dict[tuple[str, int], tuple[NodeJob, float]] = {}  # not begun yet, with the time they last asked
        self._former: dict[tuple[str, int], list[RankPlace]] = {}  # of loads that begin anew: see `NodeLoad.places`
        self._members: dict[str, GroupMember] = {}  # by load id, also after the load's end
        self._ended_unknown: OrderedDict[str, None] = OrderedDict()  # loads that ended before they began here
        self._left: OrderedDict[str, None] = OrderedDict()  # loads released by processes that were not known here
        self._restored: defaultdict[ProcessId, list[str]] = defaultdict(list)
        for lease in restored:
            self._restored[lease.holder].append(lease.lease_id)

    # -- coordinator -------------------------------------------------------------------------------------------

    def reserve(self, job: NodeJob, now_s: float) -> bool | None:
        """Reserve the job's slots.

        A repeated job only reports which ranks are done by now. A refused one is repeated until it is granted.

        Returns:
            None: the job has its slots, and `begin` must follow. True: its load is already here. False: others have
            the slots.

        A job of another revision takes the place of a load that was updated: its ranks have the new contents, or get
        them. So does a job without ranks that were removed.

        Raises:
            ArenaTooSmall: The arena can never hold the job.
            LoadCancelled: The load was ended before this message came.
            RevisionMismatch: Other readers of the group read another revision.
        """
        same = job.part in self._loads and _asks_for(job) == _asks_for(self._loads[job.part].job)
        if job.part in self._loads and not (same or job.on_demand or job.process is not None):
            self._end_part(job.part, now_s)
        if job.part in self._loads:
            if not same:
                raise RevisionMismatch(
                    "the readers of the group read another revision of the model",
                    hint="it was published again meanwhile: start all processes of the group again",
                    expected=self._loads[job.part].job.revision,
                    found=job.revision,
                )
            self._loads[job.part].apply_again(job)
            return True
        ended = self._ended.get(job.part)
        changed = ended is not None and _asks_for(job) != _asks_for(ended.job)
        if ended is not None and (job.on_demand or changed):  # all readers of the group had left, and now others come
            self._counters.finish(self._ended.pop(job.part))
            self._former[job.part] = ended.places
        elif ended is not None and ended.error is not None:
            raise ended.error
        if job.process is not None and job.load_id in self._ended_unknown:
            raise LoadCancelled("the load was ended before it began", load=job.load_id)
        if job.group is not None:
            self._members[job.load_id] = job.group
        granted = self._cache.reserve(job.part, job.min_slots)
        if not granted and any([load.drop_returned() for load in self._loads.values()]):  # a list: of every load
            granted = self._cache.reserve(job.part, job.min_slots)
        self._asking[job.part] = job, now_s
        return None if granted else False

    def begin(self, job: NodeJob, now_s: float, tables: JobTables | None = None) -> bool:
        """Reserve the slots as `reserve` does, and begin the load when it has them. `tables`: the job's, unpacked."""
        reserved = self.reserve(job, now_s)
        if reserved is not None:
            return reserved
        tables = tables or JobTables.of(job)
        if tables.largest_chunk_bytes > self._slot_bytes:
            self._give_up([job.part], now_s)
            raise ArenaTooSmall(
                f"the model was published in chunks of {tables.largest_chunk_bytes} bytes, the arena's slots have "
                f"{self._slot_bytes}",
                hint="set LONGSHORE_SLOT_BYTES to at least that for the cluster, or publish with smaller chunks",
                load=job.load_id,
            )
        del self._asking[job.part]
        load = self._loads[job.part] = NodeLoad(job, self._cache, now_s, self._kept, self._disk, tables)
        load.follow(self._former.pop(job.part, []))
        return True

    @property
    def promised_bytes(self) -> int:
        """Memory that the loads here have still to take for tensors."""
        return sum(load.promised_bytes for load in self._loads.values())

    @property
    def is_busy(self) -> bool:
        """True when any load is here or asks to be, or a process of a worker group holds a rank."""
        return bool(self._loads or self._asking or self._members)

    def slot_holders(self) -> tuple[SlotHolder, ...]:
        """Return the loads that have slots, then those that wait for some.

        An ended load counts as long as its ranks have not released their slots.
        """
        found = []
        for part, load in (*self._loads.items(), *self._ended.items()):
            if slots := self._cache.shares.demand(part):
                found.append(_holder(load.job, slots))
        for part, (job, _) in self._asking.items():
            waits = part in self._cache.shares.waiting
            found.append(replace(_holder(job, job.min_slots), waits=waits))
        return tuple(found)

    def rank_lost(self, load_id: str, rank: int, incarnation: int, now_s: float) -> None:
        """Drop a rank whose worker is dead, or about to be. `incarnation` will send the next hello."""
        for load in self._parts(load_id):
            self._wake(load.rank_lost(rank, incarnation, now_s))

    def keep_record(self, load_id: str, record: bytes) -> None:
        """Replace the coordinator's notes on the load."""
        for load in self._parts(load_id):
            load.record = record

    def end(self, load_id: str, now_s: float, attempt: int = 0) -> None:
        """Forget the load. Slots that its ranks still use stay fenced until the ranks release them or are dead.

        `attempt`: forget only the share of that attempt. 0: all.
        """
        asking = [part for part in self._asking if part[0] == load_id and attempt in (0, part[1])]
        self._give_up(asking, now_s)
        if not (parts := self._parts(load_id)) and not attempt:
            self._ended_unknown[load_id] = None
            _keep_last(self._ended_unknown)
        for load in (load for load in parts if attempt in (0, load.job.attempt)):
            self._end_part(load.job.part, now_s)

    def _end_part(self, part: tuple[str, int], now_s: float) -> None:
        load = self._ended[part] = self._loads.pop(part)
        for forgotten in _keep_last(self._ended):
            self._counters.finish(forgotten)
        self._wake(load.end(now_s))

    def leave(self, load_id: str) -> None:
        """Forget a worker group's member after its process has released the load's rank."""
        if self._members.pop(load_id, None) is None:
            self._left[load_id] = None
            _keep_last(self._left)

    def take_members(self, members: Iterable[GroupMember]) -> None:
        """Take over living processes of worker groups that an earlier agent knew."""
        for member in members:
            if member.load_id not in self._left and member.process.is_alive():
                self._members[member.load_id] = member

    def fail_all(self, error: LongshoreError) -> None:
        """End every load on the node with that error, because the node cannot continue."""
        for load in self._loads.values():
            load.fail(error)

    def report(self, load_id: str, node_id: str, host: str, attempt: int = 0) -> NodeReport:
        """Return the load's stats on this node. Raises ModelNotFound when it is not known here.

        `attempt`: only of the share of that attempt. 0: of all.
        """
        parts = [load.report(node_id, host) for load in self._known_parts(load_id, attempt)]
        return replace(
            functools.reduce(NodeReport.plus, parts),
            window_bytes=self._cache.window_slots * self._slot_bytes,
            arena_limit_bytes=self._cache.slot_count * self._slot_bytes,
        )

    def chunks_now(self, load_id: str) -> NodeView:
        """Return the load's shards, each chunk's state on this node, and where its bytes came from so far.

        Raises ModelNotFound if it is unknown here.
        """
        parts = [load.chunks_now() for load in self._known_parts(load_id)]
        traffic = sum((traffic for _, _, traffic in parts), NodeTraffic())
        return parts[0][0], runs_of(least_done([letters for _, letters, _ in parts])), traffic

    def held(self, keys: Iterable[bytes]) -> list[tuple[bool, bool]]:
        """Return for each chunk whether the arena has it, and whether the disk has it.

        Changes nothing, not even the order in which chunks were last used.
        """
        return [(key in self._cache, self._disk.has(key)) for key in keys]

    def tables(self, load_id: str) -> SharedTables:
        """Return the tables of a load, for a coordinator that lost them. Raises ModelNotFound."""
        return self._known_parts(load_id)[0].tables

    # -- other nodes -------------------------------------------------------------------------------------------

    def peer_key(self, load_id: str) -> bytes:
        """Return the key with which nodes prove that they take part in the load. Empty: it has none here."""
        loads = self._parts(load_id) or [load for load in self._ended.values() if load.load_id == load_id]
        return next((load.peer_key for load in loads), b"")

    def lends(self, now_s: float) -> tuple[Lends, ...]:
        """Return the loads of readers here that share chunks with those of other nodes, the ended ones last."""
        return tuple(
            Lends(load.load_id, facts.model, facts.key, facts.rates, lending.version, lending.ended_s > now_s)
            for load in (*self._loads.values(), *self._ended.values())
            if isinstance(lending := load.peers, Lending) and now_s - lending.ended_s < LENDS_S
            for facts in (lending.facts,)
        )

    def knows_lenders(self, load_id: str) -> bool:
        """Return whether the load knows which other nodes have readers of its model, or does not need to."""
        lending = (load.peers for load in self._parts(load_id) if isinstance(load.peers, Lending))
        return all(each.version >= 0 for each in lending)

    def use_lenders(self, found: Iterable[Lenders]) -> None:
        """Take over which other nodes have readers of the same models."""
        for each in found:
            for load in self._loads.values():
                if isinstance(load.peers, Lending) and load.peers.facts.model == each.model:
                    load.peers.use_lenders(each)

    def update_members(self, load_id: str, members: Members) -> bool:
        """Take over where the load's nodes serve chunks now. Return False if the load is not known here."""
        parts = self._parts(load_id)
        for load in parts:
            if load.peers is not None:
                load.peers.update(members)
        return bool(parts)

    def take_for_peer(
        self, load_id: str, chunk: int, process: ProcessId, reader: str, asker: Asker, now_s: float
    ) -> tuple[NodeLoad, CachedChunk] | NoChunk:
        """Hold a chunk of the load for another node."""
        why_not = NoChunk.MISSING
        for load in self._parts(load_id):
            if load.peers is None or load.error is not None:
                continue
            found = load.peers.take(chunk, process, reader, asker, now_s)
            if not isinstance(found, NoChunk):
                return load, found
            why_not = max(why_not, found, key=[NoChunk.MISSING, NoChunk.COMING, NoChunk.TOO_SLOW].index)
        for load in self._ended.values():  # its readers were faster than those of other nodes
            if load.load_id == load_id and isinstance(load.peers, Lending):
                found = load.peers.ended_take(chunk, process, reader)
                if not isinstance(found, NoChunk):
                    return load, found
        return why_not

    def reads_store(self, load_id: str, chunk: int) -> bool:
        """Return whether a chunk that another node waits for is on its way from the store."""
        return any(load.peers is not None and load.peers.reads_store(chunk) for load in self._parts(load_id))

    def take_news(self) -> list[tuple[str, int]]:
        """Return (load, chunk) of what has come since the last call, as far as other nodes may wait for it."""
        exchanges = ((load.load_id, load.peers) for load in self._loads.values())
        return [(load_id, chunk) for load_id, peers in exchanges if peers is not None for chunk in peers.take_news()]

    def on_disk(self, load_id: str, chunk: int) -> tuple[bytes, int]:
        """Return key and size of a chunk on the node's disk that another node can check; no key: there is none."""
        for load in self._parts(load_id):
            key, size_bytes = load.chunk_on_disk(chunk)
            if key and load.peers is not None:
                return key, size_bytes
        return b"", 0

    def sent_from_disk(self, load_id: str, size_bytes: int) -> None:
        """Count a chunk of the node's disk that another node has received."""
        peers = next((load.peers for load in self._parts(load_id) if load.peers is not None), None)
        if peers is not None:
            peers.sent_bytes += size_bytes

    # -- ranks -------------------------------------------------------------------------------------------------

    def batch(self, hello: RankHello) -> int:
        """Return how many chunks the rank should collect before it sends a message."""
        return self._loads[hello.load_id, hello.attempt].batch

    def join(self, hello: RankHello, now_s: float, *, settled: bool = True) -> bool | LongshoreError:
        """Join a rank's process to its load.

        `settled`: the process uses nothing that an earlier agent granted to any of its ranks.

        Returns:
            True: the rank continues. False: the load is not known here yet. An error: the rank must stop.
        """
        if settled:
            self.settle(hello.process)
        load = self._find(hello.load_id, hello.attempt)
        if load is None or (load.job.on_demand and load.job.part in self._ended):
            return False  # readers begin a group anew that all had left
        if hello.revision and hello.revision != load.job.revision:
            return False  # the model is being updated: one of both comes with the other's revision soon
        load.check_chunks(hello)
        load.former_lets_go(hello)
        place = load.ranks.get(hello.rank)
        if place is None or not place.expects(hello):
            return _replaced(hello)
        self._wake(load.join(hello, now_s))
        return True if load.error is None else load.error

    def settle(self, process: ProcessId) -> None:
        """Free what an earlier agent granted to a process that no longer uses it."""
        self._cache.settled(process)
        for lease_id in self._restored.pop(process, ()):
            self._cache.abandon(lease_id)

    def exchange(self, update: RankUpdate, now_s: float, *, settled: bool = False) -> tuple[Orders | None, bool]:
        """Apply a rank's update.

        Returns (orders or None for none now, whether other ranks may have work now). `settled` is as for `join`.
        """
        if settled:
            self.settle(update.process)
        load = self._find(update.load_id, update.attempt)
        place = None if load is None else load.ranks.get(update.rank)
        if load is None or place is None or place.is_late(update):
            for lease_id in update.lease_ids():
                self._cache.abandon(lease_id)
            if load is not None and update.leaving:
                load.former_lets_go(update)
            if place is not None and update.incarnation < place.incarnation:
                return Orders(stop=_replaced(update)), False
            return Orders(rejoin=True), False
        load.check_chunks(update)
        self._wake(load.apply(update, now_s, self._chance.random()))
        if load.is_deserted:
            orders = load.orders(update, now_s)
            self.end(load.load_id, now_s)
            return orders, True
        moved = bool(update.lease_ids() or update.placed or update.leaving)
        return load.orders(update, now_s), moved

    def orders_for(self, update: RankUpdate, now_s: float) -> Orders | None:
        """Return orders for a waiting rank whose update has been applied before."""
        load = self._find(update.load_id, update.attempt)
        place = None if load is None else load.ranks.get(update.rank)
        if load is None or place is None or place.number != update.number or place.process != update.process:
            return Orders(rejoin=True)
        return load.orders(update, now_s)

    def no_orders(self, update: RankUpdate) -> Orders:
        """Return the answer to a rank that waited in vain: no leases, and the reason."""
        load = self._find(update.load_id, update.attempt)
        place = None if load is None else load.ranks.get(update.rank)
        return Orders() if place is None else Orders(short_of=place.short_of)

    # -- time and death ----------------------------------------------------------------------------------------

    def add_ready(self, ready_slots: int) -> None:
        """Make more slots usable, because they have memory now."""
        self._cache.add_ready(ready_slots)

    def expire(self, now_s: float) -> bool:
        """Revoke overdue leases, and those of silent readers. Return whether there were any.

        A job that stopped asking for slots loses its place in the queue. Its coordinator was killed or has ended the
        load, and the jobs behind it must not wait.
        """
        self._give_up([part for part, (_, asked_s) in self._asking.items() if now_s - asked_s > ASKS_AGAIN_S], now_s)
        ended: set[bytes] = set().union(*(load.end_silent(now_s) for load in self._loads.values()))
        late = False
        for load in self._loads.values():
            handed_over, free = load.look_at_peers(now_s)
            ended, late = ended | handed_over, late or free
        self._wake(ended)
        return self._took_back(self._cache.expire(now_s), now_s) or bool(ended) or late

    def process_dead(self, process: ProcessId, now_s: float) -> set[str]:
        """Remove a process that is certainly dead. The loads that it hosted end with it. Return their ids.

        Its rank's next incarnation comes by `rank_lost` or by its own hello.
        """
        ended = {lease.key for lease in self._cache.process_dead(process)}
        self._restored.pop(process, None)
        for load in (*self._loads.values(), *self._ended.values()):
            ended |= load.process_dead(process, now_s)
        self._wake(ended)
        asking = (job for job, _ in self._asking.values())
        hosted = {job.load_id for job in (*self._jobs(), *asking) if job.process == process}
        hosted |= {load.load_id for load in self._loads.values() if load.is_deserted}
        for load_id in hosted:
            self.end(load_id, now_s)
        for load_id in [load_id for load_id, member in self._members.items() if member.process == process]:
            self.leave(load_id)
        return hosted

    def processes(self) -> set[ProcessId]:
        """Return every process whose death would matter here."""
        ranks = {
            place.process for load in self._loads.values() for place in load.ranks.values() if place.process is not None
        }
        asking = (job for job, _ in self._asking.values())
        hosts = {job.process for job in (*self._jobs(), *asking) if job.process is not None}
        members = {member.process for member in self._members.values()}
        return ranks | hosts | members | self._cache.processes()

    def overdue(self, now_s: float) -> set[ProcessId]:
        """Return the processes that must be killed, because they hold slots that were revoked.

        Readers are programs of users, which nobody kills. Their slots stay in quarantine.
        """
        return {lease.holder for lease in self._cache.overdue(now_s, QUARANTINE_GRACE_S) if lease.may_kill}

    # -- heartbeat ---------------------------------------------------------------------------------------------

    def beat(self, node_id: str, host: str, incarnation: str, now_s: float, asked_for: Iterable[str]) -> AgentBeat:
        """Return a heartbeat, with the records of the loads that the coordinator `asked_for`."""
        stats = self._cache.stats()
        use = ArenaUse(
            self._cache.slot_count * self._slot_bytes,
            stats.used_bytes,
            stats.leased_slots,
            stats.quarantined_slots,
            self._disk.unkept_chunks,
            self._cache.window_slots * self._slot_bytes,
        )
        records = {load_id: load.record for load_id in asked_for for load in self._parts(load_id)}
        loads = self._loads.values()
        label = self._counters.label
        return AgentBeat(
            node_id,
            host,
            incarnation,
            tuple(
                LoadBeat(
                    *load.job.part,
                    load.store_bytes,
                    load.error,
                    load.complete,
                    label(load.job.model),
                    () if load.peers is None else load.peers.left_out,
                    load.job.revision,
                )
                for load in loads
            ),
            rank_beats(loads, now_s),
            use,
            records,
            counters=self._counters.grown((*self._ended.values(), *loads)),
            counted_by=self._counters.coordinator,
            stats=NodeStats(stats),
            members=tuple(self._members.values()),
            lends=self.lends(now_s),
        )

    def answered(self, beat: AgentBeat, coordinator: str) -> None:
        """Note that the coordinator of that incarnation has received the heartbeat."""
        self._counters.answered(beat.counters, coordinator)

    # -- inside ------------------------------------------------------------------------------------------------

    def _find(self, load_id: str, attempt: int) -> NodeLoad | None:
        return self._loads.get((load_id, attempt)) or self._ended.get((load_id, attempt))

    def _parts(self, load_id: str) -> list[NodeLoad]:
        """Return one load's node shares, in the order of their attempts."""
        return [self._loads[part] for part in sorted(self._loads) if part[0] == load_id]

    def _known_parts(self, load_id: str, attempt: int = 0) -> list[NodeLoad]:
        if parts := [load for load in self._parts(load_id) if attempt in (0, load.job.attempt)]:
            return parts
        raise ModelNotFound("this node does not know the load", load=load_id)

    def _jobs(self) -> list[NodeJob]:
        return [load.job for load in self._loads.values()]

    def _give_up(self, asking: list[tuple[str, int]], now_s: float) -> None:
        for part in asking:
            del self._asking[part]
            self._former.pop(part, None)
            self._cache.end_owner(part, now_s)

    def _took_back(self, leases: list[Lease], now_s: float) -> bool:
        for lease in leases:
            for load in self._loads.values():
                if load.job.part == lease.owner:
                    load.expired(lease, now_s)
        self._wake({lease.key for lease in leases})
        return bool(leases)

    def _wake(self, keys: set[bytes]) -> None:
        if keys:
            for load in self._loads.values():
                load.wake(keys)


def _keep_last(ended: OrderedDict[Any, Any]) -> list[Any]:
    """Forget all but the last entries, and return the forgotten ones."""
    return [ended.popitem(last=False)[1] for _ in range(len(ended) - ENDED_KEPT)]


def _asks_for(job: NodeJob) -> tuple[str, tuple[int, ...]]:
    """Return what a job must have in common with the one that came before, to be the same one again."""
    return job.revision, () if job.on_demand or job.process is not None else job.ranks


def _holder(job: NodeJob, slots: int) -> SlotHolder:
    return SlotHolder(job.load_id, slots, job.model, 0 if job.process is None else job.process.pid)


def _replaced(message: RankHello | RankUpdate) -> LongshoreError:
    return RankTaken(
        "another process has the rank now",
        rank=message.rank,
        incarnation=message.incarnation,
        load=message.load_id,
    )
