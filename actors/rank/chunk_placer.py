"""Copies a rank's parts of verified chunks to its device, and converts tensors when their last chunk is there.

`Staging` decides about tensors that are converted; other chunks are copied as they come. Thread-safe.

    choose(chunks) -> those that may be placed now: tensors begin in the order of the plan, so few are open at a time
    begin(chunk) --> the device has memory for the tensors that the chunk touches; its bytes are copied there
    end(chunk)   --> tensors that waited for this chunk only are converted, and their staging memory is freed

A chunk may come twice, by a fetch of the rank and by a grant of its agent, perhaps at the same time in two threads.
Only the first is copied; the other thread returns when that is done. So no tensor is converted before its last byte is
there, or twice, and nothing is written to freed memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, KeysView

from actors.devices.device import Device
from actors.rank.chunk_fetcher import StageClock
from cluster.planning.packed_plan import SharedTables, staging_room
from cluster.planning.plan import RankPlan
from cluster.planning.read_items import ReadItems, expand_read_items, whole_chunks
from storage.arena.arena import Arena
from storage.errors import LongshoreError


class Staging:
    """Conversions of one rank in one load. Placed chunks stay placed when the agent is restarted."""

    def __init__(self, device: Device, plan: RankPlan, items: ReadItems, chunk_bytes: int) -> None:
        """`chunk_bytes`: of the model's largest chunk."""
        self.room_bytes = staging_room([(each.source.size_bytes, 1) for each in plan.staged], chunk_bytes)
        self._device = device
        self._plan = plan
        first = len(plan.segment_bytes)
        rows = items.segment >= first
        self._tensors: dict[int, list[int]] = {}  # of each chunk: numbers of the staged tensors that it touches
        self._awaited: list[set[int]] = [set() for _ in plan.staged]  # of each of them: chunks
        for chunk, segment in zip(items.chunk[rows].tolist(), items.segment[rows].tolist(), strict=True):
            self._tensors.setdefault(chunk, [])
            if chunk not in self._awaited[segment - first]:
                self._awaited[segment - first].add(chunk)
                self._tensors[chunk].append(segment - first)
        self._order = sorted(self._tensors)
        self._next = 0  # of them, the first that is not placed
        self._changed = threading.Condition()
        self._one = threading.Lock()  # converts at a time: memory is short
        self._complete = 0  # tensors that have all their chunks and are not converted yet
        self._placing: set[int] = set()  # chunks
        self._placed: set[int] = set()
        self._open_bytes: dict[int, int] = {}  # of the memory of tensors that have some chunks and not all
        self._broken = False
        self.converted = 0  # tensors
        self.peak_bytes = 0  # held at once for tensors that are still to be converted
        self.convert_s = 0.0

    @property
    def chunks(self) -> KeysView[int]:
        """Chunks that touch a tensor to convert."""
        return self._tensors.keys()

    def choose(self, chunks: Iterable[int], most: int) -> list[int]:
        """Return up to `most` of the chunks, in plan order, so that tensors begin in that order too.

        At most one tensor is then incomplete, and the next chunk belongs to it. A chunk that touches only tensors that
        have begun, or none, never waits.
        """
        chosen: list[int] = []
        with self._changed:
            begun, at = set(self._open_bytes), self._next
            for chunk in sorted(chunks):
                if len(chosen) == most:
                    break
                while at < len(self._order) and (self._order[at] in self._placed or self._order[at] in chosen):
                    at += 1
                new = set() if chunk in self._placed else set(self._tensors.get(chunk, ())) - begun
                if new and chunk != self._order[at]:
                    continue
                chosen.append(chunk)
                begun |= new
        return chosen

    def begin(self, chunk: int) -> bool:
        """Return True when the chunk is to be copied now; False when it was copied before. Raises DoesNotFit."""
        if chunk not in self._tensors:
            return True
        with self._changed:
            # A chunk that opens tensors waits in its slot while others are converted whose memory it needs.
            self._changed.wait_for(lambda: self._broken or (chunk not in self._placing and self._has_room(chunk)))
            if self._broken:
                raise LongshoreError("the load ends: another thread could not convert a tensor")
            if chunk in self._placed:
                return False
            self._placing.add(chunk)
            for number in self._opened_by(chunk):
                self._device.stage(self._plan.staged[number])
                self._open_bytes[number] = self._plan.staged[number].source.size_bytes
            self.peak_bytes = max(self.peak_bytes, sum(self._open_bytes.values()))
        return True

    def end(self, chunk: int) -> None:
        """The bytes of the chunk are copied, or the device copies them before any later command."""
        if chunk not in self._tensors:
            return
        with self._changed:
            complete = []
            for number in self._tensors[chunk]:
                self._awaited[number].discard(chunk)
                if not self._awaited[number]:
                    complete.append(number)
            self._complete += len(complete)
        for number in complete:
            self._convert(number)
        with self._changed:
            self._placing.discard(chunk)
            self._placed.add(chunk)
            while self._next < len(self._order) and self._order[self._next] in self._placed:
                self._next += 1
            self._changed.notify_all()

    def failed(self) -> None:
        """Stop every wait: the load cannot go on."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Convert tensors that no chunk touches, such as those that are all padding. Every chunk is placed."""
        for number, staged in enumerate(self._plan.staged):
            if not staged.source.filled_bytes:
                self._device.stage(staged)
                self._complete += 1
                self._convert(number)

    def _opened_by(self, chunk: int) -> list[int]:
        """Return the tensors that begin with this chunk."""
        if chunk in self._placed:
            return []
        return [number for number in self._tensors[chunk] if number not in self._open_bytes]

    def _has_room(self, chunk: int) -> bool:
        """Return True when the tensors that this chunk opens fit beside those that have memory.

        When no tensor waits to be converted, the order of chunks (`choose`) leaves room for every chunk.
        """
        opened = self._opened_by(chunk)
        new_bytes = sum(self._plan.staged[number].source.size_bytes for number in opened)
        return not opened or not self._complete or sum(self._open_bytes.values()) + new_bytes <= self.room_bytes

    def _convert(self, number: int) -> None:
        staged = self._plan.staged[number]
        with self._one:
            begun_s = time.monotonic()
            self._device.convert(staged, self._plan.slices[staged.first : staged.end])
            self.converted += 1
            self.convert_s += time.monotonic() - begun_s
        with self._changed:
            self._open_bytes.pop(number, None)
            self._complete -= 1
            self._changed.notify_all()


