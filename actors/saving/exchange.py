"""The ranks of a save: small collectives, the pieces of parts, and the watch that ends a save when a rank is gone.

    Ranks.gather(data)               bytes of every rank, on every rank
    Exchange.run(round, buffers)     pieces from and to other ranks; the buffers of `Slots` have whole parts then

A process group of its own carries all of it (gloo, made once), so a save mixes with no collective of the training.
Everything that can block runs in one thread. The caller waits for that thread and for the watch:

    every rank writes a heartbeat to the job's store, and reads that of the next rank
    a rank that raises, or that finds the next rank dead, writes the reason --> every other rank ends with SaveError

Ranks without a process group meet at MASTER_ADDR and MASTER_PORT, as those of torch.distributed do. The connection and
the group stay until the process ends, for later saves: a port that is closed and opened again would mix them up.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch

from actors.saving.held import HeldTensors, byte_slice
from cluster.errors import SaveError, SaveRefused
from cluster.saving.held import Merged
from cluster.saving.plan import Piece, PlannedPart, Round, Schedule, blocks
from cluster.saving.shards import ShardLayout
from storage.errors import LongshoreError
from storage.problems import without_secrets

T = TypeVar("T")
MAX_GATHERED_BYTES = 256 << 20  # of one rank in one collective
_groups: dict[str, tuple[Any, Any]] = {}  # (store of the job, gloo group) by the name of the caller's group
_saves: dict[str, int] = {}  # saves that this process began, by the name of the group
_stores: dict[str, Any] = {}  # stores of ranks without a process group, by the name of the group


def forget_groups() -> None:
    """Forget the groups of earlier saves. Call it when the process group that they belong to is destroyed."""
    _groups.clear()
    _saves.clear()


@atexit.register
def _leave_stores() -> None:
    """Close groups and connections before the interpreter ends its threads."""
    _groups.clear()
    _stores.clear()


class Agreed(Exception):
    """Carries an error that every rank raises by itself, so none has to be told. `Ranks` raises it at its end."""

    def __init__(self, error: LongshoreError) -> None:
        super().__init__(str(error))
        self.error = error


class Ranks:
    """The ranks of one save. One rank alone needs no process group.

    As a context manager it leaves at the end of its block, with the error that ends it. `Agreed` ends as its error.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Join the ranks.

        Args:
            process_group: Group of torch.distributed. None: the default group if there is one.
            rank: Number of this rank, if there is no group. Used with `world_size` only.
            world_size: Number of ranks, if there is no group. Without both, this process is alone.
            timeout_s: Longest time in seconds to wait for the others.

        Raises:
            SaveRefused: There is no group, and the ranks cannot meet. Or this process is not in the group.
            SaveError: The others do not come.
        """
        self.rank, self.size = 0, 1
        self._timeout_s = timeout_s
        self._watch: _Watch | None = None
        self._group: Any = None
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="save-exchange", daemon=True)
        import torch.distributed as dist

        own = process_group is None and not (dist.is_available() and dist.is_initialized())
        if not own:
            self.rank = dist.get_rank(process_group)
            if self.rank < 0:
                raise SaveRefused(
                    f"rank {dist.get_rank()} is not in process_group", hint="call save on the ranks of that group only"
                )
            self.size = dist.get_world_size(process_group)
            members = dist.get_process_group_ranks(process_group)
        elif rank is not None and world_size is not None:
            if not 0 <= rank < world_size:
                raise SaveRefused(
                    f"rank is {rank}; ranks of a world_size of {world_size} are from 0 to {world_size - 1}"
                )
            self.rank, self.size = rank, world_size
            members = list(range(world_size))
        else:
            members = [0]
        self.global_ranks = {each: number for number, each in enumerate(members)}  # global rank -> rank here
        if self.size == 1:
            return
        if own:
            self._name, store = _meet(self.rank, self.size, timeout_s)
        else:
            self._name = f"{getattr(process_group, 'group_name', '')}/{'-'.join(map(str, members))}"
            store = dist.distributed_c10d._get_default_store()
        number = _saves[self._name] = _saves.get(self._name, 0) + 1
        prefix = f"longshore/save/{self._name}/{number}"
        self._watch = _Watch(store, prefix, self.rank, self.size, timeout_s)
        self._worker.start()
        try:
            self._group = self.run(lambda: self._join(store, prefix))
        except BaseException as error:
            self.close(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Agreed):
            self.close()
            raise error.error from None
        self.close(error)

    def _join(self, store: Any, prefix: str) -> Any:
        import torch.distributed as dist

        timeout = timedelta(seconds=self._timeout_s)
        known, group = _groups.get(self._name, (None, None))
        if known is not store:
            # Not by `dist.new_group`, which gives it other names on ranks that belong to more groups than others.
            meeting = dist.distributed_c10d.PrefixStore(prefix, store.clone())
            group = dist.ProcessGroupGloo(meeting, self.rank, self.size, timeout)
            _groups[self._name] = store, group
        # One group whatever the limits are, so that ranks whose limits differ can compare them.
        group._set_default_timeout(timeout)
        return group

    def run(self, call: Callable[[], T]) -> T:
        """Run something that waits for other ranks. Raises SaveError, naming a rank, when the save has ended there."""
        if self._watch is None:
            return call()
        done: Future[T] = Future()
        self._work.put((call, done))
        self._watch.waits = True
        ends_s = time.monotonic() + self._timeout_s * 1.5 + 5  # the group's own limit comes first
        while True:
            try:
                result = done.result(timeout=0.1)
                self._watch.waits = False
                return result
            except TimeoutError:
                if done.done():  # raised by the call itself
                    self._fail(done.exception())
                if self._watch.failure is not None or time.monotonic() > ends_s:
                    self._fail(None)
            except Exception as error:
                self._fail(error)

    def check(self) -> None:
        """Raise SaveError if another rank has ended the save."""
        if self._watch is not None and self._watch.failure is not None:
            self._fail(None)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in their order. Every rank calls it."""
        if self._watch is None:
            return [data]
        import torch.distributed as dist

        def gather() -> list[bytes]:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
            counts = [int(size) for size in sizes]
            if max(counts) > MAX_GATHERED_BYTES:
                raise SaveError(f"a rank has {max(counts)} bytes to say; at most {MAX_GATHERED_BYTES} are taken")
            if not max(counts):
                return [b""] * self.size
            mine = torch.zeros(max(counts), dtype=torch.uint8)
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
            found = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(found, mine, group=self._group)
            return [one.numpy()[:count].tobytes() for one, count in zip(found, counts, strict=True)]

        return self.run(gather)

    def broadcast(self, data: bytes, source: int) -> bytes:
        """Return the bytes of rank `source`, on every rank. The other ranks give b""."""
        if self._watch is None:
            return data
        import torch.distributed as dist

        def broadcast() -> bytes:
            size = torch.tensor([len(data)])
            dist.broadcast(size, group=self._group, group_src=source)
            count = int(size)
            if count > MAX_GATHERED_BYTES:
                raise SaveError(f"rank {source} has {count} bytes to say; at most {MAX_GATHERED_BYTES} are taken")
            buffer = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(count, dtype=torch.uint8)
            )
            if count:
                dist.broadcast(buffer, group=self._group, group_src=source)
            return buffer.numpy().tobytes()

        return self.run(broadcast)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Start to receive. Call it, and `send`, within `run`; the result has `wait`."""
        import torch.distributed as dist

        return dist.irecv(tensor, group=self._group, group_src=source, tag=tag)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Any:
        """Start to send. The tensor stays as it is until the result's `wait` returns."""
        import torch.distributed as dist

        return dist.isend(tensor, group=self._group, group_dst=target, tag=tag)

    def stage(self, text: str) -> None:
        """Say what this rank does now, for the message when it does not come further."""
        if self._watch is not None:
            self._watch.stage = text

    def note_visible(self, hint: str) -> None:
        """Give all ranks the hint for an error that ends the save from now on, as its revision is or may be visible."""
        if self._watch is not None:
            self._watch.note_hint(hint)

    def close(self, error: BaseException | None = None) -> None:
        """Leave. With an error, all other ranks end their save with SaveError, which quotes it. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if error is not None:
            watch.post(self.rank, without_secrets(f"{type(error).__name__}: {error}"))
            _groups.pop(self._name, None)  # messages of this save may still be on their way
            if self.global_ranks.get(0) == self.rank:  # the store may end with this process
                watch.wait_until_told()
        watch.close()
        self._work.put(None)
        if error is None:  # or it may wait for another rank for long
            # The interpreter aborts if it ends while this thread frees tensors.
            self._worker.join(5)

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            call, done = job
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

    def _fail(self, error: BaseException | None) -> None:
        """Raise SaveError for the rank that ended the save. Wait until it is known, within the time limit."""
        watch = self._watch
        if isinstance(error, SaveError) or watch is None:
            raise error or SaveError("the save has ended")
        ends_s = time.monotonic() + watch.dead_after_s + 2
        while watch.failure is None and time.monotonic() < ends_s:
            time.sleep(0.05)
        if watch.failure is not None:
            rank, message = watch.failure
            raise SaveError(
                f"rank {rank} ended the save: {message}",
                hint=watch.hint() or "nothing of it is visible; save again, which continues where this save stopped",
                rank=rank,
            ) from error
        raise SaveError(
            "the ranks did not come further within the time limit",
            hint="check the ranks' logs; raise save_timeout_s if one of them is only slow",
            stages=watch.stages(),
            save_timeout_s=self._timeout_s,
        ) from error


def _meet(rank: int, world_size: int, timeout_s: float) -> tuple[str, Any]:
    """Return a name of the ranks of a job that has no process group, and the store where they meet."""
    from torch.distributed.rendezvous import rendezvous

    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise SaveRefused(
            f"there is no process group, and {' and '.join(missing)} are not set, where the ranks would meet",
            hint="start the ranks with torchrun, set both variables, or call torch.distributed.init_process_group",
        )
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    name = f"{place}/{world_size}"
    if name not in _stores:
        try:
            _stores[name], *_ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s)))
        except (RuntimeError, ValueError) as error:
            raise SaveError(
                f"the {world_size} ranks did not meet at {place}",
                hint="check that every rank calls save, and that MASTER_ADDR and MASTER_PORT are those of rank 0",
                rank=rank,
                save_timeout_s=timeout_s,
            ) from error
    return name, _stores[name]


class _Watch:
    """Heartbeats in the job's store. Its own thread and connection."""

    def __init__(self, shared: Any, prefix: str, rank: int, size: int, timeout_s: float) -> None:
        from torch.distributed import distributed_c10d

        self.failure: tuple[int, str] | None = None  # (rank, reason)
        self.stage = "begins"
        self.waits = False
        self.dead_after_s = min(30.0, max(timeout_s / 2, 0.5))
        self._timeout_s = timeout_s
        self._pause_s = min(1.0, self.dead_after_s / 5)
        self._rank, self._size = rank, size
        # A connection of its own: another call may wait in the shared one.
        self._store: Any = distributed_c10d.PrefixStore(prefix, shared.clone())
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="save-watch", daemon=True)
        self._thread.start()

    def post(self, rank: int, message: str) -> None:
        """Write who ended the save and why, unless somebody has."""
        with contextlib.suppress(Exception), self._lock:
            if not self._store.check(["failed"]):
                self._store.set("failed", json.dumps([rank, message[:2000]]))

    def wait_until_told(self) -> None:
        """Wait, for seconds at most, until all others but the rank that ended the save have read about it."""
        ends_s = time.monotonic() + min(5.0, self.dead_after_s)
        with contextlib.suppress(Exception):
            with self._lock:
                failed = int(json.loads(self._store.get("failed"))[0]) if self._store.check(["failed"]) else self._rank
            keys = [f"told/{rank}" for rank in range(self._size) if rank not in (self._rank, failed)]
            while keys and time.monotonic() < ends_s:
                with self._lock:
                    if self._store.check(keys):
                        return
                time.sleep(0.05)

    def note_hint(self, hint: str) -> None:
        """Write the hint that `hint` returns on every rank."""
        with contextlib.suppress(Exception), self._lock:
            self._store.set("hint", hint)

    def hint(self) -> str:
        """Return the hint that a rank wrote last, or ""."""
        with contextlib.suppress(Exception), self._lock:
            return str(self._store.get("hint").decode()) if self._store.check(["hint"]) else ""
        return "it is not known whether its revision is visible: `longshore saves` says which one is published"

    def stages(self) -> str:
        """Return what every rank did last, for a message."""
        found = []
        with contextlib.suppress(Exception), self._lock:
            for rank in range(min(self._size, 64)):
                key = f"beat/{rank}"
                text = self._store.get(key).decode().partition(" ")[2] if self._store.check([key]) else "not begun"
                found.append(f"{rank}: {text}")
        return "; ".join(found)

    def close(self) -> None:
        """Stop the thread. Others take this rank for alive from now on."""
        self._stop.set()
        self._thread.join(5)
        with contextlib.suppress(Exception), self._lock:
            self._store.set(f"beat/{self._rank}", "left ended")

    def _run(self) -> None:
        count, seen = 0, ""
        began_s = changed_s = trouble_s = time.monotonic()
        neighbour = (self._rank + 1) % self._size
        while not self._stop.wait(self._pause_s if count else 0):
            count += 1
            try:
                with self._lock:
                    self._store.set(f"beat/{self._rank}", f"{count} {self.stage}")
                    if self._store.check(["failed"]):
                        rank, message = json.loads(self._store.get("failed"))
                        self._store.set(f"told/{self._rank}", "")
                        self.failure = (int(rank), str(message))
                        return
                    key = f"beat/{neighbour}"
                    found = self._store.get(key).decode() if self._store.check([key]) else ""
                now_s = trouble_s = time.monotonic()
            except Exception:
                if time.monotonic() - trouble_s > self.dead_after_s:
                    self.failure = (0, "the store of the job does not answer, which rank 0 or the launcher hosts")
                    return
                continue
            if found != seen:
                seen, changed_s = found, now_s
            if not seen:
                if now_s - began_s > self._timeout_s:
                    self.post(neighbour, f"it did not call save within {self._timeout_s:g} s")
            elif not seen.startswith("left ") and now_s - changed_s > self.dead_after_s:
                self.post(neighbour, f"it died or does not answer (it was at: {seen.partition(' ')[2]})")


