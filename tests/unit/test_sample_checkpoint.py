"""The sample Llama: what transformers would save, the same every time, finite everywhere."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize, safe_open

from cluster.command_line.demo import llama_tensors, write_llama_checkpoint
from storage.checkpoints.checkpoint import open_model
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import read_objects, write_tiny_llama

SHAPE = {"hidden": 64, "layers": 2, "intermediate": 96, "heads": 4, "kv_heads": 2, "vocab": 128}


def values(folder: Path) -> dict[str, bytes]:
    return {
        name: bytes(tensor["data"])
        for path in folder.glob("*.safetensors")
        for name, tensor in deserialize(path.read_bytes())
    }


@pytest.mark.parametrize("shards", [1, 2, 4, 21])
def test_the_reference_reads_every_shard(tmp_path: Path, shards: int) -> None:
    write_llama_checkpoint(tmp_path, **SHAPE, shards=shards, seed=1)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == shards
    found = {}
    for path in files:
        with safe_open(path, "numpy") as file:
            for name in list(file.keys()):
                piece = file.get_slice(name)
                found[name] = (piece.get_dtype(), tuple(piece.get_shape()))
    assert found == {name: (dtype, shape) for name, dtype, shape in llama_tensors(**SHAPE)}


def test_values_do_not_depend_on_the_shards_but_on_the_seed(tmp_path: Path) -> None:
    for name, shards, seed in (("a", 1, 5), ("b", 4, 5), ("c", 1, 6)):
        write_llama_checkpoint(tmp_path / name, **SHAPE, shards=shards, seed=seed)
    a, b, c = (values(tmp_path / name) for name in "abc")
    assert a == b
    assert a.keys() == c.keys()
    assert all(a[name] != c[name] for name in a)
    assert len(set(a.values())) == len(a)


def test_every_value_is_finite_and_small(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    for data in values(tmp_path).values():
        numbers = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        assert np.isfinite(numbers).all()
        assert (abs(numbers) >= 2**-7).all()
        assert (abs(numbers) < 2**-3).all()


def test_index_and_config_fit_the_shards(tmp_path: Path) -> None:
    write_llama_checkpoint(tmp_path, **SHAPE, shards=3, seed=1, tie_word_embeddings=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    config = json.loads((tmp_path / "config.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    assert config["tie_word_embeddings"] is True
    model = open_model(MemoryStore(read_objects(tmp_path)))
    assert model.size_bytes == index["metadata"]["total_size"]
    assert {t.name: model.shards[t.shard].key for t in model.tensors} == index["weight_map"]


def test_shards_are_of_about_the_same_size(tmp_path: Path) -> None:
    write_llama_checkpoint(tmp_path, **{**SHAPE, "layers": 16}, shards=4, seed=1)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize("wrong", [{"heads": 5}, {"kv_heads": 3}, {"shards": 0}, {"shards": 1000}])
def test_impossible_shapes_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"heads|shards"):
        write_llama_checkpoint(tmp_path, **{**SHAPE, "shards": 1, "seed": 0, **wrong})
