"""A Ray cluster with a dashboard, as `ray start` makes it, for `ray job submit`: own ports, folder and processes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from storage.arena.arena_files import sweep
from tests.support.free_ports import free_ports

START_TIMEOUT_S = 150.0
SCRIPTS = Path(sys.executable).parent  # of the environment under test: `ray`, `longshore`, `python`


class JobCluster:
    """`ray start --head --block`; every process of it is ended with the block."""

    def __init__(self, *, token: bool, environ: dict[str, str]) -> None:
        """With `token`, Ray asks for RAY_AUTH_TOKEN; else authentication is off. `environ`: for nodes and jobs."""
        self._folder = tempfile.TemporaryDirectory(prefix="lj-", dir="/tmp", ignore_cleanup_errors=True)
        gcs, dashboard, client, agent_http, agent_grpc = free_ports(5)
        self.dashboard_url = f"http://127.0.0.1:{dashboard}"
        self.address = f"127.0.0.1:{gcs}"
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            **environ,
            "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
            "HOME": self._folder.name,  # where Ray would look for, and leave, a token
            "RAY_AUTH_MODE": "token" if token else "disabled",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        if token:
            self.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        command = [str(SCRIPTS / "ray"), "start", "--head", "--block", "--num-cpus=4", "--num-gpus=0"]
        command += [
            "--object-store-memory=80000000",
            "--node-ip-address=127.0.0.1",
            f"--temp-dir={self._folder.name}/r",
        ]
        command += [f"--port={gcs}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
        command += [f"--dashboard-agent-listen-port={agent_http}", f"--dashboard-agent-grpc-port={agent_grpc}"]
        self._log = open(Path(self._folder.name) / "start.log", "w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env=self.environ,
            cwd=self._folder.name,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait_up(time.monotonic() + START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def submit(self, *entrypoint: str, working_dir: Path | None = None, timeout_s: float = 150) -> tuple[int, str]:
        """`ray job submit`, until the job has ended: (exit code, everything it said)."""
        command = [str(SCRIPTS / "ray"), "job", "submit", "--address", self.dashboard_url]
        command += ["--working-dir", str(working_dir)] if working_dir else []
        return self.run(*command, "--", *entrypoint, timeout_s=timeout_s)

    def run(self, *command: str, timeout_s: float = 150) -> tuple[int, str]:
        """A command on the head's machine, outside of any job."""
        done = subprocess.run(
            command,
            env={**self.environ, "RAY_ADDRESS": self.address},
            cwd=self._folder.name,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return done.returncode, done.stdout + done.stderr

    def close(self) -> None:
        """End every process that was started here."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            mine = [*parent.children(recursive=True), parent]
            # Detached from its parent or not: what runs on our temp folder is ours.
            mine += [process for process in psutil.process_iter() if self._is_ours(process) and process not in mine]
            for process in mine:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(mine, timeout=10)
        self._process.wait(10)
        self._log.close()
        sweep()
        self._folder.cleanup()

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.environ().get("HOME") == self._folder.name
        return False

    def _wait_up(self, give_up_s: float) -> None:
        # The dashboard answers before the agent that starts jobs does: a job that ends well is the proof.
        while True:
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                self._log.seek(0)
                raise RuntimeError(f"ray start failed: {self._log.read()[-2000:]}")
            code, _ = self.run(str(SCRIPTS / "ray"), "job", "list", "--address", self.dashboard_url)
            with contextlib.suppress(subprocess.TimeoutExpired):  # not up yet
                if code == 0 and self.submit("true", timeout_s=60)[0] == 0:
                    return
            time.sleep(0.5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def json_in(text: str) -> Any:
    """The JSON document that a command printed, among the lines that Ray adds."""
    start, end = text.index("\n{\n") + 1, text.rindex("\n}") + 2
    return json.loads(text[start:end])
