"""What an agent's heartbeat says of memory and of the disk: read from the kernel and the driver, outside every lock."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from dataclasses import replace

from actors.node.disk_writer import DiskWriter
from cluster.messages import AgentBeat, RankBeat
from cluster.telemetry.figures import NodeMemory
from storage.host.gpu_memory import GpuMemory, gpu_memory
from storage.host.memory import free_bytes, memory_pools, own_bytes

GPU_EVERY_S = 10.0  # where only the driver's command answers, each look is a process


class NodeMeter:
    """Looks when `complete` is called; at GPUs in a thread, because a driver may take its time."""

    def __init__(self, directory: str, disk: DiskWriter, stopped: threading.Event) -> None:
        """`directory` is the arena's."""
        self._directory = directory
        self._disk = disk
        self._stopped = stopped
        self._gpus: tuple[GpuMemory, ...] = ()
        self._numbers = itertools.count(1)
        self._answered = False

    def watch_gpus(self) -> None:
        """The thread's work, until the agent stops; ends at once on a node that has none."""
        self._gpus = gpu_memory()
        while self._gpus and not self._stopped.wait(GPU_EVERY_S):
            self._gpus = gpu_memory() or self._gpus  # a driver that does not answer once does so later

    def complete(self, beat: AgentBeat) -> AgentBeat:
        """With what the agent's ledger does not know. One at a time."""
        beat = replace(beat, number=next(self._numbers), answered=self._answered)
        if beat.figures is None:
            return beat
        figures = replace(beat.figures, disk=self._disk.stats(), memory=self._memory())
        return replace(beat, figures=figures, ranks=tuple(_with_memory(rank) for rank in beat.ranks))

    def answered(self) -> None:
        """Some coordinator has taken a heartbeat in."""
        self._answered = True

    def _memory(self) -> NodeMemory:
        memory = NodeMemory(agent_bytes=own_bytes(), gpus=self._gpus)
        with contextlib.suppress(OSError):
            pool = min(memory_pools(), key=lambda pool: pool.free_bytes)
            memory = replace(memory, host_free_bytes=pool.free_bytes, host_total_bytes=pool.total_bytes)
        with contextlib.suppress(OSError):
            info = os.statvfs(self._directory)
            total_bytes = info.f_blocks * info.f_frsize
            memory = replace(memory, shm_free_bytes=free_bytes(self._directory), shm_total_bytes=total_bytes)
        return memory


def _with_memory(rank: RankBeat) -> RankBeat:
    """0 when its process is gone, or was never there."""
    return replace(rank, own_bytes=own_bytes(rank.pid)) if rank.pid else rank
