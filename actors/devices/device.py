"""The memory of a rank's tensors: the segments, and 2-D copies into them.

A device allocates exactly the plan's segments, once. `place` copies the read items of one chunk out of an arena slot.
`synchronize` returns when those copies no longer read the slot. Tensors are views into the segments and keep them
alive, so memory that was handed out is never written again.

`OpeningDevice` starts a device in a thread. Importing torch, making a CUDA context and pinning an arena take seconds,
during which the rank already fetches and verifies its first chunks.

    allocate, attach_arena --> a thread, in order        place, synchronize, tensors --> wait for it, then the device

The next call that waits raises the thread's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from cluster.planning.plan import StagedTensor, TensorSlice
from cluster.planning.read_items import ReadItems

if TYPE_CHECKING:
    import torch


class Device(Protocol):
    """One rank's memory."""

    receives: bool  # the process owns its memory, so a socket can write to it and `place` copies at once

    @property
    def name(self) -> str:
        """The device's name, such as "cpu" or "cuda:0"."""
        ...

    @property
    def fresh_s(self) -> float:
        """Thread-seconds that `place` and `parts` spent on mapping fresh memory.

        Cumulative. Safe to read during a load; never blocks.
        """
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of memory and files that the device holds for tensors, including those still to be converted."""
        ...

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        """Take the memory of all segments. Raises DoesNotFit."""
        ...

    def attach_arena(self, arena: memoryview, slot_bytes: int) -> None:
        """Prepare for the mapped arena that `place` will read from, in slots of that size. Called once."""
        ...

    def detach_arena(self) -> None:
        """Stop using the arena, which is about to be unmapped."""
        ...

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        """Copy the read items `rows` out of `chunk`, which holds all its bytes. May return before the copy is done."""
        ...

    def parts(self, items: ReadItems, rows: slice) -> list[memoryview]:
        """Return the memory that contiguous read items fill, so that a socket can receive a chunk there.

        Only for devices that `receives` marks.
        """
        ...

    def stage(self, staged: StagedTensor) -> None:
        """Take memory for a tensor that is to be converted. `place` finds it by its segment. Raises DoesNotFit."""
        ...

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        """Make `slices` from the staged tensor, after all its bytes were placed, and release its memory."""
        ...

    def synchronize(self) -> None:
        """Return when no copy reads a chunk any more."""
        ...

    def quiesce(self) -> None:
        """Return when nothing that calls have begun uses the memory any more, such as kernels of a GPU."""
        ...

    def finish(self) -> None:
        """Complete the load after everything is placed. Return when files are safely on disk."""
        ...

    def tensors(self, slices: Sequence[TensorSlice]) -> dict[str, torch.Tensor]:
        """Return the rank's tensors by name. They are views into the segments."""
        ...

    def free(self) -> None:
        """Release the memory. It returns to the system when no tensor views it any more. Idempotent."""
        ...


def open_device(kind: str) -> Device:
    """Return the device of this process. `kind` is "cpu", or "cuda" for the first visible GPU."""
    if kind == "cpu":
        from actors.devices.cpu_device import CpuDevice

        return CpuDevice()
    from actors.devices.cuda_device import CudaDevice

    return CudaDevice(0)


class OpeningDevice:
    """A `Device` that starts in a thread. `open_it` makes the real one and is called once, in the thread."""

    receives = False  # a device that receives needs no time to start, so it is never wrapped

    def __init__(self, open_it: Callable[[], Device]) -> None:
        self._thread = ThreadPoolExecutor(1, "open-device")
        self._device = self._thread.submit(open_it)
        self._last: Future[None] | None = None  # step of the thread
        self._attached = False

    @property
    def name(self) -> str:
        """Name of the real device."""
        return self._ready().name

    @property
    def fresh_s(self) -> float:
        """Cumulative, as in `Device`. 0 before the device has started; never blocks."""
        if not self._device.done() or self._device.exception() is not None:
            return 0.0
        return self._device.result().fresh_s

    @property
    def held_bytes(self) -> int:
        return self._ready().held_bytes

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        """Begin to take the memory. A later `place` raises the DoesNotFit."""
        self._submit(lambda device: device.allocate(segment_bytes))

    def attach_arena(self, arena: memoryview, slot_bytes: int) -> None:
        self._attached = True
        self._submit(lambda device: device.attach_arena(arena, slot_bytes))

    def detach_arena(self) -> None:
        """Return when the device does not use the arena, whether it started or not."""
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

    def quiesce(self) -> None:
        self._ready().quiesce()

    def finish(self) -> None:
        self._ready().finish()

    def tensors(self, slices: Sequence[TensorSlice]) -> dict[str, torch.Tensor]:
        return self._ready().tensors(slices)

    def free(self) -> None:
        if self._came_up():
            self._device.result().free()
        self._thread.shutdown()

    def _submit(self, step: Callable[[Device], None]) -> None:
        before = self._last

        def work() -> None:
            if before is not None:
                before.result()  # it has ended; raises its error, after which no step can follow
            step(self._device.result())

        self._last = self._thread.submit(work)

    def _ready(self) -> Device:
        """Return the real device after all its steps are done. Raises the first step's error."""
        if self._last is not None:
            self._last.result()
        return self._device.result()

    def _came_up(self) -> bool:
        """Wait for the thread. Return whether there is a device, which may still lack memory."""
        if self._last is not None:
            self._last.exception()
        return self._device.exception() is None
