"""Device maps equal those of Accelerate, on models of many shapes and limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import LayoutError
from cluster.fit.device_map import (
    DeviceKey,
    DeviceMap,
    balanced_memory,
    device_order,
    infer_device_map,
    module_tree,
)
from tests.support.hf_models import make_tiny

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("accelerate.utils.modeling")

Sizes = dict[str, int]


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A module that Accelerate must not split."""


class TowerLayer(Layer):
    """Another such module: the layers of two stacks have two classes."""


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Any other module."""


KINDS = {"layers": Layer, "blocks": TowerLayer}


def meta_model(sizes: Mapping[str, int]) -> Any:
    """Return an empty model with these module and parameter names, in this order; each parameter has its bytes."""
    root = Block()
    for name, size_bytes in sizes.items():
        *path, last = name.split(".")
        module: Any = root
        for above, part in zip(["", *path], path, strict=False):
            if part not in module._modules:
                module.add_module(part, KINDS.get(above, Block)())
            module = module._modules[part]
        module.register_parameter(
            last, torch.nn.Parameter(torch.empty(size_bytes, dtype=torch.uint8, device="meta"), requires_grad=False)
        )
    return root


def theirs(
    model: Any, memory: dict[DeviceKey, int], policy: str, no_split: Any = ("Layer", "TowerLayer")
) -> dict[DeviceKey, Any]:
    """Return Accelerate's map, as transformers requests it."""
    if policy != "sequential":
        memory = modeling.get_balanced_memory(
            model, dict(memory), no_split_module_classes=no_split, low_zero=policy == "balanced_low_0"
        )
    found: dict[DeviceKey, Any] = modeling.infer_auto_device_map(model, dict(memory), no_split_module_classes=no_split)
    return found


def our_map(sizes: Mapping[str, int], memory: dict[DeviceKey, int], policy: str) -> DeviceMap:
    tree = module_tree(sizes.items())
    limits = memory
    if policy != "sequential":
        limits = balanced_memory(tree, memory, low_zero=policy == "balanced_low_0")
    return infer_device_map(tree, limits)


def ours(sizes: Mapping[str, int], memory: dict[DeviceKey, int], policy: str) -> dict[str, DeviceKey | None]:
    """Return the device of each tensor."""
    return dict(zip(sizes, our_map(sizes, memory, policy).devices_of(sizes), strict=True))


def spread(found: Mapping[Any, Any], names: Any) -> dict[str, DeviceKey | None]:
    """Return the device of each tensor by a map of Accelerate's."""
    return dict(zip(names, DeviceMap(tuple(found.items())).devices_of(names), strict=True))


def decoder(layers: int, attention: int, mlp: int, vocabulary: int, head: int) -> Sizes:
    sizes = {"model.embed_tokens.weight": vocabulary}
    for layer in range(layers):
        sizes |= {
            f"model.layers.{layer}.self_attn.q_proj.weight": attention,
            f"model.layers.{layer}.self_attn.o_proj.weight": attention,
            f"model.layers.{layer}.mlp.up_proj.weight": mlp,
            f"model.layers.{layer}.input_layernorm.weight": 7,
        }
    sizes["model.norm.weight"] = 7
    return sizes | ({"lm_head.weight": head} if head else {})


small = st.integers(1, 40)
models = st.builds(decoder, st.integers(1, 9), small, small, st.integers(1, 200), st.integers(0, 200))
towers = st.builds(
    lambda text, tower: {
        "model.visual.patch_embed.proj.weight": 9,
        **{f"model.visual.blocks.{n}.attn.qkv.weight": tower for n in range(3)},
        "model.visual.merger.mlp.0.weight": 5,
        "model.visual.merger.mlp.2.weight": 5,
        **{name.replace("model.", "model.language_model.", 1): size for name, size in text.items()},
    },
    models,
    small,
)
limits = st.tuples(st.lists(st.integers(1, 500), max_size=4), st.one_of(st.none(), st.integers(0, 600))).map(
    lambda drawn: {**dict(enumerate(drawn[0])), **({} if drawn[1] is None else {"cpu": drawn[1]})}
)
policies = st.sampled_from(["sequential", "balanced", "balanced_low_0"])


@settings(deadline=None, max_examples=80)
@given(st.one_of(models, towers), limits, policies)
def test_agrees_with_accelerate(sizes: Sizes, memory: dict[DeviceKey, int], policy: str) -> None:
    model = meta_model(sizes)
    expected = theirs(model, memory, policy)
    assert ours(sizes, memory, policy) == spread(expected, sizes)


def test_a_map_has_the_same_entries_as_accelerates() -> None:
    sizes = decoder(4, 10, 20, 30, 30)
    memory: dict[DeviceKey, int] = {0: 130, 1: 60, "cpu": 100}
    found = our_map(sizes, memory, "sequential").as_dict()
    assert found == theirs(meta_model(sizes), memory, "sequential")
    assert list(found.items()) == [
        ("model.embed_tokens", 0),
        ("model.layers.0", 0),
        ("model.layers.1", 1),
        ("model.layers.2", "cpu"),
        ("model.layers.3", "disk"),
        ("model.norm", "disk"),
        ("lm_head", "disk"),
    ]
    assert our_map(sizes, {0: 10_000}, "sequential").as_dict() == {"": 0}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "qwen2_5_vl", "deepseek_v3", "glm4v", "phi3"])
