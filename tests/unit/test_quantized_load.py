"""A GPTQ checkpoint from its files to the memory of two ranks: config.json is read, chunks go through an arena."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from cluster.layouts.layout import decide_layout
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import parse_model_config
from cluster.layouts.rules import region_of, rules_for
from storage.checkpoints.model_index import Tensor
from storage.stores.object_store import MemoryStore
from tests.support.local_node import local_node, plan_of
from tests.support.planned_models import llama_shapes
from tests.support.quantized_models import Grouped, Stored, named, take_region

KIND = Grouped(4, 16, desc_act=True)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False},
}
TYPES = {"qweight": np.int32, "qzeros": np.int32, "scales": np.float16, "g_idx": np.int32}


def test_a_load_by_two_ranks(shm_dir: Path) -> None:
    stored: Stored = {}
    weights = {}
    for number, (name, shape) in enumerate(llama_shapes(2, 64, 96, 4, 2, 32).items()):
        if name.endswith("_proj.weight"):
            parts = KIND.gptq(shape[0], shape[1], seed=number)
            stored |= named(parts, name.removesuffix("weight"))
            weights[name] = KIND.gptq_weight({end: array for end, (_, array) in parts.items()})
        else:
            stored[name] = ("F16", np.full(shape, number, np.float16))
    data = save({name: array for name, (_, array) in stored.items()})
    objects = {"model.safetensors": data, "config.json": json.dumps(CONFIG).encode()}
    plan = plan_of(objects, (2, 1, 1))
    with local_node(shm_dir, slots=2 * len(plan.chunks)) as node:
        ranks, _ = node.load(plan, MemoryStore(objects))
        held = [rank.tensor_bytes() for rank in ranks]
    config, layout = parse_model_config(objects["config.json"]), Layout(2)
    for name, weight in weights.items():
        plain = Tensor(name, "F32", weight.shape, 0, 0, weight.nbytes)
        (placed,) = decide_layout([plain], layout, rules_for(config), config)
        for rank, arrays in enumerate(held):
            part = {}
            for end, dtype in TYPES.items():
                shape, raw = arrays[name.removesuffix("weight") + end]
                part[end] = np.frombuffer(raw, dtype).reshape(shape)
            region = region_of(weight.shape, placed.cut, layout.rank_coords(rank), layout)
            np.testing.assert_array_equal(KIND.gptq_weight(part), take_region(weight, region), err_msg=name)
