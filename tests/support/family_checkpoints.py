"""A checkpoint of every model family, and loads of it carried out on arrays, without Ray and without a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig, read_model_config
from cluster.layouts.rules import Rules, rules_for
from cluster.planning.make_plan import build_load_plan
from cluster.planning.plan import LoadPlan
from storage.checkpoints.checkpoint import open_model
from storage.checkpoints.model_index import ModelIndex
from storage.stores.local import LocalStore
from tests.support.hf_models import FAMILIES, save_tiny
from tests.support.planned_models import Bytes, assemble, carry_out

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

CHUNK_BYTES = 1 << 20
NAMINGS = ("hub", "modules")
Arrays = Mapping[str, NDArray[np.uint16]]


@dataclass(frozen=True, eq=False)
class SavedFamily:
    """A checkpoint in a folder, as it is read here and by anybody."""

    folder: Path
    index: ModelIndex
    config: ModelConfig
    rules: Rules
    files: tuple[Bytes, ...]

    @classmethod
    def open(cls, folder: Path, own: Mapping[str, str] | None = None) -> SavedFamily:
        """Open the model in `folder` with its rules: `own` ones first, then the family's."""
        store = LocalStore(str(folder))
        index = open_model(store, chunk_bytes=CHUNK_BYTES)
        config = read_model_config(store, index)
        assert config is not None
        files = tuple(np.fromfile(folder / shard.key, np.uint8) for shard in index.shards)
        return cls(folder, index, config, rules_for(config, own), files)

    def stored(self) -> dict[str, NDArray[np.uint16]]:
        """Every tensor as it is stored; all have 16 bits."""
        return {
            tensor.name: self.files[tensor.shard][tensor.start : tensor.end].view(np.uint16).reshape(tensor.shape)
            for tensor in self.index.tensors
        }

    def plan(self, layout: Layout) -> LoadPlan:
        return build_load_plan(self.index, layout, self.rules, self.config)

    def load(self, layout: Layout) -> tuple[LoadPlan, list[Arrays]]:
        """Every rank's tensors."""
        plan = self.plan(layout)
        loaded = []
        for rank in plan.ranks:
            raw, _ = carry_out(plan, rank, self.files)
            loaded.append({one.name: raw[one.name].view(np.uint16).reshape(one.sizes) for one in rank.slices})
        return plan, loaded


def reassemble(plan: LoadPlan, loaded: list[Arrays]) -> dict[str, NDArray[np.uint16]]:
    """Return every tensor, from the parts that ranks hold; see `assemble`."""
    held = zip(plan.ranks, loaded, strict=True)
    whole = assemble((piece, arrays[piece.name].view(np.uint8)) for rank, arrays in held for piece in rank.slices)
    return {name: data.view(np.uint16).reshape(shape) for name, (_, shape, data) in whole.items()}


@pytest.fixture(scope="session")
def saved_families(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], SavedFamily]:
    """(family, naming) -> a checkpoint of it."""
    root = tmp_path_factory.mktemp("families")
    return {
        (family, naming): SavedFamily.open(save_tiny(family, root / family / naming, hub_names=naming == "hub"))
        for family in FAMILIES
        for naming in NAMINGS
    }
