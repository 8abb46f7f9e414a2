"""Boxes of ranks: the laws of a layout, and every reason that a tensor cannot be cut."""

from __future__ import annotations

import math
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError, LayoutError
from cluster.layouts.layout import decide_layout
from cluster.layouts.mesh import Layout, RankCoords
from cluster.layouts.model_config import ModelConfig
from cluster.layouts.region import Region
from cluster.layouts.rules import FAMILIES, WHOLE, Block, Rule, Rules, TensorCut, parse_rules, region_of
from storage.checkpoints.model_index import Tensor

CONFIG = ModelConfig(model_type="llama", num_attention_heads=8, num_key_value_heads=2, hidden_size=32)


def tensor(name: str, shape: tuple[int, ...], bits: int = 16, dtype: str = "BF16") -> Tensor:
    return Tensor(name, dtype, shape, 0, 100, 100 + math.prod(shape) * bits // 8)


def test_ranks_are_numbered_with_tp_fastest() -> None:
    layout = Layout(2, 3, 2)
    coords = [layout.rank_coords(rank) for rank in range(layout.ranks)]
    assert coords[:3] == [RankCoords(0, 0, 0), RankCoords(0, 0, 1, 0, 0, 1), RankCoords(0, 1, 0)]
    staged = Layout(2, 1, 2, 3)
    assert [staged.rank_coords(rank).stage for rank in range(12)] == [0, 0, 1, 1, 2, 2] * 2
    assert [staged.rank_coords(rank).data for rank in range(12)] == [0] * 6 + [1] * 6
    assert [((c.data * 3) + c.fsdp) * 2 + c.tensor for c in coords] == list(range(12))
    for rank in (-1, 12):
        with pytest.raises(ConfigError):
            layout.rank_coords(rank)


@pytest.mark.parametrize("size", [0, -1, 1 << 17, 2.0, "2", True, None])
def test_impossible_sizes_are_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="fsdp_size"):
        Layout(fsdp_size=size)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Layout(1 << 10, 1 << 10)


def decide_cuts(
    tensors: list[Tensor], layout: Layout, rules: Rules, config: ModelConfig | None = None
) -> list[TensorCut]:
    return [placed.cut for placed in decide_layout(tensors, layout, rules, config)]


def region(one: Tensor, coords: RankCoords, layout: Layout, rules: Rules, config: ModelConfig | None = None) -> Region:
    (cut,) = decide_cuts([one], layout, rules, config)
    return region_of(one.shape, cut, coords, layout)


CUT_DIM = {Rule.COLUMN: 0, Rule.ROW: 1, Rule.VOCABULARY: 0, Rule.GATE_UP: 0, Rule.EQUAL_HEADS: 0}


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Rule]:
    layout = Layout(draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 2)))
    rule = draw(st.sampled_from([*CUT_DIM, Rule.REPLICATE]))
    dims = draw(st.integers({Rule.ROW: 2, Rule.REPLICATE: 0}.get(rule, 1), 3))
    shape = [draw(st.integers(0, 7)) for _ in range(dims)]
    if rule in CUT_DIM and rule is not Rule.VOCABULARY:
        shape[CUT_DIM[rule]] *= layout.tensor_parallel_size * {Rule.GATE_UP: 2, Rule.EQUAL_HEADS: 3}.get(rule, 1)
    return tuple(shape), layout, rule


