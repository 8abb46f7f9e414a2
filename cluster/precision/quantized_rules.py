"""From the rule of a weight to the cut of every tensor that it is stored as when it is quantized. Pure.

The rule is that of `x.weight`, whether there is a tensor of that name or not. It cuts the weight as it was before it
was packed; a tensor along it is cut where the weight is, in its own units: a cut that does not fall on whole groups,
blocks or packed words is refused, for no rank could use its part without its neighbour's.

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
    from cluster.layouts.model_config import ModelConfig  # brings pydantic
    from cluster.precision.quantization_config import QuantizationConfig

RuleFor = Callable[[str], Rule | None]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a quantized module."""

    weight: str  # name that its rule is looked up by
    storage: Storage | str  # str: why it cannot be told


def find_parts(tensors: Sequence[Tensor], config: QuantizationConfig | None) -> dict[int, Part]:
    """Of the tensors that belong to a quantized weight, by their number. Others are cut as in any model."""
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
    known: dict[tuple[object, ...], Laid] = {}  # modules alike are laid out alike
    laid: dict[str, Laid] = {}
    for weight, unsorted in modules.items():
        module = dict(sorted(unsorted.items()))
        alike = tuple((end, tensor.dtype, tensor.shape, tensor.size_bytes) for end, tensor in module.items())
        if alike not in known:
            known[alike] = lay(module, config)
        laid[weight] = known[alike]
    return {number: Part(weight, laid[weight][end]) for number, weight, end in places if end in laid[weight]}


def find_rule(name: str, part: Part | None, rule_for: RuleFor) -> tuple[Rule | None, Part | None]:
    """The rule that cuts a tensor, and as what. A part of a weight without a rule may have one of its own."""
    if part is None:
        return rule_for(name), None
    rule = rule_for(part.weight)
    if rule is not None:
        return rule, part
    own = rule_for(name)
    if own is None and isinstance(part.storage, Storage) and not part.storage.weight:
        return Rule.REPLICATE, None  # one number of something that has no weight, such as a cache
    return own, None


def cut_part(
    tensor: Tensor, storage: Storage | str, rule: Rule, layout: Layout, config: ModelConfig | None
) -> TensorCut | str:
    """The cut of one tensor of a quantized weight that has that rule, or why there is none."""
    if isinstance(storage, str):
        return storage
    if not storage.weight:
        return TensorCut()
    cut = cut_shape(storage.weight, rule, layout, config)
    if isinstance(cut, str):
        return f"as a part of a weight {storage.weight}: {cut}"
    experts = cut.experts
    if experts == "all" and storage.axes[:1] != (Axis(0),):
        experts = ""  # one for all experts
        if any(storage.axes):
            return f"shape {tensor.shape} does not say which expert's it is"
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
    """What has quantization to do with tensors that no rule names; "" when it does not look like it."""
    if not names:
        return ""
    if config is not None:
        return config.trouble
    ends = tuple(f".{end}" for end in OF_MODULE) + OF_WEIGHT
    return "they look quantized, but config.json has no quantization_config" if names[0].endswith(ends) else ""


def _in_units(block: Block, axis: Axis, stored_size: int) -> Block | None:
    """The same block of the weight's dimension in the stored one, of `stored_size`; None: it does not fall on units."""
    values = axis.values
    one_part = block.parts == 1 and block.part_size == block.size
    # Where a block ends the next one starts, or the dimension does.
    if block.start % values or (not one_part and block.part_size % values):
        return None
    start = block.start // values * axis.stored
    stored = min(-(-block.size // values) * axis.stored, stored_size - start)  # the last unit may be cut short
    return Block(start, stored, block.parts, stored if one_part else block.part_size // values * axis.stored)


def _module_of(name: str, by_name: Mapping[str, Tensor]) -> tuple[str, str]:
    """GPTQ and AWQ: the name that the weight would have, and which tensor it is; "" for none."""
    base, _, end = name.rpartition(".")
    return (f"{base}.weight", end) if end in OF_MODULE and f"{base}.qweight" in by_name else ("", "")


def _weight_of(name: str, by_name: Mapping[str, Tensor]) -> tuple[str, str]:
    """The name of the weight that a tensor is named after, and what follows it: "" for the weight itself."""
    if name.endswith(OF_WEIGHT):
        for end in OF_WEIGHT:
            weight = name.removesuffix(end)
            if weight != name and (weight in by_name or f"{weight}_packed" in by_name):
                return weight, end
    if name.endswith(OF_ACTIVATIONS):
        end = next(end for end in OF_ACTIVATIONS if name.endswith(end))
        return f"{name.removesuffix(end)}.weight", end
    return name, ""
