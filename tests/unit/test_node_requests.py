"""An agent limits its ranks' requests in flight and says why it grants no leases. No agent or clock runs."""

from __future__ import annotations

from actors.node.node_ledger import NodeLedger
from cluster.messages import Commit, NodeJob, Orders, RankHello, RankUpdate
from cluster.planning.packed_plan import pack_shared
from cluster.scheduling.concurrency import START
from storage.arena.chunk_cache import ChunkCache
from storage.host.processes import ProcessId
from tests.support.checkpoints import safetensors_bytes
from tests.support.local_node import plan_of

RANKS = 2
CHUNK_BYTES = 1024


class Node:
    """One load of `RANKS` replicas, each in a process of its own."""

    def __init__(self, slots: int, most_requests: int = 16) -> None:
        objects = {"model.safetensors": safetensors_bytes([("a", "F32", (40 * CHUNK_BYTES // 4,))], 1)}
        plan = plan_of(objects, (1, 1, RANKS), CHUNK_BYTES)
        cache = ChunkCache(slots)
        self.ledger = NodeLedger(cache, CHUNK_BYTES)
        job = NodeJob(
            load_id="load",
            attempt=1,
            shared=pack_shared(plan),
            store_identity="store",
            ranks=tuple(range(RANKS)),
            done=frozenset(),
            min_slots=2 * RANKS + 1,
            chunk_attempts=3,
            lease_deadline_s=60.0,
            record=b"",
            most_requests=most_requests,
        )
        assert self.ledger.begin(job, 0.0)
        self.numbers = [0] * RANKS
        for rank in range(RANKS):
            hello = RankHello("load", 1, rank, 0, self.process(rank), number=self._number(rank))
            assert self.ledger.join(hello, 0.0) is True

    def process(self, rank: int) -> ProcessId:
        return ProcessId(1000 + rank, 1)

    def _number(self, rank: int) -> int:
        self.numbers[rank] += 1
        return self.numbers[rank]

    def tell(self, rank: int, now_s: float, **what: object) -> Orders:
        """One exchange; of an agent that does not wait."""
        update = RankUpdate("load", 1, rank, 0, self.process(rank), self._number(rank), **what)  # type: ignore[arg-type]
        orders, _ = self.ledger.exchange(update, now_s)
        return orders or self.ledger.no_orders(update)


def test_a_throttled_rank_halves_the_requests_of_all():
    node = Node(slots=64)
    assert node.tell(0, 0.1, want_leases=2).requests == node.tell(1, 0.1, want_leases=2).requests == START
    assert node.tell(0, 0.2, want_leases=1, throttled=3).requests == 1
    assert node.tell(1, 0.3, want_leases=1).requests == 1
    assert node.tell(1, 0.4, want_leases=1, throttled=2).requests == 1


def test_the_bound_is_kept():
    assert Node(slots=64, most_requests=1).tell(0, 0.1, want_leases=2).requests == 1


def test_requests_rise_while_throughput_rises():
    """Each request takes a second, however many there are."""
    node, now_s = Node(slots=64, most_requests=4), 0.0
    requests = START
    for _ in range(8):
        now_s += 1.0
        for rank in range(RANKS):
            orders = node.tell(rank, now_s, requests=((CHUNK_BYTES, 1.0, 0.0),) * requests, want_leases=1)
        requests = orders.requests
    assert requests == 4


def test_a_rank_without_leases_learns_what_is_short():
    node = Node(slots=5)
    first = node.tell(0, 0.1, want_leases=3)
    assert (len(first.leases), first.short_of) == (3, "")
    second = node.tell(1, 0.2, want_leases=3)
    assert (len(second.leases), second.short_of) == (2, "slots")
    assert node.tell(0, 0.3, want_leases=3).short_of == "slots"
    assert node.tell(0, 0.4).short_of == ""  # it wants none


def test_at_the_end_chunks_are_short():
    node, now_s = Node(slots=64), 0.0
    held: list[Commit] = []
    while True:
        now_s += 0.1
        orders = node.tell(0, now_s, want_leases=8)
        held += [Commit(lease.lease_id, lease.chunk) for lease in orders.leases]
        if len(orders.leases) < 8:
            break
    assert orders.short_of == "chunks"
    assert len(held) >= 40
