"""`longshore doctor`: the result of each check when all is well, and when it is not."""

from __future__ import annotations

import http.server
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from cluster.command_line.cli import main
from cluster.config import Config
from cluster.doctor import doctor, host_checks
from cluster.doctor.doctor import guarded, run_checks
from cluster.doctor.host_checks import Check
from longshore.installation import probe
from storage.arena.arena_files import ARENA_PREFIX
from storage.errors import AccessDenied
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import write_tiny_llama
from tests.support.head_cluster import run_to_its_end
from tests.support.http_servers import place, serving


def outcomes(checks: Iterable[Check]) -> dict[str, str]:
    return {check.name: check.outcome for check in checks}


def the(checks: Iterable[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH, for programs written by a test."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


# one failing check never stops the rest


def test_a_check_that_raises_fails_with_the_reason() -> None:
    def breaks() -> Iterator[Check]:
        yield Check("first half", "ok", "seen")
        raise ZeroDivisionError("a bug")

    assert guarded("whole", breaks) == [
        Check("first half", "ok", "seen"),
        Check("whole", "fail", "ZeroDivisionError: a bug"),
    ]


def test_an_error_of_ours_keeps_its_hint() -> None:
    def refused() -> Iterator[Check]:
        raise AccessDenied("no", hint="log in", bucket="b")

    assert guarded("store", refused) == [Check("store", "fail", "no (bucket=b). log in")]


def test_every_group_runs_after_any_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_checks, doctor):
        for name in [name for name in vars(module) if name.startswith("check_") and name != "check_settings"]:
            monkeypatch.setattr(module, name, lambda *_, **__: 1 / 0)
    checks = run_checks()
    assert outcomes(checks) == {
        "settings": "ok",
        **dict.fromkeys(
            ("packages", "memory", "/dev/shm", "stale arenas", "disk tier", "gpu driver", "torch", "ray", "store"),
            "fail",
        ),
    }


def test_bad_settings_are_one_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_torch", "check_driver", "check_stale_arenas"):
        monkeypatch.setattr(host_checks, name, list)
    monkeypatch.setattr(doctor, "check_cluster", lambda *_, **__: [])
    monkeypatch.setenv("LONGSHORE_FETCH_THREADS", "none")
    checks = run_checks()
    assert the(checks, "settings").outcome == "fail"
    assert "LONGSHORE_FETCH_THREADS" in the(checks, "settings").detail
    assert the(checks, "packages").outcome == "ok"


def test_an_unknown_variable_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_checks, doctor):
        for name in [name for name in vars(module) if name.startswith("check_") and name != "check_settings"]:
            monkeypatch.setattr(module, name, lambda *_, **__: [])
    monkeypatch.setenv("LONGSHORE_CHUNK_SIZE", "8MiB")
    found = the(run_checks(), "unknown settings")
    assert (found.outcome, found.detail) == ("warn", "LONGSHORE_CHUNK_SIZE")


# this machine


def test_packages_and_memory_are_reported() -> None:
    assert outcomes(host_checks.check_packages_here()) == {"packages": "ok", "python": "ok"}
    (memory,) = host_checks.check_memory()
    assert "available" in memory.detail


@pytest.mark.parametrize(
    ("config", "outcome"),
    [(Config(arena_bytes=1 << 60), "warn"), (Config(arena_bytes=1 << 60, window_bytes=1 << 60), "fail")],
)
def test_an_arena_larger_than_memory_has_both_remedies(tmp_path: Path, config: Config, outcome: str) -> None:
    (check,) = host_checks.check_arena(config, str(tmp_path))
    assert check.outcome == outcome
    assert "LONGSHORE_ARENA_BYTES" in check.hint
    assert "shm-size" in check.hint


@pytest.mark.parametrize(("slots", "outcome"), [(1, "fail"), (2, "fail"), (3, "warn"), (16, "warn"), (17, "ok")])
def test_the_number_of_arena_slots_is_judged(tmp_path: Path, slots: int, outcome: str) -> None:
    slot_bytes = Config().slot_bytes
    config = Config(arena_bytes=slots * slot_bytes, cpu_ranks_per_node=8)
    (check,) = host_checks.check_arena(config, str(tmp_path))
    assert check.outcome == outcome
    assert f"{slots} slots" in check.detail


