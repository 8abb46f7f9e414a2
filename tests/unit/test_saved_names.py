"""Names without wrappers, and mosaics: what numpy does with the values, they do with boxes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import SaveRefused
from cluster.saving.names import Mosaic, cat, parts_of_box, stored_names


def test_wrappers_leave_no_trace_in_names() -> None:
    names = {
        "module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.weight": "model.layers.0.mlp.weight",
        "module._orig_mod._fsdp_wrapped_module.lm_head.weight": "lm_head.weight",
    }
    assert stored_names(names) == names


def test_module_stays_when_it_is_no_wrapper() -> None:
    names = ["module.weight", "head.weight", "a.module.weight"]
    assert stored_names(names) == dict(zip(names, names, strict=True))


def test_two_names_that_become_one_are_refused() -> None:
    with pytest.raises(SaveRefused, match=r"'a\.weight' would be stored for"):
        stored_names(["_orig_mod.a.weight", "a.weight"])


@st.composite
def _changed(draw: st.DrawFn) -> tuple[dict[str, np.ndarray[Any, Any]], Mosaic, np.ndarray[Any, Any]]:
    """Sources, a mosaic made of them by random operations, and numpy's result of the same operations."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4).map(tuple))
    sources = {name: np.arange(math.prod(shape)).reshape(shape) + n * 100_000 for n, name in enumerate("ab")}
    mosaic, value = Mosaic.of("a", shape), sources["a"]
    for _ in range(draw(st.integers(0, 5))):
        dim = draw(st.integers(0, value.ndim - 1)) if value.ndim else 0
        match draw(st.sampled_from(["narrow", "permute", "view", "cat", "stack", "select", "step"])):
            case "narrow" if value.ndim and value.shape[dim]:
                first = draw(st.integers(0, value.shape[dim] - 1))
                end = draw(st.integers(first, value.shape[dim]))
                mosaic, value = mosaic.narrow(dim, first, end), value.take(range(first, end), dim)
            case "step" if value.ndim and value.shape[dim]:
                first, step = draw(st.integers(0, value.shape[dim] - 1)), draw(st.integers(1, 3))
                mosaic = mosaic.narrow(dim, first, value.shape[dim], step)
                value = value.take(range(first, value.shape[dim], step), dim)
            case "select" if value.ndim > 1 and value.shape[dim]:
                index = draw(st.integers(0, value.shape[dim] - 1))
                mosaic, value = mosaic.select(dim, index), value.take(index, dim)
            case "permute":
                order = draw(st.permutations(range(value.ndim)))
                mosaic, value = mosaic.permute(order), value.transpose(order)
            case "view":
                rest, to = value.size, []
                while rest > 1 and len(to) < 4:
                    to.append(draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
                    rest //= to[-1]
                if value.size:
                    mosaic, value = mosaic.view([*to, rest]), value.reshape([*to, rest])
            case "cat" if value.ndim and value.size < 300:
                other = Mosaic.of("b", shape)
                if other.shape[1:] == value.shape[1:]:
                    mosaic, value = cat([mosaic, other], 0), np.concatenate([value, sources["b"]], 0)
            case "stack" if value.ndim < 5 and value.size < 300:
                mosaic = cat([mosaic.unsqueeze(dim), mosaic.unsqueeze(dim)], dim)
                value = np.stack([value, value], dim)
    return sources, mosaic, value


@settings(max_examples=300, deadline=None)
@given(_changed(), st.data())
def test_parts_of_all_boxes_make_the_changed_tensor(
    changed: tuple[dict[str, np.ndarray[Any, Any]], Mosaic, np.ndarray[Any, Any]], data: st.DataObject
) -> None:
    sources, mosaic, value = changed
    assert mosaic.shape == value.shape
    made = np.full(value.shape, -1)
    for name, source in sources.items():
        dim = data.draw(st.integers(0, source.ndim - 1))
        cut = data.draw(st.integers(0, source.shape[dim]))
        for low, high in ((0, cut), (cut, source.shape[dim])):
            held = source.take(range(low, high), dim).copy()
            offsets = tuple(low if d == dim else 0 for d in range(source.ndim))
            for part in parts_of_box(mosaic, name, source.shape, (offsets, held.shape)):
                strides = [step * held.strides[of] for of, step in part.steps]
                start = held[tuple(slice(first, None) for first in part.first)]
                values = np.lib.stride_tricks.as_strided(start, part.sizes, strides)
                box = tuple(slice(a, a + n) for a, n in zip(part.at, part.sizes, strict=True))
                assert (made[box] == -1).all()  # nothing twice
                made[box] = values
    assert (made == value).all()
