"""A plan as an SVG picture: if it fits, then ranks against layers, a bar per rank and row, coloured by dtype. Pure.

    does not fit: rank 1 needs 35.3 GB of device memory, a GPU has 23.5 GB
                          rank 0      rank 1
    whole rank            ########|   ########|##   10.5 GB to 12.1 GB       | the memory that the device has for it
    embed                 ##                        2.10 GB                  # bytes beyond it are red
    layers.0-79 (80)      ######      ########      80 x 105 MB = 8.40 GB    # BF16
    head                              ##            2.10 GB                  = U8 ...

Layers of the same size on every rank share one row. All bars have one scale. Names come from checkpoints, so they are
escaped and truncated.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from cluster.layouts.mesh import RankCoords
from cluster.layouts.region import Range
from cluster.layouts.rules import Rules
from cluster.planning.cut_model import CutModel
from cluster.planning.plan import LoadPlan
from cluster.planning.read_items import layer_of
from cluster.units import printable, show_bytes

MAX_LAYERS = 400  # rows; further layers are summed in one
MAX_RUNS = 3  # runs of numbers in the name of a row of equal layers
_FRONT = re.compile(r"embed|wte|wpe|visual|vision|audio", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LayerColumn:
    """Ranks that hold the same, and the bytes of each layer on each of them."""

    ranks: tuple[int, ...]
    bytes_by_dtype: tuple[dict[str, int], ...]  # by layer; safetensors dtype names


@dataclass(frozen=True, slots=True)
class LayerTable:
    """The layers in order, and their bytes on each rank. A tensor without a layer number is named by its module."""

    layers: tuple[str, ...]
    columns: tuple[LayerColumn, ...]

    def by_rank(self) -> dict[int, tuple[dict[str, int], ...]]:
        """Return the bytes by layer and dtype of each rank, ascending."""
        found = {rank: column.bytes_by_dtype for column in self.columns for rank in column.ranks}
        return dict(sorted(found.items()))


def fold_layers(table: LayerTable) -> tuple[LayerTable, tuple[int, ...]]:
    """Return the table with equal layers in one row, at the place of the first, and how many layers each row has.

    Numbered layers of one stack are equal if every rank has the same bytes of them. The row has the sum of their bytes.
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
    """Return ascending numbers as `0-79` or `0, 2-5, ...`, at most MAX_RUNS runs of them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    shown = ["-".join(map(str, run)) for run in runs[:MAX_RUNS]]
    return ", ".join([*shown, "..."] if len(runs) > MAX_RUNS else shown)


def layer_table(cut: CutModel) -> LayerTable:
    """Return the layers of the model, with the bytes of each layer on every rank."""
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
    """Return a sort key: embeddings and towers, then numbered layers by number, then all others."""
    numbered = layer.rpartition(".")[2].isdecimal()
    place = 0 if _FRONT.search(layer) else 1 if numbered else 2
    parts = [(1, int(part), "") if part.isdecimal() and len(part) < 10 else (0, 0, part) for part in layer.split(".")]
    return place, parts


MAX_DRAWN_RANKS = 64
_ROW, _BAR, _GAP, _LINE = 16, 10, 8, 18  # pixels
_NAME_CHARS = 44
_VERDICT_CHARS, _VERDICT_LINES = 110, 6
# Colours that colour-blind people can distinguish too.
_PALETTE = ("#0072b2", "#e69f00", "#009e73", "#56b4e9", "#cc79a7", "#f0e442", "#999999", "#44aa99")
_COLOURS = {"BF16": 0, "F16": 3, "F32": 7, "F8_E4M3": 1, "F8_E5M2": 4, "I8": 2, "I32": 2, "U8": 5}
_TOO_MUCH = "#c00000"  # the colour of no dtype
_FITS = {True: "#006633", False: _TOO_MUCH, None: "#444444"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer if a plan fits, with the memory of each rank's device."""

    sentence: str = ""
    fits: bool | None = None
    have_bytes: tuple[int | None, ...] = ()  # memory of each rank's device for the load, where it is known
    need_bytes: tuple[int | None, ...] = ()  # need of each rank's device, conversion included


NOT_KNOWN = Verdict()


