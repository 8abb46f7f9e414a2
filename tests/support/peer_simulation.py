"""Nodes of one load that feed each other, without threads, processes and a network.

    PeerSimulation -- begin, kill_node, move_ranks, cut --> PeerNode (a NodeSimulation: its ledger is the real one)
    PeerRank (round a real RankState) -- Request --> another PeerNode: what `storage.peers` and `PeerShelf` do
                                      `-- at last -> the store, which counts each read

Every method is one event. A slot that another node reads counts as read: nobody may write there. Each read of the store
that would not have been without a fault is counted with its cause in `again`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from actors.node.node_load import NodeLoad
from actors.rank.chunk_fetcher import next_source
from actors.rank.state import FetchedChunk
from cluster.messages import PEER_READ, Commit, LeaseOrder, NodePeer, Orders, PeerSource, RankHello, RankUpdate
from cluster.scheduling.concurrency import LEAST_PATIENCE_S, SLOW_FOR
from storage.arena.slots import CachedChunk
from storage.errors import LongshoreError
from storage.host.processes import ProcessId
from storage.peers import READ_TIMEOUT_S, Asker, NoChunk, Peer
from tests.support.node_simulation import NodeSimulation, SimLoad, SimModel, SimRank, check_sources

CONNECT_TIMEOUT_S = 2.0  # see storage.peers.peer_client
ACKNOWLEDGED_S = 10.0  # see `patience_s` in storage.peers.chunk_server
LEASE_DEADLINE_S = 60.0  # as in cluster.config
LOAD = "load"


class Request:
    """A chunk that a rank reads from another node, on a connection of its own."""

    def __init__(
        self,
        rank: PeerRank,
        server: ServingNode,
        source: PeerSource,
        chunk: int,
        share_left: float | None,
        *,
        hands_over: bool,
    ) -> None:
        self.rank, self.server, self.peer, self.chunk = rank, server, source.peer, chunk
        self.load_id = source.load_id
        slow_store_s = None if rank.node.store_s is None else SLOW_FOR * rank.node.store_s
        self.asker = Asker(rank.node.node_id, share_left, slow_store_s, hands_over)
        self.begun_s = rank.node.now_s
        self.reader = f"peer-{next(server.pids)}"
        self.accepted = False  # the server answers it
        self.refused: NoChunk | None = None  # why the server does not send the chunk
        self.load: NodeLoad | None = None
        self.cached: CachedChunk | None = None  # the server holds it, and sends it since `sent_s`
        self.sent_s = 0.0
        self.broken = False  # the server closed the connection
        self.closed = False  # the receiver did

    def outcome(self, *, acknowledged: bool = True) -> str:
        """Return what the receiver finds: "" for nothing yet, "arrived", "damaged", "missing", "slow" or "failed".

        `acknowledged`: the server learns that the chunk has arrived.
        """
        server, waited_s = self.server, self.rank.node.now_s - self.begun_s
        if self.broken or not server.lives:
            return "failed"
        if self.rank.node.is_cut_from(server) or server.hangs:
            cut_early = not (self.accepted or server.hangs)
            return "failed" if waited_s > (CONNECT_TIMEOUT_S if cut_early else READ_TIMEOUT_S) else ""
        if not self.accepted:
            if server.peer != self.peer or not server.ledger.peer_key(self.load_id):
                return "failed"
            self.accepted = True
            server.requests.append(self)
            return ""
        if self.refused is not None:
            return "slow" if self.refused is NoChunk.TOO_SLOW else "missing"
        if self.cached is None:
            return ""
        content = self.rank.load.model.content(self.chunk)
        assert server.memory[self.cached.slot] == content, "a slot was written while another node read it"
        server.end_request(self, received=acknowledged)
        return "damaged" if server.flips else "arrived"


@dataclass
class Asking:
    """The state of the requests to the nodes that a lease names."""

    at: int = 0  # the one that is asked now
    failed: tuple[int, ...] = ()
    missing: int = 0  # nodes that did not have the chunk
    request: Request | None = None
    arrived: bool = False


class PeerRank(SimRank):
    """A rank that reads chunks from the nodes that its leases name."""

    node: ServingNode

    def __init__(self, node: ServingNode, load: SimLoad, rank: int, incarnation: int) -> None:
        super().__init__(node, load, rank, incarnation)
        self.asking: dict[str, Asking] = {}  # by lease
        self.no_peers: dict[str, str] = {}  # lease that names no other node -> why
        self._hurries = False  # what has not arrived now is not waited for

    def end_write(
        self, error: LongshoreError | None = None, index: int = 0, *, at_once: bool = False, acknowledged: bool = True
    ) -> None:
        """End the fetch, or take it one step further when its chunk comes from another node."""
        begun = list(self.state.begun.values())
        if not begun:
            return
        lease = begun[index % len(begun)]
        if lease.peers:
            asking = self.asking.setdefault(lease.lease_id, Asking())
            if not self._arrives(lease, asking, acknowledged):
                return
            error = None
        super().end_write(error, index, at_once=at_once)
        self.asking.pop(lease.lease_id, None)

    def close_requests(self) -> None:
        """Its connections end with its process."""
        for asking in self.asking.values():
            if asking.request is not None:
                asking.request.closed = True
        self.asking.clear()

    def exchange(
        self, fate: str = "arrives", want: int | None = 3, wait: bool = False, *, cancel: bool = False
    ) -> None:
        self.state.store_takes(self.node.store_s)
        super().exchange(fate, want, wait, cancel=cancel)

    def drain(self) -> None:
        self._hurries = True
        super().drain()
        self._hurries = False

    def _end(self, error: LongshoreError | None) -> None:
        self._hurries = True
        super()._end(error)

    def _obey(self, update: RankUpdate, orders: Orders | None) -> None:
        self.node.note_leases(self, () if orders is None else orders.leases)
        super()._obey(update, orders)

    def _arrives(self, lease: LeaseOrder, asking: Asking, acknowledged: bool) -> bool:
        if asking.request is None:
            source = lease.peers[asking.at]
            server = self.node.server(source.peer)
            about = self, server, source, lease.chunk, lease.share_left
            asking.request = Request(*about, hands_over=lease.hands_over)
        found = asking.request.outcome(acknowledged=acknowledged)
        if found == "arrived":
            asking.arrived = True
            return True
        is_void = self.state.is_void(lease.lease_id, False)
        if not found and not self._hurries and lease.lease_id not in self.state.closed:
            return False
        asking.request.closed, asking.request = True, None
        if not found or is_void:
            del self.asking[lease.lease_id]
            self._begun_s.pop(lease.lease_id)
            self.state.fetch_ended(FetchedChunk(lease.lease_id), 0, 0.0, self.node.now_s)
            return False
        if found == "missing":
            asking.missing += 1
        else:
            asking.failed += (asking.at,)
        asking.at = next_source(lease, asking.at, "peer_without_chunk" if found == "missing" else "")
        if asking.at == len(lease.peers):
            self.state.turns_to_store(lease.lease_id, self.node.now_s)
        return False

    def _fetch(self, lease: LeaseOrder) -> Commit:
        asking = self.asking.get(lease.lease_id, Asking())
        if asking.arrived:
            commit = Commit(lease.lease_id, lease.chunk, source=PEER_READ, kept=self._keep(lease))
            return replace(commit, peer=asking.at, failed_peers=asking.failed)
        commit = super()._fetch(lease)
        if not commit.source:
            self.node.note_store_read(self, lease, asking)
        return replace(commit, failed_peers=asking.failed)


class ServingNode(NodeSimulation):
    """A node whose agent serves chunks to the other nodes of its loads."""

    node_id: str
    flips = False  # every chunk that it sends is damaged on its way
    store_s: float | None = None  # that a chunk from the store takes it; None: it does not know

    def __init__(self, slot_count: int, *, seed: int = 0, hedge_after_s: float = 0.0, kept_slots: int = 0) -> None:
        super().__init__(slot_count, seed=seed, hedge_after_s=hedge_after_s, kept_slots=kept_slots)
        self.requests: list[Request] = []  # of others, at this agent

    def start_serving(self) -> None:
        """Its agent is a new process."""
        number = next(self.pids)
        self.process = ProcessId(number, start_time=number)
        self.peer = Peer(self.node_id, 1, f"agent-{number}")

    @property
    def lives(self) -> bool:
        raise NotImplementedError

    @property
    def hangs(self) -> bool:
        """True while its agent's process answers nothing, and is not dead."""
        raise NotImplementedError

    def is_cut_from(self, other: ServingNode) -> bool:
        """Return whether they do not reach each other."""
        raise NotImplementedError

    def server(self, peer: Peer) -> ServingNode:
        """Return the node with that address."""
        raise NotImplementedError

    def note_leases(self, rank: PeerRank, leases: Sequence[LeaseOrder]) -> None:
        """The rank has got these leases."""

    def note_store_read(self, rank: PeerRank, lease: LeaseOrder, asking: Asking) -> None:
        """The rank has read the chunk from the store."""

    def new_rank(self, load: SimLoad, rank: int, incarnation: int) -> SimRank:
        return PeerRank(self, load, rank, incarnation)

    def living(self) -> set[ProcessId]:
        return super().living() | {self.process}

    def check_unread(self, slot: int) -> None:
        super().check_unread(slot)
        assert slot not in {request.cached.slot for request in self.requests if request.cached is not None}, (
            "a writer where another node reads"
        )

    def kill(self, rank: SimRank) -> None:
        super().kill(rank)
        assert isinstance(rank, PeerRank)
        rank.close_requests()

    def restart_agent(self) -> None:
        self.break_requests()
        self.start_serving()
        super().restart_agent()

    # -- requests of other nodes -------------------------------------------------------------------------------

    def serve(self, request: Request) -> None:
        """Do what the thread of a connection does."""
        if self.hangs or request not in self.requests:
            return
        if request.cached is not None:
            if request.closed or self.now_s - request.sent_s > ACKNOWLEDGED_S:
                self.end_request(request, received=False)
                request.broken = True
            return
        asked = request.load_id, request.chunk, self.process, request.reader, request.asker
        found = self.ledger.take_for_peer(*asked, self.now_s)
        if not isinstance(found, NoChunk):
            request.load, request.cached = found
            request.sent_s = self.now_s
        elif found is not NoChunk.COMING or self.now_s - request.begun_s > LEAST_PATIENCE_S:
            request.refused = found
            self.requests.remove(request)

    def has_handed_over(self, chunk: int) -> bool:
        """Return whether other nodes read the chunk from the store in place of this one."""
        exchanges = (load.peers for load in self.ledger._loads.values() if load.peers is not None)
        return any(peers._queue.knows(chunk) and peers._has_handed_over(chunk) for peers in exchanges)

    def serve_all(self) -> None:
        for request in list(self.requests):
            self.serve(request)

    def end_request(self, request: Request, *, received: bool) -> None:
        self.requests.remove(request)
        if request.cached is not None and request.load is not None and request.load.peers is not None:
            request.load.peers.given(
                request.chunk,
                request.cached,
                self.process,
                request.reader,
                request.rank.node.node_id,
                received=received,
            )

    def break_requests(self) -> None:
        for request in self.requests:
            request.broken = True
        self.requests.clear()


