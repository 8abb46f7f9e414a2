"""Whole models on a real GPU: workers of Ray, readers, and models of transformers. Skipped where there is none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cluster
from cluster import client
from cluster.config import Config
from storage.errors import LongshoreError
from tests.support.changed_models import changed_copy
from tests.support.checkpoints import write_tiny_llama
from tests.support.hf_models import FAMILIES, SHARD_BYTES, make_tiny
from tests.support.ray_clusters import ENVIRONMENT, TEST_SETTINGS, environment, new_ray_cluster, variables
from tests.support.reference_slices import TINY_KV_HEADS, as_bytes, assert_same, shard_differs, stored_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

SETTINGS = Config(arena_bytes=24 << 20, slot_bytes=1 << 20, chunk_bytes=1 << 20, window_bytes=8 << 20)


@pytest.fixture(scope="module")
def gpu_cluster() -> Iterator[str]:
    """The address of a Ray cluster of one node with the GPUs of this machine."""
    import ray

    with (
        tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        environment({**ENVIRONMENT, "XDG_RUNTIME_DIR": folder}),
        new_ray_cluster(
            num_cpus=8,
            num_gpus=torch.cuda.device_count(),
            object_store_memory=80_000_000,
            env_vars=variables(TEST_SETTINGS),
            temp_dir=folder,
        ) as there,
    ):
        ray.init(address=there.address, log_to_driver=False, configure_logging=False)
        try:
            yield there.address
            client.shutdown(there.address)
        finally:
            ray.shutdown()


def product(shard: Any) -> tuple[str, float]:
    """The device of a rank, and a number computed there from its tensors."""
    weight = shard["model.norm.weight"].float()
    return str(weight.device), float((weight * 2).sum())


def addresses(shard: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in shard.values()]


def held_bytes(_: Any) -> int:
    return int(torch.cuda.memory_allocated())


@pytest.mark.parametrize("precision", [{}, {"dtype": "float16"}, {"quantization": "fp8"}])
def test_a_load_into_workers_with_gpus(gpu_cluster: str, tmp_path: Path, precision: dict[str, Any]) -> None:
    write_tiny_llama(tmp_path)
    for _ in range(2):  # the second from the arena, which another process registers
        with cluster.load(str(tmp_path), device="cuda", address=gpu_cluster, **precision) as model:
            (rank,) = model.report.ranks
            assert model.report.verified
            ((device, total),) = model.call(product)
            assert device == "cuda:0"
            assert total == pytest.approx(float(2 * model.state_dict(0)["model.norm.weight"].float().sum()))
            assert model.call(held_bytes) == [pytest.approx(rank.device_bytes, abs=1 << 20)]
            if not precision:
                assert model.call(shard_differs, str(tmp_path), 1, 1, TINY_KV_HEADS) == [[]]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_model_on_a_gpu_is_updated_in_place(gpu_cluster: str, tmp_path: Path, streaming: bool) -> None:
    old = tmp_path / "old"
    write_tiny_llama(old)
    new = changed_copy(old, tmp_path / "new")
    for folder in (old, new):
        cluster.publish(folder, chunk_bytes=1 << 20)
    with cluster.load(str(old), device="cuda", address=gpu_cluster) as model:
        before = model.call(addresses)
        report = model.update(str(new), streaming=streaming)
        assert report.ranks == ("exchanged",)
        assert report.changed_tensors
        assert model.call(addresses) == before
        assert model.call(shard_differs, str(new), 1, 1, TINY_KV_HEADS) == [[]]


def test_a_worker_that_dies_gives_its_gpu_back(gpu_cluster: str, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    with cluster.load(str(tmp_path), device="auto", address=gpu_cluster) as model, pytest.raises(LongshoreError):
        model.call(lambda _: os._exit(1))
    with cluster.load(str(tmp_path), device="auto", address=gpu_cluster) as model:
        assert model.call(shard_differs, str(tmp_path), 1, 1, TINY_KV_HEADS) == [[]]


def test_more_gpus_than_there_are(gpu_cluster: str, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    many = 4 * torch.cuda.device_count()
    with pytest.raises(cluster.NotEnoughResources, match="GPU"):
        cluster.load(str(tmp_path), device="cuda", data_parallel_size=many, address=gpu_cluster)


def test_tensors_of_an_open_model(process_host: None, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "llama")
    with cluster.safe_open(tmp_path / "llama", device="cuda", config=SETTINGS) as opened:
        for name, (_, _, data) in stored_bytes(tmp_path / "llama").items():
            tensor = opened.get_tensor(name)
            assert tensor.device.type == "cuda"
            assert as_bytes(tensor).numpy().tobytes() == data
        rows = opened.get_slice("model.embed_tokens.weight")[3:9]
        assert torch.equal(rows, opened.get_tensor("model.embed_tokens.weight")[3:9])


def test_lazy_tensors_are_copied_to_parameters(process_host: None, tmp_path: Path) -> None:
    """As engines copy: whole, a part of the rows or of the columns, with another dtype, into a part of a parameter."""
    write_tiny_llama(tmp_path / "llama")
    copies = 0
    with cluster.safe_open(tmp_path / "llama", config=SETTINGS) as opened:
        for name, lazy in opened.lazy_tensors():
            plain = opened.get_tensor(name)
            parts: list[tuple[torch.Tensor, torch.Tensor]] = [(lazy, plain)]
            for dim in range(plain.dim()):
                half = plain.shape[dim] // 2
                parts.append(
                    (lazy.narrow(dim, half, plain.shape[dim] - half), plain.narrow(dim, half, plain.shape[dim] - half))
                )
            for part, expected in parts:
                for dtype in (plain.dtype, torch.float32):
                    wide = torch.zeros((2 * expected.shape[0], *expected.shape[1:]), dtype=dtype, device="cuda")
                    target = wide[expected.shape[0] :]
                    assert target.copy_(part) is target
                    assert torch.equal(target.cpu(), expected.to(dtype)), name
                    assert not wide[: expected.shape[0]].any()
                    copies += 1
            assert torch.equal(lazy.to("cuda").cpu(), plain)
            assert torch.equal(lazy.cuda(non_blocking=True).cpu(), plain)
    assert copies > 50


@pytest.mark.parametrize(
    "options", [{"device_map": "cuda"}, {"device_map": "auto"}, {"dtype": "float16", "device_map": 0}]
)
def test_models_of_transformers(process_host: None, tmp_path: Path, options: dict[str, Any]) -> None:
    import transformers

    from engines.transformers import from_pretrained

    folder = tmp_path / "model"
    make_tiny("llama").save_pretrained(folder, max_shard_size=SHARD_BYTES)
    ours = from_pretrained(folder, settings=SETTINGS, **options)
    theirs = getattr(transformers, FAMILIES["llama"].model_class).from_pretrained(folder, **options)
    assert {parameter.device.type for parameter in ours.parameters()} == {"cuda"}
    assert_same(ours.state_dict(), theirs.state_dict())
    ids = torch.arange(9, device="cuda")[None]
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
