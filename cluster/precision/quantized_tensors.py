"""The tensors of a quantized weight, format by format. Pure.

A quantized weight (out, in) is stored as several tensors, each with dimensions of its own:

    GPTQ, 4 bits, groups of 128     qweight (in/8, out)    qzeros (in/128, out/8)    scales (in/128, out)    g_idx (in)
    AWQ, the same                   qweight (in, out/8)    qzeros (in/128, out/8)    scales (in/128, out)
    fp8 in blocks of 128 x 128      weight (out, in)       weight_scale_inv (out/128, in/128)
    compressed-tensors, the same    weight_packed (out, in/8)    weight_scale (out, in/128)
      as GPTQ                       weight_zero_point (out/8, in/128)    weight_shape (2)    weight_g_idx (in)

An `Axis` relates one stored dimension to a dimension of the weight, with the number of indices of each that belong
together. Bits and group sizes are derived from the shapes where possible, because config.json may set them per module.

NF4 of bitsandbytes has sixteen values, and these tensors:

    x.weight                                  uint8 (n / 2, 1)     two numbers a byte, the first in the high half
    x.weight.absmax                           float32 (n / 64,)    max |w| of 64 weights in a row
    x.weight.quant_map                        float32 (16,)        VALUES
    x.weight.quant_state.bitsandbytes__nf4    uint8                JSON: block size, dtype and shape of the weight

bitsandbytes writes this form, and transformers and vLLM read it. Everything is flat, so a rank's slice is an NF4 tensor
with a shape of its own. Its numbers equal those of the whole tensor wherever rows are cut between blocks.

`find_rule` and `cut_part` go from the rule of a weight to the cuts of these tensors. The rule is that of `x.weight`,
even if no tensor has that name. It cuts the weight as it was before packing. A tensor that lies along the weight is cut
at the same place, in its own units. A cut that does not fall on whole groups, blocks or packed words is refused,
because a rank could not use its slice without its neighbour's.

    x.weight (out, in), `row`, two ranks    4 bits in groups of 128
    # # # # . . . .                         x.weight_packed (out, in/8)    # # # # . . . .    units of 8
    # # # # . . . .                         x.weight_scale (out, in/128)   # # . .            units of 128
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.layouts.region import element_bits
from storage.checkpoints.model_index import Tensor

if TYPE_CHECKING:
    from cluster.layouts.model_config import QuantizationConfig, WeightScheme
from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster.layouts.mesh import Layout
from cluster.layouts.rules import Block, Rule, TensorCut, byte_problem, cut_shape

if TYPE_CHECKING:
    from cluster.layouts.model_config import (
        ModelConfig,  # imports pydantic
        QuantizationConfig,
    )


Shape = tuple[int, ...]
Module = Mapping[str, Tensor]  # the tensors of one module, by the last part of their name


@dataclass(frozen=True, slots=True)
class Axis:
    """`stored` indices of a stored dimension for each `values` along dimension `dim` of the weight."""

    dim: int
    values: int = 1
    stored: int = 1
    unit: str = ""  # name of these units, for messages


@dataclass(frozen=True, slots=True)
class Storage:
    """The relation of one stored tensor to its weight."""

    weight: Shape  # unpacked: (out, in), preceded by experts when they are stacked
    axes: tuple[Axis | None, ...]  # one per stored dimension; None: never cut


Laid = dict[str, Storage | str]  # by the last part of the name; a str says why the storage is not known
_OUT, _IN = 0, 1
_BITS = (4, 8, 2, 3, 5, 6, 7)
# Suffixes of tensor names, after the name of the module, and after the name of the weight.
OF_MODULE = ("qweight", "qzeros", "scales", "g_idx")
PER_TENSOR = ("_global_scale", "_scale_2", "_input_scale", "_activation_scale")
OF_WEIGHT = ("_packed", "_scale", "_scale_inv", "_zero_point", "_shape", "_g_idx", *PER_TENSOR)
OF_ACTIVATIONS = (
    *(f".{side}_{what}" for side in ("input", "output") for what in ("scale", "zero_point", "global_scale")),
    *(".activation_scale", ".act_scale", ".input_scale_ub", ".kv_scale"),
    *(f".{one}_{what}" for one in ("q", "k", "v") for what in ("scale", "zero_point", "global_scale")),
)


def lay_gptq(module: Module, config: QuantizationConfig) -> Laid:
    """Return the storage of qweight, qzeros, scales and g_idx, packed along the inputs.

    With activation order (desc_act) any input may belong to any group. So scales and zeros are not cut along the
    groups, and g_idx counts the groups of the whole weight, as in vLLM.
    """
    if problem := _missing(module, ("scales", "qzeros")):
        return problem
    qweight, qzeros, scales = (module[name] for name in ("qweight", "qzeros", "scales"))
    g_idx = module.get("g_idx")
    if {len(qweight.shape), len(qzeros.shape), len(scales.shape)} != {2} or (g_idx and len(g_idx.shape) != 1):
        return _misfit(module, "GPTQ")
    word = _word_bits(qweight)
    (words, outputs), (groups, zero_words) = qweight.shape, qzeros.shape
    for bits in dict.fromkeys((config.bits or _BITS[0], *_BITS)):
        inputs, rest = divmod(words * word, bits)
        group = _group_size(inputs, groups, config.group_size)
        if (
            not rest
            and group is not None
            and zero_words == _words(outputs, bits, word)
            and scales.shape == (groups, outputs)
            and (g_idx is None or g_idx.shape == (inputs,))
        ):
            break
    else:
        return _misfit(module, "GPTQ")
    weight = (outputs, inputs)
    rows = None if config.desc_act else group
    laid: Laid = {
        "qweight": Storage(weight, (_packed(_IN, bits, word), Axis(_OUT))),
        "qzeros": Storage(weight, (_grouped(_IN, rows), _packed(_OUT, bits, word))),
        "scales": Storage(weight, (_grouped(_IN, rows), Axis(_OUT))),
    }
    return laid | {"g_idx": Storage(weight, (Axis(_IN),))}


def lay_awq(module: Module, config: QuantizationConfig) -> Laid:
    """Return the storage of qweight, qzeros and scales, packed along the outputs in the format's own order."""
    if problem := _missing(module, ("scales", "qzeros") if config.zero_point else ("scales",)):
        return problem
    qweight, qzeros, scales = module["qweight"], module.get("qzeros"), module["scales"]
    if len(qweight.shape) != 2 or len(scales.shape) != 2:
        return _misfit(module, "AWQ")
    word = _word_bits(qweight)
    (inputs, words), (groups, outputs) = qweight.shape, scales.shape
    group = _group_size(inputs, groups, config.group_size)
    bits, rest = divmod(words * word, outputs) if outputs else (0, 0)
    if rest or not 1 <= bits <= 8 or group is None or (qzeros and qzeros.shape != (groups, words)):
        return _misfit(module, "AWQ")
    weight = (outputs, inputs)
    rows = _grouped(_IN, group)
    return {
        "qweight": Storage(weight, (Axis(_IN), _packed(_OUT, bits, word))),
        "qzeros": Storage(weight, (rows, _packed(_OUT, bits, word))),
        "scales": Storage(weight, (rows, Axis(_OUT))),
    }


