"""Ceph's radosgw, a second real S3 implementation: one monitor, one OSD in memory, one gateway, as child processes.

Debian: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common. No systemd, no manager daemon;
all files in one folder; the children end with the block, and with the parent however that dies.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from storage.store_ref import Credentials
from tests.support.free_ports import free_ports

_PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool")

_CONFIG = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_v2}/0,v1:127.0.0.1:{mon_v1}/0]
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.log
log to stderr = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 2
mon max pg per osd = 2000
auth allow insecure global id reclaim = false
osd objectstore = memstore
memstore device bytes = {memory_bytes}
crush location = root=default host=localhost
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw data = {folder}/rgw
rgw thread pool size = 64
"""


def missing_programs() -> list[str]:
    """Which of Ceph's programs are not on this machine."""
    return [name for name in _PROGRAMS if shutil.which(name) is None]


class CephServer:
    """Starts in about 13 s. `access_log` is the gateway's own: one line per request with status, bytes and range."""

    def __init__(self, folder: Path, *, memory_bytes: int = 2 << 30, start_timeout_s: float = 90.0) -> None:
        """`folder` is new and short: Unix sockets are made in it. Raises RuntimeError with the logs' ends."""
        self.folder = folder
        self.access_key_id = "CEPHTESTKEY"
        self.secret_access_key = "ceph-test-secret"
        self.access_log = folder / "client.rgw.log"
        self._deadline_s = time.monotonic() + start_timeout_s
        self._children: list[subprocess.Popen[bytes]] = []
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("CEPH_")}
        port, mon_v1, mon_v2 = free_ports(3)
        self.endpoint_url = f"http://127.0.0.1:{port}"
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir(parents=True)
        self._config = folder / "ceph.conf"
        self._config.write_text(
            _CONFIG.format(
                fsid=uuid.uuid4(), folder=folder, port=port, mon_v1=mon_v1, mon_v2=mon_v2, memory_bytes=memory_bytes
            )
        )
        try:
            self._start(port, mon_v1, mon_v2)
        except BaseException:
            self.close()
            raise

    def credentials(self) -> Credentials:
        """The keys this server accepts."""
        return Credentials(access_key_id=self.access_key_id, secret_access_key=self.secret_access_key)

    def close(self) -> None:
        """End the gateway, the OSD and the monitor, in that order. Idempotent."""
        for child in reversed(self._children):
            # Nothing in memory is worth an orderly end.
            if child.poll() is None:
                child.kill()
            child.wait()
        self._children.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, port: int, mon_v1: int, mon_v2: int) -> None:
        config, keyring, monmap = str(self._config), str(self.folder / "keyring"), str(self.folder / "monmap")
        fsid = next(line for line in self._config.read_text().splitlines() if line.startswith("fsid")).split()[-1]
        for args in (
            ["--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"],
            [keyring, "--gen-key", "-n", "client.admin", "--cap", "mon", "allow *", "--cap", "osd", "allow *"],
            [keyring, "--gen-key", "-n", "client.rgw", "--cap", "mon", "allow rw", "--cap", "osd", "allow rwx"],
            [keyring, "--gen-key", "-n", "osd.0", "--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"],
        ):
            self._run("ceph-authtool", *args)
        address = f"[v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]"
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
        self._run("ceph-mon", "-c", config, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._spawn("ceph-mon", "-c", config, "-i", "a", "-f")
        osd = str(uuid.uuid4())
        self._run("ceph", "-c", config, "osd", "new", osd)
        self._run("ceph-osd", "-c", config, "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._spawn("ceph-osd", "-c", config, "-i", "0", "-f")
        self._until(lambda: "1 up" in self._run("ceph", "-c", config, "osd", "stat"))
        self._spawn("radosgw", "-c", config, "-n", "client.rgw", "-f")
        self._until(lambda: _answers(port))
        self._run(
            *("radosgw-admin", "-c", config, "user", "create", "--uid=test", "--display-name=test"),
            *(f"--access-key={self.access_key_id}", f"--secret-key={self.secret_access_key}"),
        )

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=max(1.0, self._deadline_s - time.monotonic()),
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr[-500:]}")
        return done.stdout

    def _spawn(self, *command: str) -> None:
        prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

        def die_with_parent() -> None:
            prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG; pytest's main thread forks, and lives to the end
            if os.getppid() != parent:
                os._exit(1)

        with open(self.folder / f"{command[0]}.out", "wb") as out:
            child = subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._children.append(child)

    def _until(self, ready: object) -> None:
        while not ready():  # type: ignore[operator]
            for child in self._children:
                if child.poll() is not None:
                    raise RuntimeError(f"{child.args[0]!r} ended with {child.returncode}")  # type: ignore[index]
            if time.monotonic() > self._deadline_s:
                raise RuntimeError("Ceph did not start in time")
            time.sleep(0.2)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
