"""What a staged tensor becomes: a cast, or a quantised weight and its scales. Torch; the plan says into which memory.

Numerics are those of compressed-tensors with symmetric scales from the smallest and largest weight (its
`calculate_qparams`, `quantize`, `pack_to_int32`), operation by operation in the same dtype, so the bytes are the same:

    scale = max(|min|, |max|) / half the range        in the dtype of the weights; 0 becomes the dtype's epsilon
    q     = round(clamp(w / scale, range))            fp8: the nearest e4m3 to clamp(w / scale, -448, 448)

Rows are done a few at a time: the working memory is a few MiB beside the staged tensor, whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.tensor_views import torch_dtype
from cluster.load_plan import StagedTensor, TensorSlice
from cluster.precision import GROUP, SCHEMES, Scheme
from cluster.region import Range, Region

BLOCK_ELEMENTS = 1 << 19  # converted at once
_RANGES = {4: (-8.0, 7.0), 8: (-128.0, 127.0)}
_FP8_RANGE = (-448.0, 448.0)


def convert(
    staged: StagedTensor, source: torch.Tensor, slices: Sequence[TensorSlice], made: list[torch.Tensor]
) -> None:
    """Fill `made`, the memory of `slices`, from `source`, that of the staged tensor. Blocks of uint8."""
    piece = staged.source
    weight = source.view(torch_dtype(piece.dtype, piece.sizes)[0]).reshape(piece.sizes)
    views = [
        data.view(torch_dtype(each.dtype, each.sizes)[0]).reshape(each.sizes)
        for data, each in zip(made, slices, strict=True)
    ]
    if not staged.recipe.scheme:
        views[0].copy_(weight)
        return
    scheme, dtype = SCHEMES[staged.recipe.scheme], torch_dtype(staged.recipe.dtype, ())[0]
    if scheme.packed:
        views[2].copy_(torch.tensor(piece.shape))
    if weight.ndim == 2:
        _matrix(weight, scheme, dtype, staged.region, views[0], views[1])
        return
    rows, columns = staged.region.ranges[1:]
    for expert in range(weight.shape[0]):
        held = Region((rows, columns))
        _matrix(weight[expert], scheme, dtype, held, views[0][expert], views[1][expert])


def _matrix(
    weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype, held: Region, made: torch.Tensor, scale: torch.Tensor
) -> None:
    """One (out, in) matrix. `held` says which columns of it are wanted; which rows, too, when all of it is there."""
    low, high = _bounds(scheme, dtype, weight.device)
    columns: Sequence[Range] = ((0, weight.shape[1]),) if scheme.scale == "group" else held.ranges[1]
    starts: Sequence[Range] = ((0, weight.shape[0]),)
    if scheme.scale == "tensor":
        scale.fill_(_scale(*_extremes(weight, dtype), low, high).reshape(()))
        starts = held.ranges[0]
    place = 0
    for first, end in _blocks(starts, weight.shape[1]):
        block = weight[first:end].to(dtype)
        here = slice(place, place + end - first)
        place = here.stop
        if scheme.scale == "channel":
            scale[here] = _scale(block.amin(-1, keepdim=True), block.amax(-1, keepdim=True), low, high)
        wanted = _columns(block, columns)
        if scheme.scale == "group":
            groups = wanted.reshape(len(wanted), -1, GROUP)
            scale[here] = _scale(groups.amin(-1), groups.amax(-1), low, high)
            quantised = _quantise(groups, scale[here].unsqueeze(-1), low, high).flatten(-2)
        else:
            quantised = _quantise(wanted, scale if scheme.scale == "tensor" else scale[here], low, high)
        if scheme.packed:
            _pack(quantised, scheme.bits, made[here])
        else:
            made[here] = quantised.to(made.dtype)
    made[place:].zero_()  # padding, where the staged tensor has none


def _bounds(scheme: Scheme, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _RANGES[scheme.bits] if scheme.packed else _FP8_RANGE
    # Tensors, not numbers: a GPU divides by a number as it multiplies with the inverse, which rounds differently.
    return torch.tensor(low, dtype=dtype, device=device), torch.tensor(high, dtype=dtype, device=device)


def _extremes(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    found = [torch.aminmax(weight[a:b].to(dtype)) for a, b in _blocks(((0, weight.shape[0]),), weight.shape[1])]
    return torch.stack([each[0] for each in found]).amin(), torch.stack([each[1] for each in found]).amax()


def _scale(least: torch.Tensor, most: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like(least)
    largest = torch.max(torch.min(least, zero).abs(), torch.max(most, zero).abs())
    scale = largest / ((high.float() - low.float()) / 2).to(largest.dtype)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _quantise(wanted: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    scaled = wanted / scale
    scaled += 0  # the zero point: -0 becomes 0
    return torch.clamp(scaled, low, high, out=scaled)


def _pack(quantised: torch.Tensor, bits: int, words: torch.Tensor) -> None:
    """Rows of numbers into rows of 32-bit words, the first number in the lowest bits (of little-endian words)."""
    offset = 1 << (bits - 1)
    positive = quantised.round_().to(torch.int16).add_(offset).to(torch.uint8)
    packed = words.view(torch.uint8)
    if bits == 4:
        packed.copy_(positive[:, 0::2] | positive[:, 1::2] << 4)
        return
    packed[:, : positive.shape[1]] = positive
    packed[:, positive.shape[1] :].zero_()


def _columns(block: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    if len(ranges) == 1:
        return block[:, ranges[0][0] : ranges[0][1]]
    return torch.cat([block[:, first:end] for first, end in ranges], 1)


def _blocks(ranges: Sequence[Range], columns: int) -> list[Range]:
    """Rows, a few at a time."""
    step = max(1, BLOCK_ELEMENTS // max(1, columns))
    return [(at, min(at + step, end)) for first, end in ranges for at in range(first, end, step)]
