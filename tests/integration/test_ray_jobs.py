"""`ray job submit -- longshore load ...` for real, with Ray's token authentication off and on."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from storage.arena.arena_files import sweep
from tests.support.free_ports import free_ports
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow


START_TIMEOUT_S = 150.0
SCRIPTS = Path(sys.executable).parent  # of the environment under test: `ray`, `longshore`, `python`


class JobCluster:
    """`ray start --head --block`; every process of it is ended with the block."""

    def __init__(self, *, token: bool, environ: dict[str, str]) -> None:
        """Start a cluster. With `token`, Ray needs RAY_AUTH_TOKEN; else not. `environ`: for nodes and jobs."""
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
        """Run `ray job submit` until the job has ended. Return (exit code, all output)."""
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

    def __exit__(self, *error: object) -> None:
        self.close()


def json_in(text: str) -> Any:
    """The JSON document that a command printed, among the lines that Ray adds."""
    start, end = text.index("\n{\n") + 1, text.rindex("\n}") + 2
    return json.loads(text[start:end])


@pytest.fixture
def jobs(request: pytest.FixtureRequest, llama: StoredModel) -> Iterator[JobCluster]:
    """A cluster whose nodes can read the store; the fixture's parameter says whether Ray asks for a token."""
    if not os.access(SCRIPTS / "longshore", os.X_OK):
        pytest.skip("longshore is not installed in this environment (pip install -e .)")
    server = llama.server
    environ = {
        "AWS_ACCESS_KEY_ID": server.access_key_id,  # nodes have their credentials; no command line carries any
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_REGION": server.region,
        "LONGSHORE_ARENA_BYTES": str(64 << 20),
        "LONGSHORE_SLOT_BYTES": str(1 << 20),
        "LONGSHORE_HOST_RESERVE_BYTES": str(64 << 20),
    }
    with JobCluster(token=request.param, environ=environ) as cluster:
        yield cluster


@pytest.mark.parametrize("jobs", [False], indirect=True, ids=["no authentication"])
def test_a_model_outlives_the_job_that_loaded_it(jobs: JobCluster, llama: StoredModel, tmp_path: Path) -> None:
    code, said = jobs.submit("longshore", "load", llama.uri, "--fsdp", "2", "--device", "cpu", "--json")
    assert code == 0, said
    report = json_in(said)
    assert (report["verified"], len(report["ranks"])) == ("blake3", 2)
    # A second job, by the other name of the command; then a driver that is no job at all.
    code, said = jobs.submit("python", "-m", "cluster", "status", "--json")
    assert code == 0, said
    (model,) = json_in(said)["models"]
    assert (model["progress"]["model_id"], model["progress"]["state"], model["keep"]) == (
        report["model_id"],
        "ready",
        True,
    )
    longshore = str(SCRIPTS / "longshore")
    code, said = jobs.run(longshore, "load", llama.uri, "--fsdp", "2", "--device", "cpu", "--json")
    assert code == 0, said
    again = json_in("\n" + said)
    assert (again["model_id"], again["resident"]) == (report["model_id"], True)
    # A job fails when its command does.
    code, said = jobs.submit("longshore", "load", "s3://no-such-bucket/model", "--device", "cpu")
    assert code == 1, said
    assert "no-such-bucket" in said
    # Conversions by the nodes of the cluster, with the exit codes of the command.
    convert = ("longshore", "convert", "--on-cluster", "--workers", "2", "--json")
    code, said = jobs.submit(*convert, llama.uri, str(tmp_path / "model"))
    assert code == 0, said
    report = json_in(said)
    assert (report["format"], report["workers"], report["verified"]) == ("safetensors", 2, True)
    code, said = jobs.run(str(SCRIPTS / "longshore"), *convert[1:], str(tmp_path), "s3://no-such-bucket/model")
    assert code == 5, said
    # A working_dir that has a folder of our name in it.
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "__init__.py").write_text("")
    code, said = jobs.submit("python", "-m", "longshore", "status", working_dir=tmp_path)
    assert code == 1, said
    assert "not Longshore's own packages" in said
    assert "working_dir" in said
    code, said = jobs.run(longshore, "release", "--all", "--force", "--shutdown", "--json")
    assert code == 0, said
    code, said = jobs.run(longshore, "status")
    assert code == 7, said


@pytest.mark.long
@pytest.mark.parametrize("jobs", [True], indirect=True, ids=["token"])
def test_with_token_authentication(jobs: JobCluster, llama: StoredModel) -> None:
    code, said = jobs.submit("longshore", "load", llama.uri, "--device", "cpu", "--json")
    assert code == 0, said
    code, said = jobs.run(str(SCRIPTS / "longshore"), "status", "--json")
    assert code == 0, said
    (model,) = json_in("\n" + said)["models"]
    assert model["progress"]["state"] == "ready"
    # Without the token nobody gets in, and nobody hangs.
    jobs.environ["RAY_AUTH_TOKEN"] = "0" * 64
    code, said = jobs.run(str(SCRIPTS / "longshore"), "status")
    assert code == 7, said
