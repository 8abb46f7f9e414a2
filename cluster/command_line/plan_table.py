"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from cluster.command_line.tables import NOT_ASKED, cell, digests, facts, table_of
from cluster.device_map.deciding import device_name
from cluster.preview.plan_layers import fold_layers, show_runs
from cluster.preview.plan_picture import at_rank, row_name, row_sizes
from cluster.preview.rank_tensors import TensorPart, show_ranges
from cluster.reports.object_check import unchecked_counts
from cluster.units import show_bytes

if TYPE_CHECKING:
    from cluster.preview.plan_summary import PlanSummary

SHOWN_RANKS = 64  # rows; ranks of a large layout differ in little
BAR_CHARS = 40  # of the widest bar
SHOWN_ROWS = 24  # of bars; with more, only those of whole ranks
_STYLES = {True: "green", False: "bold red", None: "yellow"}


def plan_table(plan: PlanSummary) -> RenderableType:
    """Whether it fits, and what would be loaded where."""
    said = [cell(plan.fit.sentence, _STYLES[plan.fit.fits]), Text()] if plan.fit else []
    overall = facts(
        [
            *([] if plan.estimated else [("revision", plan.revision)]),
            ("layout", f"{len(plan.ranks)} ranks ({plan.layout}) on {len(plan.nodes)} nodes"),
            ("precision", plan.precision or "as stored"),
            *(_estimate(plan) if plan.estimated else _stored(plan)),
            *_sources(plan),
            ("of that overfetch", show_bytes(plan.overfetch_bytes)),
            ("would be placed", show_bytes(plan.placed_bytes)),
            ("device memory", show_bytes(plan.device_bytes)),
            *_beside(plan),
            *([("expected time", plan.expected.sentence)] if plan.expected else []),
            *(("note", note) for note in plan.notes),
        ]
    )
    shown = plan.ranks[:SHOWN_RANKS]
    kept = {device.rank: device for device in plan.fit.devices if not device.device} if plan.fit else {}
    memory = any(device.have_bytes is not None for device in kept.values())
    headers = ["rank >", "node", "tp >", "pp >", "ep >", "fsdp >", "dp >", "tensors >", "size >", "memory >"]
    headers += ["reads >", "staging >"] if any(rank.staging_bytes for rank in shown) else []
    headers += ["has >", "kept free >", "spare >"] if memory else []
    rows = []
    for rank in shown:
        row: list[object] = [rank.rank, rank.node, rank.tensor, rank.stage, rank.expert, rank.fsdp, rank.data]
        row += [rank.tensors, show_bytes(rank.size_bytes), show_bytes(rank.device_bytes)]
        if "staging >" in headers:
            row += [show_bytes(rank.read_bytes), show_bytes(rank.staging_bytes)]
        if memory:
            on = kept.get(rank.rank)
            if on is None or on.have_bytes is None:
                row += ["-"] * 3
            else:
                spare = cell(show_bytes(on.have_bytes - on.need_bytes), _STYLES[on.fits])
                row += [show_bytes(on.have_bytes), show_bytes(on.kept_free_bytes or 0), spare]
        row += [rank.chunks, ", ".join(f"{dtype} {show_bytes(size)}" for dtype, size in rank.bytes_by_dtype.items())]
        rows.append(row)
    ranks = table_of((*headers, "chunks >", "dtypes"), rows)
    more = [cell(f"and {len(plan.ranks) - len(shown)} more ranks", "dim")] if len(plan.ranks) > len(shown) else []
    devices = [Text(), _devices_table(plan)] if plan.device_map else []
    parts = [Text(), _parts_table(plan.of_rank)] if plan.of_rank else []
    return Group(*said, overall, Text(), *_picture(plan), ranks, *more, *devices, *parts)


