"""`longshore doctor` on every node: each verdict from plain data, and the real checks on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.command_line.cli import main
from cluster.doctor import doctor, node_checks
from cluster.doctor.doctor import run_checks
from cluster.doctor.host_checks import MOST_READ_BYTES, THREADS, Bandwidth, Check, measure_bandwidth
from cluster.doctor.node_checks import NodeLook, bandwidth_here, look_at_node
from cluster.joining import node_tasks
from storage.errors import AccessDenied, StoreError
from storage.stores.object_store import ByteRange, MemoryStore
from tests.support.checkpoints import write_tiny_llama

SHM = Check("/dev/shm", "ok", "64 GB free")
SETTINGS = (Check("settings", "ok", "all at their defaults"),)
GPU_NODE = NodeLook("a", 8, "580.1", "13.0", "2.13.0", "2.27.3", 8, 0, 0, SHM, SETTINGS, (), -1)
CPU_NODE = NodeLook("b", 0, "", "", "2.13.0+cpu", "", None, 0, 0, SHM, SETTINGS, (), -1)


# judgements


@pytest.mark.parametrize(
    ("look", "ray_gpus", "outcome"),
    [
        (GPU_NODE, 8, "ok"),
        (GPU_NODE, 4, "warn"),
        (GPU_NODE, 9, "fail"),
        (replace(GPU_NODE, torch_gpus=0, nccl=""), 8, "fail"),
        (replace(GPU_NODE, torch_gpus=None), 8, "fail"),
        (replace(GPU_NODE, nccl=""), 8, "warn"),
        (CPU_NODE, 0, "skip"),
        (CPU_NODE, 2, "fail"),
    ],
)
def test_ray_driver_and_torch_must_agree_on_gpus(look: NodeLook, ray_gpus: int, outcome: str) -> None:
    check = node_checks.judge_gpus("a 1234", look, ray_gpus)
    assert check.outcome == outcome
    assert bool(check.hint) == (outcome in ("warn", "fail"))
    if look.driver:
        assert "driver 580.1, CUDA up to 13.0, torch 2.13.0" in check.detail


def test_nodes_must_have_the_same_versions() -> None:
    other = replace(GPU_NODE, host="c", nccl="2.20.0", cuda_driver="12.4", torch="2.12.0")
    assert list(node_checks.judge_alike([GPU_NODE, GPU_NODE, CPU_NODE, replace(CPU_NODE, torch="")])) == []
    found = {check.name: check for check in node_checks.judge_alike([GPU_NODE, other, CPU_NODE])}
    assert set(found) == {"nccl versions", "cuda drivers", "torch versions"}
    assert found["nccl versions"].detail == "2.20.0 (as on c), 2.27.3 (as on a)"


@pytest.mark.parametrize(("niceness", "outcome"), [(-5, "ok"), (0, "ok"), (15, "warn")])
def test_workers_of_low_priority_are_a_warning(niceness: int, outcome: str) -> None:
    check = node_checks.judge_niceness("a 1234", replace(CPU_NODE, niceness=niceness))
    assert (check.name, check.outcome) == ("niceness a 1234", outcome)
    assert str(niceness) in check.detail
    assert ("RAY_worker_niceness=0" in check.hint) == (outcome == "warn")


def test_an_existing_arena_is_no_lack_of_shared_memory() -> None:
    full = Check("/dev/shm", "fail", "64 MB free", "enlarge it")
    assert node_checks.judge_shm("a", replace(CPU_NODE, shm=full)).hint == "enlarge it"
    found = node_checks.judge_shm("a", replace(CPU_NODE, shm=full, arena_bytes=8 << 30))
    assert (found.outcome, "8.59 GB" in found.detail) == ("ok", True)


@pytest.mark.parametrize(
    ("checks", "outcome", "said"),
    [
        ([Check("store", "ok", "3 objects"), Check("read", "ok", "m in 3 ms")], "ok", "m in 3 ms"),
        ([Check("read", "ok", "m in 3 ms"), Check("model", "warn", "no manifest")], "ok", "m in 3 ms"),
        ([Check("clock", "fail", "400 s behind", "NTP"), Check("read", "ok", "m")], "fail", "clock: 400 s behind"),
        ([Check("store", "warn", "lists nothing")], "warn", "store: lists nothing"),
        ([Check("store", "fail", "no bucket")], "fail", "store: no bucket"),
    ],
)
def test_the_store_is_checked_from_each_node(checks: list[Check], outcome: str, said: str) -> None:
    found = node_checks.judge_store("a", checks)
    assert (found.name, found.outcome, found.detail) == ("store a", outcome, said)


@pytest.mark.parametrize(
    ("skew_s", "outcome"), [(0.0, "ok"), (-1.9, "ok"), (30.0, "warn"), (-30.0, "warn"), (400, "fail")]
)
def test_clocks_that_differ_are_reported(skew_s: float, outcome: str) -> None:
    rounds = [(100.0, 104.0 + skew_s, 110.0), (200.0, 200.02 + skew_s, 200.04)]  # the first took too long to prove much
    found = node_checks.judge_clock("a", rounds)
    assert found.outcome == outcome
    assert f"{abs(skew_s):.3f} s" in found.detail
    assert "give or take 0.020 s" in found.detail
    assert (
        node_checks.judge_clock("a", [(0.0, 1000.0 + skew_s, 2000.0)]).outcome == "ok"
    )  # the network delay may explain all of it
    assert node_checks.judge_clock("a", []).outcome == "fail"


def test_a_bandwidth_is_reported_without_a_verdict() -> None:
    assert node_checks.judge_bandwidth("b", Bandwidth(10**9, 2.0, 120, 16)).detail.startswith(
        "500 MB/s (1.00 GB in 2.0 s"
    )
    assert node_checks.judge_bandwidth("b", Bandwidth(0, 0.0, 0, 16)).outcome == "warn"
    assert node_checks.judge_bandwidth("b", Bandwidth(5, 1.0, 1, 16, "reset")).outcome == "fail"


# what is measured


def objects_of(store: MemoryStore) -> list[Any]:
    return list(store.list())


class Slow(MemoryStore):
    """Each read takes a second of a clock that only reads advance."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.now_s = 0.0
        self.largest_bytes = 0
        self._moving = threading.Lock()

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        with self._moving:
            self.now_s += 1.0
            self.largest_bytes = max(self.largest_bytes, byte_range.size_bytes)
        return super().read_into(key, byte_range, buffer, etag=etag)


