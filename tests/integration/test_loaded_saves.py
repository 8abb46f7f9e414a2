"""A loaded model saves itself from its ranks: the same bytes whatever the layout, quantized ones too."""

from __future__ import annotations

import json
import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cluster
from actors.saving.save import SaveReport
from cluster import client
from cluster.layouts.mesh import Layout
from cluster.precision.recipes import Precision
from tests.support.changed_models import changed_copy
from tests.support.gloo_ranks import run_ranks
from tests.support.planned_models import llama_shapes
from tests.support.ray_clusters import Longshore, eventually, scrape
from tests.support.reference_quantized import quantized
from tests.support.shards import shards_of

pytestmark = pytest.mark.slow

CHUNK_BYTES = 1 << 20  # as large as the slots of the clusters here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows two ranks can share in groups of 128, and a tokenizer."""
    made = tmp_path_factory.mktemp("llama")
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in llama_shapes(2, 256, 512, 4, 2, 61).items()
    }
    save_file(weights, made / "model.safetensors")
    (made / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}'
    )
    (made / "tokenizer.json").write_text("{}")
    return made


@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel_size": 2}, {"fsdp_size": 2, "pipeline_parallel_size": 2}, {"data_parallel_size": 2}],
    ids=lambda layout: "+".join(layout),
)
def test_any_layout_saves_the_bytes_of_its_source(folder: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    uri = tmp_path / "m"
    ranks = math.prod(layout.values())
    (first, second), *_ = run_ranks(
        ranks, "tests.support.saving_ranks:save_shards", str(folder), str(uri), layout=layout
    )  # fmt: skip
    expected = load_file(folder / "model.safetensors")
    found = {name: t for file in uri.glob(f"model-{second['save_id']}-*") for name, t in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert cluster.verify(str(uri), progress=False).ok
    assert first["written_bytes"] == first["size_bytes"], "replicas are written once"
    assert second["copied_bytes"] == second["size_bytes"]


def test_ranks_of_two_revisions_refuse_to_save(folder: Path, tmp_path: Path) -> None:
    """Every rank says so, and nothing is written: neither of the ranks nor of the files another revision."""
    cases = [["old", "new"], ["new", "old"], ["new", "new"], ["old", "old"]]
    for found in run_ranks(2, "tests.support.saving_ranks:save_updated", str(folder), str(tmp_path / "m"), cases=cases):
        for revisions, refusal in zip(cases[:-1], found, strict=False):
            assert "was updated while its save began" in refusal
            assert all(revision in refusal for revision in revisions)
        assert found[-1] == ""
    assert cluster.verify(str(tmp_path / "m"), progress=False).ok


def phase_of(longshore: Longshore) -> str:
    (model,) = longshore.models()
    return "" if model.updating is None else model.updating.phase


def test_a_save_that_begins_in_an_update_is_refused(longshore: Longshore, folder: Path, tmp_path: Path) -> None:
    """Rank 0 begins it before the exchange, and rank 1, which is busy until then, after it."""
    old, new = (changed_copy(folder, tmp_path / name, flip=flip) for name, flip in (("old", 2), ("new", 4)))
    for each in (old, new):
        cluster.publish(each, chunk_bytes=CHUNK_BYTES)
    go_on, saved = tmp_path / "go", tmp_path / "saved"

    def wait(shard: Any, path: str) -> None:  # sent by value, so its worker does not import this module
        import os
        import time

        open(f"{path}.began", "w").close()
        while not os.path.exists(path):
            time.sleep(0.05)

    with (
        ThreadPoolExecutor(3) as pool,
        cluster.load(str(old), tensor_parallel_size=2, device="cpu") as model,
    ):
        busy = pool.submit(model.call, wait, str(go_on), ranks=[1])
        eventually(lambda: busy.done() or Path(f"{go_on}.began").exists(), "rank 1 does not begin")
        saving = pool.submit(model.save, saved)
        time.sleep(2)  # the call of rank 0 runs
        updating = pool.submit(model.update, new)
        try:
            eventually(lambda: phase_of(longshore) == "exchanging", lambda: f"no exchange: {longshore.models()}")
            time.sleep(1)
        finally:
            go_on.touch()
        with pytest.raises(cluster.SaveRefused, match="was updated while its save began"):
            saving.result(120)
        assert updating.result(120).ranks == ("exchanged", "exchanged")
        assert busy.result(120) == [None]
        assert not saved.exists() or not list(saved.glob("*.safetensors"))
        assert model.save(saved).size_bytes
    expected = load_file(new / "model.safetensors")
    found = {name: t for file in saved.glob("model-*") for name, t in load_file(file).items()}
    assert all(found[name].equal(expected[name]) for name in expected)
    longshore.assert_nothing_left()


class Updated(cluster.LoadedModel):
    """A model of one rank in this process, which another client has updated since its load."""

    def __init__(self, loaded: Path, now: Path, revisions: tuple[str, str]) -> None:
        about = {"quantization_config": None, "precision": Precision(), "layout": Layout()}
        first, last = (
            SimpleNamespace(uri=str(folder), revision=revision, **about)
            for folder, revision in zip((loaded, now), revisions, strict=True)
        )
        connection: Any = SimpleNamespace(call=lambda verb, *_: {"wait": (1, None, last, None)}[verb])
        super().__init__(connection, "m-1", first)  # type: ignore[arg-type]
        self._shard = shards_of(now)[0]
        self._shard.revision = revisions[1]

    def call(self, fn: Any, *args: Any, **_: Any) -> list[Any]:
        return [fn(self._shard, *args)]


@pytest.mark.parametrize("place", ["own", "another"])
def test_the_small_files_are_of_the_revision_now(folder: Path, tmp_path: Path, place: str) -> None:
    """This client's report says where the model was loaded from."""
    loaded, new = tmp_path / "loaded", changed_copy(folder, tmp_path / "new", flip=2)
    shutil.copytree(folder, loaded)
    (new / "tokenizer.json").write_text('{"of": "new"}')
    revisions = cluster.publish(loaded).revision, cluster.publish(new).revision
    if place == "own":
        shutil.rmtree(loaded)
        shutil.copytree(new, loaded)
        revisions = revisions[0], cluster.publish(loaded).revision
    Updated(loaded, loaded if place == "own" else new, revisions).save(tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").read_text() == '{"of": "new"}'
    expected = load_file(new / "model.safetensors")
    found = {name: t for file in (tmp_path / "saved").glob("model-*") for name, t in load_file(file).items()}
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("place", ["own", "another"])
def test_a_model_that_others_updated_saves_what_it_is(
    longshore: Longshore, folder: Path, tmp_path: Path, place: str
) -> None:
    """Its weights and the small files are of the revision that the ranks have, though this client's report is older."""
    loaded, new = tmp_path / "loaded", changed_copy(folder, tmp_path / "new", flip=2)
    shutil.copytree(folder, loaded)
    (new / "tokenizer.json").write_text('{"of": "new"}')
    cluster.publish(loaded, chunk_bytes=CHUNK_BYTES)
    with cluster.load(str(loaded), tensor_parallel_size=2, device="cpu") as model:
        if place == "own":
            shutil.copytree(new, loaded, dirs_exist_ok=True)
        cluster.publish(loaded if place == "own" else new, chunk_bytes=CHUNK_BYTES)
        cluster.update(model.model_id, None if place == "own" else new)
        assert model.report.revision != model.revision
        model.save(tmp_path / "saved")
    expected = load_file(new / "model.safetensors")
    found = {name: t for file in (tmp_path / "saved").glob("model-*") for name, t in load_file(file).items()}
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert (tmp_path / "saved/tokenizer.json").read_text() == '{"of": "new"}'
    longshore.assert_nothing_left()


@pytest.mark.cluster_settings(metrics_port=0)
def test_a_quantized_model_saves_what_it_holds(longshore: Longshore, folder: Path, tmp_path: Path) -> None:
    with cluster.load(str(folder), tensor_parallel_size=2, quantization="int4", device="cpu") as model:
        report = model.save(tmp_path / "m", extra_files={"note.txt": b"four bits"})
        config = model.report.quantization_config
        assert_it_was_seen(longshore, str(tmp_path / "m"), report, model.model_id)
    expected: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        made = {"": weight} if "_proj" not in name else quantized(weight, "int4")
        expected |= {f"{name}{suffix}": tensor for suffix, tensor in made.items()}
    assert cluster.verify(tmp_path / "m", progress=False).ok
    found = {name: t for file in (tmp_path / "m").glob("model-*") for name, t in load_file(file).items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8)), name
    assert json.loads((tmp_path / "m/config.json").read_text())["quantization_config"] == config
    assert "dtype" not in json.loads((tmp_path / "m/config.json").read_text())
    assert (tmp_path / "m/tokenizer.json").read_text() == "{}"
    assert (tmp_path / "m/note.txt").read_bytes() == b"four bits"


def assert_it_was_seen(longshore: Longshore, uri: str, report: SaveReport, model_id: str) -> None:
    """Check the metrics, the status and the events of a model's save, and of one that then fails in this process."""
    with pytest.raises(cluster.SaveRefused):
        cluster.save({"a": torch.ones(4)}, Path(uri) / "part", max_shard_bytes=1)
    status = longshore.status()
    saved, refused = (save.progress for save in status.saves)
    assert (saved.state, saved.ranks, saved.uri, saved.revision) == ("published", 2, uri, report.revision)
    assert (saved.total_bytes, saved.done_bytes) == (report.size_bytes, report.size_bytes)
    assert (refused.state, refused.error, refused.ranks) == ("failed", "SaveRefused", 1)
    assert saved.save_id in str(status)
    counted = {
        ("longshore_saves_finished_total", "m", "published"): 1,
        ("longshore_saves_finished_total", "m", "failed"): 0,
        ("longshore_saves_finished_total", "part", "failed"): 1,
        ("longshore_save_failures_total", "SaveRefused", "part"): 1,
        ("longshore_save_bytes_total", "m", "written"): report.written_bytes,
        ("longshore_save_duration_seconds_count", "m", "published"): 1,
        ("longshore_save_peak_foreign_bytes", "m"): report.peak_foreign_bytes,
        ("longshore_saves", "m", "writing"): 0,
    }
    found = scrape(status.metrics_url)
    assert counted.items() <= found.items(), found
    begun, *_, published = client.events(saved.save_id, address=longshore.address)
    assert begun.message == f"a save has begun: {uri}, 2 ranks"
    assert (published.details["revision"], published.details["written_bytes"]) == (
        report.revision,
        report.written_bytes,
    )
    assert published.message in client.events(model_id, address=longshore.address)[-1].message, "the model has it, too"
    assert "max_shard_bytes" in client.events(refused.save_id, address=longshore.address)[-1].message
