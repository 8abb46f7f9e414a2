"""Environments of engines, and what a store was asked for while an engine loaded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cluster
from tests.support.counting_proxy import CountingProxy
from tests.support.free_ports import free_ports
from tests.support.hf_models import make_tiny
from tests.support.stored_models import StoredModel

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "head_dim": 64,
}


def python_of(name: str) -> Path:
    """Return the interpreter of an engine's environment, which is made if it is not there."""
    script, variables = REPOSITORY / "tests/engine_environments/make.sh", {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([script, name], env=variables, timeout=1500, check=False)
    if done.returncode == 3:
        pytest.skip(f"what {name}.txt lists cannot be installed here")
    assert done.returncode == 0
    return REPOSITORY / f".venv-{name}/bin/python"


def access_of(server: Any) -> dict[str, str]:
    """Return the keys of an S3 server as variables of an environment."""
    keys = server.credentials()
    return {"AWS_ACCESS_KEY_ID": keys.access_key_id, "AWS_SECRET_ACCESS_KEY": keys.secret_access_key}


def variables_of(where: Path, server: Any = None) -> dict[str, str]:
    """Return what an engine's processes find in their environment, on two processors and without a hub.

    Args:
        where: Folder of the test, for their sockets.
        server: S3 server whose keys they have. Default: none.
    """
    (where / "run").mkdir(mode=0o700, exist_ok=True)
    return {
        **({} if server is None else access_of(server)),
        "HF_HUB_OFFLINE": "1",
        "LONGSHORE_GROUP_PATIENCE_S": "120",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "XDG_RUNTIME_DIR": str(where / "run"),
    }


def bytes_read(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Return what each load has read, as the log says."""
    return [int(size) for size in re.findall(r"process read (\d+) bytes", done.stdout + done.stderr)]


def config_folder(model: StoredModel, proxy: CountingProxy, where: Path) -> str:
    """Make the folder that stands for the model, which is read through the proxy."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in access_of(model.server).items():
            patched.setenv(name, value)
        return cluster.config_folder(model.uri, where, endpoint_url=proxy.endpoint_url, region=model.server.region)


def chunks_read(proxy: CountingProxy) -> list[tuple[str, tuple[int, int]]]:
    """Return path and range of each request for weights."""
    read = [(request.path, request.range) for request in proxy.requests() if request.is_weights]
    return [(path, span) for path, span in read if span is not None and span[1] - span[0] > 8]


@cache  # each takes seconds
def tokens_of(folder: Path, prompt: tuple[int, ...] = (1, 5, 7, 9)) -> list[int]:
    """Return what transformers writes with the weights of a folder, the best token each time."""
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokens = [int(token) for token in sys.argv[2:]]
for _ in range(8):
    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
print("written:", *tokens[-8:])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), *map(str, prompt)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r"^written: (.*)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stderr[-2000:]
    return [int(token) for token in found[1].split()]


def revisions_of(root: Path, changed: str, **sizes: Any) -> dict[str, Path]:
    """Make folders: "a", "b" and "damaged" with other weights, "few" like "a" but for 5 %, "wide" with other shapes.

    `changed`: a projection of the MLP in layer 1, which has nearly all of the 5 %.
    """
    for name, seed, more in (("a", 0, {}), ("b", 1, {}), ("wide", 2, {"intermediate_size": 1024})):
        make_tiny("llama", seed=seed, **{**SIZES, **sizes, **more}).save_pretrained(root / name)
    shutil.copytree(root / "a", root / "few")
    shutil.copytree(root / "b", root / "damaged")
    tensors = load_file(root / "few/model.safetensors")
    for name in (f"model.layers.1.mlp.{changed}.weight", "model.norm.weight"):
        tensors[name] = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(7)).bfloat16() * 0.05
    save_file(tensors, root / "few/model.safetensors", metadata={"format": "pt"})
    return {path.name: path for path in root.iterdir()}


def damage(model: StoredModel) -> None:
    """Flip a bit in the stored weights of a model."""
    stored = model.in_bucket / "model.safetensors"
    data = stored.read_bytes()
    stored.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])


class EngineServer:
    """The HTTP server of an engine, in a process of the engine's environment."""

    def __init__(self, command: list[Any], variables: dict[str, str], log: Path) -> None:
        """Start it and wait until it is healthy. `command` is followed by its port."""
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("w") as said:
            self.process = subprocess.Popen(
                [*command, "--port", str(port)],
                env={**os.environ, **variables},
                cwd=log.parent,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        give_up_s = time.monotonic() + 300
        try:
            while self.get("/health")[0] != 200:
                assert self.process.poll() is None, log.read_text()[-6000:]
                assert time.monotonic() < give_up_s, log.read_text()[-6000:]
                time.sleep(0.5)
        except BaseException:
            self.close()
            raise

    def get(self, path: str) -> tuple[int, str]:
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, **body: Any) -> tuple[int, str]:
        data = json.dumps(body).encode()
        return self._ask(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}))

    def _ask(self, request: urllib.request.Request) -> tuple[int, str]:
        """Return the status, 0 if there is none, and what came."""
        try:
            with urllib.request.urlopen(request, timeout=100) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
