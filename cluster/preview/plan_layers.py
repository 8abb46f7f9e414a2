"""How many bytes each rank has of each layer, by dtype: what the picture of a plan shows. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.layouts.mesh import RankCoords
from cluster.plans.cut_model import CutModel
from cluster.plans.segments import layer_of

MAX_LAYERS = 400  # told apart; what is beyond them counts as one
MAX_RUNS = 3  # of numbers, in the name of a row of equal layers
_FRONT = re.compile(r"embed|wte|wpe|visual|vision|audio", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LayerColumn:
    """Ranks that hold the same, and what each of them has."""

    ranks: tuple[int, ...]
    bytes_by_dtype: tuple[dict[str, int], ...]  # by layer; safetensors dtype names


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Layers from the first to the last (what has no number is called by its module), and what ranks have of them."""

    layers: tuple[str, ...]
    columns: tuple[LayerColumn, ...]

    def by_rank(self) -> dict[int, tuple[dict[str, int], ...]]:
        """The same, by rank, ascending."""
        found = {rank: column.bytes_by_dtype for column in self.columns for rank in column.ranks}
        return dict(sorted(found.items()))


def fold_layers(table: LayerTable) -> tuple[LayerTable, tuple[int, ...]]:
    """Return the table with equal layers in one row, at the place of the first, and how many layers each row has.

    Equal are numbered layers of one stack of which every rank has as much. The row has the bytes of all of them.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for at, layer in enumerate(table.layers):
        stack, _, number = layer.rpartition(".")
        cells = tuple(tuple(column.bytes_by_dtype[at].items()) for column in table.columns)
        alike.setdefault((stack, cells) if number.isdecimal() else (layer, at, None), []).append(at)
    rows = list(alike.values())
    columns = []
    for column in table.columns:
        totals = ({dtype: size * len(row) for dtype, size in column.bytes_by_dtype[row[0]].items()} for row in rows)
        columns.append(LayerColumn(column.ranks, tuple(totals)))
    return LayerTable(tuple(_folded_name(table, row) for row in rows), tuple(columns)), tuple(map(len, rows))


def _folded_name(table: LayerTable, row: Sequence[int]) -> str:
    if len(row) == 1:
        return table.layers[row[0]]
    names = [table.layers[at].rpartition(".") for at in row]
    return f"{names[0][0]}.{show_runs([int(number) for _, _, number in names])}"


def show_runs(numbers: Sequence[int]) -> str:
    """Return `0-79`, or `0, 2-5, ...`: numbers in ascending order, MAX_RUNS runs of them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    shown = ["-".join(map(str, run)) for run in runs[:MAX_RUNS]]
    return ", ".join([*shown, "..."] if len(runs) > MAX_RUNS else shown)


def layer_table(cut: CutModel) -> LayerTable:
    """Of every rank."""
    names = [layer_of(name) or name.rpartition(".")[0] or name for name in cut.names]
    layers = sorted(dict.fromkeys(names), key=_order)
    if len(layers) > MAX_LAYERS:
        layers = [*layers[: MAX_LAYERS - 1], f"{len(layers) - MAX_LAYERS + 1} more"]
    number = {layer: at for at, layer in enumerate(layers)}
    row = np.array([number.get(name, len(layers) - 1) for name in names], np.int64)
    sharing: dict[RankCoords, list[int]] = {}
    for rank in range(cut.layout.ranks):
        sharing.setdefault(cut.layout.place(cut.layout.rank_coords(rank)), []).append(rank)
    columns = []
    for place, ranks in sharing.items():
        here = cut.tensors_of(place)
        kinds = len(cut.kinds)
        flat = np.bincount(row[here] * kinds + cut.kind[here])
        found: list[Counter[str]] = [Counter() for _ in layers]
        pieces = cut.slices(place)
        for at in np.flatnonzero(flat).tolist():
            layer, kind = divmod(at, kinds)
            for output, size_bytes in zip(pieces[kind].outputs, pieces[kind].sizes_bytes, strict=True):
                found[layer][output.dtype] += size_bytes * int(flat[at])
        columns.append(LayerColumn(tuple(ranks), tuple(_filled(each) for each in found)))
    return LayerTable(tuple(layers), tuple(columns))


def _filled(sizes: Counter[str]) -> dict[str, int]:
    return {dtype: size_bytes for dtype, size_bytes in sorted(sizes.items()) if size_bytes}


def _order(layer: str) -> tuple[int, list[tuple[int, int, str]]]:
    """Embeddings and towers, then numbered layers, then what comes after them; numbers count as numbers."""
    numbered = layer.rpartition(".")[2].isdecimal()
    place = 0 if _FRONT.search(layer) else 1 if numbered else 2
    parts = [(1, int(part), "") if part.isdecimal() and len(part) < 10 else (0, 0, part) for part in layer.split(".")]
    return place, parts
