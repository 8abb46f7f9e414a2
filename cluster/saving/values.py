"""Nested values, such as the state of an optimizer, as JSON and tensors. Nothing is pickled.

    {"lr": 0.1, 3: t, "betas": (0.9, nan)}     a value with a tensor `t` in it
    {"dict": [["lr", 0.1],                     JSON: keys keep their type, tuples stay tuples
              [3, {"tensor": "optimizer.3"}],  the tensor has a name of its own in a safetensors file
              ["betas", {"tuple": [0.9, {"float": "nan"}]}]]}

JSON has no integer keys, tuples, NaN or bytes. So each value that JSON would change is an object with one key, which
names its type. What comes from a bucket is bounded before it is parsed.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from cluster.errors import SaveRefused
from storage.errors import InvalidState
from storage.problems import Problems, json_values, quote

MAX_JSON_BYTES = 256 << 20
MAX_JSON_VALUES = 5_000_000
MAX_DEPTH = 64
MAX_INT_BITS = 512  # limits the time of parsing a number
_PLAIN = (str, bool, int, type(None))


def encode_values(values: Mapping[str, object], is_tensor: Callable[[object], bool]) -> tuple[bytes, dict[str, Any]]:
    """Return values as JSON, and the tensors in them by the names that the JSON has for them.

    Args:
        values: The values by name. They may contain None, bool, int, float, str, bytes, list, tuple, set, dict,
            OrderedDict, Counter, defaultdict without its factory, and tensors. A `deque` becomes a list.
        is_tensor: Returns whether a value is a tensor.

    Returns:
        The JSON, and the tensors.

    Raises:
        SaveRefused: Values of other types; the message lists each with its place. Or more JSON than loads read.
    """
    tensors: dict[str, Any] = {}
    problems = Problems()

    def encode(value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            problems.add(f"{quote(path)} is nested more than {MAX_DEPTH} deep")
        elif is_tensor(value):
            name = path
            while name in tensors:
                name += "~"
            tensors[name] = value
            return {"tensor": name}
        elif type(value) is int and value.bit_length() > MAX_INT_BITS:
            problems.add(f"{quote(path)} is a number of {value.bit_length()} bits")
        elif type(value) in _PLAIN:
            return value
        elif type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        elif type(value) is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        elif type(value) in (list, deque):
            return [encode(one, f"{path}.{number}", depth + 1) for number, one in enumerate(value)]
        elif type(value) is tuple:
            return {"tuple": [encode(one, f"{path}.{number}", depth + 1) for number, one in enumerate(value)]}
        elif type(value) in (set, frozenset):
            return {"set": [encode(one, path, depth + 1) for one in value]}
        elif type(value) in (dict, OrderedDict, defaultdict, Counter):
            kind = "counter" if type(value) is Counter else "dict"
            return {
                kind: [
                    [encode(key, path, depth + 1), encode(one, f"{path}.{key}", depth + 1)]
                    for key, one in value.items()
                ]
            }
        else:
            problems.add(f"{quote(path)} is of type {type(value).__qualname__}")
        return None

    document = {name: encode(value, name, 0) for name, value in values.items()}
    if problems:
        raise SaveRefused(
            f"the state has values that only a pickle could hold: {problems}",
            hint="save them elsewhere, or make them numbers, texts, lists, dicts or tensors",
        )
    data = json.dumps(document).encode()
    if len(data) > MAX_JSON_BYTES or json_values(data) > MAX_JSON_VALUES:
        raise SaveRefused(
            f"the state without its tensors has {len(data)} bytes of JSON with up to {json_values(data)} values; loads "
            f"read at most {MAX_JSON_BYTES} bytes with {MAX_JSON_VALUES} values",
            hint="make long lists of numbers tensors, or save them elsewhere",
        )
    return data, tensors


def decode_values(data: bytes, tensor: Callable[[str], object]) -> dict[str, Any]:
    """Return the values that `encode_values` made to JSON.

    Args:
        data: The JSON.
        tensor: Returns the tensor of that name. It may return something else for it, such as the name.

    Raises:
        InvalidState: The JSON is not one that `encode_values` writes.
    """
    if len(data) > MAX_JSON_BYTES or json_values(data) > MAX_JSON_VALUES:
        raise InvalidState(f"the saved state has {len(data)} bytes of JSON, more than any that is written here")
    decoders: dict[str, Callable[[Any, int], Any]] = {
        "tensor": lambda value, depth: tensor(_text(value)),
        "float": lambda value, depth: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value],
        "bytes": lambda value, depth: base64.b64decode(_text(value), validate=True),
        "tuple": lambda value, depth: tuple(decode(one, depth) for one in _list(value)),
        "set": lambda value, depth: {decode(one, depth) for one in _list(value)},
        "dict": lambda value, depth: _pairs(value, depth),
        "counter": lambda value, depth: Counter(_pairs(value, depth)),
    }

    def _pairs(value: Any, depth: int) -> dict[Any, Any]:
        pairs = [(decode(key, depth), decode(one, depth)) for key, one in _list(value)]
        return dict(pairs)

    def decode(value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        if isinstance(value, list):
            return [decode(one, depth + 1) for one in value]
        if not isinstance(value, dict):
            return value
        ((kind, inside),) = value.items()
        return decoders[kind](inside, depth + 1)

    try:
        document = json.loads(data, parse_int=_number)
        if not isinstance(document, dict):
            raise ValueError("not an object")
        return {name: decode(value, 0) for name, value in document.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidState(f"the saved state is broken: {error!s:.200}") from error


def _number(text: str) -> int:
    if len(text) > MAX_INT_BITS:
        raise ValueError("a number is too long")
    return int(text)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is missing")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("a list is missing")
    return value
