"""Updates in place of resident models, on a real cluster and a real S3 server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import cluster
from actors.links import COORDINATOR, NAMESPACE
from cluster import client
from cluster.command_line.demo import write_llama_checkpoint
from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.changed_models import CHANGED, changed_copy
from tests.support.counting_proxy import CountingProxy
from tests.support.free_ports import free_ports
from tests.support.planned_models import llama_shapes
from tests.support.quantized_models import Grouped, named
from tests.support.ray_clusters import ENVIRONMENT, REPOSITORY, Longshore, eventually, scrape
from tests.support.stored_models import HEADS, KV_HEADS, StoredModel, is_exact, publish_to

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def next_llama(llama: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """The Llama with one other tensor, at a URI of its own."""
    folder = changed_copy(llama.folder, tmp_path_factory.mktemp("next") / "llama")
    return publish_to(llama.server, folder, "llama-next")


@pytest.fixture(scope="module")
def large(s3_server: EmbeddedS3, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """A Llama of 61 MB, so that few of its bytes are many chunks."""
    folder = tmp_path_factory.mktemp("large")
    shape = {"hidden": 1024, "layers": 2, "intermediate": 2816, "heads": HEADS, "kv_heads": KV_HEADS, "vocab": 4000}
    write_llama_checkpoint(folder, **shape, shards=2, seed=5)
    return publish_to(s3_server, folder, "large")


@pytest.fixture(scope="module")
def next_large(large: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """The same with 5 % of the bytes changed: the attention's inputs of the last layer."""
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    return publish_to(large.server, changed_copy(large.folder, tmp_path_factory.mktemp("next") / "l", names), "larger")


@pytest.fixture
def proxy(llama: StoredModel) -> Iterator[CountingProxy]:
    with CountingProxy(llama.server.endpoint_url) as counting:
        yield counting


def weights_read(proxy: CountingProxy) -> int:
    return sum(request.body_bytes for request in proxy.requests() if request.is_weights)


def addresses(shard: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in shard.values()]


def options_of(stored: StoredModel, **more: Any) -> dict[str, Any]:
    return {**stored.options, "device": "cpu", **more}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.cluster_settings(empty=True)
def test_only_what_changed_is_read(
    longshore: Longshore, large: StoredModel, next_large: StoredModel, proxy: CountingProxy, streaming: bool
) -> None:
    longshore.configure(empty=True)
    options = options_of(large, tensor_parallel_size=2, endpoint_url=proxy.endpoint_url)
    with cluster.load(large.uri, **options) as model:
        old_revision, before = model.revision, model.call(addresses)
        whole_bytes = weights_read(proxy)
        report = model.update(next_large.uri, streaming=streaming)
        read_bytes = weights_read(proxy) - whole_bytes
        assert is_exact(model, next_large)
        assert model.call(addresses) == before
        assert read_bytes == report.read_bytes == report.changed_bytes
        assert 0.05 * whole_bytes < read_bytes < 0.09 * whole_bytes  # 5.1 % changed, and lie in whole chunks
        assert (report.old_revision, report.revision) == (old_revision, model.revision)
        assert 3 <= report.changed_tensors <= 7  # also those that share a chunk with them
        assert report.ranks == ("exchanged", "exchanged")
        assert bool(report.staged_bytes) is not streaming
    longshore.assert_nothing_left()


@pytest.mark.cluster_settings(empty=True, cpu_ranks_per_node=2, peer_port=0)
def test_two_nodes_read_what_changed_once_together(
    longshore: Longshore, large: StoredModel, next_large: StoredModel, proxy: CountingProxy
) -> None:
    layout = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    with cluster.load(large.uri, **options_of(large, endpoint_url=proxy.endpoint_url, **layout)) as model:
        assert len(model.report.nodes) == 2
        whole_bytes = weights_read(proxy)
        report = model.update(next_large.uri)
        read_bytes = weights_read(proxy) - whole_bytes
        assert is_exact(model, next_large, replicas=2)
        assert read_bytes == report.read_bytes
        assert 0.05 * whole_bytes < read_bytes < 0.09 * whole_bytes
        assert report.bytes_by_source["peer"] == read_bytes  # what one node read, the other one was sent
        assert report.ranks == ("exchanged",) * 4
    longshore.assert_nothing_left()


