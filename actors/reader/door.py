"""The socket over which readers of other processes reach a host: the process that owns the node's arena.

    reader --begin, join, exchange, report--> HostDoor --> NodeAgent (in the host's process)

It is a Unix socket in a folder that only the user can enter. Both sides check that the other is the same user, in the
same PID namespace. Each message is a frame:

    4 bytes    size of the rest, at most MAX_FRAME_BYTES
    one line   protocol and version of Longshore; another version is refused before anything else is read
    JSON       a call with its arguments, an answer, or an error; each is checked against its type

Nothing is pickled. The messages are those between ranks and agents (`cluster.messages`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import struct
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter

from actors.node.chunk_flow import JobTables
from actors.node_agent import NodeAgent
from cluster.errors import ClusterLost, ConfigError, ModelNotFound
from cluster.messages import JoinReply, NodeJob, Orders, RankHello, RankUpdate, check_version
from cluster.planning.packed_plan import ReaderTables
from cluster.telemetry.report import NodeReport
from longshore.installation import VERSION
from storage.checkpoints.model_index import ChunkTable, Shard
from storage.errors import ArenaError, LongshoreError
from storage.host.processes import ProcessId

MAX_FRAME_BYTES = 64 << 20  # a model of 130,000 chunks sends 9 MB when it begins; every other message is small
MAX_LINE_BYTES = 80
ACCEPT_AGAIN_S = 0.05
BEGIN_S = 30.0  # a host that does not answer within this hangs, also when it unpacks the tables of a large model
MAX_PATH_BYTES = 100  # of a Unix socket: the kernel's limit is 107
_HEAD = struct.Struct(">I")
_PEER = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class WrittenTables:
    """`ReaderTables` as they are sent. Columns are the bytes of little-endian numbers."""

    shards: tuple[Shard, ...]
    shard: bytes  # int32, of each chunk
    start: bytes  # int64
    end: bytes  # int64
    hash_name: str | None
    digest_bytes: int  # of one digest; 0: there are none
    digests: bytes

    @classmethod
    def of(cls, tables: ReaderTables) -> WrittenTables:
        """Return the tables in the form that is sent."""
        chunks, digests = tables.chunks, tables.chunks.digests
        return cls(
            tables.shards,
            chunks.shard.astype("<i4").tobytes(),
            chunks.start.astype("<i8").tobytes(),
            chunks.end.astype("<i8").tobytes(),
            chunks.hash_name,
            0 if digests is None else digests.shape[1],
            b"" if digests is None else digests.tobytes(),
        )

    def tables(self) -> ReaderTables:
        """Return the tables. Raises ValueError if the columns do not fit each other."""
        shard, start, end = _column(self.shard, "<i4"), _column(self.start, "<i8"), _column(self.end, "<i8")
        count = len(shard)
        if not (len(start) == len(end) == count and len(self.digests) == count * self.digest_bytes):
            raise ValueError("columns of different lengths")
        if count and not (shard.min() >= 0 and shard.max() < len(self.shards) and (start >= 0).all()):
            raise ValueError("chunks of unknown shards")
        if not (end >= start).all() or bool(self.digest_bytes) != (self.hash_name is not None and count > 0):
            raise ValueError("chunks that end before they start, or digests without their hash")
        digests = np.frombuffer(self.digests, np.uint8).reshape(count, self.digest_bytes) if self.digest_bytes else None
        return ReaderTables.of(
            self.shards, ChunkTable(shard.astype(np.int32), start, end, self.hash_name if count else None, digests)
        )


def _column(data: bytes, dtype: str) -> NDArray[Any]:
    return np.frombuffer(data, dtype)


# Call -> (types of its arguments, type of its answer)
_CONFIG = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_CALLS: dict[str, tuple[Any, Any]] = {
    "begin": (tuple[NodeJob, WrittenTables], tuple[bool]),
    "join": (tuple[RankHello], tuple[JoinReply]),
    "exchange": (tuple[RankUpdate], tuple[Orders]),
    "report": (tuple[str], tuple[NodeReport]),
}
_ERROR: TypeAdapter[LongshoreError] = TypeAdapter(LongshoreError)


@functools.cache
def types_of(call: str) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """Return what checks, reads and writes the arguments and the answer of a call. Raises BadFrame for no call.

    They are made at the first call: an agent of a cluster, which seldom has visitors, starts without them.
    """
    if call not in _CALLS:
        raise BadFrame("an unknown call")
    arguments, answer = _CALLS[call]
    return TypeAdapter(arguments, config=_CONFIG), TypeAdapter(answer, config=_CONFIG)


_ANSWERED, _FAILED = b"+", b"-"


class BadFrame(ValueError):
    """The other side sent something else than a frame of this protocol."""


def _version_line() -> bytes:
    return b"%d %s\n" % (VERSION[0], VERSION[1].encode())


def send_frame(sock: socket.socket, *parts: bytes) -> None:
    """Send the parts, one after the other, as one frame. Raises OSError, and ValueError for more than the limit."""
    data = b"".join((_version_line(), *parts))
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is larger than {MAX_FRAME_BYTES}")
    sock.sendall(_HEAD.pack(len(data)) + data)


def receive_frame(sock: socket.socket, sender: str, receiver: str) -> bytes | None:
    """Return the JSON of the next frame. None when the other side has closed.

    Raises VersionMismatch, BadFrame, OSError.
    """
    head = _receive(sock, _HEAD.size)
    if head is None:
        return None
    (size,) = _HEAD.unpack(head)
    if not 0 < size <= MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {size} bytes")
    data = _receive(sock, size)
    if data is None:
        return None
    line, found, rest = data.partition(b"\n")
    protocol, _, release = line[:MAX_LINE_BYTES].decode("ascii", "replace").partition(" ")
    if not found or len(line) > MAX_LINE_BYTES or not protocol.isdecimal():
        raise BadFrame("a frame without a version")
    check_version((int(protocol), release), sender, receiver)
    return rest


def _receive(sock: socket.socket, size: int) -> bytes | None:
    """Return exactly that many bytes; None when the other side closes before."""
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def peer_of(sock: socket.socket) -> ProcessId | None:
    """Return the process at the other end. None for another user, or one in another PID namespace."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.geteuid() or pid <= 0:
        return None
    with contextlib.suppress(OSError):
        return ProcessId.of(pid)
    return None


