"""Nodes that feed each other in simulated time: agents that serve chunks, ranks that read them, links between.

    FeedingRank -- lease's peers in turn, then the store --> FeedingNode of a peer -- take_for_peer --> NodeLedger
         ^                                                       | a few send at once, in the order of their requests
         +------------- the receiver's downlink <-- Uplink ------+

The ledger with its `PeerExchange` and `PeerRoutes`, and the rank's state, are the real ones. Server and client are
those of `storage.peers` as far as they decide something: turns, refusals, timeouts, a node that is far too slow.

A link sends pieces of its transfers in turn. A transfer has few pieces on their way, as a TCP connection has, so a slow
receiver keeps nobody else from the sender's link.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.node.chunk_flow import JobTables
from actors.node.lending import LendingFacts
from actors.node.peer_routes import PeerRoutes
from actors.rank.chunk_fetcher import BLAMELESS, REFUSALS, next_source
from actors.rank.state import FetchedChunk
from bench.sim_flows import Clock
from bench.sim_node import LOAD, Rates, SimAgent, SimRank
from cluster.fit.needs import min_slots
from cluster.messages import (
    PEER_READ,
    Commit,
    LeaseOrder,
    Lender,
    Lenders,
    Members,
    NodeJob,
    NodePeer,
    Orders,
    PeerSource,
    RankUpdate,
)
from cluster.planning.cut_model import CutModel
from cluster.planning.packed_plan import ReaderTables
from cluster.scheduling.concurrency import PeerPatience
from storage.arena.slots import CachedChunk
from storage.checkpoints.model_index import ChunkTable, Shard
from storage.host.processes import ProcessId
from storage.peers import PATIENCE_S, READ_TIMEOUT_S, WAIT_S, Asker, NoChunk, Peer
from storage.peers.chunk_server import SENDING, TURN_S
from storage.peers.peer_client import AVOID_S, Pace

PIECES = 4  # of a chunk
ON_THE_WAY = 2  # pieces of one transfer that have left and not arrived
CONNECT_S = 2.0  # until a client gives up a host that does not answer to a new connection
TICK_S = 0.5  # between two looks of an agent at its deadlines


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaTables(ReaderTables):
    """Tables of a model that every rank needs completely."""

    def parts(self, ranks: object) -> str:
        return "everything"

    @classmethod
    def of_size(cls, chunks: int, chunk_bytes: int) -> ReplicaTables:
        start = np.arange(chunks, dtype=np.int64) * chunk_bytes
        digests = np.zeros((chunks, 32), np.uint8)
        digests[:, :8] = np.arange(chunks, dtype=np.int64).view(np.uint8).reshape(chunks, 8)
        table = ChunkTable(np.zeros(chunks, np.int32), start, start + chunk_bytes, "blake3", digests)
        empty: CutModel = ReaderTables.of((), table).cut
        return cls((Shard("model.safetensors", chunks * chunk_bytes, "v1"),), table, empty)


class Uplink:
    """A link that sends pieces of its transfers in turn, one at a time."""

    def __init__(self, clock: Clock, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self.busy_s = 0.0
        self.sent_bytes = 0.0
        self.is_dead = False
        self._clock = clock
        self._ready: deque[Transfer] = deque()
        self._busy = False

    def begin(self, transfer: Transfer) -> None:
        """Send the transfer's pieces, or go on with them."""
        self._ready.append(transfer)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        while self._ready and self._ready[0].ended:
            self._ready.popleft()
        self._busy = bool(self._ready) and not self.is_dead
        if self._busy:
            transfer = self._ready.popleft()
            piece_s = transfer.piece_bytes / self.bytes_s
            self.busy_s += piece_s
            self.sent_bytes += transfer.piece_bytes
            self._clock.after(piece_s, lambda: self._sent(transfer))

    def _sent(self, transfer: Transfer) -> None:
        if not self.is_dead and not transfer.ended:
            transfer.to_send -= 1
            transfer.on_the_way += 1
            node = transfer.fetch.rank.node
            node.downlink_free_s = max(node.downlink_free_s, self._clock.now_s)
            node.downlink_free_s += transfer.piece_bytes / node.down_bytes_s
            self._clock.at(node.downlink_free_s, lambda: self._arrived(transfer))
            if not transfer.to_send:
                transfer.sent()
            elif transfer.on_the_way < ON_THE_WAY:
                self._ready.append(transfer)
            else:
                transfer.blocked = True
        self._next()

    def _arrived(self, transfer: Transfer) -> None:
        transfer.on_the_way -= 1
        if transfer.ended or transfer.fetch.rank.node.is_dead:
            return
        transfer.fetch.missing -= 1
        if not transfer.fetch.missing:
            transfer.fetch.rank.arrived(transfer)
        elif transfer.blocked:
            transfer.blocked = False
            self.begin(transfer)


