"""SGLang on the CPU with the load format "private": the tokens of transformers, each byte read once, updates in place.

SGLang runs in an environment of its own (`tests/engine_environments/make.sh sglang`), which the first test makes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.counting_proxy import CountingProxy
from tests.support.engines import (
    REPOSITORY,
    EngineServer,
    bytes_read,
    chunks_read,
    config_folder,
    damage,
    python_of,
    revisions_of,
    tokens_of,
    variables_of,
)
from tests.support.stored_models import StoredModel, publish_to

pytestmark = [pytest.mark.slow, pytest.mark.long]

EXAMPLE = REPOSITORY / "examples/sglang_generate.py"
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
# An engine that takes one revision after the other. SGLang's processes import this file, too.
UPDATES = """
import hashlib, json, sys
import numpy
import sglang
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

def places(updater):
    return [parameter.data_ptr() for parameter in updater.tp_worker.model_runner.model.parameters()]

def watch(original, updater, *args, **more):
    before = places(updater)
    result = original(updater, *args, **more)
    rank = updater.tp_worker.model_runner.weight_updater.tp_rank
    print(f"in place: {rank} {before == places(updater)}", flush=True)  # one piece: both ranks write at one moment
    return result

HookRegistry.register(f"{UPDATER}.update_weights_from_disk", watch, HookType.AROUND)

def answer(engine, taken):
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    (found,) = engine.generate(input_ids=[[1, 5, 7, 9]], sampling_params=sampling)
    weights = {}
    for name in json.loads(sys.argv[1]):
        part = numpy.array(engine.get_weights_by_name(name, truncate_size=1 << 20), numpy.float32)
        weights[name] = [len(part), hashlib.sha256(part.tobytes()).hexdigest()]
    print("answer:", json.dumps([taken, found["output_ids"], found["meta_info"]["cached_tokens"], weights]))

if __name__ == "__main__":
    first, options, *revisions = map(json.loads, sys.argv[2:])
    engine = sglang.Engine(model_path=first, load_format="private", skip_tokenizer_init=True, **options)
    answer(engine, "")
    for revision in revisions:
        answer(engine, engine.update_weights_from_disk(revision))
    engine.shutdown()
"""

# SGLang's server. The last rank dies in the step of an update that the file `die` names. Every process imports this.
SERVER = """
import os, signal, sys
from engines.resident_weights import Update

def dying(step):
    original = getattr(Update, step)

    def method(update):
        from sglang.srt.distributed.parallel_state import get_world_group

        if os.path.exists("die") and open("die").read() == step and get_world_group().rank_in_group == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(update)

    setattr(Update, step, method)

dying("prepare")
dying("exchange")

