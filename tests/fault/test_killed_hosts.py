"""SIGKILL of a process that hosts a rank, in every state of its load: its share of the node ends with it."""

from __future__ import annotations

import pickle
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray

import cluster
from actors.links import NAMESPACE, PackedCalls
from cluster.fit.needs import min_slots
from cluster.messages import SlotHolder, unpack_message
from tests.support.gated_proxy import GatedProxy
from tests.support.ray_clusters import MIB, TEST_SETTINGS, Longshore, eventually
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow

SMALLEST = {"arena_bytes": min_slots(1) * MIB}  # one rank at a time
HOST = """
import ctypes, pickle, sys, threading, time
import ray
from actors import hosting
from actors.hosting import _HostedLink, host_rank

state, uri, options = pickle.loads(bytes.fromhex(sys.argv[1]))

def stand_still(*_):
    print(state, flush=True)
    time.sleep(600)

def load():
    with host_rank(uri, 0, **options) as shard:
        if state == "loaded":
            stand_still()
        print(len(shard), flush=True)
        sys.stdin.read()

ray.init(log_to_driver=False)
if state == "begun":
    hosting.RankLoader.run = stand_still
if state == "to be ended":
    _HostedLink.end = stand_still
if state == "without its first thread":
    thread = threading.Thread(target=load)
    thread.start()
    ctypes.CDLL(None).pthread_exit(None)
load()
"""


@contextmanager
def host(longshore: Longshore, model: StoredModel, state: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that hosts a rank, and stands still in that state."""
    said = state, model.uri, {**model.options, **options}
    process = longshore.run_client(HOST, pickle.dumps(said).hex())
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def holders(longshore: Longshore) -> list[SlotHolder]:
    found: list[SlotHolder] = []
    for name in longshore.actor_names("agent-"):
        agent = ray.get_actor(name, namespace=NAMESPACE)
        found += unpack_message(ray.get(PackedCalls(agent).slot_holders.remote(), timeout=60), "agent", "test")
    return found


def held_by(longshore: Longshore, process: subprocess.Popen[str]) -> list[SlotHolder]:
    return [holder for holder in holders(longshore) if holder.pid == process.pid]


@pytest.mark.cluster_settings(empty=True, idle_agent_s=1.0, **SMALLEST)
@pytest.mark.parametrize(
    "state",
    [
        "loading",
        "loaded",
        pytest.param("begun", marks=pytest.mark.long),
        pytest.param("to be ended", marks=pytest.mark.long),
    ],
)
def test_a_node_share_ends_with_its_process(longshore: Longshore, llama: StoredModel, state: str) -> None:
    with GatedProxy(llama.server.endpoint_url, ranges=4) as proxy:
        if state != "loading":
            proxy.open()
        with host(longshore, llama, state, endpoint_url=proxy.endpoint_url) as process:
            if state == "loading":
                proxy.wait_until_held()
            else:
                assert line(process) == state
            assert bool(held_by(longshore, process)) == (state in ("begun", "loading"))
            process.kill()
            process.wait()
            eventually(lambda: not holders(longshore), lambda: f"slots are held: {holders(longshore)}")
        proxy.open()
        eventually(lambda: not longshore.actor_names("agent-"), "its agent is never idle")
        with host(longshore, llama, "", endpoint_url=proxy.endpoint_url) as another:
            assert int(line(another)) > 1


@pytest.mark.cluster_settings(empty=True, **SMALLEST)
def test_a_process_that_waits_for_slots(longshore: Longshore, llama: StoredModel) -> None:
    with GatedProxy(llama.server.endpoint_url, ranges=4) as proxy:
        options = {"endpoint_url": proxy.endpoint_url}
        with host(longshore, llama, "", **options) as first, host(longshore, llama, "", **options) as second:
            proxy.wait_until_held()
            waiting = eventually(
                lambda: [holder for holder in holders(longshore) if holder.waits], "no process waits for slots"
            )
            killed, other = (first, second) if waiting[0].pid == first.pid else (second, first)
            killed.kill()
            killed.wait()
            eventually(lambda: not held_by(longshore, killed), "it still waits")
            proxy.open()
            assert int(line(other)) > 1


@pytest.mark.cluster_settings(empty=True, slots_wait_s=1.0, **SMALLEST)
def test_a_wait_for_slots_ends_and_names_their_holders(longshore: Longshore, llama: StoredModel) -> None:
    with (
        GatedProxy(llama.server.endpoint_url, ranges=4) as proxy,
        host(longshore, llama, "", endpoint_url=proxy.endpoint_url) as process,
    ):
        proxy.wait_until_held()
        with (
            pytest.raises(cluster.ArenaBusy, match=f"hosted-[0-9a-f]+-0 .process {process.pid}.: 3") as refused,
            cluster.host_rank(llama.uri, 0, **llama.options),
        ):
            pass
        assert refused.value.details["needed_slots"] == 3
        proxy.open()
        assert int(line(process)) > 1


@pytest.mark.cluster_settings(empty=True, **SMALLEST)
def test_a_process_lives_on_without_its_first_thread(longshore: Longshore, llama: StoredModel) -> None:
    """The process keeps the slots that it still writes to."""
    with (
        GatedProxy(llama.server.endpoint_url, ranges=4) as proxy,
        host(longshore, llama, "without its first thread", endpoint_url=proxy.endpoint_url) as process,
    ):
        proxy.wait_until_held()

        def is_leaderless() -> bool:
            with open(f"/proc/{process.pid}/stat", "rb") as stat:
                return stat.read().rpartition(b")")[2].split()[0] == b"Z"

        eventually(is_leaderless, "its first thread does not end")
        for _ in range(8):
            time.sleep(TEST_SETTINGS["heartbeat_s"] / 2)
            assert held_by(longshore, process)
        proxy.open()
        assert int(line(process)) > 1
