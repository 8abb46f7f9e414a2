"""A rank's tensors in torch: views into its segments, and conversions.

A staged tensor is converted into a cast, or into a quantized weight and its scales.

The plan names the memory for the results. Rows are converted a few at a time, on a CPU by the calling thread alone.

Integers and fp8 follow compressed-tensors with symmetric scales from the smallest and largest weight (its
`calculate_qparams`, `quantize`, `pack_to_int32`). Each step is rounded to the same dtype, so the bytes are the same:

    scale = max |w| / half the range        in the dtype of the weights; 0 becomes the dtype's epsilon
    q     = round(clamp(w / scale, range))            fp8: the nearest e4m3 to clamp(w / scale, -448, 448)

NF4 follows bitsandbytes: the same bytes that its `quantize_4bit` makes on a CPU, with blocks of 64 weights:

    absmax = max |w| of a block                                    float32
    number = how many of the fifteen middles between neighbouring values are less than w * (1 / absmax)

A table gives the position of each weight among the middles. On a CPU that is about ten times as fast as a search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from cluster.layouts.region import Range, Region
from cluster.planning.plan import SliceTable, StagedTensor, TensorSlice
from cluster.precision import quantized_tensors
from cluster.precision.quantized_tensors import BLOCK, VALUES
from cluster.precision.recipes import GROUP, SCHEMES, Scheme
from storage.checkpoints.safetensors_header import tensor_bytes
from storage.host.memory import without_collector


def tensor_views(segments: Sequence[torch.Tensor], slices: Sequence[TensorSlice]) -> dict[str, torch.Tensor]:
    """Return tensors by name, with all padding set to zero. `segments` are blocks of uint8."""
    table = SliceTable.of(slices)
    # A view is half a microsecond of torch's own work, so a tensor is one call on a typed segment.
    strided: dict[tuple[int, torch.dtype], Callable[..., torch.Tensor]] = {}
    kinds = []
    for kind in table.kinds:
        dtype, shape = torch_dtype(kind.dtype, kind.sizes)
        # The memory may hold bytes of an earlier load.
        padded = kind.filled_bytes < kind.size_bytes and kind.suffix is None
        kinds.append((dtype, dtype.itemsize, shape, _strides(shape), (kind.filled_bytes, kind.size_bytes), padded))
    views = {}
    with without_collector():
        for name, number, segment, offset in table.rows():
            dtype, item_bytes, shape, strides, (filled_bytes, size_bytes), padded = kinds[number]
            if padded:
                segments[segment][offset + filled_bytes : offset + size_bytes].zero_()
            make = strided.get((segment, dtype))
            if make is None:
                whole = segments[segment]
                typed = whole[: whole.nbytes // item_bytes * item_bytes].view(dtype)
                make = strided[segment, dtype] = typed.as_strided
            views[name] = make(shape, strides, offset // item_bytes)
    return views


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch counts them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def torch_dtype(name: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the torch dtype for a safetensors dtype, and the shape in its elements.

    Dtypes that this torch lacks, and those smaller than a byte, become `uint8` with the packed bytes in the last
    dimension. The result is flat when the shape has no dimension or the bytes do not divide evenly.
    """
    known = getattr(torch, _TORCH_NAMES.get(name, ""), None)
    if isinstance(known, torch.dtype):
        return known, shape
    total = tensor_bytes(name, shape)
    leading = 1
    for length in shape[:-1]:
        leading *= length
    if shape and leading and total % leading == 0:
        return torch.uint8, (*shape[:-1], total // leading)
    return torch.uint8, (total,)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in order, with shape (bytes,). They share its memory when it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# safetensors' dtype names -> attribute of the torch module
_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}


_STORED_NAMES = {
    getattr(torch, attribute): name for name, attribute in _TORCH_NAMES.items() if hasattr(torch, attribute)
}


def stored_dtype(dtype: torch.dtype) -> str | None:
    """Return safetensors' name of a dtype, or None if the format lacks it. "F4" has two elements in one of torch."""
    if dtype is getattr(torch, "float4_e2m1fn_x2", None):
        return "F4"
    return _STORED_NAMES.get(dtype)


_LEAST = 1e-38  # replaces a smaller absmax, so that 1 / absmax is finite
# The number of steps from -1 to 1. It is large enough that no step holds two middles. Adding _NF4_ROUNDS to a position
# in steps makes float32 round it to an integer, which is then in the low bits.
_STEPS = 128
_NF4_ROUNDS = 1.5 * 2**23 + _STEPS // 2


