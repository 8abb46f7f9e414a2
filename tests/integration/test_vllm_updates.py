"""A running vLLM engine takes new revisions in place: `engines.vllm_updates`, vLLM on the CPU, two ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cluster
from tests.support.counting_proxy import CountingProxy
from tests.support.engines import (
    REPOSITORY,
    SIZES,
    EngineServer,
    chunks_read,
    config_folder,
    damage,
    python_of,
    revisions_of,
    tokens_of,
    variables_of,
)
from tests.support.hf_models import make_tiny
from tests.support.stored_models import CHUNK_BYTES, StoredModel, publish_to

pytestmark = [pytest.mark.slow, pytest.mark.long]

OPTIONS = {
    "load_format": "longshore",
    "weight_transfer_config": {"backend": "longshore"},
    "tensor_parallel_size": 2,
    "enforce_eager": True,
    "max_model_len": 128,
    "block_size": 32,
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
}
PROMPT = tuple(10 + number % 40 for number in range(100))  # three blocks of the prefix cache, and a part


class Session:
    """An engine in a process of vLLM's environment."""

    def __init__(self, python: Path, options: dict[str, Any], variables: dict[str, str], log: Path) -> None:
        self._log = log
        self.cached = 0
        self.said = ""  # vLLM's log, which it writes where the answers are
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

    def tokens(self) -> list[int]:
        """Return what the model writes after PROMPT. `cached` has how much of PROMPT was in the prefix cache."""
        found: list[int]
        found, self.cached = self("tokens", PROMPT)
        return found

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer: "):
                return line.removeprefix("answer: ")
            self.said += line
        raise AssertionError(self.said[-6000:] + self._log.read_text()[-6000:])

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
    longest = OPTIONS["max_model_len"]
    return revisions_of(tmp_path_factory.mktemp("revisions"), "down_proj", max_position_embeddings=longest)


@pytest.fixture(scope="module")
def models(s3_server: Any, folders: dict[str, Path]) -> dict[str, StoredModel]:
    return {name: publish_to(s3_server, path, f"vllm-updates-{name}-{os.getpid()}") for name, path in folders.items()}


@pytest.fixture(scope="module")
def proxy(s3_server: Any) -> Iterator[CountingProxy]:
    with CountingProxy(s3_server.endpoint_url) as proxy:
        yield proxy


INSECURE = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for the addresses


def session_of(model: StoredModel, proxy: CountingProxy, where: Path) -> contextlib.closing[Session]:
    """Start an engine with this model."""
    options = {**OPTIONS, "model": config_folder(model, proxy, where / "config")}
    return contextlib.closing(
        Session(python_of("vllm"), options, {**variables_of(where, model.server), **INSECURE}, where / "log")
    )


