"""One per node: owns the arena and its cache, hands out leases, watches the node's ranks, reports to the coordinator.

    coordinator --begin, rank_lost, end--> NodeLedger (pure) <--join, exchange-- ranks of this node
    threads: touch and announce_ready (slots get their memory), tick (deadlines, dead processes), beat (heartbeat)

Every decision is the ledger's; this class adds the lock, the clock, the waiting and the processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import threading
import time
import uuid
from dataclasses import replace

from actors.node.arena_filling import ArenaFilling
from actors.node.disk_writer import DiskWriter
from actors.node.node_ledger import NodeLedger
from actors.node.node_meter import NodeMeter
from actors.node.node_resources import host_pools, open_arena
from actors.node.survivors import Survivors
from actors.rank_link import CoordinatorLink
from cluster.config import Config
from cluster.logs import LogFields, configure_logs
from cluster.messages import JoinReply, NodeFacts, NodeJob, Orders, RankHello, RankUpdate, Words
from cluster.preview.held_chunks import HeldChunks, key_blocks
from cluster.reports.chunk_map import NodeView
from cluster.reports.report import NodeReport
from longshore.install_check import check_packages
from longshore.version import __version__
from storage.arena.arena import Arena
from storage.arena.arena_files import SHM_DIRECTORY, arena_path
from storage.arena.chunk_cache import ChunkCache
from storage.errors import ArenaError, LongshoreError
from storage.host.gpu_memory import gpu_memory
from storage.host.own_memory import PeakMemory
from storage.host.processes import ProcessId

_LOG = logging.getLogger("longshore.agent")
LONGEST_WAIT_S = 5.0  # of a rank for orders; it must not outlive the rank's patience with the agent


class NodeAgent:
    """Plain class; `actors.coordination.spawn` makes the actor. Thread-safe: many calls wait in it at once."""

    def __init__(
        self,
        config: Config,
        cluster_id: str,
        node_id: str,
        host: str = "",
        coordinator: CoordinatorLink | None = None,
        directory: str = SHM_DIRECTORY,
    ) -> None:
        check_packages()
        self._config = config
        self._node_id = node_id
        self._host = host or socket.gethostname()
        self._coordinator = coordinator
        if coordinator is not None:
            configure_logs(config.logs)
        self._about = LogFields(node=self._host).extra
        self._incarnation = uuid.uuid4().hex[:12]
        self._heard_s = time.monotonic()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._error: LongshoreError | None = None
        self._asked_for: tuple[str, ...] = ()
        self._memory: dict[str, PeakMemory] = {}  # of this process, by load
        self._arena: Arena | None = None
        self._survivors = Survivors("", self._incarnation, restored=False)
        self._threads: list[threading.Thread] = []
        try:
            self._arena, restored = open_arena(config, arena_path(cluster_id, node_id, directory), directory)
            cache = ChunkCache(self._arena.slot_count, journal=self._arena, ready_slots=self._arena.ready_slots)
            self._survivors = Survivors(self._arena.path, self._incarnation, restored=restored)
            leases = cache.restore(self._survivors.left, time.monotonic()) if restored else []
            self._disk = DiskWriter(config, self._arena, cache, self._changed, self._stopped)
            self._ledger = NodeLedger(cache, self._arena.slot_bytes, restored=leases, disk=self._disk.backlog)
            self._filling = ArenaFilling(config, self._arena, self._ledger, self._changed, self._stopped)
        except LongshoreError as error:
            # Raised from calls, not from here: an actor whose constructor fails loses its error's type.
            self._error = error
            return
        self._meter = NodeMeter(directory, self._disk, self._stopped)
        filling, gpus = self._filling, (self._meter.watch_gpus,) if coordinator is not None else ()
        for work in (*gpus, filling.touch, filling.announce_ready, self._tick, self._beat, self._disk.disk_write):
            thread = threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True)
            self._threads.append(thread)
            thread.start()

    # -- coordinator -------------------------------------------------------------------------------------------

    def facts(self) -> NodeFacts:
        """What a plan needs to know. Raises ArenaTooLarge when this node cannot have its arena."""
        with self._changed:
            arena = self._usable()
        return NodeFacts(
            node_id=self._node_id,
            host=self._host,
            arena_bytes=arena.slot_count * arena.slot_bytes,
            pools=host_pools(os.path.dirname(arena.path)),
            gpus=gpu_memory(),
            version=__version__,
        )

    def begin(self, job: NodeJob, shared: bytes = b"") -> bool:
        """Take on this node's share of a load. False: other loads hold the slots it must have; ask again.

        `shared`: of a job that came without (Ray hands over what an argument refers to). Raises ArenaTooSmall.
        """
        job = replace(job, shared=job.shared or shared)
        with self._changed:
            self._usable()
            memory = PeakMemory()
            begun = self._ledger.begin(job, time.monotonic())
            if begun:
                self._memory.setdefault(job.load_id, memory)
            self._changed.notify_all()
            return begun

    def holds(self, keys: bytes) -> HeldChunks:
        """Which of those chunks are in the arena and on disk. A look only; their keys come one after the other."""
        found: list[tuple[bool, bool]] = []
        for block in key_blocks(keys):
            with self._changed:
                self._usable()
                found += self._ledger.held(block)
        return HeldChunks.of(found)

    def rank_lost(self, load_id: str, rank: int, incarnation: int) -> None:
        """A rank's worker is dead; `incarnation` will take its place."""
        with self._changed:
            self._usable()
            self._ledger.rank_lost(load_id, rank, incarnation, time.monotonic())
            self._changed.notify_all()

    def keep_record(self, load_id: str, record: bytes) -> None:
        """Notes of the coordinator, for a coordinator that has lost them."""
        with self._changed:
            self._usable()
            self._ledger.keep_record(load_id, record)

    def report(self, load_id: str) -> NodeReport:
        """This node's share of a finished load."""
        with self._changed:
            self._usable()
            memory = self._memory.get(load_id) or PeakMemory()
            memory.sample()
            report = self._ledger.report(load_id, self._node_id, self._host)
        return replace(report, peak_host_bytes=memory.peak_bytes, baseline_host_bytes=memory.baseline_bytes)

    def chunks_now(self, load_id: str) -> NodeView:
        """The load's shards, and where each chunk is on this node, for who watches. Raises ModelNotFound."""
        with self._changed:
            self._usable()
            return self._ledger.chunks_now(load_id)

    def end(self, load_id: str) -> None:
        """The load is over, or its model released: ranks that still work on it are told to stop."""
        with self._changed:
            if self._arena is None or self._stopped.is_set():
                return  # nothing is left of it
            self._memory.pop(load_id, None)
            self._ledger.end(load_id, time.monotonic())
            self._changed.notify_all()

    def shutdown(self) -> None:
        """Give the arena back. The agent does nothing after that. Idempotent."""
        self._stopped.set()
        if self._arena is None:
            return
        with self._changed:
            self._arena.unlink()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        with self._changed:  # so that nobody is in the middle of a slot record
            self._arena.close()

    # -- ranks -------------------------------------------------------------------------------------------------

    def join(self, hello: RankHello) -> JoinReply:
        """A rank introduces itself, at its start and after this agent was restarted."""
        with self._changed:
            arena = self._usable()
            settled = self._survivors.settles(hello.process, hello.others)
            answer = self._ledger.join(hello, time.monotonic(), settled=settled)
            self._changed.notify_all()
            return JoinReply(
                arena.path,
                known=answer is True,
                arena_epoch=arena.epoch,
                agent=self._incarnation,
                stop=answer if isinstance(answer, LongshoreError) else None,
                batch=self._ledger.batch(hello) if answer is True else 1,
                disk_path=self._disk.path,
            )

    def exchange(self, update: RankUpdate) -> Orders:
        """What the rank did, for what it is to do next; waits up to `update.wait_s` for something to do."""
        give_up_s = time.monotonic() + min(update.wait_s, LONGEST_WAIT_S)
        with self._changed:
            self._usable()
            settled = update.leaving and self._survivors.settles(update.process, update.others)
            orders, others_may_go_on = self._ledger.exchange(update, time.monotonic(), settled=settled)
            if others_may_go_on:
                self._changed.notify_all()
            while orders is None and (left_s := give_up_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
                self._usable()
                orders = self._ledger.orders_for(update, time.monotonic())
            return orders or self._ledger.no_orders(update)

    def exchange_packed(self, update: bytes) -> bytes:
        """`exchange`, packed by a process of ours and for it."""
        return pickle.dumps(self.exchange(pickle.loads(update)), protocol=5)

    def check_in(self, process: ProcessId, words: Words) -> float:
        """Seconds since this agent last heard the coordinator: by this, workers know that they are orphans.

        `words`: (arena path, agent) by whose word ranks of the process use the arena now.
        """
        with self._changed:
            if process in self._survivors.left and self._survivors.settles(process, words):
                self._ledger.settle(process)
                self._changed.notify_all()
        return self.coordinator_age_s()

    def coordinator_age_s(self) -> float:
        """Seconds since this agent last heard the coordinator."""
        return time.monotonic() - self._heard_s

    # -- threads -----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Deadlines and deaths."""
        while not self._stopped.wait(self._config.heartbeat_s / 2):
            with self._changed:
                processes = self._ledger.processes()
                for memory in self._memory.values():
                    memory.sample()
            dead = [process for process in processes if not process.is_alive()]
            mapping = self._survivors.mapping()
            with self._changed:
                now_s = time.monotonic()
                for process in (unmapped := self._survivors.take_unmapped(mapping)):
                    self._ledger.settle(process)
                changed = self._ledger.expire(now_s)
                for process in dead:
                    self._ledger.process_dead(process, now_s)
                overdue = self._ledger.overdue(now_s)
                if changed or dead or unmapped:
                    self._changed.notify_all()
            for process in overdue:
                if process != ProcessId.current():  # (a test, or a program of one process, hosts agent and ranks)
                    _LOG.warning(
                        "process %d is killed: it holds a slot that was taken from it", process.pid, extra=self._about
                    )
                    process.kill()  # it neither let go of its slot nor died: only its death makes the slot safe

    def _beat(self) -> None:
        """Heartbeat to the coordinator; an agent that has heard none for long ends itself."""
        if self._coordinator is None:
            return
        me = self._node_id, self._host, self._incarnation
        while not self._stopped.wait(self._config.heartbeat_s):
            with self._changed:
                beat = self._ledger.beat(*me, time.monotonic(), self._asked_for)
            reply = None
            with contextlib.suppress(Exception):  # a thread that died of it would make this node look dead
                beat = self._meter.complete(beat)
                reply = self._coordinator.heartbeat(beat)
            silent_s = 0.0 if reply else time.monotonic() - self._heard_s
            if (reply and reply.node_dead) or silent_s > self._config.orphan_after_s:
                self.shutdown()  # in order: a SIGKILL, as of Ray on a node that it gave up, would leave the arena
                os._exit(1)
            if reply is None:
                continue
            self._heard_s = time.monotonic()
            self._meter.answered()
            with self._changed:
                self._ledger.answered(beat)
            self._asked_for = reply.unknown_loads
            for load_id in reply.ended_loads:
                self.end(load_id)

    def _usable(self) -> Arena:
        if (error := self._error or self._filling.error) is not None:
            raise error
        if self._arena is None or self._stopped.is_set():
            raise ArenaError("this node's agent has been shut down", node=self._node_id)
        return self._arena
