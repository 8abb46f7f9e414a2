"""A device map over real GPUs, host memory and disk. Skipped where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.devices.mapped_device import open_mapped_rank
from actors.handover.modules import fill_module
from actors.rank.executor import RankLoader
from actors.shard import RankShard
from cluster.errors import ModuleMismatch
from cluster.fit.needs import min_slots
from cluster.fit.options import parse_device_map
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.telemetry.report import RankReport
from storage.checkpoints.checkpoint import open_model
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import read_objects, write_tiny_llama
from tests.support.local_node import Rank, local_node, run_all, with_digests
from tests.support.reference_slices import as_bytes, stored_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def test_each_tensor_is_on_its_device(shm_dir: Path, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "llama", shards=2)
    objects = read_objects(tmp_path / "llama")
    last = torch.cuda.device_count() - 1  # 0 where there is one
    spread = {"model": 0, "model.layers.0": last, "model.norm": "cpu", "lm_head": "disk"}
    options = parse_device_map(spread, None, tmp_path / "offload", Layout(), "cuda")
    index = with_digests(open_model(MemoryStore(dict(objects)), chunk_bytes=8192), objects)
    plan = build_load_plan(index, Layout(), device_map=options)
    opened: list[Any] = []
    with local_node(shm_dir, slots=min_slots(1) + 2) as node:
        job = replace(node.job(plan, node.begin(plan), 0), offload_folder=str(tmp_path / "offload"))

        def open_it(rank_plan: Any) -> Any:
            opened.append(open_mapped_rank(rank_plan, job))
            return opened[0]

        rank = Rank(RankLoader(node.agent, job, open_it, store=MemoryStore(objects)), opened[0])
        run_all([rank])
        assert isinstance(rank.outcome, RankReport), rank.outcome
        shard = RankShard(plan.ranks[0], opened[0])
        for name, (_, _, data) in stored_bytes(tmp_path / "llama").items():
            assert as_bytes(shard[name].cpu()).numpy().tobytes() == data
        assert shard.device == "cuda:0"
        assert str(shard["model.layers.0.self_attn.q_proj.weight"].device) == f"cuda:{last}"
        assert str(shard["model.embed_tokens.weight"].device) == "cuda:0"
        assert {str(shard[name].device) for name in ("model.norm.weight", "lm_head.weight")} == {"cpu"}
        opened[0].free()


@pytest.mark.parametrize("equal", [True, False])
def test_tied_names_on_two_devices(equal: bool) -> None:
    weight = torch.randn(10, 4)
    tensors = {"embed.weight": weight.cuda(), "head.weight": weight.clone() if equal else weight + 1}
    module = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(10, 4, device="meta"),
            "head": torch.nn.Linear(4, 10, bias=False, device="meta"),
        }
    )
    module["head"].weight = module["embed"].weight
    if not equal:
        with pytest.raises(ModuleMismatch, match="1 tied names hold different values"):
            fill_module(module, tensors, {}, device="cuda:0")
        return
    fill_module(module, tensors, {}, device="cuda:0")
    assert module["head"].weight is module["embed"].weight
    assert module["head"].weight.data_ptr() == tensors["embed.weight"].data_ptr()
