"""Plans that are worked out from the cut model: the short ways give what the long way gives."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.layouts.rules import parse_rules
from cluster.planning.cut_model import CutModel
from cluster.planning.make_plan import build_load_plan, needed_chunks
from cluster.planning.packed_plan import KEPT_PLANS, pack_shared, plan_rank, rank_chunks, rank_facts, unpack_shared
from cluster.planning.plan import LoadPlan
from cluster.planning.read_items import expand_read_items, find_patterns, source_patterns
from tests.support.plan_oracle import check_plan
from tests.support.planned_models import as_bf16, llama_shapes, random_arrays, store_arrays

CONFIG = ModelConfig(model_type="llama", num_attention_heads=4, num_key_value_heads=2, hidden_size=16)
LAYOUTS = [Layout(), Layout(4, 1, 3), Layout(2, 3, 2), Layout(1, 5), Layout(4, 7)]


@pytest.fixture(params=LAYOUTS, ids=str)
def plan(request: pytest.FixtureRequest) -> LoadPlan:
    shapes = llama_shapes(3, 16, 24, 4, 2, 40) | {"model.rotary_emb.inv_freq": (4, 0), "norm.weight": ()}
    model = store_arrays(as_bf16(random_arrays(shapes)), shards=3, chunk_bytes=333)
    return build_load_plan(model.index, request.param, None, CONFIG)


def test_patterns_of_kinds_are_those_of_slices(plan: LoadPlan) -> None:
    for rank in plan.ranks:
        long, short = find_patterns(rank.slices), source_patterns(plan.cut, rank.coords)
        for name in ("shard", "start", "run", "count", "src_stride"):
            assert getattr(long, name).tolist() == getattr(short, name).tolist(), name


def test_a_box_cut_in_three_dimensions_has_several_patterns() -> None:
    array = np.arange(4 * 6 * 5, dtype=np.uint16).reshape(4, 6, 5)
    model = store_arrays({"w": ("BF16", array), "v": ("BF16", array)}, chunk_bytes=17)
    plan = build_load_plan(model.index, Layout(2, 2), parse_rules({"*": "row"}))
    assert check_plan(plan) == []
    long, short = find_patterns(plan.ranks[3].slices), source_patterns(plan.cut, plan.ranks[3].coords)
    assert long.start.tolist() == short.start.tolist()


def test_chunks_facts_and_wanted_bytes_are_those_of_the_plans(plan: LoadPlan) -> None:
    facts = rank_facts(plan.cut)
    assert len(facts) == len(plan.ranks)
    for rank, fact in zip(plan.ranks, facts, strict=True):
        assert (fact.size_bytes, fact.device_bytes) == (rank.size_bytes, rank.device_bytes)
        expected = expand_read_items(rank.slices, plan.chunks).chunk_ids().tolist()
        assert rank.chunk_ids.tolist() == rank_chunks(plan.cut, plan.chunks, rank.coords).tolist() == expected
    for ranks in (range(1), range(len(plan.ranks)), range(0, len(plan.ranks), 2)):
        here = [plan.ranks[rank] for rank in ranks]
        assert set(needed_chunks(plan, ranks).tolist()) == {chunk for rank in here for chunk in rank.chunk_ids.tolist()}
        boxes = {
            (piece.name, piece.offsets): piece.size_bytes for rank in here for piece in rank.slices if piece.size_bytes
        }
        assert plan.cut.wanted_bytes(ranks) == sum(boxes.values())


def test_unpacked_tables_give_the_same_plan(plan: LoadPlan) -> None:
    tables = unpack_shared(pack_shared(plan))
    last = len(plan.ranks) - 1
    assert tables.rank_plan(last).slices == plan.ranks[last].slices
    assert tables.rank_plan(last).segment_bytes == plan.ranks[last].segment_bytes
    assert tables.chunk_ids(last).tolist() == plan.ranks[last].chunk_ids.tolist()
    assert tables.wanted_bytes([last]) == plan.cut.wanted_bytes([last]) == plan.ranks[last].size_bytes


def test_plans_are_a_sequence(plan: LoadPlan) -> None:
    assert [rank.rank for rank in plan.ranks] == list(range(len(plan.ranks)))
    assert plan.ranks[-1].rank == len(plan.ranks) - 1
    assert [rank.rank for rank in plan.ranks[:2]] == list(range(len(plan.ranks)))[:2]
    with pytest.raises(IndexError):
        plan.ranks[len(plan.ranks)]
    assert plan.ranks[0].slices == plan_rank(plan.cut, plan.chunks, 0).slices


def test_few_plans_are_kept_however_many_ranks_there_are() -> None:
    model = store_arrays(as_bf16(random_arrays({"a": (64, 4)})))
    plan = build_load_plan(model.index, Layout(1, 64))
    again = list(plan.ranks)
    assert plan.ranks[63] is again[63]  # one of the last
    assert plan.ranks[64 - KEPT_PLANS - 1] is not again[64 - KEPT_PLANS - 1]


def test_tensors_that_are_alike_are_one_kind() -> None:
    shapes = {f"layers.{layer}.{name}": (8, 6) for layer in range(50) for name in ("up", "gate")}
    model = store_arrays(as_bf16(random_arrays(shapes)))
    cut: CutModel = build_load_plan(model.index, Layout(2), parse_rules({"**": "column"})).cut
    assert (len(cut), len(cut.kinds), cut.kind_counts(cut.layout.rank_coords(0))) == (100, 1, [100])


def test_an_index_error_in_a_plan_does_not_end_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    model = store_arrays(as_bf16(random_arrays({"a": (64, 4)})))
    plan = build_load_plan(model.index, Layout(1, 4))

    def fail(*_: object) -> None:
        raise IndexError("out of a shape")

    monkeypatch.setattr("cluster.planning.packed_plan.plan_rank", fail)
    with pytest.raises(IndexError, match="out of a shape"):
        list(plan.ranks)
