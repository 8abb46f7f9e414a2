"""The reference reads every accepted header, with the same ranges. Every problem of a broken header is named."""

import json
import struct
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from storage.checkpoints import safetensors_header
from storage.checkpoints.safetensors_header import encode_header, parse_header, read_head
from storage.errors import InvalidHeader
from storage.stores.object_store import ByteRange, MemoryStore
from tests.support.checkpoints import TensorSpec, odd_parts, raw_header, safetensors_bytes, tensor_specs


def entry(dtype: Any = "U8", shape: Any = (4,), start: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@given(tensor_specs(), st.dictionaries(st.text("abc é"), st.text("xyz ü"), max_size=3))
def test_a_valid_file_reads_as_it_was_written(specs: list[TensorSpec], metadata: dict[str, str]) -> None:
    data = safetensors_bytes(specs, metadata=metadata)
    header = parse_header(data, len(data))
    assert header.metadata == metadata
    assert {(t.name, t.dtype, t.shape) for t in header.tensors} == set(specs)
    at = header.data_start
    for tensor in header.tensors:
        assert tensor.start == at
        at = tensor.end
    assert at == len(data)


@given(tensor_specs())
def test_ranges_are_those_of_the_reference(specs: list[TensorSpec]) -> None:
    data = safetensors_bytes(specs, seed=1)
    ours = {t.name: (t.dtype, list(t.shape), data[t.start : t.end]) for t in parse_header(data, len(data)).tensors}
    reference = {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in deserialize(data)}
    assert ours == reference


def test_every_dtype_and_odd_shape() -> None:
    for part in odd_parts():
        data = safetensors_bytes(part)
        assert len(parse_header(data, len(data)).tensors) == len(part)


mutations = st.lists(
    st.tuples(st.sampled_from(["set", "cut", "insert", "drop"]), st.integers(0, 10_000), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300)
@given(tensor_specs(max_tensors=3), mutations)
def test_the_reference_reads_every_accepted_header(
    specs: list[TensorSpec], changes: list[tuple[str, int, int]]
) -> None:
    data = bytearray(safetensors_bytes(specs))
    for kind, place, value in changes:
        at = place % len(data) if data else 0
        if kind == "set" and data:
            data[at] = value
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data.insert(at, value)
        elif data:
            del data[at]
    try:
        header = parse_header(bytes(data), len(data))
    except InvalidHeader:
        return
    reference = {name: bytes(t["data"]) for name, t in deserialize(bytes(data))}
    assert {t.name: bytes(data[t.start : t.end]) for t in header.tensors} == reference


@settings(max_examples=300)
@given(tensor_specs(max_tensors=3), mutations, st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3)))
def test_the_quick_check_accepts_only_what_the_whole_one_does(
    specs: list[TensorSpec], changes: list[tuple[str, int, int]], metadata: dict[str, str] | None
) -> None:
    data = bytearray(safetensors_bytes(specs, metadata=metadata))
    for kind, place, value in changes[1:]:
        if kind in ("set", "insert"):
            at = place % len(data)
            data[at : at + (kind == "set")] = bytes([value])
    try:
        quick = parse_header(bytes(data), len(data))
    except InvalidHeader:
        quick = None
    with patch("storage.checkpoints.safetensors_header._sound_header", return_value=None):
        try:
            whole = parse_header(bytes(data), len(data))
        except InvalidHeader:
            whole = None
    assert quick == whole


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"F4","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[-1,-1],"data_offsets":[0,1]}}',
        '{"__metadata__":{"x":"y","x":"y"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    ],
)
def test_well_formed_lies_are_refused(text: str) -> None:
    data = struct.pack("<Q", len(text)) + text.encode() + b"\0"
    with pytest.raises(InvalidHeader):
        parse_header(data, len(data))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
likely = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "F4", "X"]) | json_values,
        "shape": st.lists(st.integers(-1, 2**64), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 2**64), max_size=3) | json_values,
    },
)


@settings(max_examples=300)
@given(st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), likely | json_values, max_size=4))
def test_any_json_gives_a_header_or_an_error(header: dict[str, Any]) -> None:
    data = raw_header(header)
    said = ""
    try:
        parse_header(data, len(data))
    except InvalidHeader as error:
        said = str(error)
    assert said.isprintable()
    assert len(said) < 20_000


