"""A loader of chunks in any process of a node: its conversation with the agent, its threads, and the arena it maps.

    exchange loop    reports results to the agent, receives leases and readable chunks
    fetch threads    as many as the agent allows, started when first needed; what they do is up to the kind of loader
    place thread     of a rank: copies readable chunks to the device

`RankWork` runs the loader's `RankState` for these threads: one lock, and a condition for each kind of thread. Every
wait ends when `stop` is called. A chunk wakes only the threads that it concerns, and the exchange loop only when an
update is due.

`actors.rank.executor` has the loader of a rank, `actors.reader.model_reader` that of a reader on demand.

Nothing here knows Ray: `AgentLink` is a handle to an actor in a cluster, a socket, or an object in the same process. A
slot is written only under a lease and read only under it or between `readable` and `placed`; when the loader has ended,
no thread touches one.

`ArenaMaps` holds the arenas that the process has mapped. Its ranks share a mapping. Mapping the pages of an arena
again costs 0.2 CPU s per GB (`bench/memory.py`), so a process that is kept warm keeps its mapping too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actors.links import AgentLink
from actors.rank.chunk_fetcher import ChunkFetcher
from actors.rank.state import FetchedChunk, Next, RankState
from cluster.errors import ClusterLost, LoadCancelled, empty_frames
from cluster.messages import ArenaAccess, JoinReply, LeaseOrder, Orders, RankHello, RankUpdate
from cluster.telemetry.stats import RankStats
from storage.arena.arena import Arena
from storage.errors import IntegrityError, LongshoreError
from storage.stores.object_store import ObjectStore


class RankWork:
    """`state` is for reading by others; it changes under the lock only."""

    def __init__(self, state: RankState, fetcher: ChunkFetcher) -> None:
        self.state = state
        self._fetcher = fetcher
        fetcher.pause, fetcher.is_void, fetcher.turned_to_store = self._pause, state.is_void, self._turned_to_store
        lock = threading.Lock()
        self._fetch = threading.Condition(lock)  # fetch threads: a lease, and a place to work on it
        self._again = threading.Condition(lock)  # fetch threads in a pause before another try
        self._place = threading.Condition(lock)  # the place thread
        self._exchange = threading.Condition(lock)  # the exchange loop
        self._due_s = 0.0  # when the exchange loop wakes by itself, if it waits

    # -- fetch threads -----------------------------------------------------------------------------------------

    def next_lease(self) -> LeaseOrder | None:
        """The next lease to fetch; None when the rank is to stop."""
        with self._fetch:
            self._fetch.wait_for(lambda: self.state.may_fetch or self.state.error is not None)
            return self.state.next_lease(time.monotonic())

    def fetched(self, result: FetchedChunk, size_bytes: int, fetch_s: float, placed_bytes: int = 0) -> None:
        """See `RankState.fetch_ended`."""
        with self._fetch:
            self.state.fetch_ended(result, size_bytes, fetch_s, time.monotonic(), placed_bytes)
            if self.state.is_returning:
                self._again.notify_all()
            self._wake_exchange()

    def _turned_to_store(self, lease_id: str) -> None:
        with self._fetch:
            self.state.turns_to_store(lease_id, time.monotonic())

    def _pause(self, cause: str, delay_s: float, arrived: bool = False) -> None:
        """Return when the calling thread may try again, or is to stop. `arrived`: a part of the chunk is there."""
        with self._again:
            self.state.pause_begun(cause, time.monotonic())
            self._fetch.notify()  # another thread may use the place
            self._exchange.notify_all()
            self._again.wait_for(lambda: self.state.ends_tries(arrived), delay_s)
            self.state.pause_over()
            self._again.wait_for(lambda: self.state.may_try or self.state.ends_tries(arrived))
            self.state.pause_ended(time.monotonic())

    # -- the place thread --------------------------------------------------------------------------------------

    def next_chunks(self, most: int) -> list[tuple[int, int]]:
        """Up to `most` readable (chunk, slot); none when the rank is to stop."""
        with self._place:
            while self.state.error is None:
                now_s = time.monotonic()
                if chunks := self.state.next_chunks(most, now_s):
                    return chunks
                held_until_s = self.state.held_until_s
                self._exchange.notify_all()  # nothing is placed for a while
                self._place.wait(None if held_until_s is None else max(0.0, held_until_s - now_s))
            return []

    def placed(self, sizes_bytes: Mapping[int, int]) -> None:
        """See `RankState.chunks_placed`."""
        with self._place:
            self.state.chunks_placed(sizes_bytes, time.monotonic())
            self._wake_exchange()

    # -- the conversation with the agent -----------------------------------------------------------------------

    def drain(self) -> None:
        """Return when nothing of the arena is in use any more. Raises `stop`'s error."""
        with self._exchange:
            self._begin_drain(finish=False)
            self._exchange.wait_for(lambda: self.state.drained or self.state.error is not None)
            self._raise_if_stopped()

    def hello(self, others: ArenaAccess) -> RankHello:
        """See `RankState.hello`; after `drain`."""
        with self._exchange:
            return self.state.hello(others)

    def welcomed(self, hello: RankHello, reply: JoinReply) -> None:
        """See `RankState.welcomed`."""
        with self._exchange:
            self.state.welcomed(hello, reply, time.monotonic())

    def wait_for_update(self) -> bool:
        """Return when the next update is due: whether it is the last one. Raises `stop`'s error."""
        with self._exchange:
            while True:
                self._raise_if_stopped()
                if self.state.finished and not self.state.draining:
                    self._begin_drain(finish=True)
                self._due_s = self.state.update_due_s
                rest_s = self._due_s - time.monotonic()
                if rest_s <= 0:
                    return self.state.finished and self.state.drained
                self._exchange.wait(rest_s)

    def update(self, *, leaving: bool, others: ArenaAccess, stats: RankStats | None) -> RankUpdate:
        """See `RankState.update`."""
        with self._exchange:
            self.state.store_takes(self._fetcher.store_s())
            return self.state.update(time.monotonic(), leaving=leaving, others=others, stats=stats)

    def answered(self, update: RankUpdate, orders: Orders | None) -> Next:
        """See `RankState.answered`. Reads of leases that the agent has closed end."""
        with self._exchange:
            after = self.state.answered(update, orders, time.monotonic())
            if self.state.abandoned:
                self._fetcher.end_reads()
                self._again.notify_all()
            if orders is not None:
                self._fetcher.end_reads(orders.closed_leases)
                if self.state.leases:
                    self._fetch.notify_all()
                if self.state.is_returning:
                    self._again.notify_all()
                if orders.readable:
                    self._place.notify_all()
            return after

    def sleep(self, seconds: float) -> None:
        """Raises `stop`'s error."""
        with self._exchange:
            self._exchange.wait_for(lambda: self.state.error is not None, seconds)
            self._raise_if_stopped()

    def fetch_threads(self) -> int:
        """Return the number of fetch threads that have something to do."""
        with self._exchange:
            return self.state.fetches

    def stop(self, error: LongshoreError) -> None:
        """Everything that waits here ends; the first error counts."""
        with self._exchange:
            self.state.stop(error)
            self._end_waits()

    def _end_waits(self) -> None:
        self._fetcher.end_reads()
        for condition in (self._fetch, self._again, self._place, self._exchange):
            condition.notify_all()

    def _wake_exchange(self) -> None:
        """Wake the exchange loop if something is due earlier than it knows: most chunks only add to the next update."""
        if self.state.draining or self.state.update_due_s < self._due_s:
            self._exchange.notify_all()

    def _begin_drain(self, *, finish: bool) -> None:
        self.state.drain(time.monotonic(), finish=finish)
        self._again.notify_all()
        self._place.notify_all()

    def _raise_if_stopped(self) -> None:
        if self.state.error is not None:
            raise self.state.error


