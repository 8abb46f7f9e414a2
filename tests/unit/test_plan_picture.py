"""The picture of a plan: well-formed whatever tensors are called, and to scale."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.planning.plan import LoadPlan
from cluster.planning.plan_picture import (
    MAX_DRAWN_RANKS,
    MAX_LAYERS,
    NOT_KNOWN,
    LayerColumn,
    LayerTable,
    Verdict,
    draw_plan,
    fold_layers,
    layer_table,
)
from cluster.precision.recipes import Precision
from tests.support.planned_models import llama_shapes, random_arrays, store_arrays

SVG = "{http://www.w3.org/2000/svg}"
TINY = 1e-3  # pixels to which places are written


def llama_plan(layout: Layout, precision: Precision | None = None) -> LoadPlan:
    arrays = random_arrays(llama_shapes(3, 128, 256, 4, 2, 64))
    stored = store_arrays({name: ("BF16", array) for name, array in arrays.items()})
    return build_load_plan(stored.index, layout, precision=precision or Precision())


def drawn(table: LayerTable, title: str = "a plan", verdict: Verdict = NOT_KNOWN) -> ElementTree.Element:
    return ElementTree.fromstring(draw_plan(table, title, verdict).encode())


def texts(root: ElementTree.Element, kind: str | None = None) -> list[str]:
    return [str(text.text) for text in root.iter(f"{SVG}text") if kind is None or text.get("class") == kind]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        (Layout(), Precision()),
        (Layout(1, 4, 2), Precision()),
        (Layout(pipeline_parallel_size=3), Precision()),
        (Layout(pipeline_parallel_size=2), Precision(quantization="int8")),
    ],
)
def test_the_table_has_every_byte_of_every_rank(layout: Layout, precision: Precision) -> None:
    plan = llama_plan(layout, precision)
    table = layer_table(plan.cut)
    assert table.layers == ("model.embed_tokens", *(f"model.layers.{n}" for n in range(3)), "lm_head", "model.norm")
    by_rank = table.by_rank()
    assert list(by_rank) == list(range(layout.ranks))
    for rank in plan.ranks:
        held: Counter[tuple[str, str]] = Counter()
        for piece in rank.slices:
            layer = next(name for name in table.layers if piece.name.startswith(f"{name}."))
            held[layer, piece.dtype] += piece.size_bytes
        told = {
            (layer, dtype): size
            for layer, cell in zip(table.layers, by_rank[rank.rank], strict=True)
            for dtype, size in cell.items()
        }
        assert told == {key: size for key, size in held.items() if size}


def test_bars_are_to_scale() -> None:
    plan = llama_plan(Layout(pipeline_parallel_size=2), Precision(quantization="int8"))
    table = layer_table(plan.cut)
    root = drawn(table, verdict=Verdict("fits", True, (900_000, None)))
    folded, _ = fold_layers(table)
    for kind, wanted in (
        ("layer", [size for cells in folded.by_rank().values() for cell in cells for size in cell.values()]),
        ("rank", None),
    ):
        bars = [bar for bar in root.iter(f"{SVG}rect") if bar.get("class") == kind]
        sizes = [int(bar.attrib["data-bytes"]) for bar in bars]
        assert wanted is None or sorted(sizes) == sorted(wanted)
        assert sum(sizes) == sum(rank.size_bytes for rank in plan.ranks)
        scale = max(float(bar.attrib["width"]) for bar in bars) / max(sizes)
        for bar, size in zip(bars, sizes, strict=True):
            assert float(bar.attrib["width"]) == pytest.approx(size * scale, abs=2 * TINY)
        rows = defaultdict(list)
        for bar in bars:
            rows[bar.attrib["y"]].append((float(bar.attrib["x"]), float(bar.attrib["width"])))
        for row in rows.values():  # no bar lies on another
            ends = sorted(row)
            assert all(x + width <= after + TINY * 3 for (x, width), (after, _) in pairwise(ends))
    (line,) = [line for line in root.iter(f"{SVG}line") if line.get("class") == "have"]
    first = min(float(bar.attrib["x"]) for bar in root.iter(f"{SVG}rect") if bar.get("class") == "rank")
    assert (float(line.attrib["x1"]) - first) == pytest.approx(900_000 * scale, rel=1e-3)


def test_the_picture_has_a_text_description() -> None:
    root = drawn(layer_table(llama_plan(Layout(1, 2)).cut), "llama & co")
    assert (root.get("role"), root.get("aria-labelledby")) == ("img", "title desc")
    told = {child.get("id"): child.text for child in root if child.get("id")}
    assert told["title"] == "llama & co"
    assert "2 ranks against 6 layers" in str(told["desc"])
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert any(str(label).startswith("BF16: ") for label in labels)


@given(
    names=st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=4, unique=True),
    title=st.text(max_size=40),
    sizes=st.lists(st.integers(0, 1 << 50), min_size=1, max_size=3),
)
def test_any_name_gives_a_document(names: list[str], title: str, sizes: list[int]) -> None:
    cells = tuple({f"D{at}": size for at, size in enumerate(sizes) if size} for _ in names)
    drawn(LayerTable(tuple(names), (LayerColumn((0, 1), cells),)), title, Verdict(title, False, (None, 5), (9,)))


@pytest.mark.parametrize("name", ['"/><script>alert(1)</script>', "]]>&amp;", "\x00\x1b[31m", "\ud800", "a\nb" * 99])
def test_hostile_names_stay_text(name: str) -> None:
    arrays = {f"{name}.w": ("U8", np.zeros(4, np.uint8)), "w": ("U8", np.zeros(4, np.uint8))}
    root = drawn(layer_table(build_load_plan(store_arrays(arrays).index, Layout()).cut), name)
    assert {child.tag.removeprefix(SVG) for child in root.iter()} == {"svg", "title", "desc", "rect", "text"}


def test_pictures_have_bounds() -> None:
    arrays = {f"m{at}.w": ("U8", np.zeros(1, np.uint8)) for at in range(MAX_LAYERS + 50)}
    table = layer_table(build_load_plan(store_arrays(arrays).index, Layout()).cut)
    assert len(table.layers) == MAX_LAYERS
    assert table.layers[-1] == "51 more"
    assert sum(sum(cell.values()) for cell in table.by_rank()[0]) == MAX_LAYERS + 50
    many = LayerTable(("a",), (LayerColumn(tuple(range(300)), ({"U8": 1},)),))
    root = drawn(many)
    assert len([bar for bar in root.iter(f"{SVG}rect") if bar.get("class") == "layer"]) == MAX_DRAWN_RANKS
    assert any(text.text == f"and {300 - MAX_DRAWN_RANKS} more ranks" for text in root.iter(f"{SVG}text"))
    drawn(layer_table(build_load_plan(store_arrays({}).index, Layout()).cut))


def test_equal_layers_are_one_row_with_their_count_and_size() -> None:
    layers = ("embed", *(f"model.layers.{n}" for n in range(80)), "tower.layers.0", "head")
    dense, expert = {"BF16": 10**8}, {"BF16": 10**9}
    cells = ({"BF16": 2 * 10**9}, *(expert if n in (3, 5, 6, 9, 20) else dense for n in range(80)), dense, {})
    other = (*cells[:-1], {"BF16": 2 * 10**9})
    table = LayerTable(layers, (LayerColumn((0,), cells), LayerColumn((1,), other)))
    folded, counts = fold_layers(table)
    names = ("embed", "model.layers.0-2, 4, 7-8, ...", "model.layers.3, 5-6, 9, ...", "tower.layers.0", "head")
    assert (folded.layers, counts) == (names, (1, 75, 5, 1, 1))
    for rank, row in folded.by_rank().items():
        assert sum(sum(cell.values()) for cell in row) == sum(sum(cell.values()) for cell in table.by_rank()[rank])
    root = drawn(table)
    assert f"{names[1]} (75)" in texts(root)
    assert texts(root, "size") == [
        *("14.6 GB to 16.6 GB", "2.00 GB", "75 x 100 MB = 7.50 GB", "5 x 1.00 GB = 5.00 GB", "100 MB", "2.00 GB")
    ]


def test_the_verdict_is_on_top_and_misfits_are_red() -> None:
    first, second = LayerColumn((0,), ({"U8": 600}, {"U8": 400})), LayerColumn((1,), ({"U8": 100}, {}))
    table = LayerTable(("a", "b"), (first, second))
    said = "does not fit: rank 0 needs 1.1 kB of device memory, a GPU has 700 B"
    root = drawn(table, verdict=Verdict(said, False, (700, 700), (1100, 100)))
    assert texts(root)[1] == texts(root, "verdict")[0] == said
    assert said in str(next(root.iter(f"{SVG}desc")).text)
    bars = list(root.iter(f"{SVG}rect"))
    assert [bar.attrib["data-bytes"] for bar in bars if bar.get("class") == "need"] == ["100"]  # beside the tensors
    (over,) = [bar for bar in bars if bar.get("class") == "over"]
    line = next(line for line in root.iter(f"{SVG}line") if line.get("class") == "have")
    assert (over.attrib["data-bytes"], over.attrib["x"]) == ("400", line.attrib["x1"])
    (verdict,) = [text for text in root.iter(f"{SVG}text") if text.get("class") == "verdict"]
    assert over.attrib["fill"] == verdict.attrib["fill"]
    assert over.attrib["fill"] not in {bar.get("fill") for bar in bars if bar.get("class") == "rank"}
    tops = {kind: [float(bar.attrib["y"]) for bar in bars if bar.get("class") == kind] for kind in ("rank", "layer")}
    assert max(tops["rank"]) < min(tops["layer"])
    fits = drawn(table, verdict=Verdict("fits", True, (2000, 2000), (1100, 100)))
    assert not [bar for bar in fits.iter(f"{SVG}rect") if bar.get("class") == "over"]
