"""The header and element types of a safetensors file, checked by the rules of the format before anything uses them.

    [0, 8)              n, unsigned, little-endian
    [8, 8 + n)          JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
    [8 + n, file size)  the tensors' bytes, without gaps, overlaps or bytes left over

`data_offsets` count from 8 + n. All offsets in this module count from the start of the file.

DTYPE_BITS has every element type by its name in the format. Sizes are in bits, because F4 and the F6 types are packed.
A tensor of them is valid only if its elements fill whole bytes. Checked against `safetensors/src/tensor.rs` of
safetensors 0.8.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from storage.errors import InvalidHeader
from storage.problems import Problems, json_values, quote, show_bytes
from storage.stores.object_store import ByteRange, ObjectStore, read_bytes

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

MAX_ELEMENTS = 2**63 - 1  # of one tensor, and of each partial product, because the format refuses overflows
MAX_DIMENSIONS = 64  # limit of torch and numpy


def tensor_bits(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bits; `("F4", (3,))` is 12.

    Raises KeyError for an unknown dtype, OverflowError above 2**63.
    """
    bits = DTYPE_BITS[dtype]
    count = 1
    for size in shape:
        count *= size
        if count > MAX_ELEMENTS:
            raise OverflowError(f"shape has more than {MAX_ELEMENTS} elements")
    if count * bits > MAX_ELEMENTS:
        raise OverflowError(f"tensor has more than {MAX_ELEMENTS} bits")
    return count * bits


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes. Raises like `tensor_bits`, and ValueError unless it fills whole bytes."""
    bits = tensor_bits(dtype, shape)
    if bits % 8:
        raise ValueError(f"{bits} bits of {dtype} do not fill whole bytes")
    return bits // 8


def atom_bytes(dtype: str) -> int:
    """Return the fewest bytes that hold only whole elements: 2 for BF16, 1 for F4 (two elements), 3 for F6 (four)."""
    bits = DTYPE_BITS[dtype]
    return bits // math.gcd(bits, 8)


LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_JSON_VALUES = 5_000_000  # limits the memory of parsing; enough for half a million tensors in one file
FIRST_READ_BYTES = 256 << 10  # contains the whole header of nearly every shard
CUT_SHORT_HINT = "upload the file again, because its upload ended early"
METADATA_KEY = "__metadata__"


class HeaderTensor(NamedTuple):
    """One tensor as its file describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # first byte, counted from the start of the file
    end: int  # first byte after


@dataclass(frozen=True, slots=True)
class Header:
    """A header that follows the rules of the format."""

    tensors: tuple[HeaderTensor, ...]  # ordered by start, end and name; they tile [data_start, file size)
    metadata: dict[str, str]
    data_start: int  # first byte after the header


def header_bytes(data: bytes, file_size_bytes: int) -> int:
    """Return the size of the length field and the JSON, from the file's first eight bytes. Raises InvalidHeader."""
    if file_size_bytes < LENGTH_BYTES or len(data) < LENGTH_BYTES:
        raise InvalidHeader(
            f"not a safetensors file: it has {min(file_size_bytes, len(data))} bytes, the length field alone takes 8",
            hint=CUT_SHORT_HINT,
        )
    (length,) = struct.unpack_from("<Q", data)
    if length > MAX_HEADER_BYTES:
        raise InvalidHeader(f"not a safetensors file: header of {length} bytes, the format allows {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + length > file_size_bytes:
        raise InvalidHeader(
            f"header cut short: it takes {LENGTH_BYTES + length} bytes of {file_size_bytes}", hint=CUT_SHORT_HINT
        )
    return LENGTH_BYTES + int(length)


def parse_header(data: bytes, file_size_bytes: int) -> Header:
    """Return the checked header from the file's first bytes. Raises InvalidHeader, which lists every problem."""
    data_start = header_bytes(data, file_size_bytes)
    if len(data) < data_start:
        raise InvalidHeader(f"header cut short: {len(data)} bytes of {data_start}")
    sound = _sound_header(data[LENGTH_BYTES:data_start], data_start, file_size_bytes)
    if sound is not None:
        return sound
    problems = Problems()
    entries = _parse_json(data[LENGTH_BYTES:data_start], problems)
    metadata = _metadata(entries.pop(METADATA_KEY, None), problems)
    tensors = [
        tensor for name, entry in entries.items() if (tensor := _tensor(name, entry, data_start, problems)) is not None
    ]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end, tensor.name))
    if len(tensors) == len(entries):  # otherwise the gaps are a result of problems already reported
        whole_bytes = max((tensor.end for tensor in tensors), default=data_start)
        _check_tiling(tensors, data_start, max(whole_bytes, file_size_bytes), problems)
        if whole_bytes > file_size_bytes:
            problems.add(f"cut short: it has {show_bytes(file_size_bytes)} of {show_bytes(whole_bytes)}")
            if len(problems) == 1:
                raise InvalidHeader(f"the file is {problems}", hint=CUT_SHORT_HINT)
    if problems:
        raise InvalidHeader(f"invalid safetensors header: {problems}", problems=len(problems))
    return Header(tuple(tensors), metadata, data_start)


