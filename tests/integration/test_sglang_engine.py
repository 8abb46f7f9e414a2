"""SGLang on the CPU with the load format "private": the tokens and weights of SGLang's own loader, each byte read once.

SGLang runs in an environment of its own (`tests/engine_environments/make.sh sglang`), which the first test makes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.counting_proxy import CountingProxy
from tests.support.engines import REPOSITORY, bytes_read, chunks_read, config_folder, python_of, tokens_of
from tests.support.hf_models import make_tiny
from tests.support.stored_models import publish_to

pytestmark = [pytest.mark.slow, pytest.mark.long]

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 64}
OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "max_total_tokens": 512,
    "max_running_requests": 2,
    "context_length": 64,
    "dtype": "bfloat16",
    "disable_cuda_graph": True,
    "log_level": "info",
}
# Two revisions through one engine of two ranks: tokens and weights after the load and after a reload.
RELOADS = """
import json, sys
import sglang

def answer(engine, names):
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    (found,) = engine.generate(input_ids=[[1, 5, 7, 9]], sampling_params=sampling)
    weights = {name: engine.get_weights_by_name(name, truncate_size=4) for name in names}
    print("answer:", json.dumps([found["output_ids"], weights]))

if __name__ == "__main__":
    first, second, options, names = map(json.loads, sys.argv[1:])
    engine = sglang.Engine(model_path=first, load_format="private", skip_tokenizer_init=True, **options)
    answer(engine, names)
    engine.flush_cache()
    print("reloaded:", engine.update_weights_from_disk(second, load_format="private"))
    answer(engine, names)
    engine.shutdown()
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("sglang")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one architecture, with other weights."""
    made = [tmp_path_factory.mktemp("model") for _ in range(2)]
    for number, folder in enumerate(made):
        make_tiny("llama", seed=number, **SIZES).save_pretrained(folder, max_shard_size=1_000_000)
    return made


def run(python: Path, server: Any, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    keys = server.credentials()
    runtime = folder / "run"
    runtime.mkdir(mode=0o700, exist_ok=True)
    done = subprocess.run(
        [python, *command],
        env={
            **os.environ,
            "AWS_ACCESS_KEY_ID": keys.access_key_id,
            "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
            "HF_HUB_OFFLINE": "1",
            "LONGSHORE_GROUP_PATIENCE_S": "120",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            "XDG_RUNTIME_DIR": str(runtime),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done


def said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout[-2000:] + done.stderr[-6000:]


def example(python: Path, server: Any, folder: Path, model: str | Path, **more: Any) -> Any:
    """Run the example, and return its process and the tokens that it wrote."""
    arguments = ("--tokens", "1", "5", "7", "9", "--count", "8", "--options", json.dumps({**OPTIONS, **more}))
    done = run(python, server, folder, str(REPOSITORY / "examples/sglang_generate.py"), str(model), *arguments)
    found = re.search(r"^written: (.*)$", done.stdout, re.MULTILINE)
    assert found is not None, said(done)
    return done, [int(token) for token in found[1].split()]


def test_the_example_writes_what_transformers_does(
    python: Path, s3_server: Any, folders: list[Path], tmp_path: Path
) -> None:
    model = publish_to(s3_server, folders[0], f"sglang-{os.getpid()}")
    with CountingProxy(s3_server.endpoint_url) as proxy:
        folder = config_folder(model, proxy, tmp_path / "config")
        done, tokens = example(python, s3_server, tmp_path, folder)
        weights = chunks_read(proxy)
    assert len(weights) == len(set(weights)) > 0
    model_bytes = sum(path.stat().st_size for path in folders[0].glob("*.safetensors"))
    assert model_bytes * 0.9 < sum(bytes_read(done)) <= model_bytes * 1.1
    assert tokens == tokens_of(folders[0])


def test_two_ranks_read_each_byte_once_and_reload(
    python: Path, s3_server: Any, folders: list[Path], tmp_path: Path
) -> None:
    """The second revision is another folder: `update_weights_from_disk` reads all of it."""
    names = ["model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight", "model.norm.weight"]
    with CountingProxy(s3_server.endpoint_url) as proxy:
        models = [publish_to(s3_server, folder, f"sglang-two-{at}-{os.getpid()}") for at, folder in enumerate(folders)]
        made = [config_folder(model, proxy, tmp_path / f"config-{at}") for at, model in enumerate(models)]
        options = json.dumps({**OPTIONS, "tp_size": 2})
        script = tmp_path / "reloads.py"
        script.write_text(RELOADS)
        done = run(python, s3_server, tmp_path, str(script), *map(json.dumps, made), options, json.dumps(names))
        weights = chunks_read(proxy)
    answers = [json.loads(text) for text in re.findall(r"^answer: (.*)$", done.stdout, re.MULTILINE)]
    assert len(answers) == 2, said(done)
    assert len(weights) == len(set(weights)) > 0  # both ranks, both revisions
    for (tokens, values), folder in zip(answers, folders, strict=True):
        assert tokens == tokens_of(folder)
        stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for name in names:
            assert values[name] == stored[name][:4].tolist(), name


def test_weights_of_another_model_end_the_engine(
    python: Path, s3_server: Any, folders: list[Path], tmp_path: Path
) -> None:
    model = publish_to(s3_server, folders[0], f"sglang-other-{os.getpid()}")
    with CountingProxy(s3_server.endpoint_url) as proxy:
        folder = Path(config_folder(model, proxy, tmp_path / "config"))
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 128}))
        command = (str(REPOSITORY / "examples/sglang_generate.py"), str(folder), "--options", json.dumps(OPTIONS))
        done = run(python, s3_server, tmp_path, *command)
    assert "written:" not in done.stdout
    assert "has no place in the model, has another shape there" in done.stdout + done.stderr, said(done)
