"""The laws of a load plan, by simulation on plain arrays."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.errors import LayoutError, PlanError
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.layouts.region import Region, whole
from cluster.layouts.rules import Rules, parse_rules
from cluster.planning.make_plan import build_load_plan, needed_bytes, needed_chunks, overfetch_bytes
from cluster.planning.plan import LoadPlan, RankPlan, SliceTable, TensorSlice
from tests.support.plan_oracle import check_plan
from tests.support.planned_models import (
    StoredModel,
    as_bf16,
    carry_out,
    cut_into_chunks,
    llama_shapes,
    random_arrays,
    store_arrays,
)

DTYPES = {"U8": np.uint8, "BF16": np.uint16, "F32": np.uint32, "F64": np.uint64}


@st.composite
def models(draw: st.DrawFn) -> tuple[StoredModel, dict[str, NDArray[np.generic]], Layout, Rules]:
    """A random model, chunks that cut anywhere, a layout it can be cut by, and the rules."""
    layout = Layout(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    arrays: dict[str, tuple[str, NDArray[np.generic]]] = {}
    rules = {}
    for number in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(["", "layers.0.", "layers.1.", "层."])) + f"t{number}"
        rule = draw(st.sampled_from(["column", "row", "vocabulary", "replicate"]))
        dims = draw(st.integers({"row": 2, "replicate": 0}.get(rule, 1), 3))
        shape = [draw(st.integers(0, 6)) for _ in range(dims)]
        if rule != "replicate":
            shape[rule == "row"] *= layout.tensor_parallel_size
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        array = random.integers(0, 255, tuple(shape), np.uint8).astype(DTYPES[dtype])
        arrays[name] = (dtype, array)
        rules[name] = rule
    shards = draw(st.integers(1, 3))
    whole = store_arrays(arrays, shards)
    ends = [draw(st.lists(st.integers(1, max(size.size_bytes, 1)), max_size=15)) for size in whole.index.shards]
    model = store_arrays(arrays, shards, chunk_ends=ends)
    return model, {name: array for name, (_, array) in arrays.items()}, layout, parse_rules(rules)


@pytest.mark.slow
@given(models())
@settings(max_examples=200, deadline=None)
def test_executing_a_plan_gives_the_same_bytes_as_slicing(
    case: tuple[StoredModel, dict[str, NDArray[np.generic]], Layout, Rules],
) -> None:
    model, arrays, layout, rules = case
    plan = build_load_plan(model.index, layout, rules)
    assert check_plan(plan) == []
    again = build_load_plan(model.index, layout, rules)
    assert [pickle.dumps(rank) for rank in again.ranks] == [pickle.dumps(rank) for rank in plan.ranks]

    rebuilt = {name: np.zeros_like(array) for name, array in arrays.items()}
    seen = {name: np.zeros(array.shape, int) for name, array in arrays.items()}
    for rank in plan.ranks:
        tensors, copied = carry_out(plan, rank, model.files)
        assert tensors.keys() == arrays.keys()
        assert copied == rank.size_bytes
        assert rank.coords == layout.rank_coords(rank.rank)
        for piece in rank.slices:
            box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            expected = arrays[piece.name][box]
            assert expected.shape == piece.sizes
            assert tensors[piece.name].tobytes() == expected.tobytes()
            rebuilt[piece.name][box] = tensors[piece.name].view(expected.dtype).reshape(piece.sizes)
            seen[piece.name][box] += 1
    for name, array in arrays.items():
        assert (rebuilt[name] == array).all()
        assert len(np.unique(seen[name])) <= 1  # every element on as many ranks as every other


@given(models(), st.data())
@settings(max_examples=100, deadline=None)
def test_chunks_are_read_once_per_node_and_overfetch_is_counted(
    case: tuple[StoredModel, dict[str, NDArray[np.generic]], Layout, Rules], data: st.DataObject
) -> None:
    model, _, layout, rules = case
    plan = build_load_plan(model.index, layout, rules)
    ranks = tuple(sorted(data.draw(st.sets(st.integers(0, layout.ranks - 1)))))
    chunks = needed_chunks(plan, ranks)
    assert (np.diff(chunks) > 0).all()
    wanted = [np.zeros(len(content), bool) for content in model.files]
    starts = {tensor.name: tensor for tensor in model.index.tensors}
    for rank in ranks:
        for piece in plan.ranks[rank].slices:
            tensor = starts[piece.name]
            flat = wanted[tensor.shard][tensor.start : tensor.end]
            item_bytes = tensor.size_bytes // max(int(np.prod(tensor.shape)), 1)
            box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            flat.reshape(*tensor.shape, item_bytes)[box] = True
    touched = [
        chunk
        for chunk in range(len(plan.chunks))
        if wanted[plan.chunks.shard[chunk]][plan.chunks.start[chunk] : plan.chunks.end[chunk]].any()
    ]
    assert chunks.tolist() == touched
    fetched = sum(plan.chunks.byte_range(chunk).size_bytes for chunk in touched)
    assert needed_bytes(plan, ranks) == fetched
    assert overfetch_bytes(plan, ranks) == fetched - sum(int(part.sum()) for part in wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_llama_by_family(tied: bool) -> None:
    config = ModelConfig(model_type="llama", num_attention_heads=4, num_key_value_heads=2, hidden_size=16)
    shapes = llama_shapes(2, 16, 24, 4, 2, 40, tied=tied)
    model = store_arrays(as_bf16(random_arrays(shapes)), shards=2, chunk_bytes=333)
    plan = build_load_plan(model.index, Layout(4), None, config)
    assert check_plan(plan) == []
    sizes = {piece.name: piece.sizes for piece in plan.ranks[3].slices}
    assert sizes.keys() == shapes.keys()
    assert ("lm_head.weight" in sizes) is not tied
    assert sizes["model.embed_tokens.weight"] == (10, 16)
    assert sizes["model.layers.1.self_attn.q_proj.weight"] == (4, 16)
    assert sizes["model.layers.1.self_attn.k_proj.weight"] == (4, 16)  # one of two heads, shared by two ranks
    assert sizes["model.layers.1.self_attn.o_proj.weight"] == (16, 4)
    assert sizes["model.layers.1.mlp.down_proj.weight"] == (16, 6)
    assert sizes["model.norm.weight"] == (16,)
    assert len(plan.ranks[0].segment_bytes) == 3  # two layers and the rest
    with pytest.raises(LayoutError, match="named by no rule"):
        build_load_plan(model.index, Layout(4))


def test_replicas_hold_the_same() -> None:
    model = store_arrays(as_bf16(random_arrays({"a": (6, 4), "b": ()})))
    plan = build_load_plan(model.index, Layout(1, 2, 3))
    assert [rank.rank for rank in plan.ranks] == list(range(6))
    assert plan.ranks[0].slices == plan.ranks[2].slices == plan.ranks[4].slices
    assert plan.ranks[1].slices == plan.ranks[5].slices != plan.ranks[0].slices


def test_a_half_byte_model() -> None:
    packed = np.arange(12, dtype=np.uint8)
    model = store_arrays({"w": ("F4", packed)}, chunk_bytes=5)
    (tensor,) = model.index.tensors
    index = replace(model.index, tensors=(replace(tensor, shape=(4, 6)),))
    plan = build_load_plan(index, Layout(3), parse_rules({"w": "row"}))
    assert check_plan(plan) == []
    tensors, _ = carry_out(plan, plan.ranks[1], model.files)
    assert tensors["w"].tolist() == [1, 4, 7, 10]


def test_chunks_with_a_hole_are_refused() -> None:
    model = store_arrays(as_bf16(random_arrays({"a": (50,)})), chunk_bytes=20)
    keep = np.delete(np.arange(len(model.index.chunks)), 4)
    chunks = model.index.chunks
    holed = replace(chunks, shard=chunks.shard[keep], start=chunks.start[keep], end=chunks.end[keep])
    with pytest.raises(PlanError, match="of the 100 bytes"):
        build_load_plan(replace(model.index, chunks=holed), Layout())
    plan = build_load_plan(model.index, Layout())
    assert any("of which the chunks hold" in problem for problem in check_plan(replace(plan, chunks=holed)))


def sound_plan() -> LoadPlan:
    model = store_arrays(as_bf16(random_arrays({"a": (6, 4), "b": (300,), "c": (0,)})), chunk_bytes=64)
    plan = build_load_plan(model.index, Layout(1, 2))
    assert check_plan(plan) == []
    return plan


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"segment_offset": 100}, "not aligned"),
        ({"segment_offset": 1 << 20}, "beyond its segment"),
        ({"segment": 5}, "in no segment"),
        ({"shard": 1}, "in no shard"),
        ({"start": -1}, "in no shard"),
        ({"region": Region((((4, 7),), ((0, 4),)))}, "outside its shape"),
        ({"region": Region((((3, 4), (0, 2)), ((0, 4),)))}, "not in order"),
        ({"region": Region((((0, 3),),))}, "region of another rank"),
        ({"size_bytes": 7}, "of 7 bytes for"),
        ({"filled_bytes": 23}, "has 23 of 24 bytes for"),
        ({"start": 1 << 30}, "of which the chunks hold 0"),
        ({"name": "b"}, "appears twice"),
        ({"segment_offset": 256}, "overlap"),
    ],
)
def test_check_plan_finds_a_broken_slice(change: dict[str, object], says: str) -> None:
    plan = sound_plan()
    rank = plan.ranks[0]
    assert (rank.slices[0].name, rank.slices[1].segment_offset) == ("a", 256)
    broken = replace(rank.slices[0], **change)  # type: ignore[arg-type]
    found = check_plan(replace(plan, ranks=(replace(rank, slices=(broken, *rank.slices[1:])), plan.ranks[1])))
    assert any(says in problem and problem.startswith("rank 0") for problem in found), found


def test_check_plan_finds_a_slice_cut_inside_a_byte() -> None:
    plan = sound_plan()
    rank = plan.ranks[0]
    half_bytes = replace(rank.slices[0], region=Region((((0, 3),), ((1, 3),))), size_bytes=3, filled_bytes=3)
    broken = replace(rank, slices=(half_bytes, *rank.slices[1:]))
    assert any("inside a byte" in problem for problem in check_plan(replace(plan, ranks=(broken, plan.ranks[1]))))


def test_check_plan_finds_wrong_chunks_and_ranks() -> None:
    plan = sound_plan()

    def problems(**change: object) -> str:
        rank: RankPlan = replace(plan.ranks[0], **change)  # type: ignore[arg-type]
        return " ".join(check_plan(replace(plan, ranks=(rank, plan.ranks[1]))))

    assert "chunk_ids are not" in problems(chunk_ids=plan.ranks[0].chunk_ids[:-1])
    assert "stands at place 0" in problems(rank=1)
    sizes = [shard.size_bytes for shard in plan.shards]
    chunks = cut_into_chunks(sizes, [[100, 200]])
    for change, says in (
        ({"shard": chunks.shard + 1}, "none of the 1 shards"),
        ({"start": chunks.start - 1}, "no bytes"),
        ({"end": chunks.start}, "no bytes"),
        ({"end": chunks.end + 1}, "beyond its shard"),
        ({"start": chunks.start[::-1].copy(), "end": chunks.end[::-1].copy()}, "not in order"),
    ):
        assert says in " ".join(check_plan(replace(plan, chunks=replace(chunks, **change))))


def test_an_empty_model() -> None:
    plan = build_load_plan(store_arrays({}).index, Layout(2, 2))
    assert check_plan(plan) == []
    assert [rank.device_bytes for rank in plan.ranks] == [0] * 4
    assert overfetch_bytes(plan, range(4)) == 0
    assert check_plan(replace(plan, chunks=cut_into_chunks([], []))) == []


def test_a_table_of_slices_is_a_sequence_of_them() -> None:
    slices = [
        TensorSlice("a.w", "F32", (4, 2), whole((4, 2)), 0, 100, 0, 0, 32, 32),
        TensorSlice("a.w_scale", "F32", (4, 1), whole((4, 1)), 0, 100, 1, 256, 16, 0, "a.w"),
        TensorSlice("n", "U8", (0,), whole((0,)), 1, 7, 0, 0, 0, 0),
        TensorSlice("b", "U8", (8,), whole((8,)), 2, 5, 1, 512, 8, 8, "b", (2, 4)),
    ]
    table = SliceTable.of(slices)
    assert (list(table), len(table), table.size_bytes) == (slices, 4, 56)
    assert ([table[row] for row in range(4)], table[-1]) == (slices, slices[-1])
    assert (table[1:3], table.select(np.array([3, 0]))) == (slices[1:3], [slices[3], slices[0]])
    assert (table == SliceTable.of(slices), table == slices[:3]) == (True, False)
    assert SliceTable.of(table) is table
    assert list(SliceTable.of([])) == []