if __name__ == "__main__":
    from sglang.launch_server import load_plugins, prepare_server_args, run_server

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
"""
# A divided embedding, parts of fused parameters, one that is divided by columns, and one that is not divided
COMPARED = (
    "model.embed_tokens.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.norm.weight",
)
PROMPT = tuple(range(10, 50))  # several pages of the prefix cache
PAGE_TOKENS = 8


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("sglang")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    # The engine keeps up beside gate in one parameter, and reads up alone.
    return revisions_of(tmp_path_factory.mktemp("revisions"), "up_proj")


@pytest.fixture(scope="module")
def models(s3_server: Any, folders: dict[str, Path]) -> dict[str, StoredModel]:
    return {name: publish_to(s3_server, path, f"sglang-{name}-{os.getpid()}") for name, path in folders.items()}


def run(python: Path, server: Any, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [python, *command],
        env={**os.environ, **variables_of(folder, server)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done


def path_of(model: StoredModel) -> str:
    return f"/{model.uri.removeprefix('s3://')}/"


def size_of(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def bytes_of(chunks: list[tuple[str, tuple[int, int]]], model: StoredModel) -> int:
    return sum(end - start for path, (start, end) in chunks if path.startswith(path_of(model)))


def said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout[-2000:] + done.stderr[-6000:]


def test_the_example_writes_what_transformers_does(
    python: Path, s3_server: Any, folders: dict[str, Path], models: dict[str, StoredModel], tmp_path: Path
) -> None:
    options = ("--tokens", "1", "5", "7", "9", "--count", "8", "--options", json.dumps(OPTIONS))
    with CountingProxy(s3_server.endpoint_url) as proxy:
        folder = config_folder(models["a"], proxy, tmp_path / "config")
        then = (models["few"].uri, models["b"].uri)
        done = run(python, s3_server, tmp_path, str(EXAMPLE), folder, *options, "--then", *then)
        chunks = chunks_read(proxy)
    found = re.findall(r"^written: (.*)$", done.stdout, re.MULTILINE)
    assert [[int(token) for token in text.split()] for text in found] == [
        tokens_of(folders[name]) for name in ("a", "few", "b")
    ], said(done)
    assert len(chunks) == len(set(chunks)) > 0
    assert size_of(folders["a"]) * 0.9 < bytes_read(done)[0] <= size_of(folders["a"]) * 1.1
    assert 0 < bytes_of(chunks, models["few"]) < 0.09 * size_of(folders["few"])


def test_two_ranks_take_revisions_in_place(
    python: Path, s3_server: Any, folders: dict[str, Path], models: dict[str, StoredModel], tmp_path: Path
) -> None:
    damage(models["damaged"])
    with CountingProxy(s3_server.endpoint_url) as proxy:
        first, last = (config_folder(models[name], proxy, tmp_path / name) for name in ("a", "b"))
        revisions = [models["few"].uri, models["damaged"].uri, models["wide"].uri, last]
        script = tmp_path / "updates.py"
        script.write_text(UPDATES)
        options = {**OPTIONS, "tp_size": 2}
        done = run(python, s3_server, tmp_path, str(script), *map(json.dumps, [COMPARED, first, options, *revisions]))
        chunks = chunks_read(proxy)
    answers = [json.loads(text) for text in re.findall(r"^answer: (.*)$", done.stdout, re.MULTILINE)]
    assert len(answers) == 5, said(done)
    taken = [answer[0][0] for answer in answers[1:]]
    assert taken == [True, False, False, True], answers
    assert re.search("IntegrityError|ObjectChanged", answers[2][0][1]), answers[2]
    assert "differs in more than contents" in answers[3][0][1], answers[3]
    has = ["a", "few", "few", "few", "b"]  # a refused revision leaves the one before
    assert [answer[1] for answer in answers] == [tokens_of(folders[name]) for name in has]
    assert [answer[2] > 0 for answer in answers] == [False, False, True, True, False]  # the prefix cache
    for answer, name in zip(answers, has, strict=True):
        stored = load_file(folders[name] / "model.safetensors")
        for weight in COMPARED:
            rows, digest = answer[3][weight]  # of the first rank, at least
            assert rows >= len(stored[weight]) / 2
            assert digest == hashlib.sha256(stored[weight][:rows].float().numpy().tobytes()).hexdigest(), (name, weight)
    for answer in answers[1], answers[4]:
        assert re.search(r"to revision \w{12} in .*: \d+ of 57 tensors changed", answer[0][1]), answer
    assert sorted(re.findall(r"in place: (\d) (\w+)", done.stdout)) == [("0", "True")] * 4 + [("1", "True")] * 4
    # Each chunk leaves the store once for both ranks, and only what changed.
    for name in ("a", "few", "b"):
        read = [chunk for chunk in chunks if chunk[0].startswith(path_of(models[name]))]
        assert len(read) == len(set(read)) > 0, name
    assert 0 < bytes_of(chunks, models["few"]) < 0.09 * size_of(folders["few"])
    assert bytes_of(chunks, models["wide"]) == 0


class Server(EngineServer):
    """SGLang's HTTP server with two ranks, one of which can be made to die."""

    def __init__(self, python: Path, server: Any, model: str, where: Path) -> None:
        where.mkdir()
        script = where / "server.py"
        script.write_text(SERVER)
        options = {**OPTIONS, "tp_size": 2, "page_size": PAGE_TOKENS, "skip_server_warmup": True}
        given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not True]
        given += [f"--{name.replace('_', '-')}" for name, value in options.items() if value is True]
        command = [python, script, "--model-path", model, "--load-format", "private", "--skip-tokenizer-init", *given]
        super().__init__(command, variables_of(where, server), where / "log")

    def tokens(self) -> tuple[list[int], int]:
        """Return what the model writes after the prompt, and how much of the prompt was in the prefix cache."""
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, text = self.post("/generate", input_ids=PROMPT, sampling_params=sampling)
        assert status == 200, text
        found = json.loads(text)
        return found["output_ids"], found["meta_info"]["cached_tokens"]

    def update(self, uri: str, **more: Any) -> tuple[int, str]:
        return self.post("/update_weights_from_disk", model_path=uri, **more)

    def die_in(self, step: str, uri: str) -> tuple[int, str]:
        """Kill rank 1 in a step of an update. Return the answer of the server, which ends of it."""
        (self.log.parent / "die").write_text(step)
        status, text = self.update(uri)
        self.process.wait(150)  # it dumps stacks, and then waits 60 s for those of a GPU
        return status, text


