"""Memory of devices and hosts against a plan."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import Config
from cluster.errors import DoesNotFit, DoesNotFitNow
from cluster.fit.needs import check_fit, gpu_bytes, host_bytes, min_slots, planned_arena_bytes, planned_window_bytes
from cluster.fit.options import FitOptions
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.planning.packed_plan import RankFacts, rank_facts
from cluster.scheduling.topology import NodeInfo
from storage.checkpoints.model_index import ModelIndex, Shard, Tensor
from storage.host.memory import GpuMemory
from tests.support.planned_models import cut_into_chunks

MIB = 1 << 20
GIB = 1 << 30
CONFIG = Config(arena_bytes=GIB, slot_bytes=16 * MIB, host_reserve_bytes=GIB, device_reserve_bytes=GIB)
ROOMY = NodeInfo("id", "host", memory_free_bytes=64 * GIB, shm_free_bytes=8 * GIB, gpus=(GpuMemory(16 * GIB),))


@dataclass(frozen=True)
class Facts:
    ranks: tuple[RankFacts, ...]


def four_gib_plan(fsdp_size: int = 2) -> Facts:
    tensor = Tensor("w", "BF16", (2048, MIB), 0, 0, 4 * GIB)
    chunks = cut_into_chunks([4 * GIB], [range(0, 4 * GIB, 8 * MIB)])
    shard = Shard("model.safetensors", 4 * GIB, None)
    index = ModelIndex("r", "headers", (shard,), (tensor,), chunks, ())
    return Facts(rank_facts(build_load_plan(index, Layout(fsdp_size=fsdp_size)).cut))


def refusal(node: NodeInfo, device: str, config: Config = CONFIG) -> str:
    error = check_fit(four_gib_plan(), (0, 0), [node], config, device)
    assert isinstance(error, DoesNotFit)
    return str(pickle.loads(pickle.dumps(error)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_that_fits_is_accepted(device: str) -> None:
    assert check_fit(four_gib_plan(), (0, 0), [ROOMY], CONFIG, device) is None


def test_limits_are_exact() -> None:
    plan = four_gib_plan()
    cpu = replace(ROOMY, memory_free_bytes=4 * GIB + GIB + GIB)  # ranks, arena, reserve
    assert check_fit(plan, (0, 0), [cpu], CONFIG, "cpu") is None
    assert check_fit(plan, (0, 0), [replace(cpu, memory_free_bytes=6 * GIB - 1)], CONFIG, "cpu") is not None
    gpu = replace(ROOMY, gpus=(GpuMemory(3 * GIB),) * 2)
    assert check_fit(plan, (0, 0), [gpu], CONFIG, "cuda") is None
    assert check_fit(plan, (0, 0), [replace(gpu, gpus=(GpuMemory(3 * GIB - 1),))], CONFIG, "cuda") is not None


def test_host_memory_counts_cpu_ranks_and_a_new_arena() -> None:
    text = refusal(replace(ROOMY, memory_free_bytes=5 * GIB), "cpu")
    assert (
        "host: needs 5.37 GB of host memory (4.29 GB for 2 ranks, 1.07 GB for the arena's window), has 4.29 GB" in text
    )
    there = replace(ROOMY, memory_free_bytes=5 * GIB, arena_bytes=GIB, window_bytes=GIB)
    assert check_fit(four_gib_plan(), (0, 0), [there], CONFIG, "cpu") is None
    assert check_fit(four_gib_plan(), (0, 0), [replace(there, memory_free_bytes=GIB)], CONFIG, "cuda") is None


def test_device_memory_counts_only_if_known_and_requested() -> None:
    small = replace(ROOMY, gpus=(GpuMemory(2 * GIB),))
    text = refusal(small, "cuda")
    assert "ranks 0, 1 need up to 2.15 GB of device memory, a GPU has 1.07 GB (of 2.15 GB; 1.07 GB kept free)" in text
    assert "tensor_parallel_size" in text
    assert check_fit(four_gib_plan(), (0, 0), [small], CONFIG, "cpu") is None
    assert check_fit(four_gib_plan(), (0, 0), [replace(small, gpus=())], CONFIG, "cuda") is None


def test_the_arena_needs_slots_and_shared_memory() -> None:
    assert "2 ranks need 5 arena slots of 16.8 MB, its window has 4" in refusal(
        replace(ROOMY, arena_bytes=GIB, window_bytes=79 * MIB), "cuda"
    )
    text = refusal(replace(ROOMY, shm_free_bytes=64 * MIB), "cuda")
    assert "the arena's window needs 1.07 GB of /dev/shm, 67.1 MB are free" in text
    assert "--shm-size" in text


def test_every_node_is_judged_and_listed() -> None:
    nodes = [replace(ROOMY, host="fine"), *(replace(ROOMY, host=name, memory_free_bytes=0) for name in "ab")]
    error = check_fit(four_gib_plan(3), (0, 1, 2), nodes, CONFIG, "cpu")
    assert error is not None
    assert "a: needs" in error.message
    assert "b: needs" in error.message
    assert "fine" not in error.message
    assert error.hint.count("Spread the model") == 1


def test_nodes_without_ranks_do_not_matter() -> None:
    assert check_fit(four_gib_plan(), (1, 1), [NodeInfo("x", "x"), ROOMY], CONFIG, "cpu") is None


def test_the_planned_arena_has_whole_slots() -> None:
    default = Config(slot_bytes=16 * MIB)
    assert planned_arena_bytes(8 * GIB, default) == 2 * GIB
    assert planned_arena_bytes(1 << 40, default) == 8 * GIB
    assert planned_arena_bytes(64 * MIB, default) == 16 * MIB
    assert planned_arena_bytes(100 * MIB, default) == 16 * MIB  # whole slots
    assert planned_arena_bytes(0, Config(arena_bytes=50 * MIB, slot_bytes=16 * MIB)) == 48 * MIB


def test_the_planned_window_is_part_of_the_arena() -> None:
    default = Config(slot_bytes=16 * MIB)
    assert planned_window_bytes(8 * GIB, default) == 512 * MIB
    assert planned_window_bytes(4 * GIB, default) == GIB  # a small arena is all window
    assert planned_window_bytes(8 * GIB, Config(slot_bytes=16 * MIB, window_bytes=100 * MIB)) == 96 * MIB
    assert planned_window_bytes(64 * MIB, Config(slot_bytes=16 * MIB, window_bytes=100 * MIB)) == 16 * MIB
    assert planned_window_bytes(0, default) == 0


def test_only_the_window_of_a_new_arena_needs_memory() -> None:
    config = CONFIG.model_copy(update={"arena_bytes": 1 << 40, "window_bytes": GIB})
    assert check_fit(four_gib_plan(), (0, 0), [ROOMY], config, "cpu") is None


def test_min_slots_grow_with_ranks() -> None:
    assert [min_slots(ranks) for ranks in (1, 2, 8)] == [3, 5, 17]


small = st.integers(0, 9)
gpus = st.builds(lambda total, used: GpuMemory(total, max(0, total - used)), small, st.integers(0, 4))


@given(
    needs=st.lists(st.tuples(small, st.integers(0, 3)), min_size=1, max_size=4),
    nodes=st.lists(st.lists(gpus, min_size=1, max_size=3), min_size=1, max_size=2),
    where=st.lists(st.integers(0, 1), min_size=4, max_size=4),
    kept=st.integers(0, 3),
)
def test_gpu_fit_equals_an_exhaustive_search(
    needs: list[tuple[int, int]], nodes: list[list[GpuMemory]], where: list[int], kept: int
) -> None:
    """On every node, slices and the tensor in conversion must fit into free memory less the reserve."""
    plan = Facts(tuple(RankFacts(size, size, size, staging) for size, staging in needs))
    infos = [replace(ROOMY, host=f"h{at}", gpus=tuple(found)) for at, found in enumerate(nodes)]
    rank_nodes = {rank: where[rank] % len(nodes) for rank in range(len(needs))}
    config = CONFIG.changed(device_reserve_bytes=0)
    error = check_fit(plan, rank_nodes, infos, config, "cuda", options=FitOptions(reserve_bytes=kept))

    def placed(free: Callable[[GpuMemory], int]) -> bool:
        for at, found in enumerate(nodes):
            here = [sum(needs[rank]) for rank, node in rank_nodes.items() if node == at]
            if len(here) > len(found):  # more ranks than GPUs are known: each beyond them is like the least roomy
                found = [*found, *[min(found, key=free)] * (len(here) - len(found))]
            if not any(
                all(need <= max(0, free(gpu) - min(kept, gpu.total_bytes)) for need, gpu in zip(here, way, strict=True))
                for way in permutations(found, len(here))
            ):
                return False
        return True

    assert (error is None) == placed(lambda gpu: gpu.free_bytes or 0)
    if error is not None:  # the message differs when only other processes are in the way
        assert isinstance(error, DoesNotFitNow) == placed(lambda gpu: gpu.total_bytes)
        assert len(str(error)) < 24 * 80


def test_memory_follows_the_devices_of_a_map() -> None:
    mapped = RankFacts(9, 9, 9, 2, ((0, 3), (1, 4), ("cpu", 5), ("disk", 100)))
    assert gpu_bytes(mapped, "cuda") == {0: 5, 1: 6}
    assert host_bytes(mapped, "cuda") == 7
    assert host_bytes(RankFacts(9, 9, 9, 2, ((0, 3), ("disk", 6))), "cuda") == 2, "what goes to disk is converted there"
    assert host_bytes(RankFacts(9, 9, 9, 2, ((0, 9),)), "cuda") == 0
    assert gpu_bytes(RankFacts(9, 9, 9, 2), "cpu") == {}
    assert host_bytes(RankFacts(9, 9, 9, 2), "cpu") == 11
    assert host_bytes(RankFacts(9, 9, 9, 2), "cuda") == 0


def test_hosts_keep_the_requested_reserve_free() -> None:
    cpu = replace(ROOMY, memory_free_bytes=4 * GIB + GIB + 2 * GIB)
    asked = FitOptions(reserve_bytes=2 * GIB)
    assert check_fit(four_gib_plan(), (0, 0), [cpu], CONFIG, "cpu", options=asked) is None
    less = replace(cpu, memory_free_bytes=cpu.memory_free_bytes - 1)
    assert check_fit(four_gib_plan(), (0, 0), [less], CONFIG, "cpu", options=asked) is not None
    assert check_fit(four_gib_plan(), (0, 0), [less], CONFIG, "cpu") is None  # the settings ask for less


def test_many_problems_fit_on_one_screen() -> None:
    nodes = [replace(ROOMY, host=f"a-long-name-of-a-host-{at}.example", gpus=(GpuMemory(1),)) for at in range(64)]
    plan = Facts(four_gib_plan().ranks * 32)
    error = check_fit(plan, range(64), nodes, CONFIG, "cuda")
    assert error is not None
    assert "and 60 more" in error.message
    assert len(str(error)) < 24 * 80


def test_a_requested_reserve_is_named() -> None:
    error = check_fit(four_gib_plan(), (0, 0), [ROOMY], CONFIG, "cpu", options=FitOptions(reserve_bytes=63 * GIB))
    assert error is not None
    assert f"reserve_bytes={63 * GIB} (67.6 GB of each host): lower it" in error.hint
    small = replace(ROOMY, memory_free_bytes=5 * GIB)
    for options in (FitOptions(), FitOptions(reserve_bytes=GIB // 2)):  # the reserve of the settings applies
        error = check_fit(four_gib_plan(), (0, 0), [small], CONFIG, "cpu", options=options)
        assert error is not None
        assert "reserve_bytes" not in error.hint
