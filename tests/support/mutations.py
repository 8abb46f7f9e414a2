"""Good input made bad: bytes changed anywhere, and JSON changed where it has a meaning."""

from __future__ import annotations

import copy
import json
import struct
from typing import Any

from hypothesis import strategies as st

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
    """`seed` after one to four cuts, flips, insertions and repetitions."""
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
    """The JSON in `seed` after one to three changes: a value replaced, a key taken away, added or doubled."""
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
