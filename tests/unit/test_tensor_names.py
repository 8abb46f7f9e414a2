"""Names of a checkpoint to names of a module."""

from __future__ import annotations

import pytest

from actors.handover.module_places import Rename, new_names
from cluster.errors import ModuleMismatch

NAMES = ["model.layers.0.up.weight", "model.layers.10.up.weight", "model.norm.weight", "visual.proj.weight", "head"]


@pytest.mark.parametrize(
    ("prefix", "rename", "expected"),
    [
        ("", None, NAMES),
        ("model.layers.1", None, []),  # not 10
        ("model.layers.10.", None, ["up.weight"]),
        ("model.layers", {"0": "first"}, ["first.up.weight", "10.up.weight"]),
        (
            "",
            {"model": "model.language_model", "visual": "model.visual", "head": None},
            [
                "model.language_model.layers.0.up.weight",
                "model.language_model.layers.10.up.weight",
                "model.language_model.norm.weight",
                "model.visual.proj.weight",
            ],
        ),
        ("model", {"layers": "", "layers.0": "zero", "norm.weight": "n"}, ["zero.up.weight", "10.up.weight", "n"]),
        ("", lambda name: name.upper() if name.startswith("v") else None, ["VISUAL.PROJ.WEIGHT"]),
    ],
)
def test_new_names(prefix: str, rename: Rename, expected: list[str]) -> None:
    found = new_names(NAMES, prefix, rename)
    assert list(found) == expected
    assert set(found.values()) <= set(NAMES)


def test_two_names_that_become_one() -> None:
    with pytest.raises(ModuleMismatch, match=r"head.*head2.*-> same.*clashes=1"):
        new_names(["head", "head2"], rename=lambda name: "same")
