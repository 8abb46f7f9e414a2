"""From the layout rule of a weight to the cuts of the tensors that store it when it is quantized. Pure.

The rule is that of `x.weight`, even if no tensor has that name. It cuts the weight as it was before packing. A tensor
that lies along the weight is cut at the same place, in its own units. A cut that does not fall on whole groups, blocks
or packed words is refused, because a rank could not use its slice without its neighbour's.

    x.weight (out, in), `row`, two ranks    4 bits in groups of 128
    # # # # . . . .                         x.weight_packed (out, in/8)    # # # # . . . .    units of 8
    # # # # . . . .                         x.weight_scale (out, in/128)   # # . .            units of 128
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.layouts.mesh import Layout
from cluster.layouts.rules import Rule
from cluster.layouts.tensor_cut import Block, TensorCut, byte_problem, cut_shape
from cluster.precision.quantized_tensors import (
    OF_ACTIVATIONS,
    OF_MODULE,
    OF_WEIGHT,
    Axis,
    Laid,
    Storage,
    lay_awq,
    lay_gptq,
    lay_scaled,
)
from storage.checkpoints.model_index import Tensor

if TYPE_CHECKING:
    from cluster.layouts.model_config import ModelConfig  # imports pydantic
    from cluster.precision.quantization_config import QuantizationConfig

RuleFor = Callable[[str], Rule | None]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a quantized module."""

    weight: str  # name of the weight whose rule it has
    storage: Storage | str  # a str says why it is not known


def find_parts(tensors: Sequence[Tensor], config: QuantizationConfig | None) -> dict[int, Part]:
    """Return the parts of quantized weights, by tensor number. Other tensors are cut as in any model."""
    family = config.family if config is not None else None
    if config is None or family is None:
        return {}
    by_name = {tensor.name: tensor for tensor in tensors}
    if family in ("gptq", "awq"):
        lay, find_module = (lay_gptq if family == "gptq" else lay_awq), _module_of
    else:
        lay, find_module = lay_scaled, _weight_of
    places: list[tuple[int, str, str]] = []
    modules: dict[str, dict[str, Tensor]] = {}  # by the name of the weight
    for number, tensor in enumerate(tensors):
        weight, end = find_module(tensor.name, by_name)
        if weight:
            places.append((number, weight, end))
            modules.setdefault(weight, {})[end] = tensor
    known: dict[tuple[object, ...], Laid] = {}  # modules with equal tensors have equal storage
    laid: dict[str, Laid] = {}
    for weight, unsorted in modules.items():
        module = dict(sorted(unsorted.items()))
        alike = tuple((end, tensor.dtype, tensor.shape, tensor.size_bytes) for end, tensor in module.items())
        if alike not in known:
            known[alike] = lay(module, config)
        laid[weight] = known[alike]
    return {number: Part(weight, laid[weight][end]) for number, weight, end in places if end in laid[weight]}


def find_rule(name: str, part: Part | None, rule_for: RuleFor) -> tuple[Rule | None, Part | None]:
    """Return the rule of a tensor, and its part if the weight's rule cuts it. Else it may have its own rule."""
    if part is None:
        return rule_for(name), None
    rule = rule_for(part.weight)
    if rule is not None:
        return rule, part
    own = rule_for(name)
    if own is None and isinstance(part.storage, Storage) and not part.storage.weight:
        return Rule.REPLICATE, None  # a single number without a weight, such as the scale of a cache
    return own, None


def cut_part(
    tensor: Tensor, storage: Storage | str, rule: Rule, layout: Layout, config: ModelConfig | None
) -> TensorCut | str:
    """Return the cut of one tensor of a quantized weight with that rule, or why it cannot be cut."""
    if isinstance(storage, str):
        return storage
    if not storage.weight:
        return TensorCut()
    cut = cut_shape(storage.weight, rule, layout, config)
    if isinstance(cut, str):
        return f"as a part of a weight {storage.weight}: {cut}"
    experts = cut.experts
    if experts == "all" and storage.axes[:1] != (Axis(0),):
        experts = ""  # one tensor for all experts
        if any(storage.axes):
            return f"shape {tensor.shape} does not show which expert it belongs to"
    dim = next((dim for dim, axis in enumerate(storage.axes) if axis is not None and axis.dim == cut.dim), None)
    axis = None if dim is None else storage.axes[dim]
    if dim is None or axis is None:
        return TensorCut(None, (), experts)
    if dim and any(block.parts * block.part_size > block.size for block in cut.blocks):
        return f"the vocabulary would be padded, but it lies along dim {dim} of shape {tensor.shape}: only dim 0 can be"
    blocks = []
    for block in cut.blocks:
        scaled = _in_units(block, axis, tensor.shape[dim])
        if scaled is None:
            return (
                f"parts of {block.part_size} of dim {axis.dim} of its weight {storage.weight} do not fall on "
                f"{axis.unit} of {axis.values}"
            )
        blocks.append(scaled)
    cut = TensorCut(dim, tuple(blocks), experts)
    return byte_problem(tensor, cut, layout) or cut


def why_unnamed(names: Sequence[str], config: QuantizationConfig | None) -> str:
    """Return how quantization explains tensors that no rule names, or ""."""
    if not names:
        return ""
    if config is not None:
        return config.trouble
    ends = tuple(f".{end}" for end in OF_MODULE) + OF_WEIGHT
    return "they look quantized, but config.json has no quantization_config" if names[0].endswith(ends) else ""


def _in_units(block: Block, axis: Axis, stored_size: int) -> Block | None:
    """Return the block in the stored dimension, of `stored_size`, or None if it does not fall on whole units."""
    values = axis.values
    one_part = block.parts == 1 and block.part_size == block.size
    # A block ends where the next block starts, or at the end of the dimension. So checking starts is enough.
    if block.start % values or (not one_part and block.part_size % values):
        return None
    start = block.start // values * axis.stored
    stored = min(-(-block.size // values) * axis.stored, stored_size - start)  # the last unit may be shorter
    return Block(start, stored, block.parts, stored if one_part else block.part_size // values * axis.stored)


def _module_of(name: str, by_name: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return the name that a GPTQ or AWQ weight would have, and the tensor's role in its module; "" for none."""
    base, _, end = name.rpartition(".")
    return (f"{base}.weight", end) if end in OF_MODULE and f"{base}.qweight" in by_name else ("", "")


def _weight_of(name: str, by_name: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return the weight that a tensor is named after, and the rest of its name: "" for the weight itself."""
    if name.endswith(OF_WEIGHT):
        for end in OF_WEIGHT:
            weight = name.removesuffix(end)
            if weight != name and (weight in by_name or f"{weight}_packed" in by_name):
                return weight, end
    if name.endswith(OF_ACTIVATIONS):
        end = next(end for end in OF_ACTIVATIONS if name.endswith(end))
        return f"{name.removesuffix(end)}.weight", end
    return name, ""
