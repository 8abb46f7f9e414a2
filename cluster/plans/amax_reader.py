"""Recorded maxima of the model that is planned: read when a plan needs them, once, however many plans are tried.

The second place where planning touches the network, after `cluster.plans.prepare`, which passes this along.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from cluster.load_request import LoadRequest
from cluster.plans.recorded_scales import ReadAmax
from cluster.precision.recorded_amax import Amax
from storage.checkpoints.amax import AMAX_KEY, read_amax
from storage.checkpoints.model_index import ModelIndex, OtherFile
from storage.stores.open_store import open_store


def amax_reader(request: LoadRequest, index: ModelIndex, read_timeout_s: float) -> ReadAmax | None:
    """What reads them; None where none are recorded. The source was checked when the model was read."""
    file = next((file for file in index.files if file.key == AMAX_KEY), None)
    return None if file is None or index.source != "manifest" else _AmaxReader(request, file, read_timeout_s)


class _AmaxReader:
    def __init__(self, request: LoadRequest, file: OtherFile, read_timeout_s: float) -> None:
        self._store = request.store
        self._file = file
        self._read_timeout_s = read_timeout_s
        self._found: dict[str, Amax] = {}

    def __call__(self, weights: Mapping[str, tuple[int, ...]]) -> Mapping[str, Amax]:
        """By name; `weights`: name -> shape. Raises ManifestMismatch, IntegrityError, InvalidAmax, StoreError."""
        missing = {name: shape for name, shape in weights.items() if name not in self._found}
        if missing:
            ref, credentials = self._store.ref, self._store.credentials
            with closing(open_store(ref, credentials, read_timeout_s=self._read_timeout_s)) as store:
                self._found |= read_amax(store, self._file, missing)
        return {name: self._found[name] for name in weights}
