"""SIGKILL and damaged bytes in the middle of an update: every rank ends with the revision that was decided."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cluster
from actors.links import COORDINATOR
from tests.support.changed_models import changed_copy
from tests.support.gated_proxy import GatedProxy
from tests.support.ray_clusters import Longshore, eventually
from tests.support.stored_models import StoredModel, is_exact, publish_to

pytestmark = [pytest.mark.slow, pytest.mark.long]

RANKS = 2


@pytest.fixture(scope="module")
def next_llama(llama: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    folder = changed_copy(llama.folder, tmp_path_factory.mktemp("next") / "llama", flip=2)
    return publish_to(llama.server, folder, "llama-killed")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def is_ready(longshore: Longshore) -> bool:
    return [model.progress.state for model in longshore.models()] == ["ready"]


def loaded(stored: StoredModel) -> cluster.LoadedModel:
    return cluster.load(stored.uri, tensor_parallel_size=RANKS, device="cpu", **stored.options)


class HalfUpdate:
    """An update whose reads wait at a gate."""

    def __init__(
        self, longshore: Longshore, model: cluster.LoadedModel, to: StoredModel, pool: Any, **how: Any
    ) -> None:
        self.proxy = GatedProxy(to.server.endpoint_url, ranges=0)
        options = {**to.options, "endpoint_url": self.proxy.endpoint_url, "timeout_s": 300, **how}
        self.running: Future[Any] = pool.submit(model.update, to.uri, **options)
        self._longshore = longshore

    def __enter__(self) -> HalfUpdate:
        self.proxy.wait_until_held()
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.close()

    def reader(self) -> str:
        """Name of a worker that reads."""
        workers = self._longshore.living_workers()
        return next(name for name, pid in sorted(workers.items()) if self.proxy.holds_for(pid))


@pytest.fixture
def half_read(
    longshore: Longshore, llama: StoredModel, next_llama: StoredModel, pool: ThreadPoolExecutor
) -> Callable[..., Any]:
    """Updates whose reads wait. After its block each model has the new revision, and nothing is left of it."""

    @contextmanager
    def begin(*, streaming: bool, **settings: Any) -> Iterator[HalfUpdate]:
        longshore.configure(empty=True, **settings)
        with loaded(llama) as model:
            with HalfUpdate(longshore, model, next_llama, pool, streaming=streaming) as half:
                yield half
            assert is_exact(model, next_llama)
        longshore.assert_nothing_left()

    return begin


@pytest.mark.cluster_settings(empty=True)
def test_a_worker_killed_while_staging(
    longshore: Longshore, llama: StoredModel, next_llama: StoredModel, pool: ThreadPoolExecutor
) -> None:
    """Every rank has the old revision, and the next update goes through."""
    with loaded(llama) as model:
        with HalfUpdate(longshore, model, next_llama, pool) as half:
            longshore.kill(half.reader())
            with pytest.raises(cluster.UpdateFailed, match="died while it staged"):
                half.running.result(120)
        eventually(lambda: is_ready(longshore), "the rank was not replaced")
        assert is_exact(model, llama)
        assert model.revision == model.report.revision
        assert model.update(next_llama.uri).ranks == ("exchanged",) * RANKS
        assert is_exact(model, next_llama)
    longshore.assert_nothing_left()


@pytest.mark.cluster_settings(empty=True)
@pytest.mark.parametrize("streaming", [False, True], ids=["staging", "streaming"])
def test_an_agent_killed_while_ranks_read(longshore: Longshore, half_read: Any, streaming: bool) -> None:
    """The next agent is given the update again."""
    with half_read(streaming=streaming) as half:
        (agent,) = longshore.actor_names("agent-")
        longshore.wait_restarted(agent, longshore.kill(agent))
        half.proxy.open()
        assert half.running.result(200).ranks == ("exchanged",) * RANKS


@pytest.mark.cluster_settings(empty=True)
def test_the_coordinator_killed_while_staging(
    longshore: Longshore, llama: StoredModel, next_llama: StoredModel, pool: ThreadPoolExecutor
) -> None:
    """The update is dropped on every rank."""
    longshore.configure(empty=True)
    with loaded(llama) as model:
        with HalfUpdate(longshore, model, next_llama, pool) as half:
            longshore.wait_restarted(COORDINATOR, longshore.kill(COORDINATOR))
            with pytest.raises(cluster.UpdateFailed, match="the coordinator was restarted"):
                half.running.result(120)
        assert is_exact(model, llama)
        assert model.update(next_llama.uri).ranks == ("exchanged",) * RANKS
        assert is_exact(model, next_llama)
    longshore.assert_nothing_left()


def busy(shard: Any, gate: str) -> None:
    """Use the tensors of a rank until a file is there."""
    import os
    import time

    open(f"{gate}.begun", "w").close()
    while not os.path.exists(gate):
        time.sleep(0.05)


@contextmanager
def call_on_rank(
    model: cluster.LoadedModel, rank: int, gate: Path, pool: ThreadPoolExecutor
) -> Iterator[Callable[[], None]]:
    """A call that runs on one rank until the block ends, or what it yields is called."""
    call = pool.submit(model.call, busy, str(gate), ranks=[rank])
    try:
        eventually(lambda: Path(f"{gate}.begun").exists(), "the call does not begin")
        yield gate.touch
    finally:
        gate.touch()
        call.exception(60)


@pytest.fixture
def half_exchanged(
    longshore: Longshore, llama: StoredModel, next_llama: StoredModel, pool: ThreadPoolExecutor, tmp_path: Path
) -> Iterator[tuple[Any, Future[Any], Callable[[], None]]]:
    """A model of which rank 1 has the new revision, and rank 0 waits for a call: (model, its update, end the call)."""
    with loaded(llama) as model, call_on_rank(model, 0, tmp_path / "gate", pool) as end_call:
        running = pool.submit(model.update, next_llama.uri, timeout_s=300)
        eventually(lambda: any("exchanged" in m.update for m in longshore.models()), "nothing is exchanged")
        yield model, running, end_call
    longshore.assert_nothing_left()


def test_a_worker_killed_in_the_exchange(longshore: Longshore, half_exchanged: Any, next_llama: StoredModel) -> None:
    """Its replacement loads the new revision."""
    model, running, _ = half_exchanged
    longshore.kill(sorted(longshore.worker_pids())[0])
    assert running.result(200).ranks == ("replaced", "exchanged")
    assert is_exact(model, next_llama)


@pytest.mark.cluster_settings(stuck_after_s=5)
def test_a_worker_stopped_in_the_exchange(longshore: Longshore, half_exchanged: Any, next_llama: StoredModel) -> None:
    """It is replaced like one that died. One that waits for a call, and answers, is not."""
    model, running, _ = half_exchanged
    with pytest.raises(TimeoutError):
        running.result(15)
    longshore.kill(sorted(longshore.worker_pids())[0], signal.SIGSTOP)
    assert running.result(120).ranks == ("replaced", "exchanged")
    assert is_exact(model, next_llama)


def test_the_coordinator_killed_in_the_exchange(
    longshore: Longshore, half_exchanged: Any, next_llama: StoredModel
) -> None:
    """The next one goes on with the exchange."""
    model, running, end_call = half_exchanged
    pids = longshore.worker_pids()
    longshore.wait_restarted(COORDINATOR, longshore.kill(COORDINATOR))
    end_call()
    report = running.result(200)
    assert (report.resumed, report.ranks) == (True, ("exchanged",) * RANKS)
    assert is_exact(model, next_llama)
    assert longshore.worker_pids() == pids
    assert model.revision == report.revision
    again = loaded(next_llama)
    assert again.model_id == model.model_id
    again.release()


def test_coordinator_and_worker_killed_in_the_exchange(
    longshore: Longshore, half_exchanged: Any, next_llama: StoredModel
) -> None:
    model, running, _ = half_exchanged
    first = sorted(longshore.worker_pids())[0]
    old_pid = longshore.kill(COORDINATOR)
    longshore.kill(first)
    longshore.wait_restarted(COORDINATOR, old_pid)
    assert running.result(200).ranks == ("replaced", "exchanged")
    assert is_exact(model, next_llama)


def test_an_agent_killed_in_the_exchange(longshore: Longshore, half_exchanged: Any, next_llama: StoredModel) -> None:
    """A rank that is lost afterwards is loaded with the new revision."""
    model, running, end_call = half_exchanged
    agent = longshore.actor_names("agent-")[0]
    longshore.wait_restarted(agent, longshore.kill(agent))
    end_call()
    assert running.result(200).ranks == ("exchanged",) * RANKS
    lost = sorted(longshore.worker_pids())[1]
    longshore.kill(lost)
    replacement = lost.removesuffix("-0") + "-1"
    eventually(lambda: replacement in longshore.actor_names("worker-"), "it was not replaced")
    eventually(lambda: is_ready(longshore), "it is not ready again")
    assert is_exact(model, next_llama)


@pytest.mark.cluster_settings(empty=True)
def test_a_worker_killed_while_it_streams(longshore: Longshore, half_read: Any) -> None:
    with half_read(streaming=True) as half:
        longshore.kill(half.reader())
        half.proxy.open()
        assert sorted(half.running.result(200).ranks) == ["exchanged", "replaced"]


@pytest.mark.cluster_settings(empty=True, stuck_after_s=5)
def test_a_stream_waits_for_calls(
    longshore: Longshore, llama: StoredModel, next_llama: StoredModel, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """A rank that waits for a call has not said hello to its agent, for however long: it is not stuck."""
    with loaded(llama) as model:
        with call_on_rank(model, 0, tmp_path / "gate", pool):
            running = pool.submit(model.update, next_llama.uri, streaming=True, timeout_s=300)
            with pytest.raises(TimeoutError):
                running.result(20)
        assert running.result(200).ranks == ("exchanged",) * RANKS
        assert is_exact(model, next_llama)
    longshore.assert_nothing_left()


@pytest.mark.cluster_settings(empty=True, stuck_after_s=5)
def test_a_worker_stopped_before_it_streams(
    longshore: Longshore, llama: StoredModel, next_llama: StoredModel, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with loaded(llama) as model:
        with call_on_rank(model, 0, tmp_path / "gate", pool):
            running = pool.submit(model.update, next_llama.uri, streaming=True, timeout_s=300)
            eventually(lambda: any("is read" in m.update for m in longshore.models()), "nothing is read")
            longshore.kill(sorted(longshore.worker_pids())[0], signal.SIGSTOP)
            assert running.result(200).ranks == ("replaced", "exchanged")
        assert is_exact(model, next_llama)
    longshore.assert_nothing_left()


@pytest.mark.cluster_settings(empty=True)
def test_the_coordinator_killed_while_ranks_stream(longshore: Longshore, half_read: Any) -> None:
    with half_read(streaming=True) as half:
        longshore.wait_restarted(COORDINATOR, longshore.kill(COORDINATOR))
        half.proxy.open()
        report = half.running.result(200)
        assert (report.resumed, report.ranks) == (True, ("exchanged",) * RANKS)


@pytest.mark.cluster_settings(empty=True, stuck_after_s=5)
def test_coordinator_then_agent_killed_while_ranks_stream(longshore: Longshore, half_read: Any) -> None:
    """Nobody has the tables of the stream any more: ranks that have not read all of it are replaced."""
    with half_read(streaming=True, stuck_after_s=5) as half:
        longshore.wait_restarted(COORDINATOR, longshore.kill(COORDINATOR))
        eventually(lambda: any("restarted" in m.update for m in longshore.models()), "it does not go on")
        (agent,) = longshore.actor_names("agent-")
        longshore.wait_restarted(agent, longshore.kill(agent))
        half.proxy.open()
        report = half.running.result(200)
        assert report.resumed
        assert "replaced" in report.ranks


@pytest.mark.cluster_settings(empty=True)
def test_damaged_bytes_end_an_update(
    longshore: Longshore, llama: StoredModel, next_llama: StoredModel, copy_of: Callable[[StoredModel], StoredModel]
) -> None:
    """What is staged leaves the old revision; a stream leaves a broken model, which another update makes whole."""
    longshore.configure(empty=True)
    damaged = copy_of(next_llama)
    whole = {}
    for shard in damaged.in_bucket.glob("*.safetensors"):
        whole[shard] = shard.read_bytes()
        old = (llama.folder / shard.name).read_bytes()
        shard.write_bytes(bytes(a ^ (8 if a != b else 0) for a, b in zip(whole[shard], old, strict=True)))
    damaged.server.refresh()
    with loaded(llama) as model:
        with pytest.raises(cluster.UpdateFailed, match="not the published ones"):
            model.update(damaged.uri)
        assert is_exact(model, llama)
        with pytest.raises(cluster.ModelBroken):
            model.update(damaged.uri, streaming=True)
        with pytest.raises(cluster.ModelBroken):
            model.call(len)
        with pytest.raises(cluster.UpdateFailed, match="contents of two revisions, as before"):
            model.update(damaged.uri)
        for shard, data in whole.items():
            shard.write_bytes(data)
        damaged.server.refresh()
        report = model.update(damaged.uri)
        assert report.changed_bytes > 0.9 * model.report.model_bytes  # nothing that the ranks hold was trusted
        assert is_exact(model, next_llama)
    longshore.assert_nothing_left()
