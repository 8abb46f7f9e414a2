"""A load plan in parts, each packed for whoever uses it: what the planning process hands to the coordinator.

The coordinator decides by facts and passes the packed parts on; agents unpack the shared tables, workers those and
their own plan. Pickle between processes of our own only: nothing that was stored is ever unpickled.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.load_plan import LoadPlan, RankPlan
from storage.model_index import ChunkTable, Shard


@dataclass(frozen=True, slots=True, eq=False)
class SharedTables:
    """What every rank and agent of one load has in common."""

    shards: tuple[Shard, ...]
    chunks: ChunkTable


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What the coordinator knows of a rank's plan without unpacking it."""

    size_bytes: int
    device_bytes: int
    segments: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedPlan:
    """A load plan as the planning process hands it over: facts to decide by, parts to pass on."""

    revision: str
    verified: str  # hash name, or "transport"
    model_bytes: int
    ranks: tuple[RankFacts, ...]
    needs: tuple[NDArray[np.int64], ...]  # rank -> chunk ids
    chunk_bytes: NDArray[np.int64]  # size of every chunk
    shared: bytes = field(repr=False)
    plans: tuple[bytes, ...] = field(repr=False)


def pack_shared(plan: LoadPlan) -> bytes:
    return pickle.dumps(SharedTables(plan.shards, plan.chunks), protocol=5)


def pack_rank(plan: RankPlan) -> bytes:
    return pickle.dumps(plan, protocol=5)


def unpack_shared(data: bytes) -> SharedTables:
    tables: SharedTables = pickle.loads(data)
    return tables


def unpack_rank(data: bytes) -> RankPlan:
    plan: RankPlan = pickle.loads(data)
    return plan