@dataclass(slots=True, eq=False)
class Fetch:
    """A lease that a rank works on."""

    rank: FeedingRank
    lease: LeaseOrder
    begun_s: float
    piece_bytes: float
    missing: int = PIECES
    at: int = 0  # which of the lease's peers is asked
    failed: tuple[int, ...] = ()
    transfer: Transfer | None = None  # the request now

    @property
    def source(self) -> FeedingNode | None:
        """The node to ask now; None: the store."""
        peers = self.lease.peers
        return self.rank.node.others[peers[self.at].peer.node] if self.at < len(peers) else None


@dataclass(slots=True, eq=False)
class Transfer:
    """A request for a chunk, and its answer."""

    fetch: Fetch
    server: FeedingNode | None  # None: the store
    asked_s: float
    to_send: int = 0
    on_the_way: int = 0
    begun_s: float = 0.0  # when the server began to send
    blocked: bool = False  # waits until a piece has arrived
    ended: bool = False
    sending: bool = False  # it has a turn of the server
    reader: str = ""
    cached: CachedChunk | None = None

    @property
    def piece_bytes(self) -> float:
        return self.fetch.piece_bytes

    def sent(self) -> None:
        """All pieces have left."""
        if self.server is not None:
            self.server.turn_over(self)


class FeedingNode(SimAgent):
    """A node with one rank, which needs the whole model and reads it from other nodes too."""

    def __init__(
        self,
        clock: Clock,
        number: int,
        members: tuple[NodePeer, ...],
        tables: ReplicaTables,
        rates: Rates,
        store: Uplink,
        others: dict[str, FeedingNode],
        up_bytes_s: float,
        down_bytes_s: float,
        lease_deadline_s: float,
    ) -> None:
        """`others`: all nodes by the incarnation of their agents, to be filled.

        A member that is `filled` has everything, and keeps nothing.
        """
        chunk_bytes = tables.chunks.largest_bytes
        super().__init__(clock, rates, tables.chunks.sizes_bytes().tolist(), chunk_bytes)
        self.number, self.node_id = number, members[number].node_id
        self.is_filled = members[number].filled
        self.store, self.others = store, others
        self.up = Uplink(clock, up_bytes_s)
        self.down_bytes_s, self.downlink_free_s = down_bytes_s, 0.0
        self.store_latency_s = rates.latency_s
        self.is_dead = False
        self.rank = FeedingRank(self, number, dict(enumerate(self.sizes)))
        self.ranks = [self.rank]
        self._job = NodeJob(
            load_id=LOAD,
            attempt=members[number].attempt,
            shared=b"",
            store_identity="made up",
            ranks=(number,),
            done=frozenset((number,) if self.is_filled else ()),
            min_slots=min_slots(1),
            chunk_attempts=3,
            lease_deadline_s=lease_deadline_s,
            record=b"",
            most_requests=rates.threads,
        )
        together = Members(members, b"key")
        routes = PeerRoutes(together, LOAD, self.node_id, tables) if len(members) > 1 else None
        needs = {number: tables.chunk_ids(number)}
        self._tables = JobTables(tables, needs, chunk_bytes, routes)
        self._process = ProcessId(number + 1, 2)  # the agent's
        self._numbers = itertools.count(1)
        self._waiting: dict[int, list[Transfer]] = {}  # requests for chunks that are on their way here
        self._open: dict[Transfer, None] = {}  # in order: requests that were not refused and have not ended
        self._free_turns = SENDING
        self._in_line: deque[Transfer] = deque()

    def begin(self, lenders: tuple[Lender, ...]) -> None:
        """`lenders`: all nodes, if they share the model out as readers do. Else empty."""
        tables = self._tables
        if lenders:
            tables = replace(tables, routes=None).lends(LendingFacts(self.node_id, b"model", b"key", (0.0, 0.0)))
        self.ledger.begin(self._job, 0.0, tables)
        self.ledger.use_lenders([Lenders(b"model", 1, lenders)])
        if not self.is_filled:
            self.rank.join()

    # -- as a server -------------------------------------------------------------------------------------------

    def asked(self, transfer: Transfer) -> None:
        """Another node's request is here."""
        if transfer.ended:
            return
        self._open[transfer] = None
        if self.is_dead:
            transfer.fetch.rank.wait_in_vain(transfer)
        else:
            transfer.reader = f"peer-{next(self._numbers)}"
            self._take(transfer)

    def _take(self, transfer: Transfer) -> None:
        lease, now_s = transfer.fetch.lease, self.clock.now_s
        rank = transfer.fetch.rank
        asker = Asker(rank.node.node_id, lease.share_left, rank.patience.slow_store_s(now_s), lease.hands_over)
        found = self.ledger.take_for_peer(LOAD, lease.chunk, self._process, transfer.reader, asker, now_s)
        if found is NoChunk.COMING and now_s - transfer.asked_s < WAIT_S:
            self._waiting.setdefault(lease.chunk, []).append(transfer)
        elif isinstance(found, NoChunk):
            self._open.pop(transfer, None)
            if found is NoChunk.COMING and self.ledger.reads_store(LOAD, lease.chunk):
                found = NoChunk.LATE
            transfer.fetch.rank.not_there(transfer, REFUSALS[found.value])
        else:
            transfer.cached = found[1]
            self._free_turns -= 1
            if self._free_turns >= 0:
                self._send(transfer)
            else:
                self._in_line.append(transfer)
                self.clock.after(TURN_S, lambda: self._wait_no_longer(transfer))

    def _wait_no_longer(self, transfer: Transfer) -> None:
        if transfer in self._in_line:
            self._in_line.remove(transfer)
            self._send(transfer)

    def _send(self, transfer: Transfer) -> None:
        transfer.sending = True
        if transfer.ended:
            self.turn_over(transfer)
            return
        transfer.begun_s, transfer.to_send = self.clock.now_s, transfer.fetch.missing
        transfer.fetch.rank.pace.begin(self.clock.now_s)
        self.up.begin(transfer)
        if transfer.fetch.rank.node.is_dead:
            self.clock.after(PATIENCE_S, lambda: self.over(transfer))

    def turn_over(self, transfer: Transfer) -> None:
        """The transfer's last piece has left, or it has ended."""
        if transfer.sending:
            transfer.sending = False
            self._free_turns += 1
            if self._in_line:
                self._send(self._in_line.popleft())

    def over(self, transfer: Transfer, *, received: bool = False) -> None:
        """The receiver has everything, or does not go on."""
        if transfer not in self._open:
            return
        self._open.pop(transfer, None)
        transfer.ended = True
        self.turn_over(transfer)
        if self.is_dead or transfer.cached is None:
            return
        load = self.ledger._parts(LOAD)[0]
        if load.peers is not None:
            chunk, asker = transfer.fetch.lease.chunk, transfer.fetch.rank.node.node_id
            load.peers.given(chunk, transfer.cached, self._process, transfer.reader, asker, received=received)
        self.notify()

    def wake(self, chunk: int) -> None:
        """Look again at requests that wait for the chunk."""
        for transfer in self._waiting.pop(chunk, ()):
            if not transfer.ended:
                self._take(transfer)

    # -- time and death ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do what agent and clients do from time to time."""
        if self.is_dead:
            return
        for chunk in list(self._waiting):
            self.wake(chunk)
        if self.ledger.expire(self.clock.now_s):
            self.notify()
        self.rank.tick()

    def die(self) -> None:
        """The node is gone, and no packet comes back from it any more."""
        self.is_dead = self.up.is_dead = True
        for transfer in list(self._open):
            transfer.fetch.rank.wait_in_vain(transfer)
        for fetch in self.rank.reads.values():
            if fetch.transfer is not None and fetch.transfer.server is not None and fetch.transfer.sending:
                self.clock.after(PATIENCE_S, functools.partial(fetch.transfer.server.over, fetch.transfer))