MAX_PARTS = 64  # contiguous pieces of a chunk that is received in place: for smaller ones, calls cost more than a copy


class ChunkPlacer:
    """Copies chunks of one rank; thread-safe, one clock per thread."""

    def __init__(self, device: Device, plan: RankPlan, tables: SharedTables) -> None:
        self._device = device
        self._chunks = tables.chunks
        self._items = expand_read_items(plan.sources, tables.chunks)
        self.staging = Staging(device, plan, self._items, tables.chunks.largest_bytes)
        self._wanted_bytes = self._items.chunk_bytes()
        self._clocks: list[StageClock] = []
        self._fetching: list[StageClock] = []  # those of fetch threads
        self.device_s = 0.0  # waited for the device to end its copies

    def clock(self, *, fetching: bool = False) -> StageClock:
        """Return a clock for the calling thread. `fetching`: it is a fetch thread, which places too."""
        clock = StageClock()
        self._clocks.append(clock)
        if fetching:
            self._fetching.append(clock)
        return clock

    @property
    def fetching_s(self) -> float:
        """Seconds that fetch threads spent placing."""
        return sum(clock.busy_s for clock in self._fetching)

    @property
    def total(self) -> StageClock:
        """Sum over all threads."""
        clocks = list(self._clocks)
        return StageClock(
            busy_s=sum(clock.busy_s for clock in clocks),
            bytes=sum(clock.bytes for clock in clocks),
            wait_s=sum(clock.wait_s for clock in clocks),
        )

    def chunk_bytes(self, chunk: int) -> int:
        """Return the size of the chunk."""
        return self._chunks.byte_range(chunk).size_bytes

    def wanted_bytes(self, chunk: int) -> int:
        """Return the number of bytes of the chunk that the rank holds."""
        return self._wanted_bytes.get(chunk, 0)

    def at_once(self, chunk: int) -> bool:
        """Return True when the fetch thread places the chunk too. A conversion, which may follow, would keep the chunk
        from other ranks.
        """
        return self._device.receives and self.wanted_bytes(chunk) > 0 and chunk not in self.staging.chunks

    def direct_chunks(self) -> tuple[int, ...]:
        """Return the chunks that can be received in the rank's own memory, ascending. They are wanted completely, and
        their tensors are not converted.
        """
        if not self._device.receives:
            return ()
        staged = self.staging.chunks
        return tuple(
            chunk for chunk in whole_chunks(self._items, self._chunks, MAX_PARTS).tolist() if chunk not in staged
        )

    def direct_parts(self, chunk: int, clock: StageClock) -> list[memoryview]:
        """Return the memory for one of `direct_chunks`, in the chunk's order. Making its pages present takes time."""
        begun_s = time.monotonic()
        parts = self._device.parts(self._items, self._items.for_chunk(chunk))
        clock.busy_s += time.monotonic() - begun_s
        return parts

    @property
    def fresh_s(self) -> float:
        """Seconds that all threads waited for the pages of fresh memory."""
        return self._device.fresh_s

    def place(self, arena: Arena, chunks: list[tuple[int, int]], clock: StageClock) -> int:
        """Copy the rank's parts of these (chunk, slot), and return their bytes. Nothing reads the slots afterwards."""
        begun_s = time.monotonic()
        moved_bytes = 0
        for chunk, slot in chunks:
            self._place(arena.slot(slot)[: self.chunk_bytes(chunk)], chunk)
            moved_bytes += self.wanted_bytes(chunk)
        copied_s = time.monotonic()
        self._device.synchronize()
        clock.busy_s += copied_s - begun_s
        clock.bytes += moved_bytes
        self.device_s += time.monotonic() - copied_s
        return moved_bytes

    def finish(self) -> None:
        """Complete every tensor. Every chunk is placed."""
        self.staging.finish()
        self._device.synchronize()
        self._device.finish()

    def _place(self, data: memoryview, chunk: int) -> None:
        try:
            if self.staging.begin(chunk):
                self._device.place(data, self._items, self._items.for_chunk(chunk))
                self.staging.end(chunk)
        except BaseException:
            self.staging.failed()
            raise
