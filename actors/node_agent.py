"""The node's agent: owns the arena and its cache, grants leases, watches the node's ranks, reports to the coordinator.

    coordinator --begin, rank_lost, end--> NodeLedger (pure) <--join, exchange-- ranks of this node
    threads: touch and announce_ready (slots get their memory), tick (deadlines, dead processes), beat (heartbeat)

There is one agent per node. The ledger makes every decision. `NodeAgent` adds the lock, the clock, the waiting and the
processes. `PeerShelf` is what it has for other nodes.

`Survivors` are processes that mapped the node's arena when its agent was restarted. The previous agent may have granted
each of them any chunk. So every chunk is held for a survivor until it is known to read none. A process stops being a
survivor when:

- it reports that it reads none, in a rank's message, or by `check_in` (an idle worker has no rank to send messages);
- it no longer maps the arena; or
- it is dead.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from actors.links import CoordinatorLink
from actors.node.chunk_flow import JobTables
from actors.node.disk_backlog import DiskWriter
from actors.node.lending import LendingFacts, model_key
from actors.node.node_ledger import NodeLedger
from actors.node.node_load import NodeLoad
from actors.node.node_resources import ArenaFilling, KeptMemory, NodeMeter, host_pools, open_arena
from actors.rank.loader import PROCESS_ARENAS
from cluster.config import Config
from cluster.errors import AgentEnded, VersionMismatch
from cluster.messages import (
    ArenaAccess,
    BeatReply,
    JoinReply,
    Lenders,
    Members,
    NodeFacts,
    NodeJob,
    Orders,
    RankHello,
    RankUpdate,
    SlotHolder,
    pack_message,
    unpack_message,
)
from cluster.node_settings import NodeSettings, node_name
from cluster.planning.chunk_keys import HeldChunks, key_blocks
from cluster.telemetry.chunk_map import NodeView
from cluster.telemetry.logs import LogFields, RepeatedWork, configure_logs
from cluster.telemetry.report import NodeReport
from longshore.installation import __version__, check_packages
from storage.arena.arena import Arena
from storage.arena.arena_files import SHM_DIRECTORY, arena_path
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import CachedChunk
from storage.disk.files import DiskReader
from storage.errors import LongshoreError
from storage.host.memory import PeakMemory, gpu_memory
from storage.host.processes import ProcessId, may_map, processes_mapping
from storage.peers import Asker, NoChunk, Peer
from storage.peers.chunk_server import ChunkServer, ServedChunk
from storage.peers.nixl_carrier import RegisteredWindow


class Survivors:
    """Processes that may still use grants of an earlier agent. Not thread-safe."""

    def __init__(self, path: str, agent: str, *, restored: bool) -> None:
        """`agent`: this agent's incarnation. An arena that was not `restored` is new and has no survivors.

        This process is one if it has readers or ranks: it has become the host after another.
        """
        self._path, self._agent = path, agent
        me, has_users = ProcessId.current(), any(claim[0] == path for claim in PROCESS_ARENAS.access())
        self.left = {p for p in processes_mapping(path) if p != me or has_users} if restored else set()

    def settles(self, process: ProcessId, access: ArenaAccess) -> bool:
        """Return whether no rank with this access uses a grant of an earlier agent. If so, drop the survivor."""
        settled = all(agent == self._agent for path, agent in access if path == self._path)
        if settled:
            self.left.discard(process)
        return settled

    def mapping(self) -> set[ProcessId]:
        """Return the survivors that map the arena, or whose mappings the kernel does not show."""
        return {process for process in set(self.left) if may_map(process, self._path)}

    def take_unmapped(self, mapping: set[ProcessId]) -> set[ProcessId]:
        """Drop and return the survivors that were not among `mapping`."""
        gone = self.left - mapping
        self.left -= gone
        return gone


class PeerShelf:
    """The chunks that an agent has for other nodes: a `ChunkShelf`. Each call takes the agent's lock.

    A chunk of the arena is held, as for a rank, until its receiver has it. One that only the disk has is sent from
    there as it is: its receiver checks it.
    """

    def __init__(
        self,
        changed: threading.Condition,
        ledger: NodeLedger,
        usable: Callable[[], Arena],
        incarnation: str,
        disk: DiskReader | None,
    ) -> None:
        """`changed`: the agent's lock. `usable`: returns its arena, or raises LongshoreError when it ends."""
        self._disk = disk
        self.node = incarnation
        self._changed = changed
        self._ledger = ledger
        self._usable = usable
        self._numbers = itertools.count(1)
        self._process = ProcessId.current()
        self._waiting: dict[tuple[str, int], list[threading.Event]] = {}  # (load, chunk) -> requests that wait for it

    def load_key(self, load_id: str) -> bytes | None:
        """See `ChunkShelf`."""
        with self._changed:
            return self._ledger.peer_key(load_id) or None

    def take(self, load_id: str, chunk: int, asker: Asker, wait_s: float) -> ServedChunk | NoChunk:
        """See `ChunkShelf`."""
        reader, give_up_s = f"peer-{next(self._numbers)}", time.monotonic() + wait_s
        came, wanted = threading.Event(), (load_id, chunk)
        while True:
            with self._changed:
                self._forget(wanted, came)
                arena = self._usable()
                found = self._ledger.take_for_peer(*wanted, self._process, reader, asker, time.monotonic())
                if not isinstance(found, NoChunk):
                    return self._served(*found, chunk, reader, arena, asker.node_id)
                left_s = give_up_s - time.monotonic()
                key, size_bytes = (b"", 0) if found is NoChunk.TOO_SLOW else self._ledger.on_disk(*wanted)
                if key or found is not NoChunk.COMING or left_s <= 0:
                    if found is NoChunk.COMING and self._ledger.reads_store(*wanted):
                        found = NoChunk.LATE
                    break
                self._changed.notify_all()  # a reader may have to fetch it
                came.clear()
                self._waiting.setdefault(wanted, []).append(came)
            came.wait(left_s)
        if not key or self._disk is None:
            return found
        file, offset = self._disk.open_bytes(key, size_bytes)

        def release(received: bool) -> None:
            os.close(file)
            if received:
                with self._changed:
                    self._ledger.sent_from_disk(load_id, size_bytes)

        return ServedChunk(file, offset, size_bytes, b"", release)

    def _forget(self, wanted: tuple[str, int], came: threading.Event) -> None:
        waiting = self._waiting.get(wanted, [])
        if came in waiting:
            waiting.remove(came)
            if not waiting:
                del self._waiting[wanted]

    def wake(self, news: Iterable[tuple[str, int]]) -> None:
        """Let the requests go on whose (load, chunk) has come. Call it with the agent's lock."""
        for wanted in news:
            for came in self._waiting.pop(wanted, ()):
                came.set()

    def _served(
        self, load: NodeLoad, cached: CachedChunk, chunk: int, reader: str, arena: Arena, asker: str
    ) -> ServedChunk:
        def release(received: bool) -> None:
            with self._changed:
                if load.peers is not None:
                    load.peers.given(chunk, cached, self._process, reader, asker, received=received)
                self._changed.notify_all()

        # NIXL pins what it registers: all of the window must have its memory before.
        in_window = cached.slot < arena.window_slots == arena.ready_slots
        address = arena.window_address + cached.slot * arena.slot_bytes if in_window else 0
        digest = b"" if load.peers is None else load.peers.digest(chunk)
        return ServedChunk(*arena.place(cached.slot), load.chunk_bytes(chunk), digest, release, address)


