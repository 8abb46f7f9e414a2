"""Shares readers' chunks out among the nodes that read one model at one time. Pure.

No coordinator plans these reads: readers on demand (`cluster.safe_open`, engine plug-ins) and hosted ranks begin when
they like. Each node knows the others that read the same model now, and every chunk has an order of these nodes:

    score of node n for chunk c = - weight(n) / ln(hash(c, n))      weighted rendezvous hashing (Thaler, Ravishankar)
    order: n4 n1 n6 n0 ...     order[i] reads from order[(i - 1) // FAN_OUT]; n4, the chunk's home, reads the store

A node that is asked for a chunk which none of its readers has asked for yet fetches it, as if one of them had.

Nodes never wait for each other in a circle. A node waits only for nodes with higher scores, or for one that is reading
the chunk from the store. A node is not waited for if it had no free slot for BEGIN_S and the time of a chunk from the
store, and nothing came to it meanwhile: its readers do not read. One that got no processor asked for no slot. It is
waited for, while the rank that asks has patience (`cluster.scheduling.concurrency.PeerPatience`). But a node whose
readers have said nothing for SILENT_S is not waited for: they were stopped.

A home whose store alone is slow takes back its reads of it, refuses these chunks to the others, and asks the nodes
after it in the order. The first of them reads the store in its place.

A home that began later than other nodes asks these first: they may have the chunk, or be about to. It also asks nodes
whose readers are done. They lend what their arenas still have, for LENDS_S.

A chunk stays in the window for the nodes that read it from here, for PATIENCE_S. If other chunks need its slot it stays
PRESSED_PATIENCE_S. For nodes that go on reading and have not come so far it stays longer: a node waits with what it
reads for others when half of its window is full of it. It waits PATIENCE_S in all for a node that does not catch up.
A node that did not come in time is *late*: nothing is kept for it until it asks for a chunk that is still to come.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from actors.node.peer_exchange import MOST_PATIENCE_S, PATIENCE_S, PRESSED_PATIENCE_S, Keys
from actors.node.peer_routes import FAN_OUT, LEFT_OUT_S, MOST_LEFT_OUT, MOST_SOURCES
from cluster.messages import Commit, Lender, Lenders, Members, PeerSource, credited
from cluster.planning.packed_plan import SharedTables
from cluster.scheduling.concurrency import SlowStore, StoreAhead
from cluster.scheduling.lease_queue import ChunkState, LeaseQueue
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import CachedChunk
from storage.host.processes import ProcessId
from storage.peers import Asker, NoChunk, Peer

BEGIN_S = 5.0  # a node that has had no slot for so long, and to which nothing comes, is not waited for
BEHIND = 64  # a node that asks for a chunk so much further on has passed this one
SILENT_S = MOST_PATIENCE_S  # readers that live say something every second
LENDS_S = 600.0  # a load lends so long after its end
MOST_MISSES = 16  # chunks that an earlier node did not have, one after the other: then it is not asked any more
_KEPT_ORDERS = 4096
_ON_THE_WAY = {ChunkState.PENDING, ChunkState.WAITING, ChunkState.LEASED}


@dataclass(frozen=True, slots=True)
class LendingFacts:
    """A reader load that takes part in lending."""

    node_id: str
    model: bytes  # the same for all loads of the same chunks of the same objects
    key: bytes  # with which other nodes prove that they may ask this load
    rates: tuple[float, float]  # see `Lends`


def model_key(tables: SharedTables, store_identity: str) -> bytes:
    """Return what two loads have in common when a chunk's number means the same bytes to both; else it differs."""
    chunks, digest = tables.chunks, hashlib.blake2b(digest_size=16)
    for part in (store_identity, chunks.hash_name or "", *(f"{shard.key}\n{shard.etag}" for shard in tables.shards)):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    for column in (chunks.shard, chunks.start, chunks.end, *(() if chunks.digests is None else (chunks.digests,))):
        digest.update(column.size.to_bytes(8, "little") + column.tobytes())
    return digest.digest()


