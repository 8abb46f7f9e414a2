"""A rank with several devices on a real cluster: host memory and files for real, GPUs as far as they go without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cluster
from tests.support.ray_clusters import Longshore, eventually
from tests.support.reference_slices import differing_slices, shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = pytest.mark.slow

SPREAD = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.layers.0": "cpu", "model.norm": "disk"}


def _where(shard: Any) -> tuple[str, dict[str, int | str], dict[str, str]]:
    return shard.device, shard.device_map, {name: str(tensor.device) for name, tensor in shard.items()}


def test_host_memory_and_disk(longshore: Longshore, llama: StoredModel, tmp_path: Path) -> None:
    folder, spread = tmp_path / "offload", SPREAD | {"lm_head": "cpu"}
    options = {"device_map": spread, "offload_folder": folder, **llama.options}
    planned = cluster.plan(llama.uri, **options)
    with cluster.load(llama.uri, **options) as model:
        copied = model.state_dict(0)
        assert model.call(_where) == [("cpu", spread, dict.fromkeys(copied, "cpu"))]
        assert model.call(shard_differs, str(llama.folder), 1, 1, KV_HEADS) == [[]]
        assert differing_slices(copied, 0, str(llama.folder), 1, 1, KV_HEADS) == []
        (rank,) = model.report.ranks
        assert rank.device == "cpu+disk"
        assert rank.bytes_by_device == planned.ranks[0].bytes_by_device
        kept = sorted(path.name for path in folder.iterdir())
        assert "index.json" in kept
        with pytest.raises(cluster.ConfigError, match="another load uses the offload folder"):
            cluster.load(llama.uri, **{**options, "device_map": spread | {"lm_head": "disk"}})
        assert sorted(path.name for path in folder.iterdir()) == kept
        loader = pytest.importorskip("accelerate.utils.offload").OffloadedWeightsLoader(save_folder=str(folder))
        assert set(loader) == {name.removesuffix(".dat") for name in kept if name.endswith(".dat")}
    assert not folder.exists()


@pytest.mark.parametrize(
    "workers",
    [2, pytest.param(1, marks=[pytest.mark.cluster_settings(warm_workers_s=300.0), pytest.mark.long])],
    ids=["new", "same"],
)
def test_an_offload_folder_can_be_used_again(
    longshore: Longshore, llama: StoredModel, tmp_path: Path, workers: int
) -> None:
    """It works after a release, also for the same worker, and after everything was killed."""
    folder = tmp_path / "offload"
    folder.mkdir()
    options = {"device_map": SPREAD | {"lm_head": "cpu"}, "offload_folder": folder, **llama.options}

    def load_again() -> cluster.LoadedModel:
        model = cluster.load(llama.uri, **options)
        assert model.call(shard_differs, str(llama.folder), 1, 1, KV_HEADS) == [[]]
        return model

    pids = set()
    for _ in range(2):
        with load_again() as model:
            pids.add(model.report.ranks[0].pid)
            assert (folder / "index.json").exists()
        assert list(folder.iterdir()) == []
    assert len(pids) == workers
    if workers == 2:
        return  # what follows is the same
    load_again()
    longshore.kill_everything()
    longshore.end_longshore()
    assert (folder / "index.json").exists()
    longshore.configure()
    with load_again():
        pass
    assert list(folder.iterdir()) == []


def test_a_replaced_worker_reuses_the_offload_folder(longshore: Longshore, llama: StoredModel, tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    options = {"device_map": SPREAD | {"lm_head": "cpu"}, "offload_folder": folder, **llama.options}
    with cluster.load(llama.uri, **options) as model:
        (worker,) = longshore.actor_names("worker-")
        longshore.kill(worker)
        eventually(lambda: longshore.actor_names("worker-") not in ([], [worker]), "no replacement came")
        eventually(lambda: [m.progress.state for m in longshore.models()] == ["ready"], "it is not ready again")
        assert model.call(shard_differs, str(llama.folder), 1, 1, KV_HEADS) == [[]]
    assert list(folder.iterdir()) == []


def test_missing_limits_default_to_those_of_the_node(longshore: Longshore, llama: StoredModel) -> None:
    with cluster.load(llama.uri, device_map="auto", device="cpu", **llama.options) as model:
        assert model.call(_where)[0][1] == {"": "cpu"}
        with cluster.load(llama.uri, device_map="auto", device="cpu", **llama.options) as again:
            assert again.report.resident


def test_a_rank_in_the_users_own_process(longshore: Longshore, llama: StoredModel, tmp_path: Path) -> None:
    from actors.hosting import host_rank

    limits = {"cpu": cluster.plan(llama.uri, **llama.options).placed_bytes * 3 // 4}
    options = {"device_map": "auto", "max_memory": limits, "offload_folder": tmp_path / "offload", **llama.options}
    with host_rank(llama.uri, 0, **options) as shard:
        assert set(shard.device_map.values()) == {"cpu", "disk"}
        assert shard_differs(shard, str(llama.folder), 1, 1, KV_HEADS) == []
        assert (tmp_path / "offload" / "index.json").exists()
    assert not (tmp_path / "offload").exists()


def test_a_rank_gets_the_gpus_that_its_map_names(longshore: Longshore, llama: StoredModel) -> None:
    """These GPUs exist only as Ray resources: the worker gets them, and cannot use them."""
    with pytest.raises(cluster.DeviceUnavailable, match="torch cannot use"):
        cluster.load(llama.uri, device_map={"model": 0, "lm_head": 1}, **llama.options)
    eventually(lambda: not cluster.status().models or all(m.error for m in cluster.status().models), "a model stays")
    with pytest.raises(cluster.NotEnoughResources, match="needs 9 free GPUs on one node"):
        cluster.load(llama.uri, device_map={"model": 0, "lm_head": 8}, **llama.options)
