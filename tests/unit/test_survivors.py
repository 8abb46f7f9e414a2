"""Processes that map an arena when its agent is restarted, and have no rank that speaks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.messages import NodeJob
from cluster.planning.packed_plan import pack_shared
from cluster.planning.plan import LoadPlan
from storage.errors import LongshoreError
from storage.host.processes import ProcessId, processes_mapping
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import flat_objects
from tests.support.local_node import LocalNode, local_node, plan_of, run_all
from tests.support.python_processes import LEADERLESS, TITLED, running
from tests.support.ray_clusters import eventually
from tests.support.reference_slices import check_exact

OBJECTS = flat_objects(tensors=12)
MAPS = """
import sys
from storage.arena.arena import Arena
arena = Arena.open(sys.argv[1])
print("mapped", flush=True)
sys.stdin.readline()
arena.close()
print("unmapped", flush=True)
sys.stdin.readline()
"""


class Child:
    """A process that maps the arena, as an idle worker does that is kept warm."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        found = ProcessId.of(process.pid)
        assert found is not None
        self.id = found

    def unmap(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "unmapped\n"


@contextmanager
def mapping(path: str) -> Iterator[Child]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAPS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "mapped\n"
            yield Child(process)
        finally:
            process.kill()


@contextmanager
def restarted(shm_dir: Path) -> Iterator[tuple[LocalNode, Child, LoadPlan]]:
    """An agent that was restarted with an arena full of chunks, which another process maps."""
    plan = plan_of(OBJECTS, (1, 1, 2), 1024)
    with local_node(shm_dir, slots=len(plan.chunks)) as node:
        ranks = node.ranks(plan, MemoryStore(OBJECTS), node.begin(plan))
        run_all(ranks)
        arena = node.agent._arena
        assert arena is not None
        path = arena.path
        with mapping(path) as child:
            assert child.id in processes_mapping(path)
            node.crash()
            node.agent = node.start_agent()
            yield node, child, plan


def job(node: LocalNode, plan: LoadPlan) -> NodeJob:
    return NodeJob("next", 1, pack_shared(plan), "twin", (0, 1), frozenset(), 5, 3, 60.0, b"")


def goes_on(node: LocalNode, plan: LoadPlan) -> None:
    """Another load of the node has its slots."""
    eventually(lambda: node.agent.begin(job(node, plan)), "the load gets no slots")
    ranks = node.ranks(plan, MemoryStore(OBJECTS), "next")
    run_all(ranks)
    check_exact(ranks, OBJECTS)


@pytest.mark.slow
def test_a_survivor_that_checks_in_holds_nothing(shm_dir: Path) -> None:
    with restarted(shm_dir) as (node, child, plan):
        assert not node.agent.begin(job(node, plan))  # whatever is there, it may be reading
        arena = node.agent._arena
        assert arena is not None
        assert node.agent.check_in(child.id, ((arena.path, "the agent before"),)) >= 0
        assert not node.agent.begin(job(node, plan))  # a rank of it goes by that agent's word
        node.agent.check_in(child.id, ((arena.path, node.agent._incarnation), ("/another/arena", "x")))
        goes_on(node, plan)


@pytest.mark.slow
def test_a_survivor_that_unmaps_the_arena_holds_nothing(shm_dir: Path) -> None:
    with restarted(shm_dir) as (node, child, plan):
        assert not node.agent.begin(job(node, plan))
        child.unmap()
        goes_on(node, plan)


@pytest.mark.slow
def test_a_survivor_lives_while_any_thread_does(shm_dir: Path) -> None:
    """Its first thread has ended, and what the kernel keeps of its title is no text: its others may still write."""
    plan = plan_of(OBJECTS, (1, 1, 2), 1024)
    with local_node(shm_dir, slots=len(plan.chunks)) as node:
        run_all(node.ranks(plan, MemoryStore(OBJECTS), node.begin(plan)))
        arena = node.agent._arena
        assert arena is not None
        work = "from storage.arena.arena import Arena; sys.arena = Arena.open(sys.argv[1])"
        with running(LEADERLESS.format(work=work), arena.path) as child, running(TITLED):
            eventually(lambda: Path(f"/proc/{child.pid}/maps").read_bytes() == b"", "its first thread does not end")
            node.crash()
            node.agent = node.start_agent()
            for _ in range(10):
                assert not node.agent.begin(job(node, plan))
                time.sleep(node.config.heartbeat_s)
            child.kill()
            goes_on(node, plan)


def test_an_agent_without_an_arena_answers_worker_check_ins(tmp_path: Path) -> None:
    with local_node(tmp_path, slots=5) as node:
        node.crash()
        arena = next(tmp_path.iterdir())
        arena.unlink()
        arena.mkdir()  # where the next agent would make its own
        node.agent = node.start_agent()
        with pytest.raises(LongshoreError):
            node.agent.facts()
        assert node.agent.check_in(ProcessId.current(), ()) >= 0
        arena.rmdir()