def score(node_id: str, weight: float, chunk: int, model: bytes) -> float:
    """Return the node's score for the chunk. A node with twice the weight is the home of twice as many chunks."""
    data = node_id.encode("utf-8", "surrogatepass") + chunk.to_bytes(8, "little")
    drawn = int.from_bytes(hashlib.blake2b(data, key=model[:64], digest_size=7).digest(), "little")
    return -weight / math.log((drawn + 1) / (2**56 + 2))


class Order:
    """The nodes that read a model at one time, in the order of each chunk."""

    def __init__(self, own: str, model: bytes) -> None:
        """`own`: this node's id."""
        self._own, self._model = own, model
        self._weights = {own: 1.0}
        self._orders: OrderedDict[int, list[str]] = OrderedDict()

    def use(self, weights: dict[str, float]) -> None:
        """Take over which nodes there are, with their weights."""
        self._weights = {self._own: 1.0, **weights}
        self._orders.clear()

    def of(self, chunk: int) -> list[str]:
        """Return the ids of all nodes, the chunk's home first."""
        found = self._orders.get(chunk)
        if found is None:
            by_score = ((score(node, weight, chunk, self._model), node) for node, weight in self._weights.items())
            found = self._orders[chunk] = [node for _, node in sorted(by_score, reverse=True)]
            if len(self._orders) > _KEPT_ORDERS:
                self._orders.popitem(last=False)
        return found

    def before(self, chunk: int, out: Collection[str]) -> list[str]:
        """Return the nodes from which this one reads the chunk, the nearest first; `out`: those that are left out."""
        order = self.of(chunk)
        at = place = order.index(self._own)
        found: list[str] = []
        while at > 0:
            at = (at - 1) // FAN_OUT
            if order[at] not in out:
                found.append(order[at])
        return found[:MOST_SOURCES] or [node for node in order[:place] if node not in out][:1]

    def next_home(self, chunk: int, out: Collection[str]) -> list[str]:
        """Return the node that reads the store if those on the way to the home cannot, unless it is one of them."""
        order, found = self.of(chunk), self.before(chunk, out)
        place = order.index(self._own)
        return [node for node in order[:place] if node not in out and node not in found][: len(found) and 1]

    def heirs(self, chunk: int, out: Collection[str]) -> list[str]:
        """Return the nodes to ask, in this order, if this node is to read the store and hands the chunk over."""
        order = self.of(chunk)
        place = order.index(self._own)
        if any(node not in out for node in order[:place]):
            return []
        return [node for node in order[place + 1 :] if node not in out and self._weights[node]][:MOST_SOURCES]

    def handed_over(self, chunk: int, out: Collection[str]) -> set[str]:
        """Return the nodes before this one that read the chunk from here, if all are `out`: it is in their place."""
        order = self.of(chunk)
        before = set(order[: order.index(self._own)])
        return before if before <= set(out) else set()

    def after(self, chunk: int, out: Collection[str]) -> set[str]:
        """Return the nodes that read the chunk from this one."""
        order, found = self.of(chunk), set()
        to_see = [order.index(self._own)]
        while to_see:
            at = to_see.pop()
            for place in range(FAN_OUT * at + 1, min(len(order), FAN_OUT * at + FAN_OUT + 1)):
                found.add(order[place])  # one that is left out may come all the same, as one whose store is slow does
                if order[place] in out:
                    to_see.append(place)
        return found

    def is_before(self, node_id: str, chunk: int) -> bool | None:
        """Return whether the other node is before this one in the chunk's order. None: it is not known here."""
        if node_id not in self._weights:
            return None
        order = self.of(chunk)
        return order.index(node_id) < order.index(self._own)


@dataclass(slots=True)
class _Kept:
    """A chunk of the window that other nodes have yet to read."""

    cached: CachedChunk
    left: set[str]
    since_s: float


