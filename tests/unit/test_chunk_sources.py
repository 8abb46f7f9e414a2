"""A node's report names the source of every needed chunk, or says that it is unknown."""

from __future__ import annotations

from cluster.telemetry.stats import NodeReport
from tests.support.node_simulation import DEADLINE_S, NodeSimulation, SimLoad, SimModel, SimRank, check_sources

CHUNKS = range(8)
MODEL = SimModel(tuple(CHUNKS))


def in_the_middle(node: NodeSimulation, ranks: int = 1) -> tuple[SimLoad, list[SimRank]]:
    """Run a load until every rank has placed at least three chunks."""
    load = node.add_load(MODEL, {rank: CHUNKS for rank in range(ranks)})
    for rank in load.needs:
        node.start_rank(load, rank)
    placements = [load.placements[rank] for rank in load.needs]
    while min(len(placement.state.placed) for placement in placements) < 3:
        for placement in placements:
            node.take_turn(placement)
    return load, placements


def sources(node: NodeSimulation, load: SimLoad) -> tuple[int, int, int]:
    """Return the numbers of chunks from the store, from the arena and from unknown sources."""
    report: NodeReport = node.ledger.report(load.load_id, "node", "host")
    check_sources(report)
    return report.store_chunks, report.cached_chunks, report.unknown_chunks


def test_a_restarted_agent_learns_what_this_load_fetched() -> None:
    node = NodeSimulation(16)
    load, _ = in_the_middle(node)
    node.restart_agent()
    node.settle()
    assert sources(node, load) == (8, 0, 0)


def test_chunks_evicted_before_the_restart_count() -> None:
    node = NodeSimulation(3)
    load, _ = in_the_middle(node)
    node.restart_agent()
    node.settle()
    assert sources(node, load) == (8, 0, 0)


def test_chunks_cached_before_the_load_stay_cached_on_restart() -> None:
    node = NodeSimulation(16)
    first, _ = in_the_middle(node)
    node.settle()
    assert sources(node, first) == (8, 0, 0)
    node.end_load(first)
    load = node.add_load(MODEL, {0: CHUNKS})
    node.start_rank(load, 0)
    load.placements[0].exchange()
    load.placements[0].exchange()
    load.placements[0].place()
    load.placements[0].exchange()
    node.restart_agent()
    node.settle()
    assert sources(node, load) == (0, 8, 0)


def test_chunks_of_ranks_done_before_a_restart_are_unknown() -> None:
    node = NodeSimulation(16)
    load, (placement,) = in_the_middle(node)
    while not load.done:
        node.take_turn(placement)
    node.restart_agent()
    node.settle()
    assert sources(node, load) == (0, 0, 8)


def test_chunks_of_ranks_that_died_with_the_agent_are_unknown() -> None:
    node = NodeSimulation(16)
    load, (placement,) = in_the_middle(node)
    held = len(placement.state.sources)
    node.kill(placement)
    node.restart_agent()
    node.give_up_rank(load, 0)
    node.settle()
    store, cached, unknown = sources(node, load)
    assert (store + unknown, cached) == (8, 0)
    assert 0 < unknown <= held


def test_a_chunk_received_after_its_lease_counts_once() -> None:
    """A warm rank places what it fetched, and no other rank fetches that chunk again."""
    node = NodeSimulation(16)
    load, (placement,) = in_the_middle(node)
    while not placement.leases:
        node.take_turn(placement)
    placement.begin_write()
    node.time_passes(DEADLINE_S + 1)
    placement.end_write(at_once=True)
    node.settle()
    assert sources(node, load) == (8, 0, 0)


def test_a_lost_message_is_counted_by_the_next_hello() -> None:
    node = NodeSimulation(16)
    load, (placement,) = in_the_middle(node)
    while not placement.leases:
        node.take_turn(placement)
    placement.begin_write()
    placement.end_write(at_once=True)
    placement.exchange("lost")
    node.settle()
    assert sources(node, load) == (8, 0, 0)
