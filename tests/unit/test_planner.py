"""The coordinator's planning processes: typed errors come back, a lost child costs one request, none outlives us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from actors.coordination import planner as planner_module
from actors.coordination.planner import MOST_PLANS, Planner
from cluster.errors import ClusterError
from cluster.options import LoadOptions
from cluster.planning.make_plan import prepare_plan
from cluster.planning.packed_plan import unpack_shared
from cluster.request import LoadRequest, make_request
from storage.errors import LongshoreError, NotACheckpoint, StoreUnavailable
from storage.host.processes import ProcessId
from tests.support.checkpoints import write_tiny_llama
from tests.support.shared_memory import REPOSITORY

MIB = 1 << 20
pytestmark = pytest.mark.slow  # each starts processes


def request(folder: Path, fsdp: int = 2) -> LoadRequest:
    return make_request(LoadOptions(str(folder), fsdp_size=fsdp))


def with_planner(body: Callable[[Planner], Awaitable[None]]) -> set[ProcessId]:
    """Run `body`; the children there were, all gone."""
    children: set[ProcessId] = set()

    async def run() -> None:
        planner = Planner(MIB, 5.0)
        try:
            await body(planner)
        finally:
            children.update(filter(None, (ProcessId.of(process.pid) for process in planner._all)))
            await planner.close()

    asyncio.run(run())
    assert not [child for child in children if child.is_alive()]
    return children


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path)
    return tmp_path


def test_a_plan_comes_back_as_it_was_made(model: Path):
    async def body(planner: Planner) -> None:
        packed = await planner.prepare(request(model))
        index, plan = prepare_plan(request(model), chunk_bytes=MIB, read_timeout_s=5)
        assert (packed.revision, packed.verified, packed.model_bytes) == (plan.revision, "transport", index.size_bytes)
        assert [facts.size_bytes for facts in packed.ranks] == [rank.size_bytes for rank in plan.ranks]
        assert [facts.device_bytes for facts in packed.ranks] == [rank.device_bytes for rank in plan.ranks]
        tables = unpack_shared(packed.shared)
        assert tables.shards == plan.shards
        assert tables.rank_plan(1).slices == plan.ranks[1].slices
        assert tables.chunk_ids(1).tolist() == plan.ranks[1].chunk_ids.tolist()
        assert await planner.is_current(request(model), packed.revision)
        assert not await planner.is_current(request(model), "another")
        more = replace(request(model), layout=request(model).layout.with_replicas(3))
        ranks, shared = await planner.scaled(packed.shared, more.layout)
        expected = await planner.prepare(more)
        assert ranks == expected.ranks
        scaled, fresh = unpack_shared(shared), unpack_shared(expected.shared)
        for rank in range(more.world_size):
            assert scaled.rank_plan(rank).slices == fresh.rank_plan(rank).slices

    assert len(with_planner(body)) == 1  # kept warm


def test_errors_come_back_typed_and_the_child_goes_on(tmp_path: Path, model: Path):
    async def body(planner: Planner) -> None:
        with pytest.raises(LongshoreError) as caught:
            await planner.prepare(request(tmp_path / "nothing-here"))
        assert type(caught.value) is not LongshoreError
        (tmp_path / "empty").mkdir()
        with pytest.raises(NotACheckpoint):
            await planner.prepare(request(tmp_path / "empty"))
        with pytest.raises(LongshoreError, match="KeyError while planning"):
            await planner._ask("no such verb")
        await planner.prepare(request(model))

    assert len(with_planner(body)) == 1


def test_a_child_killed_in_mid_request_costs_that_request(model: Path, monkeypatch: pytest.MonkeyPatch):
    async def body(planner: Planner) -> None:
        await planner.prepare(request(model))
        (child,) = planner._all
        os.kill(child.pid, signal.SIGSTOP)  # it is asked and does not answer
        asked = asyncio.ensure_future(planner.prepare(request(model)))
        await asyncio.sleep(0.1)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match="planning did not end"):
            await asked
        assert (await planner.prepare(request(model))).model_bytes > 0

    with_planner(body)


def test_an_idle_child_that_is_killed_fails_no_request(model: Path):
    async def body(planner: Planner) -> None:
        await planner.prepare(request(model))
        (child,) = planner._all
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        assert (await planner.prepare(request(model))).model_bytes > 0

    with_planner(body)


def test_a_late_or_cancelled_request_ends_its_child(model: Path, monkeypatch: pytest.MonkeyPatch):
    async def body(planner: Planner) -> None:
        await planner.prepare(request(model))
        (child,) = planner._all
        os.kill(child.pid, signal.SIGSTOP)
        monkeypatch.setattr(planner_module, "PLANNING_TIMEOUT_S", 0.2)
        with pytest.raises(ClusterError, match="planning did not end"):
            await planner.prepare(request(model))
        monkeypatch.undo()
        asked = asyncio.ensure_future(planner.prepare(request(model)))
        await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        # The next answer is the next request's, and not that of the one before.
        assert not await planner.is_current(request(model), "another")

    with_planner(body)


def test_many_requests_at_once_share_a_few_children(model: Path):
    async def body(planner: Planner) -> None:
        plans = await asyncio.gather(*(planner.prepare(request(model, fsdp)) for fsdp in (1, 2, 3, 4, 1, 2)))
        assert [len(plan.ranks) for plan in plans] == [1, 2, 3, 4, 1, 2]
        assert len(planner._all) <= MOST_PLANS

    with_planner(body)


def test_checks_wait_for_no_plan(model: Path):
    async def body(planner: Planner) -> None:
        packed = await planner.prepare(request(model))
        (child,) = planner._all
        os.kill(child.pid, signal.SIGSTOP)  # it takes the first plan and never answers
        plans = [asyncio.ensure_future(planner.prepare(request(model)))]
        await asyncio.sleep(0.1)
        planner._plans = asyncio.Semaphore(0)
        plans.append(asyncio.ensure_future(planner.prepare(request(model))))
        assert await planner.is_current(request(model), packed.revision)
        for plan in plans:
            plan.cancel()
        await asyncio.gather(*plans, return_exceptions=True)

    with_planner(body)


def test_a_slow_check_is_an_unavailable_store(model: Path):
    async def body(planner: Planner) -> None:
        assert not await planner.is_current(request(model), "another")
        (child,) = planner._all
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            await planner.is_current(request(model), "another", 0.2)
        assert not await planner.is_current(request(model), "another")

    with_planner(body)


def test_a_child_ends_when_its_parent_is_killed(model: Path):
    code = """
import asyncio, sys
from actors.coordination.planner import Planner
from cluster.layouts.mesh import Layout
from cluster.options import LoadOptions
from cluster.options import LoadOptions
from cluster.request import make_request

async def main():
    planner = Planner(1 << 20, 5.0)
    await planner.prepare(make_request(LoadOptions(sys.argv[1])))
    print(*(process.pid for process in planner._all), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(model)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert parent.stdout is not None
    child = ProcessId.of(int(parent.stdout.readline()))
    assert child is not None
    parent.kill()
    parent.wait()
    parent.stdout.close()
    give_up_s = time.monotonic() + 30
    while child.is_alive():
        assert time.monotonic() < give_up_s, "the planning process outlived its parent"
        time.sleep(0.05)