def _picture(plan: PlanSummary) -> Iterator[RenderableType]:
    """Bars of what ranks have of each layer, those that are alike in one row; `|`: where the device's memory ends."""
    if plan.layers is None:
        return
    folded, counts = fold_layers(plan.layers)
    names = [row_name(layer, count) for layer, count in zip(folded.layers, counts, strict=True)]
    verdict = plan.verdict
    alike: dict[tuple[tuple[int, ...], int | None, int | None], list[int]] = {}
    cells_of = folded.by_rank()
    for rank, cells in cells_of.items():
        sizes = tuple(sum(each.values()) for each in cells)
        alike.setdefault((sizes, at_rank(verdict.have_bytes, rank), at_rank(verdict.need_bytes, rank)), []).append(rank)
    most = max((max(sum(sizes), have or 0, need or 0) for sizes, have, need in alike), default=0) or 1
    each_layer = sum(1 + sum(map(bool, sizes)) for sizes, _, _ in alike) <= SHOWN_ROWS
    rows: list[tuple[object, ...]] = []
    for (sizes, have, need), ranks in list(alike.items())[:SHOWN_ROWS]:
        total = max(sum(sizes), need or 0)
        room = "" if have is None else f", has {show_bytes(have)}"
        room += f", {show_bytes(total - have)} too much" if have is not None and total > have else ""
        who = f"{'ranks' if len(ranks) > 1 else 'rank'} {show_runs(ranks)}"
        rows.append((who, "whole rank", _bar(total, have, most), cell(f"{show_bytes(total)}{room}")))
        for name, each, size, count in zip(names, cells_of[ranks[0]], sizes, counts, strict=True):
            if size and each_layer:
                rows.append(("", name, _bar(size, None, most), row_sizes([each], count)))
    table = table_of(("", "", "", ""), rows)
    table.show_header = False
    yield table
    yield Text()


def _bar(size: int, have: int | None, most: int) -> Text:
    """A bar to scale; what is beyond `have` in red."""
    length = max(1, round(size / most * BAR_CHARS))
    if have is None:
        return Text("#" * length)
    end = round(have / most * BAR_CHARS)
    over = max(1, length - end) if size > have else 0
    return Text.assemble("#" * min(length, end), " " * (end - length), "|", ("#" * over, _STYLES[False]))


def _parts_table(parts: Sequence[TensorPart]) -> RenderableType:
    """What the rank that was named has of each tensor."""
    rows = [
        (part.name, part.rule or "-", "x".join(map(str, part.shape)), show_ranges(part), part.dtype, part.size_bytes)
        for part in parts
    ]
    return table_of(("tensor", "rule", "shape", "held", "dtype", "bytes >"), rows)


def _stored(plan: PlanSummary) -> Iterator[tuple[str, object]]:
    """What is stored, and how it is checked."""
    yield "model", f"{plan.tensors} tensors in {plan.shards} shards, {show_bytes(plan.stored_bytes)}"
    yield "chunks", f"{plan.chunks}, {digests(plan.verified)}"
    if plan.objects:
        yield "objects", _planned_checks(plan)
    yield "signed by", plan.signed_by or NOT_ASKED


def _sources(plan: PlanSummary) -> Iterator[tuple[str, object]]:
    """By the words of a load's report; of the cache and the disk only what a cluster has said."""
    if plan.resident:
        yield "resident", f"{plan.resident}: a load would be given it at once"
    sources = plan.bytes_by_source
    yield "would leave the store", show_bytes(sources["store"])
    if plan.cluster:
        yield "would come from the cache", show_bytes(sources["arena"])
        yield "would come from disk", show_bytes(sources["disk"])


def _estimate(plan: PlanSummary) -> Iterator[tuple[str, object]]:
    yield "model", f"{plan.tensors} tensors, {show_bytes(plan.stored_bytes)}, from config.json alone"


def _beside(plan: PlanSummary) -> Iterator[tuple[str, object]]:
    """What a load takes beside the tensors' own memory."""
    staging = max((rank.staging_bytes for rank in plan.ranks), default=0)
    if staging:
        yield "beside it, while converting", f"{show_bytes(staging)} per rank, and what is in flight"
    arenas = {node.arena_bytes for node in plan.nodes}
    sizes = ", ".join(show_bytes(size) if size else "a quarter of free /dev/shm, 8.59 GB at most" for size in arenas)
    yield "host arena, per node", sizes


def _devices_table(plan: PlanSummary) -> RenderableType:
    """What a device map puts where, modules that follow each other in one line."""
    rows = []
    for key, run in groupby((plan.device_map or {}).items(), key=lambda entry: entry[1]):
        modules = [module or "(the whole model)" for module, _ in run]
        name, which = device_name(key), modules[0] if len(modules) == 1 else f"{modules[0]} ... {modules[-1]}"
        rows.append((name, show_bytes(plan.ranks[0].bytes_by_device.get(name, 0)), len(modules), which))
    return table_of(("device", "in all >", "modules >", "which"), rows)


def _planned_checks(plan: PlanSummary) -> str:
    """Of a model without a manifest: what the load will compare, and what it cannot."""
    unchecked = unchecked_counts(plan.objects)
    whole = f"{len(plan.objects) - sum(unchecked.values())} of {len(plan.objects)} by the store's own checksums"
    return "; ".join([whole, *(f"{count} not: {reason}" for reason, count in unchecked.items())])
