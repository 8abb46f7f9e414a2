"""`longshore.amax`: the largest absolute value of each row of a model's weights, recorded when it was published.

It is a safetensors file. Its name has no such suffix, because other readers of the folder would take it for weights.
For each weight it has one F32 tensor, with the weight's name and its shape without the last dimension. The scales of a
quantized row or matrix follow from it. So a rank with part of a row need not read the whole row. The manifest lists
the file.

    weight (out, in)                 -> (out,)
    experts, stacked (n, out, in)    -> (n, out)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from storage.checkpoints.model_index import DEFAULT_CHUNK_BYTES, OtherFile, fixed_bounds
from storage.checkpoints.safetensors_header import Header, HeaderBytes, encode_header
from storage.checksum import new_hasher
from storage.errors import IntegrityError, InvalidAmax, InvalidHeader, ManifestMismatch, ObjectNotFound
from storage.problems import quote
from storage.stores.object_store import ObjectStore, ranges_of, read_bytes
from storage.stores.requests import RetryPolicy, with_retries

AMAX_KEY = "longshore.amax"
FORMAT = {"format": "longshore.amax", "version": "1"}
MIN_COLUMNS = 32  # minimum for a recorded weight, so that its record is at most a sixteenth of its size
WEIGHT_DTYPES = ("BF16", "F16", "F32", "F64")
_AGAIN = "publish the model again, with --amax or without"

Amax = NDArray[np.float32]


class Described(Protocol):
    """A tensor with a name, a dtype and a shape, from any source."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def is_weight_matrix(tensor: Described) -> bool:
    """Return whether the tensor is a weight that may be quantized: a linear layer's matrix, or stacked experts.

    Files of version 1 record exactly these weights. If this function accepted more, readers would not find them.
    """
    if tensor.dtype not in WEIGHT_DTYPES or 0 in tensor.shape:
        return False
    linear = len(tensor.shape) == 2 and tensor.name.rpartition(".")[2] == "weight"
    return linear or is_stacked(tensor.name, tensor.shape)


