"""A model larger than the memory that a cluster has left: refused with "strict", smaller with "auto"."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import cluster
from cluster.errors import ConfigError, DoesNotFit
from cluster.fit.needs import WORKER_BYTES
from cluster.model import LoadedModel
from storage.checkpoints.safetensors_header import encode_header, tensor_bytes
from storage.host.memory import available_host_bytes
from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.counting_proxy import CountingProxy
from tests.support.planned_models import llama_shapes
from tests.support.ray_clusters import Longshore, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAME = "wide"
HEADER_BYTES = 1 << 20  # the header is in there, and little else
SCREEN_CHARS = 24 * 80
TRIES = 8


@pytest.fixture(scope="module")
def wide(s3_server: EmbeddedS3) -> Iterator[int]:
    """A Llama of zeros, 1.5 GB that take no room on disk; its bytes.

    Ray starts and ends processes of some 0.1 GB as it likes: that must not decide what fits.
    """
    folder = Path(s3_server.folder, "models", NAME)
    folder.mkdir()
    tensors = [(name, "BF16", shape) for name, shape in llama_shapes(12, 2048, 8192, 16, 8, 256).items()]
    header = encode_header(tensors)
    size_bytes = sum(tensor_bytes(dtype, shape) for _, dtype, shape in tensors)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header)
        os.truncate(file.fileno(), len(header) + size_bytes)
    s3_server.refresh()
    yield size_bytes
    shutil.rmtree(folder)
    s3_server.refresh()


def _held(shard: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in shard.values():
        dtype = str(tensor.dtype).removeprefix("torch.")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.numel() * tensor.element_size()
    return sizes


def _all_but(room_bytes: int) -> int:
    """Return the reserve that leaves a load this much room beside its process, if others hold still."""
    return available_host_bytes() - WORKER_BYTES - room_bytes


def _release(longshore: Longshore, model: LoadedModel) -> None:
    """Release the model and wait for its memory: Ray forgets an actor before its process has ended."""
    pids = longshore.worker_pids().values()
    model.release()
    eventually(lambda: not any(map(psutil.pid_exists, pids)), "workers live on")


def _smaller(longshore: Longshore, load: Callable[[int], LoadedModel], whole_bytes: int) -> tuple[LoadedModel, int]:
    """A load with room for two thirds, and what it was to leave.

    Again when others took or freed so much meanwhile that it was another case.
    """
    for _ in range(TRIES):
        with contextlib.suppress(DoesNotFit):
            left = _all_but(whole_bytes * 2 // 3)
            model = load(left)
            if model.report.taken:
                return model, left
            _release(longshore, model)
    raise AssertionError(f"the memory of this machine did not keep still for {TRIES} loads")


def test_refused_with_strict_and_smaller_with_auto(longshore: Longshore, wide: int, s3_server: EmbeddedS3) -> None:
    with CountingProxy(s3_server.endpoint_url) as proxy:
        options: dict[str, Any] = {
            "endpoint_url": proxy.endpoint_url,
            "region": "us-east-1",
            "credentials": s3_server.credentials(),
            "device": "cpu",
        }
        uri = f"s3://models/{NAME}"
        with pytest.raises(DoesNotFit):  # brings the agents up: their arenas are taken from here on
            cluster.load(uri, reserve_bytes=1 << 50, **options)
        proxy.clear()
        with pytest.raises(DoesNotFit) as refused:
            cluster.load(uri, reserve_bytes=_all_but(wide // 5), **options)
        said = str(refused.value)
        assert len(said) < SCREEN_CHARS
        assert "of host memory" in said
        assert refused.value.hint
        asked = [request.range for request in proxy.requests() if request.path.endswith(".safetensors")]
        assert asked
        assert all(each is not None and each[1] <= HEADER_BYTES for each in asked)  # also for what was offered
        longshore.assert_nothing_left()
        assert all(not node.used_bytes for node in longshore.status().nodes)
        model, left = _smaller(
            longshore, lambda left: cluster.load(uri, fit="auto", reserve_bytes=left, **options), wide
        )
        with model:
            report = model.report
            assert report.taken.startswith("quantization=")
            assert report.precision.quantization in report.taken
            assert [each.why_not == "" for each in report.fit] == [False] * (len(report.fit) - 1) + [True]
            assert "needs" in report.fit[0].why_not
            assert report.as_dict()["taken"] == report.taken
            (held,) = model.call(_held)
            assert sum(held.values()) == report.placed_bytes < wide * 2 // 3
            assert held["bfloat16"] < wide // 20
            with cluster.load(uri, fit="auto", reserve_bytes=left, **options) as again:
                assert (again.model_id, again.report.taken) == (model.model_id, report.taken)
            assert [(m.progress.model_id, m.taken) for m in longshore.models()] == [(model.model_id, report.taken)]
            del options["device"]
            seen = cluster.plan(uri, address=longshore.address, **options).fit
            assert seen is not None
            assert seen.fits is None  # the GPUs that the nodes claim to have are none
    longshore.assert_nothing_left()


def test_gpu_memory_utilization_is_refused_for_cpu_ranks(longshore: Longshore, wide: int) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization is about GPUs"):
        cluster.load(f"s3://models/{NAME}", device="cpu", gpu_memory_utilization=0.9)
