"""Functions and tensors of a loaded model's ranks: what a client gets, and when it learns that a rank cannot answer."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cluster
import cluster.model
from cluster.model import RankCalls
from tests.support.checkpoints import safetensors_bytes, write_objects
from tests.support.ray_clusters import Longshore, eventually
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow

WAIT_S = 120  # until something is seen that must come, on however slow a machine


@pytest.fixture
def model(longshore: Longshore, llama: StoredModel) -> Iterator[cluster.LoadedModel]:
    """Two ranks in CPU memory."""
    with cluster.load(llama.uri, fsdp_size=2, device="cpu", **llama.options) as model:
        yield model


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Requested before `model`, so that a call that hangs ends with its model."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def wait_in(shard: Any, folder: Path) -> int:
    """Report that the rank is here and wait until it may go on, for ever if need be, as in a collective."""
    (folder / f"rank {shard.rank}").touch()
    wait_for(folder / "go on")
    return int(shard.rank)


def die_beside_a_waiting_rank(shard: Any, folder: Path) -> None:
    if shard.rank == 0:
        wait_in(shard, folder)
    wait_for(folder / "rank 0")
    os._exit(1)


def arrived(folder: Path, rank: int = 0) -> None:
    eventually((folder / f"rank {rank}").exists, "the function did not begin", WAIT_S)


def is_ready(longshore: Longshore) -> bool:
    return [model.progress.state for model in longshore.models()] == ["ready"]


def test_workers_import_neither_agent_nor_coordinator(model: cluster.LoadedModel) -> None:
    # Finding an actor by its name imports the actor's class (`actors.agent_actor`).
    def modules_of(shard: Any) -> set[str]:  # local, so that it travels by value and this module is not imported there
        import sys

        return set(sys.modules)

    for modules in model.call(modules_of):
        assert "actors.gpu_worker" in modules
        assert not modules & {"actors.node_agent", "actors.coordinator", "cluster.config", "cluster.telemetry.report"}


# -- ranks that do not answer ------------------------------------------------------------------------------------


def test_a_dead_rank_ends_a_call_while_another_one_waits(
    longshore: Longshore, pool: ThreadPoolExecutor, model: cluster.LoadedModel, tmp_path: Path
) -> None:
    """The rank that waits is stuck: other ranks answer, a call of all has a time limit, and a release ends it."""
    calling = pool.submit(model.call, die_beside_a_waiting_rank, tmp_path)
    with pytest.raises(cluster.RankLost) as caught:
        calling.result(WAIT_S)
    assert (caught.value.details["rank"], caught.value.details["model"]) == (1, model.model_id)
    eventually(lambda: is_ready(longshore), "the rank was not replaced")
    assert model.call(len, ranks=[1]) == [len(model.state_dict(1))]
    with pytest.raises(cluster.CallTimeout) as late:
        model.call(len, timeout_s=2)
    assert "0" in late.value.details["ranks"]
    with pytest.raises(cluster.CallTimeout):
        model.state_dict(0, timeout_s=1)
    model.release()
    longshore.assert_nothing_left()


def raise_when_another_rank_is_dead(shard: Any, folder: Path) -> None:
    """Raise as a collective does on living ranks when another rank dies."""
    if shard.rank == 0:
        (folder / "pid").write_text(str(os.getpid()))
        wait_for(folder / "rank 1")
        os._exit(1)
    wait_for(folder / "pid")
    pid = int((folder / "pid").read_text())
    (folder / "rank 1").touch()
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.001)
    raise ConnectionResetError("the other rank is gone")


def test_a_dead_rank_is_reported_before_errors_it_caused(
    model: cluster.LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.model, "CAUSE_S", WAIT_S)  # however slow Ray is
    with pytest.raises(cluster.RankLost) as caught:
        model.call(raise_when_another_rank_is_dead, tmp_path)
    assert caught.value.details["rank"] == 0


def test_an_error_on_one_rank_ends_a_call_that_another_blocks(
    pool: ThreadPoolExecutor, model: cluster.LoadedModel, tmp_path: Path
) -> None:
    def raise_or_wait(shard: Any, folder: Path) -> int:
        if shard.rank == 1:
            raise KeyError("of rank 1")
        return wait_in(shard, folder)

    calling = pool.submit(model.call, raise_or_wait, tmp_path)
    with pytest.raises(cluster.RemoteCallFailed, match="of rank 1") as caught:
        calling.result(WAIT_S)
    assert caught.value.details["rank"] == 1
    (tmp_path / "go on").touch()
    assert model.call(lambda shard: shard.rank) == [0, 1]


@pytest.mark.parametrize("cancels", [True, False], ids=["as it is", "Ray cancels nothing"])
def test_a_queued_call_that_times_out_never_starts(
    pool: ThreadPoolExecutor,
    model: cluster.LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cancels: bool,
) -> None:
    if not cancels:  # a cancellation may reach the worker too late
        monkeypatch.setattr(cluster.model, "withdraw", lambda reference: None)
    first = pool.submit(model.call, wait_in, tmp_path, ranks=[0])
    arrived(tmp_path)
    with pytest.raises(cluster.CallTimeout) as caught:
        model.call(lambda shard, folder: (folder / "ran").touch(), tmp_path, ranks=[0], timeout_s=1)
    assert caught.value.details["ranks"] == "0"
    (tmp_path / "go on").touch()
    assert first.result(WAIT_S) == [0]
    assert model.call(lambda shard: shard.rank, timeout_s=WAIT_S) == [0, 1]
    assert not (tmp_path / "ran").exists()


def wait_until_nobody_waits(shard: Any, folder: Path) -> None:
    import ray

    (folder / f"rank {shard.rank}").touch()
    while not ray.get_runtime_context().is_canceled():
        time.sleep(0.02)
    (folder / "noticed").touch()


def test_a_cancelled_task_returns_and_its_function_can_notice(model: cluster.LoadedModel, tmp_path: Path) -> None:
    async def cancel_call_and_copy() -> None:
        calling = asyncio.create_task(model.acall(wait_until_nobody_waits, tmp_path, ranks=[0]))
        await asyncio.to_thread(arrived, tmp_path)
        copying = asyncio.create_task(model.astate_dict(0))  # behind it
        for task in (copying, calling):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, WAIT_S)
        await asyncio.to_thread(eventually, (tmp_path / "noticed").exists, "nobody told the function")
        assert await model.acall(lambda shard: shard.rank, ranks=[1, 0], timeout_s=WAIT_S) == [1, 0]

    asyncio.run(cancel_call_and_copy())


@pytest.mark.cluster_settings(warm_workers_s=300.0)
def test_a_forced_release_ends_a_stuck_function(
    longshore: Longshore, pool: ThreadPoolExecutor, llama: StoredModel, tmp_path: Path
) -> None:
    """It works for any holder, and also where workers are kept for the next load."""
    model = cluster.load(llama.uri, device="cpu", **llama.options)
    calling = pool.submit(model.call, wait_in, tmp_path)
    arrived(tmp_path)
    cluster.release(model.model_id, force=True)
    with pytest.raises(cluster.RankLost):
        calling.result(WAIT_S)
    longshore.assert_nothing_left()


# -- what comes back, and what cannot ----------------------------------------------------------------------------


def test_all_items_of_a_generator_come_back(model: cluster.LoadedModel) -> None:
    def generate(shard: Any) -> Iterator[int]:
        yield shard.rank
        yield from range(3)

    async def generate_later(shard: Any) -> Any:
        for number in range(2):
            await asyncio.sleep(0)
            yield number

    async def later(shard: Any) -> int:
        return int(shard.rank)

    assert model.call(generate) == [[0, 0, 1, 2], [1, 0, 1, 2]]
    assert model.call(lambda shard: iter((1, 2))) == [[1, 2]] * 2
    assert model.call(generate_later) == [[0, 1]] * 2
    assert model.call(later) == [0, 1]


def test_references_and_large_values_go_both_ways(model: cluster.LoadedModel) -> None:
    import ray

    large = np.arange(1_000_000)
    reference = ray.put(large)

    def sums(shard: Any, array: Any, reference: Any) -> tuple[int, int, Any, Any]:
        return int(array.sum()), int(ray.get(reference).sum()), array[shard.rank :], ray.put(shard.rank)

    for rank, (one, other, back, put) in enumerate(model.call(sums, large, reference=reference)):
        assert one == other == large.sum()
        assert np.array_equal(back, large[rank:])
        assert ray.get(put) == rank


def raise_with_a_lock(shard: Any) -> None:
    error = ValueError("cannot be pickled")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda shard: {"lock": threading.Lock()}, "the result of rank 0 cannot be sent: it is a dict"),
        (raise_with_a_lock, "cannot be pickled"),
    ],
)
def test_unpicklable_results_are_typed_errors(model: cluster.LoadedModel, fn: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(cluster.RemoteCallFailed, match=said) as caught:
        model.call(fn, ranks=[0])
    assert pickle.loads(pickle.dumps(caught.value)).details["rank"] == 0
    assert model.call(lambda shard: shard.rank) == [0, 1]


def test_wrong_arguments_are_refused_before_a_rank_is_asked(model: cluster.LoadedModel) -> None:
    lock = threading.Lock()
    wrong: list[Callable[[], Any]] = [
        lambda: model.call(len, ranks=0),  # type: ignore[arg-type]
        lambda: model.call(len, ranks="01"),  # type: ignore[arg-type]
        lambda: model.call(len, ranks=[0.0]),  # type: ignore[list-item]
        lambda: model.call(len, ranks=[True]),
        lambda: model.call("len"),  # type: ignore[arg-type]
        lambda: model.call(len, lock),
        lambda: model.call(lambda shard: lock.locked()),
        lambda: model.call(len, timeout_s=0),
        lambda: model.call(len, timeout_s="1"),  # type: ignore[arg-type]
        lambda: model.iter_tensors("0"),  # type: ignore[arg-type]
        lambda: model.state_dict(0, timeout_s=-1),
    ]
    for call in wrong:
        with pytest.raises(cluster.ConfigError):
            call()
    with pytest.raises(cluster.ConfigError, match=r"ranks=\[0\] means one rank"):
        model.call(len, ranks=0)  # type: ignore[arg-type]
    assert model.call(lambda shard: shard.rank, ranks=np.array([1, 1, 0])) == [1, 1, 0]  # type: ignore[arg-type]
    assert model.call(len, ranks=[]) == []


# -- copies of tensors -------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the requests of this process to workers, by method."""
    counts: Counter[str] = Counter()

    class Counted:
        def __init__(self, worker: Any) -> None:
            self._worker = worker

        def __getattr__(self, name: str) -> Any:
            counts[name] += 1
            return getattr(self._worker, name)

    workers = RankCalls.workers
    monkeypatch.setattr(RankCalls, "workers", lambda calls: [Counted(worker) for worker in workers(calls)])

    class CountedCalls(RankCalls):
        def answers(self, *arguments: Any) -> list[Any]:
            counts["answers"] += 1
            return super().answers(*arguments)

    monkeypatch.setattr(cluster.model, "RankCalls", CountedCalls)
    return counts


