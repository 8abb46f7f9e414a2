"""Status shows each rank's node, state, bytes and worker memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ray.util.placement_group import PlacementGroup

from actors.coordination.model_record import ModelRecord, Placement
from cluster.layouts.mesh import Layout
from cluster.planning.packed_plan import PackedPlan, RankFacts
from cluster.request import LoadRequest, StoreAccess
from cluster.scheduling import load_state
from cluster.scheduling import load_state as ev
from cluster.scheduling.holders import Holders
from cluster.telemetry.report import RankReport, StageTimes
from storage.store_ref import Credentials, StoreRef

STORE = StoreAccess(StoreRef("s3", "b", "m"), Credentials("a-key", "the-secret"))
REQUEST = LoadRequest("s3://b/m", STORE, None, Layout(2), "cuda", None, False, "me", 0.0)
PLAN = PackedPlan("r", "blake3", 300, (RankFacts(90, 100, 100), RankFacts(190, 200, 200)), b"")
REPORT = RankReport(1, "n1", "there", 7, "cuda:3", 0, 190, 200, StageTimes(), 5, 0.1, 0.2)


def record_after(*events: Any, **placement: Any) -> ModelRecord:
    """Rank 0 sits as `placement` says, rank 1 has everything."""
    record = ModelRecord("m", REQUEST, load_state.Life.new(2), Holders(), plan=PLAN, total_bytes=300)
    for event in events:
        record.life = load_state.advance(record.life, event)
    record.placements = {
        0: Placement(0, "n0", "here", None, **placement),
        1: Placement(
            1, "n1", "there", None, worker=object(), started=True, placed_bytes=170, own_bytes=9, report=REPORT
        ),
    }
    return record


BEGUN = (ev.Planned(), ev.Started(), ev.RankReady(1, 0))


@pytest.mark.parametrize(
    ("placement", "state"),
    [
        ({}, "waiting"),
        ({"worker": object()}, "starting"),
        ({"worker": object(), "started": True}, "loading"),
    ],
)
def test_states_of_a_rank_on_its_way(placement: dict[str, Any], state: str) -> None:
    ranks = record_after(*BEGUN, **placement, placed_bytes=40, own_bytes=8).status().ranks
    assert [(rank.rank, rank.host, rank.state) for rank in ranks] == [(0, "here", state), (1, "there", "ready")]
    assert [(rank.placed_bytes, rank.total_bytes, rank.own_bytes) for rank in ranks] == [(40, 100, 8), (200, 200, 9)]
    assert [rank.device for rank in ranks] == ["cuda", "cuda:3"]


def test_ranks_add_up_to_the_progress() -> None:
    status = record_after(*BEGUN, worker=object(), started=True, placed_bytes=40).status()
    assert sum(rank.placed_bytes for rank in status.ranks) == status.progress.placed_bytes
    assert sum(rank.total_bytes for rank in status.ranks) == status.progress.total_bytes


def test_a_lost_rank_has_no_memory_until_its_next_worker() -> None:
    lost = record_after(*BEGUN, ev.RankLost(0, 0), worker=object(), started=True, own_bytes=8).status().ranks[0]
    assert (lost.state, lost.own_bytes, lost.incarnation) == ("lost", 0, 0)
    events = (*BEGUN, ev.RankLost(0, 0), ev.RankReplaced(0, 1))
    again = record_after(*events, worker=object(), started=True, own_bytes=8).status().ranks[0]
    assert (again.state, again.own_bytes, again.incarnation) == ("loading", 8, 1)


def test_a_load_without_places_has_ranks_that_wait() -> None:
    record = ModelRecord("m", REQUEST, load_state.Life.new(2), Holders())
    assert [(rank.rank, rank.host, rank.state, rank.total_bytes) for rank in record.status().ranks] == [
        (0, "", "waiting", 0),
        (1, "", "waiting", 0),
    ]


def test_status_shows_the_request_without_secrets() -> None:
    record = record_after(*BEGUN)
    record.request = replace(REQUEST, placement_group=PlacementGroup.empty())
    asked = record.as_asked()
    assert asked == replace(REQUEST, store=StoreAccess(STORE.ref))
    assert "the-secret" not in repr(asked)
