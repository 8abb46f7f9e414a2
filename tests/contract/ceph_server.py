"""Ceph's S3 gateway as a test server: one monitor and one OSD in memory, behind `radosgw`, all on this machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from socket import create_connection
from typing import Self

from storage.store_ref import Credentials
from tests.support.free_ports import free_ports

START_TIMEOUT_S = 90.0
_PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool")
_CONFIG = """\
[global]
fsid = {fsid}
mon host = {monitor}
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
memstore device bytes = 2147483648
crush location = root=default host=localhost
mon data = {folder}/mon
osd data = {folder}/osd
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw data = {folder}/rgw
rgw thread pool size = 64
"""


def missing_programs() -> list[str]:
    """Return which of Ceph's programs are not on this machine."""
    return [name for name in _PROGRAMS if shutil.which(name) is None]


class CephServer:
    """A running gateway; starts in about 13 s."""

    access_key_id = "CEPHTESTKEY"
    secret_access_key = "ceph-test-secret"

    def __init__(self, folder: Path) -> None:
        """`folder` is new and short: Unix sockets are made in it. Raises RuntimeError with the logs' ends."""
        self._folder = folder
        self._deadline_s = time.monotonic() + START_TIMEOUT_S
        self._children: list[subprocess.Popen[bytes]] = []
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("CEPH_")}
        port, mon_v1, mon_v2 = free_ports(3)
        self.endpoint_url = f"http://127.0.0.1:{port}"
        try:
            self._start(port, f"[v2:127.0.0.1:{mon_v2}/0,v1:127.0.0.1:{mon_v1}/0]")
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def credentials(self) -> Credentials:
        """Return the keys this server accepts."""
        return Credentials(access_key_id=self.access_key_id, secret_access_key=self.secret_access_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._children:  # the gateway first; nothing in memory is worth an orderly end
            child = self._children.pop()
            child.kill()
            child.wait()

    def _start(self, port: int, monitor: str) -> None:
        for name in ("mon", "osd", "rgw"):
            (self._folder / name).mkdir(parents=True)
        config, keyring, monmap = (str(self._folder / name) for name in ("ceph.conf", "keyring", "monmap"))
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        Path(config).write_text(_CONFIG.format(fsid=fsid, folder=self._folder, port=port, monitor=monitor))
        for name, *grants in (
            ("mon.", "mon", "allow *"),
            ("client.admin", "mon", "allow *", "osd", "allow *"),
            ("client.rgw", "mon", "allow rw", "osd", "allow rwx"),
            ("osd.0", "mon", "allow profile osd", "osd", "allow *"),
        ):
            caps = [word for at in range(0, len(grants), 2) for word in ("--cap", *grants[at : at + 2])]
            create = [] if os.path.exists(keyring) else ["--create-keyring"]
            self._run("ceph-authtool", *create, keyring, "--gen-key", "-n", name, *caps)
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", monitor.replace("/0", ""), monmap)
        self._run("ceph-mon", "-c", config, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._spawn("ceph-mon", "-c", config, "-i", "a", "-f")
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
        left_s = max(1.0, self._deadline_s - time.monotonic())
        done = subprocess.run(
            command, env=self._environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=left_s
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr[-500:]}")
        return done.stdout

    def _spawn(self, *command: str) -> None:
        prctl = ctypes.CDLL(None).prctl

        def die_with_parent() -> None:
            prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG; pytest's main thread forks, and lives to the end

        with open(self._folder / f"{command[0]}.out", "wb") as out:
            child = subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        self._children.append(child)

    def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            for child in self._children:
                if child.poll() is not None:
                    raise RuntimeError(f"{child.args!r:.100} ended with {child.returncode}")
            if time.monotonic() > self._deadline_s:
                raise RuntimeError("Ceph did not start in time")
            time.sleep(0.2)


def _answers(port: int) -> bool:
    with suppress(OSError):
        create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False
