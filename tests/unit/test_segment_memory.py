"""Recycled memory: viewed segments are never reused, others are, and no more is kept."""

from __future__ import annotations

import gc
import mmap
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.devices.cpu_device import HugePages, Segment, SegmentMemory

MIB = 1 << 20


def fill(segments: list[Segment], value: int) -> None:
    for segment in segments:
        segment.touch(0, len(segment.data))
        segment.data[:] = value


@given(
    st.lists(st.lists(st.integers(0, 3 * MIB), max_size=5), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_segments_are_never_shared(loads: list[list[int]], random: object) -> None:
    """Loads follow each other; some of their tensors are stored away and must keep their bytes."""
    memory = SegmentMemory()
    memory.keep(True)
    stored = []
    for number, sizes in enumerate(loads, 1):
        segments = memory.take(sizes)
        assert [len(segment.data) for segment in segments] == sizes
        fill(segments, number)
        views = [segment.data[: len(segment.data) // 2] for segment in segments]
        del segments
        stored += [(view, number) for view in views if random.random() < 0.3]  # type: ignore[attr-defined]
        del views
        for view, value in stored:
            assert (view == value).all()


def test_released_segments_are_used_again() -> None:
    memory = SegmentMemory()
    memory.keep(True)
    segments = memory.take([MIB, 4 * MIB])
    addresses = sorted(segment.data.ctypes.data for segment in segments)
    fill(segments, 1)
    del segments
    assert memory.kept_bytes == 5 * MIB
    again = memory.take([4 * MIB, MIB])
    assert memory.kept_bytes == 0
    assert sorted(segment.data.ctypes.data for segment in again) == addresses
    assert not any(segment._absent for segment in again)  # its pages are there


def test_other_sizes_fit_too_and_no_more_is_kept_than_needed() -> None:
    memory = SegmentMemory()
    memory.keep(True)
    del (segments := memory.take([8 * MIB, 2 * MIB, 2 * MIB]))[:]
    assert memory.kept_bytes == 12 * MIB
    segments = memory.take([9 * MIB, 100])
    fill(segments, 3)
    assert memory.kept_bytes == 0  # the third block went back to the system
    assert [len(segment.data) for segment in segments] == [9 * MIB, 100]
    segments.clear()
    assert memory.kept_bytes == 9 * MIB + mmap.PAGESIZE


def test_memory_is_kept_only_on_request() -> None:
    memory = SegmentMemory()
    del (segments := memory.take([MIB]))[:]
    assert memory.kept_bytes == 0
    memory.keep(True)
    del (segments := memory.take([MIB]))[:]
    assert segments == []
    assert memory.kept_bytes == MIB
    memory.keep(False)
    assert memory.kept_bytes == 0


def test_no_more_is_kept_than_the_limit() -> None:
    memory = SegmentMemory(3 * MIB)
    memory.keep(True)
    del (segments := memory.take([MIB, 2 * MIB, MIB, 2 * MIB]))[:]
    assert segments == []
    assert 2 * MIB <= memory.kept_bytes <= 3 * MIB


def test_memory_that_is_still_viewed_is_not_moved() -> None:
    memory = SegmentMemory()
    memory.keep(True)
    (segment,) = memory.take([MIB])
    memory._give_back(segment.data.base.obj)  # type: ignore[union-attr]  # as when another thread just ends it
    (other,) = memory.take([2 * MIB])
    fill([segment], 1)
    fill([other], 2)
    assert (segment.data == 1).all()


def test_garbage_collection_during_allocation_does_not_hang() -> None:
    memory = SegmentMemory()
    memory.keep(True)

    class Holder: ...

    def cycle() -> None:
        holder = Holder()
        holder.me = holder  # type: ignore[attr-defined]
        holder.segments = memory.take([MIB])  # type: ignore[attr-defined]

    def work() -> None:
        for _ in range(50):
            cycle()
            gc.collect()
            memory.take([MIB, 2 * MIB])

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    gc.freeze()  # what the whole session has imported need not be looked through two hundred times
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("start", "end"), [(0, 1), (MIB - 1, MIB + 1), (3 * MIB, 3 * MIB + 5), (0, 3 * MIB + 5)])
def test_touched_pages_are_written_without_a_trap(start: int, end: int) -> None:
    import resource

    (segment,) = SegmentMemory().take([3 * MIB + 5])
    segment.touch(start, end)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    segment.data[start:end] = np.uint8(1)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 64


@pytest.mark.parametrize(
    ("huge_s", "small_s", "pay"),
    [(0.0002, 0.0005, True), (0.0007, 0.0001, True), (0.003, 0.0005, False), (0.005, 0.005, True)],
)
def test_the_cheaper_kind_of_pages_is_kept(huge_s: float, small_s: float, pay: bool) -> None:
    huge = HugePages()
    huge.note(0.003, huge=True)  # one alone says nothing: anything can come between
    assert huge.pay
    for _ in range(200):
        huge.note(huge_s if huge.pay else small_s, huge=huge.pay)
    assert huge.pay is pay


def test_memory_is_complete_when_huge_pages_run_out() -> None:
    (segment,) = SegmentMemory().take([64 * MIB])
    segment.touch(0, 20 * MIB)
    segment.data[: 20 * MIB] = 7
    assert segment._huge is not None
    segment._huge.pay = False
    segment.touch(0, 64 * MIB)
    segment.data[20 * MIB :] = 8
    assert (segment.data[: 20 * MIB] == 7).all()
    assert (segment.data[20 * MIB :] == 8).all()
