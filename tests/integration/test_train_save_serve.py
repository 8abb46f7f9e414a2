"""The walk of docs/save.md: two steps of FSDP2, a save, a load with tensor parallelism, and generation in vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import cluster
from tests.support.engines import REPOSITORY, python_of, variables_of
from tests.support.free_ports import free_ports
from tests.support.ray_clusters import Longshore

pytestmark = pytest.mark.slow
PROMPT = (1, 5, 7, 9)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the example saves from two ranks."""
    folder = tmp_path_factory.mktemp("run") / "model"
    (port,) = free_ports(1)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    done = subprocess.run(
        [*ranks, REPOSITORY / "examples/train_save_serve.py", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (.*)$", done.stdout, re.MULTILINE)]
    assert losses[1] < losses[0]
    assert "saved revision" in done.stdout
    return folder


@pytest.mark.cluster_settings(slot_bytes=4 << 20)  # the save makes chunks of up to 8 MiB, and this model has one of 3.2
def test_two_tensor_parallel_ranks_load_what_was_trained(longshore: Longshore, trained: Path) -> None:
    (file,) = trained.glob("model-*.safetensors")
    expected = load_file(file)
    with cluster.load(str(trained), tensor_parallel_size=2, device="cpu", address=longshore.address) as model:
        shards = [model.state_dict(rank) for rank in model.ranks]
    for name, cut in (("model.layers.1.self_attn.q_proj.weight", 0), ("model.layers.0.mlp.down_proj.weight", 1)):
        assert torch.cat([shard[name] for shard in shards], cut).equal(expected[name])
    assert all(shard["model.norm.weight"].equal(expected["model.norm.weight"]) for shard in shards)


@pytest.mark.long
def test_vllm_writes_the_tokens_that_transformers_does(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    python = python_of("vllm")
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, min_new_tokens=8, do_sample=False, eos_token_id=None)
    options = {"enforce_eager": True, "max_model_len": 64, "dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
    prompt = ["--tokens", *map(str, PROMPT), "--count", "8", "--options", json.dumps(options)]
    done = subprocess.run(
        [python, REPOSITORY / "examples/vllm_generate.py", str(trained), *prompt],
        env={**os.environ, **variables_of(tmp_path), "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = re.search(r"^written: (.*)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout[-3000:]
    assert [int(token) for token in found[1].split()] == ids[0, len(PROMPT) :].tolist()