@given(cuts())
def test_regions_cover_each_element_as_the_rule_says(
    case: tuple[tuple[int, ...], Layout, Rule],
) -> None:
    shape, layout, rule = case
    one = tensor("t", shape)
    holders = np.zeros(shape, int)
    for rank in range(layout.ranks):
        held = region(one, layout.rank_coords(rank), layout, Rules((("t", rule),)))
        for (offsets, sizes), _ in held.boxes():
            assert all(o >= 0 and o + s <= full for o, s, full in zip(offsets, sizes, shape, strict=True))
            holders[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    copies = layout.data_parallel_size
    if rule is Rule.REPLICATE:
        copies *= layout.tensor_parallel_size
    if not shape:  # 0-d tensors are on every rank
        copies = layout.ranks
    assert (holders == copies).all()


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_equal_those_of_torch_chunk(rows: int, ranks: int) -> None:
    layout = Layout(fsdp_size=ranks)
    regions = [region_of((rows, 3), WHOLE, RankCoords(0, rank, 0), layout) for rank in range(ranks)]
    share = -(-rows // ranks)
    filled = [held.sizes[0] for held in regions if held.sizes[0]]
    assert filled == [min(share, rows - start) for start in range(0, rows, share or 1)]
    assert all(held.sizes == (0, 3) for held in regions[len(filled) :])
    assert [held.offsets[0] for held in regions] == [min(rank * share, rows) for rank in range(ranks)]


def test_the_example_of_the_docstring_holds() -> None:
    layout = Layout(2, 2)
    rules = Rules((("w", Rule.ROW),))
    held = region(tensor("w", (4, 6)), layout.rank_coords(3), layout, rules)
    assert (held.offsets, held.sizes) == ((2, 3), (2, 3))


@pytest.mark.parametrize(
    ("kv_heads", "tp_size", "heads_of_rank"),
    [
        (2, 4, [[0], [0], [1], [1]]),
        (4, 4, [[0], [1], [2], [3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (1, 2, [[0], [0]]),
    ],
)
def test_kv_heads_are_shared_by_neighbours(kv_heads: int, tp_size: int, heads_of_rank: list[list[int]]) -> None:
    config = ModelConfig(model_type="llama", num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=4)
    layout = Layout(tp_size)
    weight = tensor("model.layers.0.self_attn.k_proj.weight", (kv_heads * 4, 32))
    for rank, heads in enumerate(heads_of_rank):
        held = region(weight, layout.rank_coords(rank), layout, FAMILIES["llama"], config)
        rows = [*range(held.offsets[0], held.offsets[0] + held.sizes[0])]
        assert rows == [head * 4 + row for head in heads for row in range(4)]
        assert held.ranges[1] == ((0, 32),)


@pytest.mark.parametrize(("kv_heads", "tp_size"), [(2, 4), (4, 4), (4, 2), (8, 2), (1, 8)])
def test_a_fused_qkv_is_cut_like_its_parts(kv_heads: int, tp_size: int) -> None:
    config = ModelConfig(model_type="x", num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=4)
    layout = Layout(tp_size, 3)
    rules = parse_rules({"qkv": "qkv", "q": "heads", "*": "kv_heads"})
    parts = {"q": 32, "k": kv_heads * 4, "v": kv_heads * 4}
    starts = {"q": 0, "k": 32, "v": 32 + kv_heads * 4}
    for rank in range(tp_size):
        coords = RankCoords(0, 0, rank)
        expected = []
        for name, rows in parts.items():
            held = region(tensor(name, (rows, 2)), coords, Layout(tp_size), rules, config)
            expected += [starts[name] + row for row in range(held.offsets[0], held.offsets[0] + held.sizes[0])]
        fused = region(tensor("qkv", (sum(parts.values()), 2)), coords, Layout(tp_size), rules, config)
        assert rows_of(fused) == expected
        shares = [
            rows_of(region(tensor("qkv", (sum(parts.values()), 2)), RankCoords(0, part, rank), layout, rules, config))
            for part in range(3)
        ]
        size = -(-len(expected) // 3)
        assert shares == [expected[part * size : (part + 1) * size] for part in range(3)]


def rows_of(held: Region) -> list[int]:
    return [row for start, end in held.ranges[0] for row in range(start, end)]


@given(st.integers(0, 50), st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 8, 64]))
def test_the_vocabulary_is_padded_at_its_end(rows: int, tp_size: int, fsdp_size: int, multiple: int) -> None:
    layout = Layout(tp_size, fsdp_size, vocabulary_multiple=multiple)
    rules = parse_rules({"w": "vocabulary"})
    (cut,) = decide_cuts([tensor("w", (rows, 3))], layout, rules)
    found: list[int] = []
    whole_sizes = set()
    for tensor_rank in range(tp_size):
        held = [region_of((rows, 3), cut, RankCoords(0, part, tensor_rank), layout) for part in range(fsdp_size)]
        whole_sizes.add(sum(one.sizes[0] for one in held))
        for one in held:
            assert one.sizes[1] == 3
            found += [*rows_of(one), *[-1] * one.padding]
    assert len(whole_sizes) == 1  # the same on every rank
    assert found == [*range(rows), *[-1] * (len(found) - rows)]
    assert len(found) % math.lcm(multiple, tp_size) == 0
    assert len(found) - rows < math.lcm(multiple, tp_size)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"expert_parallel_size": 8}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"expert_parallel_size": 4}, [0, 1, 2, 3, 0, 1, 2, 3]),
        ({"expert_parallel_size": 2}, [0, 0, 1, 1, 0, 0, 1, 1]),
        ({"expert_parallel_size": 2, "expert_tensor_parallel_size": 4}, [0, 0, 0, 0, 1, 1, 1, 1]),
        ({"expert_parallel_size": 1}, [0] * 8),
    ],
)
def test_experts_spread_over_tensor_and_data_ranks(sizes: dict[str, int], expected: list[int]) -> None:
    layout = Layout(4, 1, 2, **sizes)
    coords = [layout.rank_coords(rank) for rank in range(8)]
    assert [one.expert for one in coords] == expected
    held = {(one.expert, one.expert_tensor) for one in coords}
    assert len(held) == layout.expert_parallel_size * layout.expert_cuts
    for one in coords:  # ranks at the same place hold the same slices of everything
        place = layout.place(one)
        assert (place.tensor, place.expert, place.expert_tensor) == (one.tensor, one.expert, one.expert_tensor)


