"""Decides what one rank of a load does next. Pure: no thread, lock, clock or I/O; the caller passes the time.

    agent's orders -- answered --> leases --> next_lease --> fetch_ended --+--> results -- update --> agent
                         |                                                 |
                         +-------> readable --> next_chunks --> chunks_placed

The agent allows a number of requests in flight (`cluster.scheduling.concurrency`). A fetch that pauses before another
try frees its place and takes one again afterwards.

Readable chunks are placed in the order in which they came. Where tensors are converted, `Staging.choose` orders them,
and holds back in their slots those that would start too many tensors.

Three rules keep the slots safe. A chunk is reported as placed only when nothing here reads its slot any more. A hello,
and the last update, follow a drain: then no lease, no copy and no readable chunk is left. An answer counts once, and
only for the last message.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple

from actors.node.chunk_sources import ARENA, PEER, by_source, source_of
from cluster.messages import ArenaAccess, Commit, FetchFailure, JoinReply, LeaseOrder, Orders, RankHello, RankUpdate
from cluster.scheduling.concurrency import START
from cluster.scheduling.retry import asks_for_fewer_requests, cause_of
from cluster.telemetry.stats import RankStats
from storage.errors import IntegrityError, LongshoreError
from storage.host.processes import ProcessId

Choose = Callable[[Iterable[int], int], list[int]]  # (chunks, limit) -> those that may be placed now, in order

HOLD_S = 1.0  # chunks are held back for this long at most while no fetch of this rank is under way
REPORT_S = 0.05  # results wait for others at most this long: other ranks of the node need them


class RankIdentity(NamedTuple):
    """The first fields of every message of a rank."""

    load_id: str
    attempt: int
    rank: int
    incarnation: int
    process: ProcessId


@dataclass(frozen=True, slots=True)
class FetchedChunk:
    """The end of a lease: committed, failed, or (neither) returned unused."""

    lease_id: str
    commit: Commit | None = None
    failure: FetchFailure | None = None
    retries: dict[str, int] = field(default_factory=dict)  # by cause


@dataclass(slots=True)
class Results:
    """Everything that happened since the last update."""

    fetched: list[FetchedChunk] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)  # by cause
    requests: list[tuple[int, float, float]] = field(default_factory=list)  # bytes, seconds, when it ended
    throttled: int = 0
    awaited: bool = False  # other nodes wait for one of the chunks
    since_s: float = math.inf  # when the first lease ended, or the first chunk was placed

    def __len__(self) -> int:
        """Number of chunks to report. Most are fetched and placed at once."""
        return max(len(self.fetched), len(self.placed))

    def add(self, result: FetchedChunk, now_s: float) -> None:
        """A lease ended."""
        self.since_s = min(self.since_s, now_s)
        self.fetched.append(result)
        self.retries.update(result.retries)


@dataclass(slots=True)
class FetchTime:
    """Seconds of the rank since `begin`, each divided among the requests that it may have in flight."""

    working_s: float = 0.0  # reading, verifying, and placing at once
    wait_retry_s: float = 0.0  # before another try
    wait_slot_s: float = 0.0  # the agent had no slot for a chunk
    wait_lease_s: float = 0.0  # the agent had not answered yet
    _until_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Start the account at this time."""
        self._until_s = now_s

    def spend(self, now_s: float, requests: int, working: int, pausing: int, short_of: str) -> None:
        """Since the last call, `working` and `pausing` of the requests; the others were short of "slots", "lease" or
        "".
        """
        if self._until_s is None:
            return
        each_s = (now_s - self._until_s) / requests
        self._until_s = now_s
        working = min(working, requests)
        pausing = min(pausing, requests - working)
        free = requests - working - pausing
        self.working_s += working * each_s
        self.wait_retry_s += pausing * each_s
        if short_of == "slots":
            self.wait_slot_s += free * each_s
        elif short_of == "lease":
            self.wait_lease_s += free * each_s


class Next(Enum):
    """The next step after an exchange with the agent."""

    GO_ON = auto()
    REJOIN = auto()  # drain, then say hello: the agent does not know this rank, or its answer was lost
    LEFT = auto()  # the agent has the last update


