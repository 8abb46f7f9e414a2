"""The coordinator records memory that loads were promised and have not taken yet."""

from __future__ import annotations

from dataclasses import replace

from actors.coordination.fit import claims_of, new_workers
from actors.coordination.jobs import SavedLoad
from actors.coordination.model_changes import SavedUpdate
from actors.coordination.model_record import ModelRecord, Placement
from cluster.fit.needs import WORKER_BYTES
from cluster.layouts.mesh import Layout
from cluster.planning.packed_plan import PackedPlan, RankFacts
from cluster.request import LoadRequest, StoreAccess
from cluster.scheduling import load_state
from cluster.scheduling.holders import Holders
from cluster.scheduling.topology import NodeInfo
from cluster.scheduling.update_state import UpdateLife
from cluster.telemetry.report import RankReport, StageTimes
from storage.host.memory import MemoryPool
from storage.store_ref import StoreRef

REQUEST = LoadRequest(
    "s3://b/m", StoreAccess(StoreRef("file", "", "/m")), None, Layout(1, 2), "cpu", None, False, "me", 0.0
)


def model(*, up: bool = True) -> ModelRecord:
    record = ModelRecord("m", REQUEST, load_state.Life.new(2), Holders())
    record.placements = {rank: Placement(rank, f"n{rank}", "h", None, is_up=up) for rank in range(2)}
    nodes = [NodeInfo(f"n{i}", "h", pools=(MemoryPool("host", 1, 1),), kept_bytes=10 * i) for i in range(2)]
    record.promise({0: 100, 1: 100}, nodes)
    return record


def claimed(record: ModelRecord) -> dict[str, int]:
    return {claim.node_id: claim.size_bytes for claim in claims_of([record], model())}


def test_a_promise_shrinks_with_what_is_placed() -> None:
    record = model()
    assert claimed(record) == {"n0": 100, "n1": 90}  # workers that were taken over had kept 10
    assert {claim.pool_ids for claim in claims_of([record], model())} == {("host",)}
    record.placements[0].placed_bytes, record.placements[1].placed_bytes = 60, 5
    assert claimed(record) == {"n0": 40, "n1": 90}
    record.placements[0].placed_bytes = 100
    assert claimed(record) == {"n1": 90}
    record.placements[0].placed_bytes = 0  # its worker was lost, and a new one takes it all again
    assert claimed(record) == {"n0": 100, "n1": 90}
    assert claims_of([record], record) == []


def test_an_update_promises_what_it_has_not_staged() -> None:
    record, life = model(), UpdateLife.new(2, streaming=False)
    record.host_bytes = {}
    record.changes.begin(SavedUpdate("u", REQUEST, "r1", "r2", "", streaming=False), life, lambda beat: None)
    record.changes.promise({0: 110, 1: 110}, (RankFacts(90, 90, 360, 20),) * 2)
    assert claimed(record) == {"n0": 110, "n1": 110}
    record.changes.has_read(0, 180)
    assert claimed(record) == {"n0": 65, "n1": 110}
    record.changes.move(life.staged(0))
    assert claimed(record) == {"n1": 110}
    record.changes.forget()
    assert claimed(record) == {}


def test_a_stream_promises_what_it_converts() -> None:
    record = model()
    record.host_bytes = {}
    streaming = SavedUpdate("u", REQUEST, "r1", "r2", "", streaming=True)
    record.changes.begin(streaming, UpdateLife.new(2, streaming=True), lambda beat: None)
    record.changes.promise({0: 20}, (RankFacts(90, 90, 360, 20),) * 2)
    record.changes.has_read(0, 360)
    assert claimed(record) == {"n0": 20}


def test_converted_tensors_take_less_than_their_placed_bytes() -> None:
    record = model()
    facts = RankFacts(size_bytes=90, device_bytes=90, read_bytes=360, staging_bytes=10)
    record.plan = PackedPlan("r", "blake3", 720, (facts, facts), b"")
    record.placements[0].placed_bytes = 180
    assert claimed(record)["n0"] == 55  # half of the 90 is there
    record.placements[0].placed_bytes = 360
    assert claimed(record)["n0"] == 10  # as much as the last tensor may need, until the rank is ready


def test_a_rank_that_is_removed_is_in_no_plan_any_more() -> None:
    record = model()
    record.plan = PackedPlan("r", "blake3", 720, (RankFacts(90, 90, 90, 10),), b"")
    record.placements[1].placed_bytes = 60
    assert claimed(record) == {"n0": 100, "n1": 40}


def test_placed_bytes_may_be_on_other_devices_of_the_rank() -> None:
    record = model()
    record.host_bytes = {0: 40, 1: 40}
    facts = RankFacts(100, 100, 100, 0, ((0, 60), ("cpu", 40)))
    record.plan = PackedPlan("r", "blake3", 200, (facts, facts), b"")
    for placed_bytes, left_bytes in ((30, 40), (60, 40), (80, 20)):
        record.placements[0].placed_bytes = placed_bytes
        assert claimed(record)["n0"] == left_bytes
    record.placements[0].placed_bytes = 100
    assert "n0" not in claimed(record)


def test_processes_to_be_started_are_promised_too() -> None:
    assert claimed(model(up=False)) == {"n0": 100 + WORKER_BYTES, "n1": 90 + WORKER_BYTES}
    assert new_workers(model(up=False).placements) == {0, 1}
    assert new_workers(model().placements) == set()


def test_models_that_are_ready_or_over_take_nothing_more() -> None:
    record = model()
    for placement in record.placements.values():
        placement.report = RankReport(placement.rank, "n", "h", 1, "cpu", 0, 100, 100, StageTimes(), 1, 0.5, 1.0)
    assert claimed(record) == {}
    record = model()
    record.life = load_state.advance(record.life, load_state.Failed("so", attempt=record.life.attempt))
    assert claimed(record) == {}


def test_a_restarted_coordinator_knows_promised_memory() -> None:
    again = SavedLoad.unpack(SavedLoad.of(model()).pack()).restore("m", 0.0)
    assert claimed(again) == claimed(replace(model(up=False), kept_bytes={}))