def test_loads_attach_to_the_new_revision(longshore: Longshore, llama: StoredModel, next_llama: StoredModel) -> None:
    options = options_of(llama, tensor_parallel_size=2)
    with cluster.load(llama.uri, **options) as model:
        report = model.update(next_llama.uri)
        with cluster.load(next_llama.uri, **options) as again:
            assert again.model_id == model.model_id
            assert again.report.revision == report.revision
        with cluster.load(llama.uri, **options) as old:
            assert old.model_id != model.model_id
            assert (old.revision, is_exact(old, llama)) == (report.old_revision, True)
        back = asyncio.run(model.aupdate(llama.uri))
        assert is_exact(model, llama)
        assert back.read_bytes == 0  # the chunks are in the arena
        assert longshore.models()[0].update.startswith(model.model_id)
    longshore.assert_nothing_left()


def test_the_models_own_place_is_the_default(
    longshore: Longshore,
    llama: StoredModel,
    copy_of: Callable[[StoredModel], StoredModel],
    tmp_path: Path,
) -> None:
    stored = copy_of(llama)
    with cluster.load(stored.uri, **options_of(stored)) as model:
        nothing = model.update()
        assert (nothing.changed_tensors, nothing.read_bytes) == (0, 0)
        folder = changed_copy(llama.folder, tmp_path / "next")
        published = publish_to(llama.server, folder, stored.uri.removeprefix("s3://models/"))
        report = cluster.update(model.model_id)
        assert report.changed_tensors
        assert is_exact(model, published, 1)
        assert model.report.revision != report.revision == model.revision
    longshore.assert_nothing_left()


