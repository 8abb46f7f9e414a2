"""Clients choose a cluster by its address, in processes that are not connected yet."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cluster
from cluster import client
from cluster.config import Config
from cluster.joining import ray_join
from storage.arena.arena_files import sweep
from storage.host.processes import ProcessId
from tests.support.free_ports import free_ports
from tests.support.ray_clusters import (
    ENVIRONMENT,
    NODE_START_S,
    OBJECT_STORE_BYTES,
    REPOSITORY,
    TEST_SETTINGS,
    Longshore,
    arenas_mapped_by,
    eventually,
)
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow

TRY = """
import sys, cluster
try:
    print(cluster.status(sys.argv[1]).version)
except cluster.LongshoreError as error:
    print(type(error).__name__, error)
"""


def said(address: str, code: str = TRY) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, address],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT},
    )
    return done.stdout + done.stderr[-2000:] * bool(done.returncode)


def test_ray_client_addresses_are_refused() -> None:
    text = said("ray://127.0.0.1:10001")
    assert text.startswith("ConfigError")
    assert "ray job submit" in text


def test_an_address_without_ray_is_a_lost_cluster() -> None:
    text = said("127.0.0.1:1")
    assert text.startswith("ClusterLost")
    assert "127.0.0.1:1" in text


LOAD = """
import sys, cluster
try:
    cluster.load(sys.argv[1], device="cpu", timeout_s=120)
except cluster.LongshoreError as error:
    print(type(error).__name__, error)
"""
LEFT = """
import ray
from ray._private.state import actors
from ray.util import list_named_actors, placement_group_table
print(actors(), list_named_actors(all_namespaces=True), placement_group_table())
ray.shutdown()
"""
LOCAL = """
with cluster.load(sys.argv[1], device="cpu", address="local") as model:
    print("ranks", len(model.report.ranks))
"""


def without_the_package() -> tuple[str, str]:
    """A Python that has Ray and not Longshore, and its PYTHONPATH: there `.pth` files do nothing."""
    python, packages = str(getattr(sys, "_base_executable", "")), sysconfig.get_path("purelib")
    tried = subprocess.run(
        [python, "-c", "import ray, importlib.util as u; print([u.find_spec(n) for n in ('longshore', 'actors')])"],
        env={**os.environ, "PYTHONPATH": packages},
        cwd="/",
        capture_output=True,
        text=True,
    )
    if tried.stdout != "[None, None]\n":
        pytest.skip(f"no such Python here: {tried.stdout or tried.stderr[-200:]}")
    return python, packages


@contextlib.contextmanager
def started_head(folder: Path, python: str = sys.executable, **variables: str) -> Iterator[tuple[str, dict[str, str]]]:
    """`ray start --head` by that Python: its address, and an environment in which Ray finds it by itself."""
    gcs, client, agent_http, agent_grpc = free_ports(4)
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environ |= {**ENVIRONMENT, "RAY_TMPDIR": str(folder), "LONGSHORE_ARENA_BYTES": "96MiB"}
    command = [python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2", "--num-gpus=0"]
    command += [f"--port={gcs}", f"--ray-client-server-port={client}", "--node-ip-address=127.0.0.1"]
    command += [f"--dashboard-agent-listen-port={agent_http}", f"--dashboard-agent-grpc-port={agent_grpc}"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-dashboard=false"]
    with (folder / "start.log").open("w+") as log:
        head = subprocess.Popen(
            command, env={**environ, **variables}, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        try:
            written = folder / "ray" / "ray_current_cluster"
            eventually(lambda: written.exists() or head.poll() is not None, lambda: _end_of(folder), NODE_START_S)
            assert written.exists(), _end_of(folder)
            yield f"127.0.0.1:{gcs}", environ
        finally:
            mine = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
            for process in mine:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(mine)
            head.wait()
            sweep()


def _end_of(folder: Path) -> str:
    """Return what a head that did not come up has written last."""
    return f"no head came up: {(folder / 'start.log').read_text()[-2000:]}"


def loaded(code: str, model: Path, environ: dict[str, str], folder: Path) -> str:
    """Return the output of a program that loads the model in a folder of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done.stdout + done.stderr[-2000:] * bool(done.returncode)


