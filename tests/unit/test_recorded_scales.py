"""Loads whose scales were recorded: the same bytes as without, on any number of ranks, and no more read than held."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.layouts.rules import Rules, parse_rules
from cluster.planning import make_plan
from cluster.planning.make_plan import build_load_plan, overfetch_bytes
from cluster.planning.packed_plan import rank_facts
from cluster.planning.plan import LoadPlan
from cluster.precision.recipes import Amax, Precision
from storage.checkpoints.model_index import Tensor
from storage.publishing.one_object import AmaxScan
from tests.support.plan_oracle import check_plan
from tests.support.planned_models import StoredModel, carry_out, llama_shapes, store_arrays

CONFIG = ModelConfig(model_type="llama", num_attention_heads=8, num_key_value_heads=4, head_dim=8)
SCALED = ("fp8", "fp8_tensor", "int8")
WORDS = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32, torch.float64: np.uint64}
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
EXPERTS = parse_rules({"**.experts.up": "experts_column", "**.experts.down": "experts_row", "**": "row"})


class Recorded:
    """The scales that a publish would have recorded, and the requests for them."""

    def __init__(self, model: StoredModel) -> None:
        self._model = model
        self.asked: list[dict[str, tuple[int, ...]]] = []

    def __call__(self, weights: Mapping[str, tuple[int, ...]]) -> Mapping[str, Amax]:
        self.asked.append(dict(weights))
        return {tensor.name: self._rows(tensor) for tensor in self._model.index.tensors if tensor.name in weights}

    def _rows(self, tensor: Tensor) -> Amax:
        scan = AmaxScan([tensor])
        scan.add(memoryview(self._model.files[tensor.shard].tobytes()))
        return scan.rows()[tensor.name]


def stored(weights: Mapping[str, torch.Tensor], chunk_bytes: int) -> StoredModel:
    arrays = {
        name: (NAMES[weight.dtype], weight.contiguous().view(torch.uint8).numpy().view(WORDS[weight.dtype]))
        for name, weight in weights.items()
    }
    return store_arrays(arrays, 2, chunk_bytes)


def llama(dtype: torch.dtype, seed: int, spread: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in llama_shapes(1, 64, 128, 8, 4, 50).items():
        weight = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
        weight[0] = 0.0  # a row whose scale would be nothing
        most = torch.finfo(dtype).max
        weights[name] = weight.clamp(-most, most).to(dtype)
    return weights


def carried_out(plan: LoadPlan, model: StoredModel) -> list[dict[str, bytes]]:
    """Return the bytes of each tensor, by rank."""
    return [
        {name: data.tobytes() for name, data in carry_out(plan, rank, model.files)[0].items()} for rank in plan.ranks
    ]


def plans_of(
    model: StoredModel, layout: Layout, rules: Rules | None, precision: Precision
) -> tuple[LoadPlan, LoadPlan, Recorded]:
    """(without, with, what was asked)."""
    recorded, config = Recorded(model), CONFIG if rules is None else None
    without = build_load_plan(model.index, layout, rules, config, precision)
    return without, build_load_plan(model.index, layout, rules, config, precision, None, recorded), recorded


@given(
    st.sampled_from(SCALED),
    st.sampled_from([(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 3, 1), (2, 2, 1), (2, 1, 2), (4, 5, 1)]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    st.sampled_from(["auto", "bfloat16", "float16"]),
    st.sampled_from([1e-8, 1e-3, 1.0, 3e4]),
    st.sampled_from([4099, 1 << 20]),
    st.integers(0, 1000),
)
@settings(max_examples=12, deadline=None)
def test_results_are_the_same_bytes_with_and_without(
    scheme: str,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    target: str,
    spread: float,
    chunk_bytes: int,
    seed: int,
) -> None:
    """Also where the cast overflows, or leaves nothing but subnormal numbers."""
    model = stored(llama(dtype, seed, spread), chunk_bytes)
    layout = Layout(*sizes, vocabulary_multiple=7)
    without, plan, recorded = plans_of(model, layout, None, Precision(target, scheme))
    assert check_plan(plan) == []
    assert carried_out(plan, model) == carried_out(without, model)
    for rank in plan.ranks:
        assert all(staged.source.region == staged.region for staged in rank.staged)
    before, after = rank_facts(without.cut), rank_facts(plan.cut)
    assert [fact.size_bytes for fact in after] == [fact.size_bytes for fact in before]
    assert all(new.read_bytes <= old.read_bytes for new, old in zip(after, before, strict=True))
    assert (sum(map(len, recorded.asked)) > 0) == any(
        staged.source.region != staged.region for rank in without.ranks for staged in rank.staged
    )


@given(
    st.sampled_from(SCALED),
    st.sampled_from([(2, 1, 1), (4, 1, 1), (2, 1, 2), (4, 1, 2), (2, 2, 4)]),
    st.integers(0, 100),
)
@settings(max_examples=8, deadline=None)
def test_stacked_experts(scheme: str, sizes: tuple[int, int, int], seed: int) -> None:
    """Each expert has rows, and a matrix, of its own; cut by expert, by row, or both."""
    generator = torch.Generator().manual_seed(seed)
    tensors, replicas, experts = sizes
    weights = {
        "mlp.experts.up": torch.randn(4, 24, 64, generator=generator),
        "mlp.experts.down": torch.randn(4, 10, 64, generator=generator),
        "out.weight": torch.randn(7, 64, generator=generator),
    }
    model = stored({name: weight.to(torch.bfloat16) for name, weight in weights.items()}, 1000)
    layout = Layout(tensors, 1, replicas, expert_parallel_size=experts)
    without, plan, _ = plans_of(model, layout, EXPERTS, Precision("auto", scheme, skip=()))
    assert check_plan(plan) == []
    assert carried_out(plan, model) == carried_out(without, model)
    assert rank_facts(plan.cut)[0].staging_bytes <= rank_facts(without.cut)[0].staging_bytes


def test_a_rank_of_a_row_cut_reads_its_half() -> None:
    model = stored(llama(torch.bfloat16, 1, 1.0), 1 << 11)
    down = "model.layers.0.mlp.down_proj.weight"
    for scheme, asked in (("fp8", 2), ("fp8_tensor", 7)):  # o_proj and down_proj; every matrix of the layer
        without, plan, recorded = plans_of(model, Layout(2), None, Precision("auto", scheme))
        sizes = [
            {staged.source.name: staged.source.size_bytes for staged in each.ranks[0].staged}[down]
            for each in (without, plan)
        ]
        assert sizes == [64 * 128 * 2, 64 * 64 * 2]
        assert len(recorded.asked) == 1
        assert len(recorded.asked[0]) == asked
        assert rank_facts(plan.cut)[0].read_bytes < rank_facts(without.cut)[0].read_bytes
        assert rank_facts(plan.cut)[0].staging_bytes < rank_facts(without.cut)[0].staging_bytes
        assert overfetch_bytes(plan, [0]) > overfetch_bytes(without, [0])  # of the same chunks it wants less
    assert len(plan.ranks[0].chunk_ids) < len(without.ranks[0].chunk_ids)  # columns, by the matrix: fewer chunks


@pytest.mark.parametrize("precision", [Precision(), Precision("float16"), Precision("auto", "int4")])
def test_scales_are_not_requested_where_they_save_nothing(precision: Precision) -> None:
    model = stored(llama(torch.bfloat16, 1, 1.0), 1 << 20)
    assert plans_of(model, Layout(1, 2) if precision.quantization else Layout(2), None, precision)[2].asked == []
    assert plans_of(model, Layout(1, 3), None, Precision("auto", "fp8"))[2].asked == []
    assert plans_of(model, Layout(), None, Precision("auto", "fp8_tensor"))[2].asked == []


@pytest.mark.parametrize("scheme", SCALED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_with_infinities_ignores_recorded_scales(scheme: str, value: float) -> None:
    weights = llama(torch.float32, 2, 1.0)
    down = "model.layers.0.mlp.down_proj.weight"
    weights[down][3, 120] = value
    model = stored(weights, 1 << 16)
    without, plan, recorded = plans_of(model, Layout(2), None, Precision("auto", scheme))
    assert down in recorded.asked[0]
    held = {staged.source.name: staged.source.sizes for staged in plan.ranks[0].staged}
    assert held[down] == (64, 128)
    assert held["model.layers.0.self_attn.o_proj.weight"] == (64, 32)
    assert carried_out(plan, model) == carried_out(without, model)


def test_alike_tensors_of_which_one_is_not_finite() -> None:
    """They are of one kind until then."""
    weights = {f"{number}.weight": torch.ones(8, 64) for number in range(3)}
    weights["1.weight"][0, 0] = float("nan")
    model = stored(weights, 1 << 16)
    rules = parse_rules({"**": "row"})
    without, plan, _ = plans_of(model, Layout(2), rules, Precision("bfloat16", "fp8"))
    held = {staged.source.name: staged.source.sizes for staged in plan.ranks[1].staged}
    assert held == {"0.weight": (8, 32), "1.weight": (8, 64), "2.weight": (8, 32)}
    assert check_plan(plan) == []
    assert carried_out(plan, model) == carried_out(without, model)


def test_too_many_scales_for_a_plan_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stored(llama(torch.bfloat16, 1, 1.0), 1 << 16)
    monkeypatch.setattr(make_plan, "MAX_CARRIED_BYTES", 2 * 64 * 4 - 1)
    without, plan, recorded = plans_of(model, Layout(2), None, Precision("auto", "fp8"))
    assert recorded.asked == []
    assert rank_facts(plan.cut) == rank_facts(without.cut)
    monkeypatch.setattr(make_plan, "MAX_CARRIED_BYTES", 2 * 64 * 4)
    assert plans_of(model, Layout(2), None, Precision("auto", "fp8"))[2].asked


def test_packed_scales_are_small_and_equal() -> None:
    model = stored(llama(torch.bfloat16, 1, 1.0), 1 << 16)
    without, plan, _ = plans_of(model, Layout(2), None, Precision("auto", "int8"))
    more = len(pickle.dumps(plan.cut)) - len(pickle.dumps(without.cut))
    assert more < 2 * 64 * 4 + 1000
    cut = pickle.loads(pickle.dumps(plan.cut))
    again = LoadPlan(plan.revision, plan.shards, plan.chunks, cut, plan.ranks)
    assert carried_out(again, model) == carried_out(plan, model)


def test_scales_of_tiny_rows_are_not_requested() -> None:
    model = stored({"0.weight": torch.ones(8, 28)}, 1 << 16)
    plans = plans_of(model, Layout(2), parse_rules({"**": "row"}), Precision("bfloat16", "fp8"))
    assert plans[2].asked == []