def test_a_probe_ends_at_its_time_limit() -> None:
    store = Slow({"m.safetensors": bytes(4 << 20), "small": bytes(10)})
    found = measure_bandwidth(store, objects_of(store), probe_s=5.0, threads=1, clock=lambda: store.now_s)
    assert (found.requests, found.elapsed_s, found.error) == (5, 5.0, "")
    assert store.largest_bytes == 1 << 18  # slow reads do not grow
    assert found.read_bytes == 5 << 18


def test_a_probe_ends_at_its_byte_limit_on_a_small_model() -> None:
    store = MemoryStore({"m.safetensors": bytes(3 << 20), "small": bytes(10)})
    most_bytes = (100 << 20) + 7
    found = measure_bandwidth(store, objects_of(store), most_bytes=most_bytes, probe_s=600.0, clock=lambda: 0.0)
    assert (found.read_bytes, found.threads) == (most_bytes, THREADS)


def test_quick_reads_grow_up_to_a_chunk() -> None:
    store = Slow({"m.safetensors": bytes(64 << 20)})
    measure_bandwidth(store, objects_of(store), probe_s=1.0, most_bytes=128 << 20, threads=1, clock=lambda: 0.0)
    assert store.largest_bytes == MOST_READ_BYTES


def test_a_store_of_small_objects_is_still_measured() -> None:
    store = MemoryStore({"a": b"xyz", "empty": b""})
    found = measure_bandwidth(store, objects_of(store), most_bytes=9, probe_s=600.0)
    assert (found.read_bytes, found.requests) == (9, 3)
    assert measure_bandwidth(MemoryStore({}), []).read_bytes == 0


def test_an_error_ends_the_probe_and_is_reported() -> None:
    class Breaks(MemoryStore):
        def read_into(self, *args: Any, **kwargs: Any) -> str | None:
            raise AccessDenied("no", bucket="b")

    store = Breaks({"m": bytes(1 << 20)})
    found = measure_bandwidth(store, objects_of(store), probe_s=600.0)
    assert (found.read_bytes, found.error) == (0, "no (bucket=b)")


# this machine, as a node checks itself


def test_a_node_checks_itself(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "llama")
    found = look_at_node(str(tmp_path / "llama"), {})
    assert found.shm.name == "/dev/shm"
    assert {check.name: check.outcome for check in found.store} == {"store": "ok", "read": "ok", "model": "warn"}
    missing = look_at_node(str(tmp_path / "missing"), {})
    assert missing.store[-1].outcome == "fail"
    assert look_at_node(None, {}).store == ()


def test_the_bandwidth_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_llama(tmp_path / "llama")
    monkeypatch.setattr(
        "cluster.doctor.node_checks.measure_bandwidth",
        lambda store, objects: measure_bandwidth(store, objects, most_bytes=1000),
    )
    assert bandwidth_here(str(tmp_path / "llama"), {}).read_bytes == 1000
    with pytest.raises(StoreError):
        bandwidth_here(str(tmp_path / "missing"), {})


# all nodes, with functions that run here instead of there


