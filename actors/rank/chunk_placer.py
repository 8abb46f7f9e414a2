"""From a verified chunk to the rank's memory: what of it is wanted, and where it goes.

Tensors that are converted on their way in: which chunks they wait for, and when each is done. Thread-safe.

    choose(chunks) -> those that may be placed now: tensors begin in the order of the plan, so few are open at a time
    begin(chunk) --> the device has memory for what the chunk touches; its bytes are copied there
    end(chunk)   --> tensors that were waiting for it alone are converted, and their memory is given up

A chunk may come twice, by a fetch of the rank's own and by its agent's word, perhaps at the same time in two threads.
Only the first is copied; the other one returns when that is done. So nothing is converted before its last byte is
there, or twice, and nothing is written to memory that was given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, KeysView

from actors.devices.device import Device
from actors.rank.chunk_fetcher import StageClock
from cluster.planning.packed_plan import SharedTables
from cluster.planning.plan import RankPlan
from cluster.planning.rank_plans import staging_room
from cluster.planning.read_items import ReadItems, expand_read_items, whole_chunks
from storage.arena.arena import Arena
from storage.errors import LongshoreError


class Staging:
    """Of one rank, for one load: what was placed stays placed when the agent is restarted."""

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
        """Of these, those that can be placed one after the other, in plan order, while tensors begin in that order too.

        Then the only one that is left unfinished is that which the next chunk goes on with. A chunk that goes on with
        tensors that have begun, or has nothing to do with any, waits for none.
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
        """Whether the chunk is to be copied now; False when it was, in whole. Raises DoesNotFit."""
        if chunk not in self._tensors:
            return True
        with self._changed:
            # Whoever would open a tensor while others wait to be converted is too fast: it keeps its slot for a while.
            self._changed.wait_for(
                lambda: self._broken or (chunk not in self._placing and (self._complete <= 1 or not self._opens(chunk)))
            )
            if self._broken:
                raise LongshoreError("the load ends: another thread could not convert a tensor")
            if chunk in self._placed:
                return False
            self._placing.add(chunk)
            for number in self._tensors[chunk]:
                if number not in self._open_bytes:
                    source = self._plan.staged[number].source
                    self._device.stage(self._plan.staged[number])
                    self._open_bytes[number] = source.size_bytes
            self.peak_bytes = max(self.peak_bytes, sum(self._open_bytes.values()))
        return True

    def end(self, chunk: int) -> None:
        """The bytes of the chunk are copied, or the device will copy them before what it is told next."""
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
        """The load cannot go on: nobody waits for a chunk that will not be placed."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Every chunk is placed: tensors that none of them touches, such as those that are all padding."""
        for number, staged in enumerate(self._plan.staged):
            if not staged.source.filled_bytes:
                self._device.stage(staged)
                self._complete += 1
                self._convert(number)

    def _opens(self, chunk: int) -> bool:
        return chunk not in self._placed and any(number not in self._open_bytes for number in self._tensors[chunk])

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
    """Places chunks of one rank; thread-safe, one clock per thread."""

    def __init__(self, device: Device, plan: RankPlan, tables: SharedTables) -> None:
        self._device = device
        self._chunks = tables.chunks
        self._items = expand_read_items(plan.sources, tables.chunks)
        self.staging = Staging(device, plan, self._items, tables.chunks.largest_bytes)
        self._wanted_bytes = self._items.chunk_bytes()
        self._clocks: list[StageClock] = []
        self._fetching: list[StageClock] = []  # those of fetch threads
        self.device_s = 0.0  # waited for the device's copies to end

    def clock(self, *, fetching: bool = False) -> StageClock:
        """A clock for the calling thread, which places what it has fetched, or only places."""
        clock = StageClock()
        self._clocks.append(clock)
        if fetching:
            self._fetching.append(clock)
        return clock

    @property
    def fetching_s(self) -> float:
        """Seconds for which fetch threads placed."""
        return sum(clock.busy_s for clock in self._fetching)

    @property
    def total(self) -> StageClock:
        """What all threads did together."""
        clocks = list(self._clocks)
        return StageClock(
            busy_s=sum(clock.busy_s for clock in clocks),
            bytes=sum(clock.bytes for clock in clocks),
            wait_s=sum(clock.wait_s for clock in clocks),
        )

    def chunk_bytes(self, chunk: int) -> int:
        """Size of a chunk."""
        return self._chunks.byte_range(chunk).size_bytes

    def wanted_bytes(self, chunk: int) -> int:
        """How many bytes of the chunk the rank holds."""
        return self._wanted_bytes.get(chunk, 0)

    def at_once(self, chunk: int) -> bool:
        """Whether whoever has fetched the chunk should place it too: not while others wait to be told of it, when a
        conversion may follow.
        """
        return self._device.receives and self.wanted_bytes(chunk) > 0 and chunk not in self.staging.chunks

    def direct_chunks(self) -> tuple[int, ...]:
        """Chunks that can be received in the rank's own memory, ascending: those wanted whole, if the device can, and
        of tensors that are held as they are stored.
        """
        if not self._device.receives:
            return ()
        staged = self.staging.chunks
        return tuple(
            chunk for chunk in whole_chunks(self._items, self._chunks, MAX_PARTS).tolist() if chunk not in staged
        )

    def direct_parts(self, chunk: int, clock: StageClock) -> list[memoryview]:
        """The memory in which one of `direct_chunks` belongs, in the chunk's order; present, which can take time."""
        begun_s = time.monotonic()
        parts = self._device.parts(self._items, self._items.for_chunk(chunk))
        clock.busy_s += time.monotonic() - begun_s
        return parts

    @property
    def fresh_s(self) -> float:
        """Of the time for which all threads placed: until fresh memory was present."""
        return self._device.fresh_s

    def place(self, arena: Arena, chunks: list[tuple[int, int]], clock: StageClock) -> int:
        """Copy what the rank wants of these (chunk, slot); bytes copied. Nothing reads the slots afterwards."""
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
        """Every chunk is placed: returns when every tensor is what it is to be."""
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