class Lending:
    """One reader load's share in the lending. It has the methods of `PeerExchange`."""

    def __init__(
        self,
        facts: LendingFacts,
        part: tuple[str, int],
        cache: ChunkCache,
        keys: Keys,
        queue: LeaseQueue,
        *,
        needs_digest: bool,
        fetch: Callable[[int], bool],
        heard_s: Callable[[], float],
    ) -> None:
        """
        Args:
            part: Owner of the load's slots.
            cache: It is shared with the node's other loads.
            needs_digest: The chunks have no published digests.
            fetch: Lets a reader of this node need the chunk. Returns False if none is going to read it.
            heard_s: Returns when a reader of this node said something last.
        """
        self.facts = facts
        self.version = -1  # of what it knows of other nodes
        self.received_bytes: Counter[str] = Counter()  # by the host that sent them
        self.sent_bytes = 0  # that other nodes have received whole
        self.store_ahead = StoreAhead()
        self.slow_store = SlowStore()
        self._part, self._cache, self._keys, self._queue = part, cache, keys, queue
        self._needs_digest, self._fetch, self._readers_heard_s = needs_digest, fetch, heard_s
        self._order = Order(facts.node_id, facts.model)
        self._listed: dict[str, Lender] = {}  # by node, with this one
        self._lenders: dict[str, PeerSource] = {}  # the same of the other nodes
        self._earlier: dict[str, int] = {}  # nodes that read before this one began -> chunks that they did not have
        self._done: set[str] = set()  # nodes whose readers have ended
        self._out: dict[str, float] = {}  # nodes that failed, and until when
        self._handing_over: dict[str, float] = {}  # nodes that asked this one instead of the store, and until when
        self._leases: dict[str, tuple[int, tuple[PeerSource, ...]]] = {}
        self._at_home: set[str] = set()  # those of them that read the store, after nodes that began earlier
        self._at_heirs: set[str] = set()  # those that read other nodes, which read the store in place of this one
        self._leased: Counter[int] = Counter()  # leases of a chunk that read other nodes
        self._digests: dict[int, bytes] = {}
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._short_s = math.inf  # since when no slot was free for a chunk
        self._aside: list[int] = []  # a heap of chunks that are to be read for others, and have no room
        self._pressed_s = -math.inf  # when a chunk needed the slot of one that is kept
        self._held_s: dict[str, float] = {}  # how long chunks were kept for a node then, since it was not behind
        self._late: set[str] = set()
        self._come_s = -math.inf  # when the last chunk came
        self._heard: dict[str, tuple[float, int]] = {}  # node -> when it asked last, and for which chunk at most
        self.ended_s = math.inf
        self._news: list[int] = []

    # -- other nodes come and go -------------------------------------------------------------------------------

    def use_lenders(self, found: Lenders) -> None:
        """Take over which other nodes read the model now.

        An older list changes nothing. Nor does one that builds on a list which never came: a heartbeat brings that.
        """
        if found.version <= self.version or found.since > self.version:
            return
        first, self.version = self.version < 0, found.version
        known = {} if found.since < 0 else {each: at for each, at in self._listed.items() if each not in found.gone}
        self._listed = known | {lender.node_id: lender for lender in found.lenders}
        named = {node_id: lender for node_id, lender in self._listed.items() if node_id != self.facts.node_id}
        self._lenders = {node_id: lender.source for node_id, lender in named.items()}
        self._order.use({lender.node_id: lender.weight for lender in self._listed.values() if lender.reads})
        done = {node_id for node_id, lender in named.items() if not lender.reads}
        misses = {node_id: count for node_id, count in self._earlier.items() if node_id not in done - self._done}
        asked = named.keys() if first else self._earlier.keys() & named.keys() | done
        self._earlier = {node_id: misses.get(node_id, 0) for node_id in asked}
        self._done = done
        for kept in self._kept.values():
            kept.left &= {node_id for node_id, lender in named.items() if lender.reads}

    def update(self, members: Members) -> None:
        """Change nothing: a load with members does not lend."""

    @property
    def left_out(self) -> tuple[Peer, ...]:
        """The first of the nodes that failed and are asked for nothing for a while."""
        found = [self._lenders[node_id].peer for node_id in self._out if node_id in self._lenders]
        return tuple(found[:MOST_LEFT_OUT])

    # -- leases ------------------------------------------------------------------------------------------------

    share_left: float | None = None  # readers have no plan, so nobody is called slow by it
    looks_no_further = False

    def has_room(self, chunk: int, running: Callable[[], Collection[str]]) -> bool:
        """Return whether the chunk may be leased now. If not, set it aside: too much waits here for other nodes.

        A chunk before all of these needs no room. So the first chunk that a node lacks always has some.
        """
        half = max(1, self._cache.window_slots // 2)
        if len(self._kept) < half or chunk < min(self._kept) or not self._order.after(chunk, self._out) - self._late:
            return True
        self._queue.wait_for(chunk, ("aside", chunk))
        heapq.heappush(self._aside, chunk)
        return False

    def take_up(self) -> None:
        """Let the first chunk that was set aside be leased."""
        if self._aside:
            self._queue.waiting_for([("aside", heapq.heappop(self._aside))])

    def short(self, running: Collection[str], now_s: float) -> None:
        """No slot is free for a chunk. Drop the leases that are not among `running`, as `forget` does."""
        self._end_leases_but(running)
        self._short_s = min(self._short_s, now_s)

    def leased(self, lease_id: str, chunk: int, *, from_peers: bool) -> tuple[tuple[PeerSource, ...], bool, bool]:
        """Note a lease. Return as `PeerExchange.leased` does."""
        nodes = self._order.before(chunk, self._out) if from_peers else []
        heirs = self._heirs(chunk) if from_peers else []
        if heirs:
            nodes = heirs
            self._news.append(chunk)  # who waits for it here is refused
            self._at_heirs.add(lease_id)
        elif not nodes:
            self._at_home.add(lease_id)
        if from_peers and not nodes:
            nodes = [node for node in self._lenders if self._is_worth_asking(node)]
            first = chunk % max(1, len(nodes))
            nodes = [*nodes[first:], *nodes[:first]][:MOST_SOURCES]
        sources = tuple(self._lenders[node] for node in nodes)
        if from_peers and not heirs:
            next_home = self._order.next_home(chunk, self._out)
            sources += tuple(replace(self._lenders[node], in_place=True) for node in next_home)
            sources = sources[:MOST_SOURCES]
        self._leases[lease_id] = chunk, sources
        self._leased[chunk] += bool(sources)
        self._short_s = math.inf
        return sources, not heirs and bool(self._askers(chunk)), bool(heirs)

    def _heirs(self, chunk: int) -> list[str]:
        """Return the nodes that read the chunk from the store in place of this one, if the store is slow for it."""
        heirs = self._order.heirs(chunk, self._out) if self.slow_store.is_slow else []
        return [node for node in heirs if node in self._lenders]

    def _askers(self, chunk: int) -> set[str]:
        """Return the nodes that read the chunk from this one."""
        handed_over = self._order.handed_over(chunk, self._out.keys() | self._handing_over.keys())
        return (self._order.after(chunk, self._out) | handed_over) - self._late

    def hands_over(self, lease_id: str) -> bool:
        """Return whether to take back the lease: its chunk comes from the store, and other nodes read that now."""
        return lease_id in self._at_home and bool(self._heirs(self._leases[lease_id][0]))

    def _is_worth_asking(self, node: str) -> bool:
        return node not in self._out and self._earlier.get(node, MOST_MISSES) < MOST_MISSES

    def forget(self, running: Collection[str], now_s: float) -> None:
        """Drop the leases that are not among `running`: they ended without the chunk. Make room (`drop`)."""
        if len(self._kept) >= max(1, self._cache.window_slots // 2):
            self.drop(now_s)
        self._end_leases_but(running)

    def _end_leases_but(self, running: Collection[str]) -> None:
        for lease_id in [lease_id for lease_id in self._leases if lease_id not in running]:
            self._end_lease(lease_id)

    def _end_lease(self, lease_id: str) -> tuple[PeerSource, ...]:
        chunk, sources = self._leases.pop(lease_id, (-1, ()))
        self._at_home.discard(lease_id)
        self._at_heirs.discard(lease_id)
        if sources:
            self._leased[chunk] -= 1
            self._leased += Counter()
        return sources

    def committed(self, commit: Commit, cached: CachedChunk, now_s: float) -> None:
        """A lease has brought its chunk, which is at `cached`. It stays in the window for the nodes that read it here.

        A chunk that the arena keeps anyway needs no place in the window.
        """
        self._news.append(commit.chunk)
        self._come_s, self._short_s = now_s, math.inf
        hands_over = commit.lease_id in self._at_heirs
        sources = self._end_lease(commit.lease_id)
        nodes = {source.peer: node_id for node_id, source in self._lenders.items()}
        for at in (at for at in commit.failed_peers if at < len(sources)):
            if (node := nodes.get(sources[at].peer)) is not None:
                self._out[node] = now_s + LEFT_OUT_S
        self.received_bytes.update(credited(commit, sources, cached.length_bytes))
        for at, source in enumerate(sources):
            if (node := nodes.get(source.peer, "")) in self._earlier and not source.in_place:
                had = at == commit.peer
                self._earlier[node] = 0 if had else self._earlier[node] + (at < commit.peer or commit.peer < 0)
        if commit.digest:
            self._digests[commit.chunk] = commit.digest
        left = set[str]() if hands_over else self._askers(commit.chunk)
        if not left or commit.chunk in self._kept or self._cache.kept(self._keys[commit.chunk]) is not None:
            return
        if self._cache.pin(cached, self._pinner(commit.chunk), owner=self._part):
            self._kept[commit.chunk] = _Kept(cached, left, now_s)

    def drop(self, now_s: float) -> bool:
        """Let go of chunks that were kept for PRESSED_PATIENCE_S, as a chunk needs a slot. Return whether there were.

        A node that has not come for one in that time, and is not on its way, is late.
        """
        pressed_s, self._pressed_s = now_s - self._pressed_s, now_s
        if pressed_s < PRESSED_PATIENCE_S:  # else it was not pressed all the time
            for node in set[str]().union(*(kept.left for kept in self._kept.values())):
                self._held_s[node] = self._held_s.get(node, 0.0) + pressed_s
        return self._drop_older(now_s - PRESSED_PATIENCE_S, lambda chunk: self._is_on_its_way(chunk, now_s))

    def _is_on_its_way(self, chunk: int, now_s: float) -> bool:
        """Return whether a node that has yet to read the chunk goes on reading, has not come so far, and catches up."""
        heard = ((node, *self._heard.get(node, (-math.inf, 0))) for node in self._kept[chunk].left)
        return any(
            now_s - heard_s <= PATIENCE_S and furthest <= chunk and self._held_s.get(node, 0.0) <= PATIENCE_S
            for node, heard_s, furthest in heard
        )

    def _drop_older(self, than_s: float, keeps: Callable[[int], bool] = lambda _: False) -> bool:
        old = [chunk for chunk, kept in self._kept.items() if kept.since_s < than_s and not keeps(chunk)]
        for chunk in old:
            self._late |= self._kept[chunk].left
            self._let_go(chunk)
        return bool(old)

    # -- requests ----------------------------------------------------------------------------------------------

    def take(self, chunk: int, process: ProcessId, reader: str, asker: Asker, now_s: float) -> CachedChunk | NoChunk:
        """Hold the chunk for another node, the asker, which reads it until it is `given`."""
        if not self._queue.knows(chunk):
            return NoChunk.MISSING
        self._asks(asker.node_id, chunk, now_s)
        self.slow_store.heard(asker.node_id, asker.slow_store_s)
        if asker.hands_over:
            self._handing_over[asker.node_id] = now_s + LEFT_OUT_S
        cached = self._cache.copy(self._keys[chunk])
        if cached is not None and self._needs_digest and chunk not in self._digests:
            return NoChunk.MISSING
        if cached is not None and self._cache.hold(cached, process, reader, owner=self._part):
            return cached
        is_before = self._order.is_before(asker.node_id, chunk)
        if is_before is None or cached is not None:
            return NoChunk.MISSING
        state = self._queue.state(chunk)
        if state is not ChunkState.LEASED and now_s - self._readers_heard_s() > SILENT_S:
            return NoChunk.MISSING
        if self._has_handed_over(chunk):
            return NoChunk.TOO_SLOW
        if (is_before and not asker.hands_over) or (state not in _ON_THE_WAY and not self._fetch(chunk)):
            reads_store = state is ChunkState.LEASED and not self._leased[chunk]
            return NoChunk.COMING if reads_store else NoChunk.MISSING
        self._late.discard(asker.node_id)
        self._held_s.pop(asker.node_id, None)
        is_to_begin = self._queue.state(chunk) is ChunkState.PENDING
        patience_s = BEGIN_S + self.slow_store.own_s  # its slots may wait for chunks that others read from the store
        stands_still = is_to_begin and now_s - self._short_s >= patience_s and not self.reads_store(chunk)
        return NoChunk.MISSING if stands_still else NoChunk.COMING

    def reads_store(self, chunk: int) -> bool:
        """Return whether the chunk is on its way from the store, or is to be leased after chunks that are."""
        on_its_way = self._queue.state(chunk) is ChunkState.LEASED
        return any(self._leases[lease_id][0] == chunk or not on_its_way for lease_id in self._at_home)

    def _has_handed_over(self, chunk: int) -> bool:
        """Return whether nobody may wait here for the chunk, because this node reads it from others, or is about to."""
        if self._queue.state(chunk) is ChunkState.LEASED:
            return any(self._leases[lease_id][0] == chunk for lease_id in self._at_heirs)
        return bool(self._heirs(chunk))

    def _asks(self, node_id: str, chunk: int, now_s: float) -> None:
        """A node asks for a chunk: it has passed those far before."""
        if self._order.is_before(node_id, chunk) is not None:
            self._heard[node_id] = now_s, max(chunk, self._heard.get(node_id, (0.0, 0))[1])
        for other, kept in list(self._kept.items()):
            if other < chunk - BEHIND and node_id in kept.left:
                self._has(node_id, other)

    def ended_take(self, chunk: int, process: ProcessId, reader: str) -> CachedChunk | NoChunk:
        """Hold a chunk for another node after the load's end, if the arena still has it."""
        cached = self._cache.copy(self._keys[chunk]) if self._queue.knows(chunk) else None
        if cached is None or (self._needs_digest and chunk not in self._digests):
            return NoChunk.MISSING
        return cached if self._cache.hold(cached, process, reader, owner=self._part) else NoChunk.MISSING

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
        if received:
            self.sent_bytes += cached.length_bytes
            self._has(asker, chunk)

    def _has(self, node_id: str, chunk: int) -> None:
        kept = self._kept.get(chunk)
        if kept is not None:
            kept.left.discard(node_id)
            if not kept.left:
                self._let_go(chunk)

    # -- time --------------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> bool:
        """Let go of chunks for which other nodes did not come in time. Return whether there were any."""
        self._out = {node: until_s for node, until_s in self._out.items() if until_s >= now_s}
        self._handing_over = {node: until_s for node, until_s in self._handing_over.items() if until_s >= now_s}
        late = self._drop_older(now_s - PATIENCE_S, lambda chunk: self._is_on_its_way(chunk, now_s))
        return self._drop_older(now_s - MOST_PATIENCE_S) or late

    def end(self, now_s: float) -> None:
        """Keep nothing for other nodes any more."""
        self.ended_s = now_s
        for chunk in list(self._kept):
            self._let_go(chunk)

    def _let_go(self, chunk: int) -> None:
        self._cache.unpin(self._kept.pop(chunk).cached, self._pinner(chunk))

    def _pinner(self, chunk: int) -> tuple[tuple[str, int], str, int]:
        """Return the key under which a chunk is pinned for other nodes."""
        return self._part, "peers", chunk