def test_stale_arenas_are_removed(tmp_path: Path) -> None:
    stale = tmp_path / f"{ARENA_PREFIX}of-a-killed-cluster"
    stale.write_bytes(bytes(8192))
    (check,) = host_checks.check_stale_arenas(str(tmp_path))
    assert check.outcome == "ok"
    assert "removed 1" in check.detail
    assert not stale.exists()
    assert next(iter(host_checks.check_stale_arenas(str(tmp_path)))).detail == "none"


def test_a_machine_without_gpu_is_no_failure(programs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_checks, "DRIVER_VERSION_FILE", tmp_path / "absent")
    assert outcomes(host_checks.check_driver()) == {"gpu driver": "skip"}
    (tmp_path / "absent").write_text("NVRM version: 580")
    assert outcomes(host_checks.check_driver()) == {"gpu driver": "warn"}


def test_gpus_are_listed(programs: Path) -> None:
    write_program(programs / "nvidia-smi", "echo 'NVIDIA H100, 580.1, 81559 MiB, 5 MiB'; echo 'another'")
    (check,) = host_checks.check_driver()
    assert check.outcome == "ok"
    assert check.detail.startswith("2 GPU: NVIDIA H100, 580.1, 81559 MiB")


def test_a_broken_driver_is_reported(programs: Path) -> None:
    write_program(programs / "nvidia-smi", "echo 'Driver/library version mismatch'; exit 18")
    (check,) = host_checks.check_driver()
    assert check.outcome == "fail"
    assert "version mismatch" in check.detail


def torch_says(programs: Path, cuda: str | None, devices: list[str]) -> Check:
    answer = json.dumps({"version": "2.13.0", "cuda": cuda, "devices": devices})
    write_program(programs / "python", f"echo '{answer}'")
    (check,) = host_checks.check_torch(str(programs / "python"))
    return check


def test_torch_that_sees_the_devices_passes(programs: Path) -> None:
    assert torch_says(programs, "13.0", ["NVIDIA H100"]).outcome == "ok"
    assert torch_says(programs, None, []).outcome == "ok"


def test_torch_that_misses_devices_of_the_driver_is_reported(programs: Path) -> None:
    write_program(programs / "nvidia-smi", "true")
    assert "CPU build" in torch_says(programs, None, []).hint
    assert "built for CUDA 13.0" in torch_says(programs, "13.0", []).hint
    assert torch_says(programs, "13.0", []).outcome == "warn"


def test_missing_or_broken_torch_is_reported(programs: Path) -> None:
    write_program(programs / "python", "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    assert outcomes(host_checks.check_torch(str(programs / "python"))) == {"torch": "warn"}
    write_program(programs / "python", "echo 'ImportError: libcudart.so.13' >&2; exit 1")
    (check,) = host_checks.check_torch(str(programs / "python"))
    assert (check.outcome, check.detail) == ("fail", "ImportError: libcudart.so.13")


# the cluster


@pytest.mark.parametrize(
    ("environ", "outcome"),
    [
        ({}, "ok"),
        ({"RAY_AUTH_MODE": "disabled"}, "ok"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "s3cret"}, "ok"),
        ({"RAY_AUTH_MODE": "token"}, "fail"),
        ({"RAY_AUTH_TOKEN": "s3cret"}, "warn"),
    ],
)
def test_authentication_is_reported_without_the_token(
    environ: dict[str, str], outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    check = doctor.check_authentication(environ)
    assert check.outcome == outcome
    assert "s3cret" not in check.detail + check.hint


def test_an_address_that_cannot_be_joined_is_one_failed_check() -> None:
    for address in ("ray://head:10001", "head:port"):
        checks = list(doctor.check_cluster(address))
        assert outcomes(checks)["cluster"] == "fail"
        assert address in the(checks, "cluster").detail


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({}, "ok"),
        ({"host": "another"}, "ok"),
        ({"version": "0.0.1"}, "fail"),
        ({"protocol": 0}, "fail"),
        ({"problem": "'storage' would come from elsewhere"}, "fail"),
        ({"python": "3.9.1"}, "warn"),
        ({"ray": "2.0.0"}, "warn"),
    ],
)
def test_a_node_is_compared_with_this_process(change: dict[str, Any], outcome: str) -> None:
    check = doctor.compare_probes("node a", probe(), {**probe(), **change})
    assert check.outcome == outcome
    assert all(str(value) in check.detail for value in change.values() if value != "another")


