"""A device that comes up in a thread does its requests in order and reports its errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.devices.cpu_device import CpuDevice
from actors.devices.device import Device, OpeningDevice
from actors.rank.executor import RankLoader
from cluster.errors import DeviceUnavailable, DoesNotFit
from cluster.telemetry.report import RankReport
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import safetensors_bytes
from tests.support.local_node import Belongings, LocalNode, Rank, local_node, plan_of, start_all

OBJECTS = {"model.safetensors": safetensors_bytes([(f"t{n}", "U8", (64, 64)) for n in range(20)], seed=7)}
PLAN = plan_of(OBJECTS, (1, 1, 1), 4096)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


@pytest.fixture
def node(shm_dir: Path) -> Iterator[LocalNode]:
    with local_node(shm_dir, slots=32) as node:
        yield node


def rank_on(node: LocalNode, open_it: Callable[[], Device]) -> tuple[Rank, OpeningDevice]:
    device = OpeningDevice(open_it)
    job = node.job(PLAN, node.begin(PLAN), 0)
    return Rank(RankLoader(node.agent, job, device, store=MemoryStore(OBJECTS)), device), device  # type: ignore[arg-type]


def test_chunks_are_fetched_before_the_device_is_there(node: LocalNode) -> None:
    up = threading.Event()

    def slowly() -> Device:
        up.wait(60)
        return CpuDevice()

    rank, device = rank_on(node, slowly)
    (thread,) = start_all([rank])
    while (report := node.agent.report("load-1")).store_chunks < report.needed_chunks:
        thread.join(0.01)
        assert thread.is_alive(), rank.outcome
    up.set()
    thread.join()
    assert isinstance(rank.outcome, RankReport)
    assert (rank.outcome.device, device.name) == ("cpu", "cpu")
    found = rank.tensor_bytes()
    assert len(found) == 20
    begin = len(OBJECTS["model.safetensors"]) - 20 * 4096
    for number in range(20):
        whole = OBJECTS["model.safetensors"][begin + number * 4096 : begin + (number + 1) * 4096]
        assert found[f"t{number}"] == ((64, 64), whole)
    device.free()
    device.free()


def test_asking_how_long_memory_took_waits_for_no_device() -> None:
    up = threading.Event()
    device = OpeningDevice(lambda: (up.wait(60), CpuDevice())[1])
    assert device.fresh_s == 0.0
    up.set()
    assert device.name == "cpu"
    assert device.fresh_s == 0.0
    device.free()
    broken = OpeningDevice(unavailable)
    with pytest.raises(DeviceUnavailable):
        assert broken.name
    assert broken.fresh_s == 0.0
    broken.free()


class WithoutRoom(CpuDevice):
    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        raise DoesNotFit("no room", need_bytes=sum(segment_bytes))


def unavailable() -> Device:
    raise DeviceUnavailable("no GPU here")


@pytest.mark.parametrize(("open_it", "error"), [(unavailable, DeviceUnavailable), (WithoutRoom, DoesNotFit)])
def test_a_device_that_does_not_come_up_ends_the_load(
    node: LocalNode, open_it: Callable[[], Device], error: type[Exception]
) -> None:
    rank, device = rank_on(node, open_it)
    rank.run()
    assert isinstance(rank.outcome, error)
    device.free()
