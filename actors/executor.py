"""One rank's side of a load: lease, stream, verify, place. A plain class that any process on the node can host.

    run() ---------- exchange loop: tells the agent what was committed and placed, gets leases and readable chunks
      |  leases                                   ^ results
      v                                           |
    fetch threads -- store.read_into(slot) -> digest -> commit            (bytes go socket -> slot, no copy between)
      |  readable chunks (committed here by this rank or any other)
      v
    place thread --- device.place(slot -> segments) -> placed

Nothing here knows Ray: `AgentLink` is a handle to an actor in a cluster and an object in a test. A slot is written
only under a lease and read only between `readable` and `placed`; when `run` ends, however it ends, no thread of it
touches the arena any more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from typing import Protocol

from actors.chunk_fetcher import ChunkFetcher, FetchedChunk, StageClock
from actors.device import Device
from cluster.errors import ClusterLost, LoadCancelled
from cluster.messages import JoinReply, LeaseOrder, Orders, RankHello, RankJob, RankUpdate
from cluster.read_items import expand_read_items
from cluster.report import RankReport
from storage.arena import Arena
from storage.errors import LongshoreError
from storage.object_store import ObjectStore
from storage.processes import ProcessId, pss_bytes
from storage.store_ref import open_store

AGENT_GONE_S = 60.0  # an agent that does not answer for this long is not coming back
AGENT_BACK_S = 15.0  # Ray restarts an agent, and the coordinator tells it its loads, well within this
PLACE_BATCH = 8  # chunks copied between two waits for the device


class AgentLink(Protocol):
    """How a rank talks to the agent of its node. Raises ClusterLost when the agent does not answer."""

    def join(self, hello: RankHello) -> JoinReply: ...

    def exchange(self, update: RankUpdate) -> Orders: ...

    def coordinator_age_s(self) -> float:
        """Seconds since the agent last heard the coordinator."""
        ...


class RankLoader:
    """Loads one rank's slices. `run` blocks until they are all placed, or raises one typed error."""

    def __init__(self, link: AgentLink, job: RankJob, device: Device, *, store: ObjectStore | None = None) -> None:
        self._link = link
        self._job = job
        self._device = device
        self._process = ProcessId.current()
        self._tables, self.plan = job.unpack()
        self._items = expand_read_items(self.plan.slices, self._tables.chunks)
        self._store = store or open_store(job.store.ref, job.store.credentials, read_timeout_s=job.fetch.read_timeout_s)
        self._fetcher = ChunkFetcher(self._store, self._tables, job.fetch.attempts)
        self._arena: Arena | None = None

        self._changed = threading.Condition()  # guards everything below
        self._leases: deque[LeaseOrder] = deque()
        self._readable: deque[tuple[int, int]] = deque()
        self._fetched: list[FetchedChunk] = []
        self._placed_now: list[int] = []
        self._in_hand = 0  # leases queued or being fetched
        self._unplaced = 0  # readable chunks queued or being copied
        self._stop: LongshoreError | None = None
        self._draining = False

        self._needed = {int(chunk) for chunk in self.plan.chunk_ids}
        self._placed: set[int] = set()
        self.placed_bytes = 0
        self._place_clock = StageClock()
        self.started_s = time.monotonic()
        self._first_work_s: float | None = None

    # -- called by the host ------------------------------------------------------------------------------------

    def run(self) -> RankReport:
        """Load, and return when every slice is on the device. Raises LongshoreError; the device is freed then."""
        threads = [
            threading.Thread(target=self._guarded, args=(self._fetch_loop,), name=f"fetch-{i}", daemon=True)
            for i in range(self._job.fetch.threads)
        ]
        threads.append(threading.Thread(target=self._guarded, args=(self._place_loop,), name="place", daemon=True))
        try:
            self._device.allocate(self.plan.segment_bytes)
            self._join()
            for thread in threads:
                thread.start()
            self._exchange_loop()
            return self._report()
        except BaseException as error:
            self.cancel(error if isinstance(error, LongshoreError) else None)
            raise
        finally:
            self._end(threads)

    def cancel(self, error: LongshoreError | None = None) -> None:
        """Make `run` raise `error` soon (LoadCancelled when there is none)."""
        with self._changed:
            self._stop = self._stop or error or LoadCancelled("the load was cancelled on this rank")
            self._fetcher.stop()
            self._changed.notify_all()

    # -- the conversation with the agent -----------------------------------------------------------------------

    def _join(self, patience_s: float = AGENT_GONE_S) -> None:
        hello = RankHello(
            self._job.load_id,
            self._job.attempt,
            self._job.rank,
            self._job.incarnation,
            self._process,
            tuple(sorted(self._placed)),
        )
        give_up_s = time.monotonic() + patience_s
        while True:
            try:
                reply = self._link.join(hello)
                if reply.known:
                    break
            except ClusterLost:
                if time.monotonic() > give_up_s:
                    raise
            if time.monotonic() > give_up_s:
                raise ClusterLost("the node's agent does not know this load", load=self._job.load_id)
            with self._changed:
                self._changed.wait(0.1)
                self._raise_if_stopped()
        if self._arena is None or self._arena.path != reply.arena_path:
            if self._arena is not None:
                self._arena.close()
            self._arena = Arena.open(reply.arena_path)
            self._device.attach_arena(self._arena.data())

    def _exchange_loop(self) -> None:
        while True:
            update = self._next_update()
            finished = len(self._placed) == len(self._needed)
            try:
                orders = self._link.exchange(update)
                agent_knows = not orders.rejoin
            except ClusterLost:
                orders, agent_knows = Orders(), False
            if finished:
                if not agent_knows and orders.stop is None:
                    # A restarted agent must learn that this rank needs nothing, or it keeps chunks for it. But the
                    # bytes are placed, so a load does not fail for it.
                    with contextlib.suppress(ClusterLost):
                        self._join(patience_s=AGENT_BACK_S)
                return
            if orders.stop is not None:
                raise orders.stop
            if agent_knows:
                self._take(orders)
            else:
                self._rejoin()

    def _next_update(self) -> RankUpdate:
        threads = self._job.fetch.threads
        with self._changed:
            deadline = time.monotonic() + self._job.fetch.heartbeat_s
            while not self._worth_telling(threads):
                if not self._changed.wait(deadline - time.monotonic()):
                    break
            self._raise_if_stopped()
            fetched, self._fetched = self._fetched, []
            placed, self._placed_now = self._placed_now, []
            self._placed.update(placed)
            idle = not self._in_hand and not self._unplaced and not fetched and not placed
            want = 0 if len(self._placed) == len(self._needed) else max(0, 2 * threads - self._in_hand)
        retries: dict[str, int] = {}
        for result in fetched:
            for cause, count in result.retries.items():
                retries[cause] = retries.get(cause, 0) + count
        return RankUpdate(
            self._job.load_id,
            self._job.attempt,
            self._job.rank,
            self._job.incarnation,
            self._process,
            committed=tuple(result.commit for result in fetched if result.commit is not None),
            failed=tuple(result.failure for result in fetched if result.failure is not None),
            placed=tuple(placed),
            returned=tuple(r.lease_id for r in fetched if r.commit is None and r.failure is None),
            want_leases=want,
            wait_s=self._job.fetch.heartbeat_s if idle else 0.0,
            placed_bytes=self.placed_bytes,
            retries=retries,
            refused_bytes=sum(result.refused_bytes for result in fetched),
        )

    def _worth_telling(self, threads: int) -> bool:
        if self._stop is not None or len(self._placed) + len(self._placed_now) == len(self._needed):
            return True
        if not self._in_hand and not self._unplaced:
            return True  # nothing goes on here: only the agent can have work
        # Several chunks a call keep the agent's share of the CPU small; half the leases are still in hand.
        return len(self._fetched) + len(self._placed_now) >= threads

    def _take(self, orders: Orders) -> None:
        with self._changed:
            if (orders.leases or orders.readable) and self._first_work_s is None:
                self._first_work_s = time.monotonic()
            closed = set(orders.closed_leases)
            self._fetcher.close_leases(closed)
            self._leases.extend(orders.leases)
            self._in_hand += len(orders.leases)
            fresh = [pair for pair in orders.readable if pair[0] not in self._placed]
            self._readable.extend(fresh)
            self._unplaced += len(fresh)
            self._changed.notify_all()

    def _rejoin(self) -> None:
        """The agent lost its memory: let every read and write of the arena end, then introduce this rank anew."""
        with self._changed:
            self._draining = True
            while self._leases:
                self._leases.pop()
                self._in_hand -= 1
            self._fetcher.stop()
            while self._in_hand or self._unplaced:
                self._changed.wait(0.1)
                self._raise_if_stopped()
            self._fetched.clear()
            self._placed.update(self._placed_now)
            self._placed_now.clear()
            self._draining = False
            self._fetcher.restart()
        self._join()

    def _raise_if_stopped(self) -> None:
        if self._stop is not None:
            raise self._stop

    # -- threads -----------------------------------------------------------------------------------------------

    def _guarded(self, loop: object) -> None:
        try:
            loop()  # type: ignore[operator]
        except LongshoreError as error:
            self.cancel(error)
        except BaseException as error:  # a bug or out of memory: the load must end, not hang
            self.cancel(LongshoreError(f"{type(error).__name__} in a loader thread: {error}", rank=self._job.rank))

    def _fetch_loop(self) -> None:
        clock = self._fetcher.clock()
        while True:
            with self._changed:
                waited_s = time.monotonic()
                while not self._leases and self._stop is None:
                    self._changed.wait()
                if self._stop is not None:
                    return
                lease = self._leases.popleft()
                clock.wait_s += time.monotonic() - waited_s
                arena = self._arena
            result = self._fetcher.fetch(arena, lease, clock)  # type: ignore[arg-type]
            with self._changed:
                self._in_hand -= 1
                self._fetched.append(result)
                self._changed.notify_all()

    def _place_loop(self) -> None:
        clock = self._place_clock
        while True:
            with self._changed:
                waited_s = time.monotonic()
                while not self._readable and self._stop is None:
                    self._changed.wait()
                if self._stop is not None:
                    return
                batch = [self._readable.popleft() for _ in range(min(PLACE_BATCH, len(self._readable)))]
                clock.wait_s += time.monotonic() - waited_s
                arena = self._arena
            begun_s = time.monotonic()
            moved = 0
            for chunk, slot in batch:
                size = self._tables.chunks.byte_range(chunk).size_bytes
                rows = self._items.for_chunk(chunk)
                self._device.place(arena.slot(slot)[:size], self._items, rows)  # type: ignore[union-attr]
                moved += int((self._items.run_bytes[rows] * self._items.count[rows]).sum())
            self._device.synchronize()
            clock.busy_s += time.monotonic() - begun_s
            clock.bytes += moved
            with self._changed:
                self.placed_bytes += moved
                self._placed_now.extend(chunk for chunk, _ in batch)
                self._unplaced -= len(batch)
                self._changed.notify_all()

    # -- the end -----------------------------------------------------------------------------------------------

    def _end(self, threads: list[threading.Thread]) -> None:
        with self._changed:
            failed = self._stop is not None
            self._stop = self._stop or LoadCancelled("the load is over")
            self._fetcher.stop()
            self._changed.notify_all()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        self._store.close()
        if failed:
            self._device.free()
        if self._arena is not None:
            self._device.detach_arena()
            self._arena.close()

    def _report(self) -> RankReport:
        now_s = time.monotonic()
        first_s = self._first_work_s if self._first_work_s is not None else now_s
        stages = self._fetcher.stage_times(self._place_clock)
        return RankReport(
            rank=self._job.rank,
            node="",
            host=socket.gethostname(),
            pid=self._process.pid,
            device=self._device.name,
            incarnation=self._job.incarnation,
            size_bytes=self.plan.size_bytes,
            device_bytes=self.plan.device_bytes,
            stages=stages,
            peak_host_bytes=pss_bytes(),
            start_s=first_s - self.started_s,
            load_s=now_s - first_s,
        )
