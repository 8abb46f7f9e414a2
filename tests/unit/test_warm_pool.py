"""A load takes over some idle workers, and ends others to make room."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.coordination import spawn, worker_groups
from actors.coordination.worker_groups import WorkerGroups
from cluster.errors import NotEnoughResources
from cluster.layouts.mesh import Layout
from cluster.scheduling.topology import (
    IdleWorkerGroup,
    NodeInfo,
    assign_ranks,
    choose,
    in_the_way,
    packing,
    with_kept_memory,
)

SEATS = 8


def cpu_nodes(*free: int) -> list[NodeInfo]:
    return [NodeInfo(f"n{index}", f"h{index}", cpu_ranks_free=placements) for index, placements in enumerate(free)]


def worker_group(
    name: str, *node_ids: str, device: str = "cpu", since_s: float = 0.0, kept: int = 0
) -> IdleWorkerGroup:
    return IdleWorkerGroup(name, device, node_ids, dict.fromkeys(node_ids, kept), since_s)


def test_the_warmest_worker_group_of_the_same_shape_is_reused() -> None:
    worker_groups = [
        worker_group("old", "n0", "n0", since_s=1),
        worker_group("new", "n1", "n1", since_s=2),
        worker_group("odd", "n0", since_s=3),
    ]
    choice = choose(worker_groups, cpu_nodes(5, 6), Layout(tensor_parallel_size=2), "cpu", SEATS)
    assert (choice.take, choice.end) == ("new", ())


@pytest.mark.parametrize(
    "other",
    [
        worker_group("g", "n0"),  # fewer ranks
        worker_group("g", "n0", "n0", "n0"),  # more
        worker_group("g", "n0", "n1"),  # spread otherwise
        worker_group("g", "n0", "n0", device="cuda"),
        worker_group("g", "gone", "gone"),  # its node is not there any more
    ],
)
def test_worker_groups_of_other_shapes_stay_while_there_is_room(other: IdleWorkerGroup) -> None:
    choice = choose([other], cpu_nodes(5, 6), Layout(tensor_parallel_size=2), "cpu", SEATS)
    assert (choice.take, choice.end) == (None, ())


def test_the_longest_idle_worker_groups_end_and_only_as_needed() -> None:
    worker_groups = [
        worker_group("b", "n0", "n0", "n0", since_s=2),
        worker_group("a", "n0", "n0", "n0", since_s=1),
        worker_group("c", "n0", since_s=3),
    ]
    choice = choose(worker_groups, cpu_nodes(1), Layout(tensor_parallel_size=4), "cpu", SEATS)
    assert (choice.take, choice.end) == (None, ("a",))
    assert [node.cpu_ranks_free for node in choice.nodes] == [4]
    choice = choose(worker_groups, cpu_nodes(1), Layout(tensor_parallel_size=7), "cpu", SEATS)
    assert choice.end == ("a", "b")


def test_gpus_of_ended_worker_groups_count_as_free() -> None:
    nodes = [NodeInfo("n0", "h0", gpus_free=0, gpus_total=2), NodeInfo("n1", "h1", gpus_free=1, gpus_total=2)]
    worker_groups = [worker_group("g", "n0", "n0", device="cuda")]
    assert choose(worker_groups, nodes, Layout(tensor_parallel_size=2), "cuda", SEATS).take == "g"
    choice = choose(worker_groups, nodes, Layout(fsdp_size=3), "cuda", SEATS)
    assert (choice.take, choice.end) == (None, ("g",))
    assert [node.gpus_free for node in choice.nodes] == [2, 1]


def test_no_worker_group_ends_when_room_would_still_lack() -> None:
    with pytest.raises(NotEnoughResources):
        choose([worker_group("g", "n0", "n0")], cpu_nodes(1), Layout(tensor_parallel_size=4), "cpu", SEATS)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[IdleWorkerGroup], list[NodeInfo], Layout]:
    """Up to three nodes of 8 places each, some taken by models, some by worker groups."""
    free = {f"n{index}": draw(st.integers(0, SEATS)) for index in range(draw(st.integers(1, 3)))}
    worker_groups = []
    for number in range(draw(st.integers(0, 4))):
        placements = draw(st.lists(st.sampled_from(sorted(free)), min_size=1, max_size=6))
        if all(free[node] >= count for node, count in Counter(placements).items()):
            free = {node: places - placements.count(node) for node, places in free.items()}
            worker_groups.append(worker_group(f"g{number}", *placements, since_s=draw(st.integers(0, 9))))
    nodes = [NodeInfo(node, node, cpu_ranks_free=places) for node, places in free.items()]
    return worker_groups, nodes, draw(st.builds(Layout, st.integers(1, 4), st.integers(1, 3)))


@given(scenes())
def test_idle_worker_groups_never_worsen_a_placement(
    scene: tuple[list[IdleWorkerGroup], list[NodeInfo], Layout],
) -> None:
    """It gets the same spread, or the same refusal, as without any worker groups."""
    worker_groups, nodes, layout = scene
    held = Counter(node for one in worker_groups for node in one.node_ids)
    without = [replace(node, cpu_ranks_free=node.cpu_ranks_free + held[node.node_id]) for node in nodes]
    try:
        best = packing(assign_ranks(without, layout, "cpu", SEATS))
    except NotEnoughResources:
        with pytest.raises(NotEnoughResources):
            choose(worker_groups, nodes, layout, "cpu", SEATS)
        return
    choice = choose(worker_groups, nodes, layout, "cpu", SEATS)
    by_id = {one.worker_group_id: one for one in worker_groups}
    if choice.take is not None:
        assert packing(by_id[choice.take].node_ids) == best
        assert not choice.end
        return
    assert all(packing(one.node_ids) != best for one in worker_groups)
    assert packing(assign_ranks(choice.nodes, layout, "cpu", SEATS)) == best
    ended = Counter(node for worker_group_id in choice.end for node in by_id[worker_group_id].node_ids)
    assert all(
        now.cpu_ranks_free - was.cpu_ranks_free == ended[was.node_id]
        for was, now in zip(nodes, choice.nodes, strict=True)
    )
    left = [one.idle_since_s for one in worker_groups if one.worker_group_id not in choice.end]
    assert all(by_id[worker_group_id].idle_since_s <= min(left, default=99) for worker_group_id in choice.end)


def test_kept_memory_counts_only_for_the_load_that_reuses_it() -> None:
    nodes = [NodeInfo("n0", "h0", memory_free_bytes=10), NodeInfo("n1", "h1", memory_free_bytes=20)]
    assert with_kept_memory(nodes, None) == nodes
    found = with_kept_memory(nodes, worker_group("g", "n1", "n1", kept=5))
    assert [node.kept_bytes for node in found] == [0, 5]


def test_only_worker_groups_on_the_nodes_of_a_load_end_for_it() -> None:
    worker_groups = [
        worker_group("a", "n0", since_s=2),
        worker_group("b", "n1", since_s=0),
        worker_group("c", "n1", "n0", since_s=1),
    ]
    assert in_the_way(worker_groups, ["n0"]) == ["c", "a"]
    assert in_the_way(worker_groups, ["n7"]) == []


def test_gpus_that_were_given_back_are_expected_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU machine Ray counted them as free a second after the load that wanted them had come."""
    now_s, removed = [100.0], []
    monkeypatch.setattr(worker_groups, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(spawn, "remove_group", removed.append)
    monkeypatch.setattr(spawn, "end_actor", lambda _: None)

    def group_of(*bundles: int) -> tuple[Any, ...]:
        return (SimpleNamespace(bundle_specs=[{"GPU": float(gpus)} for gpus in bundles]),)

    def ended(ranks: int, gpus_per_rank: int, groups: tuple[Any, ...]) -> Any:
        request = SimpleNamespace(device_map=None, gpus_per_rank=gpus_per_rank)
        placements = {rank: SimpleNamespace(worker=object()) for rank in range(ranks)}
        return SimpleNamespace(
            worker_group_id="g", model_id="m", request=request, placements=placements, nodes=(), groups=groups
        )

    async def run() -> None:
        groups = WorkerGroups(0.0)
        assert not groups.may_free(1)
        await groups.part(ended(1, 1, first), keep=False)  # a rank was removed, and its GPU was still reserved
        await groups.part(ended(8, 1, ()), keep=False)  # in somebody's own placement group, or on CPUs
        now_s[0] += 6
        await groups.part(ended(1, 3, second), keep=False)
        assert groups.may_free(5)
        assert not groups.may_free(6)
        now_s[0] += 6
        assert groups.may_free(3)
        assert not groups.may_free(4)
        now_s[0] += 6
        assert not groups.may_free(1)

    first, second = group_of(1, 1), group_of(3)
    asyncio.run(run())
    assert removed == [*first, *second]


def test_workers_beside_gpus_of_removed_replicas_are_not_kept() -> None:
    """No load of their shape would use these GPUs, and they would stay reserved."""
    request: Any = SimpleNamespace(gpus_per_rank=1, placement_group=None)

    def keeps(bundles: int, ranks: int) -> bool:
        groups = (SimpleNamespace(bundle_specs=[{"GPU": 1.0}] * bundles),)
        placements: Any = {rank: SimpleNamespace(worker=object()) for rank in range(ranks)}
        record: Any = SimpleNamespace(request=request, placements=placements, groups=groups)
        return WorkerGroups(60.0)._may_keep(record, list(placements.values()))

    assert [keeps(2, 2), keeps(2, 1), keeps(1, 2)] == [True, False, True]
