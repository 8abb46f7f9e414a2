"""A device that comes up while the first chunks are on their way.

Importing torch, making a CUDA context and pinning an arena take seconds, in which a rank can fetch and verify already.

    allocate, attach_arena --> a thread, in order        place, synchronize, tensors --> wait for it, then the device

What goes wrong in the thread comes out of the next call that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from actors.devices.device import Device
from cluster.plans.load_plan import StagedTensor, TensorSlice
from cluster.plans.read_items import ReadItems

if TYPE_CHECKING:
    import torch


class OpeningDevice:
    """See `actors.devices.device.Device`. `open_it` makes the real one; it is called once, in the thread."""

    receives = False  # a device whose memory is the process's own is there at once

    def __init__(self, open_it: Callable[[], Device]) -> None:
        self._thread = ThreadPoolExecutor(1, "open-device")
        self._device = self._thread.submit(open_it)
        self._last: Future[None] | None = None  # step of the thread
        self._attached = False

    @property
    def name(self) -> str:
        """Of the real device."""
        return self._ready().name

    @property
    def fresh_s(self) -> float:
        """So far; never waits, because it is asked for while chunks are fetched. 0 before the device is there."""
        if not self._device.done() or self._device.exception() is not None:
            return 0.0
        return self._device.result().fresh_s

    @property
    def held_bytes(self) -> int:
        return self._ready().held_bytes

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        """Begins to take the memory; a DoesNotFit comes out of `place`."""
        self._submit(lambda device: device.allocate(segment_bytes))

    def attach_arena(self, arena: memoryview) -> None:
        self._attached = True
        self._submit(lambda device: device.attach_arena(arena))

    def detach_arena(self) -> None:
        """Returns when nothing of the device uses the arena, whether it came up or not."""
        if self._attached:
            self._attached = False
            if self._came_up():
                self._device.result().detach_arena()

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        self._ready().place(chunk, items, rows)

    def parts(self, items: ReadItems, rows: slice) -> list[memoryview]:
        return self._ready().parts(items, rows)

    def stage(self, staged: StagedTensor) -> None:
        self._ready().stage(staged)

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        self._ready().convert(staged, slices)

    def synchronize(self) -> None:
        self._ready().synchronize()

    def finish(self) -> None:
        self._ready().finish()

    def tensors(self, slices: tuple[TensorSlice, ...]) -> dict[str, torch.Tensor]:
        return self._ready().tensors(slices)

    def free(self) -> None:
        if self._came_up():
            self._device.result().free()
        self._thread.shutdown()

    def _submit(self, step: Callable[[Device], None]) -> None:
        before = self._last

        def work() -> None:
            if before is not None:
                before.result()  # has ended; raises why no further step can be made
            step(self._device.result())

        self._last = self._thread.submit(work)

    def _ready(self) -> Device:
        """The real device, when all that was asked of it is done. Raises what went wrong."""
        if self._last is not None:
            self._last.result()
        return self._device.result()

    def _came_up(self) -> bool:
        """Waits for the thread. Whether there is a device, which may still lack memory."""
        if self._last is not None:
            self._last.exception()
        return self._device.exception() is None
