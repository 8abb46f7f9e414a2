"""Any input from a bucket or server gets a short typed refusal without a crash, and memory stays in proportion."""

from __future__ import annotations

import copy
import json
import random
import struct
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.layouts import model_config
from storage.checkpoints import checkpoint_files, manifest, safetensors_header
from storage.errors import StoreError
from tests.fuzz.parsers import PARSERS, Parser

ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 1e308, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, float("nan"), float("inf")),
    *("", "..", "../../etc/passwd", "/etc/passwd", "a\0b", "C:\\x", "s3://other/x", "x" * 5000, "\ud800", "é" * 300),
    *(
        [],
        {},
        [[]],
        [0],
        {"a": 1},
        [[[[[[[[]]]]]]]],
        ["x"] * 50,
        {"": {"": {"": []}}},
        "0" * 64,
        "F32",
        "\u202e\x1b[2J",
    ),
]


@st.composite
def changed_bytes(draw: st.DrawFn, seed: bytes) -> bytes:
    """Return `seed` after one to four cuts, flips, insertions and repetitions."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        end = min(len(data), at + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(["flip", "cut", "end", "insert", "repeat", "number"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:end]
        elif kind == "end":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=20) | st.sampled_from([b"[" * 300, b'{"a":' * 300, b"9" * 5000]))
        elif kind == "repeat":
            data[at:at] = data[at:end] * draw(st.integers(1, 5))
        elif kind == "number":
            value = draw(st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]))
            data[at : at + 8] = struct.pack("<Q", value)
    return bytes(data)


@st.composite
def changed_json(draw: st.DrawFn, seed: bytes) -> bytes:
    """Return the JSON in `seed` after one to three changes: a value replaced, a key removed, added or doubled."""
    document = json.loads(seed)
    for _ in range(draw(st.integers(1, 3))):
        document = _changed(draw, copy.deepcopy(document))
    return json.dumps(document, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


def _changed(draw: st.DrawFn, document: Any) -> Any:
    node, parent, place = document, None, None
    while isinstance(node, dict | list) and node and draw(st.integers(0, 4)):
        parent = node
        place = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node = parent[place]
    odd = draw(st.sampled_from(ODD_VALUES) | st.integers() | st.text(max_size=8))
    if parent is None:
        return odd
    kind = draw(st.sampled_from(["replace", "replace", "remove", "add", "swap"]))
    if kind == "replace":
        parent[place] = odd
    elif kind == "remove":
        del parent[place]
    elif kind == "add" and isinstance(parent, dict):
        parent[draw(st.text(max_size=6) | st.sampled_from(["__metadata__", "revision", "version"]))] = odd
    elif kind == "add":
        parent.insert(place, copy.deepcopy(node))
    else:
        other = draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
        parent[place], parent[other] = parent[other], parent[place]
    return document


BY_NAME = pytest.mark.parametrize("parser", PARSERS, ids=[parser.name for parser in PARSERS])
JSON = pytest.mark.parametrize(
    "parser",
    [parser for parser in PARSERS if parser.is_json],
    ids=[parser.name for parser in PARSERS if parser.is_json],
)
MIB = 1 << 20
PER_BYTE = 400  # of memory for a byte of input: "[],[],..." makes an object of every third byte
# The largest limit on the number of values. The input reaches it in as few bytes as possible.
MOST_VALUES = max(
    manifest.MAX_JSON_VALUES,
    safetensors_header.MAX_JSON_VALUES,
    checkpoint_files.MAX_JSON_VALUES,
    model_config.MAX_JSON_VALUES,
)


def peak_bytes(parser: Parser, data: bytes) -> int:
    tracemalloc.start()
    try:
        parser.check(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@BY_NAME
def test_the_examples_are_valid(parser: Parser) -> None:
    taken = [parser.check(seed) for seed in parser.seeds()]
    assert any(taken) or parser.name in ("s3_error", "uri")  # these only refuse, or want two good halves


@BY_NAME
@given(data=st.data())
def test_changed_bytes_are_refused_or_harmless(parser: Parser, data: st.DataObject) -> None:
    seed = data.draw(st.sampled_from(parser.seeds()))
    parser.check(data.draw(changed_bytes(seed)))


@JSON
@given(data=st.data())
def test_changed_json_is_refused_or_harmless(parser: Parser, data: st.DataObject) -> None:
    seed = data.draw(st.sampled_from(parser.seeds()))
    parser.check(data.draw(changed_json(seed)))


@BY_NAME
@given(data=st.binary(max_size=400))
def test_any_bytes_are_refused_or_harmless(parser: Parser, data: bytes) -> None:
    parser.check(data)


@BY_NAME
@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"weight_map":', b'{"text_config":', b"<Code>", b"\xff", b"9"])
def test_deep_or_long_input_is_refused(parser: Parser, opening: bytes) -> None:
    for prefix in (b"", (8 * 100_000).to_bytes(8, "little")):
        parser.check(prefix + opening * 100_000)


@BY_NAME
def test_memory_is_in_proportion_to_the_input(parser: Parser) -> None:
    rng = random.Random(7)
    inputs = [b"[" + b"[]," * 30_000 + b"0]", b"{" + b'"a":[],' * 20_000 + b'"b":0}', rng.randbytes(100_000)]
    inputs += [seed * 20 for seed in parser.seeds()]
    for data in inputs:
        assert peak_bytes(parser, data) < PER_BYTE * len(data) + 4 * MIB


@BY_NAME
def test_no_example_takes_long(parser: Parser) -> None:
    for seed in parser.seeds():
        parser.check(seed)  # imports what it needs
        started_s = time.process_time()
        assert peak_bytes(parser, seed) < PER_BYTE * len(seed) + 4 * MIB
        assert time.process_time() - started_s < 1


@JSON
def test_too_many_values_are_refused_unparsed(parser: Parser) -> None:
    dense = b"[" + b"," * MOST_VALUES + b"]"
    assert peak_bytes(parser, dense) < len(dense) + MIB


FOUND = [  # by these tests, once
    ("s3_answer", b"206\netag:\x00 v1\ncontent-encoding:\x1b gzip"),
    ("s3_answer", b'206\ncontent-length: 20\netag:\x9b "v1"'),
    ("uri", b"http://[[/m"),
    ("uri", b"file:///m" + b"9" * 20_000 + b"/.."),
    ("disk_file_checksummed", b"LSCHUNK\x01" + b"_".ljust(40, b"\0") + b"xxh3\xaf\x1b".ljust(175, b"\0")),
    ("s3_listing", b"<a><Contents><LastModified>2026-01-01T00:00:" + b"4" * 100 + b"</LastModified></Contents></a>"),
    ("config", b'{"model_type": ' + b"[" * 900 + b"]" * 900 + b"}"),
]


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_earlier_findings_stay_fixed(name: str, data: bytes) -> None:
    assert not next(parser for parser in PARSERS if parser.name == name).check(data)


def test_the_check_detects_a_broken_parser() -> None:
    def broken(data: bytes) -> None:
        raise StoreError(data.decode("latin-1"))

    parser = Parser("broken", broken, (StoreError,), list)
    for data in (b"\x1b[2J", b"x" * 20_000):
        with pytest.raises(ValueError, match="broken"):
            parser.check(data)
    with pytest.raises(ZeroDivisionError):
        Parser("broken", lambda data: 1 // len(data), (StoreError,), list).check(b"")
