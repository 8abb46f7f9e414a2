"""NF4 of bitsandbytes: the same bytes that its `quantize_4bit` makes on a CPU, with blocks of 64 weights. Torch.

    absmax = max |w| of a block                                    float32
    number = how many of the fifteen middles between neighbouring values are less than w * (1 / absmax)

Where each weight lies among the middles is looked up, which is some ten times as fast on a CPU as a search is.
"""

from __future__ import annotations

from functools import cache

import torch

from cluster.precision.nf4 import BLOCK, VALUES

_LEAST = 1e-38  # in place of an absmax that is less: 1 / absmax is a number
# From -1 to 1, so many steps: no two middles in one. Added to what fits a float32 beside it, a number of steps is
# rounded, and in its low bits.
_STEPS = 128
_ROUNDS = 1.5 * 2**23 + _STEPS // 2


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
    return (scaled * (_STEPS // 2)).add_(_ROUNDS).view(torch.int32).bitwise_and_(2 * _STEPS - 1)


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