class FeedingRank(SimRank):
    """A rank that asks other nodes for chunks as `ChunkFetcher` does."""

    node: FeedingNode

    def __init__(self, node: FeedingNode, rank: int, chunk_place_bytes: dict[int, int]) -> None:
        super().__init__(node, rank, chunk_place_bytes)
        self.reads: dict[str, Fetch] = {}  # by lease id
        self.causes: dict[str, int] = {}  # why other nodes sent no chunk
        self._avoid: dict[int, float] = {}  # node's number -> until when
        self._known: set[int] = set()  # nodes with a connection
        self.pace = Pace()
        self.patience = PeerPatience()

    def _act(self) -> None:
        if not self.node.is_dead:
            super()._act()

    def _arrives(self, update: RankUpdate) -> None:
        if not self.node.is_dead:
            super()._arrives(update)
            for commit in update.committed:
                self.node.wake(commit.chunk)

    def _obey(self, update: RankUpdate, orders: Orders) -> None:
        super()._obey(update, orders)
        for lease_id in orders.closed_leases:
            if (fetch := self.reads.get(lease_id)) is not None and fetch.transfer is not None:
                fetch.transfer.ended = True
                self.fetched_bytes += (PIECES - fetch.missing) * int(fetch.piece_bytes)
                self._return(fetch)

    def _store_s(self) -> float | None:
        return self.patience.store_s(self.node.clock.now_s)

    # -- one chunk ---------------------------------------------------------------------------------------------

    def _fetch(self, lease: LeaseOrder) -> None:
        size_bytes = self.node.sizes[lease.chunk]
        fetch = self.reads[lease.lease_id] = Fetch(self, lease, self.node.clock.now_s, size_bytes / PIECES)
        self._try(fetch)

    def _try(self, fetch: Fetch) -> None:
        node, source = self.node, fetch.source
        clock = node.clock
        transfer = fetch.transfer = Transfer(fetch, source, clock.now_s)
        if source is None:
            self.patience.reads_store(fetch.lease.lease_id, clock.now_s)
            transfer.to_send = fetch.missing
            clock.after(node.store_latency_s, lambda: node.store.begin(transfer))
        elif self._avoid.get(source.number, 0.0) > clock.now_s:
            self._failed(transfer, "peer_unavailable")
        elif source.is_dead:
            clock.after(READ_TIMEOUT_S if source.number in self._known else CONNECT_S, lambda: self._lost(transfer))
        else:
            self.patience.asked(fetch.lease.chunk, source.number, clock.now_s)
            clock.after(node.rates.peer_latency_s, lambda: source.asked(transfer))

    def arrived(self, transfer: Transfer) -> None:
        """The last piece of the chunk is here."""
        fetch, now_s, server = transfer.fetch, self.node.clock.now_s, transfer.server
        lease, size_bytes = fetch.lease, self.node.sizes[fetch.lease.chunk]
        transfer.ended = True
        del self.reads[lease.lease_id]
        if server is None:
            self.fetched_bytes += size_bytes
            commit = Commit(lease.lease_id, lease.chunk, failed_peers=fetch.failed)
        else:
            self.pace.end(now_s, size_bytes)
            self._known.add(server.number)
            server.over(transfer, received=True)
            commit = Commit(lease.lease_id, lease.chunk, source=PEER_READ, peer=fetch.at, failed_peers=fetch.failed)
        result = FetchedChunk(lease.lease_id, commit)
        peer = None if server is None else server.number
        self.patience.ended(lease.lease_id, lease.chunk, now_s, came=True, peer=peer)
        self.state.fetch_ended(result, size_bytes, now_s - fetch.begun_s, now_s, size_bytes)
        self._act()

    # -- nodes that do not send --------------------------------------------------------------------------------

    def not_there(self, transfer: Transfer, cause: str) -> None:
        """The other node sends nothing."""
        self._known.add(transfer.server.number if transfer.server is not None else -1)
        self._failed(transfer, cause)

    def wait_in_vain(self, transfer: Transfer) -> None:
        """The other node is gone. Nothing comes any more."""
        clock = self.node.clock
        clock.after(READ_TIMEOUT_S, lambda: self._lost(transfer))

    def _lost(self, transfer: Transfer) -> None:
        if not transfer.ended and transfer.server is not None and not self.node.is_dead:
            if not transfer.begun_s:
                self._avoid[transfer.server.number] = self.node.clock.now_s + AVOID_S
            self._failed(transfer, "peer_unavailable")

    def _failed(self, transfer: Transfer, cause: str) -> None:
        fetch = transfer.fetch
        transfer.ended = True
        if transfer.begun_s:
            self.pace.end(self.node.clock.now_s, 0)
        peer = -1 if transfer.server is None else transfer.server.number
        if self.patience.waits_on(fetch.lease.chunk, peer, cause, self.node.clock.now_s):
            self._ask_again(fetch)
            return
        self.causes[cause] = self.causes.get(cause, 0) + 1
        fetch.failed += (fetch.at,) if cause not in BLAMELESS else ()
        fetch.at = next_source(fetch.lease, fetch.at, cause)
        if fetch.at == len(fetch.lease.peers):
            self.state.turns_to_store(fetch.lease.lease_id, self.node.clock.now_s)
        if not self.node.is_dead:
            self._try(fetch)

    def _ask_again(self, fetch: Fetch) -> None:
        """Wait on, or return the lease in time for the store."""
        if self.node.clock.now_s - fetch.begun_s < fetch.lease.deadline_s / 3:
            self._try(fetch)
        else:
            self._return(fetch)

    def _return(self, fetch: Fetch) -> None:
        lease_id, now_s = fetch.lease.lease_id, self.node.clock.now_s
        del self.reads[lease_id]
        self.patience.ended(lease_id, fetch.lease.chunk, now_s, came=False)
        self.state.fetch_ended(FetchedChunk(lease_id), 0, now_s - fetch.begun_s, now_s)
        self._act()

    def tick(self) -> None:
        """Give up nodes that send far more slowly than others did."""
        now_s = self.node.clock.now_s
        for fetch in list(self.reads.values()):
            transfer = fetch.transfer
            if transfer is None or transfer.server is None or not transfer.begun_s or transfer.ended:
                continue
            took_s = now_s - transfer.begun_s
            arrived_bytes = (PIECES - fetch.missing) * fetch.piece_bytes
            if self.pace.is_slow(int(arrived_bytes), took_s):
                transfer.server.over(transfer)
                self._failed(transfer, "peer_unavailable")


