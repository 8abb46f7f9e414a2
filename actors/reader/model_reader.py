"""Reads boxes of a model's tensors for a process that asks for one after the other.

    read(tensor, box) --> the chunks that it touches are wanted, and some after them (`ReadAhead`)
                      --> as each becomes readable: its part of the box is copied to the result
    close()           --> everything is given back

Chunks are verified before they are readable: by the process that fetched them, into shared memory.

Chunks are numbered in file order, and most programs read a model in that order. Without reading ahead every tensor
would cost a round trip to the store.

    read so far     wanted, in order
    ...#########|+++++++++........          + as many as the run of reads so far was long, up to the limit
                ^ the chunk that is read now

A read far from the run so far begins a new run. A program that knows its reads names them (`ReadAhead.plan`). Then
these are wanted, nothing is guessed, and a chunk that a later one needs again stays, if not too many do. One that knows
that it will read everything in file order says so (`ReadAhead.begin`), and the first run has its full length from the
start.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from actors.devices.cpu_device import HugePages, Segment, SegmentMemory, place_items
from actors.links import AgentLink
from actors.rank.chunk_fetcher import ChunkFetcher
from actors.rank.loader import MESSAGE_NUMBERS, ChunkLoader, RankWork
from actors.rank.state import RankIdentity
from actors.reader.state import ReaderState, closed
from cluster.errors import ReaderClosed, empty_frames
from cluster.layouts.region import Region
from cluster.messages import FetchSettings
from cluster.planning.packed_plan import SharedTables
from cluster.planning.plan import TensorSlice
from cluster.planning.read_items import ReadItems, expand_read_items
from cluster.telemetry.logs import LogFields
from storage.arena.arena import Arena
from storage.checkpoints.model_index import ChunkTable, Tensor
from storage.errors import LongshoreError
from storage.host.processes import usable_cpus
from storage.stores.object_store import ObjectStore

KEPT = 4  # chunks that were read stay, because the next small tensors are often in them; at most `limit`


class ReadAhead:
    """The chunks that one reader wants beyond the one that it reads. Not thread-safe."""

    def __init__(self, chunks: Sequence[int], limit: int = 1) -> None:
        """`chunks` has the ids of all chunks with tensors, ascending. `limit`: chunks wanted ahead, at least 1."""
        self.limit = limit
        self._chunks = chunks
        self._number = {chunk: number for number, chunk in enumerate(chunks)}
        self._first, self._high = 0, -3  # of the run: numbers of its first and its last chunk; no chunk continues this
        self._asked_end = -3  # number of the last chunk of the read that began the run: nothing is guessed from it
        self._begins = False
        self._plan_end = self._plan_at = 0  # places in the plan: of its end, and of the furthest chunk that was wanted
        self._planned: OrderedDict[int, int] = OrderedDict()  # chunk not wanted by a read yet -> its place in the plan
        self._planned_reads: Counter[int] = Counter()  # chunk -> planned reads of it that are to come
        self._under_way: Counter[int] = Counter()  # chunk -> reads that are under way and touch it
        self._ahead: dict[int, None] = {}  # wanted and not read
        self._read: OrderedDict[int, None] = OrderedDict()  # read and not given back, the last read last
        # Read and not given back, because the plan reads them again, the oldest first. At most `limit`.
        self._held: OrderedDict[int, None] = OrderedDict()

    def plan(self, chunks: Iterable[int]) -> None:
        """Name chunks that will be read, in this order, after those named before: each once for every read of it.

        Chunks that were passed over are not fetched any more when reads have come further than `limit` beyond them.
        """
        for chunk in chunks:
            if chunk in self._number:
                self._planned_reads[chunk] += 1
                self._planned.setdefault(chunk, self._plan_end)
                self._plan_end += 1

    def read_begins(self, chunks: Iterable[int]) -> None:
        """Say that a read of these chunks begins. Until `read_ends` they are no chunks of an ended run."""
        self._under_way.update(chunks)

    def read_ends(self, chunks: Iterable[int]) -> None:
        """Say that the read of these chunks has ended."""
        self._under_way.subtract(chunks)
        self._under_way += Counter()  # without those that nothing reads

    def begin(self) -> None:
        """Say that chunks will be read in file order, from the first one on. Nothing was read yet."""
        self._begins = True

    def before_read(self) -> list[int]:
        """Return the chunks that may be fetched now, before something is read."""
        found = [*islice(self._planned, max(0, self.limit - len(self._ahead)))]
        if self._begins and not found:
            self._first, self._high, self._asked_end = -self.limit, -1, -self.limit
            found = [*self._chunks[: self.limit]]
        self._ahead.update(dict.fromkeys(found))
        return found

    def wanted(self, chunk: int, following: Sequence[int] = ()) -> list[int]:
        """Return what to want now: the chunk that is read, what the same read needs after it, and a guess.

        Reads that are under way at once share `limit`.
        """
        number = self._number.get(chunk)
        if number is None:  # of a header
            return [chunk]
        self._begins = False
        if self._first <= number <= self._high + 2:
            self._high = max(self._high, number)
        else:
            self._first = self._high = number
            self._asked_end = max(self._number.get(each, number) for each in (chunk, *following))
        for each in chain([chunk], following):
            self._plan_at = max(self._plan_at, self._planned.pop(each, 0))
        while self._planned and next(iter(self._planned.values())) + self.limit < self._plan_at:
            self._planned.popitem(last=False)
        if self._planned or self._planned_reads[chunk]:
            guess: Iterable[int] = islice(self._planned, self.limit)
        else:
            run = max(0, self._high - self._asked_end)
            guess = self._chunks[self._high + 1 : self._high + 1 + min(run, self.limit)]
        wanted: dict[int, None] = {chunk: None}
        self._ahead.pop(chunk, None)
        # What a read needs takes the room of guesses.
        self._add(wanted, following, sum(each in self._under_way for each in self._ahead))
        self._add(wanted, guess, len(self._ahead))
        self._ahead[chunk] = None
        return [*wanted]

    def _add(self, wanted: dict[int, None], found: Iterable[int], taken: int) -> None:
        """Add chunks to what is wanted while there is room. `taken`: the part of `limit` that others have."""
        for each in found:
            if each in self._read or each in self._held:
                wanted[each] = None  # in case it was given back for want of slots
                continue
            taken += each not in self._ahead
            if len(wanted) > self.limit or (taken > self.limit and each not in self._ahead):
                break
            wanted[each] = self._ahead[each] = None

    def read(self, chunk: int) -> list[int]:
        """Record that a chunk was read. Return the chunks to give back: read ones, and those of an ended run."""
        self._ahead.pop(chunk, None)
        self._held.pop(chunk, None)
        self._read[chunk] = None
        self._read.move_to_end(chunk)
        if self._planned_reads[chunk] > 0:
            self._planned_reads[chunk] -= 1
        gone = []
        while len(self._read) > min(KEPT, self.limit):
            oldest, _ = self._read.popitem(last=False)
            if self._planned_reads[oldest]:
                self._held[oldest] = None
            else:
                gone.append(oldest)
        while len(self._held) > self.limit:  # perhaps the oldest is never read again, though it was planned
            gone.append(self._held.popitem(last=False)[0])
        next_planned = set(islice(self._planned, self.limit))
        ended = [  # what is a little behind the run, another thread may be about to read
            each
            for each in self._ahead
            if each not in self._under_way
            and each not in next_planned
            and not -min(KEPT, self.limit) <= self._number.get(each, self._high) - self._high <= self.limit
        ]
        for each in ended:
            del self._ahead[each]
        return gone + ended


SMALL_BYTES = 64 << 10  # results below this take memory from numpy, and not a mapping of their own
FRESH_BYTES = 4 << 20  # smaller tensors of others lie among memory that was used
KEPT_BYTES = 256 << 20  # memory of results that are gone, for the next ones
MOST_COPIERS = 4  # threads that copy for one read; the first write to new memory takes longer than the copy itself


class ReaderWork(RankWork):
    """A reader's state for several threads: those of `RankWork`, and any number that read."""

    state: ReaderState

    def begin_read(self, chunk: int, wanted: Iterable[int]) -> int:
        """Return the slot that has the chunk, when it is readable. It stays until `end_read`.

        `wanted`: chunks to ask for meanwhile, the chunk among them. Raises the error that ended the work, and
        ReaderClosed.
        """
        with self._place:
            self.state.want(wanted)
            self._wake_exchange()
            self.state.awaited[chunk] += 1
            try:
                while True:
                    if self.state.finished:
                        raise closed()
                    self._raise_if_stopped()
                    slot = self.state.begin_read(chunk)
                    if slot is not None:
                        return slot
                    self._place.wait()
            finally:
                self.state.awaited[chunk] -= 1

    def end_read(self, chunk: int, gone: Iterable[int]) -> None:
        """End a read, and give back chunks."""
        with self._place:
            self.state.end_read(chunk)
            self.state.give_back(gone, time.monotonic())
            self._wake_exchange()
            if self.state.error is not None:
                self._exchange.notify_all()  # `wait_for_reads`

    def wait_for_reads(self) -> None:
        """Return when no slot is being read. `stop` was called, so no read begins."""
        with self._exchange:
            self._exchange.wait_for(lambda: not self.state.reads)

    def want(self, chunks: Iterable[int]) -> None:
        """See `ReaderState.want`."""
        with self._place:
            self.state.want(chunks)
            self._wake_exchange()

    def pass_by(self, first: int, end: int) -> None:
        """See `ReaderState.pass_by`."""
        with self._place:
            self.state.pass_by(first, end)

    def close(self) -> None:
        """Let everything end that waits, and the work with it."""
        with self._place:
            self.state.close()
            self.state.drain(time.monotonic())
            self.state.abandon()
            self._end_waits()


