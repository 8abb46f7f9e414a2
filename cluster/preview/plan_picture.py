"""A plan as a picture: ranks against layers, one bar per rank and layer, coloured by dtype, widths to scale. Pure.

            rank 0      rank 1      rank 2      rank 3
    embed   ######      ######
    0       ####        ####                                 # BF16
    1       ####        ####                                 = U8 ...
    2                               ####        ####
    head                            ######      ######
    all     #########|  #########|  #########|  #########|   | the memory that the device has for it

Bars of layers share one scale, bars of whole ranks another; both are written beside them. Names come from checkpoints,
so they are escaped and cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from cluster.preview.plan_layers import LayerTable
from cluster.units import printable, show_bytes

MAX_DRAWN_RANKS = 64
_ROW, _BAR, _GAP, _TOP = 14, 10, 8, 64  # pixels
_NAME_CHARS = 44
_PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#999999")  # told by most eyes
_COLOURS = {"BF16": 0, "F16": 5, "F32": 3, "F8_E4M3": 1, "F8_E5M2": 4, "I8": 2, "I32": 2, "U8": 6}


def draw_plan(table: LayerTable, title: str, have_bytes: Sequence[int | None] = ()) -> str:
    """An SVG document. `have_bytes`: memory of each rank's device for the load, where it is known."""
    by_rank = table.by_rank()
    drawn = dict(list(by_rank.items())[:MAX_DRAWN_RANKS])
    totals = {rank: _sum(layers) for rank, layers in drawn.items()}
    dtypes = sorted({dtype for total in totals.values() for dtype in total})
    colours = _colours(dtypes)
    most_layer = max((sum(cell.values()) for layers in drawn.values() for cell in layers), default=0) or 1
    known = [have for have in have_bytes if have is not None]
    most_rank = max([*(sum(total.values()) for total in totals.values()), *known], default=0) or 1

    column = max(14.0, min(150.0, 960.0 / max(1, len(drawn))))
    bar = column - _GAP
    left = 16 + 7 * max([len("whole rank"), *(len(_name(layer)) for layer in table.layers)])
    rows = len(table.layers)
    bottom = _TOP + _ROW * (rows + 2)
    width, height = max(640.0, left + column * len(drawn) + 24), bottom + 22 * (2 + len(dtypes)) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="title desc" viewBox="0 0 {width:.0f} '
        f'{height:.0f}" width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="11">',
        f'<title id="title">{_text(title, 300)}</title>',
        f'<desc id="desc">{_text(_described(table, totals, len(by_rank)), 600)}</desc>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="8" y="20" font-size="14">{_text(title, 150)}</text>',
    ]
    for at, rank in enumerate(drawn):
        out.append(_label(left + at * column + bar / 2, _TOP - 10, str(rank), "middle"))
    out.append(_label(left - 8, _TOP - 10, "rank", "end"))
    for row, layer in enumerate(table.layers):
        y = _TOP + row * _ROW
        out.append(_label(left - 8, y + _BAR - 1, _name(layer), "end"))
        for at, (rank, layers) in enumerate(drawn.items()):
            where = f"rank {rank}, {_name(layer)}"
            out += _bar(left + at * column, y, bar / most_layer, layers[row], colours, "layer", where)
    y = _TOP + (rows + 1) * _ROW
    out.append(_label(left - 8, y + _BAR - 1, "whole rank", "end"))
    for at, (rank, total) in enumerate(totals.items()):
        x = left + at * column
        out += _bar(x, y, bar / most_rank, total, colours, "rank", f"rank {rank}")
        have = have_bytes[rank] if rank < len(have_bytes) else None
        if have is not None:
            out.append(
                f'<line class="have" data-bytes="{have}" x1="{x + have * bar / most_rank:.3f}" y1="{y - 3}" '
                f'x2="{x + have * bar / most_rank:.3f}" y2="{y + _BAR + 3}" stroke="#000000" stroke-width="1.5">'
                f"<title>rank {rank}: the device has {show_bytes(have)} for it</title></line>"
            )
    out += _legend(left, bottom + 30, drawn, totals, colours, most_layer, most_rank, known)
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


def _legend(
    left: float,
    y: float,
    drawn: Mapping[int, object],
    totals: Mapping[int, Counter[str]],
    colours: Mapping[str, str],
    most_layer: int,
    most_rank: int,
    known: Sequence[int],
) -> list[str]:
    out = []
    for dtype, colour in colours.items():
        total = sum(each[dtype] for each in totals.values())
        out.append(f'<rect x="{left}" y="{y - _BAR}" width="{_BAR}" height="{_BAR}" fill="{colour}"/>')
        out.append(_label(left + 16, y, f"{dtype}: {show_bytes(total)} on {len(drawn)} ranks", "start"))
        y += 22
    scale = f"widest bar: {show_bytes(most_layer)} of a layer, {show_bytes(most_rank)} of a rank"
    out.append(_label(left, y, scale + ("; line: memory that the device has for it" if known else ""), "start"))
    return out


def _described(table: LayerTable, totals: Mapping[int, Counter[str]], ranks: int) -> str:
    sizes = [sum(total.values()) for total in totals.values()]
    ends = dict.fromkeys(show_bytes(size) for size in (min(sizes, default=0), max(sizes, default=0)))
    span = " to ".join(ends)
    return f"{ranks} ranks against {len(table.layers)} layers; a rank has {span}."


def _colours(dtypes: Sequence[str]) -> dict[str, str]:
    """One each; those that are common always have the same."""
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


def _name(layer: str) -> str:
    shown = printable(layer).replace("\n", " ")
    return shown if len(shown) <= _NAME_CHARS else "..." + shown[3 - _NAME_CHARS :]


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text, 120)}</text>'


def _text(text: str, most: int) -> str:
    return escape(printable(text).replace("\n", " ")[:most])
