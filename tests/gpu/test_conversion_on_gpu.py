"""Casts and quantization on a real GPU give the bytes that they give on a CPU. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from actors.devices.cuda_device import CudaDevice
from actors.rank.executor import RankLoader
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.precision.recipes import SCHEMES, Precision
from cluster.telemetry.report import RankReport
from storage.checkpoints.checkpoint import open_model
from storage.stores.object_store import MemoryStore
from tests.support.local_node import Rank, local_node, run_all
from tests.support.planned_models import llama_shapes
from tests.support.reference_slices import as_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


@pytest.mark.parametrize(
    "precision", [Precision("float16"), *(Precision("auto", scheme) for scheme in sorted(SCHEMES))]
)
def test_a_gpu_converts_as_a_cpu_does(shm_dir: Path, precision: Precision) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = llama_shapes(3, 256, 512, 4, 2, 60)
    weights = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    objects = {"model.safetensors": save(weights)}
    store = MemoryStore(objects)
    plan = build_load_plan(open_model(store, chunk_bytes=40_009), Layout(), None, None, precision)
    with local_node(shm_dir, slots=8) as node:
        (on_cpu,), _ = node.load(plan, store)
        before_bytes = torch.cuda.memory_allocated()
        load_id, device = node.begin(plan), CudaDevice(0)
        loader = RankLoader(node.agent, node.job(plan, load_id, 0), device, store=store)
        on_gpu = Rank(loader, device)  # type: ignore[arg-type]
        run_all([on_gpu])
        assert isinstance(on_gpu.outcome, RankReport), on_gpu.outcome
        expected = on_cpu.device.tensors(plan.ranks[0].slices)
        found = device.tensors(plan.ranks[0].slices)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(as_bytes(found[name].cpu()), as_bytes(tensor)), name
        assert on_gpu.outcome.device_bytes == device.held_bytes == plan.ranks[0].device_bytes
        # Nothing that was staged is left; torch rounds each block up.
        more_bytes = torch.cuda.memory_allocated() - before_bytes - plan.ranks[0].device_bytes
        assert 0 <= more_bytes <= 512 * len(plan.ranks[0].segment_bytes)
        del found
        device.free()
