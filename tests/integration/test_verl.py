"""Parts of a run of verl on the CPU: its configuration, a rollout of its vLLM server, a checkpoint of its manager.

verl is in an environment on top of vLLM's (`tests/engine_environments/make.sh verl`), which the first test makes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import cluster
from tests.support.engines import REPOSITORY, SIZES, python_of, tokens_of, variables_of
from tests.support.free_ports import free_ports
from tests.support.hf_models import DENSE_SIZES, make_tiny
from tests.support.tiny_tokenizer import save_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.long]

SCRIPT = REPOSITORY / "tests/support/verl_run.py"


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("verl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, published in its folder."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    make_tiny("llama", **SIZES).save_pretrained(folder)
    save_tokenizer(folder, DENSE_SIZES["vocab_size"])
    cluster.publish(str(folder))
    return folder


def run(where: Path, *command: str | Path) -> str:
    """Run a command of verl's environment and return its output."""
    done = subprocess.run(
        command,
        env={
            **os.environ,
            **variables_of(where),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONSAFEPATH": "1",  # beside the script is an `engines.py`, and verl brings a package `tests`
        },
        cwd=where,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def overrides_of_the_page() -> list[str]:
    """Return the arguments of the command that docs/verl.md shows."""
    page = (REPOSITORY / "docs/verl.md").read_text()
    found = re.search(r"^python -m verl\.trainer\.main_ppo((?:.*\\\n)*.*)$", page, re.MULTILINE)
    assert found is not None
    return found[1].replace("\\\n", " ").split()


def test_verl_takes_the_configuration_of_the_page(python: Path, tmp_path: Path) -> None:
    overrides = overrides_of_the_page()
    assert len(overrides) > 10
    said = run(tmp_path, python, SCRIPT, "config", *overrides)
    found = re.search(r"^rollout: (.*)$", said, re.MULTILINE)
    assert found is not None, said
    assert json.loads(found[1]) == ["vllm", "longshore", 2]


def test_a_rollout_reads_through_longshore(python: Path, model: Path, tmp_path: Path) -> None:
    here = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.dtype": "float32",
        "trainer.device": "cpu",
    }
    kept = [override for override in overrides_of_the_page() if override.partition("=")[0] not in here]
    said = run(tmp_path, python, SCRIPT, "rollout", *kept, *(f"{key}={value}" for key, value in here.items()))
    assert re.search("^load format: longshore$", said, re.MULTILINE), said[-3000:]
    assert re.search("with Longshore, verified with .*: this process read", said), said[-6000:]
    found = re.search("^written: (.*)$", said, re.MULTILINE)
    assert found is not None
    assert [int(token) for token in found[1].split()] == tokens_of(model)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_checkpoint_of_its_manager_is_converted(python: Path, model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "global_step_1/actor"
    (port,) = free_ports(1)
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port))
    run(tmp_path, python, *ranks, SCRIPT, "save", model, saved)
    assert {"model_world_size_2_rank_0.pt", "optim_world_size_2_rank_1.pt"} < {path.name for path in saved.iterdir()}
    report = cluster.convert(str(saved), str(tmp_path / "converted"))
    merge = ("merge", "--backend", "fsdp", "--local_dir", saved, "--target_dir", tmp_path / "merged")
    run(tmp_path, python, "-m", "verl.model_merger", *merge)
    converted, merged = (tensors_in(tmp_path / folder) for folder in ("converted", "merged"))
    tensors = load_file(model / "model.safetensors")
    assert report.revision
    assert converted.keys() == merged.keys() == tensors.keys()
    assert all(tensor.equal(tensors[name]) for name, tensor in converted.items())
    assert all(tensor.equal(tensors[name]) for name, tensor in merged.items())
    assert (tmp_path / "converted/tokenizer.json").exists()
