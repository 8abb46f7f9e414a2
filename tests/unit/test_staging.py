"""Staging of converted tensors keeps to the plan's room, in whatever order chunks come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rank.chunk_placer import Staging
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.planning.packed_plan import rank_facts, staging_room
from cluster.planning.plan import LoadPlan
from cluster.planning.read_items import expand_read_items
from cluster.precision.recipes import Precision
from tests.support.planned_models import store_arrays


class Device:
    """A device that counts staged bytes."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}
        self.peak_bytes = 0
        self.converted: list[int] = []

    def stage(self, staged: Any) -> None:
        assert staged.source.segment not in self.open
        self.open[staged.source.segment] = staged.source.size_bytes
        self.peak_bytes = max(self.peak_bytes, sum(self.open.values()))

    def convert(self, staged: Any, slices: Sequence[Any]) -> None:
        del self.open[staged.source.segment]
        self.converted.append(staged.source.segment)


def plan_of(rows: Sequence[int], chunk_bytes: int, ranks: int = 1) -> LoadPlan:
    """Plan tensors with these rows of 8 numbers, all cast, and one integer tensor that is not."""
    arrays: dict[str, Any] = {f"t{at}": ("F32", np.zeros((count, 8), np.float32)) for at, count in enumerate(rows)}
    arrays["ids"] = ("I64", np.zeros(9, np.int64))
    model = store_arrays(arrays, shards=2, chunk_bytes=chunk_bytes)
    return build_load_plan(model.index, Layout(fsdp_size=ranks), precision=Precision("bfloat16"))


def staging_of(plan: LoadPlan, rank: int) -> tuple[Staging, Device]:
    device, mine = Device(), plan.ranks[rank]
    items = expand_read_items(mine.sources, plan.chunks)
    return Staging(device, mine, items, plan.chunks.largest_bytes), device  # type: ignore[arg-type]


models = st.tuples(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(16, 900), st.integers(1, 3))


@settings(deadline=None)
@given(models, st.randoms(use_true_random=False), st.integers(1, 5))
def test_staging_keeps_to_the_planned_room_in_any_order(
    model: tuple[list[int], int, int], chance: Any, most: int
) -> None:
    rows, chunk_bytes, ranks = model
    plan = plan_of(rows, chunk_bytes, ranks)
    facts = rank_facts(plan.cut, plan.chunks.largest_bytes)
    for rank in range(ranks):
        staging, device = staging_of(plan, rank)
        coming = plan.ranks[rank].chunk_ids.tolist()
        chance.shuffle(coming)
        readable: list[int] = []
        while coming or readable:
            readable += [coming.pop() for _ in range(min(len(coming), chance.randint(1, 4)))]
            chosen = staging.choose(readable, most)
            assert chosen or coming, "it would wait for ever"
            assert len(chosen) <= most
            for chunk in chosen:
                assert staging.begin(chunk)
                staging.end(chunk)
                readable.remove(chunk)
        staging.finish()
        assert len(device.converted) == len(plan.ranks[rank].staged)
        assert device.peak_bytes == staging.peak_bytes or not staging.peak_bytes
        assert staging.peak_bytes <= staging.room_bytes == facts[rank].staging_bytes


def test_chunks_of_started_tensors_are_not_held_back() -> None:
    plan = plan_of([20, 20, 20, 20], 100)  # 640 bytes each, two in a shard
    staging, _ = staging_of(plan, 0)
    chunks = plan.ranks[0].chunk_ids.tolist()
    first, *_, last = chunks
    assert staging.choose([last], 8) == []
    assert staging.choose([last, first], 8) == [first]
    staging.begin(first)
    staging.end(first)
    later = chunks[2:5]  # of the tensor that has begun; the second chunk is still missing
    assert staging.choose([*later, last], 8) == later
    assert staging.choose([*later, last], 2) == later[:2]


def test_a_slow_conversion_does_not_exceed_the_room() -> None:
    """Other threads go on to the next tensors while one is converted, as far as there is memory."""
    plan = plan_of([20, 20, 20, 20, 20, 20], 700)  # 640 bytes each: every chunk ends inside a tensor
    staging, device = staging_of(plan, 0)
    waiting, go_on = threading.Event(), threading.Event()
    convert = device.convert

    def slow_convert(staged: Any, slices: Sequence[Any]) -> None:
        waiting.set()
        assert go_on.wait(30)
        convert(staged, slices)

    device.convert = slow_convert  # type: ignore[method-assign]

    def place(chunk: int) -> None:
        staging.begin(chunk)
        staging.end(chunk)

    threads = [threading.Thread(target=place, args=(chunk,)) for chunk in plan.ranks[0].chunk_ids.tolist()]
    threads[0].start()
    assert waiting.wait(30)
    for thread in threads[1:]:
        thread.start()
        thread.join(0.05)
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(device.converted) == len(plan.ranks[0].staged)
    assert device.peak_bytes == staging.peak_bytes <= staging.room_bytes


def test_the_room_is_that_of_two_and_a_chunk() -> None:
    assert staging_room([(100, 5), (30, 2)], 16) == 216
    assert staging_room([(100, 1), (30, 1)], 16) == 130  # there is no more
    assert staging_room([(100, 0), (30, 9)], 16) == 76  # the rank has none of the first
    assert staging_room([], 16) == 0
