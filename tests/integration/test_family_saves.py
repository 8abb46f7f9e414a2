"""Every family, from a training job's layout to a checkpoint and from there to a layout of a load: bit for bit."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cluster.layouts.mesh import Layout
from tests.support.family_checkpoints import SavedFamily, needs_transformers, reassemble
from tests.support.family_saves import WAYS
from tests.support.hf_models import FAMILIES, MOE_FAMILIES
from tests.support.ray_clusters import REPOSITORY

pytestmark = [needs_transformers, pytest.mark.slow]

LAYOUTS = (
    Layout(),
    Layout(2),
    Layout(4),
    Layout(pipeline_parallel_size=2),
    Layout(2, pipeline_parallel_size=2),
    Layout(fsdp_size=3),
    Layout(2, 2),
)
EXPERTS = (Layout(2, expert_parallel_size=2), Layout(2, data_parallel_size=2, expert_parallel_size=4))


def layouts_of(family: str, way: int) -> tuple[Layout, Layout]:
    """Return two layouts for loads of what a way of saving wrote of a family. One divides experts, if there are any."""
    number = 2 * list(FAMILIES).index(family) + way
    first, second = (LAYOUTS[(number + load) % len(LAYOUTS)] for load in range(2))
    if family in MOE_FAMILIES:
        second = EXPERTS[(MOE_FAMILIES.index(family) + way) % len(EXPERTS)]
    return first, second


def test_every_way_of_saving_meets_every_layout() -> None:
    met = {(way, layout) for family in FAMILIES for way in range(len(WAYS)) for layout in layouts_of(family, way)}
    assert met == set(itertools.product(range(len(WAYS)), LAYOUTS + EXPERTS))


@pytest.fixture(scope="module")
def saved_folder(saved_families: dict[tuple[str, str], SavedFamily], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models with hub names, each saved by four ranks in every way."""
    folder = tmp_path_factory.mktemp("saved")
    for family in FAMILIES:
        shutil.copytree(saved_families[family, "hub"].folder, folder / family)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.family_saves", folder],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_models_load_in_other_layouts(
    family: str, saved_folder: Path, saved_families: dict[tuple[str, str], SavedFamily]
) -> None:
    wanted = saved_families[family, "hub"].stored()
    for place, way in enumerate(WAYS):
        saved = SavedFamily.open(saved_folder / family / way)
        assert saved.index.source == "manifest"
        for layout in layouts_of(family, place):
            found = reassemble(*saved.load(layout))
            assert found.keys() == wanted.keys()
            different = [name for name in wanted if not np.array_equal(found[name], wanted[name])]
            assert not different, f"{way} to {layout}"