@dataclass(slots=True)
class _Mapping:
    arena: Arena
    users: int = 0


class ArenaMaps:
    """Mapped arenas and their users. Thread-safe. A user is a rank's loader, by a number unique in the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keeps = False
        self._mappings: dict[str, _Mapping] = {}  # by epoch
        self._claims: dict[int, tuple[str, str]] = {}  # user -> (arena path, agent that granted access)

    def keep(self, keeps: bool) -> None:
        """From now on leave unused arenas mapped, or do not."""
        with self._lock:
            self._keeps = keeps
            if not keeps:
                self._close_unused()

    def open(self, path: str, epoch: str) -> Arena:
        """Return the arena at `path`, which has this epoch. Raises ArenaError."""
        with self._lock:
            self._close_unused(but=epoch)  # one that was replaced gives its memory back only when nobody maps it
            mapping = self._mappings.get(epoch)
            if mapping is None:
                arena = Arena.open(path)
                mapping = self._mappings.setdefault(arena.epoch, _Mapping(arena))
                if mapping.arena is not arena:
                    arena.close()
            mapping.users += 1
            return mapping.arena

    def close(self, arena: Arena) -> None:
        """End one use. Call it as often as `open`."""
        with self._lock:
            self._mappings[arena.epoch].users -= 1
            if not self._keeps:
                self._close_unused()

    def _close_unused(self, but: str = "") -> None:
        for epoch, mapping in list(self._mappings.items()):
            if not mapping.users and epoch != but:
                del self._mappings[epoch]
                mapping.arena.close()

    # -- users -------------------------------------------------------------------------------------------------

    def claim(self, user: int, path: str, agent: str) -> None:
        """This agent lets the user read and write the arena."""
        self._claims[user] = (path, agent)

    def release(self, user: int) -> None:
        """The user accesses no arena any more."""
        self._claims.pop(user, None)

    def access(self, but: int | None = None) -> ArenaAccess:
        """Return (arena path, agent) of the users in this process, without `but`."""
        return tuple(claim for key, claim in list(self._claims.items()) if key != but)

    def forget(self) -> None:
        """Leave everything to the parent. Called in a forked child."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        mappings, self._mappings, self._claims = self._mappings, {}, {}
        for mapping in mappings.values():
            mapping.arena.forget()


