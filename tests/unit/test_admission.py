"""Check that a load fits beside its own workers while they start and take their memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.coordination import fit as fitting
from actors.coordination.fit import fit_in
from actors.coordination.model_record import ModelRecord, Placement
from cluster.config import Config
from cluster.errors import DoesNotFit
from cluster.fit.needs import WORKER_BYTES
from cluster.messages import NodeFacts, Version
from cluster.options import LoadOptions
from cluster.planning.packed_plan import RankFacts
from cluster.request import make_request
from cluster.scheduling.holders import Holders
from cluster.scheduling.load_state import Life
from longshore.installation import VERSION
from storage.host.memory import MemoryPool

MIB = 1 << 20
TENSORS_BYTES = 500 * MIB
RANKS = 2
CONFIG = Config(host_reserve_bytes=0, arena_bytes=64 * MIB, slot_bytes=MIB)


class Host:
    """A host whose free memory shrinks as workers start; its agent reports it."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.looks = 0

    def facts(self) -> NodeFacts:
        self.looks += 1
        pool = MemoryPool("host", free_bytes=self.free_bytes, total_bytes=1 << 40)
        return NodeFacts(node_id="n", host="host", version="", arena_bytes=64 * MIB, pools=(pool,), gpus=())

    async def of(self, hosts: dict[str, str]) -> list[str]:
        return list(hosts)

    async def ask(self, node_id: str, question: Any) -> Any:
        async def answer() -> NodeFacts:
            return self.facts()

        return await question(SimpleNamespace(facts=SimpleNamespace(remote=answer)))


class Worker:
    """A process that starts on the host. It takes half of its memory at once, the rest when it is up."""

    def __init__(self, host: Host, *, comes: bool = True) -> None:
        self.host = host
        self.hellos = 0
        self.comes = comes
        host.free_bytes -= WORKER_BYTES // 2
        self.hello = self

    def options(self, concurrency_group: str) -> Worker:
        assert concurrency_group == "control"  # no load or call prevents it
        return self

    async def remote(self) -> Version:
        self.hellos += 1
        if not self.comes:
            raise RuntimeError("it died")
        if self.hellos == 1:
            self.host.free_bytes -= WORKER_BYTES // 2
        return VERSION


class NoWorkerGroups:
    def idle(self) -> list[Any]:
        return []


def case(host: Host, workers: list[Worker] | None) -> tuple[ModelRecord, Any]:
    request = make_request(LoadOptions("/models/a", tensor_parallel_size=RANKS, device="cpu"))
    record = ModelRecord("m-1", request, Life.new(RANKS), Holders())
    placements = [Placement(rank, "n", "host", None) for rank in range(RANKS)]
    for placement, worker in zip(placements, workers or [], strict=False):
        placement.worker = worker
    record.placements = dict(enumerate(placements))
    half = TENSORS_BYTES // RANKS
    return record, SimpleNamespace(ranks=tuple(RankFacts(half, half, half) for _ in range(RANKS)))


def fit(host: Host, record: ModelRecord, plan: Any) -> None:
    asyncio.run(fit_in(record, plan, host, CONFIG, NoWorkerGroups(), [], None))  # type: ignore[arg-type]


ENOUGH_BYTES = TENSORS_BYTES + RANKS * WORKER_BYTES


@pytest.mark.parametrize("started", [0, 1, 2])
def test_workers_that_are_just_starting_are_counted_once(started: int) -> None:
    host = Host(ENOUGH_BYTES)
    workers = [Worker(host) for _ in range(started)]
    record, plan = case(host, workers)
    fit(host, record, plan)
    assert [worker.hellos for worker in workers] == [1] * started
    assert [placement.is_up for placement in record.placements.values()] == [rank < started for rank in range(RANKS)]
    assert sum(record.host_bytes.values()) == TENSORS_BYTES  # promised


@pytest.mark.parametrize("started", [0, 1, 2])
def test_one_missing_byte_is_refused(started: int) -> None:
    host = Host(ENOUGH_BYTES - 1)
    record, plan = case(host, [Worker(host) for _ in range(started)])
    with pytest.raises(DoesNotFit, match="host memory"):
        fit(host, record, plan)
    assert record.host_bytes == {}


def test_a_load_that_can_never_fit_waits_for_no_worker() -> None:
    host = Host(ENOUGH_BYTES - WORKER_BYTES - 1)  # not enough even if the workers had all of theirs
    workers = [Worker(host) for _ in range(RANKS)]
    record, plan = case(host, workers)
    with pytest.raises(DoesNotFit):
        fit(host, record, plan)
    assert [worker.hellos for worker in workers] == [0, 0]


def test_workers_that_never_start_end_the_wait() -> None:
    host = Host(ENOUGH_BYTES)
    workers = [Worker(host, comes=False) for _ in range(RANKS)]
    record, plan = case(host, workers)
    with pytest.raises(DoesNotFit):
        fit(host, record, plan)
    assert [worker.hellos for worker in workers] == [1, 1]


def test_a_replaced_worker_is_not_mistaken_for_its_successor() -> None:
    host = Host(ENOUGH_BYTES)
    record, _ = case(host, [Worker(host)])
    placement = record.placements[0]

    async def replaced() -> bool:
        coming = asyncio.ensure_future(fitting.come_up([placement]))
        await asyncio.sleep(0)
        placement.worker = None
        return await coming

    assert asyncio.run(replaced()) is False
    assert not placement.is_up
