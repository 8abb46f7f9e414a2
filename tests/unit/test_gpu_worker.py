"""The worker of one rank as a plain class. It loads once, answers beside its tensors, and releases everything."""

from __future__ import annotations

import gc
import mmap
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from actors.devices.cpu_device import PROCESS_MEMORY, CpuDevice
from actors.gpu_worker import WITHDRAWN_KEPT, Gate, GpuWorker
from actors.rank.update import RankUpdate as RankExchange
from actors.shard import RankShard
from cluster.errors import LoadCancelled, ModelNotFound, RemoteCallFailed
from cluster.fit.options import parse_device_map
from cluster.layouts.mesh import Layout
from cluster.messages import Assignment, Orders, RankJob, RankUpdate, UpdateJob
from cluster.planning.make_plan import build_load_plan
from cluster.planning.plan import LoadPlan
from cluster.request import StoreAccess
from cluster.telemetry.report import RankReport
from cluster.user_values import Cursor, TensorBatch, pack_call, result_of, tensors
from longshore.installation import VERSION
from storage.checkpoints.checkpoint import open_model
from storage.errors import LongshoreError
from storage.host.processes import ProcessId
from storage.store_ref import parse_uri
from storage.stores.local import LocalStore
from tests.support.checkpoints import safetensors_bytes, write_objects
from tests.support.local_node import Belongings, LocalNode, SwitchedLink, local_node, plan_of
from tests.support.shared_memory import REPOSITORY

LOAD = "load-1"  # the first load of a LocalNode
SPECS = [(f"layers.{number}.weight", "BF16", (64, 8)) for number in range(12)]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, bytes]:
    objects = {"model.safetensors": safetensors_bytes(SPECS, seed=4)}
    write_objects(tmp_path, objects)
    return objects


@pytest.fixture
def plan(stored: dict[str, bytes], tmp_path: Path) -> LoadPlan:
    made = plan_of(stored, (1, 1, 1), 1024)
    etag = LocalStore(str(tmp_path)).stat("model.safetensors").etag
    return replace(made, shards=tuple(replace(shard, etag=etag) for shard in made.shards))


@pytest.fixture
def node(shm_dir: Path) -> Iterator[LocalNode]:
    with local_node(shm_dir, slots=8) as node:
        yield node


@pytest.fixture
def worker(node: LocalNode) -> Iterator[GpuWorker]:
    worker = GpuWorker("node-1", "cpu", 60.0, node.agent)
    yield worker
    worker.stop()
    _join_watch()
    PROCESS_MEMORY.keep(False)  # as it is where no worker was recycled


def job(node: LocalNode, plan: LoadPlan, tmp_path: Path) -> RankJob:
    access = StoreAccess(parse_uri(str(tmp_path)))
    return replace(node.job(plan, node.begin(plan), 0), store=access)


