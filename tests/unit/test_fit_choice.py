"""The coordinator's decision about a load that does not fit, with real plans."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.coordination import nodes
from actors.coordination.fit import FitChoice
from actors.coordination.model_record import ModelRecord, Placement
from cluster.config import Config, TrustPolicy
from cluster.errors import DoesNotFit
from cluster.fit.search import Limits, PlannedChange
from cluster.layouts.mesh import Layout
from cluster.messages import NodeFacts
from cluster.options import LoadOptions
from cluster.planning.packed_plan import PackedPlan
from cluster.planning.process import PlanningServer
from cluster.request import LoadRequest, make_request
from cluster.scheduling.holders import Holders
from cluster.scheduling.load_state import Life
from cluster.scheduling.topology import NodeInfo
from storage.errors import StoreError
from storage.host.memory import GpuMemory, MemoryPool
from tests.support.planned_models import write_linear_llama

MIB = 1 << 20
CONFIG = Config(host_reserve_bytes=0, device_reserve_bytes=0, arena_bytes=64 * MIB, slot_bytes=MIB)
SCREEN_CHARS = 24 * 80
WORKER_BYTES = 300 * MIB  # of a process that is about to start


class Planner:
    """Does the planning process's work in this process."""

    def __init__(self) -> None:
        self.server = PlanningServer(MIB // 32, 5.0)
        self.asked: list[str] = []

    async def prepare(self, request: LoadRequest) -> PackedPlan:
        self.asked.append("prepare")
        return self.server.prepare(request, TrustPolicy())

    async def changes(self, request: LoadRequest, purpose: str, limits: Limits = ()) -> tuple[str, list[PlannedChange]]:
        self.asked.append(purpose)
        return self.server.changes(request, TrustPolicy(), purpose, limits)


@dataclass
class Agents:
    """The agents of one node."""

    facts: NodeFacts

    async def of(self, hosts: dict[str, str]) -> list[str]:
        return list(hosts)

    async def ask(self, node_id: str, question: Callable[[Any], Awaitable[Any]]) -> Any:
        async def answer() -> NodeFacts:
            return self.facts

        return await question(SimpleNamespace(facts=SimpleNamespace(remote=answer)))


class NoWorkerGroups:
    def idle(self) -> list[Any]:
        return []


class Case:
    """One load on one node with so much memory."""

    def __init__(
        self, folder: Path, mode: str, device: str, have_bytes: int, layout: Layout | None = None, **facts: Any
    ) -> None:
        layout = layout or Layout()
        self.request = make_request(LoadOptions(str(folder), **asdict(layout), device=device, fit=mode))
        host = have_bytes + layout.ranks * WORKER_BYTES if device == "cpu" else 1 << 50
        gpus = tuple(GpuMemory(have_bytes, have_bytes) for _ in range(layout.ranks)) if device == "cuda" else ()
        told = {
            "arena_bytes": 64 * MIB,
            "window_bytes": 64 * MIB,
            "pools": (MemoryPool("host", host, host),),
            "gpus": gpus,
            **facts,
        }
        self.agents = Agents(NodeFacts(node_id="n", host="host", version="", **told))
        self.record = ModelRecord("m-1", self.request, Life.new(layout.ranks), Holders())
        self.record.placements = {rank: Placement(rank, "n", "host", None) for rank in range(layout.ranks)}
        self.planner = Planner()

    def choose(self) -> PackedPlan:
        choice = FitChoice(self.record, self.planner, self.agents, CONFIG, NoWorkerGroups())  # type: ignore[arg-type]

        async def run() -> PackedPlan:
            plan = await self.planner.prepare(self.request)
            self.record.plan = self.record.plan or plan
            return await choice.choose(plan, [], None)

        return asyncio.run(run())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_linear_llama(tmp_path, layers=2)


@pytest.fixture(autouse=True)
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeInfo("n", "host", gpus_free=1, gpus_total=2)
    monkeypatch.setattr(nodes, "cluster_nodes", lambda taken, most: [node])


def needs(model: Path, device: str = "cpu") -> int:
    plan = asyncio.run(Planner().prepare(Case(model, "strict", device, 0).request))
    return plan.ranks[0].device_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_a_load_that_fits_is_not_changed(model: Path, mode: str, device: str) -> None:
    case = Case(model, mode, device, needs(model))
    plan = case.choose()
    assert plan is case.record.plan
    assert case.planner.asked == ["prepare"]  # no other plan was made
    assert replace(case.record.request, tried=(), auto_identity="") == case.request
    assert [each.what for each in case.record.request.tried] == ["as given"] * (mode == "auto")
    assert case.record.request.identity() == case.request.identity()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_chooses_a_smaller_load_and_says_why(model: Path, device: str, caplog: pytest.LogCaptureFixture) -> None:
    full = needs(model)
    case = Case(model, "auto", device, full * 8 // 10)
    with caplog.at_level(logging.WARNING, "longshore.fit"):
        plan = case.choose()
    record = case.record
    assert record.plan is plan
    assert plan.ranks[0].device_bytes + plan.ranks[0].staging_bytes <= full * 8 // 10
    assert record.request.precision.quantization in ("fp8", "int8", "int4")
    assert record.total_bytes == plan.ranks[0].read_bytes
    tried = record.request.tried
    assert tried[0].what == "as given"
    assert "needs" in tried[0].why_not
    assert tried[-1].why_not == ""
    assert tried[-1].what == f'quantization="{record.request.precision.quantization}"'
    (said,) = [entry.getMessage() for entry in caplog.records]
    assert "is loaded with quantization=" in said
    assert len(said) < SCREEN_CHARS
    # A client that makes the same request gets this model; a strict request does not.
    assert record.request.identity() == case.request.identity()
    assert record.request.identity() != Case(model, "strict", device, 0).request.identity()
    assert record.host_bytes == {0: (plan.ranks[0].device_bytes + plan.ranks[0].staging_bytes) * (device == "cpu")}


def test_a_decision_is_kept(model: Path) -> None:
    """Ranks that must move while they start do not cause another choice."""
    case = Case(model, "auto", "cpu", needs(model) * 8 // 10)
    first = case.choose()
    request = case.record.request
    assert case.choose() is first
    assert case.record.request == request
    case.agents.facts = replace(case.agents.facts, pools=(MemoryPool("host", WORKER_BYTES, WORKER_BYTES),))
    with pytest.raises(DoesNotFit):
        case.choose()
    assert case.record.request == request


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_a_refusal_is_short_and_names_a_change_that_fits(model: Path, mode: str) -> None:
    have = needs(model) * (8 if mode == "strict" else 1) // 10
    nothing = MemoryPool("host", WORKER_BYTES, WORKER_BYTES)  # for offload
    case = Case(model, mode, "cuda", have, pools=(nothing,))
    with pytest.raises(DoesNotFit) as caught:
        case.choose()
    said = str(caught.value)
    assert len(said) < SCREEN_CHARS
    assert "host: rank 0 needs" in said
    assert "a GPU has" in said
    if mode == "strict":
        assert "The cheapest change that fits: tensor_parallel_size=2" in said  # a GPU is free, nothing is lost
        assert 'quantization="fp8"' in said
        assert 'fit="auto"' in said
        assert caught.value.details["change"] == "tensor_parallel_size=2"
    else:
        assert 'fit="auto" tried: as given: ' in said
        assert 'quantization="int4": ' in said
    assert case.record.plan is not None
    assert case.record.host_bytes == {}  # nothing was promised
    assert case.record.request == case.request


def test_tensors_without_room_on_a_gpu_stay_in_host_memory(model: Path) -> None:
    case = Case(model, "auto", "cuda", needs(model) * 2 // 10)
    plan = case.choose()
    assert case.record.request.tried[-1].what.startswith("device_map=")
    assert case.record.request.mapping is not None
    assert case.record.request.precision == case.request.precision  # as it was requested
    devices = dict(plan.ranks[0].devices)
    assert devices["cpu"] > 0
    assert case.record.host_bytes == {0: devices["cpu"]}


def test_a_refusal_on_cpu_offers_a_change_that_fits_the_host(model: Path) -> None:
    case = Case(model, "strict", "cpu", needs(model) * 8 // 10)
    with pytest.raises(DoesNotFit, match=r"needs .* of host memory") as caught:
        case.choose()
    assert "The cheapest change that fits: quantization=" in caught.value.hint
    assert "tensor_parallel_size" not in caught.value.hint  # on the same host this does not help


def test_no_change_is_planned_when_tensors_are_not_the_cause(model: Path) -> None:
    case = Case(model, "auto", "cpu", 1 << 40, arena_bytes=MIB, window_bytes=MIB)  # one slot
    with pytest.raises(DoesNotFit, match="arena slots"):
        case.choose()
    assert case.planner.asked == ["prepare"]


def test_a_failing_store_does_not_hide_the_refusal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(model, "strict", "cuda", 1)

    async def lost(*args: object) -> None:
        raise StoreError("gone")

    monkeypatch.setattr(case.planner, "changes", lost)
    with pytest.raises(DoesNotFit, match="rank 0 needs"):
        case.choose()


def test_auto_tries_nothing_when_processes_alone_do_not_fit(model: Path) -> None:
    case = Case(model, "auto", "cpu", -MIB)
    with pytest.raises(DoesNotFit) as refused:
        case.choose()
    assert 'fit="auto" tried no step' in refused.value.hint
    assert "changes" not in case.planner.asked
    strict = Case(model, "strict", "cpu", -MIB)
    with pytest.raises(DoesNotFit) as refused:
        strict.choose()
    assert "auto" not in refused.value.hint
