"""From a verified chunk to the rank's memory: what of it is wanted, and where it goes."""

from __future__ import annotations

import time

from actors.devices.device import Device
from actors.rank.chunk_read import StageClock
from actors.rank.staging import Staging
from cluster.plans.load_plan import RankPlan
from cluster.plans.packed_plan import SharedTables
from cluster.plans.read_items import expand_read_items, whole_chunks
from storage.arena.arena import Arena

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