class PeerNode(ServingNode):
    """A node of `net`, which is one load with all its nodes."""

    lives = True
    hangs = False

    def __init__(self, net: PeerSimulation, number: int, slot_count: int, seed: int, kept_slots: int) -> None:
        super().__init__(slot_count, seed=seed, kept_slots=kept_slots)
        self.net, self.number, self.node_id = net, number, f"node-{number}"
        self.start_serving()

    def is_cut_from(self, other: ServingNode) -> bool:
        return isinstance(other, PeerNode) and frozenset((self.number, other.number)) in self.net.cuts

    def server(self, peer: Peer) -> ServingNode:
        return next(node for node in self.net.nodes if node.node_id == peer.host)

    def note_leases(self, rank: PeerRank, leases: Sequence[LeaseOrder]) -> None:
        rank.no_peers |= {lease.lease_id: self.net.why_no_peers(rank, lease.chunk) for lease in leases}

    def note_store_read(self, rank: PeerRank, lease: LeaseOrder, asking: Asking) -> None:
        self.net.store_read(rank, lease, asking)

    # -- what happens to the node ------------------------------------------------------------------------------

    def take_part(self, needs: Mapping[int, Sequence[int]], attempt: int = 1) -> SimLoad:
        """Give the node ranks of the load. The agent does not know it yet."""
        elsewhere = {rank: chunks for rank, chunks in self.net.needs.items() if rank not in needs}
        load = SimLoad(LOAD, self.net.model, needs, attempt=attempt, deadline_s=LEASE_DEADLINE_S, elsewhere=elsewhere)
        load.node_id, load.peers = self.node_id, self.net.members()
        load.incarnations = dict.fromkeys(needs, attempt - 1)
        self.loads[f"{LOAD} {attempt}"] = load
        return load

    def deliver(self, message: RankHello | RankUpdate, fate: str) -> object:
        return None if self.hangs else super().deliver(message, fate)

    def restart_agent(self) -> None:
        self.hangs = False
        super().restart_agent()

    def die(self) -> None:
        self.lives = False
        self.break_requests()
        for rank in self.ranks:
            self.kill(rank)

    def take_turn(self, rank: SimRank) -> None:
        if not rank.works or self.hangs:
            return
        while rank.state.may_fetch:
            rank.begin_write()
        for at in reversed(range(len(rank.state.begun))):
            rank.end_write(index=at)
        while rank.readable:
            rank.place()
        rank.exchange(want=None)

    def end_failed_loads(self) -> None:
        """The coordinator ends a failed load on every node."""
        if errors := self.errors():
            self.net.errors.extend(errors.values())
            for node in self.net.living:
                for load in node.loads.values():
                    node.end_load(load)

    def check_exchange_is_over(self) -> None:
        """Check that nothing is kept, held or awaited for other nodes, once all had their time."""
        assert not self.requests
        for node_load in (*self.ledger._loads.values(), *self.ledger._ended.values()):
            exchange = node_load.peers
            if exchange is not None:
                assert not exchange._kept
                assert not exchange._reading
                assert not exchange._asking or node_load.job.part in self.ledger._ended


