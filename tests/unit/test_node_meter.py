"""An agent adds to its heartbeats a number, the kernel's count of its memory, and the state of its disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.node import node_resources
from actors.node.node_resources import NodeMeter
from cluster.messages import AgentBeat, RankBeat
from cluster.telemetry.stats import ArenaUse, NodeStats
from storage.arena.chunk_cache import CacheStats
from storage.disk.tier import DiskStats
from storage.host.memory import GpuMemory, own_bytes

DISK = DiskStats(10, 5, 1, 2, 3, 4)
FIGURES = NodeStats(CacheStats(*[1] * 15))


def meter(folder: Path, disk: DiskStats | None = None) -> NodeMeter:
    writer: Any = SimpleNamespace(stats=lambda: disk)
    return NodeMeter(str(folder), writer, threading.Event())


def beat(*ranks: RankBeat, stats: NodeStats | None = FIGURES) -> AgentBeat:
    return AgentBeat("n", "host", "i", (), ranks, ArenaUse(0, 0, 0, 0), stats=stats)


def test_heartbeats_are_numbered(tmp_path: Path) -> None:
    there = meter(tmp_path)
    assert [there.complete(of).number for of in (beat(), beat(stats=None), beat())] == [1, 2, 3]


def test_memory_comes_from_the_kernels_counters(tmp_path: Path) -> None:
    mine = RankBeat("x", 1, 0, 0, os.getpid(), 0, 0.0)
    gone = RankBeat("x", 1, 1, 0, 2**22 + 1, 0, 0.0)  # no process has such a number
    nobody = RankBeat("x", 1, 2, 0, 0, 0, 0.0)
    found = meter(tmp_path, DISK).complete(beat(mine, gone, nobody))
    assert found.stats is not None
    assert found.stats.disk == DISK
    memory = found.stats.memory
    assert 0 < memory.host_free_bytes <= memory.host_total_bytes
    info = os.statvfs(tmp_path)
    assert memory.shm_total_bytes == info.f_blocks * info.f_frsize
    assert 0 < memory.shm_free_bytes <= memory.shm_total_bytes
    assert memory.agent_bytes == pytest.approx(own_bytes(), rel=0.5)
    assert found.ranks[0].own_bytes == pytest.approx(own_bytes(), rel=0.5)
    assert [rank.own_bytes for rank in found.ranks[1:]] == [0, 0]


def test_unreadable_values_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> Any:
        raise OSError

    monkeypatch.setattr(node_resources, "memory_pools", nothing)
    found = meter(tmp_path / "gone").complete(beat()).stats
    assert found is not None
    assert (found.memory.host_total_bytes, found.memory.shm_total_bytes) == (0, 0)
    assert found.memory.agent_bytes > 0


def test_a_node_without_gpus_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(node_resources, "gpu_memory", lambda: asked.append(1) or ())
    meter(tmp_path).watch_gpus()
    assert len(asked) == 1


def test_gpus_are_looked_at_again_until_the_agent_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = meter(tmp_path)
    answers = [(GpuMemory(10, 9),), (), (GpuMemory(10, 1),)]  # the driver has no answer once

    def ask() -> tuple[GpuMemory, ...]:
        answer = answers.pop(0)
        if not answers:
            there._stopped.set()
        return answer

    monkeypatch.setattr(node_resources, "gpu_memory", ask)
    monkeypatch.setattr(node_resources, "GPU_EVERY_S", 0.0)
    there.watch_gpus()
    found = there.complete(beat()).stats
    assert found is not None
    assert found.memory.gpus == (GpuMemory(10, 1),)
