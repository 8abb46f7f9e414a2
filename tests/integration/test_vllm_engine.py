"""vLLM on the CPU with the load format "longshore": the tokens of transformers, or of vLLM's own loader, and each byte
read once.

Alone, and in a replica of Ray Serve LLM.

vLLM runs in an environment of its own (`tests/engine_environments/make.sh vllm`), which the first test makes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import textwrap
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import cluster
from cluster import client
from cluster.joining.connection import disconnect
from cluster.small_files import SOURCE_KEY
from tests.support.counting_proxy import CountingProxy
from tests.support.engines import REPOSITORY, bytes_read, chunks_read, config_folder, python_of, tokens_of, variables_of
from tests.support.free_ports import free_ports
from tests.support.hf_models import make_tiny
from tests.support.quantized_models import Grouped
from tests.support.ray_clusters import ENVIRONMENT, OBJECT_STORE_BYTES, environment, new_ray_cluster, variables
from tests.support.reference_quantized import quantized
from tests.support.stored_models import StoredModel, publish_to

pytestmark = [pytest.mark.slow, pytest.mark.long]

# Heads of 64, as vLLM's attention for processors wants.
HEADS = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 64}
MODELS = {
    "llama": {},
    "qwen3_moe": {"num_key_value_heads": 2},
    "phi3": {},  # q, k and v in one, gate and up in one
}
# Arguments of vLLM that divide a model over two workers
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
EXPERTS = {**TENSOR, "enable_expert_parallel": True}
SETTINGS = {"arena_bytes": 256 << 20, "window_bytes": 128 << 20}
OPTIONS = {"enforce_eager": True, "max_model_len": 64, "dtype": "float32", "kv_cache_memory_bytes": 64 << 20}


class Engine:
    """Runs the example with models of a store."""

    def __init__(self, python: Path, folder: Path, variables: Mapping[str, str]) -> None:
        self.python, self.folder = python, folder
        self.variables = {**variables_of(folder), **variables}

    def start(
        self, model: str | Path, more: Mapping[str, Any] = {}, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """`more`: further arguments of vLLM."""
        options = json.dumps({**OPTIONS, "load_format": "longshore", **more})
        said = ("--tokens", "1", "5", "7", "9", "--count", "8", "--options", options)
        return subprocess.run(
            [self.python, REPOSITORY / "examples/vllm_generate.py", str(model), *said],
            env={**os.environ, **self.variables, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def tokens(self, model: str | Path, more: Mapping[str, Any] = {}, **variables: str) -> list[int]:
        """The tokens that the model writes. Afterwards `read_bytes` has what each load has read, as the log says."""
        done = self.start(model, more, **variables)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        found = re.search(r"^written: (.*)$", done.stdout, re.MULTILINE)
        assert found is not None, done.stdout[-3000:]
        self.read_bytes = bytes_read(done)
        return [int(token) for token in found[1].split()]

    def answers(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what `tests.support.vllm_tokens` says to these jobs."""
        done = subprocess.run(
            [self.python, "-m", "tests.support.vllm_tokens", json.dumps(jobs)],
            env={**os.environ, **self.variables},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        found = [json.loads(text) for text in re.findall(r"^answer: (.*)$", done.stdout, re.MULTILINE)]
        assert len(found) == len(jobs), done.stdout[-3000:] + done.stderr[-6000:]
        return found


def engine_of(name: str, folder: Path, server: Any) -> Engine:
    keys = server.credentials()
    variables = {"AWS_ACCESS_KEY_ID": keys.access_key_id, "AWS_SECRET_ACCESS_KEY": keys.secret_access_key}
    return Engine(python_of(name), folder, variables)


@pytest.fixture
def engine(tmp_path: Path, s3_server: Any) -> Engine:
    return engine_of("vllm", tmp_path, s3_server)


def stored(server: Any, folder: Path, family: str, **more: int) -> StoredModel:
    """Publish a tiny model of the family. `more`: of its config."""
    sizes = {**HEADS, **MODELS[family], **more}
    make_tiny(
        family, **{name: size for name, size in sizes.items() if family != "phi3" or name != "head_dim"}
    ).save_pretrained(folder, max_shard_size=1_000_000)
    return publish_to(server, folder, f"vllm-{folder.name}-{os.getpid()}")


def check_tokens(engine: Engine, server: Any, folder: Path, family: str, split: Mapping[str, Any]) -> None:
    """Compare with transformers, and count what the store is asked for."""
    model, ranks = stored(server, folder / family, family), 2 if split else 1
    with CountingProxy(server.endpoint_url) as proxy:
        store = {"AWS_ENDPOINT_URL": proxy.endpoint_url, "AWS_DEFAULT_REGION": server.region}
        ours = engine.tokens(model.uri, split, **store)
        weights = chunks_read(proxy)
    assert len(weights) == len(set(weights)) > 0  # each chunk once, whatever the number of ranks
    model_bytes = sum(path.stat().st_size for path in model.folder.glob("*.safetensors"))
    assert len(engine.read_bytes) == ranks
    assert model_bytes * 0.9 < sum(engine.read_bytes) <= model_bytes * 1.1  # norms are read by every rank
    assert max(engine.read_bytes) <= model_bytes * (1 if ranks == 1 else 0.55)
    assert ours == tokens_of(folder / family)


@pytest.mark.parametrize(
    ("family", "split"),
    [("llama", {}), ("phi3", TENSOR), ("qwen3_moe", TENSOR)],
    ids=["alone", "fused-weights-tensor", "experts-tensor"],
)
def test_tokens_are_those_of_transformers(
    engine: Engine, s3_server: Any, tmp_path: Path, family: str, split: dict[str, Any]
) -> None:
    check_tokens(engine, s3_server, tmp_path, family, split)


@pytest.mark.parametrize(
    ("family", "split"), [("llama", PIPELINE), ("qwen3_moe", EXPERTS)], ids=["pipeline", "experts"]
)
def test_stages_and_experts_are_read_once(
    engine: Engine, s3_server: Any, tmp_path: Path, family: str, split: dict[str, Any]
) -> None:
    """vLLM 0.32 cannot run them on processors: whoever loads, the engine ends at the first token."""
    model = stored(s3_server, tmp_path / family, family)
    with CountingProxy(s3_server.endpoint_url) as proxy:
        store = {"AWS_ENDPOINT_URL": proxy.endpoint_url, "AWS_DEFAULT_REGION": s3_server.region}
        read = bytes_read(engine.start(model.uri, split, **store))
        weights = chunks_read(proxy)
    assert len(weights) == len(set(weights)) > 0
    model_bytes = sum(path.stat().st_size for path in model.folder.glob("*.safetensors"))
    assert len(read) == 2
    assert max(read) <= model_bytes * 0.6
    assert model_bytes * 0.9 < sum(read) <= model_bytes * 1.1


def test_a_draft_model_is_loaded_from_where_its_folder_says(engine: Engine, s3_server: Any, tmp_path: Path) -> None:
    """Each chunk of both models is read once by each engine at most, and the tokens are those of the target.

    The extra config says where the second engine's target is, and nothing about the draft.
    """
    target = stored(s3_server, tmp_path / "llama", "llama")
    draft = stored(s3_server, tmp_path / "draft", "llama", num_hidden_layers=1)
    with CountingProxy(s3_server.endpoint_url) as proxy:
        own, ours = both_ways(target.folder, config_folder(target, proxy, tmp_path / "config"))
        small = config_folder(draft, proxy, tmp_path / "config-draft")
        speculative = {"method": "draft_model", "model": small, "num_speculative_tokens": 2}
        bare = Path(config_folder(target, proxy, tmp_path / "config-bare"))
        told = json.loads((bare / SOURCE_KEY).read_text())
        (bare / SOURCE_KEY).unlink()
        extra = {"model_uri": target.uri, "revision": told["revision"], **told["options"]}
        jobs = [ours, {**ours, "model": str(bare), "model_loader_extra_config": extra}]
        found = engine.answers([own, *({**job, "speculative_config": speculative} for job in jobs)])
        weights = Counter(chunks_read(proxy))
    assert "tokens" in found[0]
    assert found[1] == found[2] == found[0]
    assert max(weights.values()) <= 2
    assert len({path for path, _ in weights}) == sum(len(list(m.folder.glob("*.safetensors"))) for m in (target, draft))


def test_the_agent_of_a_ray_cluster_is_the_host(engine: Engine, s3_server: Any, tmp_path: Path) -> None:
    """An agent runs on the machine already, and vLLM's workers, outside of Ray, read through it."""
    import ray

    small = stored(s3_server, tmp_path / "phi3", "phi3")
    node = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "env_vars": variables(SETTINGS)}
    temporary = tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp", ignore_cleanup_errors=True)
    with ExitStack() as stack:
        place = stack.enter_context(temporary)  # a short path, as the agent's socket needs it
        engine.variables["XDG_RUNTIME_DIR"] = place
        stack.enter_context(environment({**ENVIRONMENT, "XDG_RUNTIME_DIR": place}))
        there = stack.enter_context(new_ray_cluster(**node, temp_dir=place))
        ray.init(address=there.address, log_to_driver=False, configure_logging=False)
        stack.callback(ray.shutdown)
        stack.callback(disconnect)
        with cluster.load(small.uri, device="cpu", address=there.address, **small.options):  # no idle agent ends
            check_tokens(engine, s3_server, tmp_path, "llama", TENSOR)
        assert not list(Path(place, "longshore").glob("host.*")), "another process became the host"
        client.shutdown(there.address)