def test_taken_gpus_are_a_warning() -> None:
    total = {"GPU": 8.0, "CPU": 64.0, "memory": 1e12}
    assert doctor.check_resources(total, {"GPU": 3.0, "CPU": 60.0}).outcome == "ok"
    assert doctor.check_resources(total, {"CPU": 60.0}).outcome == "warn"
    assert doctor.check_resources({"CPU": 2.0}, {"CPU": 2.0}).outcome == "ok"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_cluster_is_probed_node_by_node() -> None:
    code = (
        "import json, ray\n"
        "ray.init(address='local', num_cpus=1, include_dashboard=False, object_store_memory=100 << 20,\n"
        "         log_to_driver=False, configure_logging=False)\n"
        "from cluster.doctor.doctor import check_cluster\n"
        "print(json.dumps([check.as_dict() for check in check_cluster(None)]))\n"
        "ray.shutdown()\n"
    )
    environ = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = run_to_its_end([sys.executable, "-c", code], 240, env=environ, start_new_session=True)
    assert done.returncode == 0, done.stderr
    checks = [Check(**check) for check in json.loads(done.stdout.splitlines()[-1])]
    assert "1 nodes" in the(checks, "cluster").detail
    (node,) = [check for check in checks if check.name.startswith("node ")]
    assert node.outcome == "ok"
    assert f"longshore {probe()['version']}" in node.detail
    assert "1 CPUs" in the(checks, "resources").detail


# the store


def test_without_a_uri_no_store_is_checked() -> None:
    assert outcomes(host_checks.check_store(None, {})) == {"store": "skip"}


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ({}, {"store": "warn"}),
        ({"a.txt": b""}, {"store": "ok", "read": "ok", "model": "skip"}),
        ({"a.txt": b"x", "m.safetensors": b"12345678901234567890"}, {"store": "ok", "read": "ok", "model": "warn"}),
        ({"longshore.manifest.json": b"{}", "m.safetensors": b""}, {"store": "ok", "read": "ok", "model": "ok"}),
    ],
)
def test_the_contents_of_a_store_are_reported(objects: dict[str, bytes], expected: dict[str, str]) -> None:
    assert outcomes(host_checks.check_objects(MemoryStore(objects))) == expected


def test_a_missing_store_is_reported() -> None:
    checks = guarded("store", lambda: host_checks.check_store("/no/such/folder", {}))
    assert outcomes(checks) == {"store": "fail"}
    assert "/no/such/folder" in checks[0].detail


@pytest.fixture
def dated_server() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield an HTTP server that answers 403, with a clock of its own: (URL, {"ahead_s": ...})."""
    clock = {"ahead_s": 0.0}

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() + clock["ahead_s"], usegmt=True)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Refuses) as server:
        yield place(server), clock


@pytest.mark.slow
def test_clocks_are_compared_even_when_the_request_is_refused(dated_server: tuple[str, dict[str, float]]) -> None:
    url, clock = dated_server
    assert host_checks.check_clock(url).outcome == "ok"
    clock["ahead_s"] = 3600
    check = host_checks.check_clock(url)
    assert check.outcome == "fail"
    assert "behind the store" in check.detail


def test_the_clock_check_is_skipped_without_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert host_checks.check_clock(f"http://127.0.0.1:{port}").outcome == "skip"


# the verb


def test_the_command_reads_a_model_and_exits_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_checks, "check_stale_arenas", list)
    monkeypatch.setattr(host_checks, "check_torch", list)
    monkeypatch.setattr(doctor, "check_cluster", lambda *_, **__: [])
    write_tiny_llama(tmp_path)
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no manifest" in out
    assert "-> `longshore publish` writes a manifest" in out


def test_the_command_exits_with_1_when_a_check_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_checks, "check_stale_arenas", list)
    monkeypatch.setattr(host_checks, "check_torch", list)
    monkeypatch.setattr(doctor, "check_cluster", lambda *_, **__: [])
    assert main(["doctor", "/no/such/folder", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [check["name"] for check in document["checks"] if check["outcome"] == "fail"] == ["store"]