def test_the_example_of_the_page(longshore: Longshore, llama: StoredModel, next_llama: StoredModel) -> None:
    page = (REPOSITORY / "docs" / "update.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    code = code.replace('"s3://models/llama/step-1000", tensor_parallel_size=8', f'"{llama.uri}", **options')
    code = code.replace("s3://models/llama/step-2000", next_llama.uri)
    names: dict[str, Any] = {"cluster": cluster, "options": options_of(llama)}
    exec(code, names)
    assert is_exact(names["model"], next_llama, 1)
    assert "tensors" in str(names["report"])
    names["model"].release()
    longshore.assert_nothing_left()


def test_another_model_is_refused(longshore: Longshore, llama: StoredModel, odd: StoredModel) -> None:
    with cluster.load(llama.uri, **options_of(llama)) as model:
        with pytest.raises(cluster.UpdateRefused, match=r"differs in more than its contents.*is new"):
            model.update(odd.uri)
        assert is_exact(model, llama, 1)
        assert model.update().changed_tensors == 0
    longshore.assert_nothing_left()


def test_a_change_without_room_touches_nothing(
    longshore: Longshore,
    llama: StoredModel,
    next_llama: StoredModel,
    proxy: CountingProxy,
    request: pytest.FixtureRequest,
) -> None:
    """After the load another coordinator takes over, whose reserve no host has."""
    import ray

    with cluster.load(llama.uri, **options_of(llama, endpoint_url=proxy.endpoint_url)) as model:
        request.addfinalizer(longshore.end_longshore)
        ray.kill(ray.get_actor(COORDINATOR, namespace=NAMESPACE), no_restart=True)
        eventually(lambda: COORDINATOR not in longshore.actor_names(), "the coordinator is left")
        longshore.start(host_reserve_bytes=1 << 50)
        eventually(lambda: [each.progress.state for each in longshore.models()] == ["ready"], "the model is not found")
        read_bytes = weights_read(proxy)
        with pytest.raises(cluster.DoesNotFit, match=r"the update does not fit beside the model: .*host memory"):
            model.update(next_llama.uri, credentials=llama.options["credentials"])
        with pytest.raises(cluster.DoesNotFit, match="host memory"):
            model.scale(2)
        assert weights_read(proxy) == read_bytes
        assert is_exact(model, llama, 1)
        assert model.revision == model.report.revision
        model.update(next_llama.uri, credentials=llama.options["credentials"], streaming=True)  # stages nothing
        assert is_exact(model, next_llama, 1)


def test_the_command_line_and_the_metrics_of_updates(
    longshore: Longshore, llama: StoredModel, next_llama: StoredModel, odd: StoredModel
) -> None:
    longshore.configure(metrics_port=free_ports(1)[0])

    def update(model_id: str, uri: str) -> tuple[int, dict[str, Any]]:
        verb = [sys.executable, "-m", "longshore", "update", model_id, uri, "--json", "--address", longshore.address]
        environment = {**os.environ, **ENVIRONMENT}
        done = subprocess.run(verb, cwd=REPOSITORY, env=environment, capture_output=True, timeout=120, check=False)
        return done.returncode, json.loads(done.stdout)

    with cluster.load(llama.uri, **options_of(llama)) as model:
        code, report = update(model.model_id, next_llama.uri)
        assert (code, report["revision"], report["ranks"]) == (0, model.revision, ["exchanged"])
        assert 0 < report["changed_bytes"] < model.report.model_bytes
        assert is_exact(model, next_llama, 1)
        code, refused = update(model.model_id, odd.uri)
        assert (code, refused["error"]["type"]) == (3, "UpdateRefused"), refused
        events = client.events(model.model_id, address=longshore.address)
        done, failed = (e.details for e in events if e.kind == "update" and e.details)
        assert (done["state"], done["revision"]) == ("done", report["revision"])
        assert (failed["state"], failed["error"]) == ("failed", "UpdateRefused")
        assert longshore.status().models[0].updating is None
        url = longshore.status().metrics_url
        finished = "longshore_updates_finished_total"
        counted = {(finished, "llama-next", "done"): 1, (finished, "llama-next", "failed"): 1}
        counted |= {(finished, "llama-next", "broken"): 0}
        counted[("longshore_update_changed_bytes_total", "llama-next")] = report["changed_bytes"]
        eventually(lambda: counted.items() <= scrape(url).items(), lambda: f"{counted}: {scrape(url)}", 30)
    longshore.assert_nothing_left()


@pytest.fixture
def gptq(s3_server: EmbeddedS3, tmp_path: Path) -> list[StoredModel]:
    """Two revisions of a GPTQ checkpoint that differ in one module."""
    kind, revisions = Grouped(4, 64), []
    said = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
    config = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    for revision in range(2):
        folder = tmp_path / f"gptq-{revision}"
        folder.mkdir()
        arrays = {}
        for number, (name, shape) in enumerate(llama_shapes(2, 512, 1024, 8, 2, 512).items()):
            if name.endswith("_proj.weight"):
                seed = number + 100 * (revision if name == CHANGED else 0)
                parts = named(kind.gptq(*shape, seed=seed), name.removesuffix("weight"))
                arrays.update({each: array for each, (_, array) in parts.items()})
            else:
                arrays[name] = np.full(shape, number, np.float16)
        save_file(arrays, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
        revisions.append(publish_to(s3_server, folder, f"gptq-{revision}"))
    return revisions


def test_a_quantized_checkpoint_is_updated(longshore: Longshore, gptq: list[StoredModel]) -> None:
    old, new = gptq
    check_update(longshore, old, new, {"qweight", "qzeros", "scales"})


def tied_head(shard: Any) -> tuple[bool, bool]:
    """Fill a module whose head is its embedding, once in a process.

    Return whether both still are the shard's one tensor, and whether the module was filled just now.
    """
    import sys

    import torch

    rows, module, is_new = shard["model.embed_tokens.weight"], getattr(sys, "tied_head", None), False
    if module is None:
        is_new = True
        with torch.device("meta"):
            module = torch.nn.Module()
            module.model = torch.nn.Module()
            module.model.embed_tokens = torch.nn.Embedding(*rows.shape, dtype=rows.dtype)
            module.lm_head = torch.nn.Linear(*reversed(rows.shape), bias=False, dtype=rows.dtype)
            module.lm_head.weight = module.model.embed_tokens.weight
        shard.into(module, strict=False)
        sys.tied_head = module
    head, embedding = module.lm_head.weight, module.model.embed_tokens.weight
    return head is embedding and head.data_ptr() == rows.data_ptr(), is_new


def test_tied_weights_stay_tied_and_are_read_once(longshore: Longshore, s3_server: EmbeddedS3, tmp_path: Path) -> None:
    """Both stages of a pipeline have the embedding: the last one as its head."""
    name, shape = "model.embed_tokens.weight", {"hidden": 512, "layers": 2, "intermediate": 1408, "vocab": 4000}
    write_llama_checkpoint(
        tmp_path / "old", **shape, heads=HEADS, kv_heads=KV_HEADS, shards=1, seed=3, tie_word_embeddings=True
    )
    old = publish_to(s3_server, tmp_path / "old", "tied")
    new = publish_to(s3_server, changed_copy(old.folder, tmp_path / "new", [name]), "tied-next")
    with CountingProxy(s3_server.endpoint_url) as proxy:
        options = options_of(old, pipeline_parallel_size=2, endpoint_url=proxy.endpoint_url)
        with cluster.load(old.uri, **options) as model:
            assert model.call(tied_head) == [(True, True)] * 2
            before, whole_bytes = model.call(digests), weights_read(proxy)
            report = model.update(new.uri)
            assert weights_read(proxy) - whole_bytes == report.read_bytes == report.changed_bytes
            assert 512 * 4000 * 2 <= report.read_bytes <= 512 * 4000 * 2 + (2 << 20)  # it lies in whole chunks
            assert model.call(tied_head) == [(True, False)] * 2
            (first, last), after = before, model.call(digests)
            assert first[name] == last[name] != after[0][name] == after[1][name]
        with cluster.load(new.uri, **options) as model:
            assert model.call(digests) == after
    longshore.assert_nothing_left()


def slow_sum(shard: Any, seconds: float) -> bool:
    import time

    import torch

    tensor = shard["model.layers.1.mlp.up_proj.weight"]
    first = tensor.clone()
    time.sleep(seconds)
    return bool(torch.equal(first.view(torch.uint8), tensor.view(torch.uint8)))


def test_a_call_sees_one_revision(longshore: Longshore, llama: StoredModel, next_llama: StoredModel) -> None:
    with ThreadPoolExecutor(1) as pool, cluster.load(llama.uri, **options_of(llama)) as model:
        running = pool.submit(model.call, slow_sum, 4.0)
        eventually(lambda: running.running(), "the call does not begin")
        model.update(next_llama.uri)
        assert running.done()  # the exchange waited for it
        assert running.result() == [True]
        assert is_exact(model, next_llama, 1)
    longshore.assert_nothing_left()


@pytest.mark.parametrize(
    ("how", "changed"),
    [
        ({"dtype": "float32"}, "weight"),
        ({"quantization": "int8"}, "weight_packed"),
        ({"quantization": "fp8_tensor"}, "weight"),
    ],
)
def test_conversions_are_made_anew(
    longshore: Longshore, llama: StoredModel, next_llama: StoredModel, how: dict[str, str], changed: str
) -> None:
    check_update(longshore, llama, next_llama, {changed}, **how)


def check_update(longshore: Longshore, old: StoredModel, new: StoredModel, changed: set[str], **how: str) -> None:
    """Check that an update gives two ranks what a load of the new revision gives them.

    `changed`: last parts of the names under the changed module whose contents must differ.
    """
    options = options_of(old, tensor_parallel_size=2, **how)
    with cluster.load(old.uri, **options) as model:
        before = model.call(digests)
        report = model.update(new.uri)
        assert len(changed) <= report.changed_tensors < report.tensors
        updated = model.call(digests)
    with cluster.load(new.uri, **options) as model:
        assert model.revision == report.revision
        assert model.call(digests) == updated
    names = {CHANGED.removesuffix("weight") + end for end in changed}
    for was, now in zip(before, updated, strict=True):
        assert names <= {name for name in was if was[name] != now[name]}
    longshore.assert_nothing_left()


def digests(shard: Any) -> dict[str, str]:
    import hashlib

    import torch

    flat = {name: tensor.contiguous().reshape(-1).view(torch.uint8) for name, tensor in shard.items()}
    return {name: hashlib.sha256(data.numpy()).hexdigest() for name, data in flat.items()}
