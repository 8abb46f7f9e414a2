"""Keeps one load's account of the chunks that this node reads from other nodes, and sends to them. Pure.

    lease on a chunk --- sources --> the nodes that it is to be read from (`actors.node.peer_routes`), or the store
    chunk committed ---- keep -----> pinned in the window until the nodes that read it from here have it
    request of a node -- take -----> held until `given`; or it is on its way, and the node waits

Two limits keep nodes from waiting for each other's slots in a circle. Half of the window is for chunks that others read
from here, fetched or on their way. Less than half is for chunks that come from others and that nobody reads from here.
A chunk that is before all of these in the plan's order needs no room. All nodes go by one order. So the first chunk
that a node lacks always finds a slot, in its home and in all nodes on its ways. A third limit is for speed: a node asks
for at most ASKED_PER_HOP chunks at one time, for each hop of the trees.

A chunk waits a few seconds for nodes that have not asked for it. Then they are *late*: nothing is kept for them until
they ask for something that is still to come. A node that has neither asked for a chunk nor sent one may not have begun:
a process on a busy machine starts seconds after the others. It has BEGIN_PATIENCE_S.

A node that is far slower than the others for BUSY_S says so to those that ask, and they leave it out for a while:
SLOW_S, and each time twice as long as before. It is slow in sending if it gets chunks from others twice as fast as it
sends them, though others wait in line. It is slow in receiving if a waiting node is far ahead of it, and gets further
ahead or still is many chunks later. If only the store is slow for it, it takes back its own reads of the store, and
reads these chunks from the nodes that others ask in its place.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from actors.node.peer_routes import LEFT_OUT_S, PeerRoutes
from cluster.messages import Commit, Members, PeerSource, credited
from cluster.scheduling.concurrency import SlowStore, StoreAhead
from cluster.scheduling.lease_queue import ChunkState, LeaseQueue
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import CachedChunk
from storage.host.processes import ProcessId
from storage.peers import Asker, NoChunk, Peer

# Chunks that a node waits for at one time, for each hop of a tree. With fewer, chunks are asked for too late. With
# more, the first ones come late, as all share the links. In `bench.simulate_peers` 8 were best for 2 and 4 nodes
# (a hop), 24 for 16 nodes (3 hops), 48 for 64 and 256 nodes (4 and 5 hops).
ASKED_PER_HOP = 10
PATIENCE_S = 5.0  # a chunk stays in the window this long for nodes that did not ask for it
CATCH_UP = 64  # chunks in which a node that began late must catch up
PAUSE = 16  # after so many chunks without a waiting node that is far ahead, this one has caught up
FALLS_BACK = 32  # chunks by which a slow node's distance from another one grows
BUSY_S = 1.0  # a node that looked slow for less than this is not: its machine was busy for a moment
SLOW_S = 10.0  # a slow node refuses the others of its load so long, and each time twice as long as the time before
# Instead of PATIENCE_S, while other chunks find no room: for nodes that are silent, behind the others, or far beyond
# the chunk. A node that is ahead of all others by half a window must not take them for late.
PRESSED_PATIENCE_S = 1.0
MOST_PATIENCE_S = 20.0  # as long as nodes wait for each other (`PeerPatience`)
BEGIN_PATIENCE_S = 20.0  # since the first chunk came, for nodes that have not begun
PATIENT_FOR = 3  # but not less than so many times as the chunks that nodes ask for need to come: links may be slow
LONG_LINE = 16  # requests for chunks that are here: a node with fewer is not slow
_ON_THE_WAY = {ChunkState.PENDING, ChunkState.WAITING, ChunkState.LEASED}


class Keys(Protocol):
    """Cache keys of chunks."""

    def __getitem__(self, chunk: int) -> bytes: ...


@dataclass(slots=True)
class _Kept:
    """A chunk of the window that other nodes have yet to read."""

    cached: CachedChunk
    left: set[str]  # ids of the nodes that do not have it yet
    since_s: float


@dataclass(frozen=True, slots=True)
class _PeerLease:
    """A lease on a chunk that comes from other nodes, or that they read from here."""

    chunk: int
    sources: tuple[PeerSource, ...]
    feeds: bool  # others read it from here
    hands_over: bool  # it is this node's to read the store, and another one does: nobody waits for it here
    from_store: bool


class PeerExchange:
    """One load's share in the exchange. `cache` is shared with the node's other loads."""

    def __init__(
        self,
        routes: PeerRoutes,
        part: tuple[str, int],
        cache: ChunkCache,
        keys: Keys,
        queue: LeaseQueue,
        *,
        needs_digest: bool,
    ) -> None:
        """`part`: owner of the load's slots. `needs_digest`: the chunks have no published digests."""
        self._needs_digest = needs_digest
        self.received_bytes: Counter[str] = Counter()  # by the host that sent them
        self.sent_bytes = 0  # that other nodes have received whole
        self._routes, self._part, self._cache, self._keys, self._queue = routes, part, cache, keys, queue
        self._digests: dict[int, bytes] = {}  # of chunks without published ones, which other nodes get with them
        self._kept: dict[int, _Kept] = {}
        self._leases: dict[str, _PeerLease] = {}
        self._aside: dict[bool, list[int]] = {True: [], False: []}  # heaps of chunks without room, by `feeds`
        self._asking: dict[tuple[int, str], float] = {}  # (chunk, node that waits for it) -> when it was seen last
        self._reading: Counter[tuple[int, str]] = Counter()
        self._late: set[str] = set(routes.filled)
        self._begun: set[str] = set()  # nodes that have asked for a chunk or sent one
        self._began_s = math.inf  # when the first chunk came here
        self._heard: dict[str, tuple[float, int]] = {}  # node -> when it asked last, and for which chunk at most
        self._news: list[int] = []  # chunks that have come since `take_news`
        self._most_asked = ASKED_PER_HOP * max(1, routes.hops)
        self._needed_chunks = max(1, len(queue.chunks()))
        self.store_ahead = StoreAhead()
        self.slow_store = SlowStore()
        self._come = self._received = 0  # chunks that were committed; those of them that other nodes sent
        self._chunk_s = 0.0  # mean time from one chunk to the next, while there is room
        self._come_s = math.inf  # when the last one came
        self._given = 0  # times that another node has read a chunk, or has stopped
        # When the line of requests became long: (that time, `_received`, `_given`).
        self._full_at: tuple[float, int, int] | None = None
        # While nodes that are far ahead wait here: (when they began to, `_come` at first, `_come` at last, how far one
        # was ahead at least).
        self._behind: tuple[float, int, int, float] | None = None
        self._stays_behind = False  # this node did not catch up with them
        self._slow_until_s, self._slow_s = 0.0, SLOW_S

    # -- leases ------------------------------------------------------------------------------------------------

    def has_room(self, chunk: int, running: Callable[[], Collection[str]]) -> bool:
        """Return whether the chunk may be leased now. If not, set it aside. `running` returns the ids of all leases."""
        sources, hands_over = self._sources(chunk)
        feeds = self._feeds(chunk, hands_over=hands_over)
        asks = bool(sources)
        if not (feeds or asks) or self._fits(chunk, feeds=feeds, asks=asks):
            return True
        if self.forget(running()) and self._fits(chunk, feeds=feeds, asks=asks):
            return True
        self._queue.wait_for(chunk, ("aside", chunk))
        heapq.heappush(self._aside[feeds], chunk)
        return False

    def forget(self, running: Collection[str]) -> bool:
        """Drop the leases that are not among `running`: they ended without the chunk. Return whether there were any."""
        ended = [lease_id for lease_id in self._leases if lease_id not in running]
        for lease_id in ended:
            del self._leases[lease_id]
        return bool(ended)

    def _sources(self, chunk: int) -> tuple[list[PeerSource], bool]:
        """Return the nodes to ask for the chunk, and whether they read the store in place of this one."""
        sources = self._routes.sources(chunk)
        heirs = self._routes.heirs(chunk) if self.slow_store.is_slow else []
        return heirs or sources, bool(heirs)

    def _feeds(self, chunk: int, *, hands_over: bool) -> bool:
        return not hands_over and bool(self._routes.askers(chunk) - self._late)

    def hands_over(self, lease_id: str) -> bool:
        """Return whether to take back the lease: its chunk comes from the store, and other nodes read that now."""
        lease = self._leases.get(lease_id)
        return lease is not None and lease.from_store and self._sources(lease.chunk)[1]

    def _fits(self, chunk: int, *, feeds: bool, asks: bool) -> bool:
        leases = self._leases.values()
        half = max(1, self._cache.window_slots // 2)
        alike = sum(lease.feeds == feeds for lease in leases) + (len(self._kept) if feeds else 0)
        fits = alike < (half if feeds else max(1, half - 1))
        if fits and not (asks and sum(bool(lease.sources) for lease in leases) >= self._most_asked):
            return True
        return all(chunk < lease.chunk for lease in leases) and all(chunk < each for each in self._kept)

    @property
    def looks_no_further(self) -> bool:
        """True when no chunk further ahead is to be leased."""
        aside = sum(map(len, self._aside.values()))
        asked = sum(bool(lease.sources) for lease in self._leases.values())
        return aside >= self._cache.window_slots or (asked >= self._most_asked and not self.store_ahead.allowed)

    def take_up(self) -> None:
        """Let one chunk of each kind that was set aside be leased."""
        for aside in self._aside.values():
            if aside:
                self._queue.waiting_for([("aside", heapq.heappop(aside))])

    def leased(self, lease_id: str, chunk: int, *, from_peers: bool) -> tuple[tuple[PeerSource, ...], bool, bool]:
        """Note a lease.

        Return the nodes to read the chunk from, in this order, whether others read it from here, and whether those
        nodes read the store in place of this one. No nodes: it comes from the store.
        """
        found, hands_over = self._sources(chunk) if from_peers else ([], False)
        sources, feeds = tuple(found), self._feeds(chunk, hands_over=hands_over)
        if hands_over:
            self._news.append(chunk)  # who waits for it here is refused
        if sources or feeds:
            self._leases[lease_id] = _PeerLease(chunk, sources, feeds, hands_over, from_peers and not sources)
        return sources, feeds, hands_over

    @property
    def share_left(self) -> float | None:
        """The share of its needs that this node lacks, for other nodes. None: it reads from slow nodes too."""
        return None if self._routes.leaves_out_many else self._queue.share_left

    def committed(self, commit: Commit, cached: CachedChunk, now_s: float) -> None:
        """A lease has brought its chunk, which is at `cached`. It stays in the window until the others have it.

        A chunk that the arena keeps anyway needs no place in the window.
        """
        self._news.append(commit.chunk)
        self._come += 1
        if not self._aside[True]:  # else it may have waited for other nodes
            self._chunk_s += (max(0.0, now_s - self._come_s) - self._chunk_s) / min(self._come, 16)
        self._come_s = now_s
        self._began_s = min(self._began_s, now_s)
        lease = self._leases.pop(commit.lease_id, None)
        sources = () if lease is None else lease.sources
        for source in (sources[at] for at in commit.failed_peers if at < len(sources)):
            self._routes.leave_out(source, now_s + LEFT_OUT_S)
        self._routes.answered(sources, commit.peer, now_s)
        if 0 <= commit.peer < len(sources):
            self.received_bytes.update(credited(commit, sources, cached.length_bytes))
            self._received += 1
            self._begun.add(self._routes.node_at(sources[commit.peer].peer))
        if commit.digest:
            self._digests[commit.chunk] = commit.digest
        if lease is not None and lease.hands_over:
            return  # the others have it from elsewhere
        askers = self._routes.askers(commit.chunk) - self._late
        if not askers or self._cache.kept(self._keys[commit.chunk]) is not None:
            return
        if commit.chunk not in self._kept and self._cache.pin(cached, self._pinner(commit.chunk), owner=self._part):
            self._kept[commit.chunk] = _Kept(cached, askers, now_s)

    @property
    def left_out(self) -> tuple[Peer, ...]:
        """Nodes that failed and are asked for nothing for a while (`PeerRoutes.left_out`)."""
        return self._routes.left_out

    # -- other nodes -------------------------------------------------------------------------------------------

    def take(self, chunk: int, process: ProcessId, reader: str, asker: Asker, now_s: float) -> CachedChunk | NoChunk:
        """Hold the chunk for another node, the asker, which reads it until it is `given`."""
        if not self._queue.knows(chunk):
            return NoChunk.MISSING
        node_id, may_wait = asker.node_id, self._routes.may_wait(asker.node_id, chunk, hands_over=asker.hands_over)
        self._routes.asked_by(node_id, chunk, now_s, hands_over=asker.hands_over)
        self.slow_store.heard(node_id, asker.slow_store_s)
        self._begun.add(node_id)
        self._heard[node_id] = now_s, max(chunk, self._heard.get(node_id, (0.0, 0))[1])
        compares = asker.share_left is not None and self._routes.is_member(node_id)
        if compares and self._is_slow(now_s):
            return NoChunk.TOO_SLOW
        cached = self._cache.copy(self._keys[chunk])
        if cached is not None and self._needs_digest and chunk not in self._digests:
            return NoChunk.MISSING  # another load brought it: nobody knows whether these are the bytes that were read
        if cached is not None and self._cache.hold(cached, process, reader, owner=self._part):
            self._asking.pop((chunk, node_id), None)
            self._reading[chunk, node_id] += 1
            return cached
        if self._queue.state(chunk) not in _ON_THE_WAY or not may_wait:
            return NoChunk.MISSING if cached is None else NoChunk.COMING
        if self._has_handed_over(chunk):
            return NoChunk.TOO_SLOW
        if compares and self._queue.state(chunk) is ChunkState.PENDING and self._is_behind(asker, chunk, now_s):
            self._refuse_others(now_s)
            return NoChunk.TOO_SLOW
        self._late.discard(node_id)
        self._asking[chunk, node_id] = now_s
        return NoChunk.COMING

    def _has_handed_over(self, chunk: int) -> bool:
        """Return whether nobody may wait here for the chunk, because this node reads it from others, or is about to."""
        if self._queue.state(chunk) is ChunkState.LEASED:
            return any(lease.hands_over for lease in self._leases.values() if lease.chunk == chunk)
        return self._sources(chunk)[1]

    def reads_store(self, chunk: int) -> bool:
        """Return whether this node reads the chunk from the store, or is to."""
        if self._queue.state(chunk) is ChunkState.LEASED:
            return not any(lease.sources for lease in self._leases.values() if lease.chunk == chunk)
        return not self._routes.sources(chunk)

    def _is_slow(self, now_s: float) -> bool:
        """Return whether other nodes of the load should leave this one out."""
        if len(self._reading) < LONG_LINE:
            self._full_at = None
        else:
            since_s, received, given = self._full_at = self._full_at or (now_s, self._received, self._given)
            gets_more = self._received - received >= 2 * (self._given - given + LONG_LINE)
            if gets_more and now_s - since_s >= BUSY_S:
                self._full_at = None
                self._refuse_others(now_s)
        return now_s < self._slow_until_s

    def _is_behind(self, asker: Asker, chunk: int, now_s: float) -> bool:
        """Return whether this node is far behind the asker, which wants that chunk, and does not catch up.

        Nodes may need different parts of the model. So it counts what they have, and how far away the chunk is. Among
        many nodes each asks for one chunk or two, so it looks at all together. Once it did not catch up, it is behind
        all that are far ahead of it.
        """
        ahead_chunks = (self._queue.share_left - (asker.share_left or 0.0)) * self._needed_chunks
        if min(ahead_chunks, self._queue.fresh_before(chunk)) <= self._most_asked:  # so far ahead it does not notice
            return False
        since_s, first, last, least_chunks = self._behind or (now_s, self._come, self._come, ahead_chunks)
        if self._come - last >= PAUSE:
            since_s, first, least_chunks = now_s, self._come, ahead_chunks
        self._behind = since_s, first, self._come, min(least_chunks, ahead_chunks)
        falls_back = self._come - first >= CATCH_UP or ahead_chunks - least_chunks >= FALLS_BACK
        self._stays_behind |= falls_back and now_s - since_s >= BUSY_S
        return self._stays_behind

    def _refuse_others(self, now_s: float) -> None:
        """Send nothing to the other nodes of the load for a while. Those that wait go on elsewhere, too."""
        self._slow_until_s, self._slow_s = now_s + self._slow_s, 2 * self._slow_s

    def take_news(self) -> list[int]:
        """Return the chunks that have come, or were handed over, since the last call."""
        news, self._news = self._news, []
        return news

    def digest(self, chunk: int) -> bytes:
        """Return the digest that other nodes get with the chunk; empty: they know the published one."""
        return self._digests.get(chunk, b"")

    def given(
        self, chunk: int, cached: CachedChunk, process: ProcessId, reader: str, asker: str, *, received: bool
    ) -> None:
        """Release a chunk that another node has read, or has stopped reading. When all have it, it may go."""
        self._cache.release(cached, process, reader)
        self._given += 1
        self._reading[chunk, asker] -= 1
        if not self._reading[chunk, asker]:
            del self._reading[chunk, asker]
        self.sent_bytes += cached.length_bytes if received else 0
        kept = self._kept.get(chunk)
        if kept is not None and received:
            kept.left.discard(asker)
            if not kept.left:
                self._let_go(chunk)

    def look(self, now_s: float) -> bool:
        """Let go of chunks for which other nodes did not come in time. Return whether there were any."""
        self._routes.forget(now_s)
        asked = min(self._most_asked, self._cache.window_slots)
        need_s = min(PATIENT_FOR * asked * self._chunk_s, MOST_PATIENCE_S)
        patience_s = max(PRESSED_PATIENCE_S if self._aside[True] else PATIENCE_S, need_s)
        for who, seen_s in list(self._asking.items()):
            if now_s - seen_s > PATIENCE_S:
                del self._asking[who]
        late = []
        waits = now_s - self._began_s <= BEGIN_PATIENCE_S
        to_begin = self._routes.reachable - self._begun if waits else set()
        for chunk, kept in self._kept.items():
            if now_s - kept.since_s <= patience_s:
                continue
            stays = to_begin
            if now_s - kept.since_s <= max(PATIENCE_S, need_s):
                stays = stays | self._on_their_way(chunk, now_s)
            late_now = {each for each in kept.left if not self._comes(chunk, each) and each not in stays}
            for each in late_now:
                self._routes.did_not_ask(each, chunk)
            self._late |= late_now
        for chunk, kept in self._kept.items():
            kept.left = {each for each in kept.left if each not in self._late or self._comes(chunk, each)}
            if not kept.left:
                late.append(chunk)
        for chunk in late:
            self._let_go(chunk)
        return bool(late)

    def _on_their_way(self, chunk: int, now_s: float) -> set[str]:
        """Return the nodes that go on as the others do, and have asked for nothing far beyond the chunk."""
        usual = statistics.median_low(furthest for _, furthest in self._heard.values()) if self._heard else 0
        return {
            node_id
            for node_id, (heard_s, furthest) in self._heard.items()
            if usual <= furthest + self._most_asked and furthest <= chunk + self._most_asked
            if now_s - heard_s <= PATIENCE_S
        }

    def update(self, members: Members) -> None:
        """Take over where nodes serve chunks now."""
        self._routes.update(members)

    def end(self, now_s: float) -> None:
        """Keep nothing for other nodes any more."""
        for chunk in list(self._kept):
            self._let_go(chunk)

    def _comes(self, chunk: int, node_id: str) -> bool:
        """Return whether the node waits for the chunk, or reads it."""
        return (chunk, node_id) in self._reading or (chunk, node_id) in self._asking

    def _let_go(self, chunk: int) -> None:
        self._cache.unpin(self._kept.pop(chunk).cached, self._pinner(chunk))

    def _pinner(self, chunk: int) -> tuple[tuple[str, int], str, int]:
        """Return the key under which a chunk is pinned for other nodes."""
        return self._part, "peers", chunk