def lay_scaled(module: Module, config: QuantizationConfig) -> Laid:
    """Return the storage of the weight ("", or "_packed" in words along the inputs) and of its scales."""
    packed = module.get("_packed")
    laid: Laid = {}
    bits = 0
    if packed is not None:
        found = _unpack_shape(module, config.schemes)
        if isinstance(found, str):
            return _blame("_packed", module, found)
        weight, bits = found
        lead = tuple(map(Axis, range(len(weight) - 1)))
        laid["_packed"] = Storage(weight, (*lead, _packed(len(weight) - 1, bits, _word_bits(packed))))
    elif "" in module:
        weight = module[""].shape
    else:
        return _lay_activations(module, ())
    if "_scale" not in module and "_scale_inv" not in module:
        end = "" if packed is None else "_packed"
        if packed is not None or (module[end].dtype in _QUANTIZED and len(weight) > 1):
            laid[end] = f"it is quantized ({module[end].dtype}), but has no scale tensor"
    units = [config.weight_block_size] if config.weight_block_size else [one.units for one in config.schemes]
    for end, tensor in module.items():
        if end in ("_scale", "_scale_inv", "_zero_point"):
            in_words = bits if packed is not None and end == "_zero_point" and tensor.dtype == packed.dtype else 0
            laid[end] = _lay_scale(tensor, weight, units, in_words, "_g_idx" in module)
        elif end == "_g_idx":
            lead = tuple(map(Axis, range(len(tensor.shape) - 1)))
            fits = (*weight[: len(lead)], *weight[-1:]) == tensor.shape
            laid[end] = Storage(weight, (*lead, Axis(len(weight) - 1))) if fits else _no_fit(tensor, weight)
        elif end == "_shape":
            laid[end] = Storage(weight, (None,) * len(tensor.shape))
    return laid | _lay_activations(module, weight)


