"""The shards that ranks hold after a load of a folder, without a cluster: the real device places each chunk once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from actors.devices.cpu_device import CpuDevice
from actors.rank.chunk_placer import Staging
from actors.shard import RankShard
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import read_model_config
from cluster.layouts.rules import rules_for
from cluster.planning.cut_model import AS_STORED, Precision
from cluster.planning.make_plan import build_load_plan
from cluster.planning.plan import LoadPlan
from cluster.planning.read_items import expand_read_items
from storage.checkpoints.checkpoint import open_model
from storage.stores.local import LocalStore

ONE_RANK = Layout()
CHUNK_BYTES = 1 << 14


def shards_of(folder: Path, layout: Layout = ONE_RANK, rules: Mapping[str, str] | None = None) -> list[RankShard]:
    """Return what each rank would hold after a load. `rules`: the user's own, before those of the family."""
    plan = plan_of(folder, layout, rules)
    return [shard_of(plan, rank, files_of(plan, folder)) for rank in range(layout.ranks)]


def plan_of(
    folder: Path,
    layout: Layout = ONE_RANK,
    rules: Mapping[str, str] | None = None,
    precision: Precision = AS_STORED,
) -> LoadPlan:
    """The plan of that load."""
    store = LocalStore(folder)
    index = open_model(store, chunk_bytes=CHUNK_BYTES)
    config = read_model_config(store, index)
    return build_load_plan(index, layout, rules_for(config, rules), config, precision)


def files_of(plan: LoadPlan, folder: Path) -> list[np.ndarray]:
    """The bytes of the checkpoint's files, as `shard_of` takes them."""
    return [np.fromfile(folder / shard.key, np.uint8) for shard in plan.shards]


def shard_of(plan: LoadPlan, rank: int, files: list[np.ndarray]) -> RankShard:
    """One rank's, from the bytes of the checkpoint's files."""
    mine = plan.ranks[rank]
    device = CpuDevice()
    device.allocate(mine.segment_bytes)
    items = expand_read_items(mine.sources, plan.chunks)
    staging = Staging(device, mine, items, plan.chunks.largest_bytes)
    for chunk in mine.chunk_ids.tolist():
        span = plan.chunks.byte_range(chunk)
        data = files[plan.chunks.shard[chunk]][span.start : span.end]
        staging.begin(chunk)
        device.place(data.data, items, items.for_chunk(chunk))
        staging.end(chunk)
    return RankShard(mine, device)
