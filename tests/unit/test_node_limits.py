"""The limits of a device map that was asked for without any, and the node that its rank goes to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.coordination.fit import node_limits, own_limits, own_misfit, roomiest
from cluster.config import Config
from cluster.errors import ConfigError, DoesNotFit, DoesNotFitNow, NotEnoughResources
from cluster.fit.needs import WORKER_BYTES
from cluster.fit.options import DeviceMapOptions, FitOptions
from cluster.layouts.mesh import Layout
from cluster.planning.packed_plan import RankFacts
from cluster.scheduling.topology import IdleWorkerGroup, NodeInfo, assign_gpus, choose
from storage.host.memory import GpuMemory, MemoryPool

GB = 10**9
CONFIG = Config(device_reserve_bytes=GB, host_reserve_bytes=2 * GB)
AUTO = DeviceMapOptions("auto")


def node(*free_gb: int, gpus_free: int = 0, name: str = "n") -> NodeInfo:
    return NodeInfo(
        node_id=name,
        host=name,
        gpus_free=gpus_free,
        gpus_total=len(free_gb),
        arena_bytes=GB,
        gpus=tuple(GpuMemory(80 * GB, free * GB) for free in free_gb),
        pools=(MemoryPool("host", 50 * GB, 64 * GB, GB), MemoryPool("container", 40 * GB, 48 * GB, 3 * GB)),
    )


def test_the_limit_is_the_smallest_of_the_gpus_with_most_room() -> None:
    limits = dict(node_limits(node(70, 10, 60), 2, AUTO, FitOptions(), CONFIG))
    assert limits == {0: 59 * GB, 1: 59 * GB, "cpu": 37 * GB - WORKER_BYTES}
    assert dict(node_limits(node(11), 1, AUTO, FitOptions(), CONFIG))[0] == 9 * GB, "alone, it keeps a tenth"
    assert dict(node_limits(node(11), 0, AUTO, FitOptions(), CONFIG)) == {"cpu": 37 * GB - WORKER_BYTES}
    half = dict(node_limits(node(70, 70), 2, AUTO, FitOptions(gpu_memory_utilization=0.5), CONFIG))
    assert half[0] == half[1] == 30 * GB
    with pytest.raises(ConfigError, match="is not known") as unknown:
        node_limits(node(gpus_free=2), 2, AUTO, FitOptions(), CONFIG)
    assert "max_memory" in unknown.value.hint


def test_the_calling_process() -> None:
    limits = dict(own_limits(AUTO, "cpu", FitOptions(), Config(host_reserve_bytes=0)))
    assert limits.keys() == {"cpu"}
    assert limits["cpu"] > 0
    assert own_limits(DeviceMapOptions("", (("", "cpu"),)), "cpu", FitOptions(), CONFIG) == ()


def own(facts: RankFacts, device: str, *free_gb: int, fit: FitOptions | None = None) -> DoesNotFit | None:
    """Return the misfit of rank 3 in a process that sees GPUs with this much free."""
    here = node(*free_gb)
    return own_misfit(3, facts, here.gpus, here.pools, device, fit or FitOptions(), CONFIG)


def test_a_rank_in_the_calling_process_must_fit_there() -> None:
    slices = RankFacts(30 * GB, 30 * GB, 30 * GB, GB)
    assert own(slices, "cuda", 32, 0) is None  # 1 kept free
    misfit = own(slices, "cuda", 31, 70)  # it has the first GPU, and no other
    assert type(misfit) is DoesNotFitNow  # somebody else has its memory
    assert "rank 3 needs 31.0 GB of device memory, a GPU has 30.0 GB" in str(misfit)
    assert "longshore plan" in misfit.hint
    assert type(own(RankFacts(80 * GB, 80 * GB, 80 * GB), "cuda", 79)) is DoesNotFit
    assert own(slices, "cuda", 70, fit=FitOptions(gpu_memory_utilization=0.52)) is None
    assert own(slices, "cuda", 70, fit=FitOptions(reserve_bytes=40 * GB)) is not None


def test_a_rank_in_host_memory_must_fit_the_tightest_pool() -> None:
    assert own(RankFacts(36 * GB, 36 * GB, 36 * GB, GB), "cpu") is None  # 40 of the container, 3 of which are kept
    misfit = own(RankFacts(37 * GB, 37 * GB, 37 * GB, 1), "cpu")
    assert type(misfit) is DoesNotFit
    assert "this host: needs 37.0 GB of host memory" in str(misfit)
    assert own(RankFacts(36 * GB, 36 * GB, 36 * GB), "cpu", fit=FitOptions(reserve_bytes=5 * GB)) is not None
    assert own(RankFacts(36 * GB, 36 * GB, 36 * GB), "cuda", 50, fit=FitOptions(reserve_bytes=5 * GB)) is None


def test_each_device_of_a_map_has_its_own_room() -> None:
    mapped = RankFacts(60 * GB, 60 * GB, 60 * GB, devices=((0, 10 * GB), (1, 30 * GB), ("cpu", 20 * GB)))
    assert own(mapped, "cuda", 11, 31) is None
    assert own(mapped, "cuda", 31, 11) is not None  # a map names its GPUs
    short = own(replace(mapped, devices=((0, 10 * GB), ("cpu", 38 * GB))), "cuda", 11)
    assert short is not None
    assert "of host memory" in str(short)


def test_the_node_with_most_gpus_that_are_free() -> None:
    few, many, busy = (
        node(70, gpus_free=1, name="few"),
        node(70, 70, gpus_free=2, name="many"),
        node(70, 70, 70, name="busy"),
    )
    assert roomiest([few, many, busy]) == ("many", "many", 2)
    assert roomiest([busy]) == ("busy", "busy", 3), "it waits for them, or is refused when it takes its placement"
    with pytest.raises(NotEnoughResources):
        roomiest([])
    assert assign_gpus([few, many, busy], 2) == (1,)
    with pytest.raises(NotEnoughResources, match=r"3 free GPUs on one node .*busy: 0 of 3.*; models that hold some: m"):
        assign_gpus([few, many, busy], 3, ["m"])
    with pytest.raises(NotEnoughResources, match="there is none"):
        assign_gpus([], 1)


def test_a_rank_with_several_gpus_ends_an_idle_worker_group() -> None:
    worker_group = IdleWorkerGroup("g", "cuda", ("many",), {}, 0.0)
    there = [node(70, 70, gpus_free=1, name="many")]
    assert choose([worker_group], there, Layout(), "cuda", 4).take == "g"
    choice = choose([worker_group], there, Layout(), "cuda", 4, gpus_per_rank=2)
    assert (choice.take, choice.end) == (None, ("g",))
    assert choice.nodes[0].gpus_free == 2
    with pytest.raises(NotEnoughResources):
        choose([worker_group], there, Layout(), "cuda", 4, gpus_per_rank=3)