def is_stacked(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether the tensor contains the matrices of all experts of a layer."""
    parts = name.split(".")
    return len(shape) == 3 and "experts" in parts and not parts[-1].endswith("bias")


def is_recorded(tensor: Described) -> bool:
    """Return whether the row maxima are recorded. Weights with tiny rows are not, so that the file stays small."""
    return is_weight_matrix(tensor) and tensor.shape[-1] >= MIN_COLUMNS


def encode_amax(recorded: Iterable[tuple[str, Amax]]) -> bytes:
    """Return the bytes of the file, from the row maxima of each weight in that order."""
    tensors = list(recorded)
    header = encode_header([(name, "F32", rows.shape) for name, rows in tensors], FORMAT)
    return b"".join([header, *(rows.astype("<f4", copy=False).tobytes() for _, rows in tensors)])


def read_amax(
    store: ObjectStore,
    file: OtherFile,
    weights: Mapping[str, Sequence[int]],
    policy: RetryPolicy | None = None,
) -> dict[str, Amax]:
    """Return the recorded row maxima of `weights` (name -> shape).

    Reads the whole file, one piece at a time, and compares its digest. The memory is that of the header and of the
    requested weights.

    `file` is the manifest's entry. Raises ManifestMismatch if it is missing or has another size, IntegrityError if its
    bytes are not the published ones, InvalidAmax if it is not an amax file of those weights, and StoreError.
    """
    policy = policy or RetryPolicy()
    try:
        info = with_retries(lambda: store.stat(file.key), policy)
    except ObjectNotFound as error:
        raise ManifestMismatch(
            f"{file.key} is missing, although the manifest lists it", hint=_AGAIN, uri=store.uri
        ) from error
    if info.size_bytes != file.size_bytes:
        raise ManifestMismatch(
            f"{file.key} has {info.size_bytes} bytes, published with {file.size_bytes}", hint=_AGAIN, uri=store.uri
        )
    hash_name, _, digest = (file.digest or "").partition(":")
    if not digest:
        raise InvalidAmax(f"the manifest has no digest for {file.key}", hint=_AGAIN, uri=store.uri)
    hasher, taken = new_hasher(hash_name), AmaxBytes(file.size_bytes, weights)
    for place in ranges_of(fixed_bounds(file.size_bytes, DEFAULT_CHUNK_BYTES)):
        piece = with_retries(partial(read_bytes, store, file.key, place, etag=info.etag), policy)
        hasher.update(piece)
        taken.add(memoryview(piece))
    if hasher.hexdigest() != digest:
        raise IntegrityError(
            f"{file.key} is not the published one",
            hint="restore the file from where it was published, or publish the model again",
            uri=store.uri,
            key=file.key,
            expected=digest,
            found=hasher.hexdigest(),
        )
    try:
        return taken.rows()
    except InvalidAmax as error:
        raise error.with_details(uri=store.uri) from error.__cause__


class AmaxBytes:
    """A reader of the file in one pass that keeps the maxima of some weights. `rows` reports any problem."""

    def __init__(self, size_bytes: int, weights: Mapping[str, Sequence[int]]) -> None:
        self._size_bytes = size_bytes
        self._weights = weights
        self._head = HeaderBytes(size_bytes)
        self._at = 0  # bytes read so far
        self._header: Header | None = None
        self._problem: InvalidAmax | None = None
        self._kept: list[tuple[int, bytearray]] = []  # for each requested weight: its offset in the file, its bytes
        self._found: dict[str, bytearray] = {}

    def add(self, view: memoryview) -> None:
        """Take the next bytes of the file, in order."""
        first, self._at = self._at, self._at + len(view)
        if self._header is None and self._problem is None:
            self._head.add(view)
            if self._at >= self._head.end or self._at == self._size_bytes:
                try:
                    self._header = self._open(self._head)
                except InvalidAmax as error:
                    self._problem = error
        for start, data in self._kept:
            low, high = max(start, first), min(start + len(data), self._at)
            if low < high:
                data[low - start : high - start] = view[low - first : high - first]

    def rows(self) -> dict[str, Amax]:
        """Return the maxima of each weight, in the shape of its rows. Raises InvalidAmax."""
        if self._problem is None and self._header is None:
            self._problem = InvalidAmax(f"{AMAX_KEY} is cut short")
        if self._problem is not None:
            raise self._problem
        rows = {
            name: np.frombuffer(self._found[name], "<f4").reshape(tuple(shape[:-1])).astype(np.float32, copy=False)
            for name, shape in self._weights.items()
        }
        negative = next((name for name, values in rows.items() if bool((values < 0).any())), None)
        if negative is not None:
            raise InvalidAmax(f"{AMAX_KEY} has a largest absolute value below 0, of {quote(negative)}", hint=_AGAIN)
        return rows

    def _open(self, head: HeaderBytes) -> Header:
        try:
            header = head.parse()
        except InvalidHeader as error:
            raise InvalidAmax(f"{AMAX_KEY} cannot be read: {error.message}", hint=_AGAIN) from error
        if header.metadata != FORMAT:
            raise InvalidAmax(f"{AMAX_KEY} is of another format: {quote(header.metadata)}", hint=_AGAIN)
        tensors = {tensor.name: tensor for tensor in header.tensors}
        for name, shape in self._weights.items():
            found, wanted = tensors.get(name), tuple(shape[:-1])
            if found is None or (found.dtype, found.shape) != ("F32", wanted):
                has = "nothing" if found is None else f"{found.dtype} {found.shape}"
                raise InvalidAmax(f"{AMAX_KEY} has {has} of {quote(name)}, whose rows are {wanted}", hint=_AGAIN)
        for name in self._weights:
            self._found[name] = bytearray(tensors[name].end - tensors[name].start)
            self._kept.append((tensors[name].start, self._found[name]))
        return header