def draw_plan(table: LayerTable, title: str, verdict: Verdict = NOT_KNOWN) -> str:
    """Return an SVG document with the bars of every rank."""
    folded, counts = fold_layers(table)
    by_rank = folded.by_rank()
    drawn = dict(list(by_rank.items())[:MAX_DRAWN_RANKS])
    totals = {rank: _sum(layers) for rank, layers in drawn.items()}
    needs = {rank: max(sum(total.values()), at_rank(verdict.need_bytes, rank) or 0) for rank, total in totals.items()}
    haves = {rank: have for rank in drawn if (have := at_rank(verdict.have_bytes, rank)) is not None}
    dtypes = sorted({dtype for total in totals.values() for dtype in total})
    colours = _colours(dtypes)
    most = max([*needs.values(), *haves.values()], default=0) or 1

    names = ["whole rank", *(row_name(layer, count) for layer, count in zip(folded.layers, counts, strict=True))]
    rows: list[Sequence[Mapping[str, int]]] = [
        list(totals.values()),
        *([layers[at] for layers in drawn.values()] for at in range(len(folded.layers))),
    ]
    sizes = [row_sizes(cells, count) for cells, count in zip(rows, (1, *counts), strict=True)]
    lines = textwrap.wrap(printable(verdict.sentence).replace("\n", " "), _VERDICT_CHARS)[:_VERDICT_LINES]
    column = max(14.0, min(150.0, 960.0 / max(1, len(drawn))))
    scale = (column - _GAP) / most
    left = 16 + 7 * max(map(len, names))
    right = left + column * len(drawn)
    top = 44 + _LINE * len(lines) + 24
    bottom = top + _ROW * len(names) + _GAP
    legend = _legend(drawn, totals, colours, most, bool(haves))
    width = max(640.0, right + 7 * max(map(len, sizes)) + 24, 16 + 6.5 * max((len(line) for line in lines), default=0))
    height = bottom + 22 * (len(legend) + 2)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="title desc" viewBox="0 0 {width:.0f} '
        f'{height:.0f}" width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="11">',
        f'<title id="title">{_text(title, 300)}</title>',
        f'<desc id="desc">{_text(_described(table, totals, len(by_rank), verdict), 900)}</desc>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="8" y="20" font-size="14">{_text(title, 150)}</text>',
    ]
    style = f'class="verdict" font-size="13" fill="{_FITS[verdict.fits]}"'
    out += [_label(8, 44 + _LINE * at, line, "start", style) for at, line in enumerate(lines)]
    out.append(_label(left - 8, top - 10, "rank", "end"))
    for at, rank in enumerate(drawn):
        out.append(_label(left + at * column + (column - _GAP) / 2, top - 10, str(rank), "middle"))
    for row, (name, cells, size) in enumerate(zip(names, rows, sizes, strict=True)):
        y = top + row * _ROW + (_GAP if row else 0)
        out.append(_label(left - 8, y + _BAR - 1, name, "end"))
        out.append(_label(right, y + _BAR - 1, size, "start", 'class="size"'))
        for at, (rank, cell) in enumerate(zip(drawn, cells, strict=True)):
            kind, where = ("layer", f"rank {rank}, {name}") if row else ("rank", f"rank {rank}")
            out += _bar(left + at * column, y, scale, cell, colours, kind, where)
    for at, rank in enumerate(drawn):
        if rank in haves:
            out += _device(left + at * column, top, scale, rank, haves[rank], sum(totals[rank].values()), needs[rank])
    for at, (colour, text) in enumerate(legend):
        y = bottom + 22 * (at + 1)
        if colour:
            out.append(f'<rect x="{left}" y="{y - _BAR}" width="{_BAR}" height="{_BAR}" fill="{colour}"/>')
        out.append(_label(left + (16 if colour else 0), y, text, "start"))
    if len(by_rank) > len(drawn):
        out.append(_label(left, height - 12, f"and {len(by_rank) - len(drawn)} more ranks", "start"))
    return "\n".join([*out, "</svg>", ""])


def _bar(
    x: float, y: float, scale: float, cell: Mapping[str, int], colours: Mapping[str, str], kind: str, where: str
) -> list[str]:
    out = []
    for dtype, size_bytes in cell.items():
        width = size_bytes * scale
        out.append(
            f'<rect class="{kind}" data-bytes="{size_bytes}" x="{x:.3f}" y="{y}" width="{width:.3f}" height="{_BAR}" '
            f'fill="{colours[dtype]}"><title>{_text(where, 200)}: {show_bytes(size_bytes)} of {_text(dtype, 20)}'
            "</title></rect>"
        )
        x += width
    return out


def _device(x: float, y: float, scale: float, rank: int, have: int, size: int, need: int) -> list[str]:
    """Return the line at the device's limit, the memory for conversion, and the bytes that do not fit."""
    out = []
    if need > size:
        out.append(
            f'<rect class="need" data-bytes="{need - size}" x="{x + size * scale:.3f}" y="{y + 0.5}" '
            f'width="{(need - size) * scale:.3f}" height="{_BAR - 1}" fill="none" stroke="#444444">'
            f"<title>rank {rank}: {show_bytes(need - size)} beside it: alignment, and tensors that are converted"
            "</title></rect>"
        )
    if need > have:
        out.append(
            f'<rect class="over" data-bytes="{need - have}" x="{x + have * scale:.3f}" y="{y - 2}" '
            f'width="{(need - have) * scale:.3f}" height="{_BAR + 4}" fill="{_TOO_MUCH}">'
            f"<title>rank {rank}: {show_bytes(need - have)} too much for its device</title></rect>"
        )
    at = f"{x + have * scale:.3f}"
    return [
        *out,
        f'<line class="have" data-bytes="{have}" x1="{at}" y1="{y - 3}" x2="{at}" y2="{y + _BAR + 3}" '
        f'stroke="#000000" stroke-width="1.5"><title>rank {rank}: the device has {show_bytes(have)} for it'
        "</title></line>",
    ]


