"""A load plan as it travels: tables that a node gets once, and facts that the coordinator decides by.

Agents and workers unpack the same tables and work out what their ranks touch and hold. So what passes through the
coordinator grows with nodes, not with ranks times tensors. Pickle between processes of our own only: nothing that was
stored is ever unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.planning.cut_model import CutModel
from cluster.planning.plan import LoadPlan, RankPlan
from cluster.planning.rank_plans import RankFacts, plan_rank, rank_chunks
from cluster.telemetry.report import ProcessMemory
from storage.checkpoints.model_index import ChunkTable, Shard


@dataclass(frozen=True, slots=True, eq=False)
class SharedTables:
    """What every rank and agent of one load has in common."""

    shards: tuple[Shard, ...]
    chunks: ChunkTable
    cut: CutModel

    def chunk_ids(self, rank: int) -> NDArray[np.int64]:
        """Chunks that the rank touches, ascending."""
        return rank_chunks(self.cut, self.chunks, self.cut.layout.rank_coords(rank))

    def rank_plan(self, rank: int) -> RankPlan:
        """All that one rank has to do."""
        return plan_rank(self.cut, self.chunks, rank)

    def wanted_bytes(self, ranks: Iterable[int]) -> int:
        """Bytes of the model that at least one of `ranks` holds."""
        return self.cut.wanted_bytes(ranks)


@dataclass(frozen=True, slots=True, eq=False)
class PackedPlan:
    """A load plan as the planning process hands it over."""

    revision: str
    verified: str  # hash name, or "transport"
    model_bytes: int
    ranks: tuple[RankFacts, ...]
    shared: bytes = field(repr=False)  # SharedTables, packed
    signed_by: str = ""  # id of the trusted key that signed the manifest
    memory: ProcessMemory | None = None  # of the process that planned
    quantization_config: dict[str, Any] | None = None  # see cluster.precision.written_quantization

    def outline(self) -> PackedPlan:
        """Return the part that does not grow with ranks and tensors: what a report of the load says of the model."""
        return replace(self, ranks=(), shared=b"")


def pack_shared(plan: LoadPlan) -> bytes:
    return pickle.dumps(SharedTables(plan.shards, plan.chunks, plan.cut), protocol=5)


def unpack_shared(data: bytes) -> SharedTables:
    tables: SharedTables = pickle.loads(data)
    return tables