@given(st.binary(max_size=200), st.integers(0, 300))
@example(struct.pack("<Q", 2) + b"\xff\xff", 10)
def test_any_bytes_give_a_header_or_an_error(data: bytes, size_bytes: int) -> None:
    with pytest.raises(InvalidHeader):
        parse_header(data + b"\x00", size_bytes)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": entry(), "b": entry(start=2, end=6)}, "'b' overlaps the one before by 2 bytes"),
        ({"a": entry(start=1, end=5)}, "1 bytes before tensor 'a' belong to no tensor"),
        ({"a": entry(shape=[3], end=3)}, "1 bytes at the end belong to no tensor"),
        ({"a": entry(shape=[9], end=9)}, "the file is cut short: it has 72 B of 77 B"),
        ({"a": entry(shape=[9], end=9), "b": entry()}, "'a' overlaps the one before by 4 bytes; cut short"),
        ({"a": entry(dtype="F32")}, "4 bytes stored, F32 [4] takes 16"),
        ({"a": entry(dtype="F33")}, "unknown dtype 'F33'"),
        ({"a": entry(dtype=None)}, "unknown dtype None"),
        ({"a": entry(dtype="F4", shape=[3], end=1)}, "12 bits of F4 do not fill whole bytes"),
        ({"a": entry(shape=[-1])}, "shape is not a list of sizes"),
        ({"a": entry(shape=[4.0])}, "shape is not a list of sizes"),
        ({"a": entry(shape=[True])}, "shape is not a list of sizes"),
        ({"a": entry(shape=[2**64])}, "shape is not a list of sizes"),
        ({"a": entry(shape=[2**40, 2**40])}, "more than"),
        ({"a": entry(shape=[1] * 65)}, "65 dimensions"),
        ({"a": entry(start=4, end=0)}, "run backwards"),
        ({"a": entry(start="0")}, "data_offsets are not two offsets"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}}, "data_offsets are not two offsets"),
        ({"a": 7}, "entry is not an object"),
        ({"a": entry(), "__metadata__": 3}, "__metadata__ is not an object"),
        ({"a": entry(), "__metadata__": {"k": 1}}, "value of 'k' is not a string"),
        ({"\ud800": entry()}, "not valid Unicode"),
        ([], "a JSON list, not an object"),
    ],
)
def test_errors_of_broken_headers_name_the_problem(header: Any, said: str) -> None:
    data = raw_header(header, b"abcd")
    with pytest.raises(InvalidHeader) as caught:
        parse_header(data, len(data))
    assert said in str(caught.value)
    with pytest.raises(SafetensorError):
        deserialize(data)


def test_all_problems_come_at_once_and_the_list_is_bounded() -> None:
    header = {f"t{i}": entry(dtype="nope") for i in range(1000)}
    data = raw_header(header | {"ok": entry(shape=[-2])}, b"abcd")
    with pytest.raises(InvalidHeader) as caught:
        parse_header(data, len(data))
    assert caught.value.details["problems"] == 1001
    assert "'t0'" in str(caught.value)
    assert "and 981 more" in str(caught.value)


def test_duplicate_names_are_refused() -> None:
    one = json.dumps(entry())
    text = f'{{"a": {one}, "a": {one}}}'.encode()
    data = struct.pack("<Q", len(text)) + text + b"abcd"
    with pytest.raises(InvalidHeader, match="duplicate name 'a'"):
        parse_header(data, len(data))


def test_hostile_names_are_data_and_are_escaped_in_messages() -> None:
    name = "../../etc/passwd\x1b[31m\n" + "x" * 5000
    good = raw_header({name: entry()}, b"abcd")
    assert parse_header(good, len(good)).tensors[0].name == name
    bad = raw_header({name: entry(dtype="?")}, b"abcd")
    with pytest.raises(InvalidHeader) as caught:
        parse_header(bad, len(bad))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", [b"[" * 50_000, b'{"a":' * 50_000, b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"])
def test_deep_nesting_is_an_error_not_a_crash(text: bytes) -> None:
    data = struct.pack("<Q", len(text)) + text
    with pytest.raises(InvalidHeader):
        parse_header(data, len(data))


@pytest.mark.parametrize("text", [b"NaN", b"{} x", b"", b"{", b'{"a": ' + b"9" * 5000 + b"}", b"\xef\xbb\xbf{}"])
def test_not_json(text: bytes) -> None:
    data = struct.pack("<Q", len(text)) + text
    with pytest.raises(InvalidHeader):
        parse_header(data, len(data))


def test_impossible_lengths_are_refused_before_reading() -> None:
    for length in (100_000_001, 2**63, 2**64 - 1):
        with pytest.raises(InvalidHeader, match="the format allows"):
            parse_header(struct.pack("<Q", length) + b"{}", 2**63)
    with pytest.raises(InvalidHeader, match="cut short"):
        parse_header(struct.pack("<Q", 3) + b"{}", 10)
    with pytest.raises(InvalidHeader, match="cut short"):
        parse_header(struct.pack("<Q", 3) + b"{}", 11)
    with pytest.raises(InvalidHeader, match="7 bytes"):
        parse_header(b"1234567", 7)


def test_too_many_values_are_refused_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_JSON_VALUES", 100)
    data = raw_header({"a": [0] * 200})
    with pytest.raises(InvalidHeader, match="at most 100 are read"):
        parse_header(data, len(data))


class CountingStore(MemoryStore):
    """Remembers the ranges that were read."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.ranges: list[ByteRange] = []

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        self.ranges.append(byte_range)
        return super().read_into(key, byte_range, buffer, etag=etag)


def test_reading_takes_one_request_or_two_for_a_long_header() -> None:
    short = safetensors_bytes([("a", "F32", (1000, 1000))])
    long = safetensors_bytes([(f"tensor.{i}.{'x' * 100}", "U8", (1,)) for i in range(3000)])
    store = CountingStore({"short": short, "long": long})
    assert read_head(store, "short", len(short))[0] == parse_header(short, len(short))
    assert [r.size_bytes for r in store.ranges] == [safetensors_header.FIRST_READ_BYTES]
    store.ranges.clear()
    header, _ = read_head(store, "long", len(long))
    assert header == parse_header(long, len(long))
    assert len(store.ranges) == 2
    assert store.ranges[-1].end == header.data_start


def test_reading_names_the_object_in_the_error() -> None:
    store = MemoryStore({"x.safetensors": b"garbage!" * 4})
    with pytest.raises(InvalidHeader, match=r"key=x\.safetensors"):
        read_head(store, "x.safetensors", 32)


def test_encoded_header_is_padded() -> None:
    assert len(encode_header([("a", "U8", (3,))])) % 8 == 0
