"""The plan of an update: what of a resident model differs in another revision, and the tables to read only that. Pure.

    old tables, new tables --same_model--> differences: such a model cannot be updated in place
                           --find_changes--> changed tensors, chunks to read
                           --update_tables--> tables of a small model: only changed tensors, only those chunks

An update is a load of that small model beside the resident one, or into it. So leases, digests, retries, caches and
conversions are those of every load. Afterwards `exchange_items` says what goes from the memory of the small model to
that of the resident one.

A tensor is compared piece by piece, as chunks cut it. A piece is the same when the old model has a chunk with the same
digest and size, which begins at the same byte of the tensor. Shards may have other names, and tensors another order.
A tensor that is converted is read whole when any of it changed: its scales may depend on all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cluster.errors import UpdateRefused
from cluster.planning.cut_model import CutModel
from cluster.planning.packed_plan import PackedPlan, RankFacts, SharedTables
from cluster.planning.plan import RankPlan, SliceTable
from cluster.planning.read_items import ReadItems, SourcePatterns, expand_read_items, pair_with_chunks
from cluster.units import show_some
from storage.checkpoints.model_index import ChunkTable
from storage.problems import MAX_LISTED, quote


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What differs between two revisions. Numbers are those of the new tables."""

    tensors: NDArray[np.int64]  # changed tensors, ascending
    chunks: NDArray[np.int64]  # chunks to read, ascending


@dataclass(frozen=True, slots=True, eq=False)
class PackedUpdate:
    """An update as the planning process returns it."""

    plan: PackedPlan  # of the whole new revision: replaced ranks load by it
    shared: bytes  # pickled SharedTables of what changed; empty: nothing did
    ranks: tuple[RankFacts, ...]  # of what changed, of every rank
    tensors: int  # of the model
    changed_tensors: int
    changed_bytes: int  # of the chunks to read, each once


def same_model(old: CutModel, new: CutModel) -> list[str]:
    """Return how the tensors of two models differ, or how ranks hold them; none: one can take the place of the other.

    Contents, order, and names and sizes of shards do not count.
    """
    problems = []
    if old.layout != new.layout:
        problems.append("the layout is another one")
    before = {name: at for at, name in enumerate(old.names)}
    problems += [f"{quote(name)} is new" for name in new.names if name not in before]
    problems += [f"{quote(name)} is missing" for name in sorted(before.keys() - set(new.names))]
    known: dict[tuple[int, int, int, int], str] = {}  # tensors of one kind are compared once
    for at, name in enumerate(new.names):
        was = before.get(name)
        if was is None:
            continue
        pair = int(old.kind[was]), int(new.kind[at]), int(old.holder[was]), int(new.holder[at])
        if pair not in known:
            known[pair] = _difference(old, new, pair)
        if known[pair]:
            problems.append(f"{quote(name)} {known[pair]}")
    return problems


def _difference(old: CutModel, new: CutModel, pair: tuple[int, int, int, int]) -> str:
    was, now = old.kinds[pair[0]], new.kinds[pair[1]]
    if was.dtype != now.dtype:
        return f"was {was.dtype} and is {now.dtype}"
    if was.shape != now.shape:
        return f"was {list(was.shape)} and is {list(now.shape)}"
    if was.cut != now.cut or old.holders[pair[2]] != new.holders[pair[3]]:
        return "is cut in another way"
    return "" if was.recipe == now.recipe else "is converted in another way"


def find_changes(old: SharedTables, new: SharedTables, *, all_changed: bool = False) -> Changes:
    """Return what of `new` must be read by ranks that hold `old`, which is the `same_model`.

    `all_changed`: trust nothing that the ranks hold.
    """
    tensor, chunk, low = _pieces(new)
    comparable = not all_changed and _digests_compare(old.chunks, new.chunks)
    same = _same_pieces(old, new, tensor, chunk, low) if comparable else np.zeros(len(tensor), bool)
    changed = np.unique(tensor[~same])
    converted = np.array([kind.recipe is not None for kind in new.cut.kinds], bool)
    reads = ~same
    if len(tensor) and converted.any():
        of_changed = np.zeros(len(new.cut), bool)
        of_changed[changed] = True
        reads |= of_changed[tensor] & converted[new.cut.kind[tensor]]
    return Changes(changed, np.unique(chunk[reads]))


def _digests_compare(old: ChunkTable, new: ChunkTable) -> bool:
    return old.digests is not None and new.digests is not None and old.hash_name == new.hash_name


def _pieces(tables: SharedTables) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (tensor, chunk, first byte of the chunk from the first byte of the tensor) where they overlap."""
    sizes = tables.cut.sizes_bytes()
    filled = np.flatnonzero(sizes)
    none = np.empty(0, np.int64)
    if not len(filled) or not len(tables.chunks):
        return none, none, none
    size = sizes[filled]
    shard = tables.cut.shard[filled].astype(np.int64)
    whole = SourcePatterns(shard, tables.cut.start[filled], size, np.ones_like(size), size)
    tensor, chunk, low, _ = pair_with_chunks(whole, tables.chunks)
    return filled[tensor], chunk, low


def _same_pieces(
    old: SharedTables,
    new: SharedTables,
    tensor: NDArray[np.int64],
    chunk: NDArray[np.int64],
    low: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return for each piece of the new model whether the old one has the same."""
    number = {name: at for at, name in enumerate(new.cut.names)}
    renumbered = np.array([number.get(name, -1) for name in old.cut.names], np.int64)
    was_tensor, was_chunk, was_low = _pieces(old)
    was = renumbered[was_tensor].tolist(), was_low.tolist(), old.chunks.sizes_bytes()[was_chunk].tolist()
    at = {piece: row for piece, row in zip(zip(*was, strict=True), was_chunk.tolist(), strict=True)}
    now = tensor.tolist(), low.tolist(), new.chunks.sizes_bytes()[chunk].tolist()
    found = np.array([at.get(piece, -1) for piece in zip(*now, strict=True)], np.int64)
    same = found >= 0
    if old.chunks.digests is None or new.chunks.digests is None:
        return np.zeros(len(tensor), bool)
    same[same] = (old.chunks.digests[found[same]] == new.chunks.digests[chunk[same]]).all(axis=1)
    return same


