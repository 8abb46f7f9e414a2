"""Preparing a plan from a stored model, and noticing that the stored model was replaced."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.command_line.answers import exit_code
from cluster.errors import LayoutError, PlanError
from cluster.fit.options import DeviceMapOptions
from cluster.fit.search import Change
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.options import LoadOptions
from cluster.planning.make_plan import plan_changes, plan_model, prepare_plan, still_current
from cluster.planning.packed_plan import rank_facts
from cluster.request import LoadRequest, make_request
from cluster.units import show_bytes
from storage.errors import (
    CheckpointError,
    IntegrityError,
    InvalidHeader,
    ManifestMismatch,
    NotACheckpoint,
    ObjectNotFound,
    PickleRefused,
    StoreError,
)
from storage.publishing.publish import publish
from storage.stores.local import LocalStore
from tests.support.checkpoints import odd_objects, safetensors_bytes, write_objects, write_tiny_llama
from tests.support.planned_models import as_bf16, llama_shapes, random_arrays, store_arrays

MIB = 1 << 20


def request(folder: Path, *sizes: int, **other: Any) -> LoadRequest:
    return make_request(LoadOptions(str(folder), **asdict(Layout(*sizes)), **other))


def test_a_stored_model_can_be_planned(tmp_path: Path):
    write_tiny_llama(tmp_path)
    index, plan = prepare_plan(request(tmp_path, 2, 2), chunk_bytes=MIB, read_timeout_s=5)
    assert len(plan.ranks) == 4
    assert plan.revision == index.revision
    assert sum(rank.size_bytes for rank in plan.ranks[:2]) < 2 * index.size_bytes
    assert plan.chunks.hash_name is None


def test_a_broken_config_matters_to_tensor_parallelism_only(tmp_path: Path):
    write_tiny_llama(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(PlanError):
        prepare_plan(request(tmp_path, 2), chunk_bytes=MIB, read_timeout_s=5)
    _, plan = prepare_plan(request(tmp_path, 1, 2), chunk_bytes=MIB, read_timeout_s=5)
    assert len(plan.ranks) == 2


@pytest.mark.parametrize("published", [True, False])
def test_a_truncated_shard_is_reported_in_one_line(tmp_path: Path, published: bool):
    write_tiny_llama(tmp_path, shards=1)
    if published:
        publish(LocalStore(str(tmp_path)))
    (shard,) = tmp_path.glob("*.safetensors")
    whole_bytes = shard.stat().st_size
    os.truncate(shard, 1_500_000)
    with pytest.raises(ManifestMismatch if published else InvalidHeader) as refused:
        prepare_plan(request(tmp_path), chunk_bytes=MIB, read_timeout_s=5)
    assert f"cut short: it has 1.50 MB of {show_bytes(whole_bytes)}" in refused.value.message
    assert len(refused.value.message) < 150
    assert "again" in refused.value.hint
    assert shard.name in str(refused.value)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:100], "config.json is cut short: 100 B of"),
        (lambda text: text + b" ", "published with"),
        (lambda text: text.replace(b"128", b"256"), "config.json is not the published one"),
        (None, "config.json was published and is now missing"),
    ],
)
def test_a_config_that_is_not_the_published_one_has_a_hint(tmp_path: Path, ranks: int, change: Any, said: str):
    write_tiny_llama(tmp_path)
    publish(LocalStore(str(tmp_path)))
    config = tmp_path / "config.json"
    if change is None:
        config.unlink()
    else:
        config.write_bytes(change(config.read_bytes()))
    with pytest.raises((ManifestMismatch, IntegrityError)) as refused:
        prepare_plan(request(tmp_path, ranks), chunk_bytes=MIB, read_timeout_s=5)
    assert said in refused.value.message
    assert refused.value.hint == "upload the published file again, or publish the model again"
    assert exit_code(refused.value) == 6


def test_a_device_map_needs_no_valid_config(tmp_path: Path):
    write_tiny_llama(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    wanted = request(tmp_path, device_map="sequential", max_memory={"cpu": "1GB"})
    index, plan = prepare_plan(wanted, chunk_bytes=MIB, read_timeout_s=5)
    assert plan.ranks[0].bytes_by_device["cpu"] >= index.size_bytes


def test_a_change_is_planned_as_it_would_be_loaded(tmp_path: Path):
    """A head that is the embedding stays with it, on one device."""
    shapes = llama_shapes(2, 64, 128, 4, 2, 1000)
    index = store_arrays(as_bf16(random_arrays(shapes))).index
    embedding_bytes = 1000 * 64 * 2
    limits = ((0, index.size_bytes - embedding_bytes), ("cpu", 2 * index.size_bytes))
    config = ModelConfig(tie_word_embeddings=True)
    wanted = replace(request(tmp_path), device_map=DeviceMapOptions("sequential", (), limits))
    (planned,) = plan_changes(index, config, [Change("offload", "offload", 0, wanted)])
    assert planned.ranks == rank_facts(plan_model(wanted, index, config).cut)
    assert planned.ranks != rank_facts(plan_model(wanted, index, None).cut)  # so it matters


def test_a_tensor_that_no_rule_names_is_an_error(tmp_path: Path):
    write_objects(tmp_path, odd_objects())
    with pytest.raises(LayoutError, match="30 tensors are named by no rule"):
        prepare_plan(request(tmp_path, 2), chunk_bytes=MIB, read_timeout_s=5)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, (NotACheckpoint, ObjectNotFound)),
        ({"pytorch_model.bin": b"x"}, PickleRefused),
        ({"m.safetensors": b"short"}, CheckpointError),
    ],
)
def test_places_without_a_model_are_refused(tmp_path: Path, files: dict[str, bytes], error: Any):
    write_objects(tmp_path, files)
    with pytest.raises(error):
        prepare_plan(request(tmp_path), chunk_bytes=MIB, read_timeout_s=5)


def test_a_missing_folder_is_an_error(tmp_path: Path):
    with pytest.raises((StoreError, NotACheckpoint)):
        prepare_plan(request(tmp_path / "nowhere"), chunk_bytes=MIB, read_timeout_s=5)


@pytest.mark.parametrize("published", [True, False])
def test_a_model_is_current_until_it_is_replaced(tmp_path: Path, published: bool):
    tensors = [("a", "F32", (8, 4))]
    write_objects(tmp_path, {"model.safetensors": safetensors_bytes(tensors, seed=1)})
    if published:
        publish(LocalStore(str(tmp_path)))
    wanted = request(tmp_path)
    _, plan = prepare_plan(wanted, chunk_bytes=MIB, read_timeout_s=5)
    assert (plan.chunks.hash_name is not None) == published
    assert still_current(wanted, plan.revision, 5)
    write_objects(tmp_path, {"model.safetensors": safetensors_bytes([*tensors, ("b", "F32", (2,))], seed=2)})
    if published:
        publish(LocalStore(str(tmp_path)), force=True)
    assert not still_current(wanted, plan.revision, 5)
