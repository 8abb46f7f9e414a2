"""The socket between readers and their host: what it accepts, and what it does with everything else."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from actors.reader import door, host
from actors.reader.door import MAX_FRAME_BYTES, DoorClient, HostDoor, WrittenTables
from cluster.config import Config
from cluster.errors import ChunkFailed, ClusterLost, ModelNotFound, VersionMismatch
from cluster.fit.needs import min_slots
from cluster.messages import Commit, FetchFailure, NodeJob, RankHello, RankUpdate
from cluster.planning.packed_plan import ReaderTables
from longshore.installation import VERSION
from storage.checkpoints.model_index import ChunkTable, Shard
from storage.checksum import StoreChecksum
from storage.errors import IntegrityError
from storage.host.processes import ProcessId
from tests.support.local_node import local_node

TABLES = ReaderTables.of(
    (Shard("a.safetensors", 300, "v1"), Shard("b.safetensors", 100, None, StoreChecksum("crc32c", b"\x00\xff"))),
    ChunkTable(
        np.array([0, 0, 1], np.int32),
        np.array([0, 200, 0], np.int64),
        np.array([200, 300, 100], np.int64),
        "blake3",
        np.arange(96, dtype=np.uint8).reshape(3, 32),
    ),
)
NUMBERS = itertools.count(1)
JOB = NodeJob(
    load_id="readers-1",
    attempt=1,
    shared=b"",
    store_identity="s",
    ranks=(0,),
    done=frozenset(),
    min_slots=min_slots(1),
    chunk_attempts=3,
    lease_deadline_s=60.0,
    record=b"",
    on_demand=True,
)


def hello(process: ProcessId | None = None) -> RankHello:
    return RankHello("readers-1", 1, 0, 0, process or ProcessId.current(), number=next(NUMBERS))


@contextlib.contextmanager
def new_host(shm_dir: Path, folder: Path) -> Iterator[str]:
    """A host in this process, and the path of its socket."""
    with local_node(shm_dir, slots=4) as node:
        opened = HostDoor(str(folder / "host.sock"), node.agent)
        yield str(folder / "host.sock")
        opened.close()


@pytest.fixture
def path(shm_dir: Path, tmp_path: Path) -> Iterator[str]:
    """The socket of a host in this process."""
    with new_host(shm_dir, tmp_path) as path:
        yield path


def frame(text: bytes, version: bytes | None = None) -> bytes:
    line = b"%d %s\n" % (VERSION[0], VERSION[1].encode()) if version is None else version
    return struct.pack(">I", len(line + text)) + line + text


def say(path: str, data: bytes) -> bytes:
    """Send bytes, and return what comes back until the host closes the connection."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(path)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # it did not read everything
            while piece := sock.recv(1 << 16):
                answer += piece
        return answer


def answers(path: str) -> bool:
    """Return whether the host still serves readers."""
    client = DoorClient(path, 30.0)
    try:
        return client.begin(JOB, TABLES) and client.join(hello()).known
    finally:
        client.close()


def test_a_process_with_too_many_open_files_is_a_host_again_later(path: str):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as waiting:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            waiting.connect(path)
            time.sleep(0.2)  # accept fails meanwhile
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert answers(path)


def test_messages_arrive_as_they_were_sent(path: str):
    client = DoorClient(path, 30.0)
    assert client.host == ProcessId.current()
    assert client.begin(JOB, TABLES)
    reply = client.join(hello())
    assert reply.known
    leased: set[int] = set()
    while len(leased) < 2:  # the arena's slots may still be on their way
        more = {"want_leases": 2 - len(leased), "wait_s": 5.0}
        update = RankUpdate("readers-1", 1, 0, 0, ProcessId.current(), number=next(NUMBERS), asks=(0, 2), **more)
        leased |= {order.chunk for order in client.exchange(update).leases}
    assert leased == {0, 2}
    assert client.report("readers-1").needed_chunks == 2
    with pytest.raises(ModelNotFound, match="does not know"):
        client.report("other")
    client.close()
    with pytest.raises(ClusterLost):
        client.report("readers-1")


def test_tables_survive_the_way():
    again = WrittenTables.of(TABLES).tables()
    assert again.shards == TABLES.shards
    for column in ("shard", "start", "end", "digests"):
        assert np.array_equal(getattr(again.chunks, column), getattr(TABLES.chunks, column))
    plain = ReaderTables.of(TABLES.shards, replace(TABLES.chunks, hash_name=None, digests=None))
    assert WrittenTables.of(plain).tables().chunks.digests is None


