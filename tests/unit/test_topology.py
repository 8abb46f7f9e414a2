"""Ranks to nodes, and bundles of a placement group."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError, NotEnoughResources
from cluster.layouts.mesh import Layout
from cluster.scheduling.topology import (
    NodeInfo,
    assign_gpus,
    assign_ranks,
    bundle_of_ranks,
    bundles_for,
    bundles_of_replicas,
    bundles_to_wait_for,
    ranks_by_node,
    resolve_device,
    show_bundles,
)


def gpu_nodes(*free: int, total: int = 8) -> list[NodeInfo]:
    return [NodeInfo(f"id{n}", f"host{n}", gpus_free=gpus, gpus_total=total) for n, gpus in enumerate(free)]


layouts = st.builds(Layout, st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))


def split_groups(rank_nodes: tuple[int, ...], size: int) -> int:
    """Tensor-parallel groups that span nodes."""
    return sum(len(set(rank_nodes[start : start + size])) > 1 for start in range(0, len(rank_nodes), size))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), layouts)
def test_assignment_laws(free: list[int], layout: Layout) -> None:
    nodes = gpu_nodes(*free)
    if sum(free) < layout.ranks:
        with pytest.raises(NotEnoughResources):
            assign_ranks(nodes, layout, "cuda", 0)
        return
    rank_nodes = assign_ranks(nodes, layout, "cuda", 0)
    assert rank_nodes == assign_ranks(nodes, layout, "cuda", 0)
    assert len(rank_nodes) == layout.ranks
    assert all(rank_nodes.count(node) <= free[node] for node in range(len(nodes)))
    size = layout.tensor_parallel_size
    whole_possible = min(sum(gpus // size for gpus in free), layout.ranks // size)
    assert layout.ranks // size - split_groups(rank_nodes, size) >= whole_possible
    if max(free) >= layout.ranks:
        assert len(set(rank_nodes)) == 1


def test_examples() -> None:
    assert assign_ranks(gpu_nodes(2, 4), Layout(2, 2), "cuda", 0) == (1, 1, 1, 1)
    assert assign_ranks(gpu_nodes(3, 3), Layout(2, 2), "cuda", 0) == (0, 0, 1, 1)
    assert assign_ranks(gpu_nodes(3, 3), Layout(2, 3), "cuda", 0) == (0, 0, 1, 1, 0, 1)
    assert assign_ranks(gpu_nodes(1, 1, 0), Layout(2), "cuda", 0) == (0, 1)
    dead = [replace(gpu_nodes(8)[0], alive=False), *gpu_nodes(2)]
    assert assign_ranks(dead, Layout(2), "cuda", 0) == (1, 1)


def test_cpu_places_are_bounded_twice() -> None:
    nodes = [NodeInfo("a", "a", cpu_ranks_free=8), NodeInfo("b", "b", cpu_ranks_free=1)]
    assert assign_ranks(nodes, Layout(4), "cpu", 8) == (0, 0, 0, 0)
    assert assign_ranks(nodes, Layout(4), "cpu", 3) == (0, 0, 0, 1)
    with pytest.raises(NotEnoughResources, match="LONGSHORE_CPU_RANKS_PER_NODE"):
        assign_ranks(nodes, Layout(5), "cpu", 2)


def test_the_error_lists_the_holders() -> None:
    with pytest.raises(NotEnoughResources) as caught:
        assign_ranks(gpu_nodes(1, 2, total=4), Layout(4), "cuda", 0, holders=("llama-70b", "qwen"))
    error = pickle.loads(pickle.dumps(caught.value))
    text = str(error)
    assert "4 ranks need 4 free GPUs; 3 of 8 are free (host0: 1, host1: 2)" in text
    assert "llama-70b, qwen" in text
    assert "wait_for_resources_s" in text
    assert (error.details["need"], error.details["have"]) == (4, 3)
    with pytest.raises(NotEnoughResources, match="add nodes"):
        assign_ranks(gpu_nodes(4, total=4), Layout(5), "cuda", 0)
    with pytest.raises(NotEnoughResources, match="0 of 0"):
        assign_ranks([], Layout(), "cuda", 0)
    with pytest.raises(NotEnoughResources) as caught:
        assign_ranks(gpu_nodes(*[0] * 1000), Layout(), "cuda", 0)
    assert len(str(caught.value)) < 1000


def test_ranks_by_node() -> None:
    assert ranks_by_node((2, 0, 2)) == {0: (1,), 2: (0, 2)}
    assert ranks_by_node(()) == {}


def test_resolve_device() -> None:
    gpu, cpu = gpu_nodes(0)[0], NodeInfo("b", "b")
    assert resolve_device([cpu, gpu], "auto") == "cuda"
    assert resolve_device([cpu, replace(gpu, alive=False)], "auto") == "cpu"
    assert resolve_device([gpu], "cpu") == "cpu"
    with pytest.raises(ConfigError, match="device must be"):
        resolve_device([], "tpu")


@given(layouts, st.lists(st.integers(0, 8), max_size=5))
def test_bundle_laws(layout: Layout, gpus: list[int]) -> None:
    bundles = bundles_for(layout, gpus)
    assert sum(bundles) == layout.ranks
    hosts = bundle_of_ranks(bundles)
    assert [hosts.count(index) for index in range(len(bundles))] == bundles
    assert list(hosts) == sorted(hosts)
    size = layout.tensor_parallel_size
    assert set(bundles) <= {size, 1}
    assert bundles.count(size) <= sum(count // size for count in gpus) or size == 1
    replicas = bundles_of_replicas(bundles, layout.one_replica)
    assert [sum(replica) for replica in replicas] == [layout.one_replica] * (layout.ranks // layout.one_replica)
    assert list(itertools.chain(*replicas)) == bundles
    assert split_groups(hosts, size) == (bundles.count(1) // size if size > 1 else 0)


def test_bundles() -> None:
    assert bundles_for(Layout(4, 2), [8]) == [4, 4]
    assert bundles_for(Layout(8), [4, 4]) == [1] * 8
    assert bundles_for(Layout(2, 3), [3, 3]) == [2, 2, 1, 1]
    assert bundle_of_ranks([2, 2, 1, 1]) == (0, 0, 1, 1, 2, 3)


@given(layouts, st.lists(st.integers(0, 8), max_size=5))
def test_awaited_bundles_are_ones_that_nodes_can_have(layout: Layout, gpus: list[int]) -> None:
    bundles = bundles_to_wait_for(layout, gpus)
    assert sum(bundles) == layout.ranks
    assert max(bundles) <= (max(gpus, default=0) or 8)
    assert all(layout.tensor_parallel_size % size == 0 for size in bundles), "no two groups share one"


def test_groups_are_waited_for_as_wholes() -> None:
    assert bundles_to_wait_for(Layout(8), []) == [8]
    assert bundles_to_wait_for(Layout(16), [0]) == [8, 8]
    assert bundles_to_wait_for(Layout(8), [4, 1]) == [4, 4]
    assert bundles_to_wait_for(Layout(6), [4]) == [3, 3]
    assert bundles_to_wait_for(Layout(2, 3), [8, 8]) == [2, 2, 2]
    assert bundles_to_wait_for(Layout(8), [], gpus_per_node=4) == [4, 4]
    assert bundles_to_wait_for(Layout(8), [1], gpus_per_node=8) == [8], "a larger one than those there"
    assert show_bundles([8, 8, 1]) == "2 bundles of 8 GPUs, 1 bundle of 1 GPU"


def test_a_node_with_chunks_of_the_model_comes_first_where_room_is_equal() -> None:
    def held(shares: Sequence[float], *free: int) -> list[NodeInfo]:
        return [replace(node, held_share=share) for node, share in zip(gpu_nodes(*free), shares, strict=True)]

    two = Layout(2, 1, 1)
    assert assign_ranks(held([0, 0.5, 0], 8, 8, 8), two, "cuda", 8) == (1, 1)
    assert assign_ranks(held([0, 0.5, 0.7], 8, 8, 2), two, "cuda", 8) == (2, 2)
    assert assign_ranks(held([0, 0.5, 0], 8, 1, 2), two, "cuda", 8) == (0, 0)  # a whole group on one node counts more
    assert assign_ranks(held([0, 1, 0], 8, 2, 2), Layout(2, 1, 2), "cuda", 8) == (0, 0, 0, 0)  # and few nodes
    assert assign_gpus(held([0, 0.5, 0], 8, 4, 8), 4) == (1,)
    assert assign_gpus(held([0, 0.5, 0], 2, 2, 8), 4) == (2,)
