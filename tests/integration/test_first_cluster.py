"""docs/first_cluster.md, walked as it is written: its code blocks are run, in their order, in terminals of their own.

Other than in the document: ports and a Ray that is small, so that several can be on a machine; a smaller model; and no
`ray stop`, which would end the Ray of others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from storage.arena.arena_files import sweep
from tests.support.free_ports import free_ports
from tests.support.promtool import needs_prometheus
from tests.support.ray_clusters import eventually

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200), needs_prometheus]

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent  # of the environment under test
DOCUMENT = (ROOT / "docs" / "first_cluster.md").read_text()
LASTING = ("longshore serve", "longshore status --watch", "prometheus ")  # until Ctrl-C, in a terminal each
LONGEST_S = 400  # a line
WAIT_S = 300  # for what must come, on however slow a machine
START_TRIES = 3  # `ray start` fails after 30 s


def steps() -> dict[str, list[str]]:
    """Number of the step -> its command lines."""
    found = {}
    for number, text in re.findall(r"^## (\d)\. .*?\n(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL):
        blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        found[number] = [line for line in blocks.splitlines() if line.strip()]
    return found


class Machine:
    """Runs lines of the document in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        gcs, dashboard, client, agent, agent_grpc, self.http, metrics, self.prometheus = free_ports(8)
        self.folder = folder
        self.ports = {"8265": dashboard, "8000": self.http, "9464": metrics, "9091": self.prometheus}
        self.ray = (
            f" --port={gcs} --dashboard-port={dashboard} --ray-client-server-port={client} --num-cpus=4"
            f" --dashboard-agent-listen-port={agent} --dashboard-agent-grpc-port={agent_grpc} --num-gpus=0"
            " --node-ip-address=127.0.0.1 --object-store-memory=80000000"
        )
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "LONGSHORE_"))},
            "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
            "HOME": str(folder),  # what runs here is known by it
            "RAY_TMPDIR": str(folder),
            "RAY_AUTH_MODE": "disabled",
            "LONGSHORE_ARENA_BYTES": "160MB",
            "LONGSHORE_HTTP_PORT": str(self.http),
            "LONGSHORE_METRICS_PORT": str(metrics),
        }
        self.started = {"RAY_ADDRESS": f"127.0.0.1:{gcs}"}  # the cluster, among others that may be there
        config = folder / "k8s" / "monitoring"
        config.mkdir(parents=True)
        shutil.copy(ROOT / "k8s" / "monitoring" / "rules.yaml", config)
        (config / "prometheus.yml").write_text(self._here((ROOT / "k8s/monitoring/prometheus.yml").read_text()))
        self.terminals: dict[str, subprocess.Popen[str]] = {}

    def _here(self, text: str) -> str:
        for port, mine in self.ports.items():
            text = re.sub(rf"\b{port}\b", str(mine), text)
        return text.replace("--size 2GB", "--size 40MB").replace("ray start --head", f"ray start --head{self.ray}")

    def run(self, line: str) -> str:
        """Run the line, which must succeed, and return its stdout."""
        starts = "ray start" in line
        done = self._try_to_run(line)
        for _ in range(START_TRIES - 1 if starts else 0):
            if done.returncode != 0:
                self._end_all()  # what it leaves has the ports
                done = self._try_to_run(line)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        if starts:
            self.environ.update(self.started)
        return done.stdout

    def _try_to_run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-eo", "pipefail", "-c", self._here(line)],
            env=self.environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )

    def open_terminal(self, line: str) -> None:
        with open(self.folder / f"{len(self.terminals)}.log", "w") as log:
            self.terminals[line] = subprocess.Popen(
                ["bash", "-c", f"exec {self._here(line)}"],
                env=self.environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def said_in(self, line: str) -> str:
        """Return the output of a terminal so far."""
        return (self.folder / f"{list(self.terminals).index(line)}.log").read_text()

    def ask(self, url: str) -> str:
        """Return the answer; empty while the server does not answer."""
        try:
            with urllib.request.urlopen(self._here(url), timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def close(self) -> None:
        self._end_all()
        for process in self.terminals.values():
            process.wait(WAIT_S)
        sweep()

    def _end_all(self) -> None:
        """SIGKILL to every process that was started here, and theirs."""
        mine: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("HOME") == str(self.folder):
                    mine |= {process, *process.children(recursive=True)}
        for process in mine:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(list(mine), timeout=WAIT_S)


@pytest.fixture
def machine() -> Iterator[Machine]:
    if not os.access(SCRIPTS / "longshore", os.X_OK):
        pytest.skip("longshore is not installed in this environment (pip install -e .)")
    with tempfile.TemporaryDirectory(prefix="lw-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        there = Machine(Path(folder))
        try:
            yield there
        finally:
            there.close()


def test_a_new_user_walks_the_document(machine: Machine) -> None:
    walk = steps()
    assert list(walk) == ["1", "2", "3", "4", "5", "6", "7"]
    for line in walk["2"] + walk["3"]:
        machine.run(line)

    serve, watch, prometheus = walk["4"]
    assert [any(line.startswith(lasting) for lasting in LASTING) for line in walk["4"]] == [True] * 3
    for line in walk["4"]:
        machine.open_terminal(line)

    def page_is_there() -> bool:
        assert machine.terminals[serve].poll() is None, machine.said_in(serve)
        return "<html" in machine.ask("http://127.0.0.1:8000/")

    eventually(page_is_there, lambda: machine.said_in(serve), WAIT_S)
    eventually(lambda: machine.ask("http://127.0.0.1:9091/-/ready"), lambda: machine.said_in(prometheus), WAIT_S)
    eventually(lambda: "coordinator " in machine.said_in(watch), lambda: machine.said_in(watch), WAIT_S)

    (load,) = walk["5"]
    # (Ray's agent of jobs may not be up yet, as the document says.)
    machine.run(f"for try in 1 2 3 4 5 6; do {load} && exit; sleep 3; done; exit 1")
    eventually(lambda: " ready " in machine.said_in(watch), lambda: machine.said_in(watch), WAIT_S)
    assert any(f" {state} " in machine.said_in(watch) for state in ("planning", "starting", "loading"))
    assert '"state":"ready"' in machine.ask("http://127.0.0.1:8000/v1/models").replace(" ", "")

    status, events, logs, scrape, query, doctor, again = walk["6"]
    assert "ready" in machine.run(status)
    assert "loading -> ready" in machine.run(events)
    assert "first-model" in machine.run(logs)
    assert "store_via_arena" in machine.run(scrape)
    eventually(lambda: json.loads(machine.run(query))["data"]["result"], lambda: machine.said_in(prometheus), WAIT_S)
    assert "requests at once" in machine.run(doctor)
    machine.run(again)
    assert len(set(re.findall(r"first-model-[0-9a-f]{8}", machine.ask("http://127.0.0.1:8000/v1/models")))) == 2

    *ends, ray_stop = walk["7"]
    for line in ends:
        machine.run(line)
    assert ray_stop == "ray stop"
    codes = {}
    for line, process in machine.terminals.items():
        process.send_signal(signal.SIGINT)
        codes[line] = process.wait(WAIT_S)
    assert codes[serve] == 130, machine.said_in(serve)
    assert codes[watch] in (7, 130)  # the first, when it sees that Longshore was shut down
    assert codes[prometheus] == 0, machine.said_in(prometheus)
