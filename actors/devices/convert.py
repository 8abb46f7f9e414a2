"""What a staged tensor becomes: a cast, or a quantized weight and its scales. Torch; the plan says into which memory.

Numerics are those of compressed-tensors with symmetric scales from the smallest and largest weight (its
`calculate_qparams`, `quantize`, `pack_to_int32`), each step rounded to the same dtype, so the bytes are the same:

    scale = max |w| / half the range        in the dtype of the weights; 0 becomes the dtype's epsilon
    q     = round(clamp(w / scale, range))            fp8: the nearest e4m3 to clamp(w / scale, -448, 448)

and for nf4 those of bitsandbytes (`actors.devices.convert`).

Rows are done a few at a time, on a CPU by the calling thread alone.

Numerics are those of compressed-tensors with symmetric scales from the smallest and largest weight (its
`calculate_qparams`, `quantize`, `pack_to_int32`), each step rounded to the same dtype, so the bytes are the same:

    scale = max |w| / half the range        in the dtype of the weights; 0 becomes the dtype's epsilon
    q     = round(clamp(w / scale, range))            fp8: the nearest e4m3 to clamp(w / scale, -448, 448)

and for nf4 those of bitsandbytes (`actors.devices.convert`).

Rows are done a few at a time, on a CPU by the calling thread alone.

NF4 of bitsandbytes: the same bytes that its `quantize_4bit` makes on a CPU, with blocks of 64 weights. Torch.

    absmax = max |w| of a block                                    float32
    number = how many of the fifteen middles between neighbouring values are less than w * (1 / absmax)

Where each weight lies among the middles is looked up, which is some ten times as fast on a CPU as a search is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from actors.handover.tensor_views import torch_dtype
from cluster.layouts.region import Range, Region
from cluster.planning.plan import StagedTensor, TensorSlice
from cluster.precision import quantized_tensors
from cluster.precision.quantized_tensors import BLOCK, VALUES
from cluster.precision.recipes import GROUP, SCHEMES, Scheme

_LEAST = 1e-38  # in place of an absmax that is less: 1 / absmax is a number
# From -1 to 1, so many steps: no two middles in one. Added to what fits a float32 beside it, a number of steps is
# rounded, and in its low bits.
_STEPS = 128
_NF4_ROUNDS = 1.5 * 2**23 + _STEPS // 2


def quantize_nf4(
    weight: torch.Tensor, dtype: torch.dtype, packed: torch.Tensor, absmax: torch.Tensor, at_once: int
) -> None:
    """Flat `weight`, whole blocks of it, as numbers in `packed` and scales in `absmax`, which are flat too.

    `dtype`: what the weight is cast to before. `at_once`: weights; a block at least.
    """
    step = max(1, at_once // BLOCK) * BLOCK
    for first in range(0, len(weight), step):
        block = weight[first : first + step].to(dtype).float().reshape(-1, BLOCK)
        largest = block.abs().amax(-1, keepdim=True)
        absmax[first // BLOCK : first // BLOCK + len(block)] = largest[:, 0]
        scaled = (block * largest.clamp(min=_LEAST).reciprocal()).reshape(-1)
        # What is infinite or no number has no step. A GPU searches: to ask whether there is any, one would wait for it.
        known = not weight.is_cuda and bool(largest.isfinite().all())
        numbers = _look_up(scaled) if known else _search(scaled)
        pairs = numbers.view(torch.int16)  # little-endian: the first number is the low byte
        packed[first // 2 : (first + step) // 2].copy_(pairs << 4 | pairs >> 8)  # of each pair the low byte is kept


def _search(scaled: torch.Tensor) -> torch.Tensor:
    """The numbers of any weights, also of those that are none."""
    return torch.bucketize(scaled, _middles(scaled.device), out_int32=True).to(torch.uint8)


def _look_up(scaled: torch.Tensor) -> torch.Tensor:
    """The numbers of weights from -1 to 1."""
    below, middle = _table()
    step = _step_of(scaled)
    numbers = below.index_select(0, step)
    return numbers.add_((scaled > middle.index_select(0, step)).view(torch.uint8))


def _step_of(scaled: torch.Tensor) -> torch.Tensor:
    """Never less for a larger number, so a middle in an earlier step is less, and one in a later step is not."""
    return (scaled * (_STEPS // 2)).add_(_NF4_ROUNDS).view(torch.int32).bitwise_and_(2 * _STEPS - 1)


@cache
def _table() -> tuple[torch.Tensor, torch.Tensor]:
    """Of each step, the middles before it, and the one in it; infinity: none."""
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


# Converted at once. On a CPU fewer than those from which torch shares an operation among threads: on a host with many
# ranks these would wait for each other at every one of them, busily, for longer than it takes.
BLOCK_ELEMENTS = (1 << 15) - 1
GPU_BLOCK_ELEMENTS = 1 << 23
_ROUNDS = 1.5 * 2**23
_RANGES = {4: (-8.0, 7.0), 8: (-128.0, 127.0)}
_FP8_RANGE = (-448.0, 448.0)


def convert(
    staged: StagedTensor, source: torch.Tensor, slices: Sequence[TensorSlice], made: list[torch.Tensor]
) -> None:
    """Fill `made`, the memory of `slices`, from `source`, that of the staged tensor. Blocks of uint8."""
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
    # Nothing, when it comes from numpy, has no stride that torch would view as another dtype.
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
    """One (out, in) matrix. `held` says which columns of it are wanted; which rows, too, when all of it is there.

    With `amax`, the largest absolute values of its rows or of all of it, nothing but what is wanted is there. The
    largest of values that were rounded is the largest one, rounded.
    """
    low, high = _RANGES[scheme.bits] if scheme.packed else _FP8_RANGE
    # A tensor, not a number: a GPU divides by a number as it multiplies with the inverse, which rounds differently.
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
            # What is no number is 0, as the library's cast has it: there is some only where a scale is none that is
            # finite. A GPU does not look first: for the answer one would wait.
            if scaled.is_cuda or not bool(by.isfinite().all()):
                scaled = scaled.nan_to_num_(nan=0.0)
            # Rounded, half to even, by what fits a float32 beside that number; its low byte is the result, offset.
            positive = (scaled.float() + (_ROUNDS - low)).view(torch.int32).to(torch.uint8)
            _pack(positive, scheme.bits, made[here].view(torch.uint8))
        else:
            made[here] = scaled.add_(0).to(made.dtype)  # the zero point: -0 becomes 0
    made[place:].zero_()  # padding, where the staged tensor has none


def _scale(largest: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """`largest`: of the absolute values of what shares a scale."""
    scale = largest / half
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _pack(positive: torch.Tensor, bits: int, words: torch.Tensor) -> None:
    """Rows of numbers into the bytes of rows of little-endian 32-bit words, the first number in the lowest bits."""
    if bits == 4:
        pairs = positive.view(torch.int16)
        words.copy_(pairs | pairs >> 4)  # of each pair the low byte is kept
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
    """Rows, a few at a time."""
    step = max(1, _at_once(weight) // max(1, weight.shape[1]))
    return [(at, min(at + step, end)) for first, end in ranges for at in range(first, end, step)]
