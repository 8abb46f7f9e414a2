"""A node's report says of every needed chunk where it came from, or that this is not known."""

from __future__ import annotations

from cluster.telemetry.stats import NodeReport
from tests.support.node_simulation import DEADLINE_S, NodeSimulation, SimLoad, SimModel, SimRank, check_sources

CHUNKS = range(8)
MODEL = SimModel(tuple(CHUNKS))


def in_the_middle(node: NodeSimulation, ranks: int = 1) -> tuple[SimLoad, list[SimRank]]:
    """A load of which every rank has placed three chunks, at least."""
    load = node.add_load(MODEL, {rank: CHUNKS for rank in range(ranks)})
    for rank in load.needs:
        node.start_rank(load, rank)
    placements = [load.placements[rank] for rank in load.needs]
    while min(len(placement.state.placed) for placement in placements) < 3:
        for placement in placements:
            node.take_turn(placement)
    return load, placements


def sources(node: NodeSimulation, load: SimLoad) -> tuple[int, int, int]:
    """Chunks from the store, from the arena, and from who knows where."""
    report: NodeReport = node.ledger.report(load.load_id, "node", "host")
    check_sources(report)
    return report.store_chunks, report.cached_chunks, report.unknown_chunks


def test_a_restarted_agent_learns_what_this_load_fetched() -> None:
    node = NodeSimulation(16)
    load, _ = in_the_middle(node)
    node.restart_agent()
    node.settle()
    assert sources(node, load) == (8, 0, 0)


def test_what_was_evicted_before_the_restart_counts() -> None:
    node = NodeSimulation(3)
    load, _ = in_the_middle(node)
    node.restart_agent()
    node.settle()
    assert sources(node, load) == (8, 0, 0)


def test_what_the_arena_had_before_the_load_is_cached_after_a_restart_too() -> None:
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


def test_what_a_rank_fetched_that_had_all_before_the_restart_is_not_known() -> None:
    node = NodeSimulation(16)
    load, (placement,) = in_the_middle(node)
    while not load.done:
        node.take_turn(placement)
    node.restart_agent()
    node.settle()
    assert sources(node, load) == (0, 0, 8)


def test_what_a_rank_fetched_that_died_with_the_agent_is_not_known() -> None:
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


def test_a_chunk_that_came_after_its_lease_had_ended_counts_once() -> None:
    """A rank places what it fetched while it is warm: nobody fetches that again."""
    node = NodeSimulation(16)
    load, (placement,) = in_the_middle(node)
    while not placement.leases:
        node.take_turn(placement)
    placement.begin_write()
    node.time_passes(DEADLINE_S + 1)
    placement.end_write(at_once=True)
    node.settle()
    assert sources(node, load) == (8, 0, 0)


def test_a_message_that_was_lost_counts_by_the_next_hello() -> None:
    node = NodeSimulation(16)
    load, (placement,) = in_the_middle(node)
    while not placement.leases:
        node.take_turn(placement)
    placement.begin_write()
    placement.end_write(at_once=True)
    placement.exchange("lost")
    node.settle()
    assert sources(node, load) == (8, 0, 0)
