"""Environments of engines, and what a store was asked for while an engine loaded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cluster
from tests.support.counting_proxy import CountingProxy
from tests.support.stored_models import StoredModel

REPOSITORY = Path(__file__).resolve().parents[2]


def python_of(name: str) -> Path:
    """Return the interpreter of an engine's environment, which is made if it is not there."""
    done = subprocess.run([REPOSITORY / "tests/engine_environments/make.sh", name], timeout=1500, check=False)
    if done.returncode == 3:
        pytest.skip(f"what {name}.txt lists cannot be installed here")
    assert done.returncode == 0
    return REPOSITORY / f".venv-{name}/bin/python"


def bytes_read(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Return what each load has read, as the log says."""
    return [int(size) for size in re.findall(r"process read (\d+) bytes", done.stdout + done.stderr)]


def config_folder(model: StoredModel, proxy: CountingProxy, where: Path) -> str:
    """Make the folder that stands for the model, which is read through the proxy."""
    with pytest.MonkeyPatch.context() as patched:
        keys = model.server.credentials()
        patched.setenv("AWS_ACCESS_KEY_ID", keys.access_key_id)
        patched.setenv("AWS_SECRET_ACCESS_KEY", keys.secret_access_key)
        return cluster.config_folder(model.uri, where, endpoint_url=proxy.endpoint_url, region=model.server.region)


def chunks_read(proxy: CountingProxy) -> list[tuple[str, tuple[int, int]]]:
    """Return path and range of each request for weights."""
    read = [(request.path, request.range) for request in proxy.requests() if request.is_weights]
    return [(path, span) for path, span in read if span is not None and span[1] - span[0] > 8]


def tokens_of(folder: Path) -> list[int]:
    """Return what transformers writes with the weights of a folder, the best token each time."""
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokens = [1, 5, 7, 9]
for _ in range(8):
    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
print("written:", *tokens[4:])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    found = re.search(r"^written: (.*)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stderr[-2000:]
    return [int(token) for token in found[1].split()]