def _lay_activations(module: Module, weight: Shape) -> Laid:
    """Return the storage of scales per tensor or per expert: of activations, and second scales."""
    laid: Laid = {}
    for end, tensor in module.items():
        if not end or (end.startswith("_") and end not in PER_TENSOR):
            continue
        experts = tensor.shape[:1] if len(weight) > 2 and tensor.shape[:1] == weight[:1] else ()
        if math.prod(tensor.shape) == math.prod(experts):
            axes = (Axis(0), *[None] * (len(tensor.shape) - 1)) if experts else (None,) * len(tensor.shape)
            laid[end] = Storage(weight, axes)
        else:
            laid[end] = f"shape {tensor.shape}, where one number for the whole tensor was expected"
    return laid


_QUANTIZED = ("I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def _lay_scale(
    tensor: Tensor, weight: Shape, units: Sequence[tuple[int, int]], packed_bits: int, any_order: bool
) -> Storage | str:
    """Return the storage of scales or zero points. `packed_bits`: bits of zero points packed along the outputs."""
    shape, out = tensor.shape, len(weight) - 2
    if packed_bits:
        word = _word_bits(tensor)
        if len(shape) != len(weight) or shape[out] != _words(weight[out], packed_bits, word):
            return _no_fit(tensor, weight)
        shape = (*shape[:out], weight[out], shape[-1])
    found = [axes for unit in units if (axes := _along(shape, weight, unit)) is not None]
    if not found:
        axes = _along(shape, weight, (0, 0))
        if axes is None:
            return _no_fit(tensor, weight)
        found = [axes]
    # Whole groups are likelier than a shorter last one.
    axes = min(found, key=lambda axes: sum(axis is not None and weight[axis.dim] % axis.values != 0 for axis in axes))
    if packed_bits:
        axes = (*axes[:out], _packed(out, packed_bits, word), axes[-1])
    if any_order:
        axes = tuple(None if axis is not None and axis.dim == len(weight) - 1 else axis for axis in axes)
    return Storage(weight, axes)