PROCESS_ARENAS = ArenaMaps()
os.register_at_fork(after_in_child=PROCESS_ARENAS.forget)


class LoaderThreads:
    """Threads of a loader. The first error of each goes to `failed`."""

    def __init__(self, rank: int, failed: Callable[[LongshoreError], None]) -> None:
        self._rank = rank
        self._failed = failed
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._threads)

    def start(self, loop: Callable[[], None], name: str) -> None:
        """Start one more thread, which runs until `loop` returns."""
        thread = threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Wait for all. The caller has stopped them before."""
        for thread in self._threads:
            thread.join()

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except LongshoreError as error:
            empty_frames(error)
            self._failed(error)
        except BaseException as error:  # a bug or out of memory: the load must end, not hang
            self._failed(LongshoreError(f"{type(error).__name__} in a loader thread: {error}", rank=self._rank))


AGENT_GONE_S = 60.0  # an agent that does not answer for this long is gone for good
AGENT_BACK_S = 15.0  # Ray restarts an agent, and the coordinator sends it its loads, well within this

MESSAGE_NUMBERS = itertools.count(1)  # of this process: an agent orders messages by them


class ChunkLoader:
    """The part of a loader that is the same for ranks and readers. Subclasses fetch, and use the chunks."""

    def __init__(
        self, link: AgentLink, load_id: str, state: RankState, fetcher: ChunkFetcher, store: ObjectStore, work: RankWork
    ) -> None:
        self.state = state
        self._link = link
        self._load_id = load_id
        self._fetcher = fetcher
        self._store = store
        self._work = work
        self._threads = LoaderThreads(state.identity.rank, self.cancel)
        self._fetch_threads = 0
        self._arena: Arena | None = None

    def cancel(self, error: LongshoreError | None = None) -> None:
        """End the work soon with `error` (LoadCancelled when there is none). Too late, it changes nothing."""
        self._work.stop(error or LoadCancelled("the load was cancelled on this rank"))

    # -- for subclasses ----------------------------------------------------------------------------------------

    def _attach(self, arena: Arena) -> None:
        """Use this arena from now on."""

    def _detach(self) -> None:
        """The arena is closed after this."""

    def _fetch_loop(self) -> None:
        """Fetch one lease after the other until the work stops. Runs in each fetch thread. Every subclass has it."""
        raise NotImplementedError

    def _answered(self) -> None:
        """Called after each answer of the agent."""

    def _stats(self, *, last: bool) -> RankStats | None:
        """Return stats for the agent, or None if it has fresh ones."""
        return None

    # -- the conversation with the agent -----------------------------------------------------------------------

    def _join(self, patience_s: float = AGENT_GONE_S) -> None:
        """Introduce this loader to the agent. Raises ClusterLost, or the error that ends the load."""
        self._work.drain()
        PROCESS_ARENAS.release(id(self))  # no agent grants it access now
        give_up_s = time.monotonic() + patience_s
        while True:
            hello = self._work.hello(PROCESS_ARENAS.access(but=id(self)))
            try:
                reply = self._link.join(hello)
                self._work.welcomed(hello, reply)
                if reply.known:
                    break
                lost = ClusterLost("the node's agent does not know this load", load=self._load_id)
            except ClusterLost as error:
                lost = error
            if time.monotonic() > give_up_s:
                raise lost
            self._work.sleep(0.1)
        self._fetcher.use_disk(reply.disk_path)
        self._fetcher.use_peers(reply.node_id, reply.peer_carrier)
        PROCESS_ARENAS.claim(id(self), reply.arena_path, reply.agent)
        if self._arena is None or self._arena.epoch != reply.arena_epoch:
            self._close_arena()
            self._arena = PROCESS_ARENAS.open(reply.arena_path, reply.arena_epoch)
            self._fetcher.use_arena(self._arena)
            self._attach(self._arena)

    def _exchange_loop(self) -> None:
        """Return when the work is done and the agent knows it, or will not come back."""
        while True:
            update = self._update(leaving=self._work.wait_for_update())
            try:
                orders = self._link.exchange(update)
            except ClusterLost:
                orders = None
            after = self._work.answered(update, orders)
            if after is Next.LEFT:
                return
            if after is Next.REJOIN and self.state.finished:
                # The agent must learn that this rank needs nothing, or it keeps chunks for it. But the bytes are
                # placed, so a load does not fail for it.
                try:
                    self._join(patience_s=AGENT_BACK_S)
                except IntegrityError:
                    raise
                except LongshoreError:
                    return
            elif after is Next.REJOIN:
                self._join()
            elif orders is not None:
                while self._fetch_threads < self._work.fetch_threads():
                    self._threads.start(self._fetch_loop, f"fetch-{self._fetch_threads}")
                    self._fetch_threads += 1
                self._answered()

    def _update(self, *, leaving: bool) -> RankUpdate:
        others = PROCESS_ARENAS.access(but=id(self)) if leaving else ()
        return self._work.update(leaving=leaving, others=others, stats=self._stats(last=leaving))

    # -- the end -----------------------------------------------------------------------------------------------

    def _end(self, free: Callable[[], None] | None = None) -> None:
        """Leave no thread, no mapping and no connection; return the slots to the agent.

        `free`: called when no thread works any more, and before the arena is closed.
        """
        self._work.stop(LoadCancelled("the load is over"))
        self._threads.join()
        self._fetcher.close()
        try:
            if free is not None:
                free()
            self._close_arena()
            if self.state.may_hold_slots:
                # Without this message the slots stay fenced for as long as this process lives.
                with contextlib.suppress(Exception):
                    self._link.exchange(self._update(leaving=True))
        finally:
            PROCESS_ARENAS.release(id(self))
            self._store.close()

    def _close_arena(self) -> None:
        arena, self._arena = self._arena, None
        self._fetcher.use_arena(None)
        if arena is not None:
            self._detach()
            PROCESS_ARENAS.close(arena)