class Peak:
    """The bytes of other ranks that this rank holds now, and the most so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now_bytes = 0
        self.peak_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Count bytes that arrived; a negative number for those that are released."""
        with self._lock:
            self._now_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self._now_bytes)


class Slots:
    """Buffers of one part each, made when they are first needed and used again."""

    def __init__(self, count: int, plan: Schedule, layouts: Sequence[ShardLayout], *, pinned: bool) -> None:
        """Make room for `count` parts of the plan. `pinned`: in memory that a GPU copies to directly."""
        mine = [part for work in plan.rounds for part in work.assemble]
        self._size_bytes = max((layouts[part.shard].parts[part.part].size_bytes for part in mine), default=0)
        self._pinned = pinned and torch.cuda.is_available()
        self._left = count
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def take(self, check: Any) -> torch.Tensor:
        """Return a free buffer. Waits for one, and calls `check` meanwhile."""
        if self._left and self._free.empty():
            self._left -= 1
            return torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        while True:
            try:
                return self._free.get(timeout=0.2)
            except queue.Empty:
                check()

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back, from any thread."""
        self._free.put(buffer)


class Exchange:
    """The messages of a rank: what it sends in a round, and how the parts that it assembles are put together."""

    def __init__(
        self, ranks: Ranks, layouts: Sequence[ShardLayout], merged: Merged, held: HeldTensors, foreign: Peak
    ) -> None:
        """Exchange the pieces of these files between the ranks. Bytes of others are counted in `foreign`."""
        self._ranks = ranks
        self._layouts = layouts
        self._tensors = merged.tensors
        self._held = held
        self._foreign = foreign
        self._starts = [{tensor.name: tensor.start for tensor in layout.tensors} for layout in layouts]
        self._most_bytes = max((part.size_bytes for layout in layouts for part in layout.parts), default=0)
        self._tag = 0

    def run(self, work: Round, buffers: Sequence[torch.Tensor]) -> list[int]:
        """Fill the buffers with the parts of a round. Return the bytes of other ranks in each of them."""
        receives: list[tuple[torch.Tensor, int, int]] = []
        arrivals: list[tuple[torch.Tensor, PlannedPart, int, torch.Tensor]] = []
        foreign: list[int] = []
        staged_bytes = 0
        for part, buffer in zip(work.assemble, buffers, strict=True):
            tag, self._tag = self._tag, self._tag + 1
            self._fill_header(part, buffer)
            foreign.append(sum(part.message_bytes(rank) for rank in part.sources if rank != self._ranks.rank))
            for rank, pieces in part.sources.items():
                if rank == self._ranks.rank:
                    self._place(part, pieces, self._message(pieces), buffer)
                    continue
                target = self._direct(part, pieces, buffer)
                if target is None:
                    target = torch.empty(part.message_bytes(rank), dtype=torch.uint8)
                    staged_bytes += len(target)
                    arrivals.append((target, part, rank, buffer))
                receives.append((target, rank, tag))
        self._foreign.add(sum(foreign) + staged_bytes)
        if receives or work.send:
            self._ranks.run(lambda: self._transfer(receives, work))
        for message, part, rank, buffer in arrivals:
            self._place(part, part.sources[rank], message, buffer)
        self._foreign.add(-staged_bytes)
        return foreign

    def _transfer(self, receives: Sequence[tuple[torch.Tensor, int, int]], work: Round) -> None:
        """Receive and send. Every rank starts all receives of a round first, so no send waits for a send."""
        started = [self._ranks.receive(tensor, rank, tag) for tensor, rank, tag in receives]
        sending: list[tuple[Any, torch.Tensor]] = []
        copied_bytes = 0
        for rank, tag, pieces in work.send:
            message = self._message(pieces)
            if message.is_cuda:
                message = message.cpu()
            copied_bytes += len(message) if not self._is_view(pieces) else 0
            sending.append((self._ranks.send(message, rank, tag), message))
            if copied_bytes > self._most_bytes:  # copies are bounded as the parts are
                for handle, _ in sending:
                    handle.wait()
                sending, copied_bytes = [], 0
        for handle, _ in sending:
            handle.wait()
        for handle in started:
            handle.wait()

    def _fill_header(self, part: PlannedPart, buffer: torch.Tensor) -> None:
        if part.part == 0:
            header = self._layouts[part.shard].header
            buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)

    def _local(self, piece: Piece) -> torch.Tensor:
        return self._held.local_of(self._tensors[piece.tensor], piece.region)

    def _is_view(self, pieces: Sequence[Piece]) -> bool:
        local = self._local(pieces[0])
        return len(pieces) == 1 and local.is_contiguous() and not local.is_cuda

    def _message(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the bytes of this rank's pieces, in order."""
        found = [byte_slice(self._local(piece), piece.local_start, piece.local_end) for piece in pieces]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _direct(self, part: PlannedPart, pieces: Sequence[Piece], buffer: torch.Tensor) -> torch.Tensor | None:
        """Return the place in the buffer of a message that is one run there, or None."""
        if len(pieces) != 1:
            return None
        tensor = self._tensors[pieces[0].tensor]
        region, _ = tensor.regions.held[pieces[0].region]
        runs = blocks(tensor.regions.shape, region, pieces[0].start, pieces[0].end)
        first, more = next(runs), next(runs, None)
        if more is not None or first.times > 1:
            return None
        at = self._at(part, pieces[0]) + first.into
        return buffer[at : at + first.run]

    def _at(self, part: PlannedPart, piece: Piece) -> int:
        """Return where the range of a piece begins in the part."""
        start = self._starts[part.shard][self._tensors[piece.tensor].spec.name]
        return start + piece.start - self._layouts[part.shard].parts[part.part].start

    def _place(self, part: PlannedPart, pieces: Sequence[Piece], message: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy the bytes of a message to their places in the part."""
        used = 0
        for piece in pieces:
            tensor = self._tensors[piece.tensor]
            region, _ = tensor.regions.held[piece.region]
            own = message[used : used + piece.size_bytes]
            used += piece.size_bytes
            at = self._at(part, piece)
            runs = list(blocks(tensor.regions.shape, region, piece.start, piece.end))
            if len(runs) > 1 and own.is_cuda:
                own = own.cpu()
            for run in runs:
                into = buffer[at + run.into :]
                source = own[run.source :]
                into.as_strided((run.times, run.run), (run.into_step, 1)).copy_(
                    source.as_strided((run.times, run.run), (run.source_step, 1))
                )