def test_updates_over_http(
    python: Path, s3_server: Any, folders: dict[str, Path], models: dict[str, StoredModel], tmp_path: Path
) -> None:
    """SGLang ends all its processes when one of them dies, and its next start reads the revision that it names."""
    with CountingProxy(s3_server.endpoint_url) as proxy:
        first, next_start = (config_folder(models[name], proxy, tmp_path / name) for name in ("a", "b"))
        before = {name: tokens_of(folders[name], PROMPT) for name in ("a", "few", "b")}
        with contextlib.closing(Server(python, s3_server, first, tmp_path / "one")) as server:
            assert server.tokens() == (before["a"], 0)
            tokens, cached = server.tokens()
            assert tokens == before["a"]
            assert cached >= 2 * PAGE_TOKENS
            status, text = server.update(models["few"].uri)
            assert status == 200, text
            assert 0 < bytes_of(chunks_read(proxy), models["few"]) < 0.09 * size_of(folders["few"])
            assert server.tokens() == (before["few"], 0)
            status, text = server.update(models["wide"].uri)
            assert status == 400
            assert "differs in more than contents" in text
            tokens, cached = server.tokens()
            assert tokens == before["few"]
            assert cached >= 2 * PAGE_TOKENS
            # If nobody empties the cache, it has what the old weights made.
            assert server.update(models["a"].uri, flush_cache=False)[0] == 200
            _, cached = server.tokens()
            assert cached >= 2 * PAGE_TOKENS
            assert server.die_in("exchange", models["b"].uri)[0] != 200
        with contextlib.closing(Server(python, s3_server, next_start, tmp_path / "two")) as server:
            assert server.tokens() == (before["b"], 0)
            assert server.die_in("prepare", models["a"].uri)[0] != 200


def test_only_methods_that_pack_nothing_take_updates(python: Path) -> None:
    code = """
    import contextlib, importlib, inspect, pkgutil
    from types import SimpleNamespace

    from engines.resident_weights import ResidentWeights
    from engines.sglang import _MANAGER, REPEATABLE, _released, _unknown_packing
    from sglang.srt.layers import quantization
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase

    def below(kind):
        return {kind, *(each for made in kind.__subclasses__() for each in below(made))}

    for module in pkgutil.walk_packages(quantization.__path__, quantization.__name__ + "."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
    packing = {kind: type("Module", (), {"quant_method": object.__new__(kind)})
               for kind in below(QuantizeMethodBase) if not kind.__abstractmethods__}
    taken = [kind.__name__ for kind, module in packing.items() if not _unknown_packing(module())]
    assert sorted(taken) == sorted(REPEATABLE), taken
    assert len(packing) > 40, packing
    for mark in ("use_intel_amx_backend", "post_load_weights", "w_kc"):
        assert _unknown_packing(type("Module", (), {mark: True})()), mark

    # Memory of the weights that SGLang releases: their contents are not known afterwards.
    assert list(inspect.signature(pkgutil.resolve_name(_MANAGER).release_memory_occupation).parameters)[1:]
    manager = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model="model")))
    for tags, discards in ((None, True), ([], True), (["kv_cache"], False), (["kv_cache", "weights"], True)):
        noticed = []
        ResidentWeights.reloaded = noticed.append
        _released(manager, SimpleNamespace(tags=tags))
        assert noticed == ["model"] * discards, tags
    """
    run_code(python, code)


def run_code(python: Path, code: str) -> None:
    """Run a program in SGLang's environment."""
    done = subprocess.run(
        [python, "-c", textwrap.dedent(code)], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_drafts_and_pipeline_stages_take_no_updates(python: Path) -> None:
    code = """
    from types import SimpleNamespace

    import pytest
    import torch
    from cluster.errors import UpdateRefused
    from engines.resident_weights import ResidentWeights
    from engines.sglang import _begin, _update
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.distributed import parallel_state

    ResidentWeights.of = lambda model: None
    runner = SimpleNamespace(
        pp_group=SimpleNamespace(world_size=1), spec_algorithm=SimpleNamespace(is_none=lambda: False)
    )
    updater = SimpleNamespace(get_model=torch.nn.Module, get_model_runner=lambda: runner, model_config=None)
    with pytest.raises(UpdateRefused, match="draft models"), _begin(updater, "s3://models/new", 1):
        raise SystemExit("a draft model")
    runner.pp_group.world_size = 2
    taken, message = _update(None, updater, "s3://models/new", LoadFormat.PRIVATE)
    assert not taken and "one after the other" in message, message
    """
    run_code(python, code)


def test_hooks_are_for_methods_that_sglang_has(python: Path) -> None:
    """SGLang only logs a hook whose target it does not have."""
    code = """
    import pkgutil

    from engines.sglang import register
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = []
    HookRegistry.register = lambda target, *_: targets.append(target)
    register()
    assert len(targets) == len(set(targets)) == 6, targets
    for target in targets:
        assert callable(pkgutil.resolve_name(target)), target
    """
    run_code(python, code)


def test_weights_of_another_model_end_the_engine(
    python: Path, s3_server: Any, models: dict[str, StoredModel], tmp_path: Path
) -> None:
    with CountingProxy(s3_server.endpoint_url) as proxy:
        folder = Path(config_folder(models["a"], proxy, tmp_path / "config"))
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 128}))
        done = run(python, s3_server, tmp_path, str(EXAMPLE), str(folder), "--options", json.dumps(OPTIONS))
    assert "written:" not in done.stdout
    assert "has no place in the model, has another shape there" in done.stdout + done.stderr, said(done)
