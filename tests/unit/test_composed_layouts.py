"""Every kind of parallelism at once: each rank's tensors against slices that are listed here independently."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.errors import ConfigError, LayoutError, ScaleRefused
from cluster.layouts.mesh import Layout, RankCoords
from cluster.layouts.rules import parse_rules
from cluster.planning.make_plan import build_load_plan, needed_chunks
from cluster.planning.packed_plan import rank_facts
from tests.support.plan_oracle import check_plan
from tests.support.planned_models import as_bf16, carry_out, random_arrays, store_arrays

EXPERTS, LAYERS, HIDDEN, INNER, VOCABULARY = 8, 4, 8, 16, 30
RULES = parse_rules(
    {
        "embed_tokens.weight": "vocabulary",
        "layers.*.up": "column",
        "layers.*.gate_up": "gate_up",
        "layers.*.down": "row",
        "layers.*.norm": "replicate",
        "layers.*.experts.*.up": "expert_column",
        "layers.*.experts.*.down": "expert_row",
        "layers.*.experts.*.bias": "expert",
        "layers.*.all_gate_up": "experts_gate_up",
        "layers.*.all_down": "experts_row",
        "layers.*.all_bias": "experts",
        "norm": "replicate",
    }
)


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        found |= {
            f"{at}.up": (INNER, HIDDEN),
            f"{at}.gate_up": (2 * INNER, HIDDEN),
            f"{at}.down": (HIDDEN, INNER),
            f"{at}.norm": (HIDDEN,),
            f"{at}.all_gate_up": (EXPERTS, 2 * INNER, HIDDEN),
            f"{at}.all_down": (EXPERTS, HIDDEN, INNER),
            f"{at}.all_bias": (EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            one = f"{at}.experts.{expert}"
            found |= {f"{one}.up": (INNER, HIDDEN), f"{one}.down": (HIDDEN, INNER), f"{one}.bias": (HIDDEN,)}
    return found


ARRAYS = random_arrays(shapes(), seed=5)
MODEL = store_arrays(as_bf16(ARRAYS), shards=3, chunk_bytes=1000)


def held(name: str, array: NDArray[np.uint16], coords: RankCoords, layout: Layout) -> NDArray[np.uint16] | None:
    """Return that rank's slice of the tensor, or None."""
    parts = name.split(".")
    layer = int(parts[1]) if parts[0] == "layers" else None
    stages = layout.pipeline_parallel_size
    if layer is not None and layer * stages // LAYERS != coords.stage:
        return None
    if name == "norm" and coords.stage != stages - 1:
        return None
    if name == "embed_tokens.weight" and coords.stage not in (0, stages - 1):
        return None  # (the model has no head: the embedding is on both ends)
    what = name.removesuffix(".weight").split(".")[-1]
    ways, place = layout.tensor_parallel_size, coords.tensor
    if "experts" in parts:
        if int(parts[3]) // (EXPERTS // layout.expert_parallel_size) != coords.expert:
            return None
        ways, place = layout.expert_cuts, coords.expert_tensor
    if what.startswith("all_"):
        array = np.split(array, layout.expert_parallel_size)[coords.expert]
        ways, place, what = layout.expert_cuts, coords.expert_tensor, what.removeprefix("all_")
        dim = 1
    else:
        dim = 0
    if what == "embed_tokens":
        rows = -(-VOCABULARY // ways) * ways
        array = np.concatenate((array, np.zeros((rows - VOCABULARY, HIDDEN), array.dtype)))
        array = np.split(array, ways)[place]
    elif what == "up":
        array = np.split(array, ways, axis=dim)[place]
    elif what == "down":
        array = np.split(array, ways, axis=dim + 1)[place]
    elif what == "gate_up":
        array = np.concatenate([np.split(half, ways, axis=dim)[place] for half in np.split(array, 2, dim)], axis=dim)
    if layout.fsdp_size > 1:
        size = -(-len(array) // layout.fsdp_size)
        array = array[coords.fsdp * size : (coords.fsdp + 1) * size]
    return array


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    def one_of(*sizes: int) -> int:
        return draw(st.sampled_from(sizes))

    tensor, data = one_of(1, 2, 4), one_of(1, 2, 4)
    plane = tensor * data
    expert = draw(st.sampled_from([size for size in (1, 2, 4, 8) if plane % size == 0]))
    cuts = draw(st.sampled_from([0, *(size for size in (1, 2, 4) if plane % (expert * size) == 0)]))
    try:
        return Layout(tensor, one_of(1, 2, 3), data, one_of(1, 2, 4), expert, cuts)
    except ConfigError:
        return Layout(tensor, 1, data, 1, expert, 1)


@given(layouts())
@settings(max_examples=40, deadline=None)
def test_each_rank_has_its_own_part_of_everything(layout: Layout) -> None:
    plan = build_load_plan(MODEL.index, layout, RULES)
    facts = rank_facts(plan.cut)
    here = sorted({0, layout.ranks - 1, layout.ranks // 2})
    for rank in here:
        one = plan.ranks[rank]
        tensors, _ = carry_out(plan, one, MODEL.files)
        expected = {name: held(name, array, one.coords, layout) for name, array in ARRAYS.items()}
        assert set(tensors) == {name for name, part in expected.items() if part is not None}
        for piece in one.slices:
            part = expected[piece.name]
            assert part is not None
            assert piece.sizes == part.shape
            assert tensors[piece.name].tobytes() == part.tobytes(), piece.name
        assert (facts[rank].size_bytes, facts[rank].device_bytes) == (one.size_bytes, one.device_bytes)
    assert set(needed_chunks(plan, here).tolist()) == {
        chunk for rank in here for chunk in plan.ranks[rank].chunk_ids.tolist()
    }


@given(layouts())
@settings(max_examples=15, deadline=None)
def test_all_ranks_together_have_every_byte(layout: Layout) -> None:
    plan = build_load_plan(MODEL.index, layout, RULES)
    everything = sum(array.nbytes for array in ARRAYS.values())
    assert plan.cut.wanted_bytes(range(layout.ranks)) == everything
    seen: dict[str, set[int]] = {name: set() for name in ARRAYS}
    for coords in plan.cut.places(range(layout.ranks)):
        rank = next(r for r in range(layout.ranks) if layout.place(layout.rank_coords(r)) == coords)
        for piece in plan.ranks[rank].slices:
            numbers = np.arange(int(np.prod(piece.shape))).reshape(piece.shape)
            for (offsets, sizes), _ in piece.region.boxes():
                box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                seen[piece.name].update(numbers[box].ravel().tolist())
    assert all(len(elements) == ARRAYS[name].size for name, elements in seen.items())


def test_a_plan_with_every_parallelism_is_valid() -> None:
    plan = build_load_plan(MODEL.index, Layout(2, 2, 2, 2, 4), RULES)
    assert check_plan(plan) == []


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (
            Layout(1, 1, 3, 1, 3),
            "8 experts cannot be spread over expert_parallel_size=3.* can be 1",
        ),
        (Layout(1, 1, 16, 1, 16), r"experts cannot be spread.* expert_parallel_size can be 8, 4, 2 or 1\b"),
        (Layout(32, 1, 1, 1, 8), "is not divisible by .* tensor_parallel_size can be 16 or 8"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused(layout: Layout, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        build_load_plan(MODEL.index, layout, RULES)


def test_expert_parallelism_of_a_dense_model_is_refused() -> None:
    dense = store_arrays(as_bf16({"w": np.zeros((4, 4), np.uint16)}))
    with pytest.raises(LayoutError, match=r"^no tensor belongs to an expert.* 1 leaves them on every rank"):
        build_load_plan(dense.index, Layout(2, expert_parallel_size=2), parse_rules({"w": "row"}))
    with pytest.raises(LayoutError, match="named by no rule") as caught:  # which may be those of experts
        build_load_plan(dense.index, Layout(2, expert_parallel_size=2), parse_rules({}))
    assert "no tensor belongs to an expert" not in str(caught.value)


def test_expert_sizes_that_do_not_fit_the_mesh_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not fit 4 ranks .* expert_parallel_size can be 2, 4 or 1$"):
        Layout(4, 1, 1, 1, 3)
    with pytest.raises(ConfigError, match=r"does not fit 4 ranks .* expert_parallel_size can be 1$"):
        Layout(4, 1, 1, 1, 2, 4)


@given(st.sampled_from([(1, 1), (2, 1), (2, 4), (1, 2), (4, 8)]), st.integers(1, 3), st.integers(1, 3))
def test_ranks_hold_the_same_slices_with_more_replicas(sizes: tuple[int, int], before: int, after: int) -> None:
    tensor, expert = sizes
    shared = max(1, expert // tensor)
    old = Layout(tensor_parallel_size=tensor, data_parallel_size=before * shared, expert_parallel_size=expert)
    new = old.with_replicas(after * shared)
    assert new.replicas_with_all == shared
    for rank in range(min(old.ranks, new.ranks)):
        assert old.rank_coords(rank) == new.rank_coords(rank)
    places = {old.place(old.rank_coords(rank)) for rank in range(old.ranks)}
    assert {new.place(new.rank_coords(rank)) for rank in range(new.ranks)} == places


@pytest.mark.parametrize(
    ("layout", "count", "says"),
    [
        (Layout(), 0, "from 1 to 65536, not 0"),
        (Layout(tensor_parallel_size=2), 1 << 15 | 1, "from 1 to 32768"),
        (Layout(), True, "not True"),
        (Layout(data_parallel_size=2, expert_parallel_size=2), 3, "data_parallel_size can be 2, 4"),
    ],
)
def test_numbers_of_replicas_that_cannot_be_are_refused(layout: Layout, count: int, says: str) -> None:
    with pytest.raises(ScaleRefused) as refused:
        layout.with_replicas(count)
    assert says in str(refused.value)
