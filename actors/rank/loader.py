"""A loader of chunks in any process of a node: its conversation with the agent, its threads, and the arena it maps.

    exchange loop    reports results to the agent, receives leases and readable chunks
    fetch threads    as many as the agent allows, started when first needed; what they do is up to the kind of loader

`actors.rank.executor` has the loader of a rank, `actors.reader.model_reader` that of a reader on demand.

Nothing here knows Ray: `AgentLink` is a handle to an actor in a cluster, a socket, or an object in the same process. A
slot is written only under a lease and read only under it or between `readable` and `placed`; when the loader has ended,
no thread touches one.

`ArenaMaps` holds the arenas that the process has mapped. Its ranks share a mapping. Mapping the pages of an arena
again costs 0.1 CPU s per GB, so a process that is kept warm keeps its mapping too.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from actors.links import AgentLink
from actors.rank.chunk_fetcher import ChunkFetcher
from actors.rank.rank_work import RankWork
from actors.rank.state import Next, RankState
from cluster.errors import ClusterLost, LoadCancelled, empty_frames
from cluster.messages import ArenaAccess, RankUpdate
from cluster.telemetry.stats import RankStats
from storage.arena.arena import Arena
from storage.errors import IntegrityError, LongshoreError
from storage.stores.object_store import ObjectStore


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


PROCESS_ARENAS = ArenaMaps()


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
        """Fetch one lease after the other until the work stops. Runs in each fetch thread."""
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
