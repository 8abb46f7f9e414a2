"""A process is its pid and its start time; nothing else may be killed or taken for alive."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from storage.host import processes
from storage.host.processes import ProcessId, may_map, processes_mapping
from tests.support.python_processes import CUT_TITLE, LEADERLESS, TITLED, running
from tests.support.ray_clusters import eventually


@pytest.fixture
def sleeper():
    """A child that does nothing until it is killed."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield child
    child.kill()
    child.wait()


def test_the_calling_process_is_alive_and_is_itself():
    me = ProcessId.current()
    assert me == ProcessId.of(os.getpid())
    assert me.pid == os.getpid()
    assert me.is_alive()


def test_a_killed_process_is_dead_while_it_is_still_a_zombie(sleeper):
    process = ProcessId.of(sleeper.pid)
    assert process is not None
    assert process.is_alive()
    assert process.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it has ended and nobody has reaped it
    assert Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    assert not process.is_alive()
    assert ProcessId.of(sleeper.pid) is None
    assert not process.kill()


def test_a_stopped_process_is_alive(sleeper):
    process = ProcessId.of(sleeper.pid)
    assert process is not None
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert process.is_alive()


def test_a_process_that_reused_a_pid_is_not_killed(sleeper):
    process = ProcessId.of(sleeper.pid)
    assert process is not None
    earlier = replace(process, start_time=process.start_time - 1)
    assert not earlier.is_alive()
    assert not earlier.kill()
    assert process.is_alive()


def test_an_unused_pid_is_dead():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = ProcessId(child.pid, 1)
    assert not gone.is_alive()
    assert not gone.kill()


def state_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]


def test_alive_until_its_last_thread_has_ended():
    with running(LEADERLESS.format(work="pass")) as child:
        eventually(lambda: state_of(child.pid) == b"Z", "its first thread does not end")
        process = ProcessId.of(child.pid)
        assert process is not None
        assert process.is_alive()
        assert process.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not process.is_alive()
        assert ProcessId.of(child.pid) is None


def test_maps_are_read_without_the_first_thread(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    work = "import mmap; file = open(sys.argv[1], 'r+b'); sys.mapped = mmap.mmap(file.fileno(), 0)"
    with running(LEADERLESS.format(work=work), str(path)) as child:
        eventually(lambda: state_of(child.pid) == b"Z", "its first thread does not end")
        assert processes_mapping(path) == [ProcessId.of(child.pid)]


def test_a_title_that_is_cut_inside_a_character(tmp_path):
    with running(TITLED) as child:
        assert CUT_TITLE in Path(f"/proc/{child.pid}/stat").read_bytes()
        process = ProcessId.of(child.pid)
        assert process is not None
        assert process.is_alive()
        (tmp_path / "file").write_bytes(b"x")
        assert processes_mapping(tmp_path / "file") == []


@pytest.mark.parametrize(
    ("error", "alive"),
    [(errno.ENOENT, False), (errno.ESRCH, False), (errno.EMFILE, True), (errno.EACCES, True), (errno.ENOMEM, True)],
)
def test_a_process_is_dead_only_by_the_kernels_answer(sleeper, monkeypatch, error, alive):
    process = ProcessId.of(sleeper.pid)
    assert process is not None

    def refuse(folder):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(processes, "_stat", refuse)
    assert process.is_alive() is alive


def test_a_name_with_parentheses_and_spaces_is_parsed(tmp_path):
    program = tmp_path / "a) Z (b"
    program.symlink_to(sys.executable)
    command = [str(program), "-S", "-c", "import sys; sys.stdin.read()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        process = ProcessId.of(child.pid)
        assert process is not None
        assert process.is_alive()
    finally:
        child.kill()
        child.communicate()


def test_a_process_may_map_a_file_unless_the_kernel_denies_it(tmp_path, sleeper, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    me, other = ProcessId.current(), ProcessId.of(sleeper.pid)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert [may_map(process, path) for process in (me, other)] == [True, False]
    assert not may_map(me, path)
    for error, maps in ((errno.EACCES, True), (errno.EMFILE, True), (errno.ESRCH, True)):

        def refuse(folder, error=error):
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(processes, "_map_lines", refuse)
        assert may_map(other, path) is maps
    sleeper.kill()
    sleeper.wait()
    assert not may_map(other, path)


def test_processes_that_map_a_file_are_found(tmp_path, sleeper):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    assert processes_mapping(path) == []
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert processes_mapping(path) == [ProcessId.current()]
    assert processes_mapping(path) == []
