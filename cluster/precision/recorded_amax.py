"""The largest absolute values that were recorded of weights when they were published, as a plan carries them. Pure.

What a scale per row needs of a weight (out, in) is one number for each row, of experts (n, out, in) n times as many;
what a scale per matrix needs is one for each matrix. So a rank that holds a part of a row has the scale of all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.layouts.region import Region

Amax = NDArray[np.float32]
SCALES = ("channel", "tensor")  # what they are recorded for; others need no more than a rank holds


@dataclass(frozen=True, slots=True, eq=False)
class RecordedAmax:
    """Of m tensors of a model, side by side."""

    tensors: NDArray[np.int32]  # (m,) their numbers, ascending
    ends: NDArray[np.int64]  # (m,) into values
    values: Amax

    def part(self, tensor: int, shape: tuple[int, ...], scale: str, region: Region) -> Amax:
        """Of what a rank holds of one tensor: (rows,) or (1,), of experts (experts, rows) or (experts,).

        Rows that are padding have 0.
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
    """From the maxima of each tensor's rows, and what of it shares a scale."""
    values = [rows.reshape(-1) if scale == "channel" else _of_matrices(rows) for rows, scale in found]
    return RecordedAmax(
        np.array(tensors, np.int32),
        np.cumsum([len(each) for each in values], dtype=np.int64),
        np.concatenate([np.zeros(0, np.float32), *values]),
    )


def carried_bytes(shape: tuple[int, ...], scale: str) -> int:
    """What a plan carries of a tensor."""
    return 4 * math.prod(shape[:-1] if scale == "channel" else shape[:-2])


def are_finite(found: Mapping[str, Amax], name: str) -> bool:
    """Whether scales can be worked out from them. Of NaNs only the tensor itself says which ones."""
    return bool(np.isfinite(found[name]).all())


def _of_matrices(rows: Amax) -> Amax:
    most: Amax = rows.max(axis=-1).reshape(-1)
    return most


def _taken(values: Amax, dim: int, region: Region) -> Amax:
    parts = [values[(slice(None),) * dim + (slice(start, end),)] for start, end in region.ranges[dim]]
    return np.concatenate([values[(slice(None),) * dim + (slice(0, 0),)], *parts], axis=dim)
