"""The copies of a conversion: each byte of a part comes from the right byte of a file, whatever the pieces."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.converting.assembly import boxes_of, copies_of, coverage_problems
from cluster.converting.dcp import model_names
from cluster.converting.rank_files import MODEL_KEYS, clean_name, rank_files
from cluster.converting.source import SourceTensor, StoredPiece
from cluster.errors import ConvertError

Shape = tuple[int, ...]


@st.composite
def stored_tensors(draw: st.DrawFn) -> tuple[SourceTensor, dict[str, bytes], np.ndarray]:
    """Return a tensor cut into boxes or runs, the files with them, and its values."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    values = np.arange(prod(shape), dtype="<u2").reshape(shape)
    boxes: list[tuple[Shape, Shape]] = [((0,) * len(shape), shape)]
    flat = draw(st.booleans())
    if flat:
        boxes = [((0,), (values.size,))]
    for _ in range(draw(st.integers(0, 4))):
        start, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        if not axes:
            boxes.append((start, sizes))
            continue
        axis = draw(st.sampled_from(axes))
        at = draw(st.integers(1, sizes[axis] - 1))
        boxes.append((start, (*sizes[:axis], at, *sizes[axis + 1 :])))
        boxes.append(
            (
                (*start[:axis], start[axis] + at, *start[axis + 1 :]),
                (*sizes[:axis], sizes[axis] - at, *sizes[axis + 1 :]),
            )
        )
    files, pieces = {}, []
    source = values.reshape(-1) if flat else values
    for number, (start, sizes) in enumerate(boxes):
        cut = source[tuple(slice(low, low + size) for low, size in zip(start, sizes, strict=True))]
        order = draw(st.permutations(range(len(sizes))))
        stored = np.ascontiguousarray(cut.transpose(order))
        strides = [0] * len(sizes)
        for place, axis in enumerate(order):
            strides[axis] = prod(stored.shape[place + 1 :])
        gap = draw(st.integers(0, 5))
        files[f"file-{number}"] = bytes(gap) + stored.tobytes()
        told = None if list(order) == sorted(order) and draw(st.booleans()) else tuple(strides)
        pieces.append(StoredPiece(f"file-{number}", gap, start, sizes, told, flat))
    return SourceTensor("t", "U16", shape, tuple(pieces)), files, values


@given(stored_tensors(), st.data())
def test_any_run_of_a_tensor_is_copied(
    stored: tuple[SourceTensor, dict[str, bytes], np.ndarray], data: st.DataObject
) -> None:
    tensor, files, values = stored
    start = data.draw(st.integers(0, values.size - 1))
    end = data.draw(st.integers(start + 1, values.size))
    limit = data.draw(st.sampled_from([2, 6, 64, 1 << 20]))
    part = np.full((end - start) * 2 + 3, 255, np.uint8)
    for copy in copies_of(tensor, start, end, 3, 2, limit):
        assert copy.read_bytes <= max(limit, 2)
        raw = files[copy.file][copy.offset_bytes : copy.offset_bytes + copy.read_bytes]
        assert len(raw) == copy.read_bytes
        read = np.ndarray(copy.shape, "<u2", raw, 0, copy.from_strides)
        np.ndarray(copy.shape, "<u2", part.data, copy.to_offset_bytes, copy.to_strides)[...] = read
    assert part[3:].tobytes() == values.reshape(-1)[start:end].tobytes()
    assert not coverage_problems(tensor)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_make_up_a_run_once(shape: list[int], data: st.DataObject) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    seen = np.zeros(shape, int)
    boxes = list(boxes_of(shape, start, end))
    for low, sizes in boxes:
        seen[tuple(slice(one, one + count) for one, count in zip(low, sizes, strict=True))] += 1
    assert seen.reshape(-1).tolist() == [int(start <= one < end) for one in range(size)]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(stored_tensors(), st.data())
def test_holes_and_overlaps_are_found(
    stored: tuple[SourceTensor, dict[str, bytes], np.ndarray], data: st.DataObject
) -> None:
    tensor, _, _ = stored
    number = data.draw(st.integers(0, len(tensor.pieces) - 1))
    fewer = (*tensor.pieces[:number], *tensor.pieces[number + 1 :])
    assert "in no file" in str(coverage_problems(SourceTensor("t", "U16", tensor.shape, fewer)))
    twice = (*tensor.pieces, tensor.pieces[number])
    assert "overlap" in str(coverage_problems(SourceTensor("t", "U16", tensor.shape, twice)))


