"""The numbers of a plan."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from cluster.command_line.tables import plan_table
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.planning import plan_summary
from cluster.planning.make_plan import build_load_plan, needed_chunks
from cluster.planning.plan import LoadPlan
from cluster.planning.plan_summary import spread_evenly, summarize_plan
from cluster.telemetry.stats import ONLY_PART, ObjectCheck, unchecked_counts
from storage.checksum import NO_CHECKSUM, StoreChecksum
from tests.support.planned_models import as_bf16, llama_shapes, random_arrays, store_arrays


def small_plan(layout: Layout) -> LoadPlan:
    arrays: dict[str, tuple[str, NDArray[np.generic]]] = {
        "layers.0.w": ("BF16", np.zeros((6, 50), np.uint16)),
        "layers.1.w": ("F32", np.zeros((4, 50), np.uint32)),
        "scale": ("F32", np.zeros((), np.uint32)),
        "none": ("U8", np.zeros((0, 3), np.uint8)),
    }
    return build_load_plan(store_arrays(arrays, chunk_bytes=256).index, layout)


def test_numbers_of_two_ranks_on_two_nodes() -> None:
    plan = small_plan(Layout(1, 2))
    summary = summarize_plan(plan, (0, 1), ("alpha",))
    first, second = summary.ranks
    assert first.bytes_by_dtype == {"BF16": 300, "F32": 404}
    assert (first.size_bytes, first.device_bytes, first.tensors, first.segments) == (
        704,
        512 + 512 + 256,
        3,
        3,
    )
    assert (first.node, second.node) == ("alpha", "node 1")
    assert (second.fsdp, second.tensor, second.data) == (1, 0, 0)
    assert summary.placed_bytes == 1404 + 4  # the 0-d tensor twice
    assert (summary.tensors, summary.chunks, summary.verified) == (4, len(plan.chunks), "transport")
    assert [node.ranks for node in summary.nodes] == [(0,), (1,)]
    for node, rank in zip(summary.nodes, plan.ranks, strict=True):
        assert node.needed_chunks == len(rank.chunk_ids)
        assert node.needed_bytes == node.overfetch_bytes + rank.size_bytes
    assert summary.needed_bytes == sum(node.needed_bytes for node in summary.nodes)
    assert summary.overfetch_bytes > 0
    assert summary.layout == Layout(1, 2)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(4, 1, 3), Layout(2, 3, 2), Layout(1, 5), Layout(1, 1, 1, 3), Layout(2, 2, 2, 2)],
    ids=str,
)
@pytest.mark.parametrize("per_node", [1, 2, 5])
def test_numbers_of_ranks_and_nodes_are_those_of_their_plans(layout: Layout, per_node: int) -> None:
    shapes = llama_shapes(3, 16, 24, 4, 2, 40) | {"model.rotary_emb.inv_freq": (4, 0), "norm.weight": ()}
    config = ModelConfig(model_type="llama", num_attention_heads=4, num_key_value_heads=2, hidden_size=16)
    model = store_arrays(as_bf16(random_arrays(shapes)), shards=3, chunk_bytes=333)
    plan = build_load_plan(model.index, layout, None, config)
    summary = summarize_plan(plan, spread_evenly(layout.ranks, per_node))
    for rank, planned in zip(summary.ranks, plan.ranks, strict=True):
        assert (rank.segments, rank.chunks) == (len(planned.segment_bytes), len(planned.chunk_ids))
        assert (rank.size_bytes, rank.device_bytes) == (planned.size_bytes, planned.device_bytes)
        assert rank.tensors == sum(bool(piece.size_bytes) for piece in planned.slices)
    for node in summary.nodes:
        assert node.needed_chunks == len(needed_chunks(plan, node.ranks))
        assert node.needed_bytes - node.overfetch_bytes == plan.cut.wanted_bytes(node.ranks)


def test_shared_facts_of_ranks_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(Layout(1, 2, 32))
    asked: Counter[str] = Counter()
    for name in ("memory_map", "rank_chunks"):
        work = getattr(plan_summary, name)
        monkeypatch.setattr(plan_summary, name, lambda *of, work=work, name=name: asked.update([name]) or work(*of))
    summarize_plan(plan, spread_evenly(64, 8))
    assert asked == {"memory_map": 1, "rank_chunks": 2}  # halves of the same sizes; 32 replicas of them


def test_ranks_of_one_node_share_chunks() -> None:
    plan = small_plan(Layout(1, 2, 2))
    together = summarize_plan(plan)
    (node,) = together.nodes
    assert node.ranks == (0, 1, 2, 3)
    assert node.needed_chunks == len(needed_chunks(plan, (0, 1, 2, 3))) <= len(plan.chunks)
    assert node.needed_bytes - node.overfetch_bytes == 1404
    apart = summarize_plan(plan, spread_evenly(4, 2))
    assert [part.ranks for part in apart.nodes] == [(0, 1), (2, 3)]
    assert apart.needed_bytes == 2 * together.needed_bytes
    assert apart.placed_bytes == together.placed_bytes == 2 * 1408


def test_a_plan_shows_which_objects_the_store_can_check() -> None:
    plan = small_plan(Layout(1, 2))
    assert [(check.key, check.checked_by) for check in summarize_plan(plan).objects] == [(plan.shards[0].key, "")]
    assert unchecked_counts(summarize_plan(plan).objects) == {NO_CHECKSUM: 1}
    kept = replace(plan, shards=(replace(plan.shards[0], checksum=StoreChecksum("crc64nvme", bytes(8))),))
    together = summarize_plan(kept)
    assert (together.verified, together.objects) == ("store:crc64nvme", (ObjectCheck(plan.shards[0].key, "crc64nvme"),))
    apart = summarize_plan(kept, (0, 1))  # no node needs all of it
    assert (apart.verified, unchecked_counts(apart.objects)) == ("transport", {ONLY_PART: 1})
    console = Console(width=160)
    for summary, said in (
        (together, "1 of 1 by the store's own"),
        (apart, f"0 of 1 by the store's own checksums; 1 not: {ONLY_PART}"),
    ):
        with console.capture() as captured:
            console.print(plan_table(summary))
        assert said in captured.get()
    published = replace(plan, chunks=replace(plan.chunks, hash_name="blake3"))
    assert (summarize_plan(published, signed_by="k1").objects, summarize_plan(published).verified) == ((), "blake3")


def test_as_dict_is_json() -> None:
    plain = summarize_plan(small_plan(Layout(1, 2))).as_dict()
    assert json.loads(json.dumps(plain))["ranks"][1]["bytes_by_dtype"]["BF16"] == 300


def test_spread_evenly() -> None:
    assert spread_evenly(5, 2) == (0, 0, 1, 1, 2)
