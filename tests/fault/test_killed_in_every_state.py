"""SIGKILL of the coordinator, an agent or a worker in every state that a load can be in while there is one of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import cluster
from actors.links import COORDINATOR
from cluster import LoadedModel, LoadReport
from cluster.scheduling.load_state import LoadState
from tests.support.gated_proxy import GatedProxy
from tests.support.half_load import readers
from tests.support.ray_clusters import Longshore, eventually
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster_settings(empty=True, cpu_ranks_per_node=2, arena_bytes=16 << 20),
]


class Case:
    """One load of two ranks, brought to a state and held there."""

    def __init__(self, longshore: Longshore, model: StoredModel, proxy: GatedProxy, pool: ThreadPoolExecutor) -> None:
        self.longshore, self.stored, self.proxy, self._pool = longshore, model, proxy, pool
        self.loading: Future[LoadedModel] | None = None
        self.let_go: Callable[[], None] = proxy.open

    def begin(self, **options: Any) -> None:
        options = {**self.stored.options, "endpoint_url": self.proxy.endpoint_url, **options}
        self.loading = self._pool.submit(
            cluster.load, self.stored.uri, tensor_parallel_size=2, device="cpu", keep=True, **options
        )

    def wait_for(self, state: LoadState) -> None:
        def is_there() -> bool:
            assert self.loading is not None
            if self.loading.done():
                self.loading.result()
            return state.value in [model.progress.state for model in self.longshore.models()]

        eventually(is_there, lambda: f"not {state.value}: {self.longshore.models()}")


def planning(case: Case) -> None:
    """The store does not hand out the manifest."""
    case.proxy.hold_all()
    case.begin()
    case.proxy.wait_until_held()


def waiting(case: Case) -> None:
    """Another model has the places, until the coordinator was killed."""
    model = cluster.load(case.stored.uri, tensor_parallel_size=4, device="cpu", **case.stored.options)
    case.begin(wait_for_resources_s=120)
    case.wait_for(LoadState.WAITING)

    def let_go() -> None:
        model.release()
        case.proxy.open()

    case.let_go = let_go


def starting(case: Case) -> None:
    """An agent does not answer: it is stopped."""
    cluster.load(case.stored.uri, device="cpu", **case.stored.options).release()
    pids: list[int] = []

    def let_go() -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        case.proxy.open()

    case.let_go = let_go
    pids += [case.longshore.kill(name, signal.SIGSTOP) for name in case.longshore.actor_names("agent-")]
    case.begin()
    case.wait_for(LoadState.STARTING)


def loading(case: Case) -> None:
    case.begin()
    eventually(lambda: readers(case.longshore, case.proxy.holds_for), "no rank reads")


def ready(case: Case) -> None:
    case.proxy.open()
    case.begin()
    case.wait_for(LoadState.READY)


def degraded(case: Case) -> None:
    """A rank was lost, and finds neither store nor cache to be filled again."""
    case.proxy.open()
    case.begin()
    case.wait_for(LoadState.READY)
    case.proxy.hold_all()
    case.longshore.kill(sorted(case.longshore.worker_pids())[1])
    case.wait_for(LoadState.DEGRADED)


STATES = {
    LoadState.PLANNING: planning,
    LoadState.WAITING: waiting,
    LoadState.STARTING: starting,
    LoadState.LOADING: loading,
    LoadState.READY: ready,
    LoadState.DEGRADED: degraded,
}


def kill_coordinator(case: Case) -> None:
    case.longshore.wait_restarted(COORDINATOR, case.longshore.kill(COORDINATOR))


def kill_agents(case: Case) -> None:
    killed = {name: case.longshore.kill(name) for name in case.longshore.actor_names("agent-")}
    for name, pid in killed.items():
        case.longshore.wait_restarted(name, pid)


def kill_worker(case: Case) -> None:
    """Kill the worker of rank 0, which may start after that of rank 1."""

    def first() -> str | None:
        return next((name for name in case.longshore.living_workers() if name.endswith("-0-0")), None)

    case.longshore.kill(eventually(first, "there is no worker of rank 0"))


WITH_WORKERS = [LoadState.STARTING, LoadState.LOADING, LoadState.READY, LoadState.DEGRADED]
STRIKES = [
    *[(kill_coordinator, state) for state in STATES],
    *[(kill_agents, state) for state in [LoadState.WAITING, *WITH_WORKERS]],  # WAITING: it has those of the other model
    *[(kill_worker, state) for state in WITH_WORKERS],
]
SHORT = {(kill, LoadState.LOADING) for kill in (kill_coordinator, kill_agents, kill_worker)}  # others: `make test-slow`


@pytest.fixture
def case(longshore: Longshore, llama: StoredModel) -> Iterator[Case]:
    with ThreadPoolExecutor(1) as pool, GatedProxy(llama.server.endpoint_url, ranges=10) as proxy:
        case = Case(longshore, llama, proxy, pool)
        try:
            yield case
        finally:
            case.let_go()


def test_every_state_that_can_be_left_is_tried() -> None:
    assert set(STATES) == {state for state in LoadState if not state.is_terminal}


@pytest.mark.parametrize(
    ("kill", "state"),
    [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in STRIKES],
    ids=lambda part: getattr(part, "value", None) or part.__name__,
)
def test_a_load_recovers_from_a_kill_in_this_state(case: Case, kill: Callable[[Case], None], state: LoadState) -> None:
    longshore = case.longshore
    STATES[state](case)
    workers = longshore.living_workers()
    kill(case)
    case.let_go()
    if kill is kill_worker:
        eventually(lambda: [n for n in longshore.actor_names("worker-") if n.endswith("-0-1")], "no replacement")
    assert case.loading is not None
    model = case.loading.result(300)
    eventually(lambda: [m.progress.state for m in longshore.models()] == ["ready"], "it is not ready")
    assert model.call(shard_differs, str(case.stored.folder), 2, 1, KV_HEADS) == [[], []]
    assert [m.progress.model_id for m in longshore.models()] == [model.model_id]
    if kill is not kill_worker and state in (LoadState.LOADING, LoadState.READY):
        assert longshore.living_workers() == workers  # they noticed nothing
        assert model.report.verified == "blake3"
        assert model.report.model_bytes == model.report.placed_bytes - _replicated_bytes(model)
        check_sources(model.report, fetched=state is LoadState.LOADING)


def check_sources(report: LoadReport, *, fetched: bool) -> None:
    """Every byte that a node needed came from somewhere; `fetched`: from the store, and that is known."""
    for node in report.nodes:
        first_bytes = node.store_bytes - node.refetched_bytes
        assert first_bytes + node.disk_bytes + node.cached_bytes + node.unknown_bytes == node.needed_bytes, node
        if fetched:
            assert (node.store_chunks, first_bytes) == (node.needed_chunks, node.needed_bytes), node


def _replicated_bytes(model: LoadedModel) -> int:
    """Norms: what both ranks hold of a Llama."""
    (norms, _) = model.call(lambda shard: sum(t.nbytes for name, t in shard.items() if "norm" in name))
    return int(norms)
