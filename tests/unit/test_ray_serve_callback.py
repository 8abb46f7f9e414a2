"""The callback of Ray Serve LLM: what it changes of an LLMConfig, on the replica and on other nodes."""

from __future__ import annotations

import asyncio
import enum
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cluster
from actors.reader.host import AGENT_S
from cluster.errors import ConfigError
from cluster.small_files import SOURCE_KEY, read_source
from engines.ray_serve import ConfigFolder
from storage.checkpoints.checkpoint_files import HEADERS_KEY
from storage.errors import RevisionMismatch
from tests.support.checkpoints import safetensors_bytes


class Downloads(enum.Enum):
    MODEL_AND_TOKENIZER = 1
    NONE = 2


class LLMConfig:
    """The parts of Ray's LLMConfig that the callback touches."""

    def __init__(self, source: Any, **engine_kwargs: Any) -> None:
        self.model_loading_config = SimpleNamespace(model_id="tiny", model_source=source)
        self.engine_kwargs = engine_kwargs
        self.engine = SimpleNamespace(hf_model_id=source)

    def update_engine_kwargs(self, **more: Any) -> None:
        self.engine_kwargs |= more

    def get_engine_config(self) -> Any:
        return self.engine


def callback(config: LLMConfig, **options: Any) -> ConfigFolder:
    """Make it as Ray does."""
    context = {"worker_node_download_model": Downloads.MODEL_AND_TOKENIZER}
    return ConfigFolder(llm_config=config, raise_error_on_callback=False, ctx_kwargs=context, **options)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "modeling.py").write_text("x = 1\n")
    (folder / "model.safetensors").write_bytes(safetensors_bytes([("a", "U8", (4,))]))
    cluster.publish(folder)
    return folder


def test_nothing_is_downloaded_and_vllm_gets_the_folder(model: Path):
    config = LLMConfig(str(model))
    made = callback(config)
    assert made.raise_error_on_callback  # else vLLM would look for the model on a hub
    assert made.ctx.worker_node_download_model is Downloads.NONE
    assert config.engine_kwargs == {"load_format": "longshore"}
    asyncio.run(made.run_callback("on_before_node_init"))
    folder = Path(config.engine.hf_model_id)
    assert {path.name for path in folder.iterdir()} == {"config.json", HEADERS_KEY, SOURCE_KEY}
    made.run_callback_sync("on_before_download_model_files_distributed")  # on the replica's node: it is there


@pytest.mark.parametrize("peer_port", [None, 0, -1])
def test_each_node_starts_its_agent_unless_it_shares_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, peer_port: int | None
):
    """vLLM's workers are no processes of Ray: without the callback no agent would be there for them."""
    started: list[float] = []
    monkeypatch.setattr("engines.ray_serve.start_agent_here", started.append)
    if peer_port is not None:
        monkeypatch.setenv("LONGSHORE_PEER_PORT", str(peer_port))
    made = callback(LLMConfig(str(model)))
    asyncio.run(made.on_before_node_init())
    assert started == []  # the replica may run where no worker does
    for _ in range(2):  # Ray calls it on the replica's node too, where the folder is
        pickle.loads(pickle.dumps(made)).run_callback_sync("on_before_download_model_files_distributed")
    assert started == ([] if peer_port == -1 else [AGENT_S, AGENT_S])


def test_code_is_fetched_where_vllm_may_run_it(model: Path):
    config = LLMConfig(SimpleNamespace(bucket_uri=str(model)), trust_remote_code=True, load_format="longshore")
    asyncio.run(callback(config).on_before_node_init())
    assert Path(config.engine.hf_model_id, "modeling.py").exists()


def test_other_nodes_make_the_same_folder_or_none(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = LLMConfig(str(model))
    made = callback(config)
    asyncio.run(made.on_before_node_init())
    folder = Path(config.engine.hf_model_id)
    there = pickle.loads(pickle.dumps(made))
    for path in folder.iterdir():  # as on a node that has nothing yet
        path.unlink()
    folder.rmdir()
    there.on_before_download_model_files_distributed()
    assert read_source(folder) is not None

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (folder / SOURCE_KEY).unlink()
    with pytest.raises(ConfigError, match="different places"):
        there.on_before_download_model_files_distributed()

    (model / "model.safetensors").write_bytes(safetensors_bytes([("a", "U8", (4,))], seed=1))
    cluster.publish(model)
    with pytest.raises(RevisionMismatch):  # the replica has an older one
        there.on_before_download_model_files_distributed()


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (LLMConfig(None), {}, "no model_source"),
        (LLMConfig("s3://b/m", load_format="runai_streamer"), {}, "runai_streamer"),
        (LLMConfig("s3://b/m"), {"bucket": "b"}, "unknown callback_kwargs: 'bucket'"),
    ],
)
def test_what_cannot_work_is_an_error_at_once(config: LLMConfig, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        callback(config, **options)