class RankState:
    """Everything that a rank has in hand. Attributes are for reading; only the methods change them."""

    def __init__(
        self,
        identity: RankIdentity,
        needed: int,
        most: int,
        numbers: Iterator[int],
        *,
        heartbeat_s: float = 1.0,
        requests: int = START,
        direct: tuple[int, ...] = (),
        choose: Choose | None = None,
        revision: str = "",
    ) -> None:
        """
        Args:
            needed: Number of chunks that the rank places.
            most: Limit of requests in flight, whatever the agent allows.
            numbers: Numbers of messages, shared by all ranks of the process.
            requests: Requests in flight that are allowed before the agent says how many.
            direct: Chunks that the rank can receive in its own memory.
            choose: Picks the readable chunks that may be placed; without it, none is held back.
            revision: Of the model, as in `RankHello`.
        """
        self.identity = identity
        self.joined = False  # an agent knows this rank
        self.may_hold_slots = False  # the agent may take slots for this rank's
        self.error: LongshoreError | None = None  # of `stop`
        self.batch = 1  # chunks worth a message, as the agent says
        self.requests = self.peak_requests = min(requests, most)  # allowed in flight now
        self.working = 0  # fetches that read or verify, but not those from other nodes
        self.pausing = 0  # fetches between two tries
        self.throttles = 0
        self.placed_bytes = 0
        self.store_s: float | None = None  # see `RankUpdate`
        self.first_work_s: float | None = None  # when the agent first had something to do
        self.fetch_time = FetchTime()
        self.leases: deque[LeaseOrder] = deque()  # not begun
        self.begun: dict[str, LeaseOrder] = {}  # by id
        self.closed: set[str] = set()  # ids of leases that the agent has taken back
        self.readable: OrderedDict[int, int] = OrderedDict()  # chunk -> slot
        self.copying: set[int] = set()  # chunks whose slots are being read
        self.placed: set[int] = set()  # chunks on the device
        self.sources: dict[int, str] = {}  # chunk that was fetched here -> its source
        self.results = Results()
        self.held_until_s: float | None = None  # set while every readable chunk is held back
        self.draining = False
        self._needed = needed
        self._most = most
        self._numbers = numbers
        self._heartbeat_s = heartbeat_s
        self._direct = direct
        self._choose = choose
        self._revision = revision
        self._finishing = False  # a drain lets chunks arrive of which a part is there
        self._abandoned = False  # nobody wants what the drain waits for
        self._returning = 0  # pauses that are over, and have no place yet
        self._short_of = ""  # why the agent granted fewer leases than were wanted
        self._reported_requests = 0  # `requests` at the last update
        self._answered_s = -math.inf
        self._asked: RankHello | RankUpdate | None = None  # the message that has no answer yet
        self._asked_finished = False  # every chunk was placed when it was sent

    # -- fetching ----------------------------------------------------------------------------------------------

    @property
    def may_fetch(self) -> bool:
        """True when `next_lease` returns one."""
        return self._startable() is not None and self.error is None

    @property
    def in_hand(self) -> int:
        """Number of leases that are queued or being worked on."""
        return len(self.leases) + len(self.begun)

    @property
    def fetches(self) -> int:
        """Number of fetches that may be under way at once, for which there are leases."""
        return min(self.in_hand, self.requests + self._peer_leases)

    @property
    def _peer_leases(self) -> int:
        """Number of leases on chunks of other nodes. All are fetched at once: the agent limits them."""
        return sum(bool(lease.peers) for lease in itertools.chain(self.leases, self.begun.values()))

    def _startable(self) -> int | None:
        """Return which queued lease starts next.

        Requests to the store are limited by what it bears. Those to other nodes have places of their own: one that
        waits for a chunk that is to come must not keep this rank from reading what others wait for.
        """
        if self.working + self._returning < self.requests:
            return 0 if self.leases else None
        return next((at for at, lease in enumerate(self.leases) if lease.peers), None)

    def next_lease(self, now_s: float) -> LeaseOrder | None:
        """Return the lease whose fetch starts now; None when no fetch may start."""
        at = self._startable() if self.error is None else None
        if at is None:
            return None
        self._account(now_s)
        lease = self.leases[at]
        del self.leases[at]
        self.begun[lease.lease_id] = lease
        self._begun_or_ended(lease, 1)
        return lease

    def _begun_or_ended(self, lease: LeaseOrder, change: int) -> None:
        if not lease.peers:
            self.working += change

    def is_void(self, lease_id: str, arrived: bool) -> bool:
        """Return True when no further try of the lease may start. `arrived`: a part of the chunk is there."""
        return lease_id in self.closed or self.ends_tries(arrived)

    def ends_tries(self, arrived: bool) -> bool:
        """Return True when no fetch tries again, and pauses end. `arrived` as for `is_void`."""
        return self.error is not None or (self.draining and not (arrived and self._finishing))

    def fetch_ended(
        self, result: FetchedChunk, size_bytes: int, fetch_s: float, now_s: float, placed_bytes: int = 0
    ) -> None:
        """The fetch of a lease ended, `fetch_s` after it started. A commit brought `size_bytes`, of which
        `placed_bytes` are on the device already; 0: the chunk was not placed.
        """
        lease = self.begun.pop(result.lease_id, None)
        if lease is None:
            return
        self._account(now_s)
        self._begun_or_ended(lease, -1)
        self.closed.discard(result.lease_id)
        if self.held_until_s is not None:
            self.held_until_s = now_s + HOLD_S
        commit = result.commit
        if commit is not None:
            self.sources[commit.chunk] = source_of(commit.lease_id, commit.source)
            if self.sources[commit.chunk] not in (ARENA, PEER):  # they say nothing about the number of requests
                self.results.requests.append((size_bytes, fetch_s, now_s))
            if placed_bytes:
                self._place_fetched(commit.chunk, placed_bytes)
        elif result.failure is not None and asks_for_fewer_requests(cause_of(result.failure.error)):
            self._was_throttled()
        self.results.add(result, now_s)
        self.results.awaited = self.results.awaited or (lease.feeds and commit is not None)

    def turns_to_store(self, lease_id: str, now_s: float) -> None:
        """The fetch goes on from the store, as another node did not send the chunk."""
        lease = self.begun.get(lease_id)
        if lease is not None and lease.peers:
            self._account(now_s)
            self.begun[lease_id] = replace(lease, peers=())
            self.working += 1

    def pause_begun(self, cause: str, now_s: float) -> None:
        """A try has failed, and the fetch waits before the next one. Its place is free."""
        self._account(now_s)
        self.working -= 1
        self.pausing += 1
        if asks_for_fewer_requests(cause):
            self._was_throttled()

    def pause_over(self) -> None:
        """The wait is over. The fetch goes on when `may_try`, or when `ends_tries`."""
        self._returning += 1

    @property
    def may_try(self) -> bool:
        """True when a fetch whose pause is over finds a place."""
        return self.working < self.requests

    @property
    def is_returning(self) -> bool:
        """True while a fetch whose pause is over waits for a place."""
        return self._returning > 0

    def pause_ended(self, now_s: float) -> None:
        """The fetch goes on: it tries again, or finds its lease void."""
        self._account(now_s)
        self._returning -= 1
        self.pausing -= 1
        self.working += 1

    # -- placing -----------------------------------------------------------------------------------------------

    def next_chunks(self, most: int, now_s: float) -> list[tuple[int, int]]:
        """Return up to `most` (chunk, slot) whose copies start now; none when no copy may start.

        Chunks that are held back may occupy the slots that others need, here or in another rank. After `HOLD_S`
        without a fetch of its own the rank therefore places the first of them in the plan's order. A drain forgets
        them instead: the agent grants them again.
        """
        if self.error is not None or not self.readable:
            return []
        if self.held_until_s is not None:
            if now_s < self.held_until_s:
                return []
            self.held_until_s = None
            if not self.in_hand:
                return self._begin_copies([min(self.readable)])
        if self._choose is None:
            chunks = [self.readable.popitem(last=False) for _ in range(min(most, len(self.readable)))]
            self.copying.update(chunk for chunk, _ in chunks)
            return chunks
        chunks = self._begin_copies(self._choose(self.readable, most))
        if not chunks and self.draining:
            self.readable.clear()
        elif not chunks:
            self.held_until_s = now_s + HOLD_S
        return chunks

    def chunks_placed(self, sizes_bytes: Mapping[int, int], now_s: float) -> None:
        """These chunks are on the device, with so many bytes of each; nothing reads their slots any more."""
        for chunk, size_bytes in sizes_bytes.items():
            if chunk in self.copying:
                self.copying.remove(chunk)
                self._note_placed(chunk, size_bytes)
                self.results.placed.append(chunk)
                self.results.since_s = min(self.results.since_s, now_s)

    # -- the conversation with the agent -----------------------------------------------------------------------

    def hello(self, others: ArenaAccess = ()) -> RankHello:
        """Return the message that introduces this rank, which has drained. `others`: see `RankHello`."""
        if not self.drained:
            raise RuntimeError("the hello would claim that nothing of the arena is in use")
        self.results.fetched.clear()  # the hello returns every lease: how single ones ended does not matter
        self.draining = self._abandoned = self.joined = False
        self.may_hold_slots = True
        self._asked = RankHello(
            *self.identity,
            placed=tuple(sorted(self.placed)),
            number=next(self._numbers),
            others=others,
            direct=self._direct,
            fetched=by_source(self.sources),
            revision=self._revision,
        )
        return self._asked

    def welcomed(self, hello: RankHello, reply: JoinReply, now_s: float) -> None:
        """The agent knows this rank from now on. Raises the error that ends the load."""
        if self._asked is None or hello.number != self._asked.number:
            return
        if reply.stop is not None:
            raise reply.stop
        if reply.known:
            self._asked = None
            self.joined, self.batch, self._answered_s = True, reply.batch, now_s

    @property
    def update_due_s(self) -> float:
        """When the next update is to be sent; -inf for now. A rank that has everything drains first."""
        waits_for_others = self.finished and self.draining and not self.drained and self.error is None
        if not waits_for_others and self._is_worth_a_message():
            return -math.inf
        if len(self.results) and not waits_for_others:
            return max(self.results.since_s, self._answered_s) + min(self._heartbeat_s, REPORT_S)
        return self._answered_s + self._heartbeat_s

    def store_takes(self, store_s: float | None) -> None:
        """Take over how long chunks from the store take, for the next update. None: it is not known."""
        self.store_s = store_s

    def update(
        self, now_s: float, *, leaving: bool = False, others: ArenaAccess = (), stats: RankStats | None = None
    ) -> RankUpdate:
        """Return the message with all results; they are no longer here. `leaving`: it is the last one."""
        results, self.results = self.results, Results()
        fetched = results.fetched
        idle = not (self._goes_on() or fetched or results.placed or leaving)
        self._reported_requests = self.requests
        self._asked_finished = self.finished
        self._asked = RankUpdate(
            *self.identity,
            number=next(self._numbers),
            committed=tuple(result.commit for result in fetched if result.commit is not None),
            failed=tuple(result.failure for result in fetched if result.failure is not None),
            placed=tuple(results.placed),
            returned=tuple(r.lease_id for r in fetched if r.commit is None and r.failure is None),
            want_leases=0 if leaving else self.want_leases,
            wait_s=self._wait_s if idle else 0.0,
            placed_bytes=self.placed_bytes,
            retries=dict(results.retries),
            requests=tuple((size_bytes, took_s, now_s - ended_s) for size_bytes, took_s, ended_s in results.requests),
            throttled=results.throttled,
            store_s=self.store_s,
            leaving=leaving,
            others=others,
            stats=stats,
            **self._take_wishes(),
        )
        return self._asked

    def answered(self, update: RankUpdate, orders: Orders | None, now_s: float) -> Next:
        """The agent's answer to the update came; None: it was lost. Raises the error that ends the load.

        A rank that has everything ends well, whatever the agent says; only a damaged object is an error then.
        """
        if self._asked is None or update.number != self._asked.number:
            return Next.GO_ON
        self._asked, self._answered_s = None, now_s
        stop = None if orders is None else orders.stop
        if orders is None or orders.rejoin:
            orders = None
        if update.leaving and (stop is not None or orders is not None):
            self.joined = self.may_hold_slots = False
            if isinstance(stop, IntegrityError):
                raise stop  # the last chunk of an object showed that it is damaged
            return Next.LEFT
        if stop is not None and self._asked_finished:  # it waits only for what it fetches for others
            self.abandon()
            return Next.GO_ON
        if stop is not None:
            raise stop
        if orders is None:
            self.joined = False
            return Next.REJOIN
        self._take(orders, now_s)
        return Next.GO_ON

    @property
    def want_leases(self) -> int:
        """Number of further leases that keep the rank busy while the agent is asked for more."""
        return 0 if self.finished else max(0, self.requests + self._batch() - self.in_hand + self._peer_leases)

    @property
    def finished(self) -> bool:
        """True when every chunk is placed."""
        return len(self.placed) == self._needed

    # -- the end -----------------------------------------------------------------------------------------------

    def drain(self, now_s: float, *, finish: bool = False) -> None:
        """No read and no further try starts until the next hello. Leases that have not begun are returned, begun reads
        end by themselves, readable chunks are placed, or forgotten where they are held back.

        `finish`: chunks of which a part has arrived are fetched completely, with further tries if need be.
        """
        while self.leases:
            lease = self.leases.popleft()
            self.closed.discard(lease.lease_id)
            self.results.add(FetchedChunk(lease.lease_id), now_s)
        self.draining, self._finishing = True, finish and not self._abandoned
        if self.held_until_s is not None:
            self.readable.clear()
            self.held_until_s = None

    @property
    def drained(self) -> bool:
        """True when nothing of the arena is in use."""
        return not (self.leases or self.begun or self.copying or self.readable)

    def abandon(self) -> None:
        """Nobody wants what a drain waits for: no further try starts, and the caller ends the reads."""
        self.draining = self._abandoned = True
        self._finishing = False

    @property
    def abandoned(self) -> bool:
        """True when every read is to end at once."""
        return self._abandoned or self.error is not None

    def stop(self, error: LongshoreError) -> None:
        """Nothing starts any more; the first error counts."""
        self.error = self.error or error

    # -- inside ------------------------------------------------------------------------------------------------

    def _take(self, orders: Orders, now_s: float) -> None:
        if (orders.leases or orders.readable) and self.first_work_s is None:
            self.first_work_s = now_s
            self.fetch_time.begin(now_s)
        self._account(now_s)
        self.closed.update(orders.closed_leases)
        self._short_of = orders.short_of
        if self.draining:
            for lease in orders.leases:
                self.results.add(FetchedChunk(lease.lease_id), now_s)
        else:
            self.leases.extend(orders.leases)
        for chunk, slot in orders.readable:
            if chunk in self.placed:  # a fetch of its own brought it meanwhile: the slot is not read
                self.results.placed.append(chunk)
                self.results.since_s = min(self.results.since_s, now_s)
            else:
                self.readable[chunk] = slot
                self.held_until_s = None
        if orders.requests:
            self.requests = min(orders.requests, self._most)
            self.peak_requests = max(self.peak_requests, self.requests)

    def _place_fetched(self, chunk: int, size_bytes: int) -> None:
        """The fetch has placed the chunk too. The agent may have granted it from another slot meanwhile."""
        if chunk in self.placed:
            return
        self._note_placed(chunk, size_bytes)
        if chunk not in self.copying:  # else it is reported when the copy has ended
            self.readable.pop(chunk, None)
            self.results.placed.append(chunk)
            if not self.readable:
                self.held_until_s = None

    def _begin_copies(self, chosen: list[int]) -> list[tuple[int, int]]:
        """Take the chosen chunks, in the order of the choice: in another, more tensors would have memory at once."""
        self.copying.update(chosen)
        return [(chunk, self.readable.pop(chunk)) for chunk in chosen]

    def _note_placed(self, chunk: int, size_bytes: int) -> None:
        if chunk not in self.placed:
            self.placed.add(chunk)
            self.placed_bytes += size_bytes

    def _account(self, now_s: float) -> None:
        """Account for the time until now, before the number of working or pausing fetches changes."""
        nothing_to_do = bool(self.leases) or self.finished or self._short_of == "chunks"
        short_of = "" if nothing_to_do else self._short_of or "lease"
        self.fetch_time.spend(now_s, self.requests, self.working, self.pausing, short_of)

    def _goes_on(self) -> bool:
        """Return True when something goes on here without the agent."""
        placeable = self.readable and self.held_until_s is None
        return bool(self.leases or self.begun or self.copying or placeable)

    def _take_wishes(self) -> dict[str, Any]:
        """Return fields of an update that only readers on demand have (`ReaderState`)."""
        return {}

    @property
    def _wait_s(self) -> float:
        """Seconds for which the agent may hold its answer while nothing goes on here."""
        return self._heartbeat_s

    def _batch(self) -> int:
        return max(self.requests, self.batch)

    def _is_worth_a_message(self) -> bool:
        if self.error is not None or self.finished or not self._goes_on():
            return True
        if self.results.awaited:
            return True
        if self.requests > self._reported_requests or self.results.throttled:
            return True  # it can take on more leases, or should take on fewer
        # Several chunks a message keep the agent's share of the CPU small; but not while a place for a request is free.
        starved = not self.leases and self.working + self.pausing < self.requests
        return len(self.results) >= (1 if starved else self._batch())

    def _was_throttled(self) -> None:
        self.throttles += 1
        self.results.throttled += 1
