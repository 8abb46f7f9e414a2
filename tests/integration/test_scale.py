"""Replicas come and go beside those that serve, on a real cluster and a real S3 server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cluster
from actors.coordination.model_record import ModelRecord
from actors.coordination.placing import take_placements
from actors.coordination.worker_groups import WorkerGroups
from actors.links import COORDINATOR
from actors.node.peer_exchange import BEGIN_PATIENCE_S
from cluster.config import Config
from cluster.options import LoadOptions
from cluster.request import make_request
from cluster.scheduling.holders import Holders
from cluster.scheduling.load_state import Life
from tests.support.changed_models import changed_copy
from tests.support.counting_proxy import CountingProxy
from tests.support.gated_proxy import GatedProxy
from tests.support.ray_clusters import REPOSITORY, Longshore, eventually
from tests.support.stored_models import StoredModel, is_exact, publish_to

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def next_llama(llama: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    folder = changed_copy(llama.folder, tmp_path_factory.mktemp("next") / "llama", flip=3)
    return publish_to(llama.server, folder, "llama-scaled")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def proxy(llama: StoredModel) -> Iterator[GatedProxy]:
    with GatedProxy(llama.server.endpoint_url, ranges=1 << 20) as gated:
        yield gated


def sent_bytes(proxy: CountingProxy) -> int:
    return sum(request.body_bytes for request in proxy.requests())


def replica_of(shard: Any) -> tuple[int, int]:
    return shard.coords.data, shard.coords.tensor


@pytest.mark.cluster_settings(empty=True, cpu_ranks_per_node=2, peer_port=0)
def test_a_replica_is_filled_from_the_node_that_has_the_model(
    longshore: Longshore,
    llama: StoredModel,
    next_llama: StoredModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with CountingProxy(llama.server.endpoint_url) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "device": "cpu"}
        with cluster.load(llama.uri, tensor_parallel_size=2, **options) as model:
            with cluster.load(llama.uri, tensor_parallel_size=2, **options) as other:
                proxy.clear()
                report = model.scale(2)
                assert (sent_bytes(proxy), report.store_bytes) == (0, 0)
                assert report.bytes_by_source["peer"] >= model.report.model_bytes
                assert report.ranks == (2, 3)
                assert model.call(replica_of) == [(0, 0), (0, 1), (1, 0), (1, 1)]
                assert is_exact(model, llama, replicas=2)
                assert other.call(replica_of, ranks=[1]) == [(0, 1)]
                assert len(other.call(replica_of)) == len(other.ranks) == 4
            (shown,) = longshore.models()
            assert shown.layout == model.report.layout
            assert [rank.state for rank in shown.ranks] == ["ready"] * 4
            with pytest.raises(cluster.ScaleRefused, match="from 1 to"):
                model.scale(0)
            with pytest.raises(cluster.NotEnoughResources, match="2 ranks need 2 free places"):
                model.scale(3)
            assert model.update(next_llama.uri).ranks == ("exchanged",) * 4
            assert is_exact(model, next_llama, replicas=2)
            with monkeypatch.context() as there:  # where this process finds the keys for the source's small files
                there.setenv("AWS_ACCESS_KEY_ID", next_llama.server.access_key_id)
                there.setenv("AWS_SECRET_ACCESS_KEY", next_llama.server.secret_access_key)
                where = {name: next_llama.options[name] for name in ("endpoint_url", "region")}
                model.save(tmp_path / "saved", source_options=where)
            removed = cluster.scale(model.model_id, 1)
            assert removed.ranks == (2, 3)
            assert len(longshore.living_workers()) == 2
            assert len(longshore.models()[0].rank_hosts) == 2
            assert is_exact(model, next_llama)
            assert len(model.ranks) == 2
            assert model.scale(2).store_bytes == 0  # the names of the ranks are free again
            assert is_exact(model, next_llama, replicas=2)
        with cluster.load(tmp_path / "saved", tensor_parallel_size=2, device="cpu") as saved:
            assert is_exact(saved, next_llama)
    longshore.assert_nothing_left()


@pytest.mark.cluster_settings(empty=True, cpu_ranks_per_node=1, peer_port=0, arena_bytes=9 << 20)
def test_a_node_that_keeps_nothing_is_not_waited_for(longshore: Longshore, llama: StoredModel) -> None:
    """Twenty chunks through nine slots. The new node reads them from the store, and keeps none for the old one."""
    with CountingProxy(llama.server.endpoint_url) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "device": "cpu"}
        with cluster.load(llama.uri, **options) as model:
            proxy.clear()
            report = model.scale(2)
            assert report.store_bytes == sum(report.bytes_by_source.values()) == model.report.store_bytes
            assert report.fill_s < BEGIN_PATIENCE_S
            assert report.store_bytes <= sent_bytes(proxy) <= report.store_bytes * 1.02
            assert is_exact(model, llama, 1, replicas=2)
    longshore.assert_nothing_left()


def slow(shard: Any, seconds: float) -> int:
    import time

    time.sleep(seconds)
    return shard.coords.data


SMALL = pytest.mark.cluster_settings(arena_bytes=9 << 20, peer_port=-1, rank_restarts=1)  # the arena keeps nothing


def loaded(proxy: GatedProxy, stored: StoredModel) -> cluster.LoadedModel:
    return cluster.load(stored.uri, device="cpu", **{**stored.options, "endpoint_url": proxy.endpoint_url})


def kill_worker_of(longshore: Longshore, model: cluster.LoadedModel, rank: int, killed: set[str]) -> None:
    """Kill a rank's worker that was not killed before, once its process is up."""

    def found() -> str | None:
        names = longshore.living_workers().keys() - killed
        return next((name for name in names if name.startswith(f"worker-{model.model_id}-{rank}-")), None)

    name = eventually(found, f"rank {rank} has no worker")
    killed.add(name)
    longshore.kill(name)


