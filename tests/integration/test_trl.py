"""TRL's GRPO on the CPU: weights from the store, and back to it after each step (`examples/trl_grpo.py`).

TRL is in an environment on top of ours (`tests/engine_environments/make.sh trl`), which the first test makes.
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

from engines.transformers import from_pretrained
from storage.checkpoints.checkpoint_files import INDEX_KEY
from tests.support.counting_proxy import CountingProxy
from tests.support.engines import REPOSITORY, chunks_read, python_of
from tests.support.hf_models import DENSE_SIZES, make_tiny
from tests.support.stored_models import StoredModel, publish_to
from tests.support.tiny_tokenizer import save_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.long]

OPTIONS = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 0.05,
    "save_strategy": "steps",
    "save_steps": 2,
}


@pytest.fixture
def base(s3_server: Any, tmp_path: Path) -> StoredModel:
    """A published model with a tokenizer."""
    folder = tmp_path / "base"
    make_tiny("llama").float().save_pretrained(folder)
    save_tokenizer(folder, DENSE_SIZES["vocab_size"])
    return publish_to(s3_server, folder, f"trl-{os.getpid()}")


def test_a_trainer_reads_from_the_store_and_saves_each_step(base: StoredModel, s3_server: Any, tmp_path: Path) -> None:
    python = python_of("trl")
    options = ("--options", json.dumps({**OPTIONS, "output_dir": str(tmp_path / "out")}))
    policy = StoredModel(f"{base.uri}-policy", tmp_path, s3_server)
    with CountingProxy(s3_server.endpoint_url) as proxy:
        keys = s3_server.credentials()
        done = subprocess.run(
            [python, REPOSITORY / "examples/trl_grpo.py", base.uri, policy.uri, "--prompts", "w5 w7 w9", *options],
            env={
                **os.environ,
                "AWS_ACCESS_KEY_ID": keys.access_key_id,
                "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
                "AWS_ENDPOINT_URL": proxy.endpoint_url,
                "AWS_REGION": s3_server.region,
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(REPOSITORY),
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
                "XDG_RUNTIME_DIR": str(tmp_path),
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        read = [chunk for chunk in chunks_read(proxy) if chunk[0].startswith(f"/models/{base.uri[12:]}/")]
    revisions = re.findall(r"^step (\d): saved revision (\w+)$", done.stdout, re.MULTILINE)
    assert [step for step, _ in revisions] == ["1", "2"], done.stdout[-3000:] + done.stderr[-6000:]
    assert revisions[0][1] != revisions[1][1]
    assert len(read) == len(set(read)) > 0
    assert not list((tmp_path / "cache").rglob("model*.safetensors"))  # nothing was downloaded
    # The last revision is what TRL itself has saved.
    trained = load_file(tmp_path / "out/checkpoint-2/model.safetensors")
    model = from_pretrained(str(policy.in_bucket), dtype="auto")
    assert model.state_dict().keys() == trained.keys()
    assert all(tensor.equal(trained[name]) for name, tensor in model.state_dict().items())
    begun = load_file(base.folder / "model.safetensors")
    assert not any(trained[name].equal(begun[name]) for name in begun if name.endswith("proj.weight"))
    assert {path.name for path in policy.in_bucket.iterdir()} > {INDEX_KEY, "config.json", "tokenizer.json"}
