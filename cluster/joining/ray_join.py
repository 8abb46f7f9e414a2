"""Joins a Ray cluster, or starts a local one, and removes a local one whose process was killed.

    process that called `load` --watch()--> python -m cluster.joining.ray_join PID START_TIME LOGS_FOLDER

Ray ends its head with the process that started it, in whatever way that dies. But workers, actors and Ray's agents
then wait minutes for the head, and keep the arena. So the watching process ends them.

A process belongs to the cluster if its output goes to the cluster's own folder of logs. Ray's agents write to the
raylet instead, and are found by Ray's process title and their open files in that folder. The watch ends no process of
another cluster, and no other program that joined this one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster.errors import ClusterLost, PackageMissing
from cluster.joining.patience import check_head
from cluster.joining.ray_private import address_here, heads_of_processes_here, logs_folder
from storage.arena.arena_files import sweep
from storage.host.processes import ProcessId, own_module
from storage.problems import install_hint

LOOK_S = 0.5  # between checks of a process whose end the kernel does not report
ENDED_S = 20.0  # within this time, processes that were just starting are found too


def watch(logs_folder: str) -> subprocess.Popen[bytes]:
    """Start a process that waits for the end of this one. An orderly end of the cluster ends it too."""
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
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
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
    """Kill the remaining processes of the cluster, and remove the arenas that no process uses then."""
    give_up_s = time.monotonic() + ENDED_S
    found: set[ProcessId] = set()  # a dying process closes its log before it releases its arena
    while time.monotonic() < give_up_s:
        found.update(members(logs_folder))
        left = [process for process in found if process.is_alive()]
        if not left:
            break
        for process in left:
            process.kill()
        time.sleep(0.1)
    sweep()


def _wait_for_end(process: ProcessId) -> None:
    with contextlib.suppress(OSError):  # this kernel has no such descriptors, or the process has ended
        descriptor = os.pidfd_open(process.pid)
        if process.is_alive():  # otherwise the descriptor belongs to another process
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
    while process.is_alive():
        time.sleep(LOOK_S)


if __name__ == "__main__":
    _wait_for_end(ProcessId(int(sys.argv[1]), int(sys.argv[2])))
    end_cluster(sys.argv[3])


LOCAL_OBJECT_STORE_BYTES = 100 << 20  # weights never pass through Ray's object store; results of `call` do

_watch: subprocess.Popen[bytes] | None = None  # ends this process's local cluster if this process is killed


def import_ray() -> Any:
    """Return the `ray` package. Raises PackageMissing."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise PackageMissing("ray is not installed here", hint=install_hint("cluster"), package="ray") from error


def address_of(ray: Any) -> str:
    """Return the address of the cluster that this process has joined."""
    return str(ray.get_runtime_context().gcs_address)


def join(ray: Any, address: str | None, *, start: bool) -> str | None:
    """Connect to a Ray cluster. Return "joined", "local" for a new one, or None. Raises ClusterLost."""
    found = find_cluster(address)
    if found is None:
        if not start:
            return None
        found = "local"
    quiet = {"log_to_driver": False, "configure_logging": False}
    try:
        if found == "local":
            _start_local(ray, quiet)
            return "local"
        ray.init(address=found, **quiet)
        return "joined"
    except getattr(ray.exceptions, "AuthenticationError", ()) as error:  # not every Ray has it
        raise ClusterLost(
            "cannot join the Ray cluster: no valid token",
            hint="set RAY_AUTH_MODE as it was for `ray start`: disabled, or token with RAY_AUTH_TOKEN",
            address=found,
        ) from error
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, OSError) as error:
        raise ClusterLost(
            "cannot join the Ray cluster", hint="check the address and RAY_AUTH_MODE", address=found,
            cause=str(error)[:500],
        ) from error  # fmt: skip


def find_cluster(address: str | None) -> str | None:
    """Return HOST:PORT of the cluster to join. None: "local", or no cluster runs on this machine.

    That is `address`, else RAY_ADDRESS, else a cluster with processes on this machine, as Ray finds it. Raises
    ConfigError, ClusterLost.
    """
    given = address or os.environ.get("RAY_ADDRESS") or None
    if given == "local":
        return None
    if given not in (None, "auto"):
        check_head(given)
        return given
    found = address_here()
    if found is not None:
        try:
            check_head(found)
            return found
        except ClusterLost as error:
            if heads_of_processes_here():  # otherwise the address was left by a cluster that was killed
                raise ClusterLost(
                    "a Ray cluster has processes on this machine, and its head does not answer",
                    hint="if it is ending, call again when its processes are gone. address= or RAY_ADDRESS name "
                    'another cluster; address="local" starts one for this process',
                    **error.details,
                ) from error
    if given is None:
        return None
    raise ClusterLost("no Ray cluster runs here", hint="--address or RAY_ADDRESS says which cluster is meant")


def _start_local(ray: Any, quiet: dict[str, Any]) -> None:
    global _watch
    ray.init(address="local", include_dashboard=False, object_store_memory=LOCAL_OBJECT_STORE_BYTES, **quiet)
    _watch = watch(logs_folder())


def end_local(ray: Any) -> None:
    """End the local cluster that this process started."""
    global _watch
    ray.shutdown()
    if _watch is not None:
        _watch.terminate()
        _watch.wait()
        _watch = None
