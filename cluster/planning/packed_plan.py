"""A load plan as it is sent: tables that each node receives once, and facts for the coordinator's decisions.

Agents and workers unpack the same tables and derive what their ranks touch and hold. So what the coordinator sends
grows with nodes, not with ranks times tensors. Only messages between our own processes are unpickled, never stored
data.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.layouts.mesh import Layout
from cluster.planning.cut_model import CutModel
from cluster.planning.plan import LoadPlan, RankPlan
from cluster.planning.rank_plans import RankFacts, plan_rank, rank_chunks
from cluster.telemetry.stats import ProcessMemory
from storage.checkpoints.model_index import ChunkTable, Shard


@dataclass(frozen=True, slots=True, eq=False)
class SharedTables:
    """The tables that all ranks and agents of one load share."""

    shards: tuple[Shard, ...]
    chunks: ChunkTable
    cut: CutModel

    def chunk_ids(self, rank: int) -> NDArray[np.int64]:
        """Return the ids of the chunks that the rank touches, ascending."""
        return rank_chunks(self.cut, self.chunks, self.cut.layout.rank_coords(rank))

    def rank_plan(self, rank: int) -> RankPlan:
        """Return the plan of one rank."""
        return plan_rank(self.cut, self.chunks, rank)

    def wanted_bytes(self, ranks: Iterable[int]) -> int:
        """Return the bytes of the model that at least one of `ranks` holds."""
        return self.cut.wanted_bytes(ranks)


@dataclass(frozen=True, slots=True, eq=False)
class ReaderTables(SharedTables):
    """The tables of a group of readers (`actors.reader`). Any of them may read any chunk."""

    @classmethod
    def of(cls, shards: tuple[Shard, ...], chunks: ChunkTable) -> ReaderTables:
        """Return the tables of readers of a model with these shards and chunks."""
        none = np.empty(0, np.int32)
        return cls(shards, chunks, CutModel(Layout(), (), (), (), none, none, none, np.empty(0, np.int64)))

    def chunk_ids(self, rank: int) -> NDArray[np.int64]:
        """Return the ids of all chunks."""
        return np.arange(len(self.chunks))

    def wanted_bytes(self, ranks: Iterable[int]) -> int:
        """Return the bytes of all chunks."""
        return int(self.chunks.sizes_bytes().sum())


@dataclass(frozen=True, slots=True, eq=False)
class PackedPlan:
    """A load plan as the planning process returns it."""

    revision: str
    verified: str  # hash name, or "transport"
    model_bytes: int
    ranks: tuple[RankFacts, ...]
    shared: bytes = field(repr=False)  # pickled SharedTables
    signed_by: str = ""  # id of the trusted key that signed the manifest
    memory: ProcessMemory | None = None  # memory of the planning process
    quantization_config: dict[str, Any] | None = None  # see cluster.precision.written_quantization

    def outline(self) -> PackedPlan:
        """Return the fields that a report of the load needs, without those that grow with ranks and tensors."""
        return replace(self, ranks=(), shared=b"")


def pack_shared(plan: LoadPlan) -> bytes:
    """Pickle the tables that all ranks share."""
    return pickle.dumps(SharedTables(plan.shards, plan.chunks, plan.cut), protocol=5)


def unpack_shared(data: bytes) -> SharedTables:
    """Unpickle what `pack_shared` returned, from a process of our own."""
    tables: SharedTables = pickle.loads(data)
    return tables
