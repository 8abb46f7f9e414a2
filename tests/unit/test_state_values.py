"""Nested values become JSON and come back with their types; nothing else is accepted."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import SaveRefused
from cluster.saving import values
from cluster.saving.values import decode_values, encode_values
from storage.errors import InvalidState


class _Tensor:
    """A value that stands for itself."""


_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(), st.text(), st.binary(), st.builds(_Tensor)
)
_KEYS = st.one_of(st.integers(-3, 3), st.text(max_size=2), st.tuples(st.integers(0, 3)))
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.dictionaries(_KEYS, st.integers(), max_size=3).map(Counter),
        st.sets(st.integers()),
    ),
    max_leaves=12,
)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return _same(list(a), list(b)) and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


@given(st.dictionaries(st.text(max_size=4), _VALUES, max_size=4))
def test_values_come_back_with_their_types(values: dict[str, Any]) -> None:
    data, tensors = encode_values(values, lambda value: isinstance(value, _Tensor))
    assert _same(values, decode_values(data, tensors.__getitem__))


def test_what_only_a_pickle_holds_is_refused_with_its_place() -> None:
    with pytest.raises(
        SaveRefused, match=r"'scheduler\.best' is of type PosixPath.*'scheduler\.run' is of type function"
    ):
        encode_values({"scheduler": {"best": Path("x"), "run": _same}}, lambda value: False)


@pytest.mark.parametrize(("limit", "most"), [("MAX_JSON_BYTES", 5_500), ("MAX_JSON_VALUES", 1_010)])
def test_more_than_loads_read_is_refused(monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    seen = {"extra": {"seen": list(range(1000))}}
    monkeypatch.setattr(values, limit, most)
    data, _ = encode_values(seen, lambda value: False)
    assert decode_values(data, str) == seen
    with pytest.raises(SaveRefused, match=f"loads read at most .*{most}"):
        encode_values({**seen, "more": list(range(200))}, lambda value: False)


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{",
        b'{"a": {"float": "1"}}',
        b'{"a": {"tuple": 3}}',
        b'{"a": {}}',
        b'{"a": {"dict": [], "tuple": []}}',
        b'{"a": {"pickle": "gASV"}}',
        b'{"a": {"dict": [[{"dict": []}, 1]]}}',
        b'{"a": {"bytes": "*"}}',
        b'{"a": {"tensor": 3}}',
        b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b"\xff",
    ],
)
def test_hostile_states_are_typed_errors(data: bytes) -> None:
    with pytest.raises(InvalidState):
        decode_values(data, lambda name: name)
