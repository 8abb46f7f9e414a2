"""Updates in place of resident models, on a real cluster and a real S3 server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cluster
from tests.support.changed_models import changed_copy
from tests.support.counting_proxy import CountingProxy
from tests.support.ray_clusters import REPOSITORY, Longshore, eventually
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel, publish_to

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def next_llama(llama: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """The Llama with one other tensor, at a URI of its own."""
    folder = changed_copy(llama.folder, tmp_path_factory.mktemp("next") / "llama")
    return publish_to(llama.server, folder, "llama-next")


@pytest.fixture
def proxy(llama: StoredModel) -> Iterator[CountingProxy]:
    with CountingProxy(llama.server.endpoint_url) as counting:
        yield counting


def weights_read(proxy: CountingProxy) -> int:
    return sum(request.body_bytes for request in proxy.requests() if request.is_weights)


def is_exact(model: Any, stored: StoredModel, ranks: int = 2) -> bool:
    return bool(model.call(shard_differs, str(stored.folder), ranks, 1, KV_HEADS) == [[]] * ranks)


def addresses(shard: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in shard.values()]


def options_of(stored: StoredModel, **more: Any) -> dict[str, Any]:
    return {**stored.options, "device": "cpu", **more}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.cluster_settings(empty=True)
def test_only_what_changed_is_read(
    longshore: Longshore, llama: StoredModel, next_llama: StoredModel, proxy: CountingProxy, streaming: bool
) -> None:
    longshore.configure(empty=True)
    options = options_of(llama, tensor_parallel_size=2, endpoint_url=proxy.endpoint_url)
    with cluster.load(llama.uri, **options) as model:
        old_revision, before = model.revision, model.call(addresses)
        whole_bytes = weights_read(proxy)
        report = model.update(next_llama.uri, streaming=streaming)
        read_bytes = weights_read(proxy) - whole_bytes
        assert is_exact(model, next_llama)
        assert model.call(addresses) == before
        assert read_bytes == report.read_bytes == report.changed_bytes
        assert 0 < read_bytes < 0.35 * whole_bytes  # the tensor has 7 %, and lies in chunks of 5 %
        assert (report.old_revision, report.revision) == (old_revision, model.revision)
        assert report.changed_tensors <= 4
        assert report.ranks == ("exchanged", "exchanged")
        assert bool(report.staged_bytes) is not streaming
        again = cluster.load(next_llama.uri, **options)
        assert again.model_id == model.model_id
        assert again.report.revision == report.revision
        again.release()
        back = model.update(llama.uri)
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


@pytest.mark.parametrize("how", [{"dtype": "float32"}, {"quantization": "int8"}, {"quantization": "fp8_tensor"}])
def test_conversions_are_made_anew(
    longshore: Longshore, llama: StoredModel, next_llama: StoredModel, how: dict[str, str]
) -> None:
    options = options_of(llama, tensor_parallel_size=2, **how)
    with cluster.load(llama.uri, **options) as model:
        report = model.update(next_llama.uri)
        assert 0 < report.changed_tensors < 6
        updated = [model.state_dict(rank) for rank in range(2)]
    with cluster.load(next_llama.uri, **options) as model:
        loaded = [model.state_dict(rank) for rank in range(2)]
    import torch

    for mine, wanted in zip(updated, loaded, strict=True):
        assert mine.keys() == wanted.keys()
        assert all(torch.equal(mine[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in mine)
    longshore.assert_nothing_left()