def _along(shape: Shape, weight: Shape, units: tuple[int, int]) -> tuple[Axis | None, ...] | None:
    """Return the axis of each dimension: one scale per index, per unit, or for all. None if nothing fits."""
    if len(shape) > len(weight):
        return (None,) * len(shape) if math.prod(shape) == 1 else None
    axes: list[Axis | None] = []
    for dim, (count, size) in enumerate(zip(shape, weight, strict=False)):
        place = dim - (len(weight) - 2)
        unit = units[place] if len(shape) == len(weight) and place >= 0 else 0
        if unit > 1 and count == -(-size // unit):
            axes.append(Axis(dim, unit, 1, "blocks" if min(units) > 1 else "groups"))
        elif count == size:
            axes.append(Axis(dim))
        elif count == 1:
            axes.append(None)
        else:
            return None
    return tuple(axes)


def _unpack_shape(module: Module, schemes: Sequence[WeightScheme]) -> tuple[Shape, int] | str:
    """Return the shape of the weight in `_packed`, and its bits. The last word of a row may be partly used."""
    packed, scale, g_idx = module["_packed"], module.get("_scale"), module.get("_g_idx")
    if len(packed.shape) < 2:
        return f"shape {packed.shape}, where a packed weight was expected"
    word = _word_bits(packed)
    words = packed.shape[-1]
    found = set()
    for scheme in schemes:
        bits, group = scheme.num_bits, scheme.units[1]
        most = words * word // bits
        if g_idx is not None and g_idx.shape:
            most = min(most, g_idx.shape[-1])
        if group > 1 and scale is not None and scale.shape:
            groups = scale.shape[-1]
            inputs = groups * group if groups * group <= most else most
            fits = -(-inputs // group) == groups
        else:
            inputs = most
            fits = scale is None or not scale.shape or scale.shape[-1] == 1
        if fits and _words(inputs, bits, word) == words:
            found.add(((*packed.shape[:-1], inputs), bits))
    if len(found) == 1:
        return found.pop()
    if not found:
        return f"shape {packed.shape} fits none of the config_groups in config.json, given its scale"
    return "the config_groups in config.json do not determine the bits of its values"


def _packed(dim: int, bits: int, word: int) -> Axis:
    common = math.gcd(bits, word)
    return Axis(dim, word // common, bits // common, "packed words")


def _grouped(dim: int, group: int | None) -> Axis | None:
    return Axis(dim, group, 1, "groups") if group else None


def _group_size(inputs: int, groups: int, stored: int | None) -> int | None:
    """Return the inputs of one group; 0: one group for all, None: nothing fits."""
    if stored is not None and stored > 0 and groups == -(-inputs // stored):
        return stored
    if groups == 1:
        return 0
    return inputs // groups if groups and inputs % groups == 0 else None


def _words(values: int, bits: int, word: int) -> int:
    return -(-values * bits // word)


def _word_bits(tensor: Tensor) -> int:
    return element_bits(tensor.shape, tensor.size_bytes) or 8


def _missing(module: Module, needed: Sequence[str]) -> Laid | None:
    lacking = [name for name in needed if name not in module]
    return _blame("qweight", module, f"its module has no {' and no '.join(lacking)}") if lacking else None


def _misfit(module: Module, name: str) -> Laid:
    shapes = ", ".join(f"{end} {tensor.shape}" for end, tensor in module.items())
    return _blame("qweight", module, f"the shapes of its module are not those of {name}: {shapes}")


def _blame(end: str, module: Module, problem: str) -> Laid:
    """Return the problem under one tensor of a module, so that the message names it once."""
    return {**{other: Storage((), (None,) * len(tensor.shape)) for other, tensor in module.items()}, end: problem}


def _no_fit(tensor: Tensor, weight: Shape) -> str:
    return f"shape {tensor.shape} does not fit its weight, {weight}, in the groups or blocks of config.json"


BLOCK = 64  # consecutive weights that share an absmax
# Quantiles of the normal distribution, with 0 and both ends. A constant of the format.
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
ABSMAX, QUANT_MAP, STATE = ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # dtypes that the weights are dequantized to


def packed_state(dtype: str, shape: Sequence[int]) -> bytes:
    """Return the JSON as bitsandbytes writes it. `dtype` is a safetensors name, `shape` the rank's weight's."""
    fields = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": DTYPES[dtype], "shape": list(shape)}
    return json.dumps(fields).encode()


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