def test_the_oldest_vllm(s3_server: Any, tmp_path: Path) -> None:
    check_tokens(engine_of("vllm-oldest", tmp_path, s3_server), s3_server, tmp_path, "llama", TENSOR)


def compressed(layout: str, bits: int, kind: str, strategy: str, *, activations: bool) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    numbers = {"num_bits": bits, "type": kind, "symmetric": True}
    weights = {**numbers, "strategy": strategy, "group_size": 128 if strategy == "group" else None}
    by_token = {**numbers, "strategy": "tensor" if strategy == "tensor" else "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": by_token if activations else None}
    common = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**common, "format": layout, "config_groups": {"group_0": group}}


# First column of the table in docs/vllm.md -> how the checkpoint is quantized
QUANTIZED: dict[str, dict[str, Any]] = {
    "GPTQ, 4 bits": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True},
    "AWQ, 4 bits": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "compressed-tensors, int8": compressed("int-quantized", 8, "int", "channel", activations=True),
    "compressed-tensors, int4": compressed("pack-quantized", 4, "int", "group", activations=False),
    "compressed-tensors, fp8": compressed("float-quantized", 8, "float", "channel", activations=True),
    "compressed-tensors, fp8, a scale per tensor": compressed(
        "float-quantized", 8, "float", "tensor", activations=True
    ),
}
SAME_TOKENS = "the same tokens"


