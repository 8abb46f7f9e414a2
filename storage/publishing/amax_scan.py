"""The largest absolute value of each row of a shard's weights: found while it is read, compared by a verification.

    bytes, in order, of any lengths --> elements of each weight --> rows --> the largest magnitude of each

A float without its sign, read as a whole number, is the larger the larger the float is; above infinity are the NaNs. So
magnitudes are compared as whole numbers, of the width that is stored, and a row with a NaN has NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.checkpoints.amax import AMAX_KEY, Amax, is_recorded, read_amax
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.model_index import OtherFile, Tensor
from storage.checkpoints.tensor_table import BadTensor
from storage.errors import IntegrityError, InvalidAmax, ManifestMismatch
from storage.stores.object_store import ObjectStore
from storage.stores.retrying import RetryPolicy

# Compared at a time: what was just read or hashed is not fetched again for a copy without signs.
BLOCK_BYTES = 128 << 10
_WORDS: dict[str, Any] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<u2"),
    "F32": np.dtype("<u4"),
    "F64": np.dtype("<u8"),
}

Words = NDArray[Any]


class AmaxScan:
    """Of one reading of one shard. Memory: an element for each row."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """`weights`: of the shard, of WEIGHT_DTYPES, in order of start."""
        self._weights = [weight for weight in weights if weight.size_bytes]
        self._most = [np.zeros(_rows(weight), _WORDS[weight.dtype]) for weight in self._weights]
        self._at = 0  # bytes of the shard that went by
        self._next = 0  # the first weight that was not seen to its end
        self._part = b""  # of an element that the bytes so far ended in

    def add(self, view: memoryview) -> None:
        """The next bytes of the shard."""
        first, self._at = self._at, self._at + len(view)
        while self._next < len(self._weights):
            weight = self._weights[self._next]
            low, high = max(weight.start, first), min(weight.end, self._at)
            if low < high:
                self._take(low - weight.start, view[low - first : high - first])
            if weight.end > self._at:
                return
            self._next += 1

    def rows(self) -> dict[str, Amax]:
        """Of each weight by name, when the whole shard went by: float32, in the shape of its rows."""
        return {
            weight.name: _as_float32(weight.dtype, most).reshape(weight.shape[:-1])
            for weight, most in zip(self._weights, self._most, strict=True)
        }

    def _take(self, offset: int, view: memoryview) -> None:
        """Bytes of the weight at hand, from that one on."""
        word = self._most[self._next].dtype
        if self._part:
            missing = word.itemsize - len(self._part)
            self._part += bytes(view[:missing])
            view, offset = view[missing:], offset + missing
            if len(self._part) < word.itemsize:
                return
            self._compare(offset // word.itemsize - 1, np.frombuffer(self._part, word))
            self._part = b""
        whole = len(view) - len(view) % word.itemsize
        self._compare(offset // word.itemsize, np.frombuffer(view[:whole], word))
        self._part = bytes(view[whole:])

    def _compare(self, first: int, values: Words) -> None:
        """Elements of the weight at hand, from that one on: the end of a row, whole rows, the beginning of one."""
        most, columns = self._most[self._next], self._weights[self._next].shape[-1]
        row, column = divmod(first, columns)
        if column and len(values):
            end = min(columns - column, len(values))
            most[row] = max(most[row], _largest(values[:end].reshape(1, -1))[0])
            values, row = values[end:], row + 1
        count = len(values) // columns
        if count:
            most[row : row + count] = _largest(values[: count * columns].reshape(count, columns))
        rest = values[count * columns :]
        if len(rest):
            most[row + count] = _largest(rest.reshape(1, -1))[0]


def _largest(values: Words) -> Words:
    """Of each of (rows, columns): the largest without its sign."""
    without_sign = values.dtype.type((1 << (8 * values.dtype.itemsize - 1)) - 1)
    count, columns = BLOCK_BYTES // values.dtype.itemsize, values.shape[1]
    step = max(1, count // columns)
    found = np.zeros(len(values), values.dtype)
    for first in range(0, len(values), step):
        rows = values[first : first + step]
        so_far = found[first : first + step]
        for column in range(0, columns, count):
            np.maximum(so_far, (rows[:, column : column + count] & without_sign).max(axis=1), out=so_far)
    return found


def _rows(weight: Tensor) -> int:
    count = 1
    for size in weight.shape[:-1]:
        count *= size
    return count


def _as_float32(dtype: str, words: Words) -> Amax:
    """Exactly, but for F64, which is rounded. Every NaN becomes the one of Python's float."""
    if dtype == "BF16":
        found = (words.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "F32":
        found = words.view(np.float32).copy()
    else:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            found = words.view(np.float16 if dtype == "F16" else np.float64).astype(np.float32)
    found[np.isnan(found)] = np.nan
    return found


class Recorded:
    """Of one published model: nothing to do where its manifest lists no maxima."""

    def __init__(self, manifest: Manifest) -> None:
        entry = next((file for file in manifest.files if file.path == AMAX_KEY), None)
        self._file = None
        self._weights: dict[str, list[Tensor]] = defaultdict(list)  # by path of the shard
        self._found: dict[str, Amax] = {}
        if entry is None:
            return
        self._file = OtherFile(AMAX_KEY, entry.size_bytes, f"{manifest.hash}:{entry.digest}")
        for t in manifest.tensors:
            if is_recorded(t):
                weight = Tensor(t.name, t.dtype, t.shape, t.shard, t.start, t.end)
                self._weights[manifest.shards[t.shard].path].append(weight)

    def weights_of(self, path: str) -> list[Tensor]:
        """Weights of a shard whose maxima are to be compared."""
        return self._weights.get(path, [])

    def add(self, rows: dict[str, Amax]) -> None:
        """What a shard has whose chunks are the published ones."""
        self._found.update(rows)

    def differences(self, store: ObjectStore, policy: RetryPolicy) -> list[BadTensor]:
        """Weights whose maxima are others than the recorded ones. Raises StoreError."""
        if self._file is None:
            return []
        shapes = {
            weight.name: weight.shape
            for weights in self._weights.values()
            for weight in weights
            if weight.name in self._found
        }
        try:
            recorded = read_amax(store, self._file, shapes, policy)
        except (InvalidAmax, ManifestMismatch, IntegrityError) as error:
            return [BadTensor(AMAX_KEY, "", "the largest values of weights", error.message)]
        return [
            BadTensor(AMAX_KEY, name, *_first_difference(recorded[name], found))
            for name, found in self._found.items()
            if not np.array_equal(recorded[name], found, equal_nan=True)
        ]


def _first_difference(recorded: Amax, found: Amax) -> tuple[str, str]:
    one, other = recorded.reshape(-1), found.reshape(-1)
    row = int(np.flatnonzero(~((one == other) | (np.isnan(one) & np.isnan(other))))[0])
    return f"{one[row]} as the largest value of row {row}", f"{other[row]}"
