"""Nodes of a load that feed each other, whatever happens to them: no wrong byte, no circular wait, nothing left."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.fit.needs import min_slots
from storage.errors import IntegrityError, LongshoreError, StoreUnavailable
from tests.support.node_simulation import MOST_REQUESTS, SimModel
from tests.support.peer_simulation import PeerNode, PeerRank, PeerSimulation

Needs = list[dict[int, list[int]]]
ENDS_WITHIN_S = 300.0  # of virtual time, when nothing changes any more; dead, stopped and cut off nodes stay so


@st.composite
def needs_of(draw: st.DrawFn, nodes: int, chunks: int) -> Needs:
    """1 to 3 ranks a node: replicas, also of ranks that share out the model, or parts with an overlap, or anything."""
    kind, each = draw(st.sampled_from(["all", "shared out", "parts", "any"])), draw(st.integers(1, 3))
    ranks = nodes * each
    found: list[list[int]] = []
    for rank in range(ranks):
        if kind == "all":
            found.append(list(range(chunks)))
        elif kind == "shared out":
            found.append(list(range(rank % each * chunks // each, (rank % each + 1) * chunks // each)))
        elif kind == "parts":
            found.append(sorted({0, *range(rank * chunks // ranks, min(chunks, (rank + 1) * chunks // ranks + 2))}))
        else:
            found.append(sorted(draw(st.sets(st.integers(0, chunks - 1)))))
    return [{rank: found[rank] for rank in range(at * each, (at + 1) * each)} for at in range(nodes)]


@st.composite
def simulations(draw: st.DrawFn) -> PeerSimulation:
    nodes, chunks = draw(st.integers(2, 6)), draw(st.integers(1, 40))
    needs = draw(needs_of(nodes, chunks))
    extra = draw(st.sampled_from([[0], [0], [0, 1, 5], [40]]))
    slots = [min_slots(len(of_node)) + extra[at % len(extra)] for at, of_node in enumerate(needs)]
    silent = draw(st.sampled_from([(), (), (), (0,), (0, 1)]))
    kept_slots = draw(st.sampled_from([0, 0, 4, 40]))
    return PeerSimulation(
        SimModel(tuple(range(chunks))), needs, slots, kept_slots=kept_slots, silent=silent, seed=draw(st.integers(0, 9))
    )


@settings(max_examples=80, deadline=None)
@given(net=simulations(), seed=st.integers(0, 2**32), steps=st.sampled_from([0, 100, 3000]))
def test_without_faults_no_time_passes_and_the_store_sends_once(net: PeerSimulation, seed: int, steps: int) -> None:
    """The clock stands still. So no patience can end, and no node waits for one."""
    net.begin()
    net.run(random.Random(seed), steps)
    net.settle(400, every_s=0.0)
    assert net.now_s == 0.0
    assert not net.errors
    assert net.again.keys() <= ({"nobody serves"} if net.silent else set())
    assert net.store_reads == net.again.total() + net.reads.total()
    if not net.silent:
        assert net.store_reads == len(net.needed_chunks)
    for node in net.nodes:
        report = node.ledger.report("load", node.node_id, node.node_id)
        assert report.store_chunks + report.peer_chunks == report.needed_chunks
        assert not report.retries
    net.check_end()


class PeerMachine(RuleBasedStateMachine):
    """Every rule is one fault, or a while without one."""

    net: PeerSimulation | None = None

    @initialize(net=simulations(), seed=st.integers(0, 2**32), begin=st.sampled_from([True, True, True, False]))
    def start(self, net: PeerSimulation, seed: int, begin: bool) -> None:
        self.net, self.chance = net, random.Random(seed)
        if begin:
            net.begin()

    @property
    def the_net(self) -> PeerSimulation:
        assert self.net is not None
        return self.net

    def _node(self, index: int) -> PeerNode:
        return self.the_net.living[index % len(self.the_net.living)]

    def _rank(self, index: int) -> PeerRank | None:
        ranks = self.the_net.ranks
        rank = ranks[index % len(ranks)] if ranks else None
        assert rank is None or isinstance(rank, PeerRank)
        return rank

    @rule()
    def all_nodes_begin(self) -> None:
        self.the_net.begin()

    @rule(index=st.integers(0, 5))
    def node_begins(self, index: int) -> None:
        """The others may begin far later, or again after a restart."""
        node = self._node(index)
        for load in node.loads.values():
            if not node.hangs:
                node.begin(load)

    @invariant()
    def all_goes_well_for_a_while(self) -> None:
        if self.net is not None:
            pace_s = self.chance.choice([0.0, 0.0, 0.01, 0.1])
            net = self.net
            net.run(self.chance, self.chance.choice([0, 5, 30, 200]), lambda: net.time_passes(pace_s))

    @rule(seconds=st.sampled_from([0.5, 1.5, 6.0, 12.0, 21.0, 65.0]))
    def time_passes(self, seconds: float) -> None:
        self.the_net.time_passes(seconds)

    @rule()
    def agents_look_at_processes(self) -> None:
        for node in self.the_net.living:
            if not node.hangs:
                node.tick()

    @rule(index=st.integers(0, 5))
    def connections_are_served(self, index: int) -> None:
        self._node(index).serve_all()

    @rule(index=st.integers(0, 17), fate=st.sampled_from(["twice", "unanswered", "late", "lost"]))
    def message_is_lost(self, index: int, fate: str) -> None:
        if (rank := self._rank(index)) is not None:
            rank.exchange(fate)

    @rule(index=st.integers(0, 17), late=st.integers(0, 9))
    def late_message(self, index: int, late: int) -> None:
        node = self._node(index)
        if not node.hangs:
            node.late_message_arrives(late)

    @rule(index=st.integers(0, 17), which=st.integers(0, 9), fault=st.sampled_from((StoreUnavailable, IntegrityError)))
    def store_fails(self, index: int, which: int, fault: type[LongshoreError]) -> None:
        if (rank := self._rank(index)) is not None:
            rank.end_write(fault("a fault of the test", shard="model.safetensors", chunk=0), which)

    @rule(index=st.integers(0, 17), which=st.integers(0, 9))
    def receipt_is_lost(self, index: int, which: int) -> None:
        """A chunk has arrived, and its sender does not learn it."""
        if (rank := self._rank(index)) is not None:
            rank.end_write(None, which, acknowledged=False)

    @rule(index=st.integers(0, 17))
    def process_dies(self, index: int) -> None:
        if (rank := self._rank(index)) is not None:
            rank.node.kill(rank)

    @rule(index=st.integers(0, 17))
    def process_is_stopped(self, index: int) -> None:
        if (rank := self._rank(index)) is not None:
            rank.asleep = True

    @rule(index=st.integers(0, 5))
    def processes_go_on(self, index: int) -> None:
        for rank in self._node(index).ranks:
            rank.asleep = False

    @rule(index=st.integers(0, 17))
    def rank_is_replaced(self, index: int) -> None:
        if (rank := self._rank(index)) is not None and not rank.load.ended:
            rank.node.give_up_rank(rank.load, rank.rank)

    @rule(index=st.integers(0, 5), heir=st.one_of(st.none(), st.integers(0, 5)))
    def node_dies(self, index: int, heir: int | None) -> None:
        """Its ranks go to the heir, by a new attempt."""
        if len(self.the_net.living) > 1:
            node = self._node(index)
            least = min_slots(len(self.the_net.ranks_of[node.number]))
            others = [each for each in self.the_net.living if each is not node and each.slot_count >= least]
            self.the_net.kill_node(node, others[heir % len(others)] if others and heir is not None else None)

    @rule(index=st.integers(0, 5))
    def agent_is_stopped(self, index: int) -> None:
        self._node(index).hangs = True

    @rule(index=st.integers(0, 5))
    def agent_goes_on(self, index: int) -> None:
        self._node(index).hangs = False

    @rule(index=st.integers(0, 5))
    def agent_is_restarted(self, index: int) -> None:
        self._node(index).restart_agent()

    @rule(one=st.integers(0, 5), other=st.integers(0, 5))
    def two_nodes_are_cut_off(self, one: int, other: int) -> None:
        if one % len(self.the_net.nodes) != other % len(self.the_net.nodes):
            self.the_net.cuts.add(frozenset(at % len(self.the_net.nodes) for at in (one, other)))

    @rule()
    def network_heals(self) -> None:
        self.the_net.cuts.clear()

    @rule(index=st.integers(0, 5), flips=st.booleans())
    def node_sends_other_bytes(self, index: int, flips: bool) -> None:
        self._node(index).flips = flips

    @rule(index=st.integers(0, 5), seconds=st.sampled_from([None, 0.1, 100.0]))
    def store_takes_a_node_so_long(self, index: int, seconds: float | None) -> None:
        """Those for which it is slow hand their chunks over, one or all of them."""
        self._node(index).store_s = seconds

    @rule(index=st.integers(0, 5))
    def load_ends_on_one_node(self, index: int) -> None:
        for load in self._node(index).loads.values():
            if not self._node(index).hangs:
                self._node(index).end_load(load)

    def teardown(self) -> None:
        if self.net is not None:
            self.net.settle(ENDS_WITHIN_S)
            for error in self.net.errors:
                assert {"shard", "chunk", "rank"} <= error.details.keys(), error
            assert self.net.store_reads == self.net.reads.total() + self.net.again.total()
            self.net.check_end()


TestPeerMachine = PeerMachine.TestCase
TestPeerMachine.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def cut_off(net: PeerSimulation, node: PeerNode) -> None:
    net.cuts |= {frozenset((node.number, other.number)) for other in net.nodes if other is not node}


FAULTS: dict[str, Callable[[PeerSimulation, PeerNode], object]] = {
    "dies": PeerSimulation.kill_node,
    "is stopped": lambda net, node: setattr(node, "hangs", True),
    "sends other bytes": lambda net, node: setattr(node, "flips", True),
    "is restarted": lambda net, node: node.restart_agent(),
    "is cut off": cut_off,
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=10, deadline=None)
@given(
    nodes=st.integers(3, 6),
    extra=st.sampled_from([0, 2, 80]),
    victim=st.integers(0, 5),
    after=st.integers(0, 600),
    seed=st.integers(0, 2**32),
)
def test_one_lost_node_costs_a_bounded_number_of_reads(
    fault: str, nodes: int, extra: int, victim: int, after: int, seed: int
) -> None:
    """In no arena does a node do worse than alone: it reads no chunk from the store twice.

    With room for all chunks, those are read again for which nodes were asking when the fault came.
    """
    chunks = 60
    needs = [{node: list(range(chunks))} for node in range(nodes)]
    net = PeerSimulation(SimModel(tuple(range(chunks))), needs, [min_slots(1) + extra] * nodes)
    net.begin()
    chance, lost = random.Random(seed), net.nodes[victim % nodes]
    net.run(chance, after)
    FAULTS[fault](net, lost)
    net.run(chance, 2000, lambda: net.time_passes(0.001))
    net.settle(ENDS_WITHIN_S)
    others = [node for node in net.nodes if node is not lost]
    assert not net.errors
    assert max(times for node in others for times in node.fetched.values()) == 1
    again = sum(sum(node.fetched.values()) for node in others) - chunks
    if extra >= chunks:
        assert again <= len(others) * MOST_REQUESTS
    net.check_end()