def write_quantized(folder: Path, how: dict[str, Any]) -> None:
    """Write a small Llama whose linear layers are quantized so. GPTQ's and AWQ's have random numbers."""
    import torch
    from safetensors.torch import load_file, save_file

    make_tiny("llama", **HEADS).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for number, name in enumerate([name for name in sorted(tensors) if "proj" in name]):
        weight, module = tensors.pop(name), name.removesuffix(".weight")
        if how["quant_method"] in ("gptq", "awq"):
            packed = getattr(Grouped(4, how["group_size"]), how["quant_method"])(*weight.shape, number)
            tensors |= {f"{module}.{field}": torch.from_numpy(array.copy()) for field, (_, array) in packed.items()}
        else:
            weights = how["config_groups"]["group_0"]["weights"]
            kind = "fp8" if weights["type"] == "float" else f"int{weights['num_bits']}"
            made = quantized(weight, f"{kind}_tensor" if weights["strategy"] == "tensor" else kind)
            if kind == "int8":  # a byte for each, and not packed
                made = {"": (weight.float() / made["_scale"]).round().to(torch.int8), "_scale": made["_scale"].float()}
            tensors |= {f"{name}{field}": tensor for field, tensor in made.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": how}))


def quantized_rows() -> dict[str, str]:
    """Return the table of quantized checkpoints in docs/vllm.md: first column -> second."""
    text = (REPOSITORY / "docs/vllm.md").read_text()
    table = text.partition("| quantized as | vLLM on a CPU |\n|---|---|\n")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE))