_LOG = logging.getLogger("longshore.agent")
LENDERS_S = 2.0  # a load of readers waits so long for the coordinator to say which other nodes read the model
LISTEN_S = 2.0  # between two tries to serve chunks at a port that another program has
LONGEST_WAIT_S = 5.0  # a rank's call waits so long for orders; must be shorter than the rank's timeout for the agent


class Door(Protocol):
    """The entrance for readers of other processes."""

    def close(self) -> None:
        """End every connection."""
        ...


class NodeAgent:
    """The agent as a plain class. `actors.coordination.spawn` makes the actor. Thread-safe: many calls may wait."""

    def __init__(
        self,
        given: Config | None,
        cluster_id: str,
        node_id: str,
        host: str = "",
        coordinator: CoordinatorLink | None = None,
        directory: str = SHM_DIRECTORY,
    ) -> None:
        """`given`: settings of the program that started the cluster. None: the agent reads the node's environment."""
        check_packages()
        self._node_id = node_id
        self._host = host or socket.gethostname()
        self._coordinator = coordinator
        about = LogFields(node=self._host)
        self._about = about.extra
        self._work = RepeatedWork(_LOG, about)
        self._incarnation = uuid.uuid4().hex[:12]
        self._started_ticks = ProcessId.current().start_time
        self._heard_s = time.monotonic()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._beat_soon = threading.Event()  # set: the next heartbeat is due now
        self._error: LongshoreError | None = None
        self._asked_for: tuple[str, ...] = ()
        # Incarnations of the coordinator: the one that answered last, and the one that received the settings.
        self._heard_of = self._told = ""
        self._memory: dict[str, PeakMemory] = {}  # of this process, by load
        self._newer_members: dict[str, bytes] = {}  # by load; that came before `begin` was done
        self._arena: Arena | None = None
        self._survivors = Survivors("", self._incarnation, restored=False)
        self._threads: list[threading.Thread] = []
        self._door: Door | None = None
        self._shelf: PeerShelf | None = None
        self._chunk_server: ChunkServer | None = None
        self._peer: Peer | None = None  # where it serves chunks
        self._peer_host, self._listen_s = "", 0.0  # where it is to serve them, and when it tries that again
        self._served_disk: DiskReader | None = None
        try:
            self._settings = NodeSettings.here(node_name(self._host, node_id), given)
            config = self._config = self._settings.config
            if coordinator is not None:
                configure_logs(config.logs)
            self._arena, restored = open_arena(config, arena_path(cluster_id, node_id, directory), directory)
            cache = ChunkCache(
                self._arena.slot_count,
                window_slots=self._arena.window_slots,
                journal=self._arena,
                ready_slots=self._arena.ready_slots,
            )
            self._survivors = Survivors(self._arena.path, self._incarnation, restored=restored)
            leases = cache.restore(self._survivors.left, time.monotonic()) if restored else []
            self._disk = DiskWriter(config, self._arena, cache, self._changed, self._stopped)
            self._ledger = NodeLedger(cache, self._arena.slot_bytes, restored=leases, disk=self._disk.backlog)
            self._kept = KeptMemory(config, self._arena, cache, self._ledger, self._changed)
            self._filling = ArenaFilling(config, self._arena, self._ledger, self._changed, self._stopped)
        except LongshoreError as error:
            # Calls raise it later, because an actor whose constructor fails loses the error's type.
            self._error = error
            return
        self._meter = NodeMeter(directory, self._disk, self._stopped)
        filling, gpus = self._filling, (self._meter.watch_gpus,) if coordinator is not None else ()
        for work in (*gpus, filling.touch, filling.announce_ready, self._tick, self._beat, self._disk.disk_write):
            thread = threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True)
            self._threads.append(thread)
            thread.start()

    def open_door(self, make: Callable[[NodeAgent, str], Door]) -> None:
        """Serve readers of other processes on this machine (`actors.reader.host`). Without a door the agent works too.

        `make`: takes this agent and the node's id. It may raise LongshoreError and OSError.
        """
        if self._error is not None:
            return
        try:
            self._door = make(self, self._node_id)
        except (LongshoreError, OSError) as error:
            _LOG.warning("processes without Ray cannot share this node's arena: %s", error, extra=self._about)

    def serve_peers(self, host: str) -> None:
        """Serve chunks to other nodes at this address of the node, if a setting says so. Else they read the store.

        Where nobody can listen at the port now, as another program has it, the agent tries again and again.
        """
        if self._error is not None or self._config.peer_port < 0:
            return
        self._served_disk = DiskReader(self._disk.path) if self._disk.path else None
        self._shelf = PeerShelf(self._changed, self._ledger, self._usable, self._incarnation, self._served_disk)
        self._peer_host = host
        self._listen()

    def _listen(self) -> None:
        if self._shelf is None or self._peer is not None or (now_s := time.monotonic()) < self._listen_s:
            return
        tried_before, self._listen_s = self._listen_s > 0, now_s + LISTEN_S
        try:
            self._chunk_server = ChunkServer(
                self._shelf,
                self._peer_host,
                self._config.peer_port,
                rate_bytes_per_s=self._config.peer_bytes_per_s,
                window=self._registered_window(),
            )
        except LongshoreError as error:
            if not tried_before:
                _LOG.error("%s; the agent goes on trying", error, extra=self._about)
            return
        self._peer = Peer(self._peer_host, self._chunk_server.port, self._incarnation)
        if tried_before:
            _LOG.warning("chunks are served to other nodes now", extra=self._about)

    def _registered_window(self) -> RegisteredWindow | None:
        if self._config.peer_carrier != "nixl" or self._arena is None:
            return None
        arena = self._arena
        return RegisteredWindow(self._incarnation, arena.window_address, arena.window_slots * arena.slot_bytes)

    def packed(self, call: str, arguments: bytes, *beside: bytes) -> bytes:
        """Run one of the methods below for a caller with a version, and return the answer with ours (`actors.links`).

        `beside`: the last arguments, if they were in Ray's object store. Raises VersionMismatch before anything from
        another version is unpickled. Otherwise raises the method's own exceptions.
        """
        if call.startswith("_"):
            raise ValueError(f"the agent has no call named {call}")
        asked = unpack_message(arguments, "the process that asks", f"the agent on {self._host}")
        return pack_message(getattr(self, call)(*asked, *beside))

    # -- coordinator -------------------------------------------------------------------------------------------

    def facts(self) -> NodeFacts:
        """Return the node's facts that a plan needs. Raises ArenaTooLarge when this node cannot have its arena."""
        with self._changed:
            arena = self._usable()
            reclaimable_bytes = self._kept.reclaimable_bytes
            rates = self._rates()
        return NodeFacts(
            node_id=self._node_id,
            host=self._host,
            arena_bytes=arena.slot_count * arena.slot_bytes,
            window_bytes=arena.window_slots * arena.slot_bytes,
            peer=self._peer,
            peer_bytes_per_s=rates[0],
            peer_measured_bytes_per_s=rates[1],
            pools=host_pools(os.path.dirname(arena.path), reclaimable_bytes=reclaimable_bytes),
            gpus=gpu_memory(),
            version=__version__,
            slot_bytes=arena.slot_bytes,
        )

    def begin(self, job: NodeJob, members: bytes = b"", shared: bytes = b"", tables: JobTables | None = None) -> bool:
        """Begin this node's share of a load. Return False when other loads hold its slots. Then the caller asks again.

        `members`: packed `Members`. `shared`: the tables of a job that came without them, from Ray's object store.
        `tables`: both, unpacked. Raises ArenaTooSmall.
        """
        job = replace(job, shared=job.shared or shared)
        with self._changed:
            self._usable()
            reserved = self._ledger.reserve(job, time.monotonic())
            self._changed.notify_all()
        if reserved is not None:
            return reserved
        memory = PeakMemory()
        if tables is None:  # without the lock: ranks wait for it
            tables = JobTables.of(job, members=Members.unpack(members), node_id=self._node_id)
        if tables.routes is None and self._lends(job, tables):
            model = model_key(tables.shared, job.store_identity)
            tables = tables.lends(LendingFacts(self._node_id, model, secrets.token_bytes(32), self._rates()))
        self._kept.make_room(job.host_bytes)
        with self._changed:
            self._usable()
            begun = self._ledger.begin(job, time.monotonic(), tables)
            if begun and tables.lending is not None:
                self._find_lenders(job.load_id)
            if begun:
                self._memory.setdefault(job.load_id, memory)
                if newer := self._newer_members.pop(job.load_id, b""):
                    self._ledger.update_members(job.load_id, Members.unpack(newer))
            self._changed.notify_all()
            return begun

    def _lends(self, job: NodeJob, tables: JobTables) -> bool:
        """Return whether the load can share chunks with readers on other nodes."""
        of_readers = job.on_demand or job.process is not None
        sends = of_readers and tables.is_sure and not job.is_local and job.placement != "direct"
        return sends and self._peer is not None and self._coordinator is not None

    def _rates(self) -> tuple[float, float]:
        """Return what this node may send to others, and what it sent, in bytes per second (`sending_weights`).

        Measured rates count for the next load: trees that change in the middle would make nodes read chunks again.
        """
        server = self._chunk_server
        return self._config.peer_bytes_per_s, 0.0 if server is None else server.bytes_per_s

    def _find_lenders(self, load_id: str) -> None:
        """Wait until the coordinator has said which other nodes read the model. Call it with the agent's lock."""
        self._beat_soon.set()
        give_up_s = time.monotonic() + LENDERS_S
        while not self._ledger.knows_lenders(load_id) and (left_s := give_up_s - time.monotonic()) > 0:
            self._changed.wait(left_s)
            self._usable()

    def use_lenders(self, found: tuple[Lenders, ...]) -> None:
        """Take over which other nodes have readers of the same models."""
        with self._changed:
            self._usable()
            self._ledger.use_lenders(found)
            self._changed.notify_all()

    def update_members(self, load_id: str, members: bytes) -> None:
        """Take over where the load's nodes serve chunks now: an agent was restarted. `members`: packed."""
        with self._changed:
            self._usable()
            if not self._ledger.update_members(load_id, Members.unpack(members)):
                self._newer_members[load_id] = members

    def slot_holders(self) -> tuple[SlotHolder, ...]:
        """Return the loads that have or want the arena's slots, to explain why a load waits."""
        with self._changed:
            self._usable()
            return self._ledger.slot_holders()

    def holds(self, keys: bytes) -> HeldChunks:
        """Return which chunks are in the arena and on disk. Changes nothing. `keys` are concatenated chunk keys."""
        found: list[tuple[bool, bool]] = []
        for block in key_blocks(keys):
            with self._changed:
                self._usable()
                found += self._ledger.held(block)
        return HeldChunks.of(found)

    def rank_lost(self, load_id: str, rank: int, incarnation: int) -> None:
        """Drop a rank whose worker is dead. `incarnation` will replace it."""
        with self._changed:
            self._usable()
            self._ledger.rank_lost(load_id, rank, incarnation, time.monotonic())
            self._changed.notify_all()

    def keep_record(self, load_id: str, record: bytes) -> None:
        """Keep the coordinator's notes on a load, for a restarted coordinator that has lost them."""
        with self._changed:
            self._usable()
            self._ledger.keep_record(load_id, record)

    def tables(self, load_id: str) -> bytes:
        """Return the packed tables of a load, for a coordinator that was restarted. Raises ModelNotFound."""
        with self._changed:
            self._usable()
            tables = self._ledger.tables(load_id)
        return pickle.dumps(tables, protocol=5)

    def report(self, load_id: str, attempt: int = 0) -> NodeReport:
        """Return this node's stats of a finished load. `attempt`: only of the ranks that it brought; 0: of all."""
        with self._changed:
            self._usable()
            memory = self._memory.get(load_id) or PeakMemory()
            memory.sample()
            report = self._ledger.report(load_id, self._node_id, self._host, attempt)
            report = replace(report, arena_bytes=self._usable().taken_bytes)
        return replace(report, peak_host_bytes=memory.peak_bytes, baseline_host_bytes=memory.baseline_bytes)

    def chunks_now(self, load_id: str) -> NodeView:
        """Return what `NodeLedger.chunks_now` does, for a progress view. Raises ModelNotFound."""
        with self._changed:
            self._usable()
            return self._ledger.chunks_now(load_id)

    def end(self, load_id: str, attempt: int = 0) -> None:
        """End a load that is over or whose model is released. Ranks that still work on it are ordered to stop.

        `attempt`: end only the share of that attempt, whose ranks were removed. 0: all.
        """
        with self._changed:
            if self._arena is None or self._stopped.is_set():
                return  # nothing is left of it
            if not attempt:
                self._memory.pop(load_id, None)
                self._newer_members.pop(load_id, None)
            self._ledger.end(load_id, time.monotonic(), attempt)
            self._changed.notify_all()

    def leave(self, load_id: str) -> None:
        """Remove a process from its worker group after it has released the load's rank."""
        with self._changed:
            self._ledger.leave(load_id)

    def shutdown(self, *, only_idle: bool = False) -> bool:
        """Remove the arena. The agent does nothing after that. Idempotent.

        With `only_idle`, do nothing and return False while a load is here or asks to be.
        """
        with self._changed:
            if self._arena is None:
                self._stopped.set()
                return True
            if only_idle and self._ledger.is_busy and not self._stopped.is_set():
                return False
            self._stopped.set()
            self._beat_soon.set()
            self._arena.unlink()
            self._changed.notify_all()
        if self._door is not None:
            self._door.close()
        for thread in self._threads:  # one of them may be about to start the chunk server
            if thread is not threading.current_thread():
                thread.join()
        if self._chunk_server is not None:
            self._chunk_server.close()
        if self._served_disk is not None:
            self._served_disk.close()
            self._served_disk = None
        with self._changed:  # so that no call is in the middle of a slot record
            self._arena.close()
        return True

    def forget(self) -> None:
        """Leave everything to the parent. Called in a forked child, in which no thread of the agent runs."""
        if self._arena is not None:
            self._arena.forget()

    # -- ranks -------------------------------------------------------------------------------------------------

    def join(self, hello: RankHello) -> JoinReply:
        """Register a rank, which calls this at its start and after this agent was restarted."""
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
                node_id=self._node_id,
                peer_carrier=self._config.peer_carrier,
            )

    def exchange(self, update: RankUpdate) -> Orders:
        """Apply a rank's update and return its next orders. Waits up to `update.wait_s` until there are some."""
        deadline_s = time.monotonic() + min(update.wait_s, LONGEST_WAIT_S)
        with self._changed:
            self._usable()
            self._kept.look()
            settled = update.leaving and self._survivors.settles(update.process, update.others)
            orders, others_may_go_on = self._ledger.exchange(update, time.monotonic(), settled=settled)
            news = self._ledger.take_news() if update.committed else ()
            if self._shelf is not None:
                self._shelf.wake(news)
            if others_may_go_on:
                self._changed.notify_all()
            while orders is None and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
                self._usable()
                orders = self._ledger.orders_for(update, time.monotonic())
            return orders or self._ledger.no_orders(update)

    def check_in(self, process: ProcessId, access: ArenaAccess) -> float:
        """Return seconds since the coordinator last answered this agent. From it, workers know that they are orphans.

        `access`: (arena path, incarnation of the agent that granted access) for the ranks of the process.
        """
        with self._changed:
            if process in self._survivors.left and self._survivors.settles(process, access):
                self._ledger.settle(process)
                self._changed.notify_all()
        return self.coordinator_age_s()

    def coordinator_age_s(self) -> float:
        """Return seconds since the coordinator last answered this agent."""
        return time.monotonic() - self._heard_s

    # -- threads -----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Check deadlines and processes until the agent stops."""
        while not self._stopped.wait(self._config.heartbeat_s / 2):
            with self._work.turn("the check of deadlines and processes"):
                self._look_at_processes()
            with self._work.turn("the start of the chunk server"):
                self._listen()
            with self._work.turn("the check of the host's memory"):
                self._kept.give_back()

    def _look_at_processes(self) -> None:
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
                for load_id in self._ledger.process_dead(process, now_s):
                    self._memory.pop(load_id, None)
            overdue = self._ledger.overdue(now_s)
            if changed or dead or unmapped:
                self._changed.notify_all()
        for process in overdue:
            if process != ProcessId.current():  # a test, or a program of one process, hosts agent and ranks together
                _LOG.warning("the agent kills process %d: it holds a revoked slot", process.pid, extra=self._about)
                process.kill()  # it has not released its slot in time, so only its death makes the slot safe

    def _beat(self) -> None:
        """Send heartbeats to the coordinator. The agent ends itself when none was answered for long."""
        while self._coordinator is not None:
            self._beat_soon.wait(self._config.heartbeat_s)
            self._beat_soon.clear()
            if self._stopped.is_set():
                return
            reply = None
            with self._work.turn("the heartbeat"):
                reply = self._say_alive(self._coordinator)
            silent_s = 0.0 if reply else time.monotonic() - self._heard_s
            if (reply and reply.node_dead) or silent_s > self._config.orphan_after_s:
                self.shutdown()  # removes the arena, which Ray's SIGKILL on an abandoned node would leave behind
                os._exit(1)

    def _say_alive(self, coordinator: CoordinatorLink) -> BeatReply | None:
        """Send one heartbeat. Return the coordinator's answer, or None when there was none."""
        with self._changed:
            beat = self._ledger.beat(self._node_id, self._host, self._incarnation, time.monotonic(), self._asked_for)
            if self._arena is not None and not self._stopped.is_set():
                beat = replace(beat, arena=replace(beat.arena, taken_bytes=self._arena.taken_bytes))
        beat = self._meter.complete(replace(beat, started_ticks=self._started_ticks, peer=self._peer))
        if not self._told or self._told != self._heard_of:
            beat = replace(beat, settings=self._settings.of_agent())
        try:
            reply = coordinator.heartbeat(beat)
        except VersionMismatch:
            raise  # it is logged
        except LongshoreError:
            return None  # no coordinator answers
        self._heard_s = time.monotonic()
        self._heard_of = reply.coordinator
        if beat.settings:
            self._told = reply.coordinator
        if not reply.node_dead:
            with self._changed:
                self._ledger.answered(beat, reply.coordinator)
                self._ledger.take_members(reply.members)
                self._ledger.use_lenders(reply.lenders)
                self._changed.notify_all()
            self._asked_for = reply.unknown_loads
            for load_id in reply.ended_loads:
                self.end(load_id)
        return reply

    def _usable(self) -> Arena:
        if (error := self._error or self._filling.error) is not None:
            raise error
        if self._arena is None or self._stopped.is_set():
            raise AgentEnded("the agent of this node was shut down", node=self._node_id)
        return self._arena
