"""Workers of a released model wait for the next load of their shape, and end when others need their room."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cluster
from actors.links import COORDINATOR
from cluster.client import release_warm
from storage.host.memory import available_host_bytes
from tests.support.gated_proxy import GatedProxy
from tests.support.ray_clusters import GPUS_PER_NODE, Longshore, eventually
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

MIB = 1 << 20
WARM_S = 300.0  # longer than any test
TP = 2

pytestmark = [pytest.mark.slow, pytest.mark.cluster_settings(warm_workers_s=WARM_S)]


@pytest.fixture
def warm(longshore: Longshore) -> Iterator[Longshore]:
    """The cluster with a coordinator that keeps workers; none of them is left after the test."""
    yield longshore
    if COORDINATOR in longshore.actor_names():
        release_warm(address=longshore.address)


def load(stored: StoredModel, **options: Any) -> cluster.LoadedModel:
    return cluster.load(stored.uri, **{"tensor_parallel_size": TP, "device": "cpu", **stored.options, **options})


def is_exact(model: cluster.LoadedModel, stored: StoredModel) -> bool:
    return model.call(shard_differs, str(stored.folder), TP, 1, KV_HEADS) == [[], []]


def worker_groups(longshore: Longshore) -> list[int]:
    """Ranks of each idle worker group."""
    return [len(worker_group.rank_hosts) for worker_group in longshore.status().worker_groups]


def fresh_worker_group(warm: Longshore, stored: StoredModel) -> dict[str, int]:
    """An idle worker group of TP workers; their pids by name."""
    load(stored).release()
    pids = warm.worker_pids()
    assert (worker_groups(warm), len(pids)) == ([TP], TP)
    return pids


def test_the_next_load_has_the_same_processes(warm: Longshore, llama: StoredModel) -> None:
    first = load(llama)
    pids = warm.worker_pids()
    first.release()
    (idle,) = warm.status().worker_groups
    assert (idle.worker_group_id, idle.device, len(idle.rank_hosts)) == (first.model_id, "cpu", TP)
    assert idle.kept_bytes >= first.report.placed_bytes  # the next load need not touch it again
    assert warm.worker_pids() == pids
    with load(llama) as second:
        assert second.model_id != first.model_id
        assert not second.report.resident
        assert [rank.pid for rank in second.report.ranks] == [rank.pid for rank in first.report.ranks]
        assert is_exact(second, llama)
        assert worker_groups(warm) == []
        assert warm.worker_pids() == pids
        report = second.report
        assert 0 < report.first_byte_s < report.total_s
        assert report.first_byte_s == pytest.approx(report.plan_s + report.start_s)
        parts_s = (report.connect_s, report.first_byte_s, report.load_s, report.ready_after_last_byte_s)
        assert sum(parts_s) == pytest.approx(report.total_s)
        assert 0 < report.ready_after_last_byte_s < report.total_s
        with pytest.raises(cluster.LoadCancelled, match="released"):
            first.call(len)
    assert worker_groups(warm) == [TP]
    assert release_warm(address=warm.address) == 1
    warm.assert_nothing_left()


def test_another_model_and_another_mesh_of_as_many_ranks(warm: Longshore, llama: StoredModel, odd: StoredModel) -> None:
    pids = fresh_worker_group(warm, llama)
    with load(odd, tensor_parallel_size=1, fsdp_size=TP) as model:
        assert sorted(rank.pid for rank in model.report.ranks) == sorted(pids.values())
        assert model.call(len) == [len(model.state_dict(0))] * TP


def test_streaming_begins_and_ends_before_torch_is_imported(warm: Longshore, llama: StoredModel) -> None:
    """No chunk waits for the seconds that the import takes: a worker in CPU memory needs torch for calls only."""

    def has_torch() -> list[bool]:
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in warm.worker_pids().values()]
        return ["libtorch" in text for text in maps]

    for _ in range(2):  # new workers, then a worker group
        with load(llama) as model:
            assert model.report.stages.place_bytes == model.report.placed_bytes
            assert has_torch() == [False] * TP
    with load(llama) as model:
        model.call(len)
        assert has_torch() == [True] * TP


@pytest.mark.cluster_settings(warm_workers_s=WARM_S, cpu_ranks_per_node=2)
def test_an_idle_worker_group_ends_only_when_a_load_needs_room(warm: Longshore, llama: StoredModel) -> None:
    pids = fresh_worker_group(warm, llama)
    with load(llama, tensor_parallel_size=1):
        assert worker_groups(warm) == [TP]
        assert pids.items() <= warm.worker_pids().items()
    assert sorted(worker_groups(warm)) == [1, TP]
    with load(llama, tensor_parallel_size=4) as model:  # both nodes, every placement
        assert worker_groups(warm) == []
        assert not set(pids.values()) & {rank.pid for rank in model.report.ranks}
    assert worker_groups(warm) == [4]


def test_gpus_of_a_worker_group_are_taken_over_or_given_back(warm: Longshore, llama: StoredModel) -> None:
    """The GPUs are only counted here: the load ends where a worker would open one."""
    pids = fresh_worker_group(warm, llama)
    with pytest.raises(cluster.LongshoreError):
        load(llama, device="cuda", tensor_parallel_size=GPUS_PER_NODE)
    assert worker_groups(warm) == [TP]  # what failed left no worker group; the one in CPU memory is not in its way
    assert warm.worker_pids() == pids
    assert not warm.placement_groups()


@pytest.mark.cluster_settings(warm_workers_s=WARM_S, cpu_ranks_per_node=3)
def test_a_load_short_of_host_memory_ends_idle_worker_groups(
    warm: Longshore, llama: StoredModel, tmp_path: Path
) -> None:
    """It does not fit without them either; but that is known only when they are gone."""
    fresh_worker_group(warm, llama)
    rows = available_host_bytes() // MIB + 1024  # of 2 MiB: twice the memory, in a file with a hole
    header = json.dumps({"w": {"dtype": "U8", "shape": [rows, 2 * MIB], "data_offsets": [0, rows * 2 * MIB]}}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * 2 * MIB)
    with pytest.raises(cluster.DoesNotFit, match="of host memory"):
        cluster.load(
            tmp_path, fsdp_size=4, device="cpu"
        )  # of six placements, two on the worker group's: there is room for both
    assert worker_groups(warm) == []


@pytest.mark.cluster_settings(warm_workers_s=1.0)
def test_an_idle_worker_group_ends_by_itself(warm: Longshore, llama: StoredModel) -> None:
    load(llama).release()
    eventually(lambda: not worker_groups(warm), "the worker group is still there")
    warm.assert_nothing_left()


@pytest.mark.cluster_settings(warm_workers_s=WARM_S, empty=True)
def test_workers_of_failed_or_cancelled_loads_do_not_stay(warm: Longshore, llama: StoredModel) -> None:
    with GatedProxy(llama.server.endpoint_url, ranges=5) as gate:
        with pytest.raises(cluster.LoadTimeout):
            load(llama, timeout_s=6, endpoint_url=gate.endpoint_url)
        assert worker_groups(warm) == []
        warm.assert_nothing_left()


def test_a_call_that_goes_on_keeps_its_worker_from_the_next_load(
    warm: Longshore, llama: StoredModel, tmp_path: Path
) -> None:
    arrived = tmp_path / "arrived"

    def sleep(shard: object) -> None:
        import time

        arrived.touch()
        time.sleep(60)

    model = load(llama)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(model.call, sleep, ranks=[0])
        eventually(arrived.exists, "no call")
        model.release()
        assert worker_groups(warm) == []
        with pytest.raises(cluster.RankLost):
            calling.result(60)
    warm.assert_nothing_left()


def test_the_next_load_does_not_overwrite_tensors_kept_by_a_call(
    warm: Longshore, llama: StoredModel, odd: StoredModel
) -> None:
    """Memory of a released model is reused, except tensors that are still referenced."""

    def keep(shard: Any) -> int:
        import builtins
        import zlib

        builtins.kept = shard["model.embed_tokens.weight"]  # type: ignore[attr-defined]
        return zlib.crc32(builtins.kept.flatten().view(__import__("torch").uint8).numpy())  # type: ignore[attr-defined]

    def look(shard: Any) -> int:
        import builtins
        import zlib

        kept = builtins.kept  # type: ignore[attr-defined]
        return zlib.crc32(kept.flatten().view(__import__("torch").uint8).numpy())

    with load(llama) as model:
        before = model.call(keep)
        pids = warm.worker_pids()
    with load(llama) as again:
        again.call(lambda shard: [tensor.zero_() for tensor in shard.values()] and None)
        assert again.call(look) == before
    with load(odd, tensor_parallel_size=1, fsdp_size=TP) as other:
        assert other.call(look) == before
        assert warm.worker_pids() == pids


# -- deaths ------------------------------------------------------------------------------------------------------


@pytest.mark.cluster_settings(warm_workers_s=WARM_S, rank_restarts=0)
def test_a_worker_group_that_loses_a_worker_ends(warm: Longshore, llama: StoredModel) -> None:
    pids = fresh_worker_group(warm, llama)
    warm.kill(sorted(pids)[0])
    eventually(lambda: not worker_groups(warm), "the worker group is still offered")
    with load(llama) as model:
        assert not set(pids.values()) & {rank.pid for rank in model.report.ranks}
        assert is_exact(model, llama)


@pytest.fixture
def gate(llama: StoredModel) -> Iterator[GatedProxy]:
    with GatedProxy(llama.server.endpoint_url, ranges=5) as proxy:
        yield proxy


def worker_group_without_chunks(warm: Longshore, odd: StoredModel) -> dict[str, int]:
    """An idle worker group of TP workers, and arenas without any chunk of the model that is loaded next."""
    warm.configure(warm_workers_s=WARM_S, empty=True)
    load(odd, tensor_parallel_size=1, fsdp_size=TP).release()
    assert worker_groups(warm) == [TP]
    return warm.worker_pids()


def test_a_killed_worker_is_replaced_in_a_reused_worker_group(
    warm: Longshore, llama: StoredModel, odd: StoredModel, gate: GatedProxy
) -> None:
    first, second = sorted(worker_group_without_chunks(warm, odd))
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, llama, endpoint_url=gate.endpoint_url)
        gate.wait_until_held()
        warm.kill(second)
        replacement = second.removesuffix("-0") + "-1"
        eventually(lambda: replacement in warm.actor_names("worker-"), "no replacement came")
        gate.open()
        with loading.result(300) as model:
            assert [rank.incarnation for rank in model.report.ranks] == [0, 1]
            assert is_exact(model, llama)
            pids = warm.worker_pids()
            assert sorted(pids) == [first, replacement]
    with load(llama) as model:  # the replacement is one of the worker group
        assert warm.worker_pids() == pids
        assert [rank.incarnation for rank in model.report.ranks] == [0, 1]
        assert is_exact(model, llama)


def test_a_restarted_coordinator_finds_a_reused_worker_group(
    warm: Longshore, llama: StoredModel, odd: StoredModel, gate: GatedProxy
) -> None:
    pids = worker_group_without_chunks(warm, odd)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, llama, endpoint_url=gate.endpoint_url)
        gate.wait_until_held()
        assert warm.worker_pids() == pids
        warm.wait_restarted(COORDINATOR, warm.kill(COORDINATOR))
        gate.open()
        with loading.result(300) as model:
            assert warm.worker_pids() == pids
            assert is_exact(model, llama)
            warm.wait_restarted(COORDINATOR, warm.kill(COORDINATOR))  # and when it is ready
            eventually(lambda: [m.progress.state for m in warm.models()] == ["ready"], "it was not found again")
            assert is_exact(model, llama)
            assert warm.worker_pids() == pids
    assert worker_groups(warm) == [TP]
    assert warm.worker_pids() == pids


@pytest.mark.cluster_settings(warm_workers_s=WARM_S, orphan_after_s=6)
def test_a_worker_group_whose_coordinator_was_killed_ends(warm: Longshore, llama: StoredModel) -> None:
    """No coordinator knows it any more; its workers are orphans."""
    fresh_worker_group(warm, llama)
    warm.wait_restarted(COORDINATOR, warm.kill(COORDINATOR))
    eventually(lambda: not warm.actor_names("worker-"), "the worker group is still there")
    with load(llama) as model:
        assert is_exact(model, llama)


@pytest.mark.cluster_settings(warm_workers_s=WARM_S, empty=True, cpu_ranks_per_node=TP + 1)
@pytest.mark.parametrize("with_worker", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_new_agent_frees_slots_beside_an_idle_worker_group(
    warm: Longshore, llama: StoredModel, odd: StoredModel, gate: GatedProxy, with_worker: bool
) -> None:
    """Idle workers may map the arena, but they touch no slot: nothing is fenced for their sake."""
    for _ in range(2):  # from the second load on they leave it mapped
        load(odd, tensor_parallel_size=1, fsdp_size=TP).release()
    (agent,) = warm.actor_names("agent-")
    idle = warm.worker_pids()
    assert all("longshore-arena" in Path(f"/proc/{pid}/maps").read_text() for pid in idle.values())
    with load(odd, tensor_parallel_size=1, fsdp_size=TP + 1), ThreadPoolExecutor(1) as pool:  # fills the other node
        assert worker_groups(warm) == [TP]
        loading = pool.submit(load, llama, tensor_parallel_size=1, endpoint_url=gate.endpoint_url)
        gate.wait_until_held()
        (worker,) = (name for name in warm.worker_pids() if name.startswith("worker-llama"))
        dead = warm.kill(agent)
        if with_worker:
            warm.kill(worker)
        warm.wait_restarted(agent, dead)
        gate.open()
        with loading.result(300) as model:
            assert model.call(shard_differs, str(llama.folder), 1, 1, KV_HEADS) == [[]]
            assert idle.items() <= warm.worker_pids().items()
            eventually(
                lambda: all(not node.leased_slots + node.quarantined_slots for node in warm.status().nodes),
                lambda: f"slots in use: {warm.status().nodes}",
            )