class PeerSimulation:
    """A load on several nodes: `needs` has for each node what each of its ranks needs."""

    def __init__(
        self,
        model: SimModel,
        needs: Sequence[Mapping[int, Sequence[int]]],
        slots: Sequence[int],
        *,
        kept_slots: int = 0,
        seed: int = 0,
        silent: Collection[int] = (),
    ) -> None:
        """`slots`: window slots of each node's arena. `silent`: numbers of nodes that serve nothing."""
        self.model, self.silent = model, set(silent)
        self.needs = {rank: chunks for of_node in needs for rank, chunks in of_node.items()}
        self.ranks_of = [tuple(of_node) for of_node in needs]
        self.attempts: dict[int, int] = {}  # rank -> attempt that brought it to another node
        self.cuts: set[frozenset[int]] = set()  # pairs of nodes that do not reach each other
        self.errors: list[LongshoreError] = []
        self.again: Counter[str] = Counter()  # reads of the store beyond one for each chunk, by cause
        self.reads: Counter[tuple[int, tuple[NodePeer, ...]]] = Counter()  # reads of a chunk's home
        self._read_by: set[tuple[int, int]] = set()
        self.nodes: list[PeerNode] = []
        self.nodes += [PeerNode(self, at, count, seed + at, kept_slots) for at, count in enumerate(slots)]
        for node, of_node in zip(self.nodes, needs, strict=True):
            node.take_part(of_node)

    def __repr__(self) -> str:
        slots = [(node.slot_count, node.kept_slots) for node in self.nodes]
        return f"{len(self.model.contents)} chunks, ranks {self.ranks_of} need {self.needs}, {slots}, {self.silent}"

    @property
    def living(self) -> list[PeerNode]:
        return [node for node in self.nodes if node.lives]

    @property
    def now_s(self) -> float:
        return self.nodes[0].now_s

    @property
    def requests(self) -> list[Request]:
        return [request for node in self.nodes for request in node.requests]

    @property
    def ranks(self) -> list[SimRank]:
        """Processes that may do something."""
        return [rank for node in self.living if not node.hangs for rank in node.ranks if rank.works]

    @property
    def needed_chunks(self) -> set[int]:
        """Chunks that living nodes need."""
        return {
            chunk for node in self.living for load in node.loads.values() for chunk in set().union(*load.needs.values())
        }

    def members(self) -> tuple[NodePeer, ...]:
        """Return what the coordinator says of the nodes now (`ModelRecord.members`)."""
        found = []
        for node in self.living:
            by_attempt: dict[int, tuple[int, ...]] = {}
            for rank in self.ranks_of[node.number]:
                attempt = self.attempts.get(rank, 1)
                by_attempt[attempt] = (*by_attempt.get(attempt, ()), rank)
            peer = None if node.number in self.silent else node.peer
            found += [NodePeer(node.node_id, ranks, peer, attempt) for attempt, ranks in by_attempt.items()]
        return tuple(found) if len({node.node_id for node in found if node.peer is not None}) > 1 else ()

    def begin(self) -> None:
        """All agents get to know the load."""
        for node in self.living:
            for load in node.loads.values():
                node.begin(load)

    def kill_node(self, node: PeerNode, heir: PeerNode | None = None) -> None:
        """End the node and all on it. `heir`: the node that gets its ranks, by a new attempt."""
        node.die()
        ranks, self.ranks_of[node.number] = self.ranks_of[node.number], ()
        if heir is not None and ranks:
            self.ranks_of[heir.number] += ranks
            attempt = 1 + max(load.attempt for each in self.nodes for load in each.loads.values())
            self.attempts |= dict.fromkeys(ranks, attempt)
            heir.take_part({rank: self.needs[rank] for rank in ranks}, attempt)

    def time_passes(self, seconds: float) -> None:
        for node in self.nodes:
            if node.hangs or not node.lives:
                node.now_s += seconds  # its thread looks at no deadline
            else:
                node.time_passes(seconds)

    def why_no_peers(self, rank: PeerRank, chunk: int) -> str:
        """Return why a lease on the chunk names no other node. Empty: the rank's node is the chunk's home."""
        node_load = rank.node.ledger._find(LOAD, rank.load.attempt)
        if node_load is None or node_load.peers is None or not self._is_served(rank.load, chunk):
            return "nobody serves"
        if node_load.peers._routes._left_out:
            return "left out"
        return "failed lease" if node_load._flow.queue.failures(chunk) else ""

    def store_read(self, rank: PeerRank, lease: LeaseOrder, asking: Asking) -> None:
        """Count a read of the store. Only a chunk's home reads it without a fault before, and once."""
        chunk, who = lease.chunk, (rank.node.number, lease.chunk)
        if asking.failed:
            cause = "failed"
        elif asking.missing:
            cause = "missing"
        else:
            cause = "read before" if who in self._read_by else rank.no_peers[lease.lease_id]
        self._read_by.add(who)
        if cause:
            self.again[cause] += 1
        else:
            self.reads[chunk, rank.load.peers] += 1
            assert self.reads[chunk, rank.load.peers] == 1, f"two homes read chunk {chunk} from the store"

    def _is_served(self, load: SimLoad, chunk: int) -> bool:
        """Return whether a node of the load needs the chunk and serves it."""
        return any(chunk in self.needs[rank] for node in load.peers if node.peer is not None for rank in node.ranks)

    @property
    def store_reads(self) -> int:
        return sum(sum(node.fetched.values()) for node in self.nodes)

    # -- to the end --------------------------------------------------------------------------------------------

    def run(self, chance: random.Random, steps: int, event: Callable[[], object] = lambda: None) -> None:
        """Take random steps of healthy ranks and servers. `event`: comes before each. Stop when every rank is done.

        Ranks start at different times, and some are far faster than others for a while.
        """
        starts = chance.choice([0.002, 0.02, 0.2])
        fast: SimRank | None = None
        for _ in range(steps):
            event()
            for node in self.living:
                for load in node.loads.values():
                    for rank in load.needs:
                        if chance.random() < starts:
                            node.start_rank(load, rank)
            if (ranks := self.ranks) and (fast not in ranks or chance.random() < 0.02):
                fast = chance.choice(ranks)
            if fast in ranks and fast is not None:
                rank = chance.choice([fast, fast, chance.choice(ranks)])
                if chance.random() < 0.2:
                    rank.node.take_turn(rank)
                else:
                    rank.node.step(rank, chance)
            if self.requests:
                request = chance.choice(self.requests)
                request.server.serve(request)
                self.check_no_circle()
            if self.is_done:
                return

    def check_no_circle(self) -> None:
        """Check that no nodes wait in a circle for one chunk.

        A request for a chunk that was handed over is refused as soon as its server looks at it.
        """
        waits = {
            (request.rank.node, request.chunk): request.server
            for request in self.requests
            if not (request.cached or request.server.has_handed_over(request.chunk))
        }
        for node, chunk in waits:
            at: ServingNode | None = node
            for _ in self.nodes:
                at = None if at is None else waits.get((at, chunk))
            assert at is None, f"nodes wait in a circle for chunk {chunk}: {self.waiting()}"

    @property
    def is_done(self) -> bool:
        loads = [load for node in self.living for load in node.loads.values()]
        return all(load.ended or load.done == set(load.needs) for load in loads)

    def settle(self, seconds: float, every_s: float = 0.25) -> float:
        """Run without further faults, until every load has ended. Return the seconds that it took.

        Nodes that hang or are cut off remain so. Raises AssertionError when it takes longer than `seconds`. With an
        `every_s` of 0 no time passes, and so many rounds are run.
        """
        began_s, rounds = self.now_s, 0
        going = [node for node in self.living if not node.hangs]
        for node in going:
            node.wake()
        while not all([node.settle_round() for node in going]):
            for node in going:
                node.serve_all()
            self.time_passes(every_s)
            rounds += 1
            assert (self.now_s - began_s if every_s else rounds) <= seconds, f"a load does not end: {self.waiting()}"
        return self.now_s - began_s

    def waiting(self) -> list[str]:
        """Describe every request between nodes, and where ranks are."""
        lines = [f"{r.rank.node.node_id} waits at {r.server.node_id} for {r.chunk}: {r.cached}" for r in self.requests]
        for node in self.living:
            for key, load in node.loads.items():
                left = {rank: sorted(set(load.needs[rank]) - p.state.placed) for rank, p in load.placements.items()}
                part = node.ledger._loads.get((LOAD, load.attempt))
                kept = {} if part is None or part.peers is None else part.peers._kept
                lines.append(f"{node.node_id} {key}: left {left}, kept {[(c, k.left) for c, k in kept.items()]}")
        return lines

    def check_end(self) -> None:
        """Check, when every load has ended, that sources add up and nothing is left of the exchange."""
        for _ in range(100):  # longer than any patience
            for node in self.living:
                node.serve_all()
                for rank in node.ranks:
                    node.take_turn(rank)
                if not node.hangs:
                    node.tick()
            self.time_passes(0.25)
        for node in self.living:
            if node.hangs:
                continue
            node.check_exchange_is_over()
            if any(not load.ended for load in node.loads.values()):
                check_sources(node.ledger.report(LOAD, node.node_id, node.node_id))
            stats = node.cache.stats()
            assert (stats.in_use_slots, stats.leased_slots, stats.quarantined_slots) == (0, 0, 0), stats
            node.check_nothing_is_left()
