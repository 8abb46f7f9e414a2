"""The examples run as they are, and compute what transformers computes of the same checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.hf_models import make_tiny, save_tiny
from tests.support.ray_clusters import ENVIRONMENT, REPOSITORY, Longshore

pytestmark = [pytest.mark.slow, pytest.mark.long]

EXAMPLES = REPOSITORY / "examples"
TIMEOUT_S = 500


def run(*command: str, address: str = "") -> str:
    """Run the example and return its output. `address`: of a Ray cluster."""
    there = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(REPOSITORY), *([there] if there else [])])
    ours = {"RAY_ADDRESS": address, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT, **ours},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def write_on(folder: Path, count: int) -> list[int]:
    """Return the tokens that the model writes after 5, 9, 7."""
    ids = torch.tensor([[5, 9, 7]])
    model = model_of(folder)
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(dim=-1)], dim=1)
    return ids[0, 3:].tolist()


def written(said: str) -> list[int]:
    return [int(token) for token in said.rpartition("written:")[2].split()]


@pytest.mark.parametrize(("family", "tp"), [("mixtral", "1"), ("llama", "2")])
def test_transformers_forward(longshore: Longshore, tmp_path: Path, family: str, tp: str) -> None:
    make_tiny(family).float().save_pretrained(tmp_path)  # so that sums in another order change no choice
    example = (str(EXAMPLES / "transformers_forward.py"), str(tmp_path))
    options = ("--device", "cpu", "--tp", tp, "--count", "4", "--tokens", "5", "9", "7")
    assert written(run(*example, *options, address=longshore.address)) == write_on(tmp_path, 4)
    assert not longshore.models()


@pytest.mark.parametrize("tp", [1, 2])
def test_transformers_from_store(tmp_path: Path, tp: int) -> None:
    make_tiny("llama").float().save_pretrained(tmp_path)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)] if tp > 1 else []
    example = [str(EXAMPLES / "transformers_from_store.py"), str(tmp_path), "--tp", str(tp), "--device", "cpu"]
    said = run(*launch, *example, "--count", "4", "--tokens", "5", "9", "7")
    assert written(said) == write_on(tmp_path, 4)


def test_read_tensors(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    lines = run(str(EXAMPLES / "read_tensors.py"), str(tmp_path)).splitlines()
    tensors = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    expected = {f"{name} {list(tensor.shape)} {tensor.float().norm():.4g}" for name, tensor in tensors.items()}
    assert set(lines[:-1]) == expected
    assert lines[-1].startswith("read ")


def test_dcp_load(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, vocab_size=97)  # rows that two cannot share evenly
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = re.search(r"loss ([0-9.]+), (\d+) bytes", run(*launch, str(EXAMPLES / "dcp_load.py"), str(tmp_path)))
    assert said is not None
    ids = torch.arange(1, 33)[None]
    assert float(said[1]) == pytest.approx(model_of(tmp_path)(input_ids=ids, labels=ids).loss.item(), abs=1e-3)
    assert int(said[2]) <= sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


def test_dcp_save(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "from", vocab_size=97)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run(*launch, str(EXAMPLES / "dcp_save.py"), str(tmp_path / "from"), str(tmp_path / "to"))
    assert re.search(r"saved \w+", said)
    saved, expected = model_of(tmp_path / "to").state_dict(), model_of(tmp_path / "from").state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], each) for name, each in expected.items())


def test_fsdp2(longshore: Longshore, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, vocab_size=97)  # rows that two cannot share evenly
    said = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(EXAMPLES / "fsdp2.py"), str(tmp_path)),
        address=longshore.address,
    )
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([0-9.]+)", said)]
    ids = torch.arange(1, 33)[None]
    model = model_of(tmp_path)
    assert losses[0] == round(model(input_ids=ids, labels=ids).loss.item(), 4)
    assert losses[1] < losses[0]  # the step went into the parameters
    assert not longshore.models()