@pytest.fixture(scope="module")
def session(
    proxy: CountingProxy, models: dict[str, StoredModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    with session_of(models["a"], proxy, tmp_path_factory.mktemp("engine")) as session:
        yield session


def bytes_of(proxy: CountingProxy, before: int) -> int:
    return sum(end - start for _, (start, end) in chunks_read(proxy)[before:])


def test_only_what_changed_is_read_and_tokens_are_new(
    session: Session, proxy: CountingProxy, models: dict[str, StoredModel], folders: dict[str, Path]
) -> None:
    assert [session.tokens(), session.tokens()] == [tokens_of(folders["a"], PROMPT)] * 2
    assert session.cached == 96
    before, places = len(chunks_read(proxy)), session("pointers")
    assert session("update", models["few"].uri, {}) == ""
    size = (folders["few"] / "model.safetensors").stat().st_size
    assert 0 < bytes_of(proxy, before) < 0.09 * size
    report = session("report")
    assert report["revision"] == cluster.safe_open(models["few"].uri, cache=False, **models["few"].options).revision
    assert 2 <= report["changed_tensors"] < report["tensors"] == 57
    assert 0 < report["store_bytes"] <= bytes_of(proxy, before)
    assert report["store_bytes"] / 2 < report["read_bytes"] < report["staged_bytes"]
    assert session.tokens() == tokens_of(folders["few"], PROMPT)
    assert session.cached == 0  # what the cache had was of the old weights
    assert session("pointers") == places


def test_a_damaged_revision_leaves_the_old_weights(
    session: Session, models: dict[str, StoredModel], folders: dict[str, Path]
) -> None:
    assert session("update", models["a"].uri, {}) == ""
    damage(models["damaged"])
    said = session("update", models["damaged"].uri, {})
    assert said.startswith("UpdateFailed"), said
    assert session.tokens() == tokens_of(folders["a"], PROMPT)
    assert session("update", models["b"].uri, {}) == ""
    assert session.tokens() == tokens_of(folders["b"], PROMPT)


def test_other_shapes_are_refused(session: Session, models: dict[str, StoredModel], folders: dict[str, Path]) -> None:
    assert session("update", models["a"].uri, {}) == ""
    said = session("update", models["wide"].uri, {})
    assert said.startswith("UpdateRefused"), said
    assert "differs in more than contents" in said, said
    assert session.tokens() == tokens_of(folders["a"], PROMPT)


@pytest.mark.parametrize("streaming", [False, True])
def test_every_weight_is_replaced(
    session: Session, models: dict[str, StoredModel], folders: dict[str, Path], streaming: bool
) -> None:
    for name in ("b", "a"):
        assert session("update", models[name].uri, {"streaming": streaming}) == ""
        assert session.tokens() == tokens_of(folders[name], PROMPT)


def test_weights_that_others_loaded_are_read_again(
    session: Session, models: dict[str, StoredModel], folders: dict[str, Path]
) -> None:
    assert session("update", models["b"].uri, {}) == ""
    session("reload")
    assert session.tokens() == tokens_of(folders["a"], PROMPT)
    assert session("update", models["b"].uri, {}) == ""
    assert session.tokens() == tokens_of(folders["b"], PROMPT)


def test_a_worker_that_fails_in_the_exchange_breaks_the_model(
    session: Session, models: dict[str, StoredModel], folders: dict[str, Path]
) -> None:
    assert session("update", models["a"].uri, {}) == ""
    session("fail")
    said = session("update", models["b"].uri, {})
    assert said.startswith("ModelBroken"), said
    assert "no kernel. Ranks with all of the new revision: [0]" in said, said
    assert session("update", models["b"].uri, {}) == ""
    assert session.tokens() == tokens_of(folders["b"], PROMPT)


def check_killed(session: Session, model: StoredModel, kind: str, method: str) -> None:
    session("die", kind, method)
    said = session("update", model.uri, {})
    assert said.startswith("ModelBroken: a process of the engine died in the update"), said


def test_a_worker_killed_in_the_exchange_ends_the_engine(session: Session, models: dict[str, StoredModel]) -> None:
    """The last test of this engine."""
    check_killed(session, models["b"], "Update", "exchange")
    assert "a rank is gone. This one has all of the new revision" in session.said, session.said[-6000:]


def test_a_worker_killed_while_it_stages_ends_the_engine(
    proxy: CountingProxy, models: dict[str, StoredModel], tmp_path: Path
) -> None:
    """It dies when new parameters stand in its modules. vLLM ends the other worker, perhaps before that says a word."""
    with session_of(models["a"], proxy, tmp_path) as session:
        check_killed(session, models["b"], "Watch", "named")


def test_saves_to_one_uri_are_taken_in_turn(s3_server: Any, proxy: CountingProxy, tmp_path: Path) -> None:
    """A trainer saves each step of a tied model in the same place."""
    made = make_tiny("llama", tie_word_embeddings=True, **{**SIZES, "max_position_embeddings": 128})
    stored = StoredModel(f"s3://models/vllm-saves-{os.getpid()}", tmp_path / "step", s3_server)

    def save(step: int, changed: str) -> list[int]:
        parameter = made.get_parameter(changed)
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)).bfloat16() * 0.05
        folder = stored.folder / str(step)
        made.save_pretrained(folder)
        config = [folder / "config.json"]
        cluster.save(made.state_dict(), stored.uri, extra_files=config, chunk_bytes=CHUNK_BYTES, **stored.options)
        return tokens_of(folder, PROMPT)

    embedding = "model.embed_tokens.weight"
    first = save(0, embedding)
    with session_of(stored, proxy, tmp_path) as session:
        assert session.tokens() == first
        for step, (changed, uri) in enumerate([("model.layers.1.mlp.up_proj.weight", ""), (embedding, stored.uri)], 1):
            tokens, before = save(step, changed), len(chunks_read(proxy))
            assert session("update", uri, {}) == ""
            assert session.tokens() == tokens
            # Up is in one module with gate, and the embedding in one chunk with others.
            assert 0 < bytes_of(proxy, before) < 0.2 * sum(tensor.nbytes for tensor in made.parameters())
            assert 0 < session("report")["store_bytes"] <= bytes_of(proxy, before)