def test_quantized_checkpoints_as_the_table_says(engine: Engine, s3_server: Any, tmp_path: Path) -> None:
    """Those that vLLM takes give the tokens of vLLM's own loader. For others it has no kernel, whoever loads.

    vLLM repacks them, and experts. So they refuse an update, and have the tokens of before.
    """
    rows, jobs = quantized_rows(), []
    assert rows.keys() == QUANTIZED.keys()
    with CountingProxy(s3_server.endpoint_url) as proxy:
        for number, how in enumerate([*QUANTIZED.values(), None]):
            folder = tmp_path / f"quantized-{number}"
            if how is None:
                model = stored(s3_server, folder, "qwen3_moe")
            else:
                write_quantized(folder, how)
                model = publish_to(s3_server, folder, f"vllm-quantized-{number}-{os.getpid()}")
            own, ours = both_ways(folder, config_folder(model, proxy, tmp_path / f"config-{number}"))
            jobs += [own, {**ours, "weight_transfer_config": {"backend": "longshore"}, "update": model.uri}]
        found = engine.answers(jobs)
    for (name, row), own, ours in zip([*rows.items(), ("experts", SAME_TOKENS)], found[::2], found[1::2], strict=True):
        refused = ours.pop("refused", "")
        assert ours == own, name
        assert "tokens" in ours or row != SAME_TOKENS, (name, ours)
        assert "in a way that is not known" in refused or "tokens" not in ours, (name, refused)


def test_weights_are_loaded_again(engine: Engine, s3_server: Any, tmp_path: Path) -> None:
    """vLLM's `reload_weights` asks the loader for all weights, while the engine runs."""
    model = stored(s3_server, tmp_path / "llama", "llama")
    with CountingProxy(s3_server.endpoint_url) as proxy:
        own, ours = both_ways(model.folder, config_folder(model, proxy, tmp_path / "config"))
        found = engine.answers([own, {**ours, "reload": True}])
        read = Counter(chunks_read(proxy))
    assert "tokens" in found[0]
    assert found[1] == found[0]
    assert max(read.values()) <= 2  # though vLLM copies each weight twice when it loads again: it rehearses


def both_ways(folder: Path, of_store: str) -> list[dict[str, Any]]:
    """Return jobs for `Engine.answers`: vLLM's own loader on the folder, ours on a folder of `config_folder`."""
    places = {"auto": str(folder), "longshore": of_store}
    return [{**OPTIONS, "model": place, "load_format": name} for name, place in places.items()]


def test_an_lm_head_of_its_own_is_used_though_the_config_ties_it(
    engine: Engine, s3_server: Any, tmp_path: Path
) -> None:
    """vLLM finds it in the headers of the weights."""
    folder = tmp_path / "llama"
    make_tiny("llama", **HEADS).save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    model = publish_to(s3_server, folder, f"vllm-head-{os.getpid()}")
    with CountingProxy(s3_server.endpoint_url) as proxy:
        own, ours = both_ways(folder, config_folder(model, proxy, tmp_path / "config"))
        found = engine.answers([own, ours])
    assert "tokens" in found[0]
    assert found[1] == found[0]


