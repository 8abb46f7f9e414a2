"""A transformers model runs by Accelerate's hooks with its map spread over a GPU, host memory and disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.devices.mapped_device import open_mapped
from actors.shard import RankShard
from cluster.fit.options import parse_device_map
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import parse_model_config
from cluster.planning.make_plan import build_load_plan
from cluster.planning.read_items import expand_read_items
from storage.checkpoints.checkpoint import open_model
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import read_objects
from tests.support.hf_models import save_tiny

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


SPREAD = {"model.embed_tokens": 0, "model.norm": 0, "lm_head": 0} | {
    f"model.layers.{number}": device for number, device in enumerate((0, "cpu", "disk", 0))
}
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
)


@pytest.mark.parametrize("main", ["cpu", pytest.param("cuda:0", marks=ON_GPU)])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_the_whole_model(tmp_path: Path, tied: bool, main: str) -> None:
    checkpoint, folder = save_tiny("llama", tmp_path / "llama", tie_word_embeddings=tied), tmp_path / "offload"
    objects = read_objects(checkpoint)
    index = open_model(MemoryStore(dict(objects)), chunk_bytes=8192)
    weights = sum(tensor.size_bytes for tensor in index.tensors)
    if main == "cpu":
        options = parse_device_map("sequential", {"cpu": weights * 2 // 3}, folder, Layout(), "cpu")
    else:
        options = parse_device_map(SPREAD, None, folder, Layout(), "cuda")
    config = parse_model_config(objects["config.json"])
    plan = build_load_plan(index, Layout(), config=config, device_map=options)
    rank = plan.ranks[0]
    device = open_mapped(rank, str(folder), "load 0")
    items = expand_read_items(rank.sources, plan.chunks)
    device.allocate(rank.segment_bytes)
    for chunk in rank.chunk_ids.tolist():
        where = plan.chunks.byte_range(chunk)
        data = objects[plan.shards[int(plan.chunks.shard[chunk])].key][where.start : where.end]
        device.place(memoryview(bytearray(data)), items, items.for_chunk(chunk))
        device.synchronize()
    device.finish()
    shard = RankShard(rank, device)
    assert shard.device_map is not None
    assert set(shard.device_map.values()) == ({"cpu", "disk"} if main == "cpu" else {0, "cpu", "disk"})
    assert shard.device == main

    whole = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval().to(main)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(whole.config).to(whole.dtype)
    shard.into(model)
    model.tie_weights()
    # Rotary tables are in no checkpoint, so they are not in the map.
    model = accelerate.dispatch_model(
        model.eval(), {**shard.device_map, "model.rotary_emb": main}, main_device=main, offload_dir=str(folder)
    )
    on_meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    # Accelerate moves offloaded tensors away until they run, also from the CPU when that is not the main device.
    offloaded = ("disk",) if main == "cpu" else ("cpu", "disk")
    assert on_meta == {piece.name for piece in rank.slices if rank.segment_devices[piece.segment] in offloaded}
    tokens = torch.arange(12, device=main).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, whole(tokens).logits)
    device.free()
