"""Recorded maxima against the weights themselves, while a verification reads both."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from storage.checkpoints.amax import AMAX_KEY, Amax, is_recorded, read_amax
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.model_index import OtherFile, Tensor
from storage.checkpoints.tensor_table import BadTensor
from storage.errors import IntegrityError, InvalidAmax, ManifestMismatch
from storage.object_store import ObjectStore
from storage.retrying import RetryPolicy


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
