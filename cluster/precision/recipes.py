"""Recipes: how each tensor is converted during a load, by a cast or to a quantized weight with its scales. Pure.

    Precision --decide_recipes--> Recipe of each tensor (None: as it is stored)
    Recipe + Region --> outputs: the tensors that the rank holds instead      x.weight -> x.weight, x.weight_scale
                    --> reads: what it must read for them                     row cut, scale per row: whole rows

Names, packing and numerics are those of compressed-tensors, which vLLM, SGLang and transformers read, and for nf4 those
of bitsandbytes. A scale depends on the stored tensor alone, never on its cut. So any number of ranks produces the same
bytes.

*Tensors that are quantized*: matrices of linear layers, and of experts. A format describes how linear layers are
quantized, and readers look at no other modules. An embedding or a router also has an `x.weight`, but readers would take
its quantized bytes as plain numbers. So those are never quantized. Experts in one tensor (expert, out, in) are
quantized only on request, because no library reads them quantized.

*Recorded maxima*: `RecordedAmax` has the largest absolute values of weights, recorded at publishing. A scale per row of
a weight (out, in) needs one number for each row, and of experts (n, out, in) n times as many. A scale per matrix needs
one for each matrix. So a rank that holds a part of a row can compute the scale of the whole row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from cluster.argument_types import Dtype, DtypeName
from cluster.errors import ConfigError
from cluster.layouts.families import HEADS, OTHER_EMBEDDINGS, ROUTERS, TOKEN_EMBEDDINGS, TOWERS
from cluster.layouts.region import Range, Region, whole
from cluster.layouts.rules import MAX_RULES, parse_rules, pattern_problem, unmatched
from cluster.precision import quantized_tensors
from cluster.precision.quantized_tensors import OF_ACTIVATIONS
from storage.checkpoints.amax import WEIGHT_DTYPES, is_stacked, is_weight_matrix
from storage.checkpoints.model_index import Tensor
from storage.checkpoints.safetensors_header import DTYPE_BITS
from storage.problems import MAX_LISTED, quote

DEFAULT = "default"  # among the patterns to skip, it stands for SKIPPED_PARTS
_GATE_OF_ONE = "shared_expert_gate"  # a linear layer with one output
# Modules with a row for each token or position, and routers.
NO_LINEAR_LAYERS = frozenset((*TOKEN_EMBEDDINGS, *OTHER_EMBEDDINGS, *ROUTERS, "relative_attention_bias")) - {
    _GATE_OF_ONE
}
# Tensors below any module of these names also stay as stored: heads, and towers for other inputs.
SKIPPED_PARTS = frozenset((*HEADS, *TOWERS, _GATE_OF_ONE))
# model_type -> the module whose weights are (in, out) instead of (out, in); "": all modules
STORED_BY_INPUT = {
    **dict.fromkeys(("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"), ""),
    **dict.fromkeys(("gpt_oss", "llama4", "llama4_text"), "experts"),
}


def is_matrix(tensor: Tensor) -> bool:
    """Return whether the tensor is a matrix of a linear layer or of experts."""
    linear = is_stacked(tensor.name, tensor.shape) or NO_LINEAR_LAYERS.isdisjoint(tensor.name.split("."))
    return linear and is_weight_matrix(tensor)


def skipper(patterns: Sequence[str]) -> Callable[[Tensor], bool]:
    """Return a function that tells whether a tensor stays as stored by these patterns."""
    find = parse_rules({pattern: "replicate" for pattern in patterns if pattern != DEFAULT}).finder()
    usual = DEFAULT in patterns

    def is_skipped(tensor: Tensor) -> bool:
        if usual and (is_stacked(tensor.name, tensor.shape) or not SKIPPED_PARTS.isdisjoint(tensor.name.split("."))):
            return True
        return find(tensor.name) is not None

    return is_skipped


def check_rows(tensor: Tensor, family: str) -> None:
    """Raise ConfigError for a weight whose rows are not outputs, as every format that is written here needs."""
    whose = STORED_BY_INPUT.get(family)
    if whose is not None and (not whose or whose in tensor.name.split(".")):
        raise ConfigError(
            f"{tensor.name!r:.200} cannot be quantized: {family} stores it with a row for each input",
            hint=f'skip it with skip_quantization=["default", "**.{whose}.*"]'
            if whose
            else "load it without quantization",
        )


GROUP = 128  # weights of a row that share a scale, with int4
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
DTYPES = ("auto", *_DTYPES)
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DTYPE_NAMES = get_args(DtypeName)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantization scheme."""

    bits: int
    # weights that share a scale: "channel" (a row), "tensor" (a matrix), "group" (GROUP weights), "block" (nf4.BLOCK)
    scale: str
    packed: bool  # integers, offset to be positive, packed in 32-bit words
    unit: int  # weights of a row that a cut must not separate


