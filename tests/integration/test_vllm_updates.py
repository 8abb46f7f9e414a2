"""A running vLLM engine takes new revisions in place: `engines.vllm_updates`, vLLM on the CPU, two ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.counting_proxy import CountingProxy
from tests.support.engines import REPOSITORY, chunks_read, config_folder, python_of, tokens_of
from tests.support.hf_models import make_tiny
from tests.support.stored_models import StoredModel, publish_to

pytestmark = [pytest.mark.slow, pytest.mark.long]

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "head_dim": 64,
}
OPTIONS = {
    "load_format": "longshore",
    "weight_transfer_config": {"backend": "longshore"},
    "tensor_parallel_size": 2,
    "enforce_eager": True,
    "max_model_len": 64,
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
}
CHANGED = ("model.layers.1.mlp.down_proj.weight", "model.norm.weight")  # 5 % of the bytes


class Session:
    """An engine in a process of vLLM's environment."""

    def __init__(self, python: Path, options: dict[str, Any], variables: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "tests.support.vllm_session", json.dumps(options)],
                env={**os.environ, **variables},
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._watchdog = threading.Timer(500, self.close)
        self._watchdog.start()
        self._answer()

    def __call__(self, *told: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer: "):
                return line.removeprefix("answer: ")
        raise AssertionError(self._log.read_text()[-6000:])

    def close(self) -> None:
        self._watchdog.cancel()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Revisions: "a", "b" and "damaged" with other weights, "few" like "a" but for 5 %, "wide" with other shapes."""
    root = tmp_path_factory.mktemp("revisions")
    for name, seed, more in (("a", 0, {}), ("b", 1, {}), ("wide", 2, {"intermediate_size": 1024})):
        make_tiny("llama", seed=seed, **{**SIZES, **more}).save_pretrained(root / name)
    shutil.copytree(root / "a", root / "few")
    shutil.copytree(root / "b", root / "damaged")
    tensors = load_file(root / "few/model.safetensors")
    for name in CHANGED:
        tensors[name] = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(7)).bfloat16() * 0.05
    save_file(tensors, root / "few/model.safetensors", metadata={"format": "pt"})
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def models(s3_server: Any, folders: dict[str, Path]) -> dict[str, StoredModel]:
    return {name: publish_to(s3_server, path, f"vllm-updates-{name}-{os.getpid()}") for name, path in folders.items()}


@pytest.fixture(scope="module")
def proxy(s3_server: Any) -> Iterator[CountingProxy]:
    with CountingProxy(s3_server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def session(
    s3_server: Any, proxy: CountingProxy, models: dict[str, StoredModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    where, keys = tmp_path_factory.mktemp("engine"), s3_server.credentials()
    (where / "run").mkdir(mode=0o700)
    variables = {
        "AWS_ACCESS_KEY_ID": keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
        "HF_HUB_OFFLINE": "1",
        "LONGSHORE_GROUP_PATIENCE_S": "120",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for the addresses
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "XDG_RUNTIME_DIR": str(where / "run"),
    }
    folder = config_folder(models["a"], proxy, where / "config")
    session = Session(python_of("vllm"), {**OPTIONS, "model": folder}, variables, where / "log")
    yield session
    session.close()


def bytes_of(proxy: CountingProxy, before: int) -> int:
    return sum(end - start for _, (start, end) in chunks_read(proxy)[before:])


def test_only_what_changed_is_read_and_tokens_are_new(
    session: Session, proxy: CountingProxy, models: dict[str, StoredModel], folders: dict[str, Path]
) -> None:
    assert session("tokens") == tokens_of(folders["a"])
    before, places = len(chunks_read(proxy)), session("pointers")
    assert session("update", models["few"].uri, {}) == ""
    size = (folders["few"] / "model.safetensors").stat().st_size
    assert 0 < bytes_of(proxy, before) < 0.09 * size
    assert session("tokens") == tokens_of(folders["few"])
    assert session("pointers") == places


def test_a_damaged_revision_leaves_the_old_weights(
    session: Session, models: dict[str, StoredModel], folders: dict[str, Path]
) -> None:
    assert session("update", models["a"].uri, {}) == ""
    stored = models["damaged"].in_bucket / "model.safetensors"
    data = stored.read_bytes()
    stored.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    said = session("update", models["damaged"].uri, {})
    assert said.startswith("UpdateFailed"), said
    assert session("tokens") == tokens_of(folders["a"])
    assert session("update", models["b"].uri, {}) == ""
    assert session("tokens") == tokens_of(folders["b"])


def test_other_shapes_are_refused(session: Session, models: dict[str, StoredModel], folders: dict[str, Path]) -> None:
    assert session("update", models["a"].uri, {}) == ""
    said = session("update", models["wide"].uri, {})
    assert "differs in more than contents" in said, said
    assert session("tokens") == tokens_of(folders["a"])


@pytest.mark.parametrize("streaming", [False, True])
def test_every_weight_is_replaced(
    session: Session, models: dict[str, StoredModel], folders: dict[str, Path], streaming: bool
) -> None:
    for name in ("b", "a"):
        assert session("update", models[name].uri, {"streaming": streaming}) == ""
        assert session("tokens") == tokens_of(folders[name])


def test_the_example_takes_two_revisions(
    s3_server: Any, proxy: CountingProxy, models: dict[str, StoredModel], folders: dict[str, Path], tmp_path: Path
) -> None:
    keys = s3_server.credentials()
    (tmp_path / "run").mkdir(mode=0o700)
    options = {name: value for name, value in OPTIONS.items() if name != "tensor_parallel_size"}
    uris = [models[name].uri for name in ("few", "b")]
    command = (str(REPOSITORY / "examples/vllm_update.py"), config_folder(models["a"], proxy, tmp_path / "config"))
    done = subprocess.run(
        [python_of("vllm"), *command, *uris, "--tokens", "1", "5", "7", "9", "--options", json.dumps(options)],
        env={
            **os.environ,
            "AWS_ACCESS_KEY_ID": keys.access_key_id,
            "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        },
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    found = re.findall(r"^written: (.*)$", done.stdout, re.MULTILINE)
    assert len(found) == 3, done.stdout[-2000:] + done.stderr[-4000:]
    assert [[int(token) for token in text.split()] for text in found] == [
        tokens_of(folders[name]) for name in ("a", "few", "b")
    ]
