"""The rank's side of a load inside a user's own actors."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cluster
from cluster import client
from tests.support.checkpoints import safetensors_bytes, write_objects
from tests.support.counting_proxy import CountingProxy
from tests.support.gated_proxy import GatedProxy
from tests.support.ray_clusters import Longshore, eventually
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = pytest.mark.slow

MIB = 1 << 20


class Engine:
    """An inference engine of the user: one process per rank, made and placed by the user."""

    def load(self, uri: str, rank: int, options: dict[str, Any], check: Any) -> Any:
        with cluster.host_rank(uri, rank, **options) as shard:
            assert shard.device == "cpu"  # "auto": these processes see no GPU
            self.kept = shard["model.norm.weight"]
            return check(shard)

    def norm(self) -> float:
        return float(self.kept.float().abs().sum())


@pytest.mark.cluster_settings(empty=True)
def test_ranks_in_the_users_own_actors(longshore: Longshore, llama: StoredModel) -> None:
    import ray

    folder = str(llama.folder)
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    engines = [ray.remote(Engine).options(scheduling_strategy=here).remote() for _ in range(2)]
    with CountingProxy(llama.server.endpoint_url) as proxy:
        options = {
            **llama.options,
            "endpoint_url": proxy.endpoint_url,
            "tensor_parallel_size": 2,
            "group": "engines",
        }
        loads = [
            engine.load.remote(llama.uri, rank, options, lambda shard: shard_differs(shard, folder, 2, 1, KV_HEADS))
            for rank, engine in enumerate(engines)
        ]
        assert ray.get(loads, timeout=120) == [[], []]
        sent = [(r.path, r.range) for r in proxy.requests() if r.path.endswith(".safetensors")]
        assert len(sent) == len(set(sent))  # each chunk once for both
    with CountingProxy(llama.server.endpoint_url) as proxy:
        short = {**options, "endpoint_url": proxy.endpoint_url, "reserve_bytes": 1 << 50}
        with pytest.raises(cluster.DoesNotFit, match="the rank does not fit: this host: needs") as refused:
            ray.get(engines[0].load.remote(llama.uri, 0, short, len), timeout=120)
        assert refused.value.cause.details["rank"] == 0
        asked = [r for r in proxy.requests() if r.path.endswith(".safetensors")]
        assert not [r for r in asked if r.range is not None and r.range[1] > MIB]  # headers at most
    # What an engine keeps of a shard stays its own.
    assert ray.get(engines[0].norm.remote()) == ray.get(engines[1].norm.remote()) > 0
    assert longshore.status().models == ()
    longshore.assert_nothing_left()
    for engine in engines:
        ray.kill(engine)


@pytest.mark.cluster_settings(empty=True, idle_agent_s=1.0)
def test_a_group_loads_one_revision(longshore: Longshore, tmp_path: Path) -> None:
    """Between the plans of its processes the model is published again."""
    import ray

    folder, options = tmp_path / "model", {"fsdp_size": 2}

    def publish(seed: int) -> None:
        write_objects(folder, {"model.safetensors": safetensors_bytes([("model.norm.weight", "F32", (64, 8))], seed)})
        cluster.publish(folder)

    publish(1)
    engines = [ray.remote(Engine).remote() for _ in range(2)]
    with cluster.host_rank(folder, 0, group="run-1", **options):
        publish(2)
        time.sleep(4.0)  # longer than an idle agent lives
        assert longshore.actor_names("agent-"), "its process holds a rank"
        late = engines[0].load.remote(str(folder), 1, {**options, "group": "run-1"}, len)
        with pytest.raises(cluster.RevisionMismatch, match="group 'run-1' load another revision"):
            ray.get(late, timeout=120)
        other = {**options, "group": "run-2"}
        loads = [engine.load.remote(str(folder), rank, other, len) for rank, engine in enumerate(engines)]
        assert ray.get(loads, timeout=120) == [1, 1]
    publish(3)

    def begins_anew() -> bool:
        try:
            with cluster.host_rank(folder, 0, group="run-1", **options):
                return True
        except cluster.RevisionMismatch:
            return False

    eventually(begins_anew, "the group is bound, and nobody is in it")
    for engine in engines:
        ray.kill(engine)


def test_ranks_of_several_processes_name_their_group_or_revision(longshore: Longshore, llama: StoredModel) -> None:
    with (
        pytest.raises(cluster.ConfigError, match=r"could load two revisions.*group="),
        cluster.host_rank(llama.uri, 0, tensor_parallel_size=2, **llama.options),
    ):
        pass
    revision = cluster.plan(llama.uri, **llama.options).revision
    with cluster.host_rank(llama.uri, 0, tensor_parallel_size=2, revision=revision, **llama.options) as shard:
        assert len(shard) > 1


@pytest.mark.cluster_settings(empty=True)
def test_a_group_is_bound_although_its_nodes_agent_dies(longshore: Longshore, tmp_path: Path) -> None:
    import ray

    folder = tmp_path / "model"

    def publish(seed: int) -> None:
        write_objects(folder, {"model.safetensors": safetensors_bytes([("model.norm.weight", "F32", (64, 8))], seed)})
        cluster.publish(folder)

    publish(1)
    engine = ray.remote(Engine).remote()
    options = {"fsdp_size": 2, "group": "run-1"}
    with cluster.host_rank(folder, 0, **options):
        publish(2)
        time.sleep(2.0)  # the agent reports the group to the coordinator
        longshore.kill(*longshore.actor_names("agent-"))
        eventually(lambda: longshore.status().nodes, "no agent comes back")
        with pytest.raises(cluster.RevisionMismatch, match="group 'run-1' load another revision"):
            ray.get(engine.load.remote(str(folder), 1, options, len), timeout=120)
    longshore.assert_nothing_left()
    ray.kill(engine)


@pytest.mark.cluster_settings(empty=True)
def test_a_host_stops_waiting_for_a_stuck_agent(longshore: Longshore, llama: StoredModel) -> None:
    with cluster.host_rank(llama.uri, 0, **llama.options):  # there is an agent
        pass
    pid = longshore.kill(*longshore.actor_names("agent-"), signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        with pytest.raises(cluster.LoadTimeout), cluster.host_rank(llama.uri, 0, **llama.options, timeout_s=3.0):
            pass
    finally:
        os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - began_s < 30.0  # one call alone would take a minute
    longshore.assert_nothing_left()


@pytest.mark.cluster_settings(empty=True)
def test_a_host_waits_no_longer_than_its_timeout(longshore: Longshore, llama: StoredModel) -> None:
    for ranges in (0, 4):  # while it plans, and while it loads
        with GatedProxy(llama.server.endpoint_url, ranges=ranges) as proxy:
            if not ranges:
                proxy.hold_all()
            options = {**llama.options, "endpoint_url": proxy.endpoint_url, "timeout_s": 3.0}
            with pytest.raises(cluster.LoadTimeout), cluster.host_rank(llama.uri, 0, **options):
                pass
    longshore.assert_nothing_left()


@pytest.mark.cluster_settings(empty=True)
def test_a_host_goes_on_with_another_agent_after_a_shutdown(longshore: Longshore, llama: StoredModel) -> None:
    with GatedProxy(llama.server.endpoint_url, ranges=4) as proxy, ThreadPoolExecutor(1) as pool:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url}

        def load() -> list[str]:
            with cluster.host_rank(llama.uri, 0, **options) as shard:
                return shard_differs(shard, str(llama.folder), 1, 1, KV_HEADS)

        loading = pool.submit(load)
        proxy.wait_until_held()
        client.shutdown(longshore.address)
        proxy.open()
        assert loading.result(200) == []
    longshore.end_longshore()


def test_a_rank_outside_the_layout_is_refused(longshore: Longshore, llama: StoredModel) -> None:
    with pytest.raises(cluster.ConfigError, match="ranks 0 to 1"), cluster.host_rank(llama.uri, 2, fsdp_size=2):
        pass


def test_bad_bytes_reach_the_host_as_the_same_error(longshore: Longshore, llama: StoredModel) -> None:
    with pytest.raises(cluster.ObjectNotFound), cluster.host_rank("s3://no-such-bucket/model", 0, **llama.options):
        pass
    longshore.assert_nothing_left()


def read_on_demand(uri: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Read every tensor of a model, and return the report. Raises if one differs from the files."""
    import safetensors
    import torch

    with cluster.safe_open(uri, **options) as ours:
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safetensors.safe_open(str(path), framework="pt") as theirs:
                for name in theirs.keys():  # noqa: SIM118  # it is no dict
                    if not torch.equal(ours.get_tensor(name), theirs.get_tensor(name)):
                        raise AssertionError(name)
        return ours.report()


@pytest.mark.cluster_settings(empty=True)
def test_readers_share_the_arena_of_their_nodes_agent(longshore: Longshore, llama: StoredModel) -> None:
    import ray

    with cluster.load(llama.uri, **llama.options, device="cpu", address=longshore.address) as model:
        (node,) = {rank.node for rank in model.report.ranks}
        there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        arguments = llama.uri, llama.options, str(llama.folder)
        task = ray.remote(read_on_demand).options(scheduling_strategy=there)
        report = ray.get(task.remote(*arguments), timeout=120)
        agents = {longshore.pid(name) for name in longshore.actor_names("agent-")}
        assert report["host"] in agents
        assert (report["store_bytes"], report["shared"]) == (0, True)  # the load has read it all
        assert report["cached_bytes"] > 0
        mine = read_on_demand(*arguments)  # this process is in Ray too, perhaps on a node without an agent
        assert (mine["host"] in agents) is (ray.get_runtime_context().get_node_id() == node)
    longshore.assert_nothing_left()