def row_name(layer: str, count: int) -> str:
    """Return the label of a row: the layer, or the equal layers and their number."""
    return f"{_name(layer)} ({count})" if count > 1 else _name(layer)


def row_sizes(cells: Sequence[Mapping[str, int]], count: int) -> str:
    """Return the sizes beside the bars of a row: `35.3 GB`, `33.0 GB to 35.3 GB`, `80 x 429 MB = 34.3 GB`."""
    sizes = sorted({total for cell in cells if (total := sum(cell.values()))})
    if len(sizes) == 1 and count > 1:
        return f"{count} x {show_bytes(sizes[0] / count)} = {show_bytes(sizes[0])}"
    return " to ".join(dict.fromkeys(map(show_bytes, sizes[:: max(1, len(sizes) - 1)])))


def _legend(
    drawn: Mapping[int, object],
    totals: Mapping[int, Counter[str]],
    colours: Mapping[str, str],
    most: int,
    known: bool,
) -> list[tuple[str, str]]:
    """Return (colour, text) of each line of the legend."""
    lines = []
    for dtype, colour in colours.items():
        total = sum(each[dtype] for each in totals.values())
        lines.append((colour, f"{dtype}: {show_bytes(total)} on {len(drawn)} ranks"))
    if known:
        lines.append((_TOO_MUCH, "beyond the memory that the device has for it, where the line is"))
    return [*lines, ("", f"a full bar: {show_bytes(most)}")]


def _described(table: LayerTable, totals: Mapping[int, Counter[str]], ranks: int, verdict: Verdict) -> str:
    sizes = [sum(total.values()) for total in totals.values()]
    ends = dict.fromkeys(show_bytes(size) for size in (min(sizes, default=0), max(sizes, default=0)))
    span = " to ".join(ends)
    text = f"{ranks} ranks against {len(table.layers)} layers; a rank has {span}."
    return f"{verdict.sentence.rstrip('.')}. {text}" if verdict.sentence else text


def _colours(dtypes: Sequence[str]) -> dict[str, str]:
    """Return a colour for each dtype. Common dtypes always have the same colour."""
    found: dict[str, str] = {}
    for dtype in dtypes:
        free = [colour for colour in _PALETTE if colour not in found.values()]
        wanted = _PALETTE[_COLOURS.get(dtype, len(_PALETTE) - 1)]
        found[dtype] = wanted if wanted in free or not free else free[-1]
    return found


def _sum(layers: Sequence[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for cell in layers:
        total.update(cell)
    return total


def at_rank(values: Sequence[int | None], rank: int) -> int | None:
    """Return the value of the rank; None when there is none."""
    return values[rank] if rank < len(values) else None


def _name(layer: str) -> str:
    shown = printable(layer).replace("\n", " ")
    return shown if len(shown) <= _NAME_CHARS else "..." + shown[3 - _NAME_CHARS :]


def _label(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{_text(text, 120)}</text>'


def _text(text: str, most: int) -> str:
    return escape(printable(text).replace("\n", " ")[:most])


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The slice of one tensor that a rank holds."""

    name: str
    rule: str  # the layout rule that cuts it; "" if none is needed
    shape: tuple[int, ...]  # shape of the whole tensor
    ranges: tuple[tuple[Range, ...], ...]  # ranges of each dimension, in order
    padding: int  # rows of zeros after the ranges
    dtype: str  # safetensors name, as it is held
    size_bytes: int


def tensors_of(plan: LoadPlan, rank: int, rules: Rules) -> tuple[TensorPart, ...]:
    """Return the slices in the order of the rank's memory. Raises ConfigError if the layout has no such rank."""
    plan.cut.layout.rank_coords(rank)
    rule_for = rules.finder() if plan.cut.layout.cuts_tensors else lambda name: None
    return tuple(
        TensorPart(
            piece.name,
            str(rule_for(piece.made_from or piece.name) or ""),
            piece.shape,
            piece.region.ranges,
            piece.region.padding,
            piece.dtype,
            piece.size_bytes,
        )
        for piece in plan.ranks[rank].slices
    )


def show_ranges(part: TensorPart) -> str:
    """Return the ranges of each dimension, as in `0:4 8:12, all`."""
    lines = []
    for size, ranges in zip(part.shape, part.ranges, strict=True):
        whole = ranges == ((0, size),) or not (ranges or size)
        lines.append("all" if whole else " ".join(f"{start}:{end}" for start, end in ranges) or "none")
    return ", ".join(lines) + (f", and {part.padding} of zeros" if part.padding else "")
