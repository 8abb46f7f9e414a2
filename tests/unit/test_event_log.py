"""Every change of a load's life is logged once, in order, within the size limit of the log."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling import load_state as ev
from cluster.scheduling.load_state import Life, LoadState, advance
from cluster.telemetry.chunk_map import MAX_TEXT, MOST_NODES, EventLog
from cluster.telemetry.stats import NodeReport


def story(log: EventLog, *events: ev.Event, ranks: int = 2) -> Life:
    life = Life.new(ranks)
    for at, event in enumerate(events):
        after = advance(life, event)
        log.moved(float(at), life, after, {0: "here", 1: "there"})
        life = after
    return life


def kinds(log: EventLog, after: int = 0) -> list[tuple[str, int | None]]:
    return [(event.kind, event.rank) for event in log.after(after)]


def test_a_load_is_logged_from_planning_to_ready() -> None:
    log = EventLog()
    story(log, ev.Planned(), ev.Started(), ev.RankReady(0, 0), ev.RankReady(1, 0))
    assert kinds(log) == [("state", None), ("state", None), ("rank_ready", 0), ("rank_ready", 1), ("state", None)]
    assert [event.message for event in log.after(0) if event.kind == "state"] == [
        "planning -> starting",
        "starting -> loading",
        "loading -> ready",
    ]
    assert [event.host for event in log.after(0) if event.kind == "rank_ready"] == ["here", "there"]


def test_a_lost_rank_and_its_next_worker_are_two_events() -> None:
    log = EventLog()
    story(log, ev.Planned(), ev.Started(), ev.RankLost(1, 0), ev.RankReplaced(1, 1), ev.RankReady(1, 1))
    assert kinds(log)[2:] == [("rank_lost", 1), ("rank_replaced", 1), ("rank_ready", 1)]


def test_moved_ranks_of_a_lost_node_are_logged() -> None:
    log = EventLog()
    life = story(log, ev.Planned(), ev.Started(), ev.Replanned((0,), attempt=2), ev.RankReplaced(0, 1, attempt=2))
    assert kinds(log)[2:] == [("moved", None), ("rank_lost", 0), ("rank_replaced", 0)]
    assert life.attempt == 2


def test_an_error_is_logged_with_the_state() -> None:
    log = EventLog()
    story(log, ev.Failed("no such bucket\x1b[31m"))
    (event,) = log.after(0)
    assert event.message == "planning -> failed: no such bucket\\x1b[31m"
    assert event.details == {"state": "failed"}


def test_late_or_repeated_events_are_not_logged() -> None:
    log = EventLog()
    story(log, ev.Planned(), ev.Planned(), ev.Started(), ev.RankReady(0, 0), ev.RankReady(0, 0))
    assert kinds(log) == [("state", None), ("state", None), ("rank_ready", 0)]


def test_a_repeated_note_is_not_logged() -> None:
    log = EventLog()
    for message in ("waiting for slots", "waiting for slots", "", "waiting for slots", ""):
        log.note(1.0, message)
    assert [event.message for event in log.after(0)] == ["waiting for slots", "waiting for slots"]


def node_report(host: str, **fields: Any) -> NodeReport:
    return NodeReport(host, host, 1, 10, 1, fields.pop("store_bytes", 0), 0, 0, 0, 0, **fields)


def test_the_sources_of_a_load_are_logged_for_all_and_for_each_node() -> None:
    log = EventLog()
    senders = {f"10.0.0.{number}": number * 10**6 for number in range(1, 7)}
    nodes = [
        node_report("gpu-0", store_bytes=2 * 10**9, direct_bytes=10**9, sent_bytes=3 * 10**9),
        node_report("gpu-1", peer_bytes=21 * 10**6, peer_bytes_from=senders),
    ]
    log.sources(1.0, nodes, {"10.0.0.6": "gpu-0", "10.0.0.5": "gpu-0"})
    total, first, second = log.after(0)
    assert total.message == "all nodes: 2.00 GB from the store, 21.0 MB from other nodes"
    assert total.details["bytes_by_source"]["peer"] == 21 * 10**6
    assert first.message == "gpu-0: 2.00 GB from the store; sent 3.00 GB to other nodes"
    assert first.details["bytes_by_source"] == nodes[0].bytes_by_source
    assert second.message == (
        "gpu-1: 21.0 MB from other nodes "
        "(gpu-0 11.0 MB, 10.0.0.4 4.00 MB, 10.0.0.3 3.00 MB, 10.0.0.2 2.00 MB and 1 more)"
    )
    assert second.details["peer_bytes_from"] == {
        "gpu-0": 11 * 10**6, "10.0.0.4": 4 * 10**6, "10.0.0.3": 3 * 10**6, "10.0.0.2": 2 * 10**6, "10.0.0.1": 10**6
    }  # fmt: skip


@pytest.mark.parametrize(("nodes", "events"), [(1, 1), (2, 3), (MOST_NODES, MOST_NODES + 1), (MOST_NODES + 1, 1)])
def test_sources_of_many_nodes_do_not_fill_the_log(nodes: int, events: int) -> None:
    log = EventLog()
    log.sources(1.0, [node_report(f"gpu-{number}", store_bytes=1) for number in range(nodes)], {})
    assert len(log.after(0)) == events


@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 80))
def test_readers_get_the_newest_events_with_their_numbers(most: int, count: int, after: int) -> None:
    log = EventLog(most)
    for number in range(count):
        log.add(float(number), "note", "x" * 2 * MAX_TEXT)
    events = log.after(after)
    assert [event.number for event in events] == list(range(max(after, count - most) + 1, count + 1))
    assert all(len(event.message) == MAX_TEXT for event in events)


def test_states_are_named_as_in_the_table() -> None:
    log = EventLog()
    story(log, ev.Planned(), ev.ResourcesMissing())
    assert [event.details["state"] for event in log.after(0)] == [LoadState.STARTING.value, LoadState.WAITING.value]
