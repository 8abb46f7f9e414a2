"""One update of one rank: reads what changed, beside the model or into it, and exchanges contents in place.

    begin(link) --> thread: a RankLoader of what changed --> outcome()
        staged      into host memory of its own; the model is untouched until `exchange` copies it to its tensors
        streaming   into the model's tensors, while no call runs; there is no exchange

The worker's `Gate` keeps calls out meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from actors.devices.cpu_device import CpuDevice
from actors.devices.device import Device
from actors.links import AgentLink
from actors.rank.executor import RankLoader
from cluster.errors import LoadCancelled
from cluster.messages import UpdateJob
from cluster.planning.packed_plan import SharedTables
from cluster.planning.plan import RankPlan, StagedTensor, TensorSlice
from cluster.planning.read_items import ReadItems
from cluster.planning.update_plan import StagedSlice, exchange_items, placed_live
from cluster.telemetry.stats import RankReport
from storage.errors import LongshoreError

if TYPE_CHECKING:
    import torch

    from actors.gpu_worker import Gate


class RankUpdate:
    """One update in a worker's process, from its job until its contents are the model's. Thread-safe."""

    def __init__(self, job: UpdateJob, plan: RankPlan, device: Device, gate: Gate) -> None:
        """`plan`, `device`: of the resident model."""
        self.job = job
        self.wrote = False  # tensors of the model may have changed
        self._live = plan
        self._device = device
        self._gate = gate
        self._lock = threading.Lock()
        self._dropped = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._loader: RankLoader | None = None
        self._staging: CpuDevice | None = None
        self._slices: Sequence[StagedSlice] = ()
        self._items: ReadItems | None = None
        self._report: RankReport | None = None
        self._error: LongshoreError | None = None

    @property
    def done(self) -> bool:
        """True when everything is staged, or streamed into the model."""
        return self._error is None and (self._report is not None or self._over.is_set())

    @property
    def error(self) -> LongshoreError | None:
        """The error that ended the update, if one did."""
        return self._error

    def begin(self, link: AgentLink, after: Callable[[], None] = lambda: None) -> None:
        """Run the update in a thread. `after` is called in it when streaming has ended, and calls still wait."""
        self._thread = threading.Thread(target=self._run, args=(link, after), name="update", daemon=True)
        self._thread.start()

    def outcome(self) -> RankReport | None:
        """Return the report once all is staged, or streamed. Blocks. Raises the update's error.

        None: nothing of this rank changed.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._report

    def exchange(self, after: Callable[[], None]) -> float:
        """Copy what is staged to the model's tensors, while no call runs. Return the seconds of the copy itself.

        `after` is called when the tensors have the new contents, and calls still wait.
        """
        if self.job.streaming or not self.job.job.shared:
            after()
            return 0.0
        with self._gate.write(self._dropped.is_set):
            begun_s = time.monotonic()
            staging, items = self._staging, self._items
            if staging is None or items is None or self._report is None:
                raise LoadCancelled("nothing is staged on this rank")
            self._device.quiesce()
            self.wrote = True
            for number, piece in enumerate(self._slices):
                rows = items.for_chunk(number)
                if rows.stop > rows.start:
                    view = staging.view(piece.segment, piece.offset, piece.size_bytes)
                    self._device.place(view, items, rows)
            self._device.synchronize()
            after()
            return time.monotonic() - begun_s

    def drop(self) -> None:
        """End the update and free what it staged. Return when no thread of it works any more. Idempotent."""
        self._dropped.set()
        self._gate.wake()
        with self._lock:
            loader = self._loader
        if loader is not None:
            loader.cancel(LoadCancelled("the update was cancelled"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.free()

    def free(self) -> None:
        """Free the staged bytes."""
        staging, self._staging, self._items, self._slices = self._staging, None, None, ()
        if staging is not None:
            staging.free()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self, link: AgentLink, after: Callable[[], None]) -> None:
        try:
            if not self.job.job.shared:
                return
            if self.job.streaming:
                with self._gate.write(self._dropped.is_set):
                    self._stream(link, after)
            else:
                self._staging = CpuDevice()
                self._report = self._load(link, self._staging, self._plan_beside)
        except BaseException as error:
            self._error = self._typed(error)
        finally:
            if self._report is None:
                self.free()
            self._over.set()

    def _stream(self, link: AgentLink, after: Callable[[], None]) -> None:
        try:
            self._report = self._load(link, _Borrowed(self._device), self._plan_in_place)
        except BaseException as error:
            self._error = self._typed(error)
        after()

    def _typed(self, error: BaseException) -> LongshoreError:
        """Return the error as a type that pickles: it must reach the caller."""
        if isinstance(error, LongshoreError):
            return error
        return LongshoreError(f"{type(error).__name__} while updating: {error}", rank=self.job.job.rank)

    def _load(self, link: AgentLink, device: Device, plan_of: Callable[[SharedTables], RankPlan]) -> RankReport:
        loader = RankLoader(link, self.job.job, device, plan_of=plan_of)
        with self._lock:
            self._loader = loader
        if self._dropped.is_set():
            loader.cancel(LoadCancelled("the update was cancelled"))
        try:
            return loader.run()
        finally:
            with self._lock:
                self._loader = None
            self.wrote = self.job.streaming and loader.state.first_work_s is not None

    def _plan_beside(self, tables: SharedTables) -> RankPlan:
        plan = tables.rank_plan(self.job.job.rank)
        self._slices, self._items = exchange_items(plan, self._live, tables.chunks)
        return plan

    def _plan_in_place(self, tables: SharedTables) -> RankPlan:
        return placed_live(tables.rank_plan(self.job.job.rank), self._live)


class _Borrowed:
    """The device of a resident model, for a load into its tensors: it takes no memory and frees none."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.receives = device.receives

    @property
    def name(self) -> str:
        return self._device.name

    @property
    def fresh_s(self) -> float:
        return self._device.fresh_s

    @property
    def held_bytes(self) -> int:
        return self._device.held_bytes

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        self._device.quiesce()

    def attach_arena(self, arena: memoryview, slot_bytes: int) -> None:
        self._device.attach_arena(arena, slot_bytes)

    def detach_arena(self) -> None:
        self._device.detach_arena()

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        self._device.place(chunk, items, rows)

    def parts(self, items: ReadItems, rows: slice) -> list[memoryview]:
        return self._device.parts(items, rows)

    def stage(self, staged: StagedTensor) -> None:
        self._device.stage(staged)

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        self._device.convert(staged, slices)

    def synchronize(self) -> None:
        self._device.synchronize()

    def quiesce(self) -> None:
        self._device.quiesce()

    def finish(self) -> None:
        self._device.finish()

    def tensors(self, slices: Sequence[TensorSlice]) -> dict[str, torch.Tensor]:
        return self._device.tensors(slices)

    def free(self) -> None:
        pass