def test_weights_in_a_second_place(engine: Engine, tmp_path: Path) -> None:
    code = """
        import sys
        from cluster.errors import ConfigError
        from cluster.small_files import ModelSource
        from engines.vllm import secondary_source
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        folder, first = sys.argv[1], ModelSource("s3://models/a", "5f", {"region": "x", "signed_name": "a"})

        def found(place, *patterns, **more):
            other = DefaultModelLoader.Source(place, None, allow_patterns_overrides=list(patterns) or None, **more)
            return secondary_source(other, folder, first)

        beside = ModelSource("s3://models/a/joint.safetensors", "", {"region": "x", "signed_name": "a"})
        assert found(folder, "joint.safetensors") == beside
        assert found(folder, subfolder="audio") == ModelSource("s3://models/a/audio", "", {"region": "x"})
        assert found("openai/whisper") is None
        try:
            found(folder, "head.pt")
        except ConfigError as error:
            assert "head.pt" in str(error)
        else:
            raise AssertionError
        open(f"{folder}/head.pt", "w").close()
        assert found(folder, "head.pt") is None
    """
    done = subprocess.run(
        [engine.python, "-c", textwrap.dedent(code), tmp_path],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_where_the_weights_of_a_folder_are(engine: Engine, tmp_path: Path) -> None:
    code = """
        import json, sys
        from pathlib import Path
        from cluster.errors import ConfigError
        from cluster.small_files import ModelSource
        from engines.filling import source_of

        silent, made, own = (Path(sys.argv[1], name) for name in ("silent", "made", "own"))
        for folder in (silent, made, own):
            folder.mkdir()
        told = {"model_uri": "s3://models/a", "revision": "5f", "options": {"region": "x"}}
        (made / "longshore.json").write_text(json.dumps(told))
        (own / "model.safetensors").touch()
        target = {"model_uri": "s3://models/b", "region": "y"}
        assert source_of(str(silent), target) == ModelSource("s3://models/b", "", {"region": "y"})
        same = {"model_uri": "s3://models/a", "region": "y"}
        for extra, region in (({}, "x"), (same, "y"), ({"region": "y"}, "y")):
            assert source_of(str(made), extra) == ModelSource("s3://models/a", "5f", {"region": region})
        assert source_of(str(own), {}) == ModelSource(str(own), "", {})
        wrong = (silent, {"region": "y"}), (made, {"colour": "red"}), (made, target), (own, target)
        for folder, extra in wrong:
            try:
                source_of(str(folder), extra)
            except ConfigError:
                continue
            raise AssertionError(extra)
    """
    command = [engine.python, "-c", textwrap.dedent(code), tmp_path]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def write_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer whose tokens are t0, t1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t0")
    made.save_pretrained(folder)


def test_a_completion_of_ray_serve_llm(engine: Engine, s3_server: Any, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    write_tokenizer(folder, 96)
    model = stored(s3_server, folder, "llama")
    (port,) = free_ports(1)
    with CountingProxy(s3_server.endpoint_url) as proxy:
        variables = {
            "AWS_ENDPOINT_URL": proxy.endpoint_url,
            "AWS_DEFAULT_REGION": s3_server.region,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAYLLM_ENABLE_WORKER_PROCESS_SETUP_HOOK": "0",
            "HF_HOME": str(tmp_path / "hub"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        options = ["--options", json.dumps(OPTIONS), "--name", "tiny", "--port", str(port), "--cpus", "6"]
        with open(tmp_path / "log", "wb") as log:
            served = subprocess.Popen(
                [engine.python, REPOSITORY / "examples/ray_serve_llm.py", model.uri, *options],
                env={**os.environ, **engine.variables, **variables},
                cwd=tmp_path,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            body = {"model": "tiny", "prompt": [1, 5, 7, 9], "max_tokens": 8, "temperature": 0}
            more = {"ignore_eos": True, "return_token_ids": True}
            answer = completion(f"http://127.0.0.1:{port}/v1/completions", {**body, **more}, served, tmp_path / "log")
        finally:
            served.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                served.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(served.pid, signal.SIGKILL)
        weights = chunks_read(proxy)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == tokens_of(folder)
    assert choice["text"].split() == [f"t{token}" for token in choice["token_ids"]]
    assert len(weights) == len(set(weights)) > 0
    assert not list(tmp_path.glob("hub/**/*.safetensors"))


def completion(url: str, body: dict[str, Any], served: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """Ask until the service answers."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    give_up_s = time.monotonic() + 500
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError as error:
            ended = served.poll() is not None or time.monotonic() > give_up_s
            if ended:
                raise AssertionError(log.read_text(errors="replace")[-8000:]) from error
        time.sleep(1)


def test_what_does_not_match_is_refused_by_name(engine: Engine, s3_server: Any, tmp_path: Path) -> None:
    """Configs of other models, a model that is not there, and one that nobody signed."""
    model, wrong, jobs = stored(s3_server, tmp_path / "llama", "llama"), [], []
    key = cluster.generate_key(tmp_path / "key").public_path
    with CountingProxy(s3_server.endpoint_url) as proxy:
        store = {"endpoint_url": proxy.endpoint_url, "region": s3_server.region}
        for number, (change, extra, said) in enumerate(
            [
                ({"num_hidden_layers": 3}, {}, "parameters got no weights: 'model.layers.2."),
                ({"num_hidden_layers": 1}, {}, "'model.layers.1."),
                ({"intermediate_size": 512}, {}, "'model.layers.0.mlp."),
                ({}, {"model_uri": "s3://models/nothing", **store}, "s3://models/nothing"),
                ({}, {"model_uri": model.uri, "trusted_keys": [str(key)], **store}, "sign"),
            ]
        ):
            folder = config_folder(model, proxy, tmp_path / f"config-{number}")
            path = Path(folder, "config.json")
            path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
            if extra:  # counts for folders that do not say where the weights are
                Path(folder, "longshore.json").unlink()
            jobs.append({**OPTIONS, "model": folder, "load_format": "longshore", "model_loader_extra_config": extra})
            wrong.append(said)
        found = engine.answers(jobs)
    for answer, said in zip(found, wrong, strict=True):
        assert said in answer.get("error", ""), answer


def test_other_versions_log_a_warning(engine: Engine) -> None:
    code = """
        import logging
        from engines.vllm import TESTED, warn_of_version
        logging.basicConfig(format="%(message)s")
        for version in ("0.28.9", "0.29.0", "0.32.4", "0.33", "1.0.0rc1", "dev"):
            warn_of_version("vLLM", version, TESTED, logging.getLogger())
    """
    command = [engine.python, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    said = re.findall(r"vLLM (\S+) was not tested with Longshore; 0\.29 and 0\.32 were", done.stderr + done.stdout)
    assert said == ["0.28.9", "0.33", "1.0.0rc1"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_of_a_load_have_every_core_of_their_worker(engine: Engine) -> None:
    """vLLM binds the main thread to one core, and what it starts inherits that."""
    code = """
        import os
        import threading
        from engines.vllm import every_core

        first, second, *others = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {first})
        found = []
        for variables in (
            {"GOMP_CPU_AFFINITY": f"{first} {second}"},
            {"GOMP_CPU_AFFINITY": f"{first}-{second}:{second - first}"},
            {"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{first},{second}]"},
            {"GOMP_CPU_AFFINITY": f"{first}"},
            {"KMP_AFFINITY": "compact,1,0"},
            {},
        ):
            with every_core(variables):
                thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
                thread.start()
                thread.join()
            assert os.sched_getaffinity(0) == {first}
        assert found == [{first, second}] * 3 + [{first}] * 3
    """
    command = [engine.python, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_folder_without_weights_or_source_is_an_error(engine: Engine, tmp_path: Path) -> None:
    make_tiny("llama", **HEADS).config.save_pretrained(tmp_path / "bare")
    done = engine.start(tmp_path / "bare")
    assert done.returncode != 0
    assert "longshore config-folder URI" in done.stdout + done.stderr