def test_any_model_is_cut_without_rules_when_tp_is_one() -> None:
    odd = [tensor("x", (5, 3)), tensor("y", ()), tensor("z", (0, 4)), tensor("q", (3,), 8, "F8_E4M3")]
    assert decide_cuts(odd, Layout(1, 3, 2), Rules()) == [WHOLE] * 4


def refuse(
    tensors: list[Tensor],
    rules: Rules,
    tp_size: int = 2,
    config: ModelConfig | None = CONFIG,
    fsdp_size: int = 1,
) -> str:
    with pytest.raises(LayoutError) as caught:
        decide_cuts(tensors, Layout(tp_size, fsdp_size), rules, config)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    return str(caught.value)


def test_tensors_without_a_rule_are_all_listed() -> None:
    unknown = [tensor(f"model.layers.{n}.mlp.gate.weight", (8, 8)) for n in range(3)]
    text = refuse([*unknown, tensor("model.norm.weight", (8,))], FAMILIES["llama"])
    assert "3 tensors are named by no rule" in text
    assert "'model.layers.*.mlp.gate.weight' (3)" in text
    assert "model.norm" not in text
    assert "layout_rules={" in text
    many = refuse([tensor(f"t{n}", (2,)) for n in range(500)], Rules(), config=None)
    assert "500 tensors" in many
    assert all(f"'t{n}'" in many for n in range(500))
    assert "llama, mistral, qwen2" in many
    hostile = refuse([tensor(f"{n}x" * 500, (2,)) for n in range(500)], Rules(), config=None)
    assert re.search(r" and \d+ more", hostile)
    assert len(hostile) < 10_000
    assert len(refuse([tensor("x" * 100_000, (2,))], Rules())) < 1000


def test_both_kinds_of_errors_are_raised_together() -> None:
    text = refuse(
        [tensor("a", (3,)), tensor("b", (5, 4)), tensor("c", (2, 5))],
        parse_rules({"b": "column", "c": "row"}),
    )
    assert "'a'" in text
    assert "'b': dim 0 of size 5 is not divisible by tensor_parallel_size=2" in text
    assert "'c': dim 1 of size 5" in text


@pytest.mark.parametrize(
    ("name", "shape", "tp_size", "says"),
    [
        (
            "model.layers.0.mlp.up_proj.weight",
            (33, 32),
            2,
            "dim 0 of size 33 is not divisible by tensor_parallel_size=2",
        ),
        ("model.layers.0.mlp.down_proj.weight", (32,), 2, r"cuts dim 1, but the shape is (32,)"),
        (
            "model.layers.0.self_attn.q_proj.weight",
            (32, 32),
            3,
            "8 heads (num_attention_heads) cannot be shared",
        ),
        (
            "model.layers.0.self_attn.k_proj.weight",
            (8, 32),
            3,
            "2 heads (num_key_value_heads) cannot be shared",
        ),
        (
            "model.layers.0.self_attn.k_proj.weight",
            (32, 32),
            2,
            "dim 0 has 32 rows, but config.json says 2 heads of 4",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(name: str, shape: tuple[int, ...], tp_size: int, says: str) -> None:
    assert says in refuse([tensor(name, shape)], FAMILIES["llama"], tp_size)


@pytest.mark.parametrize("config", [None, ModelConfig(model_type="llama")])
def test_heads_cannot_be_cut_without_the_config(config: ModelConfig | None) -> None:
    text = refuse([tensor("k", (8, 8))], parse_rules({"k": "kv_heads"}), config=config)
    assert "needs num_key_value_heads from config.json" in text


def test_heads_of_unknown_size_must_divide_the_rows() -> None:
    config = ModelConfig(num_attention_heads=3)
    rules = parse_rules({"q": "heads"})
    assert decide_cuts([tensor("q", (9, 2))], Layout(3), rules, config) == [TensorCut(0, (Block(0, 9, 3, 3),))]
    assert "10 rows" in refuse([tensor("q", (10, 2))], rules, 3, config)


def test_half_bytes_are_not_cut() -> None:
    packed = tensor("w", (4, 6), 4, "F4")
    assert decide_cuts([packed], Layout(1, 4), Rules()) == [WHOLE]
    assert decide_cuts([packed], Layout(3), parse_rules({"w": "row"})) == [TensorCut(1, (Block(0, 6, 3, 2),))]
    assert "cut inside a byte" in refuse([packed], parse_rules({"w": "row"}))
    six = tensor("w", (4, 2), 6, "F6_E2M3")
    assert decide_cuts([six], Layout(1, 2), Rules()) == [WHOLE]
    assert "cut inside a byte" in refuse([six], Rules(), 1, fsdp_size=4)


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    assert "do not fit the shape" in refuse([Tensor("w", "BF16", (3, 5), 0, 0, 31)], Rules(), 1)
