"""The rank's side of a load inside a user's own actors."""

from __future__ import annotations

from typing import Any

import pytest

import cluster
from tests.support.counting_proxy import CountingProxy
from tests.support.ray_clusters import TEST_SETTINGS, Longshore
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = pytest.mark.slow

MIB = 1 << 20


class Engine:
    """Somebody's inference engine: one process per rank, made and placed by somebody."""

    def load(self, uri: str, rank: int, options: dict[str, Any], check: Any) -> Any:
        from actors.hosting import host_rank

        with host_rank(uri, rank, **options) as shard:
            self.kept = shard["model.norm.weight"]
            return check(shard)

    def norm(self) -> float:
        return float(self.kept.float().abs().sum())


def test_ranks_in_the_users_own_actors(longshore: Longshore, llama: StoredModel) -> None:
    import ray

    longshore.configure(empty=True)
    folder, config = str(llama.folder), cluster.Config(**TEST_SETTINGS)
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    engines = [ray.remote(Engine).options(scheduling_strategy=here).remote() for _ in range(2)]
    with CountingProxy(llama.server.endpoint_url) as proxy:
        options = {
            **llama.options,
            "endpoint_url": proxy.endpoint_url,
            "tensor_parallel_size": 2,
            "config": config,
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


def test_a_rank_that_the_layout_has_not_got(longshore: Longshore, llama: StoredModel) -> None:
    from actors.hosting import host_rank

    with pytest.raises(cluster.ConfigError, match="ranks 0 to 1"), host_rank(llama.uri, 2, fsdp_size=2):
        pass


def test_bad_bytes_reach_the_host_as_the_same_error(longshore: Longshore, llama: StoredModel) -> None:
    from actors.hosting import host_rank

    with pytest.raises(cluster.ObjectNotFound), host_rank("s3://no-such-bucket/model", 0, **llama.options):
        pass
    longshore.assert_nothing_left()
