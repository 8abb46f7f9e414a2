"""Longshore's HTTP service over a scripted cluster: as many ranks and chunks, as far on, as a test says."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from cluster.config import Config
from cluster.errors import ModelNotFound
from cluster.layouts.mesh import Layout
from cluster.telemetry.chunk_map import ChunkMap, EventLog, LoadEvent, NodeChunks, ShardChunks, runs_of
from cluster.telemetry.report import ClusterStatus, LoadProgress, ModelStatus, NodeStatus, RankStatus, UpdateProgress
from cluster.telemetry.saves import SaveStatus
from cluster.telemetry.stats import NodeTraffic
from serving.service import Service
from serving.settings import ServingSettings

CHUNK_BYTES = 8 << 20
RANKS_PER_NODE = 8
IN_FLIGHT = 48  # chunks of a node
IN_ARENA = 160


@dataclass
class Script:
    """One load. The test moves `part` on; `ready` when it is 1."""

    ranks: int = 4
    chunks: int = 1000
    shards: int = 10
    model_id: str = "llama-70b-3f9a21c4"
    part: float = 0.0
    lost: tuple[int, ...] = ()
    error: str = ""
    disk: bool = True
    gone: bool = False  # the model is not listed any more
    saves: tuple[SaveStatus, ...] = ()
    updating: UpdateProgress | None = None
    began_s: float = field(default_factory=time.monotonic)
    events: EventLog = field(default_factory=EventLog)

    @property
    def hosts(self) -> list[str]:
        return [f"gpu-{node:02d}" for node in range(-(-self.ranks // RANKS_PER_NODE))]

    def note(self, kind: str, message: str, rank: int | None = None, **details: str) -> None:
        host = "" if rank is None else self.hosts[rank // RANKS_PER_NODE]
        self.events.add(time.time(), kind, message, rank=rank, host=host, **details)

    def state(self) -> str:
        if self.error:
            return "failed"
        return "degraded" if self.lost and self.part >= 1 else "ready" if self.part >= 1 else "loading"

    def model(self) -> ModelStatus:
        each_bytes = self.chunks * CHUNK_BYTES // self.ranks
        ranks = tuple(self._rank(rank, each_bytes) for rank in range(self.ranks))
        placed_bytes = sum(rank.placed_bytes for rank in ranks)
        progress = LoadProgress(
            self.model_id,
            "s3://models/llama-70b",
            self.state(),
            placed_bytes,
            each_bytes * self.ranks,
            int(placed_bytes * 1.02),
            sum(rank.state == "ready" for rank in ranks),
            self.ranks,
            time.monotonic() - self.began_s,
        )
        hosts = tuple(rank.host for rank in ranks)
        return ModelStatus(
            progress,
            "3f9a21c4" * 4,
            Layout(self.ranks),
            "cuda",
            True,
            1,
            hosts,
            self.error,
            "key-7c11",
            ranks=ranks,
            updating=self.updating,
        )

    def _rank(self, rank: int, each_bytes: int) -> RankStatus:
        lost = rank in self.lost
        done = 0.0 if lost else min(1.0, self.part * (1 + 0.15 * (rank % 5) / 5))
        state = "lost" if lost else "ready" if done >= 1 else "loading"
        own_bytes = 0 if lost else int(700e6 + rank % 7 * 31e6)
        host, device = self.hosts[rank // RANKS_PER_NODE], f"cuda:{rank % RANKS_PER_NODE}"
        return RankStatus(rank, host, state, int(rank % 11 == 5), int(done * each_bytes), each_bytes, own_bytes, device)

    def nodes(self) -> tuple[NodeStatus, ...]:
        arena, budget = 16 << 30, 200 * 10**9 if self.disk else 0
        return tuple(
            NodeStatus(
                f"{number:040x}",
                host,
                arena,
                int(arena * min(1.0, 0.1 + self.part * 0.85)),
                IN_FLIGHT if self.state() == "loading" else 0,
                0,
                0.3,
                evicted_chunks=int(self.part * 1200),
                disk_budget_bytes=budget,
                disk_used_bytes=int(budget * 0.7 * self.part),
                disk_files=int(self.part * 17000),
                disk_unkept_chunks=3 if number == 1 else 0,
            )
            for number, host in enumerate(self.hosts)
        )

    def chunk_map(self) -> ChunkMap:
        bounds = np.linspace(0, self.chunks, self.shards + 1).astype(int).tolist()
        shards = tuple(
            ShardChunks(f"model-{number:05d}.safetensors", (end - start) * CHUNK_BYTES, start, end - start)
            for number, (start, end) in enumerate(itertools.pairwise(bounds), 1)
        )
        told = ((f"{number:040x}", host, self._letters(number, bounds)) for number, host in enumerate(self.hosts))
        nodes = tuple(
            NodeChunks(node, host, runs_of(letters), self.traffic(number))
            for number, (node, host, letters) in enumerate(told)
        )
        return ChunkMap(self.model_id, self.chunks, shards, nodes)

    def traffic(self, node: int) -> NodeTraffic:
        """A chunk comes from the store once for all nodes, and each node sends as much as it receives."""
        needed, others = int(self.part * self.chunks) * CHUNK_BYTES, [h for h in self.hosts if h != self.hosts[node]]
        each = needed // len(self.hosts)
        sources = {"store_via_arena": each, "peer": each * len(others)}
        return NodeTraffic(sources, dict.fromkeys(others, each), each * len(others))

    def _letters(self, node: int, bounds: list[int]) -> np.ndarray:
        """Each rank of a node begins elsewhere; what is ahead of the placed is verified, then on its way."""
        letters = np.full(self.chunks, ord("d" if self.part >= 1 else "p"), np.uint8)
        streams = min(self.ranks, RANKS_PER_NODE)
        each = self.chunks / streams
        ahead = min(1.0, self.chunks / 2000)  # of small models not all is on its way at once
        for stream in range(streams if self.part < 1 else 0):
            first = int(stream * each)
            done = int(each * min(1.0, self.part * (1 + 0.1 * ((stream + node) % 4))))
            for letter, count in (
                ("d", done),
                ("c", int(IN_ARENA * ahead) // streams),
                ("l", int(IN_FLIGHT * ahead) // streams),
                ("w", 1),
            ):
                end = min(first + count, int((stream + 1) * each))
                letters[first:end] = ord(letter)
                first = end
        letters[bounds[:-1]] = ord("-")  # nobody needs the headers
        return letters


class ScriptedService(Service):
    """Answers as the script says. What it does not override would ask a cluster."""

    def __init__(self, script: Script, settings: ServingSettings | None = None) -> None:
        super().__init__(settings or ServingSettings(), Config())
        self.script = script
        self.asked: list[str] = []

    async def status(self) -> ClusterStatus:
        self.asked.append("status")
        models = () if self.script.gone else (self.script.model(),)
        return ClusterStatus("0.1.0", "c0ffee", models, self.script.nodes(), saves=self.script.saves)

    async def events(self, model_id: str, after: int, wait_s: float) -> tuple[LoadEvent, ...]:
        give_up_s = time.monotonic() + wait_s
        while not self.script.events.after(after) and time.monotonic() < give_up_s:  # noqa: ASYNC110 - it is no loop's
            await asyncio.sleep(0.05)
        return self.script.events.after(after)

    async def chunks(self, model_id: str) -> ChunkMap:
        self.asked.append("chunks")
        if model_id != self.script.model_id or self.script.gone:
            raise ModelNotFound("no such model", model=model_id)
        return self.script.chunk_map()