@pytest.mark.parametrize("policy", ["sequential", "balanced", "balanced_low_0"])
def test_agrees_on_models_of_transformers(family: str, policy: str) -> None:
    """Buffers that no checkpoint has are stripped from the models, because Accelerate counts them."""
    pytest.importorskip("transformers")
    model = make_tiny(family)
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            module._buffers.pop(name, None)
    model = model.to("meta")
    state = {name: tensor.numel() * tensor.element_size() for name, tensor in named_once(model)}
    # As checkpoints have them. Modules after the layers of that tower run in an order that no name shows.
    names = list(state) if family == "glm4v" else sorted(state)
    sizes = {name: state[name] for name in names}
    whole = sum(sizes.values())
    no_split = list(model._no_split_modules)
    for shares in ((0.5, 0.3, 0.3), (0.9, 0.9, 0.0), (0.25, 0.25, 0.25), (0.1, 0.05, 0.6), (2.0, 2.0, 2.0)):
        memory: dict[DeviceKey, int] = {0: int(whole * shares[0]), 1: int(whole * shares[1])}
        if shares[2]:
            memory["cpu"] = int(whole * shares[2])
        expected = spread(theirs(model, memory, policy, no_split), sizes)
        assert ours(sizes, memory, policy) == expected, shares


def named_once(model: Any) -> Any:
    """Return the parameters and saved buffers as a checkpoint has them: tied ones by their first name."""
    yield from model.named_parameters()
    saved = set(model.state_dict())
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


@settings(deadline=None, max_examples=40)
@given(st.one_of(models, towers), limits, policies)
def test_every_tensor_has_a_device_and_no_layer_has_two(
    sizes: Sizes, memory: dict[DeviceKey, int], policy: str
) -> None:
    placed = ours(sizes, memory, policy)
    assert None not in placed.values()
    for tensor in module_tree(sizes.items()).walk():
        if tensor.is_layer:
            assert len({placed[name] for name in sizes if tensor.covers(name)}) == 1
    if policy == "sequential":
        in_order = [device_order(placed[tensor.name]) for tensor in module_tree(sizes.items()).all_tensors()]  # type: ignore[arg-type]
        assert in_order == sorted(in_order)
        for device, limit in memory.items():
            assert sum(sizes[name] for name in sizes if placed[name] == device) <= limit


def test_tied_tensors_stay_together() -> None:
    sizes = decoder(3, 10, 20, 30, 30)
    tied = [["model.embed_tokens.weight", "lm_head.weight"]]
    tree = module_tree(sizes.items())
    for first in range(30, 300, 7):
        found = infer_device_map(tree, {0: first, "cpu": 500}, tied)
        embedding, head = found.devices_of(tied[0])
        assert embedding == head, first
    apart = infer_device_map(tree, {0: 200, "cpu": 500}).devices_of(tied[0])
    assert len(set(apart)) == 2


def test_modules_are_ordered_as_they_run() -> None:
    names = [
        *("lm_head.weight", "model.layers.10.a.w", "model.layers.2.a.w", "model.norm.weight", "model.embed_tokens.w"),
        *("model.visual.blocks.0.a.w", "model.visual.merger.w", "model.visual.patch_embed.w"),
    ]
    assert [tensor.name for tensor in module_tree((name, 1) for name in names).all_tensors()] == [
        *("model.embed_tokens.w", "model.visual.patch_embed.w", "model.visual.blocks.0.a.w", "model.visual.merger.w"),
        *("model.layers.2.a.w", "model.layers.10.a.w", "model.norm.weight", "lm_head.weight"),
    ]
    assert list(module_tree([]).all_tensors()) == []
    assert infer_device_map(module_tree([]), {0: 1}).as_dict() == {"": "disk"}
    odd = [("a", 1), ("a.b", 2), ("a.b.c", 3), ("", 4), (".", 5), ("9" * 5000 + ".x", 6)]
    assert sum(tensor.size_bytes for tensor in module_tree(odd).all_tensors()) == 21


def test_many_modules_are_assigned_in_linear_time() -> None:
    """Each module is examined a few times, not as often as there are others."""
    count = 20_000
    found = infer_device_map(
        module_tree([(f"m{number}.weight", 10) for number in range(count)]), {0: 5 * count, "cpu": 10 * count}
    )
    places = [device for _, device in found.modules]
    assert places == [0] * (count // 2 - 1) + ["cpu"] * (count // 2 + 1)  # of the GPU, the room of one layer is kept


def test_names_with_very_many_parts_are_refused() -> None:
    with pytest.raises(LayoutError, match="5001 parts"):
        module_tree([(".".join(["a"] * 5000 + ["weight"]), 1)])