Node = dict[str, Any]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """Two nodes that are this process, and one that never answers."""

    def on_every_node(ray: Any, asked: Any, work: Callable[..., Any], timeout_s: float) -> Iterator[tuple[Node, Any]]:
        for node, arguments in asked:
            if node["NodeManagerHostname"] == "hangs":
                yield node, TimeoutError("no answer in 90 s")
            else:
                yield node, work(*arguments)

    monkeypatch.setattr(node_checks, "on_every_node", on_every_node)
    monkeypatch.setattr(doctor, "on_every_node", on_every_node)
    monkeypatch.setattr(node_checks, "bandwidth_here", lambda *_: Bandwidth(10**9, 2.0, 120, 16))
    monkeypatch.setattr(node_checks, "check_peers", lambda _, nodes: [Check("peers", "ok", f"{len(nodes)} nodes")])
    return [
        {"NodeID": f"{name}0123456789", "NodeManagerHostname": name, "Resources": {}, "Alive": True}
        for name in ("one", "hangs", "two")
    ]


def test_every_node_is_checked(nodes: list[Node], tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "llama")
    checks = list(node_checks.check_each_node(None, nodes, str(tmp_path / "llama"), {}, bandwidth=True))
    assert {check.name: check.outcome for check in checks if "one" in check.name} == {
        "settings one one01234": "ok",
        "gpus one one01234": "skip",
        "niceness one one01234": "ok" if os.nice(0) <= 0 else "warn",
        "/dev/shm one one01234": next(c.outcome for c in checks if c.name.startswith("/dev/shm")),
        "store one one01234": "ok",
        "clock one one01234": "ok",
        "bandwidth one one01234": "ok",
    }
    assert [check.outcome for check in checks if "hangs" in check.name] == ["fail"]
    assert Check("peers", "ok", "2 nodes") in checks
    assert checks[-1] == Check("bandwidth", "ok", "1.00 GB/s into 2 nodes at once")
    plain = list(node_checks.check_each_node(None, nodes, None, {}, bandwidth=False))
    assert not [check for check in plain if check.name.startswith(("store", "bandwidth"))]


def test_versions_are_requested_from_every_node(nodes: list[Node]) -> None:
    found = list(doctor.check_nodes(None, nodes))
    assert [(node["NodeManagerHostname"], check.outcome) for node, check in found] == [
        ("one", "ok"),
        ("hangs", "fail"),
        ("two", "ok"),
    ]


def test_only_nodes_that_were_lost_are_named() -> None:
    def node(name: str, alive: bool, reason: int = 0, address: str = "") -> Node:
        return {
            "NodeID": f"{name}0123456789", "NodeManagerHostname": name, "NodeManagerAddress": address or name,
            "Alive": alive, "DeathReason": reason, "DeathReasonMessage": "missed heartbeats" if reason == 2 else "",
        }  # fmt: skip

    nodes = [node("a", True), node("b", False, 2), node("c", False, 1), node("d", False, 4), node("e", False, 2, "a")]
    lost = node_tasks.lost_nodes(SimpleNamespace(nodes=lambda: nodes))  # e is back, under another id
    (check,) = doctor.check_lost(lost)
    assert (check.name, check.outcome, check.detail) == ("node b b0123456", "warn", "lost: missed heartbeats")
    many = list(doctor.check_lost([node(f"n{n}", False, 2) for n in range(9)]))
    assert [check.name for check in many[:-1]] == [f"node n{n} n{n}012345" for n in range(4, 9)]
    assert many[-1].detail.startswith("9 since the head began")


def test_the_reason_for_a_nodes_silence_is_reported() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    refused = exceptions.RayTaskError(
        "bandwidth_here", "Traceback ...\n", AccessDenied("no credentials", hint="set\nsome")
    )
    for error in (refused, refused.as_instanceof_cause()):
        assert node_tasks.why_no_answer(error) == "no credentials. set some"
    dying = exceptions.TaskUnschedulableError(
        "The task is not schedulable: NodeAffinitySchedulingStrategy, lease_id=02"
    )
    assert node_tasks.why_no_answer(dying) == "Ray cannot run tasks on the node; it will soon declare the node dead"
    assert node_tasks.why_no_answer(TimeoutError("no answer in 9 s")) == "no answer in 9 s"
    assert node_tasks.why_no_answer(ValueError()) == "ValueError"
    assert node_tasks.why_no_answer(exceptions.RayTaskError("f", "Traceback\nKeyError: 'x'", KeyError("x"))).endswith(
        "KeyError: 'x'"
    )


@pytest.mark.slow
def test_without_a_cluster_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_cluster", lambda *_, **__: [])
    monkeypatch.setattr("cluster.doctor.doctor.bandwidth_here", lambda *_: Bandwidth(10**9, 2.0, 120, 16))
    assert [c.name for c in run_checks("/no/such/folder", bandwidth=True) if "bandwidth" in c.name] == ["bandwidth"]
    assert not [c for c in run_checks("/no/such/folder") if "bandwidth" in c.name]


def test_a_bandwidth_check_without_a_uri_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--bandwidth"]) == 2
    assert "needs a URI" in capsys.readouterr().err
