"""The host of a node's arena, for processes without Ray: a node's agent, or the first process that opens a model.

    agent-<node>.sock   the door (`actors.reader.door`) of an agent that runs on this machine in a Ray cluster
    host.lock           locked by the host for as long as it lives
    host.sock           the host's door

A process of a Ray cluster with several nodes starts the agent of its node, if there is none. Where one agent runs, it
is the host. Else who has the lock is the host: it makes the arena, or adopts the one that a dead host left, and opens
the door. All others connect. When the host dies, the kernel drops the lock, and the next process that notices takes it.
Where several agents run, a process in Ray takes that of its own node.

A process that can share with nobody has an arena of its own, and `Host.why_private` says why. A forked child shares
nothing with its parent but what it opens itself: the host, the lock and the connections stay with the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from actors.node.chunk_flow import JobTables
from actors.node_agent import NodeAgent
from actors.reader.door import DoorClient, HostDoor, agent_socket, host_folder
from actors.reader.state import closed
from cluster.config import Config
from cluster.errors import AgentEnded, ClusterLost, ModelNotFound, VersionMismatch
from cluster.messages import ArenaAccess, JoinReply, NodeJob, Orders, RankHello, RankUpdate
from cluster.planning.packed_plan import ReaderTables
from cluster.telemetry.report import NodeReport
from storage.errors import ArenaBusy, ArenaError, ArenaTooSmall, LongshoreError
from storage.host.processes import ProcessId, pid_namespace

T = TypeVar("T")

AGENT_S = 30.0  # a reader waits so long for its node's agent to start
LEAST_PATIENCE_S = 5.0  # with a host, whatever the patience with other readers is
LISTENS_S = 60.0  # an agent listens this long after it made its socket, or never
LINGERS_S = 10.0  # an arena that nobody reads from stays this long, for the next model
BEGIN_EVERY_S = 0.05  # a reader that waits for slots asks again after this, then ever more seldom
BEGIN_SELDOM_S = 1.0  # each time it sends the tables of the model
PRIVATE_AFTER_S = 10.0  # a reader that finds no slots in another process's arena takes one of its own
REPORT_S = 10.0  # a report waits this long for a host that knows the reader
WINDOW_BYTES = 256 << 20  # of a host's arena, where no setting says otherwise


class OwnHost:
    """A node agent in this process, with a door for others unless it is private."""

    def __init__(self, config: Config, folder: str | None, lock: int | None, why_private: str = "") -> None:
        """`lock`: descriptor of the lock file, which this object closes. None: private."""
        self.why_private = why_private
        self._lock = lock
        self._door: HostDoor | None = None
        name = "private-" + uuid.uuid4().hex[:12] if folder is None else f"user-{os.geteuid()}"
        # Containers may share /dev/shm, and have the same folder. Pids of one mean nothing in another.
        place = f"{folder or name} {pid_namespace()}"
        self._agent = NodeAgent(config, name, place)
        try:
            self._agent.facts()  # raises if there is no room for the arena
            if folder is not None:
                self._door = HostDoor(os.path.join(folder, "host.sock"), self._agent)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> ProcessId:
        """Return this process."""
        return ProcessId.current()

    @property
    def visitors(self) -> int:
        """Number of connections of other processes."""
        return 0 if self._door is None else self._door.visitors

    def begin(self, job: NodeJob, tables: ReaderTables) -> bool:
        """See `NodeAgent.begin`."""
        return self._agent.begin(job, tables=JobTables.of(job, tables))

    def join(self, hello: RankHello) -> JoinReply:
        """See `NodeAgent.join`."""
        return self._agent.join(hello)

    def exchange(self, update: RankUpdate) -> Orders:
        """See `NodeAgent.exchange`."""
        return self._agent.exchange(update)

    def report(self, load_id: str) -> NodeReport:
        """See `NodeAgent.report`."""
        return self._agent.report(load_id)

    def close(self) -> None:
        """Remove the arena and leave the lock to others. Idempotent."""
        if self._door is not None:
            self._door.close()
        self._agent.shutdown()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def forget(self) -> None:
        """Leave everything to the parent. Called in a forked child."""
        if self._door is not None:
            self._door.forget()
        self._agent.forget()
        if self._lock is not None:
            os.close(self._lock)


class VisitedHost(DoorClient):
    """The host is another process."""

    why_private = ""


Host = OwnHost | VisitedHost


class ProcessHost:
    """The host that the readers of this process use, found when the first of them needs it. Thread-safe."""

    def __init__(self) -> None:
        self._finding = threading.Lock()
        self._own: OwnHost | None = None
        self._users = 0
        self._unused_s = 0.0
        self._ends = False  # the process; a reader that was not closed must not make another host
        self._of_parent: OwnHost | None = None  # kept, so that nothing of it ends here
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._at_exit)

    def find(self, config: Config, why_private: str = "") -> Host:
        """Return the host, and count a user of it. Call `leave` with it. Raises ArenaError, ClusterLost.

        `config`: of this process's own host, if it becomes one. `why_private`: why the host of others is of no use.
        """
        with self._finding:
            if self._ends:
                raise ClusterLost("the process ends")
            if self._own is not None:
                self._users += 1
                return self._own
            found = OwnHost(config, None, None, why_private) if why_private else _find(config)
            if isinstance(found, OwnHost):
                self._own, self._users = found, 1
            return found

    def leave(self, host: Host) -> None:
        """End one use."""
        if isinstance(host, VisitedHost):
            host.close()
            return
        with self._finding:
            if host is not self._own:
                return
            self._users -= 1
            self._unused_s = time.monotonic()
            if not self._users:
                threading.Thread(target=self._linger, args=(host,), name="host", daemon=True).start()

    def close(self) -> None:
        """Remove the arena of a host of this process, unless readers of other processes use it."""
        with self._finding:
            own, self._own = self._own, None
        if own is not None and not own.visitors:
            own.close()

    def _at_exit(self) -> None:
        self._ends = True
        self.close()

    def _forget(self) -> None:
        """Leave the host to the parent. Called in a forked child."""
        self._finding = threading.Lock()  # a thread of the parent may have held it
        self._of_parent, self._own, self._users = self._own, None, 0
        if self._of_parent is not None:
            self._of_parent.forget()

    def _linger(self, host: OwnHost) -> None:
        """Close a host that nobody has used for LINGERS_S."""
        while True:
            time.sleep(LINGERS_S / 10)
            with self._finding:
                if self._own is not host or self._users:
                    return
                if host.visitors:
                    self._unused_s = time.monotonic()
                elif time.monotonic() - self._unused_s >= LINGERS_S:
                    self._own = None
                    host.close()
                    return


PROCESS_HOST = ProcessHost()


def host_config(config: Config, least_bytes: int, *, cache: bool) -> Config:
    """Return the settings of this process's own host, where those of the user leave sizes open.

    Args:
        least_bytes: What a group of readers needs of the window.
        cache: Whether the arena is larger than its window, to keep chunks that were read.
    """
    window_bytes = config.window_bytes or max(WINDOW_BYTES, least_bytes)
    arena_bytes = config.arena_bytes or (0 if cache else window_bytes)
    return config.model_copy(update={"window_bytes": window_bytes, "arena_bytes": arena_bytes})


def _agent_here(folder: str, patience_s: float) -> VisitedHost | None:
    """Return the agent of this process's node, or the only one of this machine."""
    ray = sys.modules.get("ray")
    own = agent_socket(ray.get_runtime_context().get_node_id()) if ray is not None and ray.is_initialized() else ""
    found: list[VisitedHost] = []
    for name in sorted(os.listdir(folder)):
        if not name.startswith("agent-") or (own and name != own):
            continue
        path = os.path.join(folder, name)
        try:
            host = VisitedHost(path, patience_s)
            host.greet()
            found.append(host)
        except ConnectionRefusedError:  # its agent was killed, or does not listen yet
            with contextlib.suppress(OSError):
                if time.time() - os.stat(path).st_mtime > LISTENS_S:
                    os.unlink(path)
        except (OSError, LongshoreError):
            continue
    if len(found) == 1:
        return found[0]
    for host in found:
        host.close()
    return None


