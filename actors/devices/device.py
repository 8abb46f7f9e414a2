"""Where a rank's tensors live: memory for the segments, and 2-D copies into it.

A device allocates exactly the plan's segments, once. `place` copies the read items of one chunk out of an arena slot;
`synchronize` returns when those copies no longer read the slot. Tensors are views into the segments, which they keep
alive: memory that was handed out is never written again.

A device that comes up while the first chunks are on their way.

Importing torch, making a CUDA context and pinning an arena take seconds, in which a rank can fetch and verify already.

    allocate, attach_arena --> a thread, in order        place, synchronize, tensors --> wait for it, then the device

What goes wrong in the thread comes out of the next call that waits.
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

    receives: bool  # its memory is the process's own: a socket can write to it, and `place` copies at once

    @property
    def name(self) -> str:
        """ "cpu" or "cuda:0"."""
        ...

    @property
    def fresh_s(self) -> float:
        """Thread-seconds, inside `place` and `parts`, for which memory that nobody had used was made present.

        So far: it is asked for in the middle of a load, and never waits.
        """
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of memory, and of files, that it has for tensors, those that are still to be converted included."""
        ...

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        """Take the memory. Raises DoesNotFit."""
        ...

    def attach_arena(self, arena: memoryview) -> None:
        """Told once about the mapped arena that `place` will read from."""
        ...

    def detach_arena(self) -> None:
        """The arena is about to be unmapped."""
        ...

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        """Copy the read items `rows` out of `chunk` (all its bytes). May return before the copy is done."""
        ...

    def parts(self, items: ReadItems, rows: slice) -> list[memoryview]:
        """The memory that contiguous read items fill, for whoever receives a chunk in it. Only where it `receives`."""
        ...

    def stage(self, staged: StagedTensor) -> None:
        """Take memory for a tensor that is to be converted; `place` finds it by its segment. Raises DoesNotFit."""
        ...

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        """Make `slices` of it, after all that was placed in it, and let go of its memory."""
        ...

    def synchronize(self) -> None:
        """Return when no copy reads a chunk any more."""
        ...

    def finish(self) -> None:
        """Everything is placed. Returns when it will stay: what is on disk is there for good."""
        ...

    def tensors(self, slices: tuple[TensorSlice, ...]) -> dict[str, torch.Tensor]:
        """The rank's tensors by name: views into the segments."""
        ...

    def free(self) -> None:
        """Let go of the memory; it returns to the system when no tensor views it any more. Idempotent."""
        ...


def open_device(kind: str) -> Device:
    """The device of this process: `kind` is "cpu", or "cuda" for the one GPU that is visible first."""
    if kind == "cpu":
        from actors.devices.cpu_device import CpuDevice

        return CpuDevice()
    from actors.devices.cuda_device import CudaDevice

    return CudaDevice(0)


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
