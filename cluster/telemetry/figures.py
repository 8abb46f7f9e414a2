"""What ranks and agents count, as it travels in their messages. Small frozen data.

Counters are cumulative since the process that counts began, and only grow; the rest is of the moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.telemetry.rank_report import StageTimes
from storage.arena.chunk_cache import CacheStats
from storage.disk.tier import DiskStats
from storage.host.gpu_memory import GpuMemory

SOURCES = ("store_via_arena", "store_direct", "disk", "arena")  # as in LoadReport.bytes_by_source


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What one rank tells its agent once a heartbeat."""

    stages: StageTimes  # so far
    requests: int  # in flight now
    allowed_requests: int  # that it may have in flight


@dataclass(frozen=True, slots=True)
class LoadCounters:
    """What one part of a load did on its node, as far as this process of the agent saw it happen."""

    bytes_by_source: Mapping[str, int] = field(default_factory=dict)  # SOURCES
    chunks_by_source: Mapping[str, int] = field(default_factory=dict)
    verified_chunks: int = 0  # fetched, and their digest was right
    corrupt_chunks: int = 0  # fetched and thrown away: it was wrong
    retries: Mapping[str, int] = field(default_factory=dict)  # by cause
    leases_granted: int = 0
    leases_taken_back: int = 0  # of ranks that died or took too long
    hedges: int = 0
    hedges_won: int = 0
    throttles: int = 0  # answers of the store that asked for fewer requests
    stages: StageTimes = field(default_factory=StageTimes)  # of its ranks, of those that are gone too


@dataclass(frozen=True, slots=True)
class EndedPart:
    """The last word on a part of a load that is over."""

    load_id: str
    attempt: int
    model: str
    counters: LoadCounters


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Memory of a node at a moment. 0: not known."""

    host_free_bytes: int = 0  # of the pool that has least: the host's, or that of a control group around the agent
    host_total_bytes: int = 0  # of that pool
    shm_free_bytes: int = 0  # of the file system of the arena
    shm_total_bytes: int = 0
    agent_bytes: int = 0  # the agent's own, the arena not counted
    gpus: tuple[GpuMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What an agent tells of its node."""

    cache: CacheStats
    disk: DiskStats | None = None  # None: no disk tier
    memory: NodeMemory = field(default_factory=NodeMemory)