def called(worker: GpuWorker, load_id: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do what `LoadedModel.call` does, without Ray."""
    return result_of(0, worker.call(load_id, pack_call(fn, args, kwargs), call_id="called"))


def copied(worker: GpuWorker, load_id: str, most_bytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    """Do what `LoadedModel.state_dict` does, without Ray."""

    def batches() -> Iterator[TensorBatch]:
        after: Cursor | None = Cursor()
        while after is not None:
            yield (batch := worker.tensor_batch(load_id, after, most_bytes))
            after = batch.after

    return dict(tensors(batches()))


def test_a_shard_says_which_revision_it_has(worker: GpuWorker, node: LocalNode, plan: LoadPlan, tmp_path: Path):
    """The next one is noted before a call can begin."""
    given = job(node, plan, tmp_path)
    worker.start(given)
    worker.outcome(LOAD)
    assert called(worker, LOAD, lambda shard: shard.revision) == ""
    nothing_changed = UpdateJob(LOAD, "u-1", "", False, replace(given, shared=b"", revision="new"))
    worker.stage_update(nothing_changed)
    worker.update_outcome(LOAD, "u-1")
    assert called(worker, LOAD, lambda shard: shard.revision) == ""
    worker.exchange_update(LOAD, "u-1", "new")
    assert called(worker, LOAD, lambda shard: shard.revision) == "new"

    gate, noted = Gate(), []
    changes = replace(nothing_changed, job=replace(given, shared=b"tables"))
    update = RankExchange(changes, plan.ranks[0], worker._load._device, gate)  # type: ignore[union-attr, arg-type]
    update._staging, update._items, update._report = CpuDevice(), object(), object()  # type: ignore[assignment]
    update.exchange(lambda: noted.append(gate._writing))
    assert noted == [True]


def test_a_withdrawn_call_never_begins(worker: GpuWorker, node: LocalNode, plan: LoadPlan, tmp_path: Path):
    """Also one that comes after its withdrawal."""
    begun: list[str] = []
    worker.start(job(node, plan, tmp_path))
    worker.outcome(LOAD)
    for number in range(WITHDRAWN_KEPT + 5):
        worker.withdraw(f"call {number}")
    with pytest.raises(LoadCancelled):
        worker.call(LOAD, pack_call(begun.append, (), {}), call_id=f"call {WITHDRAWN_KEPT}")
    assert called(worker, LOAD, lambda shard: shard.rank) == 0
    assert len(worker._withdrawn) == WITHDRAWN_KEPT


def test_a_worker_loads_answers_copies_and_stops(
    worker: GpuWorker, node: LocalNode, plan: LoadPlan, tmp_path: Path, stored: Any
):
    me = worker.start(job(node, plan, tmp_path))
    assert me == ProcessId.current()
    assert worker.hello() == VERSION
    report = worker.outcome(LOAD)
    assert isinstance(report, RankReport)
    assert (report.node, report.device, report.size_bytes) == ("node-1", "cpu", plan.ranks[0].size_bytes)
    assert worker.outcome(LOAD) == report  # called again, it answers the same
    reference = {name: bytes(entry["data"]) for name, entry in safetensors.deserialize(stored["model.safetensors"])}
    for most_bytes in (1, 1000, 1500, 1 << 20):  # a tensor has 1024
        found = copied(worker, LOAD, most_bytes)
        assert {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in found.items()} == reference
        assert {(tensor.dtype, tensor.shape) for tensor in found.values()} == {(torch.bfloat16, (64, 8))}

    def count(shard: RankShard, add: int, *, times: int) -> int:
        return (len(shard) + add) * times

    assert called(worker, LOAD, count, 1, times=2) == 26
    with pytest.raises(RemoteCallFailed, match="ZeroDivisionError") as caught:
        called(worker, LOAD, lambda shard: 1 / 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(RemoteCallFailed, match=r"exit\(3\) on rank 0"):  # in an actor, SystemExit would end it
        called(worker, LOAD, lambda shard: sys.exit(3))
    assert called(worker, LOAD, count, 1, times=2) == 26
    worker.stop()
    worker.lifetime(LOAD)
    with pytest.raises(ModelNotFound):
        called(worker, LOAD, count, 1, times=2)
    assert worker._load is not None
    assert worker._load._device is not None
    assert worker._load._device._segments == []  # type: ignore[attr-defined]


def test_a_worker_started_twice_loads_once(worker: GpuWorker, node: LocalNode, plan: LoadPlan, tmp_path: Path):
    wanted = job(node, plan, tmp_path)
    for _ in range(5):
        worker.start(wanted)
    worker.outcome(LOAD)
    assert sum(thread.name == "watch" for thread in threading.enumerate()) == 1
    worker.start(wanted)
    assert node.agent.report(wanted.load_id).store_chunks == len(plan.ranks[0].chunk_ids)


def test_before_it_is_ready_there_is_no_model(worker: GpuWorker):
    for ask in (
        lambda: copied(worker, LOAD),
        lambda: called(worker, LOAD, len),
    ):
        with pytest.raises(ModelNotFound, match="no loaded model"):
            ask()


def test_a_failed_load_gives_its_error_and_leaves_no_model(
    worker: GpuWorker, node: LocalNode, plan: LoadPlan, tmp_path: Path
):
    (tmp_path / "model.safetensors").unlink()
    worker.start(job(node, plan, tmp_path))
    with pytest.raises(LongshoreError) as caught:
        worker.outcome(LOAD)
    assert caught.value.details["shard"] == "model.safetensors"
    with pytest.raises(ModelNotFound):
        copied(worker, LOAD)


def test_an_unforeseen_error_is_returned_picklable(worker: GpuWorker, plan: LoadPlan, node: LocalNode):
    broken = replace(node.job(plan, LOAD, 0), shared=b"no pickle at all")
    worker.start(broken)
    with pytest.raises(LongshoreError, match="while loading") as caught:
        worker.outcome(LOAD)
    assert pickle.loads(pickle.dumps(caught.value)).message == caught.value.message


def test_a_worker_can_be_stopped_in_mid_load(node: LocalNode, plan: LoadPlan, tmp_path: Path):
    link = SlowLink(node.agent)
    worker = GpuWorker("node-1", "cpu", 60.0, link)
    worker.start(job(node, plan, tmp_path))
    assert link.asked.wait(30)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    link.go.set()
    stopping.join()
    with pytest.raises(LoadCancelled):
        worker.outcome(LOAD)
    with pytest.raises(ModelNotFound):
        copied(worker, LOAD)
    worker.start(job(node, plan, tmp_path))  # too late: nothing starts any more
    _join_watch()


def test_a_worker_can_be_stopped_before_its_start(node: LocalNode):
    worker = GpuWorker("node-1", "cpu", 60.0, node.agent)
    worker.stop()
    _join_watch()
    with pytest.raises(LoadCancelled):
        worker.outcome(LOAD)


def test_a_recycled_worker_is_as_new(worker: GpuWorker, node: LocalNode, plan: LoadPlan, tmp_path: Path, stored: Any):
    """The next load gets its own tensors and answers; requests about the previous load are refused."""
    worker.start(job(node, plan, tmp_path))
    first = worker.outcome(LOAD)
    assert len(copied(worker, LOAD)) == len(SPECS)
    assert worker.recycle(LOAD) is not None
    assert worker.recycle(LOAD) is not None  # again: changes nothing
    assert worker.assignment() is None
    for ask in (lambda: copied(worker, LOAD), lambda: called(worker, LOAD, len)):
        with pytest.raises(ModelNotFound):
            ask()
    node.agent.end(LOAD)

    second_load = job(node, plan, tmp_path)
    worker.start(second_load)
    with pytest.raises(LoadCancelled):
        worker.outcome(LOAD)
    worker.lifetime(LOAD)  # about the previous load: refused
    second = worker.outcome(second_load.load_id)
    assert second.size_bytes == first.size_bytes
    with pytest.raises(ModelNotFound):
        called(worker, LOAD, len)
    assert worker.assignment() == Assignment(second_load.load_id, second_load.store, "")
    reference = {name: bytes(entry["data"]) for name, entry in safetensors.deserialize(stored["model.safetensors"])}
    found = copied(worker, second_load.load_id)
    assert {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in found.items()} == reference
    assert worker.recycle(LOAD) is None  # it has another load by now
    assert copied(worker, second_load.load_id)


def test_objects_kept_by_calls_are_released_with_the_model(
    worker: GpuWorker, node: LocalNode, plan: LoadPlan, tmp_path: Path
):
    """This includes objects that reference themselves, as modules do; their memory is free for the next load."""
    gc.collect()  # memory of other tests of this process, if it is released later, would count
    worker.start(job(node, plan, tmp_path))
    worker.outcome(LOAD)

    def keep(shard: RankShard) -> int:
        module = torch.nn.ParameterDict({name.replace(".", "_"): tensor for name, tensor in shard.items()})
        module.forward = module.items  # it references itself
        shard.kept["module"] = module
        return len(shard.kept)

    assert called(worker, LOAD, keep) == 1
    assert called(worker, LOAD, lambda shard: list(shard.kept)) == ["module"]
    assert worker.recycle(LOAD) == sum(
        -(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in plan.ranks[0].segment_bytes
    )


def test_a_worker_with_gpus_keeps_no_host_memory(node: LocalNode, stored: dict[str, bytes], tmp_path: Path) -> None:
    """A device map may have put tensors there. The next load does not need that memory, and others do."""
    index = open_model(LocalStore(str(tmp_path)), chunk_bytes=1024)
    mapped = build_load_plan(index, Layout(), device_map=parse_device_map("cpu", None, None, Layout(), "cpu"))
    worker = GpuWorker("node-1", "cuda", 60.0, node.agent)
    worker.start(replace(job(node, mapped, tmp_path), mapped=True))
    assert worker.outcome(LOAD).bytes_by_device == {"cpu": mapped.ranks[0].device_bytes}
    assert worker.recycle(LOAD) == 0
    worker.stop()
    _join_watch()
    PROCESS_MEMORY.keep(False)


def test_a_worker_is_recycled_after_a_failed_load(worker: GpuWorker, node: LocalNode, plan: LoadPlan, tmp_path: Path):
    broken = replace(job(node, plan, tmp_path), shared=b"no pickle at all")
    worker.start(broken)
    with pytest.raises(LongshoreError):
        worker.outcome(broken.load_id)
    assert worker.recycle(broken.load_id) is not None
    worker.start(job(node, plan, tmp_path))
    assert worker.outcome("load-2").size_bytes == plan.ranks[0].size_bytes


AT_WORK, GO_ON = threading.Event(), threading.Event()


def work(shard: RankShard) -> float:
    """A function that is sent by name, so that it finds these events."""
    AT_WORK.set()
    GO_ON.wait(60)
    return float(shard["layers.0.weight"].float().sum())


def test_a_worker_with_a_running_call_is_not_recycled(
    worker: GpuWorker, node: LocalNode, plan: LoadPlan, tmp_path: Path
):
    """The call would continue into the next load, and delay its calls."""
    worker.start(job(node, plan, tmp_path))
    worker.outcome(LOAD)
    sums: list[float] = []
    calling = threading.Thread(target=lambda: sums.append(called(worker, LOAD, work)))
    calling.start()
    assert AT_WORK.wait(30)
    assert worker.recycle(LOAD) is None
    GO_ON.set()
    calling.join()
    assert len(sums) == 1  # its tensors stayed
    assert worker.recycle(LOAD) is not None


def test_idleness_ends_when_a_job_starts_or_the_worker_stops(
    worker: GpuWorker, node: LocalNode, plan: LoadPlan, tmp_path: Path
):
    for end in (lambda: worker.start(job(node, plan, tmp_path)), worker.stop):
        idle = threading.Thread(target=worker.idleness)
        idle.start()
        assert idle.is_alive()
        end()
        idle.join(30)
        assert not idle.is_alive()
        worker.recycle(LOAD)


def test_a_stopped_worker_is_not_recycled(worker: GpuWorker, node: LocalNode, plan: LoadPlan, tmp_path: Path):
    worker.start(job(node, plan, tmp_path))
    worker.outcome(LOAD)
    worker.stop()
    assert worker.recycle(LOAD) is None


class SlowLink(SwitchedLink):
    """Exchanges wait until they are released."""

    def __init__(self, agent: Any) -> None:
        super().__init__(agent)
        self.go, self.asked = threading.Event(), threading.Event()

    def exchange(self, update: RankUpdate) -> Orders:
        self.asked.set()
        self.go.wait(60)
        return super().exchange(update)


def _join_watch() -> None:
    for thread in threading.enumerate():
        if thread.name == "watch":
            thread.join()


# What a worker in host memory imports beyond Ray's own process, until it has met its agent and opened a local store.
# Four workers on two cores pay for each module twice in time. So a module joins this list when the first byte needs it.
IMPORTED_PACKAGES = {"blake3", "numpy", "xxhash"}
IMPORTED = """
actors actors.devices actors.devices.cpu_device actors.devices.device actors.gpu_worker actors.links actors.node
actors.node.chunk_sources actors.rank actors.rank.chunk_fetcher actors.rank.chunk_placer actors.rank.executor
actors.rank.loader actors.rank.loader actors.rank.state actors.shard
cluster cluster.argument_types cluster.errors cluster.fit cluster.fit.device_map cluster.joining
cluster.joining.node_tasks cluster.layouts cluster.layouts.families cluster.layouts.layout cluster.layouts.mesh
cluster.layouts.region cluster.layouts.rules cluster.layouts.rules cluster.messages cluster.planning
cluster.planning.cut_model cluster.planning.packed_plan cluster.planning.plan cluster.planning.packed_plan
cluster.planning.read_items cluster.precision cluster.precision.quantized_tensors
cluster.precision.quantized_tensors cluster.precision.recipes cluster.scheduling cluster.scheduling.concurrency
cluster.scheduling.retry cluster.telemetry cluster.telemetry.logs cluster.telemetry.stats cluster.units
cluster.user_values
longshore longshore.installation
storage storage.arena storage.arena.arena storage.arena.slots storage.checkpoints storage.checkpoints.amax
storage.checkpoints.model_index storage.checkpoints.safetensors_header storage.checksum storage.disk
storage.disk.files storage.errors storage.host storage.host.memory storage.host.processes storage.problems
storage.peers storage.store_ref storage.stores storage.stores.requests storage.stores.local storage.stores.object_store
storage.stores.open_store storage.stores.parts storage.stores.requests
"""
STARTING = """
import pickle, sys
before = set(sys.modules)
from actors.gpu_worker import GpuWorker
from cluster.errors import LoadCancelled

class Agent:
    def join(self, hello):
        print(*sorted(set(sys.modules) - before), flush=True)
        raise LoadCancelled("seen")

worker = GpuWorker("n", "cpu", 600.0, Agent())
job = pickle.loads(sys.stdin.buffer.read())
worker.start(job)
try:
    worker.outcome(job.load_id)
except LoadCancelled:
    worker.stop()
"""


def test_a_worker_imports_only_what_its_first_byte_needs(node: LocalNode, plan: LoadPlan, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", STARTING],
        input=pickle.dumps(job(node, plan, tmp_path)),
        capture_output=True,
        cwd=REPOSITORY,
        timeout=120,
        check=True,
    )
    ours = {"actors", "cluster", "longshore", "storage"}
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for module in result.stdout.decode().split():
        package = module.partition(".")[0]
        if package not in sys.stdlib_module_names and not package.startswith("_"):
            found[package in ours].add(module if package in ours else package)
    assert found[True] == set(IMPORTED.split())
    assert found[False] == IMPORTED_PACKAGES


ORPHAN = """
import sys, time
from actors.gpu_worker import GpuWorker
from cluster.errors import ClusterLost
from cluster.messages import FetchSettings, RankJob, StoreAccess
from storage.store_ref import parse_uri

class NoCoordinator:
    def join(self, hello): raise ClusterLost("nobody")
    def exchange(self, update): raise ClusterLost("nobody")
    def check_in(self, process, words):
        if sys.argv[1] == "gone":
            raise ClusterLost("nobody")
        return float(sys.argv[1])

worker = GpuWorker("n", "cpu", 0.5, NoCoordinator())
if sys.argv[3] == "loading":
    worker.start(RankJob("l", 1, 0, 0, b"", StoreAccess(parse_uri("/tmp")), FetchSettings(1, 1, 1.0, 0.05)))
print("started", flush=True)
time.sleep(float(sys.argv[2]))
print("alive", flush=True)
sys.stdout.flush()
import os
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "loading"])
@pytest.mark.parametrize(("age", "alive"), [("gone", False), ("1000", False), ("0", True)])
def test_a_worker_without_a_coordinator_ends_itself(age: str, alive: bool, state: str):
    result = subprocess.run(
        [sys.executable, "-c", ORPHAN, age, "2.5" if alive else "60", state],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=50,
    )
    assert ("alive" in result.stdout) == alive
    assert result.returncode == (0 if alive else 1)
