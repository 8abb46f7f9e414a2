"""`longshore.amax`: the largest absolute value of each row of a model's weights, recorded when it was published.

A safetensors file (its name does not end so, or other readers of the folder would take it for weights) with one F32
tensor for each weight, of the weight's name and of its shape without the last dimension. Scales of a quantized row or
matrix follow from it, so nobody has to read a whole row for its own part. The manifest lists it among its files.

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
MIN_COLUMNS = 32  # of a weight that is recorded: what is recorded is at most a sixteenth of it
WEIGHT_DTYPES = ("BF16", "F16", "F32", "F64")
_AGAIN = "publish the model again, with --amax or without"

Amax = NDArray[np.float32]


class Described(Protocol):
    """What is asked of a tensor here."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def is_weight_matrix(tensor: Described) -> bool:
    """Whether it is the matrix of a linear layer, or those of experts in one: what may be quantized.

    Files of version 1 have what this takes: whoever takes more will look for what they do not have.
    """
    if tensor.dtype not in WEIGHT_DTYPES or 0 in tensor.shape:
        return False
    linear = len(tensor.shape) == 2 and tensor.name.rpartition(".")[2] == "weight"
    return linear or is_stacked(tensor.name, tensor.shape)


def is_stacked(name: str, shape: tuple[int, ...]) -> bool:
    """Whether it has the matrices of all experts of a layer."""
    parts = name.split(".")
    return len(shape) == 3 and "experts" in parts and not parts[-1].endswith("bias")


def is_recorded(tensor: Described) -> bool:
    """Whether the maxima of its rows are: of weights whose rows are not tiny. So the file is small beside them."""
    return is_weight_matrix(tensor) and tensor.shape[-1] >= MIN_COLUMNS


def encode_amax(recorded: Iterable[tuple[str, Amax]]) -> bytes:
    """The file, from the maxima of each weight in that order."""
    tensors = list(recorded)
    header = encode_header([(name, "F32", rows.shape) for name, rows in tensors], FORMAT)
    return b"".join([header, *(rows.astype("<f4", copy=False).tobytes() for _, rows in tensors)])


def read_amax(
    store: ObjectStore,
    file: OtherFile,
    weights: Mapping[str, Sequence[int]],
    policy: RetryPolicy | None = None,
) -> dict[str, Amax]:
    """The recorded maxima of `weights` (name -> shape). All of the file is read, a piece at a time, and its digest is
    compared; memory is that of the header and of what was asked for.

    `file`: as the manifest lists it. Raises ManifestMismatch when it is missing or has another size, IntegrityError for
    other bytes than were published, InvalidAmax for what is no such file, or not of those weights, and StoreError.
    """
    policy = policy or RetryPolicy()
    try:
        info = with_retries(lambda: store.stat(file.key), policy)
    except ObjectNotFound as error:
        raise ManifestMismatch(
            f"the manifest lists {file.key}, and it is not there", hint=_AGAIN, uri=store.uri
        ) from error
    if info.size_bytes != file.size_bytes:
        raise ManifestMismatch(
            f"{file.key} has {info.size_bytes} bytes, published with {file.size_bytes}", hint=_AGAIN, uri=store.uri
        )
    hash_name, _, digest = (file.digest or "").partition(":")
    if not digest:
        raise InvalidAmax(f"{file.key} has no digest", uri=store.uri)
    hasher, taken = new_hasher(hash_name), AmaxBytes(file.size_bytes, weights)
    for place in ranges_of(fixed_bounds(file.size_bytes, DEFAULT_CHUNK_BYTES)):
        piece = with_retries(partial(read_bytes, store, file.key, place, etag=info.etag), policy)
        hasher.update(piece)
        taken.add(memoryview(piece))
    if hasher.hexdigest() != digest:
        raise IntegrityError(
            f"{file.key} is not the published one",
            hint="restore it from where it was published, or publish the model again",
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
    """The file as it goes by, of which the maxima of some weights are kept. What is wrong with it, `rows` says."""

    def __init__(self, size_bytes: int, weights: Mapping[str, Sequence[int]]) -> None:
        self._size_bytes = size_bytes
        self._weights = weights
        self._head = HeaderBytes(size_bytes)
        self._at = 0  # bytes that went by
        self._header: Header | None = None
        self._problem: InvalidAmax | None = None
        self._kept: list[tuple[int, bytearray]] = []  # of each weight that was asked for: where it begins, its bytes
        self._found: dict[str, bytearray] = {}

    def add(self, view: memoryview) -> None:
        """The next bytes, in order."""
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
        """Of each weight, in the shape of its rows. Raises InvalidAmax."""
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
