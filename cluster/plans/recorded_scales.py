"""A cut model whose scales are worked out from recorded maxima: ranks then read what they hold, and no more. Pure.

Only where a rank would read more for a scale than it holds, so that most loads ask for nothing; and only what is
finite: a weight with a NaN or an infinity is read as if nothing was recorded.

Recorded maxima of the model that is planned: read when a plan needs them, once, however many plans are tried.

The second place where planning touches the network, after `cluster.plans.planning`, which passes this along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cluster.layouts.tensor_cut import region_of
from cluster.plans.cut_model import CutModel, TensorKind
from cluster.precision.recipes import SCHEMES, read_region
from cluster.precision.recorded_amax import SCALES, Amax, are_finite, carried_bytes, gather
from cluster.request import LoadRequest
from storage.checkpoints.amax import AMAX_KEY, MIN_COLUMNS, read_amax
from storage.checkpoints.model_index import ModelIndex, OtherFile
from storage.stores.open_store import open_store

MAX_CARRIED_BYTES = 64 << 20  # in a plan, which every node gets; of more nothing is used

# From names of tensors and their shapes to the maxima of their rows.
ReadAmax = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, Amax]]


def with_recorded_amax(cut: CutModel, read: ReadAmax) -> CutModel:
    """The cut model with the maxima of those tensors that ranks would read more of than they hold.

    `read` is asked once, or not at all. Raises what it raises.
    """
    helped = [_is_helped(cut, kind) for kind in cut.kinds]
    numbers = np.flatnonzero(np.array(helped, bool)[cut.kind]) if any(helped) else np.empty(0, np.int64)
    shapes = {cut.names[number]: cut.kinds[cut.kind[number]].shape for number in numbers.tolist()}
    sizes = [carried_bytes(cut.kinds[at].shape, _scale(cut.kinds[at])) for at in cut.kind[numbers].tolist()]
    if not shapes or sum(sizes) > MAX_CARRIED_BYTES:
        return cut
    found = read(shapes)
    used = [number for number in numbers.tolist() if are_finite(found, cut.names[number])]
    kinds, kind = _with_kinds(cut, np.array(used, np.int64))
    amax = gather(used, [(found[cut.names[at]], _scale(cut.kinds[cut.kind[at]])) for at in used])
    return replace(cut, kinds=kinds, kind=kind, amax=amax)


def _is_helped(cut: CutModel, kind: TensorKind) -> bool:
    """Whether some rank would read more of such a tensor than it holds, and its maxima are recorded."""
    if _scale(kind) not in SCALES or kind.shape[-1] < MIN_COLUMNS:
        return False
    regions = [region_of(kind.shape, kind.cut, place, cut.layout) for place in cut.places(range(cut.layout.ranks))]
    return any(read_region(kind.recipe, kind.shape, region) != region for region in regions)


def _scale(kind: TensorKind) -> str:
    return SCHEMES[kind.recipe.scheme].scale if kind.recipe is not None and kind.recipe.scheme else ""


def _with_kinds(cut: CutModel, used: NDArray[np.int64]) -> tuple[tuple[TensorKind, ...], NDArray[np.int32]]:
    """Tensors with maxima are of kinds of their own."""
    kinds, kind = list(cut.kinds), cut.kind.copy()
    for number in np.unique(cut.kind[used]).tolist():
        recorded = replace(cut.kinds[number], recorded=True)
        here = used[cut.kind[used] == number]
        if len(here) == int((cut.kind == number).sum()):
            kinds[number] = recorded
        else:
            kind[here] = len(kinds)
            kinds.append(recorded)
    return tuple(kinds), kind


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