@pytest.mark.parametrize(
    "changes",
    [
        {"start": b"\0" * 8},
        {"shard": np.array([0, 0, 2], "<i4").tobytes()},
        {"shard": np.array([0, 0, -1], "<i4").tobytes()},
        {"end": np.array([200, 100, 100], "<i8").tobytes()},
        {"start": np.array([-1, 200, 0], "<i8").tobytes()},
        {"digests": b"\0" * 95},
        {"digest_bytes": 0, "digests": b""},
        {"hash_name": None},
        {"start": b"\0" * 23},
    ],
)
def test_tables_that_make_no_sense_are_refused(changes: dict[str, Any]):
    with pytest.raises(ValueError):  # noqa: PT011  # any
        replace(WrittenTables.of(TABLES), **changes).tables()


def test_errors_keep_class_hint_and_plain_details():
    error = ChunkFailed("m", hint="h", chunk=3, cause=None, more=[1, 2])
    update = RankUpdate("l", 1, 0, 0, ProcessId(1, 2), failed=(FetchFailure("x", 1, error, 3),))
    arguments, _ = door.types_of("exchange")
    (again,) = arguments.validate_json(arguments.dump_json((update,)))
    (failure,) = again.failed
    assert (type(failure.error), str(failure.error)) == (ChunkFailed, str(error))
    assert failure.error.details == {"chunk": 3, "cause": None, "more": "[1, 2]"}


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "SystemExit", "message": "m", "hint": "", "details": {}},
        {"kind": "IntegrityError", "message": "m", "hint": "", "details": {"self": 1}},
        {"kind": "IntegrityError", "message": 1, "hint": "", "details": {}},
        {"kind": "IntegrityError", "message": "m", "hint": "", "details": []},
        {"message": "m"},
        "IntegrityError",
    ],
)
def test_other_errors_become_none_of_ours(given: Any):
    data = json.dumps(given).encode()
    if isinstance(given, dict) and given.get("kind") == "SystemExit":
        found = door._ERROR.validate_json(data)
        assert type(found).__name__ == "LongshoreError"
        return
    with pytest.raises(ValueError):  # noqa: PT011  # pydantic's
        door._ERROR.validate_json(data)
    assert isinstance(IntegrityError("m"), Exception)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0",
        struct.pack(">I", 0),
        struct.pack(">I", MAX_FRAME_BYTES + 1) + b"x",
        struct.pack(">I", 100) + b"too short",
        frame(b"exchange [1]", version=b""),
        frame(b"exchange [1]", version=b"x" * 200 + b"\n"),
        frame(b"shutdown []"),
        frame(b"exchange {}"),
        frame(b'report ["a", "b"]'),
        frame(b"\x80\x04K\x01."),  # a pickle
        frame(b'report ["' + b"[" * 100_000),
    ],
)
def test_what_is_no_message_ends_the_connection(path: str, data: bytes):
    assert say(path, data) == b""
    assert answers(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300) | st.binary(max_size=300).map(frame))
@example(frame(b"begin []"))
def test_no_bytes_break_the_host(path: str, data: bytes):
    say(path, data)
    assert answers(path)


