"""ministack, an emulator of S3 that knows requests which rclone lacks: composite checksums, copies of parts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import pytest

from storage.store_ref import Credentials
from tests.support.free_ports import free_ports

START_TIMEOUT_S = 60.0


class MinistackServer:
    """An S3 emulator that keeps composite checksums and tells the parts of an object; it accepts any keys.

    It pins an older botocore, so it is no dependency: install `ministack` into another environment and put its program
    on PATH. Tests that need it are skipped without.
    """

    def __init__(self, folder: Path) -> None:
        program = shutil.which("ministack")
        if program is None:
            pytest.skip("ministack is not installed")
        self.access_key_id, self.secret_access_key = "anybody", "any-secret"
        (self._port,) = free_ports(1)
        self.endpoint_url = f"http://127.0.0.1:{self._port}"
        environ = {**os.environ, "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(self._port)}
        with open(folder / "ministack.log", "wb") as log:
            self._child = subprocess.Popen(
                [program], env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def __enter__(self) -> Self:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._child.poll() is None and time.monotonic() < deadline_s:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return self
            except OSError:
                time.sleep(0.1)
        self.__exit__()
        raise RuntimeError("ministack did not start")

    def credentials(self) -> Credentials:
        return Credentials(self.access_key_id, self.secret_access_key)

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