def test_pieces_outside_of_the_tensor_are_found() -> None:
    for start, shape in (((0, 3), (2, 2)), ((-1, 0), (1, 1)), ((0,), (2,))):
        piece = StoredPiece("f", 0, start, shape)
        assert "outside" in str(coverage_problems(SourceTensor("t", "F32", (2, 4), (piece,))))


def test_thousands_of_ranks_are_checked_at_once() -> None:
    pieces = tuple(StoredPiece(f"rank-{rank}", 0, (0, 4 * rank), (8, 4)) for rank in range(4096))
    assert not coverage_problems(SourceTensor("t", "F32", (8, 4 * 4096), pieces))


def paths_of(nested: dict[str, Any], *around: str) -> dict[str, tuple[str, ...]]:
    """Return names and keys of the tensors as DCP's planner writes them. A leaf is anything but a dict."""
    found: dict[str, tuple[str, ...]] = {}
    for key, value in nested.items():
        inner = (*around, key)
        found |= paths_of(value, *inner) if isinstance(value, dict) else {".".join(inner): inner}
    return found


ADAM = {"state": {"a.w": {"exp_avg": 1, "step": 1}, "b": {"exp_avg": 1, "step": 1}}}


@pytest.mark.parametrize(
    ("saved", "names"),
    [
        *(({key: {"a.w": 1}, "optimizer": ADAM}, {f"{key}.a.w": "a.w"}) for key in MODEL_KEYS),
        ({"model_state": {"a.w": 1}, "optimizer_state": ADAM, "step": 1}, {"model_state.a.w": "a.w"}),
        ({"net": {"a.w": 1}, "optim_0": ADAM, "G_Optimizer": ADAM}, {"net.a.w": "a.w"}),
        ({"app": {"model": {"a.w": 1}, "optim": ADAM}}, {"app.model.a.w": "a.w"}),
        ({"trainer": {"model": {"a.w": 1}, "optim": ADAM}}, {"trainer.model.a.w": "a.w"}),
        ({"state": {"model": {"a": 1}}, "rank": {"x": 1}}, {"state.model.a": "a"}),
        ({"state_dict": {"model": {"a.w": 1}, "optimizer": ADAM}}, {"state_dict.model.a.w": "a.w"}),
        (
            {"model": {"ema.w": 1, "optim.w": 1, "optimizer": ADAM}},
            {"model.ema.w": "ema.w", "model.optim.w": "optim.w"},
        ),
        ({"model": {"a": {"w": 1}, "b": {"w": 1}}}, {"model.a.w": "a.w", "model.b.w": "b.w"}),
        ({"model.embed.w": 1, "optimizer.state": 1, "optimizer": ADAM}, {"model.embed.w": "model.embed.w"}),
        ({"optimizer": ADAM}, {}),
    ],
)
def test_names_are_those_of_the_model(saved: dict[str, Any], names: dict[str, str]) -> None:
    assert model_names(paths_of(saved)) == names


@pytest.mark.parametrize(
    ("saved", "keys"),
    [
        ({"net": {"w": 1}, "teacher": {"w": 1}, "optim": ADAM}, ["'net'", "'teacher'"]),
        ({"model": {"w": 1}, "module": {"w": 1}}, ["'model'", "'module'"]),
        ({"net": {"w": 1}, "loss": 1}, ["'net'", "none ('loss'...)"]),
        ({"weights": {"w": 1}, "adam": ADAM}, ["'adam'", "'weights'"]),
        ({"adam": ADAM}, ["'a.w'", "'b'"]),
    ],
)
def test_keys_that_could_all_be_the_models_are_refused(saved: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ConvertError, match="dcp_to_torch_save") as caught:
        model_names(paths_of(saved))
    assert all(key in str(caught.value) for key in keys), caught.value


def test_names_lose_the_prefixes_of_wrappers() -> None:
    assert clean_name("_fsdp_wrapped_module._orig_mod.layers.0._checkpoint_wrapped_module.w") == "layers.0.w"


def test_files_of_ranks_are_found_by_name() -> None:
    keys = ["actor/model_world_size_2_rank_0.pt", "actor/model_world_size_2_rank_1.pt"]
    others = ["actor/optim_world_size_2_rank_0.pt", "actor/extra_state_world_size_2_rank_1.pt", "config.json"]
    (found,) = rank_files([*keys, *others])
    assert (found.folder, found.world_size, found.keys) == ("actor/", 2, dict(enumerate(keys)))
    (found,) = rank_files(["pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin", "random_states_0.pkl"])
    assert (found.world_size, sorted(found.keys)) == (None, [0, 1])
    assert not rank_files(["frank_0.pt", "pytorch_model.bin"])