def messages(peer: ProcessId) -> dict[str, Any]:
    """The JSON of valid arguments of every call."""
    failed = (FetchFailure("lease-1", 1, ChunkFailed("m", chunk=1), 2),)
    commits = (Commit("lease-2", 2), Commit("lease-3", 0, source="disk"))
    update = RankUpdate("readers-1", 1, 0, 0, peer, 5, commits, failed, (1,), asks=(0, 2), passed=((0, 1),))
    update = replace(update, want_leases=2, returned_unread=(2,), returned=("lease-4",), retries={"Throttled": 1})
    arguments = {
        "begin": (JOB, WrittenTables.of(TABLES)),
        "join": (RankHello("readers-1", 1, 0, 0, peer, placed=(1,), number=4, fetched={"store": (2,)}),),
        "exchange": (update,),
        "report": ("readers-1",),
    }
    return {call: json.loads(door.types_of(call)[0].dump_json(given)) for call, given in arguments.items()}


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70) | st.integers(-3, 5),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def changed(draw: st.DrawFn, value: Any) -> Any:
    """The value with one part replaced, repeated or missing."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 9)):
        keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
        key, again = draw(st.sampled_from(keys)), copy.deepcopy(value)
        what = draw(st.sampled_from(["change", "change", "change", "leave out", "repeat"]))
        if what == "leave out":
            del again[key]
        elif what == "repeat" and isinstance(again, list):
            again.append(again[key])
        else:
            again[key] = changed(draw, again[key])
        return again
    return draw(VALUES)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_arguments_break_the_host(shm_dir: Path, tmp_path: Path, data: st.DataObject):
    """Messages that were valid, with one to three changes."""
    valid = messages(ProcessId.current())
    sent = [
        frame(b"begin " + json.dumps(valid["begin"]).encode()),
        frame(b"join " + json.dumps(valid["join"]).encode()),
    ]
    for _ in range(data.draw(st.integers(1, 2))):
        call = data.draw(st.sampled_from(sorted(valid)))
        arguments = valid[call]
        for _ in range(data.draw(st.integers(1, 3))):
            arguments = changed(data.draw, arguments)
        sent.append(frame(call.encode() + b" " + json.dumps(arguments).encode()))
    failed: list[threading.ExceptHookArgs] = []
    with new_host(shm_dir, tmp_path) as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failed.append)
        say(path, b"".join(sent))
        client = DoorClient(path, 30.0)
        with pytest.raises(ModelNotFound):
            client.report("nobody's")
        client.close()
    assert [str(each.exc_value) for each in failed] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"committed": (Commit("another's", 10**9),)},
        {"failed": (FetchFailure("another's", 3, ChunkFailed("m"), 1),)},
        {"placed": (-1,)},
        {"asks": (0, 2**70)},
        {"returned_unread": (3,)},
    ],
)
def test_chunks_that_the_model_has_not_end_the_connection(path: str, wrong: dict[str, Any]):
    client = DoorClient(path, 30.0)
    assert client.begin(JOB, TABLES)
    assert client.join(hello()).known
    with pytest.raises(ClusterLost):
        client.exchange(RankUpdate("readers-1", 1, 0, 0, ProcessId.current(), next(NUMBERS), **wrong))
    client.close()
    assert answers(path)


def test_another_version_is_told_so(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "VERSION", (VERSION[0] - 1, "0.0.1"))
    client = DoorClient(path, 30.0)
    with pytest.raises(VersionMismatch, match=r"0\.0\.1"):
        client.report("readers-1")
    client.close()


def test_nobody_speaks_for_another_process(path: str):
    client = DoorClient(path, 30.0)
    assert client.begin(JOB, TABLES)
    with pytest.raises(ClusterLost):
        client.join(hello(ProcessId(os.getpid(), 1)))
    client.close()
    assert answers(path)


def test_loads_of_ranks_do_not_come_through_the_door(path: str):
    for job in (replace(JOB, on_demand=False), replace(JOB, shared=b"\x80\x04K\x01.")):
        client = DoorClient(path, 30.0)
        with pytest.raises(ClusterLost):
            client.begin(job, TABLES)
        client.close()
    assert answers(path)


def test_only_the_user_can_enter(path: str):
    assert os.stat(path).st_mode & 0o077 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(path: str):
    os.chmod(path, 0o666)
    os.chmod(os.path.dirname(path), 0o755)
    code = f"""
import os, socket
os.setuid(65534)
s = socket.socket(socket.AF_UNIX)
try:
    s.connect({path!r})
    s.sendall({frame(b'report ["x"]')!r})
    raise SystemExit(s.recv(10) != b"")
except (PermissionError, ConnectionError):
    raise SystemExit(0)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_silent_host_is_given_up(tmp_path: Path):
    path = str(tmp_path / "silent.sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        client = DoorClient(path, 0.2)
        with pytest.raises(ClusterLost, match="does not answer"):
            client.report("x")
        client.close()


def test_a_host_that_answers_nonsense_is_given_up(tmp_path: Path):
    path = str(tmp_path / "rogue.sock")
    for answer in (b"", b"\xff\xff\xff\xff", frame(b"+[1]"), frame(b"-{}"), frame(b"?"), frame(b"+" + b"[" * 100_000)):
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()

            def serve(listening: socket.socket = listening, answer: bytes = answer) -> None:
                sock, _ = listening.accept()
                with sock:
                    sock.recv(1 << 16)
                    sock.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            client = DoorClient(path, 30.0)
            with pytest.raises(ClusterLost):
                client.exchange(RankUpdate("l", 1, 0, 0, ProcessId.current(), committed=(Commit("x", 1),)))
            client.close()
            thread.join()
        os.unlink(path)


def test_a_path_too_long_for_a_socket_is_an_error(tmp_path: Path):
    with pytest.raises(Exception, match="too long a path"):
        HostDoor(str(tmp_path / ("x" * 100)), None)  # type: ignore[arg-type]


def test_an_agent_that_ends_late_leaves_the_door_of_the_next_one(shm_dir: Path, tmp_path: Path):
    path = str(tmp_path / "agent-1.sock")
    with local_node(shm_dir, slots=4) as node:
        first = HostDoor(path, node.agent)
        second = HostDoor(path, node.agent)
        first.close()
        assert answers(path)
        second.close()
        assert not os.path.exists(path)


@pytest.mark.parametrize(("age_s", "stays"), [(1, True), (host.LISTENS_S + 1, False)])
def test_the_socket_of_a_dead_agent_is_removed_but_not_one_that_is_just_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, stays: bool
):
    (tmp_path / "longshore").mkdir(mode=0o700)
    path = tmp_path / "longshore" / "agent-1.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))  # nobody listens
        os.utime(path, (time.time() - age_s,) * 2)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        config = Config(arena_bytes=4 << 20, slot_bytes=1 << 20, window_bytes=2 << 20)
        found = host.ProcessHost()
        found.leave(found.find(config))
        assert path.exists() is stays
        found.close()
