"""Checkpoints of Megatron-Core as a source: real ones, whose models answer like those of Hugging Face."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import cluster
from cluster.converting.megatron import read, recognise
from cluster.converting.megatron_names import Shape, to_hugging_face
from cluster.converting.source import Source, SourceTensor, StoredPiece
from cluster.errors import ConvertError, UnsafePickle
from storage.problems import Problems
from storage.stores.local import LocalStore
from tests.support.trainer_checkpoints import assemble

MODELS = (
    *("llama", "llama-by-layer", "qwen2", "qwen3", "qwen3-moe", "qwen3-moe-singleton", "qwen2-moe"),
    *("llama-pipeline", "qwen3-pipeline", "qwen3-moe-experts", "qwen2-moe-experts"),
)
ITERATION = "iter_0000007"


def source(folder: Path) -> Source:
    store = LocalStore(folder)
    listing = {info.key: info for info in store.list()}
    assert recognise(listing)
    return read(store, listing)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_hugging_face(megatron_checkpoints: Path, name: str) -> None:
    folder = megatron_checkpoints / name
    found = source(folder / "megatron")
    with safe_open(folder / "hf" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {tensor.name for tensor in found.tensors} == names
        for tensor in found.tensors:
            wanted = file.get_tensor(tensor.name).bfloat16()
            assert tensor.shape == tuple(wanted.shape)
            bits = wanted.view(__import__("torch").int16).numpy().view(np.uint16)
            assert np.array_equal(assemble(folder / "megatron", tensor), bits), tensor.name
    assert found.extra_files == {"config.json": "config.json"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_published_model_answers_like_the_trained_one(megatron_checkpoints: Path, tmp_path: Path, name: str) -> None:
    import torch
    import transformers

    report = cluster.convert(megatron_checkpoints / name / "megatron", tmp_path / "out")
    assert report.format == "Megatron-Core torch_dist"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32").eval()
    with torch.no_grad():
        found = model(torch.tensor([[3, 1, 4, 1, 5, 92, 65, 35]])).logits  # TOKENS of the script
    torch.testing.assert_close(found, torch.load(megatron_checkpoints / name / "logits.pt"))


def edit(key: str, **fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / key
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / ITERATION / "__1_0.distcp").unlink(), ["__1_0.distcp", "is missing"]),
        (lambda folder: (folder / "config.json").unlink(), ["no config.json"]),
        (edit("config.json", num_hidden_layers=4), ["4 layers"]),
        (edit("config.json", vocab_size=129), ["128 rows", "vocab_size 129"]),
        (edit("config.json", num_attention_heads=8), ["8 heads of 8 in 2 groups make 96 rows"]),
        (edit("config.json", model_type="gemma3"), ["'gemma3'", "qwen3_moe"]),
        (edit(f"{ITERATION}/metadata.json", sharded_backend="zarr"), ["'zarr'", "--ckpt-format torch_dist"]),
    ],
)
def test_what_does_not_fit_is_named(
    megatron_checkpoints: Path, tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    shutil.copytree(megatron_checkpoints / "llama" / "megatron", tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(ConvertError) as raised:
        source(tmp_path / "copy")
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.slow
def test_norms_that_are_stored_less_one_are_refused(megatron_checkpoints: Path, tmp_path: Path) -> None:
    import torch

    shutil.copytree(megatron_checkpoints / "llama" / "megatron", tmp_path / "copy")
    common = tmp_path / "copy" / ITERATION / "common.pt"
    torch.save({"args": Namespace(apply_layernorm_1p=False, params_dtype=torch.bfloat16)}, common)
    assert source(tmp_path / "copy").tensors
    torch.save({"args": Namespace(apply_layernorm_1p=True)}, common)
    with pytest.raises(ConvertError, match="apply_layernorm_1p"):
        source(tmp_path / "copy")
    torch.save({"args": Namespace(run=print)}, common)
    with pytest.raises(UnsafePickle, match="without the file"):
        source(tmp_path / "copy")


@pytest.mark.slow
def test_all_cut_files_are_named(megatron_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(megatron_checkpoints / "llama" / "megatron", tmp_path / "copy")
    names = ("__0_0.distcp", "__1_0.distcp", "common.pt")
    for name in names:
        file = tmp_path / "copy" / ITERATION / name
        file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConvertError, match=r"__0_0\.distcp.*ends beyond") as raised:
        source(tmp_path / "copy")
    assert all(name in str(raised.value) for name in names), raised.value


@pytest.mark.slow
def test_newest_iteration_is_the_one_that_the_pointer_names(megatron_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(megatron_checkpoints / "llama" / "megatron", tmp_path / "copy")
    shutil.copytree(tmp_path / "copy" / ITERATION, tmp_path / "copy" / "iter_0000012")
    assert _folder(source(tmp_path / "copy")) == ITERATION
    (tmp_path / "copy" / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert _folder(source(tmp_path / "copy")) == "iter_0000012"
    (tmp_path / "copy" / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(ConvertError, match="several iterations"):
        source(tmp_path / "copy")


def _folder(found: Source) -> str:
    (folder,) = {piece.file.split("/")[0] for tensor in found.tensors for piece in tensor.pieces}
    return folder


@pytest.mark.slow
def test_hostile_metadata_is_refused(megatron_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(megatron_checkpoints / "llama" / "megatron", tmp_path / "copy")
    (tmp_path / "copy" / ITERATION / ".metadata").write_bytes(b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        source(tmp_path / "copy")


def tensor(name: str, *shape: int) -> SourceTensor:
    return SourceTensor(name, "BF16", shape, (StoredPiece(name, 0, (0,) * len(shape), shape),))


@pytest.mark.parametrize("stacked", [True, False])
def test_norms_inside_of_transformer_engines_layers_are_read(stacked: bool) -> None:
    """Its layers have the norm before them: `TELayerNormColumnParallelLinear`, which needs a GPU."""
    prefix, layers = ("decoder.layers.", (1,)) if stacked else ("decoder.layers.0.", ())
    listed = [
        tensor("embedding.word_embeddings.weight", 6, 4),
        tensor(f"{prefix}self_attention.linear_qkv.layer_norm_weight", *layers, 4),
        tensor(f"{prefix}self_attention.linear_qkv.weight", *layers, 8, 4),
        tensor(f"{prefix}self_attention.linear_proj.weight", *layers, 4, 4),
        tensor(f"{prefix}mlp.linear_fc1.layer_norm_weight", *layers, 4),
        tensor(f"{prefix}mlp.linear_fc1.weight", *layers, 6, 4),
        tensor(f"{prefix}mlp.linear_fc2.weight", *layers, 4, 3),
        tensor("decoder.final_layernorm.weight", 4),
    ]
    problems = Problems()
    shape = Shape(layers=1, heads=2, groups=1, head_rows=2, vocabulary=6, tied=True)
    found = {one.name: one for one in to_hugging_face(listed, shape, problems)}
    assert not problems, problems
    for theirs, ours in (("self_attention.linear_qkv", "input"), ("mlp.linear_fc1", "post_attention")):
        norm = found[f"model.layers.0.{ours}_layernorm.weight"]
        assert norm.shape == (4,)
        assert {piece.file for piece in norm.pieces} == {f"{prefix}{theirs}.layer_norm_weight"}


def test_problems_of_names_are_collected() -> None:
    problems = Problems()
    listed = [
        tensor("embedding.word_embeddings.weight", 8, 4),
        tensor("decoder.layers.self_attention.linear_qkv.weight", 1, 7, 4),
        tensor("decoder.layers.mlp.linear_fc1.weight", 1, 5, 4),
        tensor("decoder.layers.mlp.secret.weight", 1, 5, 4),
        tensor("decoder.layers.5.mlp.linear_fc2.weight", 4, 4),
        tensor("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", 1, 5, 4),
        tensor("decoder.final_layernorm._extra_state/shard_0_1", 1),
    ]
    to_hugging_face(listed, Shape(layers=1, heads=2, groups=1, head_rows=2, vocabulary=6), problems)
    text = str(problems)
    for words in (
        "2 heads of 2 in 1 groups make 8 rows",
        "5 rows",
        "secret",
        "layer beyond",
        "lm_head.weight' is miss",
    ):
        assert words in text
    assert "optimizer" not in text
    assert "extra_state" not in text