def quantize_nf4(
    weight: torch.Tensor, dtype: torch.dtype, packed: torch.Tensor, absmax: torch.Tensor, at_once: int
) -> None:
    """Quantize `weight`, flat and of whole blocks, into numbers in `packed` and scales in `absmax`, flat too.

    `dtype`: the weight is cast to it first. `at_once`: weights to convert in one step, at least a block.
    """
    step = max(1, at_once // BLOCK) * BLOCK
    for first in range(0, len(weight), step):
        block = weight[first : first + step].to(dtype).float().reshape(-1, BLOCK)
        largest = block.abs().amax(-1, keepdim=True)
        absmax[first // BLOCK : first // BLOCK + len(block)] = largest[:, 0]
        scaled = (block * largest.clamp(min=_LEAST).reciprocal()).reshape(-1)
        # Infinity and NaN have no step. A GPU always searches, because asking it for such values would wait for it.
        known = not weight.is_cuda and bool(largest.isfinite().all())
        numbers = _look_up(scaled) if known else _search(scaled)
        pairs = numbers.view(torch.int16)  # little-endian: the first number is the low byte
        packed[first // 2 : (first + step) // 2].copy_(pairs << 4 | pairs >> 8)  # keeps the low byte of each pair


def _search(scaled: torch.Tensor) -> torch.Tensor:
    """Return the numbers of any weights, NaN and infinity included."""
    return torch.bucketize(scaled, _middles(scaled.device), out_int32=True).to(torch.uint8)


def _look_up(scaled: torch.Tensor) -> torch.Tensor:
    """Return the numbers of weights from -1 to 1."""
    below, middle = _table()
    step = _step_of(scaled)
    numbers = below.index_select(0, step)
    return numbers.add_((scaled > middle.index_select(0, step)).view(torch.uint8))


def _step_of(scaled: torch.Tensor) -> torch.Tensor:
    """Return the step of each weight.

    Steps never decrease with the weight. So a middle in an earlier step is less than the weight, and one in a later
    step is not.
    """
    return (scaled * (_STEPS // 2)).add_(_NF4_ROUNDS).view(torch.int32).bitwise_and_(2 * _STEPS - 1)


@cache
def _table() -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each step the number of middles before it and the middle in it, infinity when it has none."""
    middles = _middles(torch.device("cpu"))
    steps = _step_of(middles)
    below = torch.bucketize(torch.arange(_STEPS + 1), steps).to(torch.uint8)
    middle = torch.full((_STEPS + 1,), torch.inf)
    middle[steps.long()] = middles
    return below, middle


@cache
def _middles(device: torch.device) -> torch.Tensor:
    values = torch.tensor(VALUES, device=device)
    return (values[:-1] + values[1:]) / 2


# Elements converted at once. On a CPU they are too few for torch to use several threads. On a host with many ranks
# those threads would busy-wait for each other in every operation, for longer than the operation takes.
BLOCK_ELEMENTS = (1 << 15) - 1
GPU_BLOCK_ELEMENTS = 1 << 23
_ROUNDS = 1.5 * 2**23
_RANGES = {4: (-8.0, 7.0), 8: (-128.0, 127.0)}
_FP8_RANGE = (-448.0, 448.0)


def convert(
    staged: StagedTensor, source: torch.Tensor, slices: Sequence[TensorSlice], made: list[torch.Tensor]
) -> None:
    """Fill `made`, the memory of `slices`, from `source`, the memory of the staged tensor. All are uint8."""
    piece = staged.source
    weight = _viewed(source, piece)
    views = [_viewed(data, each) for data, each in zip(made, slices, strict=True)]
    if not staged.recipe.scheme:
        views[0].copy_(weight)
        return
    scheme, dtype = SCHEMES[staged.recipe.scheme], torch_dtype(staged.recipe.dtype, ())[0]
    if scheme.scale == "block":
        quantize_nf4(weight.reshape(-1), dtype, views[0].reshape(-1), views[1], _at_once(weight))
        views[2].copy_(torch.tensor(quantized_tensors.VALUES))
        views[3].copy_(
            torch.tensor(list(quantized_tensors.packed_state(staged.recipe.dtype, piece.sizes)), dtype=torch.uint8)
        )
        return
    if scheme.packed:
        views[2].copy_(torch.tensor(piece.shape))
    recorded = staged.amax()
    amax = None if recorded is None else torch.from_numpy(recorded).to(weight.device, dtype)
    if weight.ndim == 2:
        _matrix(weight, scheme, dtype, staged.region, views[0], views[1], amax)
        return
    rows, columns = staged.region.ranges[1:]
    for expert in range(weight.shape[0]):
        held = Region((rows, columns))
        most = None if amax is None else amax[expert]
        _matrix(weight[expert], scheme, dtype, held, views[0][expert], views[1][expert], most)


def _viewed(data: torch.Tensor, piece: TensorSlice) -> torch.Tensor:
    dtype = torch_dtype(piece.dtype, piece.sizes)[0]
    # An empty tensor from numpy has no stride that torch accepts for a view as another dtype.
    return (data.view(dtype) if len(data) else data.new_empty(0, dtype=dtype)).reshape(piece.sizes)


def _matrix(
    weight: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    held: Region,
    made: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
) -> None:
    """Convert one (out, in) matrix. `held` names its wanted columns, and its wanted rows when the matrix is whole.

    `amax` holds the largest absolute values of its rows, or of all of it. When given, `weight` has only the wanted
    part. Rounding keeps order, so the largest value rounded is the largest of the rounded values.
    """
    low, high = _RANGES[scheme.bits] if scheme.packed else _FP8_RANGE
    # A tensor, because a GPU divides by a number by multiplying with its inverse, which rounds differently.
    half = torch.tensor((high - low) / 2, dtype=dtype, device=weight.device)
    whole = amax is not None or scheme.scale == "group"
    columns: Sequence[Range] = ((0, weight.shape[1]),) if whole else held.ranges[1]
    starts: Sequence[Range] = ((0, weight.shape[0]),)
    if scheme.scale == "tensor" and amax is not None:
        scale.fill_(_scale(amax.reshape(()), half))
    elif scheme.scale == "tensor":
        blocks = _blocks(starts, weight)
        largest = torch.stack([weight[first:end].to(dtype).abs().amax() for first, end in blocks]).amax()
        scale.fill_(_scale(largest, half))
        starts = held.ranges[0]
    place = 0
    for first, end in _blocks(starts, weight):
        block = weight[first:end].to(dtype)
        here = slice(place, place + end - first)
        place = here.stop
        if scheme.scale == "channel":
            scale[here] = _scale(block.abs().amax(-1, keepdim=True) if amax is None else amax[here].unsqueeze(1), half)
        wanted, by = _columns(block, columns), scale if scheme.scale == "tensor" else scale[here]
        if scheme.scale == "group":
            wanted = wanted.reshape(len(wanted), -1, GROUP)
            scale[here] = _scale(wanted.abs().amax(-1), half)
            by = scale[here].unsqueeze(-1)
        scaled = (wanted / by).clamp_(low, high).reshape(len(block), -1)
        if scheme.packed:
            # NaN becomes 0, as in the library's cast. It occurs only where a scale is not finite. On a GPU the check
            # would wait for the answer, so it is left out.
            if scaled.is_cuda or not bool(by.isfinite().all()):
                scaled = scaled.nan_to_num_(nan=0.0)
            # Adding _ROUNDS makes float32 round half to even. The low byte is then the result with an offset.
            positive = (scaled.float() + (_ROUNDS - low)).view(torch.int32).to(torch.uint8)
            _pack(positive, scheme.bits, made[here].view(torch.uint8))
        else:
            made[here] = scaled.add_(0).to(made.dtype)  # the zero point: -0 becomes 0
    made[place:].zero_()  # padding that the staged tensor does not have


def _scale(largest: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """Return the scale. `largest` is the largest absolute value among the weights that share it."""
    scale = largest / half
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _pack(positive: torch.Tensor, bits: int, words: torch.Tensor) -> None:
    """Pack rows of numbers into rows of little-endian 32-bit words, given as bytes, first number in the lowest bits."""
    if bits == 4:
        pairs = positive.view(torch.int16)
        words.copy_(pairs | pairs >> 4)  # keeps the low byte of each pair
        return
    words[:, : positive.shape[1]] = positive
    words[:, positive.shape[1] :].zero_()


def _columns(block: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    if len(ranges) == 1:
        return block[:, ranges[0][0] : ranges[0][1]]
    return torch.cat([block[:, first:end] for first, end in ranges], 1)


def _at_once(weight: torch.Tensor) -> int:
    return GPU_BLOCK_ELEMENTS if weight.is_cuda else BLOCK_ELEMENTS


def _blocks(ranges: Sequence[Range], weight: torch.Tensor) -> list[Range]:
    """Split the ranges of rows into blocks of a few rows."""
    step = max(1, _at_once(weight) // max(1, weight.shape[1]))
    return [(at, min(at + step, end)) for first, end in ranges for at in range(first, end, step)]
