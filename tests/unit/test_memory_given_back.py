"""A rank that does not finish frees its memory at once, also while its error is kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from actors.devices.cpu_device import CpuDevice
from actors.rank.executor import RankLoader
from cluster.errors import DoesNotFit, LoadCancelled, empty_frames
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.planning.plan import StagedTensor, TensorSlice
from cluster.planning.read_items import ReadItems
from cluster.precision.recipes import Precision
from storage.checkpoints.checkpoint import open_model
from storage.stores.object_store import MemoryStore
from tests.support.local_node import Belongings, Rank, local_node, start_all
from tests.support.planned_models import llama_shapes

OBJECTS = {
    "model.safetensors": save(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in llama_shapes(2, 256, 512, 4, 2, 60).items()}
    )
}
PLAN = build_load_plan(
    open_model(MemoryStore(OBJECTS), chunk_bytes=30_000), Layout(), None, None, Precision(quantization="int4")
)


class WatchedDevice(CpuDevice):
    """A device that knows whether its memory is still there. Converts when the test lets it."""

    def __init__(self, fails_in: str = "") -> None:
        super().__init__()
        self.fails_in = fails_in
        self.memory: list[weakref.ref[Any]] = []
        self.converting, self.go_on = threading.Event(), threading.Event()

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        super().allocate(segment_bytes)
        self.memory += [weakref.ref(segment.data) for segment in self._segments]

    def stage(self, staged: StagedTensor) -> None:
        super().stage(staged)
        self.memory.append(weakref.ref(self._staged[staged.source.segment].data))

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        super().place(chunk, items, rows)
        if self.fails_in == "place":
            raise DoesNotFit("the disk is full", need_bytes=1)

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        self.converting.set()
        assert self.go_on.wait(60)
        memory = [segment.data for segment in (*self._segments, *self._staged.values())]
        if self.fails_in == "convert":
            raise DoesNotFit("no memory to convert in", need_bytes=sum(map(len, memory)))
        super().convert(staged, slices)

    @property
    def left(self) -> int:
        """Blocks of memory that are not given back."""
        return sum(block() is not None for block in self.memory)


@pytest.fixture(autouse=True)
def automatic_collection_is_off() -> Iterator[None]:
    """Freed memory must not depend on it: a kept error would hold memory for ever."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("fails_in", ["place", "convert"])
def test_the_error_keeps_no_memory(shm_dir: Path, fails_in: str) -> None:
    before = Belongings()
    device = WatchedDevice(fails_in)
    device.go_on.set()
    with local_node(shm_dir, slots=8) as node:
        loader = RankLoader(node.agent, node.job(PLAN, node.begin(PLAN), 0), device, store=MemoryStore(OBJECTS))
        rank = Rank(loader, device)
        for thread in start_all([rank]):
            thread.join()
    assert isinstance(rank.outcome, DoesNotFit)
    assert rank.outcome.__traceback__ is not None, "it still says where it came from"
    assert device.memory
    assert device.left == 0
    before.check()  # nor the arena


def test_cancelled_in_the_middle_of_a_conversion(shm_dir: Path) -> None:
    device = WatchedDevice()
    with local_node(shm_dir, slots=8) as node:
        loader = RankLoader(node.agent, node.job(PLAN, node.begin(PLAN), 0), device, store=MemoryStore(OBJECTS))
        rank = Rank(loader, device)
        (thread,) = start_all([rank])
        assert device.converting.wait(60)
        loader.cancel()
        device.go_on.set()
        thread.join()
    assert isinstance(rank.outcome, LoadCancelled)
    assert device.memory
    assert device.left == 0
    assert device._staging.kept_bytes == 0


def test_frames_of_chained_errors_are_cleared() -> None:
    kept: list[weakref.ref[Any]] = []

    def inner() -> None:
        block = torch.zeros(4)
        kept.append(weakref.ref(block))
        raise KeyError("inner")

    def outer() -> None:
        block = torch.zeros(4)
        kept.append(weakref.ref(block))
        try:
            inner()
        except KeyError as error:
            raise ValueError("outer") from error

    with pytest.raises(ValueError, match="outer") as caught:
        outer()
    assert all(block() is not None for block in kept)
    caught.value.__cause__.__cause__ = caught.value  # type: ignore[union-attr]
    empty_frames(caught.value)
    assert [block() for block in kept] == [None, None]
