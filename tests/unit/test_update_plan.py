"""Laws of an update's plan: what is read and exchanged makes the old contents the new ones, and little is read."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.errors import UpdateRefused
from cluster.fit.needs import check_update_fit
from cluster.layouts.mesh import Layout
from cluster.layouts.rules import parse_rules
from cluster.planning.make_plan import build_load_plan
from cluster.planning.packed_plan import RankFacts, SharedTables
from cluster.planning.plan import LoadPlan, RankPlan
from cluster.planning.update_plan import (
    check_update,
    exchange_items,
    find_changes,
    placed_live,
    update_tables,
)
from cluster.precision.recipes import Precision
from cluster.scheduling.topology import NodeInfo
from storage.checkpoints.model_index import chunk_bounds
from storage.checkpoints.safetensors_header import Header, HeaderTensor
from storage.host.memory import MemoryPool
from tests.support.planned_models import Bytes, StoredModel, as_bf16, carry_out, random_arrays, store_arrays
from tests.support.ray_clusters import TEST_SETTINGS

SHAPES = {
    "a.0.up.weight": (24, 16),
    "a.0.down.weight": (16, 24),
    "a.0.norm": (7,),
    "a.1.up.weight": (8, 16),
    "a.1.down.weight": (16, 8),
    "empty": (0, 3),
}
RULES = parse_rules({"**.up.weight": "column", "**.down.weight": "row", "**": "replicate"})


def stored(
    arrays: dict[str, NDArray[np.uint16]], shards: int, chunk_bytes: int, *, as_published: bool = False
) -> StoredModel:
    """A published model: each chunk has a digest. `as_published`: chunks end where a publish ends them."""
    model = store_arrays(as_bf16(arrays), shards, chunk_bytes)
    if as_published:
        headers: list[list[HeaderTensor]] = [[] for _ in range(shards)]
        for tensor in model.index.tensors:
            headers[tensor.shard].append(HeaderTensor(tensor.name, "BF16", tensor.shape, tensor.start, tensor.end))
        ends = [
            chunk_bounds(Header(tuple(tensors), {}, tensors[0].start), len(file), chunk_bytes)
            for tensors, file in zip(headers, model.files, strict=True)
        ]
        model = store_arrays(as_bf16(arrays), shards, chunk_bytes, ends)
    chunks = model.index.chunks
    digests = [
        np.frombuffer(hashlib.sha256(model.files[shard][start:end].tobytes()).digest(), np.uint8)
        for shard, start, end in zip(chunks.shard.tolist(), chunks.start.tolist(), chunks.end.tolist(), strict=True)
    ]
    table = replace(chunks, hash_name="blake3", digests=np.array(digests).reshape(-1, 32))
    return replace(model, index=replace(model.index, chunks=table))


def planned(model: StoredModel, ranks: int, precision: Precision) -> LoadPlan:
    return build_load_plan(model.index, Layout(tensor_parallel_size=ranks), RULES, None, precision)


def tables(plan: LoadPlan) -> SharedTables:
    return SharedTables(plan.shards, plan.chunks, plan.cut)


def memory_of(plan: LoadPlan, rank: RankPlan, files: tuple[Bytes, ...]) -> list[Bytes]:
    """The segments of a rank that has loaded a plan."""
    named, _ = carry_out(plan, rank, files)
    segments = [np.zeros(size, np.uint8) for size in rank.segment_bytes]
    for piece in rank.slices:
        segments[piece.segment][piece.segment_offset : piece.segment_offset + piece.size_bytes] = named[piece.name]
    return segments


CHANGED = st.sets(st.sampled_from(sorted(SHAPES)))
HOW = st.sampled_from([Precision(), Precision("float32"), Precision("auto", "int8")])


@given(CHANGED, st.integers(1, 2), st.sampled_from([1, 2]), st.sampled_from([64, 100, 1 << 20]), HOW, st.booleans())
def test_an_update_makes_the_new_model(
    changed: set[str], ranks: int, shards: int, chunk_bytes: int, precision: Precision, moved: bool
) -> None:
    """Whatever changed, however it is cut and converted, and also when tensors have other places in other shards."""
    arrays = random_arrays(SHAPES, seed=1)
    others = random_arrays(SHAPES, seed=2)
    new_arrays = {name: others[name] if name in changed else arrays[name] for name in SHAPES}
    if moved:
        new_arrays = dict(reversed(new_arrays.items()))
    old_model = stored(arrays, shards, chunk_bytes, as_published=moved)
    new_model = stored(new_arrays, 3 - shards if moved else shards, chunk_bytes, as_published=moved)
    old, new = planned(old_model, ranks, precision), planned(new_model, ranks, precision)
    check_update(tables(old), tables(new))
    changes = find_changes(tables(old), tables(new))
    part = update_tables(tables(new), changes)
    assert changed - {"empty"} <= set(part.cut.names)
    if not moved:
        assert bool(len(changes.chunks)) is bool(changed - {"empty"})
    elif chunk_bytes < 1 << 20:  # all others share no chunk with a neighbour
        assert changed - {"empty", "a.0.norm"} == set(part.cut.names) - {"a.0.norm"}
    for rank in range(ranks):
        live = old.ranks[rank]
        segments = memory_of(old, live, old_model.files)
        update = part.rank_plan(rank)
        staged_memory = staged_memory_of(part, update, new_model.files)
        slices, items = exchange_items(update, live, part.chunks)
        for row in range(len(items)):
            piece, run = slices[items.chunk[row]], int(items.run_bytes[row])
            source = piece.offset + int(items.src_offset[row])
            target = int(items.dest_offset[row])
            data = staged_memory[piece.segment][source : source + run]
            segments[items.segment[row]][target : target + run] = data
        wanted, _ = carry_out(new, new.ranks[rank], new_model.files)
        for piece in live.slices:
            mine = segments[piece.segment][piece.segment_offset : piece.segment_offset + piece.size_bytes]
            assert (mine == wanted[piece.name]).all(), piece.name
        in_place = placed_live(update, live)
        places = {piece.name: (piece.segment, piece.segment_offset) for piece in live.slices}
        assert {p.name: (p.segment, p.segment_offset) for p in in_place.slices}.items() <= places.items()


def staged_memory_of(part: SharedTables, update: RankPlan, files: tuple[Bytes, ...]) -> list[Bytes]:
    """The memory of an update: what was not read is junk."""
    from cluster.planning.read_items import expand_read_items
    from tests.support.planned_models import _convert

    sizes = (*update.segment_bytes, *(each.source.size_bytes for each in update.staged))
    memory = [np.full(size, 0xA5, np.uint8) for size in sizes]
    items = expand_read_items(update.sources, part.chunks)
    for row in range(len(items)):
        chunk = int(items.chunk[row])
        data = files[part.chunks.shard[chunk]][part.chunks.start[chunk] : part.chunks.end[chunk]]
        for number in range(int(items.count[row])):
            source = int(items.src_offset[row] + number * items.src_stride[row])
            target = int(items.dest_offset[row] + number * items.dest_stride[row])
            run = int(items.run_bytes[row])
            memory[items.segment[row]][target : target + run] = data[source : source + run]
    _convert(update, memory)
    return memory


def test_nothing_changed_reads_nothing() -> None:
    model = stored(random_arrays(SHAPES), 2, 100)
    plan = planned(model, 2, Precision())
    changes = find_changes(tables(plan), tables(plan))
    assert (len(changes.tensors), len(changes.chunks)) == (0, 0)
    every = find_changes(tables(plan), tables(plan), all_changed=True)
    assert len(every.tensors) == len(SHAPES) - 1  # one has no bytes


def test_differences_are_listed_before_anything_is_touched() -> None:
    old = tables(planned(stored(random_arrays(SHAPES), 1, 100), 1, Precision()))
    shapes = {**SHAPES, "a.0.norm": (8,), "more": (2,)}
    del shapes["empty"]
    new = tables(planned(stored(random_arrays(shapes), 1, 100), 1, Precision()))
    with pytest.raises(UpdateRefused) as refused:
        check_update(old, new)
    for text in ("'more' is new", "'empty' is missing", "was [7] and is [8]"):
        assert text in str(refused.value)


def test_a_model_without_digests_is_refused() -> None:
    model = store_arrays(as_bf16(random_arrays(SHAPES)))
    plan = tables(planned(model, 1, Precision()))
    with pytest.raises(UpdateRefused, match="no manifest"):
        check_update(plan, plan)


@pytest.mark.parametrize(("streaming", "fits"), [(False, False), (True, True)])
def test_room_is_checked_on_every_host(streaming: bool, fits: bool) -> None:
    from cluster.config import Config

    facts = {rank: RankFacts(1 << 30, 1 << 30, 1 << 30) for rank in range(2)}
    pools = [MemoryPool(f"host-{at}", free, 16 << 30) for at, free in enumerate((8 << 30, 1 << 30))]
    nodes = [
        NodeInfo(node_id=f"n{at}", host=f"host-{at}", memory_free_bytes=pool.free_bytes, pools=(pool,))
        for at, pool in enumerate(pools)
    ]
    misfit = check_update_fit(facts, {0: 0, 1: 1}, nodes, Config(**TEST_SETTINGS), "cpu", streaming=streaming)
    assert (misfit is None) is fits
    if misfit is not None:
        assert "host-1" in str(misfit)
        assert "host-0" not in str(misfit)
        assert "streaming=True" in str(misfit)
