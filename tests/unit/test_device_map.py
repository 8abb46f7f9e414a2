"""Device maps are those of Accelerate, on models of many shapes and limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.device_map import DeviceKey, balanced_memory, infer_device_map
from cluster.module_tree import module_tree

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("accelerate.utils.modeling")

Sizes = dict[str, int]


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    """What Accelerate is told not to split."""


class TowerLayer(Layer):
    """The same; layers of two stacks are of two classes."""


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Any other module."""


KINDS = {"layers": Layer, "blocks": TowerLayer}


def meta_model(sizes: Mapping[str, int]) -> Any:
    """An empty model whose modules and parameters have these names, in this order; a parameter has so many bytes."""
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
    """Accelerate's map, as transformers asks for it."""
    if policy != "sequential":
        memory = modeling.get_balanced_memory(
            model, dict(memory), no_split_module_classes=no_split, low_zero=policy == "balanced_low_0"
        )
    found: dict[DeviceKey, Any] = modeling.infer_auto_device_map(model, dict(memory), no_split_module_classes=no_split)
    return found


def ours(sizes: Mapping[str, int], memory: dict[DeviceKey, int], policy: str) -> dict[str, DeviceKey | None]:
    """The device of each tensor."""
    tree = module_tree(sizes.items())
    limits = memory
    if policy != "sequential":
        limits = balanced_memory(tree, memory, low_zero=policy == "balanced_low_0")
    found = infer_device_map(tree, limits)
    return dict(zip(sizes, found.devices_of(sizes), strict=True))


def spread(found: Mapping[Any, Any], names: Any) -> dict[str, DeviceKey | None]:
    """The device of each tensor by a map of Accelerate's."""
    from cluster.device_map import DeviceMap

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


@settings(deadline=None, max_examples=300)
@given(st.one_of(models, towers), limits, policies)
def test_agrees_with_accelerate(sizes: Sizes, memory: dict[DeviceKey, int], policy: str) -> None:
    model = meta_model(sizes)
    expected = theirs(model, memory, policy)
    assert ours(sizes, memory, policy) == spread(expected, sizes)
