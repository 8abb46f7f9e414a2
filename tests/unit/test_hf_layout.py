"""Model files are chosen from names alone. Hostile and contradicting indexes are refused with a list."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoints import checkpoint_files
from storage.checkpoints.checkpoint_files import INDEX_KEY, assign_tensors, choose_layout, parse_weight_map
from storage.checkpoints.safetensors_header import Header, parse_header
from storage.errors import CheckpointError, InvalidIndex, NotACheckpoint, PickleRefused
from tests.support.checkpoints import TensorSpec, safetensors_bytes


def numbered(*numbers: int, of: int) -> list[str]:
    return [f"model-{n:05d}-of-{of:05d}.safetensors" for n in numbers]


@pytest.mark.parametrize(
    ("keys", "index_key", "shards", "skipped"),
    [
        (["model.safetensors", "config.json"], None, ["model.safetensors"], []),
        ([INDEX_KEY, *numbered(1, 2, of=2)], INDEX_KEY, [], numbered(1, 2, of=2)),
        ([INDEX_KEY, "model.safetensors"], INDEX_KEY, [], ["model.safetensors"]),
        (numbered(1, 2, of=2), None, numbered(1, 2, of=2), []),
        ([*numbered(1, 2, of=2), "consolidated.safetensors"], None, numbered(1, 2, of=2), ["consolidated.safetensors"]),
        (["consolidated.safetensors", "params.json"], None, ["consolidated.safetensors"], []),
        (["model.safetensors", "model.fp16.safetensors"], None, ["model.safetensors"], ["model.fp16.safetensors"]),
        (
            ["diffusion.safetensors.index.json", "d.safetensors"],
            "diffusion.safetensors.index.json",
            [],
            ["d.safetensors"],
        ),
        (["consolidated.safetensors.index.json", "a.safetensors"], None, ["a.safetensors"], []),
        (["a.safetensors", "sub/b.safetensors", "pytorch_model.bin"], None, ["a.safetensors"], []),
    ],
)
def test_the_index_and_shards_are_chosen_by_name(
    keys: list[str], index_key: str | None, shards: list[str], skipped: list[str]
) -> None:
    layout = choose_layout(keys, where="twin://x")
    assert (layout.index_key, list(layout.shard_keys), list(layout.skipped)) == (index_key, shards, skipped)


@pytest.mark.parametrize(
    ("keys", "kind", "said"),
    [
        ([], NotACheckpoint, "nothing is stored there"),
        (["README.md", "model.gguf"], NotACheckpoint, "2 others: 'README.md', 'model.gguf'"),
        (["pytorch_model.bin", "config.json"], PickleRefused, "pytorch_model.bin"),
        (["original/consolidated.00.pth"], PickleRefused, "convert them once"),
        (["m.pt", "m.ckpt", "x.pkl"], PickleRefused, "'m.ckpt', 'm.pt', 'x.pkl'"),
        (["unet/model.safetensors", "vae/model.safetensors"], NotACheckpoint, "but in 'unet', 'vae'"),
        (numbered(1, 2, 4, of=4), InvalidIndex, "'model' has 3 of 4"),
        (["a.safetensors.index.json", "b.safetensors.index.json"], InvalidIndex, "several indexes"),
    ],
)
def test_folders_without_a_loadable_model_are_refused(keys: list[str], kind: type[CheckpointError], said: str) -> None:
    with pytest.raises(kind) as caught:
        choose_layout(keys, where="twin://x")
    assert said in str(caught.value)
    assert "twin://x" in str(caught.value)


@given(st.lists(st.text(min_size=1, max_size=20)))
def test_any_names_give_a_layout_or_an_error(keys: list[str]) -> None:
    try:
        layout = choose_layout(keys, where="x")
    except CheckpointError:
        return
    assert layout.index_key in keys or set(layout.shard_keys) <= set(keys)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"a": "../m.safetensors"}}, "hostile path '../m.safetensors'"),
        ({"weight_map": {"a": "/m.safetensors"}}, "hostile path"),
        ({"weight_map": {"a": "x\\..\\m.safetensors"}}, "hostile path"),
        ({"weight_map": {"a": "m.bin"}}, "'m.bin' is a pickle file"),
        ({"weight_map": {"a": "config.json"}}, "not a safetensors file"),
        ({"weight_map": {"a": 3}}, "file is not a string: 3"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ([], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_hostile_indexes_are_refused(index: Any, said: str) -> None:
    with pytest.raises(InvalidIndex) as caught:
        parse_weight_map(json.dumps(index).encode())
    assert said in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000])
def test_broken_indexes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidIndex):
        parse_weight_map(data)


def test_duplicate_names_and_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b'{"weight_map": {"a": "m.safetensors", "a": "n.safetensors"}}'
    with pytest.raises(InvalidIndex, match="duplicate name 'a'"):
        parse_weight_map(data)
    monkeypatch.setattr(checkpoint_files, "MAX_INDEX_BYTES", 10)
    with pytest.raises(InvalidIndex, match="at most 10"):
        parse_weight_map(data)


@given(st.binary(max_size=100))
def test_any_bytes_are_an_error_not_a_crash(data: bytes) -> None:
    with pytest.raises(InvalidIndex):
        parse_weight_map(data)


def header(*tensors: TensorSpec) -> Header:
    data = safetensors_bytes(tensors)
    return parse_header(data, len(data))


A, B, C = ("a", "U8", (4,)), ("b", "U8", (8,)), ("c", "U8", (0,))
KEYS = ("1.safetensors", "2.safetensors")


def test_the_index_picks_one_of_two_copies() -> None:
    headers = {KEYS[0]: header(A, B), KEYS[1]: header(A, C)}
    tensors = assign_tensors(KEYS, headers, {"a": KEYS[1], "b": KEYS[0], "c": KEYS[1]})
    assert [(t.name, t.shard) for t in tensors] == [("b", 0), ("a", 1), ("c", 1)]


def test_two_copies_without_an_index_are_an_error() -> None:
    with pytest.raises(InvalidIndex, match=r"tensor 'a' is in '1.safetensors' and in '2.safetensors'"):
        assign_tensors(KEYS, {KEYS[0]: header(A), KEYS[1]: header(A)}, None)


def test_missing_and_extra_tensors_are_all_listed() -> None:
    headers = {KEYS[0]: header(A, B), KEYS[1]: header(C)}
    with pytest.raises(InvalidIndex) as caught:
        assign_tensors(KEYS, headers, {"a": KEYS[1], "c": KEYS[1], "d": KEYS[0]})
    said = str(caught.value)
    assert "tensor 'b' of '1.safetensors' is not in the index" in said
    assert "tensor 'a' is not in '2.safetensors', although the index says so" in said
    assert "tensor 'd' is not in '1.safetensors'" in said
    assert caught.value.details["problems"] == 3
