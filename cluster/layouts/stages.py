"""Pipeline parallelism: which stage has which tensor. Layers stay whole and in order, stages are balanced by bytes.

What comes before the layers (embedding, a vision tower) is the first stage's, what comes after them (last norm, head)
the last one's. A model without a head of its own uses its embedding again: both ends have that.

    embed | 0 1 2 | 3 4 5 | 6 7 | norm, head        a large head takes the place of a layer
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from cluster.errors import LayoutError
from cluster.layouts.mesh import Layout
from cluster.layouts.module_names import OTHER_EMBEDDINGS, TOKEN_EMBEDDINGS, TOWERS
from storage.checkpoints.model_index import Tensor

Stages = list[tuple[int, ...]]  # of each tensor, the stages that have it

_NUMBERED = re.compile(r"(?P<stack>(?:[^.]+\.)*?(?:layers|h|blocks|block|layer))\.(?P<number>[0-9]{1,7})\.")
_FIRST = frozenset((*TOKEN_EMBEDDINGS, *OTHER_EMBEDDINGS, *TOWERS))
_HEADS = ("lm_head", "output", "embed_out")
# What the weight of a module may be stored as: quantized, it has several tensors.
_WEIGHT = ("weight", "qweight", "weight_packed")


def decide_stages(tensors: Sequence[Tensor], layout: Layout) -> Stages:
    """Of each tensor, in order. Raises LayoutError when there are fewer layers than stages."""
    count = layout.pipeline_parallel_size
    if count == 1:
        return [(0,)] * len(tensors)
    stack = _find_stack(tensors)
    layer_of = [_layer(tensor.name, stack) for tensor in tensors]
    layers = sorted({layer for layer in layer_of if layer is not None})
    if len(layers) < count:
        raise LayoutError(
            f"{len(layers)} layers cannot be shared by pipeline_parallel_size={count}",
            hint=(f"pipeline_parallel_size can be 1 to {len(layers)}: " if len(layers) > 1 else "")
            + "a stage has at least one layer; layers are found by names such as model.layers.7.",
            stack=stack or None,
        )
    where = [_end(tensor.name) if layer is None else None for tensor, layer in zip(tensors, layer_of, strict=True)]
    tied = not any(
        layer is None and _is_of(tensor.name, _HEADS, _WEIGHT) for tensor, layer in zip(tensors, layer_of, strict=True)
    )
    sizes = Counter[int]()
    ends = [0, 0]
    for tensor, layer, end in zip(tensors, layer_of, where, strict=True):
        if layer is not None:
            sizes[layer] += tensor.size_bytes
        elif end is not None:
            ends[end] += tensor.size_bytes
            ends[1] += tensor.size_bytes if tied and _is_of(tensor.name, TOKEN_EMBEDDINGS) else 0
    cuts = balance([sizes[layer] for layer in layers], count, ends[0], ends[1])
    stage_of = {layer: bisect_right(cuts, position) for position, layer in enumerate(layers)}
    last = count - 1
    found: Stages = []
    for tensor, layer, end in zip(tensors, layer_of, where, strict=True):
        if layer is not None:
            found.append((stage_of[layer],))
        elif tied and _is_of(tensor.name, TOKEN_EMBEDDINGS):
            found.append((0, last))
        else:
            found.append((last if end else 0,))
    return found


def balance(sizes_bytes: Sequence[int], parts: int, first_bytes: int = 0, last_bytes: int = 0) -> list[int]:
    """Where parts 1 .. begin, so that the largest of the contiguous parts is as small as it can be, none empty.

    `first_bytes` and `last_bytes` come on top of the first and the last part. Of the best, the one whose parts are
    largest at the front is taken: same input, same parts.
    """
    low, high = 0, sum(sizes_bytes) + first_bytes + last_bytes
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fill(sizes_bytes, parts, first_bytes, last_bytes, middle) else (middle + 1, high)
    cuts = _fill(sizes_bytes, parts, first_bytes, last_bytes, low)
    return cuts or []


def _fill(sizes: Sequence[int], parts: int, first: int, last: int, most: int) -> list[int] | None:
    """Where parts 1 .. begin when none has more than `most`, each filled in turn; None when that cannot be."""
    cuts: list[int] = []
    at = 0
    for part in range(parts - 1):
        room = most - (first if part == 0 else 0)
        later = parts - 1 - part  # each needs one at least
        end = at
        while end < len(sizes) - later and sizes[end] <= room:
            room -= sizes[end]
            end += 1
        if end == at:
            return None
        cuts.append(end)
        at = end
    return cuts if sum(sizes[at:]) + last <= most else None


def _find_stack(tensors: Sequence[Tensor]) -> str:
    """The name before the layers' numbers: of the stack with the most bytes that is no tower; "" when there is none."""
    sizes = Counter[str]()
    for tensor in tensors:
        match = _NUMBERED.match(tensor.name)
        if match and not any(part in TOWERS for part in match["stack"].split(".")):
            sizes[match["stack"]] += max(1, tensor.size_bytes)
    return max(sizes, key=lambda stack: sizes[stack], default="")


def _layer(name: str, stack: str) -> int | None:
    match = _NUMBERED.match(name) if stack and name.startswith(f"{stack}.") else None
    return int(match["number"]) if match else None


def _end(name: str) -> int:
    """0 for what comes before the layers, 1 for what comes after."""
    return 1 if _FIRST.isdisjoint(name.split(".")) else 0


def _is_of(name: str, modules: Sequence[str], tensors: Sequence[str] = ()) -> bool:
    """Whether it is a tensor of a module of one of those names; one of `tensors`, where they are given."""
    module, _, tensor = name.rpartition(".")
    return module.rpartition(".")[2] in modules and (not tensors or tensor in tensors)