class HostDoor:
    """Serves a node agent to readers of other processes, a thread for each."""

    def __init__(self, path: str, agent: NodeAgent) -> None:
        """`path`: of the socket, which is replaced if it is there. Raises OSError."""
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ConfigError("the folder for the socket has too long a path", path=path, most_bytes=MAX_PATH_BYTES)
        self._path = path
        self._agent = agent
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._inode = os.stat(path).st_ino
        os.chmod(path, 0o600)
        self._listening.listen()
        self._thread = threading.Thread(target=self._accept, name="door", daemon=True)
        self._thread.start()

    @property
    def visitors(self) -> int:
        """Number of connections now."""
        with self._lock:
            return len(self._open)

    def close(self) -> None:
        """End every connection. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
            connections = list(self._open)
        if not first:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == self._inode:  # else the socket is that of the node's next agent
                os.unlink(self._path)
        for sock in (self._listening, *connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()

    def forget(self) -> None:
        """Leave every connection to the parent. Called in a forked child."""
        for sock in (self._listening, *self._open):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:  # closed, or the process has too many open files now
                if self._closed:
                    return
                time.sleep(ACCEPT_AGAIN_S)
                continue
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._open.add(sock)
            try:
                threading.Thread(target=self._serve, args=(sock,), name="visitor", daemon=True).start()
            except RuntimeError:  # the process may not have more threads now
                with self._lock:
                    self._open.discard(sock)
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        """Answer one reader until it closes. What is no message of ours ends the connection."""
        try:
            peer = peer_of(sock)
            while peer is not None:
                try:
                    frame = receive_frame(sock, "a reader", "its host")
                    if frame is None:
                        return
                    answer = _ANSWERED + self._call(frame, peer)
                except LongshoreError as error:
                    answer = _FAILED + _ERROR.dump_json(error)
                send_frame(sock, answer)
        except (OSError, ValueError):
            return
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _call(self, frame: bytes, peer: ProcessId) -> bytes:
        """Run one call. Raises the agent's errors, and ValueError for a call that there is not."""
        name, _, given = frame.partition(b" ")
        types = types_of(name.decode("ascii", "replace"))
        arguments = types[0].validate_json(given)
        answer: Any
        match arguments:
            case (NodeJob() as job, WrittenTables() as written):
                if job.shared or not job.on_demand:
                    raise BadFrame("a load that is no reader's")
                answer = self._agent.begin(job, tables=JobTables.of(job, written.tables()))
            case (RankHello() as hello,):
                _check_sender(hello.process, peer)
                answer = self._agent.join(hello)
            case (RankUpdate() as update,):
                _check_sender(update.process, peer)
                answer = self._agent.exchange(update)
            case (load_id,):
                answer = self._agent.report(load_id)
        return types[1].dump_json((answer,))