SCHEMES = {
    "fp8": Scheme(8, "channel", packed=False, unit=1),
    "fp8_tensor": Scheme(8, "tensor", packed=False, unit=1),
    "int8": Scheme(8, "channel", packed=True, unit=4),
    "int4": Scheme(4, "group", packed=True, unit=GROUP),
    "nf4": Scheme(4, "block", packed=False, unit=quantized_tensors.BLOCK),
}
QUANTIZATIONS = ("", *SCHEMES)

_SIDE_BY_SIDE = ("group", "block")  # weights of a row share a scale, so a rank reads only what it holds
_EXACT = ("e_score_correction_bias", "inv_freq")  # used in float32, whatever the model is cast to
_FLOATS = WEIGHT_DTYPES
_SMALL_FLOATS = ("F8_E4M3", "F8_E5M2")
# Tensors that only a quantized checkpoint has.
_QUANTIZED = re.compile(
    r"(?:^|.*[._])(?:qweight|qzeros|scales|g_idx|absmax|quant_map|SCB|"
    r"(?:weight|input|activation|proj)_(?:scale|scale_inv|scale_2|scales|packed|blocks|zero_point|shape|global_scale|"
    r"input_scale|activation_scale|g_idx))\Z",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Precision:
    """The requested precision. Raises ConfigError for invalid values.

    `skip` has patterns (as in layout rules) of tensors that are not quantized. DEFAULT stands for the usual ones.
    """

    dtype: str = "auto"  # dtype of floating-point tensors that are not quantized; auto: as stored
    quantization: str = ""  # a key of SCHEMES
    skip: tuple[str, ...] = (DEFAULT,)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            names = ", ".join(DTYPE_NAMES)
            raise ConfigError(f"dtype must be one of {names} or a torch.dtype, not {self.dtype!r:.40}")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization must be one of {', '.join(SCHEMES)}, not {self.quantization!r:.40}")
        if self.quantization and self.dtype == "float32":
            raise ConfigError(
                f"quantization={self.quantization!r} and dtype='float32' contradict each other",
                hint="omit dtype, or use bfloat16 or float16 for the tensors that are not quantized",
            )
        wrong = [problem for pattern in self.skip if (problem := pattern_problem(pattern))]
        if wrong or len(self.skip) > MAX_RULES:
            raise ConfigError(
                f"bad skip_quantization: {'; '.join(wrong[:20]) or f'more than {MAX_RULES} patterns'}",
                hint='patterns of tensor names, such as "**.down_proj.weight", and "default" for the usual ones',
            )

    def __str__(self) -> str:
        named = [self.quantization, self.dtype if self.dtype != "auto" else ""]
        return ", ".join(filter(None, named)) or "as stored"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The conversion of one stored tensor."""

    dtype: str  # safetensors name: the dtype it is cast to, or in which it is computed
    scheme: str = ""  # a key of SCHEMES; "": only cast


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a stored one is converted to, and the region that a rank holds of it."""

    suffix: str  # appended to the stored tensor's name
    dtype: str
    shape: tuple[int, ...]  # shape of the whole tensor
    region: Region
    form: tuple[int, ...] = ()  # shape of the rank's tensor in its format; empty: the region's

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the rank's region."""
        return region_bytes(self.region, self.dtype)


def region_bytes(region: Region, dtype: str) -> int:
    """Return the bytes of a rank's tensor of whole-byte elements, padding included."""
    count = 1
    for size in region.sizes:
        count *= size
    return count * DTYPE_BITS[dtype] // 8


def dtype_of(given: Dtype) -> str:
    """Return the name in DTYPES for a name in DTYPE_NAMES or a torch.dtype. Return other values as text."""
    name = given if isinstance(given, str) else str(given).removeprefix("torch.")
    return _SHORT.get(name, name) if name in DTYPE_NAMES else str(given)


def make_precision(dtype: Dtype, quantization: str | None, skip: Sequence[str] | None) -> Precision:
    """Return the precision for arguments of a public function. None means the default. Raises ConfigError."""
    return Precision(dtype_of(dtype), quantization or "", (DEFAULT,) if skip is None else tuple(skip))


def decide_recipes(tensors: Sequence[Tensor], precision: Precision, family: str = "") -> list[Recipe | None]:
    """Return the recipe of each tensor, in order. `family` is `model_type` of config.json.

    Raises ConfigError if the model is quantized already, has no weight to quantize, or has a weight that cannot be
    quantized.
    """
    _check_skipped(tensors, precision.skip)
    if precision.dtype == "auto" and not precision.quantization:
        return [None] * len(tensors)
    quantized = next((tensor for tensor in tensors if _QUANTIZED.match(tensor.name)), None)
    if precision.quantization:
        quantized = quantized or next((tensor for tensor in tensors if tensor.dtype not in _PLAIN), None)
        if quantized is not None:
            raise ConfigError(
                f"the model is already quantized: it has {quantized.name!r:.200} ({quantized.dtype})",
                hint="load it without the quantization argument",
            )
    target = _DTYPES.get(precision.dtype)
    is_skipped = skipper(precision.skip)
    found: list[Recipe | None] = []
    for tensor in tensors:
        if precision.quantization and is_weight(tensor, precision.quantization) and not is_skipped(tensor):
            check_rows(tensor, family)
            computed = tensor.dtype if tensor.dtype in _DTYPES.values() else "F32"
            found.append(Recipe(target or computed, precision.quantization))
        elif target and tensor.dtype != target and _is_cast(tensor, target, quantized is not None):
            found.append(Recipe(target))
        else:
            found.append(None)
    if precision.quantization and not any(recipe is not None and recipe.scheme for recipe in found):
        raise ConfigError(
            f"quantization={precision.quantization!r} applies to no weight of the model",
            hint="it applies to matrices of linear layers, called *.weight; rows must be a multiple of "
            f"{GROUP} for int4, of {quantized_tensors.BLOCK} for nf4; all experts in one tensor only where "
            f"skip_quantization is given without {DEFAULT!r}; skip_quantization may leave none",
        )
    return found


def _check_skipped(tensors: Sequence[Tensor], skip: Sequence[str]) -> None:
    """Raise ConfigError for patterns without a match. A typing error would quantize tensors that must stay."""
    if lost := unmatched([pattern for pattern in skip if pattern != DEFAULT], (tensor.name for tensor in tensors)):
        raise ConfigError(
            f"skip_quantization names no tensor of the model: {', '.join(map(quote, lost[:MAX_LISTED]))}",
            hint='patterns match whole tensor names: "**.down_proj.weight" or "**.down_proj.*", not "down_proj"',
        )


def is_weight(tensor: Tensor, scheme: str) -> bool:
    """Return whether the tensor is a matrix of a linear layer, or of experts, that the scheme can quantize."""
    unit = SCHEMES[scheme].unit if SCHEMES[scheme].scale in _SIDE_BY_SIDE else 1
    return is_matrix(tensor) and tensor.shape[-1] % unit == 0


def read_region(recipe: Recipe | None, shape: tuple[int, ...], region: Region) -> Region:
    """Return what a rank must read to convert `region`. It includes all that the scales depend on."""
    if recipe is None or not recipe.scheme or SCHEMES[recipe.scheme].scale in _SIDE_BY_SIDE:
        return region
    rows = ((0, shape[-1]),)
    if SCHEMES[recipe.scheme].scale == "channel":
        return Region((*region.ranges[:-1], rows), region.padding)
    return whole(shape) if len(shape) == 2 else Region((region.ranges[0], ((0, shape[1]),), rows))


def outputs_of(recipe: Recipe | None, dtype: str, shape: tuple[int, ...], region: Region) -> tuple[Output, ...]:
    """Return the tensors that a rank holds instead of `region` of a stored tensor."""
    if recipe is None or not recipe.scheme:
        return (Output("", recipe.dtype if recipe else dtype, shape, region),)
    scheme = SCHEMES[recipe.scheme]
    if scheme.scale == "block":
        return _nf4_outputs(recipe, shape, region)
    outer, columns, held = shape[:-1], shape[-1], region.ranges
    if scheme.scale == "channel":
        scale = Output("_scale", recipe.dtype, (*outer, 1), Region((*held[:-1], ((0, 1),)), region.padding))
    elif scheme.scale == "group":
        groups = _scaled(held[-1], GROUP)
        scale = Output("_scale", recipe.dtype, (*outer, columns // GROUP), Region((*held[:-1], groups), region.padding))
    elif len(shape) == 2:
        scale = Output("_scale", recipe.dtype, (1,), whole((1,)))
    else:  # a scale for each expert
        scale = Output("_scale", recipe.dtype, (shape[0], 1, 1), Region((held[0], ((0, 1),), ((0, 1),))))
    if not scheme.packed:
        return Output("", "F8_E4M3", shape, region), scale
    weights = 32 // scheme.bits  # weights in one word
    packed = Region((*held[:-1], _scaled(held[-1], weights)), region.padding)
    return (
        Output("_packed", "I32", (*outer, -(-columns // weights)), packed),
        scale,
        Output("_shape", "I64", (len(shape),), whole((len(shape),))),
    )


def cut_problem(recipe: Recipe | None, shape: tuple[int, ...], region: Region) -> str | None:
    """Return why the region of a rank cannot be converted on its own, or None."""
    if recipe is None or not recipe.scheme:
        return None
    unit = SCHEMES[recipe.scheme].unit
    bounds = sorted(bound for one in region.ranges[-1] for bound in one if bound % unit and bound != shape[-1])
    if not bounds:
        return None
    return f"{recipe.scheme} keeps {unit} weights of a row together, and rows of {shape[-1]} are cut at {bounds[0]}"


def _nf4_outputs(recipe: Recipe, shape: tuple[int, ...], region: Region) -> tuple[Output, ...]:
    """Return flat tensors. Their regions describe the same bytes as rows."""

    def part(suffix: str, dtype: str, by: int, form: Callable[[int], tuple[int, ...]]) -> Output:
        held = Region((*region.ranges[:-1], _scaled(region.ranges[-1], by)), region.padding)
        return Output(suffix, dtype, (*shape[:-1], shape[-1] // by), held, form(math.prod(held.sizes)))

    values, state = (len(quantized_tensors.VALUES),), (len(quantized_tensors.packed_state(recipe.dtype, region.sizes)),)
    return (
        part("", "U8", 2, lambda size_bytes: (size_bytes, 1)),
        part(quantized_tensors.ABSMAX, "F32", quantized_tensors.BLOCK, lambda blocks: (blocks,)),
        Output(quantized_tensors.QUANT_MAP, "F32", values, whole(values)),
        Output(quantized_tensors.STATE, "U8", state, whole(state)),
    )


_PLAIN = {name for name, bits in DTYPE_BITS.items() if name in _FLOATS or name[0] in "BCIU"}


def _is_cast(tensor: Tensor, target: str, quantized: bool) -> bool:
    """Return whether a tensor is cast. Small floats of a quantized checkpoint and their scales are not."""
    scale = _QUANTIZED.match(tensor.name) or tensor.name.endswith(OF_ACTIVATIONS)
    if quantized and (tensor.dtype in _SMALL_FLOATS or scale):
        return False
    if target != "F32" and tensor.name.rpartition(".")[2] in _EXACT:
        return False
    return tensor.dtype in _FLOATS or tensor.dtype in _SMALL_FLOATS


def _scaled(ranges: tuple[Range, ...], by: int) -> tuple[Range, ...]:
    return tuple((start // by, -(-end // by)) for start, end in ranges)


Amax = NDArray[np.float32]
SCALES = ("channel", "tensor")  # scales that need maxima; for others a rank reads only what it holds


@dataclass(frozen=True, slots=True, eq=False)
class RecordedAmax:
    """The recorded maxima of m tensors of a model, concatenated."""

    tensors: NDArray[np.int32]  # (m,) numbers of the tensors, ascending
    ends: NDArray[np.int64]  # (m,) where each tensor's maxima end in `values`
    values: Amax

    def select(self, tensors: NDArray[np.int64]) -> RecordedAmax:
        """Return the maxima of these tensors, numbered by their places among them. `tensors` ascend."""
        at = np.searchsorted(self.tensors, tensors)
        at[at == len(self.tensors)] = 0
        has = np.flatnonzero(self.tensors[at] == tensors) if len(self.tensors) else np.empty(0, np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), self.ends])
        values = [self.values[starts[row] : self.ends[row]] for row in at[has].tolist()]
        ends = np.cumsum([len(each) for each in values], dtype=np.int64)
        return RecordedAmax(has.astype(np.int32), ends, np.concatenate([np.zeros(0, np.float32), *values]))

    def part(self, tensor: int, shape: tuple[int, ...], scale: str, region: Region) -> Amax:
        """Return the maxima for the region of one tensor: (rows,) or (1,), for experts (experts, rows) or (experts,).

        Rows of padding have 0.
        """
        at = int(np.searchsorted(self.tensors, tensor))
        start = int(self.ends[at - 1]) if at else 0
        values = self.values[start : int(self.ends[at])]
        if scale == "tensor":
            return values.copy() if len(shape) == 2 else _taken(values, 0, region)
        rows = values.reshape(shape[:-1])
        for dim in range(rows.ndim):
            rows = _taken(rows, dim, region)
        padding = np.zeros((region.padding, *rows.shape[1:]), np.float32)
        return np.concatenate([rows, padding])


def gather(tensors: Sequence[int], found: Sequence[tuple[Amax, str]]) -> RecordedAmax:
    """Concatenate the maxima of tensors, given as the maxima of their rows and what shares a scale."""
    values = [rows.reshape(-1) if scale == "channel" else _of_matrices(rows) for rows, scale in found]
    return RecordedAmax(
        np.array(tensors, np.int32),
        np.cumsum([len(each) for each in values], dtype=np.int64),
        np.concatenate([np.zeros(0, np.float32), *values]),
    )


def carried_bytes(shape: tuple[int, ...], scale: str) -> int:
    """Return the bytes of a tensor's maxima in a plan."""
    return 4 * math.prod(shape[:-1] if scale == "channel" else shape[:-2])


def are_finite(found: Mapping[str, Amax], name: str) -> bool:
    """Return whether the maxima are finite. Otherwise only the tensor itself determines its scales."""
    return bool(np.isfinite(found[name]).all())


def _of_matrices(rows: Amax) -> Amax:
    most: Amax = rows.max(axis=-1).reshape(-1)
    return most


def _taken(values: Amax, dim: int, region: Region) -> Amax:
    parts = [values[(slice(None),) * dim + (slice(start, end),)] for start, end in region.ranges[dim]]
    return np.concatenate([values[(slice(None),) * dim + (slice(0, 0),)], *parts], axis=dim)
