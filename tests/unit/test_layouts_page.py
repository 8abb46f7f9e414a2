"""docs/layouts.md matches the tests and the code."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cluster.command_line.cli import build_parser
from cluster.errors import LayoutError
from cluster.layouts.mesh import Layout
from cluster.layouts.rules import Rule, read_rules
from tests.support.family_checkpoints import SavedFamily, needs_transformers, reassemble
from tests.support.hf_models import FAMILIES, MOE_FAMILIES
from tests.unit.test_family_layouts import EXPERT_LAYOUTS, LAYOUTS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "layouts.md").read_text()


def rows_after(start: str) -> list[list[str]]:
    """Return the rows of the table whose header begins so, without header and line."""
    lines = PAGE[PAGE.index(f"\n| {start} |") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]]


def test_the_table_equals_the_tested_layouts() -> None:
    header, *rows = rows_after("family")
    assert header[1:] == [*LAYOUTS, *EXPERT_LAYOUTS]
    assert [row[0] for row in rows] == list(FAMILIES)
    for family, *cells in rows:
        experts = "yes" if family in MOE_FAMILIES else "-"
        assert cells == ["yes"] * len(LAYOUTS) + [experts] * len(EXPERT_LAYOUTS)


@needs_transformers
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MOE_FAMILIES])
def test_a_family_without_experts_has_no_expert_layouts(
    family: str, saved_families: dict[tuple[str, str], SavedFamily]
) -> None:
    with pytest.raises(LayoutError, match="no tensor belongs to an expert"):
        saved_families[family, "hub"].plan(Layout(2, expert_parallel_size=2))


def test_every_rule_is_explained() -> None:
    _, *rows = rows_after("rule")
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row[0])] == list(Rule)


def test_named_sizes_and_options_exist() -> None:
    _, *rows = rows_after("size")
    assert {row[0].strip("`") for row in rows} == set(Layout.__dataclass_fields__)
    for row in rows:
        args = build_parser().parse_args(["plan", "uri", row[1].strip("`"), "2"])
        assert getattr(args, row[0].strip("`")) == 2


@needs_transformers
@pytest.mark.parametrize("family", ["glm4v", "qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("naming", ["hub", "modules"])
def test_the_documented_rules_for_towers_cut_them(
    family: str, naming: str, saved_families: dict[tuple[str, str], SavedFamily], tmp_path: Path
) -> None:
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "rules.json").write_text(text)
    saved = SavedFamily.open(saved_families[family, naming].folder, read_rules(tmp_path / "rules.json"))
    plan, loaded = saved.load(Layout(4))
    stored = saved.stored()
    assert all(np.array_equal(array, stored[name]) for name, array in reassemble(plan, loaded).items())
    tower = [name for name in stored if ".blocks." in name]
    assert tower
    for name in tower:
        whole = "norm" in name or name.endswith(("attn.proj.bias", "down_proj.bias", "fc2.bias"))
        assert {arrays[name].size for arrays in loaded} == {stored[name].size // (1 if whole else 4)}, name
    # One head of four, of q, of k and of v.
    qkv = next(name for name in tower if name.endswith("attn.qkv.weight"))
    heads = stored[qkv].reshape(3, 4, 8, 32)
    assert all(np.array_equal(loaded[rank][qkv], heads[:, rank].reshape(24, 32)) for rank in range(4))