def update_tables(new: SharedTables, changes: Changes) -> SharedTables:
    """Return the tables of the model that has only the changed tensors, and only the chunks to read."""
    cut, rows, chunks = new.cut, changes.tensors, new.chunks
    part = replace(
        cut,
        names=tuple(cut.names[row] for row in rows.tolist()),
        kind=cut.kind[rows],
        holder=cut.holder[rows],
        shard=cut.shard[rows],
        start=cut.start[rows],
        amax=None if cut.amax is None else cut.amax.select(rows),
    )
    digests = None if chunks.digests is None else chunks.digests[changes.chunks]
    columns = chunks.shard[changes.chunks], chunks.start[changes.chunks], chunks.end[changes.chunks]
    return SharedTables(new.shards, ChunkTable(*columns, chunks.hash_name, digests), part)


def check_update(old: SharedTables, new: SharedTables) -> None:
    """Raise UpdateRefused, which lists the differences, unless ranks that hold `old` can be given `new` in place."""
    if old.cut.device_map is not None or new.cut.device_map is not None:
        raise UpdateRefused(
            "a model with a device map cannot be updated in place", hint="load the new revision, and release this one"
        )
    if new.chunks.digests is None:
        raise UpdateRefused(
            "the new revision has no manifest, so nobody knows what changed",
            hint="publish it (longshore publish), or load it anew",
        )
    problems = same_model(old.cut, new.cut)
    if problems:
        raise UpdateRefused(
            f"the new revision differs in more than its contents: {show_some(problems, MAX_LISTED)}",
            hint="load it beside this model, and release this one",
            differences=len(problems),
        )


# -- on the ranks ----------------------------------------------------------------------------------------------------


def placed_live(update: RankPlan, live: RankPlan) -> RankPlan:
    """Return the plan of an update with the places that its slices have in the memory of the resident model."""
    places = {name: (segment, offset) for name, _, segment, offset in SliceTable.of(live.slices).rows()}
    table = SliceTable.of(update.slices)
    rows = [places[name] for name in table.names]
    segment, offset = np.array(rows, np.int64).reshape(-1, 2).T
    slices = replace(table, segment=segment.astype(np.int32), segment_offset=np.ascontiguousarray(offset))
    first = len(live.segment_bytes)
    staged = tuple(
        replace(each, source=replace(each.source, segment=first + at)) for at, each in enumerate(update.staged)
    )
    return replace(update, slices=slices, staged=staged, segment_bytes=live.segment_bytes)


@dataclass(frozen=True, slots=True)
class StagedSlice:
    """The place of one changed slice in the memory of an update."""

    segment: int
    offset: int
    size_bytes: int


def exchange_items(update: RankPlan, live: RankPlan, chunks: ChunkTable) -> tuple[tuple[StagedSlice, ...], ReadItems]:
    """Return the changed slices, and the copies from them to the resident model's memory.

    `items.chunk` numbers the slices, and `items.src_offset` counts from the first byte of a slice. What was not read
    is not copied. A slice that was converted is copied whole. Each copy is one run, so no device needs memory for it.
    """
    table = SliceTable.of(update.slices)
    target = SliceTable.of(placed_live(update, live).slices)
    sizes = np.array([kind.size_bytes for kind in table.kinds], np.int64)[table.kind]
    made = np.array([kind.suffix is not None for kind in table.kinds], bool)[table.kind]
    numbers = np.arange(len(table), dtype=np.int32)
    apart = replace(table, segment=numbers, segment_offset=np.zeros(len(table), np.int64))
    read = expand_read_items([piece for piece in apart if not piece.made_from], chunks)
    dense = read.dest_stride == read.run_bytes  # runs that follow each other are one; others are taken one by one
    runs = np.where(dense, 1, read.count)
    row = np.repeat(np.arange(len(read)), runs)
    within = np.arange(len(row)) - np.repeat(np.cumsum(runs) - runs, runs)
    run = np.where(dense, read.run_bytes * read.count, read.run_bytes)[row]
    whole = np.flatnonzero(made & (sizes > 0))
    number = np.concatenate([read.segment[row], whole])
    begin = np.concatenate([read.dest_offset[row] + within * read.dest_stride[row], np.zeros(len(whole), np.int64)])
    size = np.concatenate([run, sizes[whole]])
    items = ReadItems(
        number,
        begin,
        target.segment[number].astype(np.int64),
        target.segment_offset[number] + begin,
        size,
        np.ones_like(size),
        size,
        size,
    )
    order = np.lexsort((items.src_offset, items.chunk))
    staged = tuple(
        StagedSlice(segment, offset, size_bytes)
        for segment, offset, size_bytes in zip(
            table.segment.tolist(), table.segment_offset.tolist(), sizes.tolist(), strict=True
        )
    )
    return staged, ReadItems(*(getattr(items, name)[order] for name in ReadItems.__slots__))
