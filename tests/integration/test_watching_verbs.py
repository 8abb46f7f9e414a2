"""`status --watch`, `events`, `logs` and `doctor` as processes of their own beside a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cluster
from actors.links import COORDINATOR
from tests.support.checkpoints import write_tiny_llama
from tests.support.ray_clusters import (
    ENVIRONMENT,
    OBJECT_STORE_BYTES,
    REPOSITORY,
    Longshore,
    environment,
    new_ray_cluster,
)
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow


def command(longshore: Longshore, *argv: str) -> dict[str, Any]:
    return {
        "args": [sys.executable, "-m", "longshore", *argv, "--address", longshore.address],
        "cwd": REPOSITORY,
        "env": {**os.environ, **ENVIRONMENT},
        "text": True,
    }


def run(longshore: Longshore, *argv: str) -> tuple[int, str, str]:
    done = subprocess.run(**command(longshore, *argv), capture_output=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


class Watching:
    """A `status --watch --json` that runs; each `look` is its next line."""

    def __init__(self, longshore: Longshore) -> None:
        argv = ("status", "--watch", "0.2", "--json")
        self.process = subprocess.Popen(**command(longshore, *argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def look(self) -> dict[str, Any]:
        if self.process.stdout is None:
            raise RuntimeError("no pipe")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended with {self.process.wait()}: {self.process.communicate()[1]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=60)
        return self.process.returncode


def test_a_load_is_watched_over_the_coordinators_death(longshore: Longshore, llama: StoredModel) -> None:
    watching = Watching(longshore)
    try:
        first = watching.look()
        assert first["models"] == []
        options: dict[str, Any] = {**llama.options, "device": "cpu", "tensor_parallel_size": 2, "keep": True}
        model = cluster.load(llama.uri, **options, address=longshore.address)
        look = watching.look()
        while [m["progress"]["state"] for m in look["models"]] != ["ready"]:
            look = watching.look()
        assert [rank["state"] for rank in look["models"][0]["ranks"]] == ["ready", "ready"]

        assert run(longshore, "events", model.model_id, "--follow", "--until", "ready", "--json")[0] == 0
        code, out, _ = run(longshore, "events", model.model_id)
        assert code == 0
        assert "loading -> ready" in out

        longshore.wait_restarted(COORDINATOR, longshore.kill(COORDINATOR))
        while (look := watching.look())["coordinator_incarnation"] == first["coordinator_incarnation"]:
            pass
        while [m["progress"]["state"] for m in look["models"]] != ["ready"]:
            look = watching.look()
        assert watching.end() == 130
    finally:
        watching.process.kill()
        watching.process.communicate()

    code, out, err = run(longshore, "logs", model.model_id, "--json")
    assert code == 0, err
    lines = json.loads(out)["lines"]
    assert json.loads(out)["silent_nodes"] == {}
    told = [line for line in lines if "loading -> ready" in line["text"]]
    # The one that was killed, and the one that took the load over.
    assert [line["process"] for line in told] == ["earlier coordinator", "coordinator"]
    assert all(model.model_id in line["text"] or line["process"].startswith("rank") for line in lines)
    code, out, _ = run(longshore, "logs", "--tail", "5")
    assert (code, len(out.splitlines())) == (0, 5)
    model.release()


def test_the_doctor_looks_at_every_node(longshore: Longshore, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "llama")
    code, out, err = run(longshore, "doctor", str(tmp_path / "llama"), "--bandwidth", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 1, err  # the nodes claim GPUs that do not exist, and no driver is there
    expected = {"node": "ok", "gpus": "fail", "clock": "ok", "niceness": "warn", "store": "ok", "bandwidth": "ok"}
    for kind, outcome in expected.items():
        found = [check for name, check in checks.items() if name.startswith(f"{kind} ")]
        assert [check["outcome"] for check in found] == [outcome, outcome], found
    assert "into 2 nodes at once" in checks["bandwidth"]["detail"]


NICENESS = """
import os, sys, cluster
with cluster.load(sys.argv[1], device="cpu", address=sys.argv[2]) as model:
    print(model.call(lambda shard: os.getpriority(os.PRIO_PROCESS, 0)))
"""


@pytest.mark.long
def test_workers_have_the_niceness_that_nodes_were_started_with(odd: StoredModel, tmp_path: Path) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    started = environment({**ENVIRONMENT, "RAY_worker_niceness": "0", "LONGSHORE_ARENA_BYTES": "96MiB"})
    with started, new_ray_cluster(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES) as nodes:
        asked: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 240, "cwd": REPOSITORY}
        without = {name: value for name, value in os.environ.items() if name != "RAY_worker_niceness"}
        loaded = [sys.executable, "-c", NICENESS, str(odd.folder), nodes.address]
        assert subprocess.run(loaded, env=without, check=True, **asked).stdout == f"[{here}]\n"
        doctor = [sys.executable, "-m", "longshore", "doctor", "--json", "--address", nodes.address]
        checks = json.loads(subprocess.run(doctor, env=without, **asked).stdout)["checks"]
    (niceness,) = (check for check in checks if check["name"].startswith("niceness "))
    assert niceness["detail"] == f"workers run with niceness {here}"