@SMALL
def test_the_others_serve_while_a_replica_is_filled(
    longshore: Longshore, llama: StoredModel, proxy: GatedProxy, pool: ThreadPoolExecutor
) -> None:
    """Its worker is killed meanwhile, and replaced. When that one is killed too, the model is as it was."""
    with loaded(proxy, llama) as model:
        killed: set[str] = set()
        for times in (2, 1):
            proxy.hold_all()
            growing = pool.submit(model.scale, 2)
            proxy.wait_until_held()
            assert model.call(replica_of) == [(0, 0)]
            with pytest.raises(cluster.ScaleRefused, match="another change of the model is under way"):
                cluster.scale(model.model_id, 3)
            with pytest.raises(cluster.UpdateRefused, match="another"):
                model.update()
            for _ in range(times):
                kill_worker_of(longshore, model, 1, killed)
            if times == 2:
                with pytest.raises(cluster.ScaleFailed, match="rank 1 was lost 2 times"):
                    growing.result(120)
                assert len(longshore.living_workers()) == 1
                assert model.call(replica_of) == [(0, 0)]
            proxy.open()
        assert growing.result(120).ranks == (1,)
        assert model.call(replica_of) == [(0, 0), (1, 0)]
        assert is_exact(model, llama, 1, replicas=2)
        running = pool.submit(model.call, slow, 3.0, ranks=[1])
        eventually(lambda: running.running(), "the call does not begin")
        shrinking = pool.submit(model.scale, 1)
        eventually(lambda: longshore.models()[0].layout.ranks == 1, "the replica is not about to go")
        assert model.call(replica_of) == [(0, 0)]
        assert not running.done()
        assert shrinking.result(120).ranks == (1,)
        assert running.done()
        assert running.result() == [1]
    longshore.assert_nothing_left()


@SMALL
def test_the_coordinator_killed_while_replicas_come(
    longshore: Longshore, llama: StoredModel, proxy: GatedProxy, pool: ThreadPoolExecutor
) -> None:
    """The ranks that had not joined are removed, and the client's call begins again."""
    with loaded(proxy, llama) as model:
        model.scale(2)
        proxy.hold_all()
        growing = pool.submit(model.scale, 3)
        proxy.wait_until_held()
        longshore.wait_restarted(COORDINATOR, longshore.kill(COORDINATOR))
        proxy.open()
        assert growing.result(200).ranks == (2,)
        assert is_exact(model, llama, 1, replicas=3)
        longshore.wait_restarted(COORDINATOR, longshore.kill(COORDINATOR))
        assert len(longshore.models()[0].rank_hosts) == 3
        assert model.scale(1).ranks == (1, 2)
        assert len(longshore.living_workers()) == 1
        assert is_exact(model, llama, 1)
    longshore.assert_nothing_left()