def test_small_tensors_are_copied_many_at_once(longshore: Longshore, tmp_path: Path, asked: Counter[str]) -> None:
    specs = [(f"layers.{number}.weight", "BF16", (32, 16)) for number in range(3000)]
    write_objects(tmp_path, {"model.safetensors": safetensors_bytes(specs, seed=1)})
    with cluster.load(tmp_path, device="cpu") as model:
        copied = model.state_dict(0)
        assert asked["answers"] == 1
        assert list(copied) == model.call(list)[0]
        stored = (tmp_path / "model.safetensors").read_bytes()
        assert (
            b"".join(tensor.view(__import__("torch").uint8).numpy().tobytes() for tensor in copied.values()) in stored
        )


def test_tensors_that_are_larger_than_a_batch_are_copied_whole(
    model: cluster.LoadedModel, asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model.state_dict(0)
    bound = 100_000
    monkeypatch.setattr(cluster.model, "BATCH_BYTES", bound)
    assert max(tensor.nbytes for tensor in whole.values()) > 5 * bound
    asked.clear()
    parts = model.state_dict(0)
    assert list(parts) == list(whole)
    assert all(bool((parts[name] == tensor).all()) for name, tensor in whole.items())
    assert asked["answers"] >= sum(tensor.nbytes for tensor in whole.values()) // bound


def test_a_rank_that_dies_while_its_tensors_are_copied_is_lost(
    longshore: Longshore, model: cluster.LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.model, "BATCH_BYTES", 100_000)
    copies = model.iter_tensors(1)
    next(copies)
    longshore.kill(next(name for name in longshore.actor_names("worker-") if name.endswith("-1-0")))
    with pytest.raises(cluster.RankLost) as caught:
        list(copies)
    assert caught.value.details["rank"] == 1