class Server(EngineServer):
    """vLLM's HTTP server, with the routes of its development mode."""

    def tokens(self) -> list[int]:
        sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, text = self.post("/inference/v1/generate", token_ids=PROMPT, sampling_params=sampling)
        assert status == 200, text
        found: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return found

    def cache_hits(self) -> float:
        found = re.search(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        assert found is not None
        return float(found[1])


def update_over(server: Server, model: StoredModel) -> int:
    """Take a revision by the routes that docs/update_engines.md shows, and return the status of the update."""
    assert server.post("/start_weight_update")[0] == 200
    status, _ = server.post("/update_weights", update_info={"uri": model.uri})
    server.post("/finish_weight_update")
    return status


def test_updates_over_http(
    s3_server: Any, proxy: CountingProxy, models: dict[str, StoredModel], folders: dict[str, Path], tmp_path: Path
) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if isinstance(value, int | str)]
    options = [option.removesuffix("=True") for option in options]
    options += ["--weight-transfer-config", json.dumps(OPTIONS["weight_transfer_config"])]
    folder = config_folder(models["a"], proxy, tmp_path / "config")
    server = Server(
        [
            *(python_of("vllm"), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", folder, "--skip-tokenizer-init", "--enable-scale-out", *options),
        ],
        {**variables_of(tmp_path, s3_server), **INSECURE, "VLLM_SERVER_DEV_MODE": "1"},
        tmp_path / "log",
    )
    with contextlib.closing(server):
        first = tokens_of(folders["a"], PROMPT)
        assert [server.tokens(), server.tokens()] == [first, first]
        hits = server.cache_hits()
        assert hits > 0
        assert server.post("/init_weight_transfer_engine", init_info={})[0] == 200
        # What cannot be taken leaves the old weights, and the next update is taken.
        assert update_over(server, models["wide"]) == 500
        assert server.tokens() == first
        assert update_over(server, models["b"]) == 200
        assert json.loads(server.post("/reset_prefix_cache?reset_external=true")[1]) == {"success": True}
        hits = server.cache_hits()
        assert server.tokens() == tokens_of(folders["b"], PROMPT)
        assert server.cache_hits() == hits


def test_the_example_takes_two_revisions(
    s3_server: Any, proxy: CountingProxy, models: dict[str, StoredModel], folders: dict[str, Path], tmp_path: Path
) -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "tensor_parallel_size"}
    uris = [models[name].uri for name in ("few", "b")]
    command = (str(REPOSITORY / "examples/vllm_update.py"), config_folder(models["a"], proxy, tmp_path / "config"))
    done = subprocess.run(
        [python_of("vllm"), *command, *uris, "--tokens", *map(str, PROMPT), "--options", json.dumps(options)],
        env={**os.environ, **variables_of(tmp_path, s3_server), **INSECURE},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    found = re.findall(r"^written: (.*)$", done.stdout, re.MULTILINE)
    assert len(found) == 3, done.stdout[-2000:] + done.stderr[-4000:]
    assert [[int(token) for token in text.split()] for text in found] == [
        tokens_of(folders[name], PROMPT) for name in ("a", "few", "b")
    ]


def run_code(code: str) -> None:
    """Run a program in vLLM's environment."""
    done = subprocess.run(
        [python_of("vllm"), "-c", textwrap.dedent(code)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_discarded_weights_are_noticed() -> None:
    """A worker whose weights are discarded or written in one of vLLM's own ways has none that are known."""
    code = """
    import inspect
    from types import SimpleNamespace

    from engines.resident_weights import ResidentWeights
    from engines.vllm_updates import notice_writes
    from vllm.v1.worker.gpu_worker import Worker

    noticed = []
    ResidentWeights.reloaded = noticed.append
    calls = {
        "sleep": [((), {}, False), ((2,), {}, True), ((), {"level": 1}, False), ((), {"level": 2}, True)],
        "discard": [((("kv_cache",),), {}, False), ((("weights", "kv_cache"),), {}, True)],
        "reload_weights": [((), {}, True), ((), {"is_checkpoint_format": False}, True)],
        "reset_weights": [((), {}, True)],
    }
    for name, each in calls.items():
        for args, kwargs, _ in each:
            inspect.signature(getattr(Worker, name)).bind(None, *args, **kwargs)  # as vLLM has it
        setattr(Worker, name, lambda worker, *_, **__: len(noticed))
    notice_writes(Worker)
    notice_writes(Worker)
    worker = Worker.__new__(Worker)
    worker.model_runner = SimpleNamespace(get_model=lambda: "model")
    for name, each in calls.items():
        for args, kwargs, writes in each:
            noticed.clear()
            assert getattr(worker, name)(*args, **kwargs) == writes == len(noticed), (name, args, kwargs)
    """
    run_code(code)


def test_a_cache_that_is_not_emptied_breaks_the_model() -> None:
    """All workers have the new weights, so it must not read as if they had the old ones."""
    code = """
    import inspect
    from types import SimpleNamespace

    from cluster.errors import ModelBroken
    from engines.vllm_updates import update
    from vllm import LLM

    signature = inspect.signature(LLM.reset_prefix_cache)

    def busy(*args, **kwargs):
        return not signature.bind(None, *args, **kwargs).arguments["reset_connector"]  # which also has old contents

    def raises(*args, **kwargs):
        raise RuntimeError("the engine ended")

    for reset, text in ((busy, "requests are running"), (raises, "RuntimeError: the engine ended")):
        engine = SimpleNamespace(engine_core=SimpleNamespace())
        llm = SimpleNamespace(llm_engine=engine, collective_rpc=lambda *_, **__: None, reset_prefix_cache=reset)
        try:
            update(llm)
        except ModelBroken as error:
            assert "every worker has the new weights" in str(error) and text in str(error), error
        else:
            raise SystemExit("no error")
    """
    run_code(code)


def test_what_a_caller_may_not_ask_is_refused() -> None:
    """A request cannot change which signatures are accepted, and an asynchronous engine has methods of its own."""
    code = """
    from types import SimpleNamespace

    import pytest
    from cluster.errors import UpdateRefused
    from engines.resident_weights import ResidentWeights
    from engines.vllm_updates import LongshoreWeightTransfer, UpdateInfo, update
    from vllm.v1.engine.async_llm import AsyncLLM

    ResidentWeights.of = lambda model: None
    transfer = SimpleNamespace(model=None)
    for option in ("trusted_keys", "verify", "credentials"):
        with pytest.raises(UpdateRefused, match=f"no options '{option}'"):
            with LongshoreWeightTransfer._begin(transfer, UpdateInfo(options={option: []})):
                raise SystemExit(option)
    with pytest.raises(UpdateRefused, match="asynchronous"):
        update(SimpleNamespace(collective_rpc=AsyncLLM.collective_rpc))
    """
    run_code(code)


def test_layers_that_take_updates() -> None:
    """Methods and attention layers are taken by name. Their hooks are those that are known to pack nothing."""
    code = """
    import contextlib, importlib, pkgutil
    from types import SimpleNamespace

    import torch
    from engines.vllm_updates import REPEATABLE, UNPACKED_ATTENTION, _unknown_packing
    from vllm.model_executor.layers import attention, quantization
    from vllm.model_executor.layers.attention import Attention, MLAAttention, MMEncoderAttention
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.models import whisper, whisper_causal

    def below(kind):
        return {kind, *(each for made in kind.__subclasses__() for each in below(made))}

    def layer(kind, **more):
        made = kind.__new__(kind)
        torch.nn.Module.__init__(made)
        made.__dict__.update({"impl": SimpleNamespace(sinks=None), **more})
        return made

    for package in (attention, quantization):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    methods = {kind for kind in below(QuantizeMethodBase) if not kind.__abstractmethods__}
    packing = {kind.__name__: layer(torch.nn.Module, quant_method=object.__new__(kind)) for kind in methods}
    taken = {name for name, module in packing.items() if not _unknown_packing(module)}
    assert taken == set(REPEATABLE), taken
    assert len(methods) > 8, methods

    kinds = below(Attention) | below(MMEncoderAttention)
    taken = {kind for kind in kinds if not _unknown_packing(layer(kind))}
    assert {kind.__name__ for kind in taken} == set(UNPACKED_ATTENTION), taken
    assert {kind.__name__ for kind in kinds - taken} == {"StaticSinkAttention"}, kinds - taken
    for kind in taken:
        base = MMEncoderAttention if issubclass(kind, MMEncoderAttention) else Attention
        assert kind.process_weights_after_loading is base.process_weights_after_loading, kind
    assert _unknown_packing(layer(MLAAttention))
    assert _unknown_packing(layer(Attention, impl=SimpleNamespace(sinks=torch.ones(2))))
    """
    run_code(code)