@SMALL
def test_a_copy_of_a_rank_that_is_removed_says_so(
    longshore: Longshore, llama: StoredModel, proxy: GatedProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.model, "BATCH_BYTES", 100_000)
    with loaded(proxy, llama) as model:
        model.scale(2)
        copies, whole = model.iter_tensors(1), model.iter_tensors(0)
        next(copies), next(whole)
        model.scale(1)
        with pytest.raises(cluster.RankRemoved, match="rank 1 went with its replica"):
            list(copies)
        assert list(whole)
    longshore.assert_nothing_left()


@SMALL
def test_the_example_of_the_page_and_the_command_line(longshore: Longshore, llama: StoredModel) -> None:
    from cluster.command_line.cli import main

    page = (REPOSITORY / "docs" / "scale.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    code = code.replace('"s3://models/llama-8b", tensor_parallel_size=2', f'"{llama.uri}", **options')
    names: dict[str, Any] = {"cluster": cluster, "options": {**llama.options, "device": "cpu"}}
    exec(code, names)
    model = names["model"]
    assert str(names["report"]).startswith(f"{model.model_id} has 2 replicas now: 1 ranks added")
    assert main(["scale", model.model_id, "1", "--address", longshore.address]) == 0
    assert model.call(replica_of) == [(0, 0)]
    assert str(model.scale(1)) == f"{model.model_id} has 1 replica, as before"
    model.release()
    longshore.assert_nothing_left()


def test_gpus_of_a_replica_that_goes_are_free_at_once(connected: Longshore) -> None:
    """The nodes have GPUs by name only. So the steps of a coordinator are taken here, without workers."""
    import ray

    def free_gpus() -> float:
        return float(ray.available_resources().get("GPU", 0.0))

    def model(replicas: int) -> ModelRecord:
        request = make_request(LoadOptions("/m", device="cuda", data_parallel_size=replicas))
        return ModelRecord(f"m-{replicas}", request, Life.new(replicas), Holders())

    async def run() -> None:
        groups, record = WorkerGroups(0.0), model(2)
        await take_placements(record, [], groups, Config(), may_wait=False)
        try:
            assert len(record.groups) == len(connected.placement_groups()) == 2
            before = eventually(lambda: free_gpus() == total - 2 and free_gpus(), "two GPUs are not taken")
            record.remove([record.placements[1]])
            await groups.give_back(record.drop_groups(unused_only=True))
            eventually(lambda: free_gpus() == before + 1, lambda: f"{free_gpus()} of {total} GPUs are free")
            assert record.placements[0].bundle == (record.groups[0], 0)
            waits = model(int(total))
            with pytest.raises(cluster.NotEnoughResources):
                await take_placements(waits, [record], groups, Config(), may_wait=True)
            assert len(waits.groups) == 1  # it holds nothing as long as it lacks one GPU
            assert free_gpus() == before + 1
            await groups.give_back(waits.drop_groups())
        finally:
            await groups.give_back(record.drop_groups())
        eventually(lambda: free_gpus() == total, lambda: f"{free_gpus()} of {total} GPUs are free")

    connected.end_longshore()  # a coordinator would take the groups for orphans
    total = free_gpus()
    asyncio.run(run())
    connected.assert_nothing_left()


def test_ranks_that_others_place_are_refused(longshore: Longshore, llama: StoredModel) -> None:
    from ray.util import placement_group, remove_placement_group

    longshore.configure()
    group = placement_group([{"CPU": 0.01}])
    try:
        with cluster.load(llama.uri, device="cpu", placement_group=group, **llama.options) as model:
            with pytest.raises(cluster.ScaleRefused, match="a placement group of your own"):
                model.scale(2)
            assert model.call(replica_of) == [(0, 0)]
    finally:
        remove_placement_group(group)
    longshore.assert_nothing_left()
