"""The cost of planning, counted on small models: kinds stay few, items and messages grow in proportion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.huge_model import DenseShape, MoeShape, dense_index, moe_manifest
from bench.plan_scale import agent, messages, planning, table, worker
from storage.checkpoints.manifest import parse_manifest

MIB = 1 << 20


def stats(folder: Path, layers: int, layout: str) -> dict[str, Any]:
    """All parts for a small mixture of experts, in this process."""
    shape = MoeShape(layers=layers, experts=6, hidden=512, inner=1024, heads=8, kv_heads=4, vocabulary=4096, shards=5)
    folder.mkdir()
    (folder / "manifest.json").write_bytes(moe_manifest(shape, chunk_bytes=MIB).to_json())
    (folder / "config.json").write_text(shape.config().model_dump_json())
    parts = {"planning": planning, "agent": agent, "worker": worker}
    return {name: part(folder, layout, 8) for name, part in parts.items()}


def test_the_work_is_in_proportion_to_tensors_and_chunks(tmp_path: Path) -> None:
    small, large = stats(tmp_path / "small", 4, "8x2x2"), stats(tmp_path / "large", 16, "8x2x2")
    assert (small["planning"]["ranks"], small["planning"]["kinds"]) == (32, large["planning"]["kinds"])
    assert large["planning"]["kinds"] <= 8  # whatever the layers: so the work per rank is that of a few tensors
    for name in ("tensors", "chunks"):
        assert 3 < large["planning"][name] / small["planning"][name] < 5
    for found in (small, large):
        # A box cut in one dimension is at most three copies in a chunk, and a slice at least one.
        touched = found["worker"]["slices"] + found["worker"]["chunks"]
        assert found["worker"]["slices"] <= found["worker"]["read_items"] <= 3 * touched
        assert found["agent"]["needed_chunks"] <= found["planning"]["chunks"]
    assert large["planning"]["pipe_bytes"] < 5 * small["planning"]["pipe_bytes"]


def test_more_ranks_cost_the_planning_process_facts_only(tmp_path: Path) -> None:
    few, many = stats(tmp_path / "few", 4, "8x2x1"), stats(tmp_path / "many", 4, "8x2x64")
    assert (few["planning"]["ranks"], many["planning"]["ranks"]) == (16, 1024)
    assert many["planning"]["pipe_bytes"] - few["planning"]["pipe_bytes"] < 16 * 1024  # replicas share their facts
    assert many["worker"]["read_items"] == few["worker"]["read_items"]


@pytest.mark.slow  # imports Ray
def test_the_table_names_every_number(tmp_path: Path) -> None:
    found = stats(tmp_path / "model", 2, "8x2x1") | {"messages": messages(tmp_path / "model", "8x2x1", 8)}
    shown = table({"8x2x1": found})
    assert found["messages"]["nodes"] == 2
    for words in ("planning: pack", "agent: begin", "worker: read items", "job of a node", "shared tables"):
        assert words in shown


def test_made_up_models_are_sound() -> None:
    shape = MoeShape(layers=2, experts=3, hidden=64, inner=64, heads=4, kv_heads=2, vocabulary=128, shards=3)
    manifest = moe_manifest(shape, chunk_bytes=MIB)
    assert parse_manifest(manifest.to_json()) == manifest
    assert moe_manifest(shape, chunk_bytes=MIB) == manifest
    assert [tensor.name for tensor in manifest.tensors] == [name for name, _ in shape.tensors()]
    index = dense_index(DenseShape(layers=1, hidden=64, inner=64, heads=4, kv_heads=2, vocabulary=128, shards=2))
    assert sum(shard.size_bytes for shard in index.shards) > index.size_bytes > 0