def _started_agent(config: Config, folder: str, patience_s: float) -> VisitedHost | None:
    """Start this node's agent, in a process of a Ray cluster with several nodes, so that these share chunks."""
    ray = sys.modules.get("ray")
    if config.peer_port < 0 or ray is None or not ray.is_initialized():
        return None
    from actors.launch import start_agent_here  # it imports Ray, which most readers do without

    return _agent_here(folder, patience_s) if start_agent_here(AGENT_S) else None


def _find(config: Config) -> Host:
    own = functools.partial(OwnHost, config)
    patience_s = max(LEAST_PATIENCE_S, config.group_patience_s)
    try:
        folder = host_folder()
    except ArenaError as error:
        return own(None, None, error.message)
    if (agent := _agent_here(folder, patience_s) or _started_agent(config, folder, patience_s)) is not None:
        return agent
    # Who has the lock and opens no door within this hangs.
    path, give_up_s = os.path.join(folder, "host.sock"), time.monotonic() + patience_s
    why = "the process that has the lock opens no door"
    while True:
        try:
            host = VisitedHost(path, patience_s)
        except ClusterLost as error:  # no host for this process
            return own(None, None, error.message)
        except OSError:
            pass  # nobody listens there
        else:
            try:
                host.greet()
                return host
            except VersionMismatch as error:
                return own(None, None, error.message)
            except ClusterLost as error:  # it ends just now, or is stopped
                why = error.message
        lock = os.open(os.path.join(folder, "host.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return own(folder, lock)
        except BlockingIOError:
            os.close(lock)  # another process becomes the host
        except ArenaError as error:
            if type(error) is not ArenaError:  # no room for it
                raise
            why = error.message  # the former host's arena is still in use
        if time.monotonic() > give_up_s:
            return own(None, None, why)
        time.sleep(0.02)


class HostLink:
    """A reader's link to whichever process is the host now. It begins the reader's load where it is not known."""

    def __init__(self, config: Config, job: NodeJob, tables: ReaderTables) -> None:
        self._config = config
        self._job = job
        self._tables = tables
        self._lock = threading.Lock()  # to find a host, and to leave it
        self._host: Host | None = None
        self._why_private = ""
        self._ends = threading.Event()

    @property
    def host(self) -> Host | None:
        """Return the host that answered last."""
        return self._host

    def join(self, hello: RankHello) -> JoinReply:
        """See `AgentLink.join`."""
        return self._ask(lambda host: self._join(host, hello))

    def exchange(self, update: RankUpdate) -> Orders:
        """See `AgentLink.exchange`."""
        return self._ask(lambda host: host.exchange(update))

    def report(self) -> NodeReport:
        """Return the host's report of the reader's group. Raises ClusterLost when no host answers for a while."""
        give_up_s = time.monotonic() + REPORT_S
        while True:
            try:
                return self._ask(lambda host: host.report(self._job.load_id))
            except (ClusterLost, ModelNotFound):  # the host has ended, and the reader has not joined the next one yet
                if time.monotonic() > give_up_s:
                    raise
            time.sleep(BEGIN_EVERY_S)

    def check_in(self, process: ProcessId, access: ArenaAccess) -> float:
        """See `AgentLink.check_in`. A reader never becomes an orphan: it belongs to its process."""
        return 0.0

    def give_up(self) -> None:
        """Wait for no slots any more."""
        self._ends.set()

    def close(self) -> None:
        """End the use of the host. Later calls raise ReaderClosed. Idempotent."""
        self._ends.set()
        with self._lock:
            host = self._host
        self._leave(host)

    def _join(self, host: Host, hello: RankHello) -> JoinReply:
        # Also where the load is known: the host compares its revision with this reader's.
        visits, begun_s, wait_s = isinstance(host, VisitedHost), time.monotonic(), BEGIN_EVERY_S
        while not self._begin(host):
            waited_s = time.monotonic() - begun_s
            if visits and waited_s > PRIVATE_AFTER_S:
                self._why_private = "other readers hold the slots of the host's arena"
                raise ClusterLost(self._why_private)
            if waited_s > self._config.slots_wait_s:
                raise ArenaBusy(
                    "other readers of this process hold the slots of the arena",
                    hint="close models that are not read any more, or set LONGSHORE_WINDOW_BYTES to more",
                    load=self._job.load_id,
                    slots=self._job.min_slots,
                )
            if self._ends.wait(wait_s):
                raise closed()
            wait_s = min(2 * wait_s, BEGIN_SELDOM_S)
        return host.join(hello)

    def _begin(self, host: Host) -> bool:
        try:
            return host.begin(self._job, self._tables)
        except ArenaTooSmall as error:
            if isinstance(host, OwnHost):
                raise
            self._why_private = f"the host's arena is too small: {error.message}"
            raise ClusterLost(self._why_private) from error

    def _leave(self, host: Host | None) -> None:
        with self._lock:
            if host is None or self._host is not host:
                return  # another thread has left it
            self._host = None
        PROCESS_HOST.leave(host)

    def _ask(self, call: Callable[[Host], T]) -> T:
        with self._lock:
            if self._host is None:
                if self._ends.is_set():
                    raise closed()
                self._host = PROCESS_HOST.find(self._config, self._why_private)
            host = self._host
        try:
            return call(host)
        except (ClusterLost, AgentEnded) as error:
            self._leave(host)
            raise ClusterLost("the host of the arena has ended", cause=type(error).__name__) from error