def read_head(store: ObjectStore, key: str, size_bytes: int, *, etag: str | None = None) -> tuple[Header, bytes]:
    """Return a stored file's checked header, and the bytes `[0, data_start)` of the file from which it was read.

    Makes one small request or, for a long header, two. Raises InvalidHeader (with the key in its details) and what
    `ObjectStore.read_into` raises.
    """
    try:
        data = read_bytes(store, key, ByteRange(0, min(FIRST_READ_BYTES, size_bytes)), etag=etag)
        needed = header_bytes(data, size_bytes)
        if needed > len(data):
            data += read_bytes(store, key, ByteRange(len(data), needed), etag=etag)
        return parse_header(data, size_bytes), data[:needed]
    except InvalidHeader as error:
        raise error.with_details(key=key, uri=store.uri) from error.__cause__


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return length and JSON for tensors `(name, dtype, shape)` stored in that order, padded to 8 bytes with spaces.

    Raises what `tensor_bytes` raises.
    """
    entries: dict[str, object] = {METADATA_KEY: dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        end = at + tensor_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _sound_header(raw: bytes, data_start: int, file_size_bytes: int) -> Header | None:
    """Return the header if it has no problem, in half the time and memory of the whole check. Else None.

    Each entry becomes a tuple as soon as it is parsed. A name that appears twice leaves fewer strings than the text
    has, so counting quotation marks shows it.
    """
    if json_values(raw) > MAX_JSON_VALUES:
        return None
    sizes: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], int]] = {}  # equal shapes are one object

    def compact(entry: dict[str, Any]) -> object:
        try:
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if type(start) is not int or type(end) is not int or type(shape) is not list:
                return entry
            for size in shape:
                if type(size) is not int:  # True and 1.0 are equal to 1
                    return entry
            alike = dtype, tuple(shape)
            if alike not in sizes:
                if min(shape, default=0) < 0 or len(shape) > MAX_DIMENSIONS:
                    return entry
                sizes[alike] = alike[1], tensor_bytes(*alike)
            dims, size_bytes = sizes[alike]
        except (KeyError, ValueError, TypeError, OverflowError):
            return entry
        return (dtype, dims, start, end) if end - start == size_bytes else entry

    try:
        entries = json.loads(raw.decode("utf-8"), object_hook=compact)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entries, dict):
        return None
    metadata = entries.pop(METADATA_KEY, {})
    problems = Problems()
    if not isinstance(metadata, dict):
        return None
    _metadata(metadata, problems)
    if problems:
        return None
    strings = 5 * len(entries) + (1 + 2 * len(metadata) if metadata else 0)
    if raw.count(b'"') != 2 * strings:
        return None
    tensors: list[HeaderTensor] = []
    at = data_start
    for name, entry in entries.items():
        if type(entry) is not tuple or not (name.isascii() or _encodable(name)):
            return None
        dtype, dims, start, end = entry
        if data_start + start != at or start == end:  # out of order, maybe
            return None
        at = data_start + end
        tensors.append(HeaderTensor(name, dtype, dims, data_start + start, at))
    return Header(tuple(tensors), metadata, data_start) if at == file_size_bytes else None


def _parse_json(raw: bytes, problems: Problems) -> dict[str, Any]:
    """Return the top-level object. Repeated names are noted as problems. Raises InvalidHeader if it is no object."""
    values = json_values(raw)
    if values > MAX_JSON_VALUES:
        raise InvalidHeader(f"header has some {values} JSON values; at most {MAX_JSON_VALUES} are read")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entry = dict(pairs)
        if len(entry) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    problems.add(f"duplicate name {quote(name)}")
                seen.add(name)
        return entry

    def refuse_constant(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=refuse_duplicates, parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidHeader(f"header is not UTF-8: byte {error.start} is not valid") from error
    except RecursionError:
        # `from None`, because the traceback would hold a thousand frames and the whole header.
        raise InvalidHeader("header is not a safetensors header: nested too deep") from None
    except ValueError as error:
        raise InvalidHeader(f"header is not JSON: {quote(str(error))}") from error
    if not isinstance(parsed, dict):
        raise InvalidHeader(f"header is a JSON {type(parsed).__name__}, not an object")
    return parsed


def _metadata(found: Any, problems: Problems) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        problems.add(f"{METADATA_KEY} is not an object")
        return {}
    for name, value in found.items():
        if not isinstance(value, str):
            problems.add(f"{METADATA_KEY}: value of {quote(name)} is not a string")
        elif not (_encodable(name) and _encodable(value)):
            problems.add(f"{METADATA_KEY}: {quote(name)} is not valid Unicode")
    return found


def _tensor(name: str, entry: Any, data_start: int, problems: Problems) -> HeaderTensor | None:
    """Return one entry with offsets from the start of the file, or None after noting at least one problem."""
    label = f"tensor {quote(name)}"
    before = len(problems)
    if not _encodable(name):
        problems.add(f"{label}: name is not valid Unicode")
    if not isinstance(entry, dict):
        problems.add(f"{label}: entry is not an object")
        return None
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        problems.add(f"{label}: unknown dtype {quote(dtype)}")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        problems.add(f"{label}: shape is not a list of sizes: {quote(shape)}")
    elif len(shape) > MAX_DIMENSIONS:
        problems.add(f"{label}: {len(shape)} dimensions, at most {MAX_DIMENSIONS} can be held")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        problems.add(f"{label}: data_offsets are not two offsets: {quote(offsets)}")
    elif offsets[0] > offsets[1]:
        problems.add(f"{label}: data_offsets {offsets} run backwards")
    if len(problems) > before or not (isinstance(dtype, str) and isinstance(shape, list) and offsets):
        return None
    try:
        expected = tensor_bytes(dtype, shape)
    except (OverflowError, ValueError) as error:
        problems.add(f"{label}: {error}")
        return None
    start, end = offsets
    if end - start != expected:
        problems.add(f"{label}: {end - start} bytes stored, {dtype} {quote(shape)} takes {expected}")
    return HeaderTensor(name, dtype, tuple(shape), data_start + start, data_start + end)


def _check_tiling(tensors: list[HeaderTensor], data_start: int, file_size_bytes: int, problems: Problems) -> None:
    """Note problems unless the tensors, ordered by start, follow each other from the header's end to the file's end."""
    at = data_start
    for tensor in tensors:
        if tensor.start < at:
            problems.add(f"tensor {quote(tensor.name)} overlaps the one before by {at - tensor.start} bytes")
        elif tensor.start > at:
            problems.add(f"{tensor.start - at} bytes before tensor {quote(tensor.name)} belong to no tensor")
        at = max(at, tensor.end)
    if at < file_size_bytes:
        problems.add(f"{file_size_bytes - at} bytes at the end belong to no tensor")


def _is_size(value: Any) -> bool:
    # bool is an int in Python, not in JSON
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


def _encodable(text: str) -> bool:
    """Return whether the text can be UTF-8. A lone surrogate cannot, although JSON allows it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class HeaderBytes:
    """The header of a shard, collected while the whole shard is read."""

    def __init__(self, size_bytes: int) -> None:
        """Set the size of the whole shard."""
        self._size_bytes = size_bytes
        self._data = bytearray()
        self.end = LENGTH_BYTES  # first byte after what is kept; the header's end once its length is known

    def add(self, view: memoryview) -> None:
        """Take the next bytes of the shard, in order."""
        while len(view) and len(self._data) < self.end:
            part = view[: self.end - len(self._data)]
            self._data += part
            view = view[len(part) :]
            if len(self._data) == self.end == LENGTH_BYTES:
                try:
                    self.end = header_bytes(bytes(self._data), self._size_bytes)
                except InvalidHeader:
                    return  # `parse` reports it

    def parse(self) -> Header:
        """Return the checked header after the whole shard was read. Raises InvalidHeader."""
        return parse_header(bytes(self._data), self._size_bytes)
