"""A Ray cluster whose head can be lost and started again: `ray start` on two addresses of this host.

    with HeadCluster() as there:                    # without GCS fault tolerance
        there.lose_head()
    with Redis() as redis, HeadCluster(redis) as there:
        there.lose_head()
        there.start_head()                          # the same cluster

Clients are processes of their own (`client`), joined through the worker node: they outlive the head.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from storage.arena.arena_files import sweep
from tests.support.free_ports import free_ports
from tests.support.losable_nodes import FAST_DEATH
from tests.support.ray_clusters import ENVIRONMENT, OBJECT_STORE_BYTES, REPOSITORY, arenas_of, eventually

HEAD_IP, WORKER_IP = "127.0.0.2", "127.0.0.3"  # Ray takes nodes of one address for one host, and 127.0.0.1 for none
WAIT_S = 240.0  # for what must come, on however slow a machine
NODE_VARIABLE = "LOST_HEAD_TEST_NODE"  # all processes of a node have it
STARTED = "Ray runtime started"
START_TRIES = 5  # `ray start` fails after 30 s
PATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": f"{2 * WAIT_S:.0f}"}  # a head takes long to start, too


class Redis:
    """A `redis-server` that keeps nothing on disk."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self._process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        eventually(self._answers, "redis-server does not answer", WAIT_S)

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("redis-server") is not None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait(30)


class HeadCluster:
    """A head and one worker node. `environ`: for nodes and clients."""

    def __init__(self, redis: Redis | None = None, **environ: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lh-", dir="/tmp"))
        (self._port,) = free_ports(1)
        self.address = f"{HEAD_IP}:{self._port}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._environ = {**kept, **ENVIRONMENT, **environ, "RAY_TMPDIR": str(self._folder)}
        self._at_head = {}
        if redis is not None:
            self._environ |= PATIENT
            self._at_head = {
                "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis.port}",
                "RAY_external_storage_namespace": self._folder.name,
            }
        self._started: list[subprocess.Popen[str]] = []
        self._head: subprocess.Popen[str] | None = None
        self._worker: subprocess.Popen[str] | None = None
        try:
            self.start_head()
            self.start_worker()
        except BaseException:
            self.close()
            raise

    def start_head(self) -> None:
        """Start a head at the address of the previous one."""
        (self._folder / "r" / "ray_current_cluster").unlink(missing_ok=True)  # on the lost machine it would be gone
        self._head = self._start_node(
            "head",
            *("--head", f"--port={self._port}", f"--node-ip-address={HEAD_IP}", "--include-dashboard=false"),
            *(f"--temp-dir={self._folder}/r", f"--system-config={json.dumps(FAST_DEATH)}"),
            **self._at_head,
        )

    def start_worker(self) -> None:
        self._worker = self._start_node("worker", f"--address={self.address}", f"--node-ip-address={WORKER_IP}")

    def lose_head(self) -> None:
        """SIGKILL to every process of the head's node."""
        if self._head is not None:
            end_tree(self._head.pid)

    @property
    def worker_is_up(self) -> bool:
        """Return whether the worker's node still runs; Ray ends it some time after the head."""
        return self._worker is not None and self._worker.poll() is None

    def client(self, code: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """A Python process joined through the worker node; it is talked to by lines."""
        process = subprocess.Popen(
            [sys.executable, "-c", JOIN + code, self.address, WORKER_IP, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**self._environ, **environ, "PYTHONPATH": str(REPOSITORY)},
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def arenas(self) -> list[str]:
        """Files in shared memory, of this cluster and of those that were here before."""
        return arenas_of(self.address)

    def close(self) -> None:
        """End every process that was started here, and theirs."""
        for process in reversed(self._started):
            end_tree(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the others are ended all the same
                process.wait(30)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        end_all_with("RAY_TMPDIR", str(self._folder))
        sweep()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_node(self, name: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        path = self._folder / f"{name}-{len(self._started)}.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--block", "--disable-usage-stats"]
        command += ["--num-cpus=2", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        mark = {NODE_VARIABLE: str(path)}
        node = start_node(command, path, {**self._environ, **environ, "PYTHONPATH": str(REPOSITORY)}, mark)
        self._started.append(node)
        return node

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


JOIN = f"""
import sys, ray
address, ip = sys.argv[1:3]
del sys.argv[1:3]
ray.init(address=address, _node_ip_address=ip, namespace="test", log_to_driver=False, configure_logging=False)
NODE = "node:{WORKER_IP}"
"""


def start_node(
    command: list[str], log: Path, environ: Mapping[str, str], mark: Mapping[str, str]
) -> subprocess.Popen[str]:
    """A `ray start --block` that is up. Ray's own try fails after 30 s; the next try starts with nothing left of it.

    `log`: what it says, in the folder it runs in. `mark`: a variable that processes of this node have and no others,
    with its value. Raises RuntimeError with the end of the log when it does not come up.
    """
    tries_left = START_TRIES
    while True:
        tries_left -= 1
        with open(log, "w") as out:
            node = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=log.parent,
                env={**environ, **mark},
                text=True,
                start_new_session=True,
            )
        try:
            eventually(lambda node=node: _is_up(node, log), lambda: f"ray start does not end: {_end_of(log)}", WAIT_S)
            return node
        except BaseException as error:
            end_node(node, mark)
            if not tries_left or not isinstance(error, RuntimeError):
                raise


def _is_up(node: subprocess.Popen[str], log: Path) -> bool:
    if node.poll() is not None:
        raise RuntimeError(f"ray start failed: {_end_of(log)}")
    return STARTED in log.read_text()


def _end_of(log: Path) -> str:
    return log.read_text()[-2000:]


def end_node(node: subprocess.Popen[str], mark: Mapping[str, str]) -> None:
    """Send SIGKILL to all processes of a node of `start_node`, also to those whose parents ended."""
    end_tree(node.pid)
    node.wait(WAIT_S)
    for variable, value in mark.items():
        end_all_with(variable, value)


def end_all_with(variable: str, value: str) -> None:
    """Send SIGKILL to every process with this in its environment, also to those whose parents ended."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == value:
                process.kill()


def end_tree(pid: int) -> None:
    """Send SIGKILL to a process and its descendants, the oldest first, so that none restarts or cleans up."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        everything = [parent, *parent.children(recursive=True)]
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everything, timeout=30)


def run_to_its_end(command: list[str], timeout_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as `subprocess.run` does. After the timeout, end it with its children and its cluster."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            end_tree(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def said(client: subprocess.Popen[str], word: str) -> str:
    """Return what a client prints after this word. AssertionError when it ends before."""
    if client.stdout is None:
        raise ValueError("not a client of HeadCluster")
    for line in client.stdout:
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise AssertionError(f"the client ended with {client.wait()} and did not say {word}")
