"""Pipeline stages: contiguous, none empty, the largest as small as can be; ends and tied embeddings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import LayoutError
from cluster.layouts.layout import balance, decide_stages
from cluster.layouts.mesh import Layout
from storage.checkpoints.model_index import Tensor


def tensors(**sizes: int) -> list[Tensor]:
    return [Tensor(name, "U8", (size,), 0, 0, size) for name, size in sizes.items()]


def named(names: list[str], size: int = 10) -> list[Tensor]:
    return tensors(**dict.fromkeys(names, size))


def largest(sizes: list[int], cuts: tuple[int, ...] | list[int], first: int, last: int) -> int:
    parts = [sum(sizes[a:b]) for a, b in itertools.pairwise([0, *cuts, len(sizes)])]
    parts[0] += first
    parts[-1] += last
    return max(parts)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 5), st.integers(0, 80), st.integers(0, 80))
def test_balance_is_the_best_of_all_cuts(sizes: list[int], parts: int, first: int, last: int) -> None:
    if parts > len(sizes):
        return
    cuts = balance(sizes, parts, first, last)
    assert len(cuts) == parts - 1
    assert all(a < b for a, b in itertools.pairwise([0, *cuts, len(sizes)]))
    every = itertools.combinations(range(1, len(sizes)), parts - 1)
    assert largest(sizes, cuts, first, last) == min(largest(sizes, each, first, last) for each in every)


LAYERS = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(8)]


def stages(names: list[Tensor], count: int) -> dict[str, tuple[int, ...]]:
    found = decide_stages(names, Layout(pipeline_parallel_size=count))
    return {tensor.name: stage for tensor, stage in zip(names, found, strict=True)}


def test_the_end_stages_hold_tensors_outside_the_layers() -> None:
    names = ["lm_head.weight", "model.embed_tokens.weight", *LAYERS, "model.norm.weight", "visual.blocks.3.qkv.weight"]
    found = stages(named(names), 4)
    assert found["model.embed_tokens.weight"] == found["visual.blocks.3.qkv.weight"] == (0,)
    assert found["lm_head.weight"] == found["model.norm.weight"] == (3,)
    order = [found[name][0] for name in LAYERS]
    assert order == sorted(order)
    assert set(order) == {0, 1, 2, 3}


def test_a_large_head_takes_the_place_of_layers() -> None:
    model = named(LAYERS) + tensors(**{"model.embed_tokens.weight": 1, "lm_head.weight": 30})
    order = [stage for (stage,) in list(stages(model, 2).values())[:8]]
    assert order == [0] * 5 + [1] * 3 or order == [0] * 6 + [1] * 2
    assert max(10 * order.count(0) + 1, 10 * order.count(1) + 30) == 60


def test_tied_embeddings_are_on_both_ends() -> None:
    names = ["model.embed_tokens.weight", *LAYERS, "model.norm.weight"]
    assert stages(named(names), 4)["model.embed_tokens.weight"] == (0, 3)
    assert stages(named([*names, "lm_head.weight"]), 4)["model.embed_tokens.weight"] == (0,)
    assert stages(named(names), 1)["model.embed_tokens.weight"] == (0,)


@pytest.mark.parametrize("end", ["qweight", "weight_packed"])
def test_quantized_heads_and_embedding_scales_are_recognised(end: str) -> None:
    names = ["model.embed_tokens.weight", "model.embed_tokens.weight_scale", *LAYERS]
    assert stages(named(names), 4)["model.embed_tokens.weight_scale"] == (0, 3)
    found = stages(named([*names, f"lm_head.{end}", "lm_head.scales"]), 4)
    assert found["model.embed_tokens.weight"] == found["model.embed_tokens.weight_scale"] == (0,)
    assert found[f"lm_head.{end}"] == found["lm_head.scales"] == (3,)


@pytest.mark.parametrize("stack", ["transformer.h", "layers", "model.language_model.layers", "encoder.layer"])
def test_layers_of_other_names(stack: str) -> None:
    names = [f"{stack}.{n}.w" for n in range(4)]
    assert list(stages(named(names), 4).values()) == [(0,), (1,), (2,), (3,)]


def test_layers_are_those_of_the_largest_stack() -> None:
    small = [f"vision.layers.{n}.w" for n in range(2)]
    large = [f"model.layers.{n}.w" for n in range(4)]
    found = stages(named(small, 1) + named(large, 100), 2)
    assert [found[name] for name in large] == [(0,), (0,), (1,), (1,)]


@pytest.mark.parametrize("names", [["a", "b"], LAYERS[:2], []])
def test_too_few_layers_are_an_error(names: list[str]) -> None:
    with pytest.raises(LayoutError, match="layers cannot be shared by pipeline_parallel_size=3"):
        decide_stages(named(names), Layout(pipeline_parallel_size=3))


def test_embeddings_come_first_and_replace_a_missing_head() -> None:
    for name in ("gpt_neox.embed_in", "backbone.embeddings", "transformer.wte", "model.embed_tokens"):
        stored = [f"{name}.weight", *LAYERS, "model.norm.weight"]
        assert stages(named(stored), 2)[f"{name}.weight"] == (0, 1)
        assert stages(named([*stored, "embed_out.weight"]), 2)[f"{name}.weight"] == (0,)


def test_image_projections_are_in_the_first_stage() -> None:
    names = ["model.connector.modality_projection.proj.weight", "model.image_newline", "mm_projector.0.weight"]
    found = stages(named([*names, *LAYERS, "lm_head.weight"]), 2)
    assert all(found[name] == (0,) for name in names)


def test_a_layers_own_output_is_no_head() -> None:
    layers = [f"model.layers.{number}.attention.output.weight" for number in range(4)]
    found = stages(named(["model.embed_tokens.weight", *layers, "model.norm.weight"]), 2)
    assert found["model.embed_tokens.weight"] == (0, 1)