class Cluster:
    """All nodes of one load, and its store."""

    def __init__(
        self,
        tables: ReplicaTables,
        rates: Rates,
        speeds: Sequence[tuple[float, float]],
        lease_deadline_s: float,
        *,
        lends: bool = False,
        filled: int = 0,
    ) -> None:
        """`speeds`: of each node, which part of the NIC's rate it sends and receives at.

        `lends`: nobody plans the load, and nodes share it out as readers do. `filled`: the first so many nodes have
        the model, and the others join.
        """
        self.clock = Clock()
        self.store = Uplink(self.clock, rates.store_bytes_s)
        self.nodes: list[FeedingNode] = []
        self._done = False
        members = tuple(
            NodePeer(f"node-{at}", (at,), Peer("10.0.0.1", 1000, f"{at}"), int(at >= filled), filled=at < filled)
            for at in range(len(speeds))
        )
        sources = ((node.node_id, node.peer) for node in members if lends and node.peer is not None)
        self._lenders = tuple(Lender(name, PeerSource(peer, LOAD, b"key"), 1.0, True) for name, peer in sources)
        others: dict[str, FeedingNode] = {}
        for number, (up, down) in enumerate(speeds):
            links = up * rates.nic_bytes_s, down * rates.nic_bytes_s
            node = FeedingNode(self.clock, number, members, tables, rates, self.store, others, *links, lease_deadline_s)
            others[f"{number}"] = node
            self.nodes.append(node)

    def run(self, most_s: float) -> None:
        """Load until every living node has everything. Raises RuntimeError if that takes more than `most_s`."""
        for node in self.nodes:
            node.begin(self._lenders)
        self._tick()
        self.clock.run_while(lambda: self.clock.now_s < most_s and not self._done)
        if not self._done:
            raise RuntimeError("the simulated load came to a standstill")

    def _tick(self) -> None:
        for node in self.nodes:
            node.tick()
        self._done = all(node.is_dead or node.is_filled or node.complete for node in self.nodes)
        self.clock.after(TICK_S, self._tick)