def test_a_cluster_without_the_package_is_left_unchanged(odd: StoredModel) -> None:
    python, packages = without_the_package()
    with tempfile.TemporaryDirectory(prefix="lf-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with started_head(folder, python, PYTHONPATH=packages) as (address, environ):
            looks_there = LEFT.replace(
                "import ray\n", f"import ray\nray.init(address='{address}', log_to_driver=False)\n"
            )
            refused, left, local = loaded(LOAD + looks_there + LOCAL, odd.folder, environ, folder).splitlines()
    assert refused.startswith("PackageMissing the cluster's nodes do not have longshore installed")
    assert address.removeprefix("127.0.0.1") in refused  # Ray names the host by another address of its own
    assert 'address="local"' in refused
    assert left == "{} [] {}"
    assert local == "ranks 1"


@pytest.mark.parametrize("listens", [True, False], ids=["a stopped head", "a head that ended"])
def test_a_head_that_does_not_answer_is_a_typed_error(listens: bool, tmp_path: Path) -> None:
    """Another process of its cluster is there, by which Ray finds it. Ray itself would wait for minutes."""
    # takes connections on every address, as the kernel does for a stopped process
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if not listens:
            server.close()
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        named = 'exec -a raylet "$0" -c "import time; time.sleep(900)" "$1"'
        raylet = subprocess.Popen(["bash", "-c", named, sys.executable, f"--gcs-address={address}"])
        try:
            environ = {**os.environ, **ENVIRONMENT, "RAY_TMPDIR": str(tmp_path)}
            environ.pop("RAY_ADDRESS", None)
            said_of = loaded(LOAD, tmp_path, environ, tmp_path)
        finally:
            raylet.kill()
            raylet.wait()
    assert said_of.startswith("ClusterLost a Ray cluster has processes on this machine, and its head does not answer")
    assert address.removeprefix("127.0.0.1") in said_of  # Ray names the host by another address of its own


KEEPS = """
import sys, cluster
from cluster import client
from cluster.joining.connection import disconnect
from cluster.joining.ray_private import logs_folder
model = cluster.load(sys.argv[1], device="cpu", address="local")
print(logs_folder(), flush=True)
if sys.stdin.readline().strip() == "shut down":
    client.shutdown()
disconnect()
print("ended", flush=True)
sys.stdin.readline()
"""


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ray_s_own(process: psutil.Process) -> bool:
    return ray_join.__name__ not in process.cmdline()


@pytest.mark.parametrize(
    "end",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("disconnect", marks=pytest.mark.long),
        "shut down",
    ],
)
def test_a_local_cluster_ends_with_the_process_that_started_it(end: int | str, odd: StoredModel) -> None:
    """It ends however that process ends. With a string as `end`, the process ends the cluster and goes on."""
    environ = {**os.environ, **ENVIRONMENT, "LONGSHORE_ARENA_BYTES": "96MiB"}
    with subprocess.Popen(
        [sys.executable, "-c", KEEPS, str(odd.folder)],
        env=environ,
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdout is not None
        assert client.stdin is not None
        logs = client.stdout.readline().strip()
        assert len(ray_join.members(logs)) >= 5  # head, agents, actors
        processes = [each for each in psutil.Process(client.pid).children(recursive=True) if ray_s_own(each)]
        assert len(processes) >= 5
        arenas = arenas_mapped_by(processes)
        assert arenas
        (watcher,) = (each for each in psutil.Process(client.pid).children() if ray_join.__name__ in each.cmdline())
        if isinstance(end, str):
            client.stdin.write(f"{end}\n")
            client.stdin.flush()
            assert client.stdout.readline() == "ended\n"
        else:
            client.send_signal(end)
            client.wait()
        eventually(lambda: not any(map(lives, processes)), lambda: f"left: {processes}", 60)
        assert not ray_join.members(logs)
        eventually(lambda: ProcessId.of(watcher.pid) is None, "the process that watches is left", 60)
        assert not any(map(os.path.exists, arenas))
        client.kill()


def test_status_starts_no_cluster() -> None:
    assert said("local").startswith("ClusterLost no Ray cluster runs here")


def test_another_process_finds_the_coordinator(longshore: Longshore) -> None:
    assert said(longshore.address).startswith(longshore.status().version)


def test_a_client_that_restarts_the_cluster_sets_no_settings(
    longshore: Longshore, odd: StoredModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the nodes' environment count, and the log names the others that differ."""
    options = {**odd.options, "device": "cpu"}
    longshore.end_longshore()
    cluster.load(odd.uri, **options, config=Config(**TEST_SETTINGS)).release()
    assert not caplog.records
    client.shutdown(longshore.address)
    eventually(lambda: not longshore.actor_names(), "the cluster does not end")
    others = {**TEST_SETTINGS, "disk_cache_dir": str(tmp_path), "arena_bytes": 32 << 20}
    with cluster.load(odd.uri, **options, config=Config(**others)):
        assert {node.arena_bytes for node in longshore.status().nodes} == {TEST_SETTINGS["arena_bytes"]}
        assert {node.disk_budget_bytes for node in longshore.status().nodes} == {0}
    assert "arena_bytes=100663296" in caplog.text
    assert "disk_cache_dir='none'" in caplog.text
    longshore.end_longshore()


INSIDE_RAY = """
import sys, ray, cluster
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=0)
def inside(uri):
    with cluster.load(uri, device="cpu") as model:
        return model.call(len)
print(ray.get(inside.remote(sys.argv[2])))
"""


def test_code_inside_ray_uses_its_connection(longshore: Longshore, odd: StoredModel) -> None:
    with longshore.run_client(INSIDE_RAY, longshore.address, str(odd.folder)) as client:
        assert client.stdout is not None
        assert client.stdout.readline().startswith("[")
    longshore.assert_nothing_left()
