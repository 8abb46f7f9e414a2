"""Ends what is left of a local Ray cluster when the process that started it was killed.

    process that called `load` --watch()--> python -m cluster.joining.local_watch PID START_TIME LOGS_FOLDER

Ray ends its head with that process, in whatever way it dies. Workers, actors and Ray's agents wait for the head then,
for minutes, and with them the arena stays. A process belongs to the cluster when its output goes to the folder of logs
that this cluster alone has. So does one with a title of Ray's and files open there: Ray's agents write to the raylet.
No other cluster's process is touched, and no other program that joined this one.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from storage.arena.arena_files import sweep
from storage.host.processes import ProcessId, own_module

LOOK_S = 0.5  # at a process whose end the kernel does not report
ENDED_S = 20.0  # by then whatever was just being started has been found and ended


def watch(logs_folder: str) -> subprocess.Popen[bytes]:
    """Start a process that waits for the end of this one. Who ends the cluster in order ends it too."""
    me = ProcessId.current()
    command, environ = own_module(__name__, str(me.pid), str(me.start_time), logs_folder)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environ,
        start_new_session=True,  # neither Ctrl-C nor the end of the terminal ends it
    )


def members(logs_folder: str) -> list[ProcessId]:
    """Return the processes of this user that belong to the cluster with that folder, but for this one."""
    found = []
    prefix = os.path.join(os.path.realpath(logs_folder), "")
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                process = ProcessId.of(int(name))
                if process is not None and _writes_to(prefix, Path("/proc", name)):
                    found.append(process)
    return found


def _writes_to(prefix: str, process: Path) -> bool:
    descriptors = os.listdir(process / "fd") if (process / "cmdline").read_bytes().startswith(b"ray::") else ("1", "2")
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # it was closed
            if os.readlink(process / "fd" / descriptor).startswith(prefix):
                return True
    return False


def end_cluster(logs_folder: str) -> None:
    """Kill what is left of the cluster, and remove the arenas that nobody uses then."""
    give_up_s = time.monotonic() + ENDED_S
    while (left := members(logs_folder)) and time.monotonic() < give_up_s:
        for process in left:
            process.kill()
        time.sleep(0.1)
    sweep()


def _wait_for_end(process: ProcessId) -> None:
    with contextlib.suppress(OSError):  # this kernel has no such descriptors, or the process has ended
        descriptor = os.pidfd_open(process.pid)
        if process.is_alive():  # else it is another process's
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
    while process.is_alive():
        time.sleep(LOOK_S)


if __name__ == "__main__":
    _wait_for_end(ProcessId(int(sys.argv[1]), int(sys.argv[2])))
    end_cluster(sys.argv[3])