def _check_sender(process: ProcessId, peer: ProcessId) -> None:
    if process != peer:
        raise BadFrame("a message in the name of another process")


def host_folder() -> str:
    """Return the folder of the user's lock and sockets, which is made if it is missing. Raises ArenaError."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    path = os.path.join(base, "longshore") if os.path.isdir(base) else f"/tmp/longshore-{os.geteuid()}"
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        info = os.lstat(path)
    except OSError as error:
        raise ArenaError(f"cannot make the folder for the socket: {error.strerror}", path=path) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ArenaError("the folder for the socket belongs to another user, or others may enter it", path=path)
    if len(os.fsencode(path)) + len("/host.sock") > MAX_PATH_BYTES:
        raise ArenaError("the folder for the socket has too long a path", path=path, most_bytes=MAX_PATH_BYTES)
    return path


def agent_door(agent: NodeAgent, node_id: str) -> HostDoor:
    """Open the door of an agent of a Ray cluster. Raises ArenaError, ConfigError, OSError."""
    return HostDoor(os.path.join(host_folder(), agent_socket(node_id)), agent)


def agent_socket(node_id: str) -> str:
    """Return the name of the socket of a node's agent."""
    return f"agent-{node_id[:16]}.sock"


_CLIENTS: weakref.WeakSet[DoorClient] = weakref.WeakSet()  # of this process


class DoorClient:
    """A reader's connection to a host. Thread-safe: one call at a time."""

    def __init__(self, path: str, answer_s: float) -> None:
        """Connect. Raises OSError when nobody listens, and ClusterLost for a host that this process cannot share.

        `answer_s`: a host that takes longer to answer hangs, except to `begin`.
        """
        self._lock = threading.Lock()
        self._answer_s = answer_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(answer_s)
            self._socket.connect(path)
            self.host = peer_of(self._socket)
        except BaseException:
            self._socket.close()
            raise
        if self.host is None:
            self._socket.close()
            raise ClusterLost("the host is of another user, or in another PID namespace", socket=path)
        _CLIENTS.add(self)

    def greet(self) -> None:
        """Ask the host anything. Raises VersionMismatch, and ClusterLost when it does not answer."""
        try:
            with contextlib.suppress(ModelNotFound):
                self.report("")
        except BaseException:
            self.close()
            raise

    def begin(self, job: NodeJob, tables: ReaderTables) -> bool:
        """See `NodeAgent.begin`."""
        began: bool = self._ask("begin", job, WrittenTables.of(tables))
        return began

    def join(self, hello: RankHello) -> JoinReply:
        """See `NodeAgent.join`."""
        reply: JoinReply = self._ask("join", hello)
        return reply

    def exchange(self, update: RankUpdate) -> Orders:
        """See `NodeAgent.exchange`."""
        orders: Orders = self._ask("exchange", update)
        return orders

    def report(self, load_id: str) -> NodeReport:
        """See `NodeAgent.report`."""
        report: NodeReport = self._ask("report", load_id)
        return report

    def close(self) -> None:
        """End the connection. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _ask(self, call: str, *arguments: object) -> Any:
        """Return the host's answer. Raises its error, and ClusterLost when it does not answer or makes no sense."""
        given, answer = types_of(call)
        try:
            with self._lock:
                self._socket.settimeout(max(BEGIN_S, self._answer_s) if call == "begin" else self._answer_s)
                send_frame(self._socket, call.encode(), b" ", given.dump_json(arguments))
                frame = receive_frame(self._socket, "the host", "this process")
            if frame is None:
                raise ClusterLost("the process that hosts the arena has ended")
            if frame[:1] == _ANSWERED:
                return answer.validate_json(frame[1:])[0]
            error = _ERROR.validate_json(frame[1:])
        except (OSError, ValueError) as problem:  # pydantic's ValidationError is a ValueError
            self.close()
            cause = type(problem).__name__
            raise ClusterLost("the process that hosts the arena does not answer", cause=cause) from problem
        raise error


def _forget_clients() -> None:
    """Leave every connection to the parent. Called in a forked child."""
    for client in list(_CLIENTS):
        client._socket.close()


os.register_at_fork(after_in_child=_forget_clients)