class ModelReader(ChunkLoader):
    """Reads one model, as one reader of a group. Thread-safe."""

    def __init__(
        self,
        link: AgentLink,
        tables: SharedTables,
        chunks: Sequence[int],
        identity: RankIdentity,
        store: ObjectStore,
        fetch: FetchSettings,
        *,
        readers: int = 1,
        ahead_bytes: int = 256 << 20,
    ) -> None:
        """
        Args:
            chunks: Ids of the chunks with tensors, ascending.
            readers: Number of readers in the group.
            ahead_bytes: Limit of what is fetched before it is read. The arena's window may limit it further.
        """
        fetcher = ChunkFetcher(
            store, tables, fetch.attempts, LogFields(identity.load_id, identity.attempt, identity.rank)
        )
        state = ReaderState(identity, fetch.threads, MESSAGE_NUMBERS, heartbeat_s=fetch.heartbeat_s)
        work = ReaderWork(state, fetcher)
        super().__init__(link, identity.load_id, state, fetcher, store, work)
        self._reader_work = work
        self._tables = tables
        self._readers = readers
        self._ahead_bytes = ahead_bytes
        self._ahead = ReadAhead(chunks)
        self._ahead_lock = threading.Lock()
        self.delivered_bytes = 0  # copied for reads, since the model was opened
        self._memory = SegmentMemory(KEPT_BYTES)
        self._memory.keep(True)
        self._huge = HugePages()  # in the memory of others
        self._first_row = np.searchsorted(tables.chunks.shard, np.arange(len(tables.shards) + 1))
        self._copiers = min(MOST_COPIERS, usable_cpus())
        self._copying = ThreadPoolExecutor(self._copiers, "reader-copy")  # starts threads when they are used
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    # -- reading -----------------------------------------------------------------------------------------------

    def read(
        self,
        tensor: Tensor,
        shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        target: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        """Return a box of a tensor as bytes in row-major order, in memory of its own or in that of the target.

        `shape` is the tensor's, or another one for the same bytes. Raises the error that ended a fetch,
        ReaderClosed.
        """
        items = self._items(tensor, shape, offsets, sizes)
        size_bytes = items.size_bytes
        if target is not None:
            segment = Segment(target, self._huge if size_bytes >= FRESH_BYTES else None)
        elif size_bytes < SMALL_BYTES:
            segment = Segment(np.empty(size_bytes, np.uint8), None)
        else:
            (segment,) = self._memory.take((size_bytes,))
        self.copy(items, segment)
        return segment.data

    def copy(self, items: ReadItems, target: Segment) -> None:
        """Copy what the items describe to the target."""
        self._check_process()
        with self._ahead_lock:
            self.delivered_bytes += items.size_bytes
        chunks = items.chunk_ids().tolist()
        copies: deque[Future[None]] = deque()
        with self._ahead_lock:
            self._ahead.read_begins(chunks)
        try:
            for number, chunk in enumerate(chunks):
                following = chunks[number + 1 :]
                with self._ahead_lock:
                    wanted, at_once = self._ahead.wanted(chunk, following), min(self._copiers, self._ahead.limit)
                slot = self._reader_work.begin_read(chunk, wanted)
                copy = functools.partial(self._copy_chunk, items, target, chunk, slot)
                if len(chunks) == 1 or at_once == 1:
                    copy()
                    continue
                try:
                    copies.append(self._copying.submit(copy))
                except RuntimeError:  # the interpreter ends, and starts no thread any more
                    copy()
                while len(copies) >= at_once:
                    copies[0].result()
                    copies.popleft()
        finally:
            try:
                wait(copies)  # no thread writes to the target when this returns
            finally:
                with self._ahead_lock:
                    self._ahead.read_ends(chunks)
        for each in copies:
            each.result()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ReaderClosed(
                "the model was opened before this process was forked",
                hint="call safe_open in each process, or start processes with spawn",
            )

    def _copy_chunk(self, items: ReadItems, target: Segment, chunk: int, slot: int) -> None:
        """Copy what the items take from one chunk, and end the read of it."""
        gone = [chunk]
        try:
            place_items(lambda _: target, self._slot(slot), items, items.for_chunk(chunk))
            with self._ahead_lock:
                gone = self._ahead.read(chunk)
        finally:
            self._reader_work.end_read(chunk, gone)

    def read_bytes(self, shard: int, end: int) -> bytes:
        """Return the first bytes of a shard: its header, and what belongs to it."""
        return self.read(Tensor("", "U8", (end,), shard, 0, end), (end,), (0,), (end,)).tobytes()

    def first_chunk_after(self, tensor: Tensor) -> int:
        """Return the id of the first chunk that ends after the tensor."""
        first, end = self._first_row[tensor.shard], self._first_row[tensor.shard + 1]
        return int(first + np.searchsorted(self._tables.chunks.end[first:end], tensor.end, side="right"))

    def prefetch(self, boxes: Iterable[tuple[Tensor, Sequence[int], Sequence[int]]], *, only: bool = False) -> None:
        """Fetch what (tensor, offsets, sizes) touch, in this order, meanwhile. Raises ReaderClosed.

        Chunks that several of them touch stay for the next one, as many as are fetched ahead. `only`: all others are
        passed by.
        """
        self._check_process()
        if self._reader_work.state.finished:
            raise closed()
        planned: list[int] = []
        for tensor, offsets, sizes in boxes:
            if tuple(sizes) == tensor.shape:
                planned += range(*self._chunks_of(tensor))
            else:
                planned += self._items(tensor, tensor.shape, offsets, sizes).chunk_ids().tolist()
        if only:
            end = 0
            for chunk in [*sorted(set(planned)), len(self._tables.chunks)]:
                if chunk > end:
                    self._reader_work.pass_by(end, chunk)
                end = chunk + 1
        with self._ahead_lock:
            self._ahead.plan(planned)
            first = self._ahead.before_read()
        self._reader_work.want(first)

    def fetch_first(self) -> None:
        """Fetch the first chunks with tensors meanwhile, as many as may be fetched ahead. Nothing was read yet."""
        with self._ahead_lock:
            self._ahead.begin()
            first = self._ahead.before_read()
        self._reader_work.want(first)

    def pass_by(self, first: int, end: int) -> None:
        """Say that this reader will not read the chunks first .. end - 1. Raises ReaderClosed in a forked process."""
        self._check_process()
        self._reader_work.pass_by(first, end)

    def close(self) -> None:
        """Give everything back. Reads that wait raise ReaderClosed. Idempotent."""
        if os.getpid() == self._pid:
            self._reader_work.close()
            self._thread.join()
            self._copying.shutdown()
            self._memory.keep(False)  # what dies later is unmapped

    def _items(self, tensor: Tensor, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> ReadItems:
        chunks, size_bytes = self._tables.chunks, _size_bytes(tensor, shape, sizes)
        if not size_bytes:
            return ReadItems(*(np.empty(0, np.int64) for _ in ReadItems.__slots__))
        low, high = self._chunks_of(tensor)
        mine = ChunkTable(np.zeros(high - low, np.int32), chunks.start[low:high], chunks.end[low:high], None, None)
        region = Region(tuple(((offset, offset + size),) for offset, size in zip(offsets, sizes, strict=True)))
        piece = TensorSlice(
            tensor.name, tensor.dtype, tuple(shape), region, 0, tensor.start, 0, 0, size_bytes, size_bytes
        )
        items = expand_read_items([piece], mine)
        return ReadItems(items.chunk + low, *(getattr(items, name) for name in ReadItems.__slots__[1:]))

    def _chunks_of(self, tensor: Tensor) -> tuple[int, int]:
        """Return the first chunk of a tensor that is not empty, and the one after its last."""
        chunks = self._tables.chunks
        first, end = self._first_row[tensor.shard], self._first_row[tensor.shard + 1]
        low = first + np.searchsorted(chunks.end[first:end], tensor.start, side="right")
        high = first + np.searchsorted(chunks.start[first:end], tensor.end, side="left")
        return int(low), int(high)

    def _slot(self, slot: int) -> memoryview:
        if self._arena is None:
            raise closed()
        return self._arena.slot(slot)

    # -- what `ChunkLoader` calls ------------------------------------------------------------------------------

    def _attach(self, arena: Arena) -> None:
        room = max(1, arena.window_slots // (3 * self._readers))
        with self._ahead_lock:
            self._ahead.limit = max(1, min(room, self._ahead_bytes // arena.slot_bytes))
            first = self._ahead.before_read()
        self._reader_work.want(first)

    def _fetch_loop(self) -> None:
        clock = self._fetcher.clock()
        while (lease := self._work.next_lease()) is not None and self._arena is not None:
            begun_s, size_bytes = time.monotonic(), self._tables.chunks.byte_range(lease.chunk).size_bytes
            with self._arena.slot(lease.slot)[:size_bytes] as data:
                result = self._fetcher.fetch(lease, [data], clock)
            self._work.fetched(result, size_bytes, time.monotonic() - begun_s)

    def _run(self) -> None:
        try:
            self._join()
            self._exchange_loop()
        except LongshoreError as error:
            empty_frames(error)
            self.cancel(error)
        except BaseException as error:  # a bug: reads must end, not hang
            self.cancel(LongshoreError(f"{type(error).__name__} in a reader: {error}"))
        self._end(self._reader_work.wait_for_reads)


def _size_bytes(tensor: Tensor, shape: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the bytes of a box of a tensor."""
    elements = math.prod(shape)
    return tensor.size_bytes * math.prod(sizes) // elements if elements else 0
