"""The command line.

Functions that need no cluster run for real on a local folder. The others get a stand-in for the client, because only
parsing and printing are tested here; the integration tests run them on Ray.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cluster
from actors.saving.writer import begin_save
from cluster import client
from cluster.command_line.cli import build_parser, main
from cluster.errors import ClusterLost, ConfigError, NotEnoughResources
from cluster.layouts.mesh import Layout
from cluster.options import LoadOptions
from cluster.planning import preview
from cluster.saving.shards import TensorSpec, lay_out
from cluster.telemetry.report import (
    ClusterStatus,
    LoadProgress,
    LoadReport,
    ModelStatus,
    NodeReport,
    NodeStatus,
    ObjectCheck,
    RankReport,
    StageTimes,
    UpdateProgress,
    WorkerGroupStatus,
)
from cluster.telemetry.saves import SaveProgress, SaveStatus
from storage.stores.local import LocalStore
from tests.support.checkpoints import write_tiny_llama

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    write_tiny_llama(folder)
    return folder


def load_report(**changes: Any) -> LoadReport:
    stages = StageTimes(1.0, 2_000_000, 0.5, 2_000_000, 0.25, 2_000_000)
    rank = RankReport(0, "n1", "host-a", 11, "cpu", 0, 2_000_000, 2_097_152, stages, 300_000_000, 0.5, 1.0)
    node = NodeReport("n1", "host-a", 2, 2_100_000, 2, 2_100_000, 0, 0, 0, 0, {}, 1 << 30, 90_000_000)
    values: dict[str, Any] = {
        "model_id": "llama-1",
        "uri": "s3://models/[bold]llama",
        "revision": "r1",
        "verified": "blake3",
        "placement_mode": "via_arena",
        "resident": False,
        "layout": Layout(),
        "model_bytes": 2_000_000,
        "placed_bytes": 2_000_000,
        "overfetch_bytes": 100_000,
        "plan_s": 0.1,
        "start_s": 0.5,
        "load_s": 1.0,
        "total_s": 2.0,
        "attempts": 1,
        "ranks": (rank,),
        "nodes": (node,),
    }
    return LoadReport(**{**values, **changes})


class FakeModel:
    ends_with_process = False

    def __init__(self, report: LoadReport) -> None:
        self.report = report
        self.model_id = report.model_id
        self.released = False

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.released = True


@pytest.fixture
def fake_load(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for client.load. Remembers its arguments and the model that it returned."""
    seen = SimpleNamespace(uri=None, options=None, call={}, model=None, report=load_report())

    def load_model(options: LoadOptions, **call: Any) -> FakeModel:
        seen.uri, seen.options, seen.call = options.model_uri, options, call
        for state, placed in (("planning", 0), ("loading", 1_000_000), ("ready", 2_000_000)):
            call["progress"](LoadProgress("llama-1", seen.uri, state, placed, 2_000_000, placed, 0, 1, 1.0))
        seen.model = FakeModel(seen.report)
        return seen.model

    monkeypatch.setattr(client, "load_model", load_model)
    return seen


# arguments


def test_load_passes_every_option_to_the_client(run: Run, fake_load: SimpleNamespace) -> None:
    code, _, _ = run(
        *[
            "load",
            "s3://models/llama",
            "--tp",
            "4",
            "--fsdp",
            "2",
            "--data-parallel-size",
            "3",
            "--device",
            "cuda",
            "--no-keep",
        ],
        *["--address", "head:6379", "--wait-for-resources", "30", "--timeout", "600", "--placement", "direct"],
        *["--trusted-key", "k1", "--trusted-key", "k2", "--revision", "ab" * 32, "--signed-name", "n"],
        *["--layout-rules", "rules.json", "--dtype", "bfloat16", "--quantization", "int4"],
        *["--skip-quantization", "default", "--skip-quantization", "**.down_proj.weight"],
        *["--fit", "auto", "--gpu-memory-utilization", "0.9", "--reserve", "2GB"],
        *["--endpoint-url", "http://store:9000", "--region", "r", "--profile", "p", "--anonymous"],
    )
    assert code == 0
    del fake_load.call["progress"]
    assert fake_load.call == {"address": "head:6379", "timeout_s": 600.0}
    assert fake_load.options == LoadOptions(
        "s3://models/llama",
        tensor_parallel_size=4,
        fsdp_size=2,
        data_parallel_size=3,
        layout_rules="rules.json",
        dtype="bfloat16",
        quantization="int4",
        skip_quantization=["default", "**.down_proj.weight"],
        fit="auto",
        gpu_memory_utilization=0.9,
        reserve_bytes=2 * 10**9,
        device="cuda",
        wait_for_resources_s=30.0,
        placement="direct",
        trusted_keys=["k1", "k2"],
        signed_name="n",
        revision="ab" * 32,
        endpoint_url="http://store:9000",
        region="r",
        profile="p",
        anonymous=True,
    )


def test_load_keeps_the_model_and_releases_only_its_own_hold(run: Run, fake_load: SimpleNamespace) -> None:
    run("load", "s3://models/llama")
    assert fake_load.options == LoadOptions("s3://models/llama", keep=True)
    assert fake_load.call["timeout_s"] is None
    assert fake_load.model.released


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["lode"],
        ["load"],
        ["load", "s3://m", "--tp", "0"],
        ["load", "s3://m", "--tp", "two"],
        ["load", "s3://m", "--tp", "²"],
        ["load", "s3://m", "--timeout", "-1"],
        ["load", "s3://m", "--timeout", "nan"],
        ["load", "s3://m", "--device", "tpu"],
        ["load", "s3://m", "--secret-access-key", "x"],
        ["publish", "m", "--chunk-size", "many"],
        ["publish", "m", "--hash", "md5"],
        ["convert", "m", "out", "--trust"],  # no file is trusted
        ["release"],
        ["release", "m", "--all"],
    ],
)
def test_wrong_usage_exits_with_2(run: Run, argv: list[str]) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert "longshore" in err


def test_the_command_alone_prints_its_help(run: Run) -> None:
    _, help_page, _ = run("--help")
    assert run() == (2, "", help_page)


@pytest.mark.parametrize(
    ("argv", "meant"),
    [(["plna", "s3://m"], "plan"), (["relaese"], "release"), (["load", "s3://m", "--device", "cude"], "cuda")],
)
def test_the_nearest_verb_or_value_is_suggested(run: Run, argv: list[str], meant: str) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.endswith(f"; did you mean {meant}?\n")
    assert "did you mean" not in run("xyzzy")[2]


def test_help_names_every_verb_and_exit_code(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for verb in ("load", "plan", "publish", "verify", "status", "release", "demo", "doctor"):
        assert f"\n    {verb}" in out
    assert "130  interrupted" in out


def test_version_is_printed(run: Run) -> None:
    from longshore.installation import __version__

    assert run("--version") == (0, f"longshore {__version__}\n", "")


@pytest.mark.parametrize("verb", ["load", "plan", "publish", "verify", "status", "release", "demo", "doctor"])
def test_every_verb_has_json_and_debug(verb: str) -> None:
    targets = {"load": ["u"], "plan": ["u"], "publish": ["u"], "verify": ["u"]}.get(verb, [])
    args = build_parser().parse_args([verb, *targets, "--json", "--debug"])
    assert args.json
    assert args.debug


# what is printed


def test_load_prints_a_table_and_lines_of_progress(run: Run, fake_load: SimpleNamespace) -> None:
    _, out, err = run("load", "s3://models/llama")
    assert "llama-1" in out
    assert "[bold]llama" in out  # a name from outside is not read as markup
    assert "each with its blake3 digest" in out
    assert [line.split()[1] for line in err.splitlines()] == ["planning", "loading", "ready"]
    assert "\x1b" not in out + err


def test_a_resident_model_has_no_rate(run: Run, fake_load: SimpleNamespace) -> None:
    def total() -> str:
        return next(
            line.rstrip() for line in run("load", "s3://models/llama")[1].splitlines() if line.startswith(" total")
        )

    assert total().endswith("B/s")
    fake_load.report = replace(load_report(), resident=True)
    assert total().endswith(" s, already resident")


def test_peak_memory_names_the_share_of_the_arena(run: Run, fake_load: SimpleNamespace) -> None:
    loaded = load_report()
    fake_load.report = replace(loaded, nodes=(replace(loaded.nodes[0], arena_bytes=5_400_000_000),))
    _, out, _ = run("load", "s3://models/llama")
    (line,) = (line.rstrip() for line in out.splitlines() if "peak host memory" in line)
    assert line.endswith("GB, 5.40 GB of it the arena")
    assert json.loads(run("load", "s3://models/llama", "--json")[1])["arena_bytes"] == 5_400_000_000


def test_a_report_prints_as_its_table(run: Run, fake_load: SimpleNamespace) -> None:
    fake_load.report = load_report()
    _, out, _ = run("load", "s3://models/llama")
    assert str(fake_load.report) == "\n".join(line.rstrip() for line in out.splitlines())
    assert repr(fake_load.report).startswith("LoadReport('llama-1', ranks=")
    assert len(repr(fake_load.report)) < 80


def test_load_without_digests_says_so(run: Run, fake_load: SimpleNamespace) -> None:
    fake_load.report = load_report(verified="transport")
    _, out, _ = run("load", "s3://models/llama")
    assert "no digests" in out
    assert "longshore publish" in out


def test_load_says_which_objects_have_the_checksum_of_the_store(run: Run, fake_load: SimpleNamespace) -> None:
    objects = (ObjectCheck("a", "crc64nvme"), ObjectCheck("b", "crc64nvme"))
    loaded = load_report(verified="store:crc64nvme")
    fake_load.report = replace(loaded, nodes=(replace(loaded.nodes[0], objects=objects),))
    _, out, _ = run("load", "s3://models/llama")
    assert "every object by the store's own crc64nvme" in out
    assert "2 of 2 by the store's own checksums" in out
    nodes = (replace(loaded.nodes[0], objects=(*objects, ObjectCheck("c", reason="nobody knows it"))),)
    fake_load.report = replace(loaded, verified="transport", nodes=nodes)
    _, out, _ = run("load", "s3://models/llama")
    assert "2 of 3 by the store's own checksums; 1 not: nobody knows it" in out
    _, out, _ = run("load", "s3://models/llama", "--json")
    document = json.loads(out)
    assert (document["checked_objects"], document["unchecked_objects"]) == (2, {"nobody knows it": 1})
    assert document["nodes"][0]["objects"][2] == {"key": "c", "checked_by": "", "reason": "nobody knows it"}
    assert document["verified_chunks"] == 0


def test_json_is_one_document_on_stdout(run: Run, fake_load: SimpleNamespace) -> None:
    _, out, err = run("load", "s3://models/llama", "--json")
    document = json.loads(out)
    assert document["model_id"] == "llama-1"
    assert document["store_bytes"] == 2_100_000
    assert document["ranks"][0]["stages"]["fetch_bytes"] == 2_000_000
    assert "planning" in err


def test_status_prints_models_and_nodes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = LoadProgress("m1", "s3://b/m", "ready", 10, 10, 10, 4, 4, 1.0)
    broken = LoadProgress("m2", "s3://b/n", "failed", 0, 10, 0, 0, 1, 1.0)
    update = UpdateProgress("staging", 1, 4, 3_000_000, 5_000_000)
    models = (
        ModelStatus(
            progress,
            "r1",
            Layout(4),
            "cuda",
            True,
            2,
            ("a", "a", "b", "b"),
            update="an update is read",
            updating=update,
        ),
    )
    save = SaveProgress("save-m-1", 4, "s3://b/m", "writing", 4, "a", 8_000_000, 1_000_000, 2_000_000, elapsed_s=3.0)
    ended = (ModelStatus(broken, "r2", Layout(), "cpu", False, 0, (), "chunk 7 could not be had", ended_age_s=41.7),)
    node = NodeStatus(
        "0123456789abcdef",
        "a",
        1 << 30,
        1 << 29,
        1,
        0,
        0.3,
        disk_unkept_chunks=17,
        disk_budget_bytes=4 << 30,
        disk_used_bytes=3 << 29,
    )
    worker_group = WorkerGroupStatus("m0-12ab", "cuda", ("a", "a", "b"), 1 << 20, 12.0)
    status = ClusterStatus("0.1.0", "c1", models, (node,), (worker_group,), ended=ended, saves=(SaveStatus(save),))
    monkeypatch.setattr(client, "status", lambda address: status)
    code, out, _ = run("status")
    assert code == 0
    assert "4/4" in out
    lines = out.splitlines()
    assert [line.split() for line in lines if line.startswith("m2")] == [
        ["m2", "failed", "42", "s", "ago", "chunk", "7", "could", "not", "be", "had"]
    ]
    assert lines.index(next(line for line in lines if line.startswith("ended lately"))) > lines.index(
        next(line for line in lines if line.startswith("0123456789ab"))
    )
    assert "1.61 GB of 4.29 GB" in out  # of the disk tier
    assert str(status) == "\n".join(line.rstrip() for line in lines)
    assert "537 MB" in out
    assert "17" in next(line for line in out.splitlines() if "537 MB" in line)
    assert "a: 2, b: 1" in out
    assert "m1: an update is read (3.00 MB of 5.00 MB read)" in lines
    assert ["save-m-1", "writing", "4", "3.00", "MB", "of", "8.00", "MB", "3", "s", "s3://b/m"] in [
        line.split() for line in lines
    ]
    assert "3 cuda workers of m0-12ab idle for 12 s" in out
    code, out, _ = run("status", "--json")
    document = json.loads(out)
    assert [save["progress"]["copied_bytes"] for save in document["saves"]] == [2_000_000]
    assert [model["progress"]["model_id"] for model in document["models"]] == ["m1"]
    assert [(model["error"], model["ended_age_s"]) for model in document["ended"]] == [
        ("chunk 7 could not be had", 41.7)
    ]


@pytest.mark.parametrize(
    ("argv", "calls"),
    [
        (["m1"], [("release", "m1", False)]),
        (["m1", "--force"], [("release", "m1", True)]),
        (["--all"], [("release", "m1", False), ("release", "m2", False)]),
        (["--warm"], [("release_warm",)]),
        (["--shutdown"], [("shutdown",)]),
        (["--all", "--force", "--shutdown"], [("release", "m1", True), ("release", "m2", True), ("shutdown",)]),
    ],
)
def test_release_prints_what_it_released(
    run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], calls: list[tuple[Any, ...]]
) -> None:
    done: list[tuple[Any, ...]] = []
    models = tuple(
        ModelStatus(LoadProgress(m, "u", "ready", 1, 1, 1, 1, 1, 1.0), "r", Layout(), "cpu", True, 0, ("a",))
        for m in ("m1", "m2")
    )
    dead = (replace(models[0], progress=replace(models[0].progress, model_id="m0", state="failed")),)
    monkeypatch.setattr(client, "status", lambda address: ClusterStatus("v", "c", models, (), ended=dead))

    def release(model_id: str, force: bool, address: str | None) -> client.Released:
        done.append(("release", model_id, force))
        return client.Released(model_id, model_id == "m1", int(model_id != "m1"))

    monkeypatch.setattr(client, "release", release)
    monkeypatch.setattr(client, "shutdown", lambda address: done.append(("shutdown",)))
    monkeypatch.setattr(client, "release_warm", lambda address: done.append(("release_warm",)) or 1)
    code, out, _ = run("release", *argv, "--json")
    assert code == 0
    assert done == calls
    asked = [call[1] for call in calls if call[0] == "release"]
    said = json.loads(out)
    assert (said["released"], said["held"]) == ([m for m in asked if m == "m1"], {"m2": 1} if "m2" in asked else {})
    _, out, _ = run("release", *argv)
    assert ("m1 is freed" in out) == ("m1" in asked)
    assert ("m2 is not kept any more, but another process holds it" in out) == ("m2" in asked)
    assert ("longshore ended in this cluster" in out) == ("--shutdown" in argv)
    assert "nothing" not in out


def test_ctrl_c_names_the_load_that_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt = KeyboardInterrupt()
    interrupt.add_note("the load goes on in the cluster")
    fail_with(monkeypatch, interrupt)
    assert run("load", "s3://m") == (130, "", "longshore: the load goes on in the cluster\nlongshore: interrupted\n")


def test_release_all_continues_after_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: dict[str, Any] = {
        "m1": cluster.RemoteCallFailed("a bug"),
        "m2": cluster.ModelNotFound("it ended just now"),
        "m3": client.Released("m3", True, 0),
    }
    models = tuple(
        ModelStatus(LoadProgress(m, "u", "ready", 1, 1, 1, 1, 1, 1.0), "r", Layout(), "cpu", True, 0, ("a",))
        for m in outcomes
    )
    monkeypatch.setattr(client, "status", lambda address: ClusterStatus("v", "c", models, ()))

    def release(model_id: str, force: bool, address: str | None) -> client.Released:
        if isinstance(outcomes[model_id], Exception):
            raise outcomes[model_id]
        return outcomes[model_id]

    monkeypatch.setattr(client, "release", release)
    code, out, err = run("release", "--all", "--json")
    assert (code, err) == (1, "longshore: m1: a bug\n")
    said = json.loads(out)
    assert (said["released"], said["failed"]) == (["m3"], {"m1": "a bug"})
    assert run("release", "--all")[:2] == (1, "m3 is freed\n")
    assert run("release", "m1")[0] == 1
    assert run("release", "m2")[0] == 2
    outcomes["m1"] = cluster.ClusterLost("nobody answers")
    assert run("release", "--all")[0] == 7


# what fails


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def load_model(options: LoadOptions, **call: Any) -> None:
        raise error

    monkeypatch.setattr(client, "load_model", load_model)


def test_an_error_is_one_line_with_its_hint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, NotEnoughResources("2 GPUs wanted, 1 free", hint="held by m1", wanted=2))
    assert run("load", "s3://m") == (4, "", "longshore: 2 GPUs wanted, 1 free (wanted=2). held by m1\n")


def test_an_error_can_be_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ClusterLost("no answer", hint="is it up?", address="head:1"))
    code, out, err = run("load", "s3://m", "--json")
    assert code == 7
    assert json.loads(out) == {
        "error": {
            "type": "ClusterLost",
            "message": "no answer",
            "hint": "is it up?",
            "details": {"address": "head:1"},
        },
        "exit_code": 7,
    }
    assert err.count("\n") == 1


def test_a_traceback_is_printed_only_on_demand(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ZeroDivisionError("a bug"))
    code, _, err = run("load", "s3://m")
    assert (code, err) == (1, "longshore: ZeroDivisionError: a bug (--debug shows where)\n")
    _, _, err = run("load", "s3://m", "--debug")
    assert "Traceback" in err


def test_an_error_cannot_carry_escape_codes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ClusterLost("no \x1b[2J answer"))
    assert "\x1b" not in run("load", "s3://m")[2]


def test_ctrl_c_exits_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    quiet = "longshore: nothing was asked of the cluster yet\n"
    assert run("load", "s3://m") == (130, "", f"{quiet}longshore: interrupted\n")


# for real, without a cluster


def test_a_published_model_can_be_planned_and_verified(run: Run, model: Path) -> None:
    code, out, err = run("publish", str(model), "--chunk-size", "1MiB")
    assert code == 0, err
    assert "manifest written" in out

    plan_page = run("plan", str(model), "--dtype", "bf16")[1]
    assert str(preview.plan(model, dtype="bf16")) == "\n".join(line.rstrip() for line in plan_page.splitlines())

    code, out, _ = run("plan", str(model), "--tp", "2", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["verified"] == "blake3"
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1]
    code, out, _ = run("plan", str(model), "--tp", "2", "--ranks-per-node", "1")
    assert "2 ranks (tp 2, fsdp 1, dp 1) on 2 nodes" in out

    code, out, err = run("verify", str(model))
    assert code == 0
    assert out.startswith("ok")
    assert "verify" in err


def test_publish_records_what_loads_that_quantize_need(run: Run, model: Path) -> None:
    def reads() -> list[int]:
        code, out, _ = run("plan", str(model), "--tp", "2", "--quantization", "fp8_tensor", "--json")
        assert code == 0
        return [rank["read_bytes"] for rank in json.loads(out)["ranks"]]

    assert "not recorded" in run("publish", str(model))[1]
    before = reads()
    code, out, _ = run("publish", str(model), "--amax", "--json")
    assert (code, json.loads(out)["amax"]) == (0, True)
    assert all(now < then for now, then in zip(reads(), before, strict=True))
    assert run("verify", str(model))[0] == 0
    assert "reads" in run("plan", str(model), "--tp", "2", "--quantization", "fp8")[1]
    recorded = model / "longshore.amax"
    data = recorded.read_bytes()
    recorded.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    code, _, err = run("plan", str(model), "--tp", "2", "--quantization", "fp8")
    assert code == 6
    assert "longshore.amax is not the published one" in err
    assert run("plan", str(model), "--tp", "2", "--quantization", "int4")[0] in (0, 3)
    assert run("verify", str(model))[0] == 6
    recorded.unlink()
    assert run("plan", str(model), "--tp", "2", "--quantization", "fp8")[0] == 6


def test_verify_of_an_unpublished_model_exits_with_1(run: Run, model: Path) -> None:
    code, out, err = run("verify", str(model))
    assert code == 1
    assert "NOT published" in out
    assert "not published, so there are no digests to compare; `longshore publish` writes them" in err
    code, out, _ = run("verify", str(model), "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_saves_lists_and_removes_what_was_interrupted(run: Run, tmp_path: Path) -> None:
    uri = tmp_path / "m"
    for value in (0, 1):  # the files of the first stay: the history names it
        cluster.save({"a": torch.full((3, 4), float(value))}, uri)
    before = set(uri.rglob("*"))
    with closing(LocalStore(uri)) as store:
        layouts = lay_out([TensorSpec("b", "F32", (1000, 500))], revision="0", max_shard_bytes=1 << 30)
        _, begun = begin_save(store, layouts)
    code, out, _ = run("saves", str(uri), "--json")
    report = json.loads(out)
    assert (code, report["cleaned"]) == (0, False)
    assert {(item["kind"], item["revision"]) for item in report["leftovers"]} == {
        ("upload", begun.revision),
        ("journal", begun.revision),
    }
    code, out, _ = run("saves", str(uri), "--clean")
    assert code == 0
    assert out.count("removed: ") == 2
    assert set(uri.rglob("*")) == before
    assert "nothing" in run("saves", str(uri))[1]
    assert cluster.verify(uri, progress=False).ok
    (uri / "longshore.manifest.json").write_text("{")
    code, out, _ = run("saves", str(uri), "--clean")
    assert (code, "cannot be read" in out, "nothing" in out) == (6, True, False)
    assert {path.name for path in uri.rglob("*")} == {path.name for path in before}


def test_verify_names_the_chunk_that_differs_and_exits_with_6(run: Run, model: Path) -> None:
    run("publish", str(model))
    shard = sorted(model.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, out, _ = run("verify", str(model))
    assert code == 6
    assert "NOT the published bytes" in out
    assert shard.name in out
    code, out, _ = run("verify", str(model), "--json")
    assert (code, json.loads(out)["ok"]) == (6, False)


def test_publish_can_copy_to_another_place(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    code, out, _ = run("publish", str(model), str(tmp_path / "copy"), "--hash", "xxh3_128", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["hash_name"] == "xxh3_128"
    assert report["copied_bytes"] >= report["size_bytes"]
    assert run("verify", str(tmp_path / "copy"))[0] == 0


def test_bad_input_exits_with_its_code(run: Run, model: Path, tmp_path: Path) -> None:
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    (pickles / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert run("plan", str(pickles))[0] == 3
    assert run("plan", str(model), "--tp", "3")[0] == 3
    assert run("plan", "s4://bucket/model")[0] == 5
    (model / "longshore.manifest.json").write_text("{}")
    assert run("plan", str(model))[0] == 6


@pytest.mark.parametrize(
    "uri", ["", "  ", "s3://", "s3:/b/m", "s3://b/../m", "m/../n", "s3://a:b@c/m", "s3://b!/m", "file://host/m"]
)
def test_an_impossible_uri_exits_with_2(run: Run, model: Path, uri: str) -> None:
    for argv in (["plan", uri], ["verify", uri], ["publish", uri], ["publish", str(model), uri], ["doctor", uri]):
        code, out, err = run(*argv)
        assert (code, out, err.count("\n")) == (2, "", 1), argv
    assert run("load", uri, "--endpoint-url", "http://store:9000")[0] == 2
    assert run("plan", "s3://b/m", "--endpoint-url", "store:9000")[0] == 2


def test_a_blank_destination_creates_no_folder(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for blank in ("", " "):
        assert run("publish", str(model), blank)[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == [model.name]


def test_a_copy_inside_its_source_or_around_it_is_refused(run: Run, model: Path) -> None:
    for source, dest in ((model, model / "sub"), (model, model.parent)):
        code, _, err = run("publish", str(source), str(dest))
        assert (code, "one inside the other" in err) == (2, True)
    assert not (model / "sub").exists()


def test_a_bad_setting_is_named_and_exits_with_2(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSHORE_CHUNK_BYTES", "many")
    code, _, err = run("plan", str(model))
    assert code == 2
    assert "LONGSHORE_CHUNK_BYTES" in err


@pytest.mark.parametrize("size", ["0", "5", "1GB"])
def test_an_impossible_chunk_size_exits_with_2(run: Run, model: Path, size: str) -> None:
    code, _, err = run("publish", str(model), "--chunk-size", size)
    assert (code, "chunk_bytes" in err) == (2, True)


def test_zero_ranks_per_node_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="ranks_per_node"):
        preview.plan(str(model), ranks_per_node=0)


@pytest.mark.parametrize("module", ["cluster", "longshore"])
def test_python_dash_m_runs_the_command(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()[0]) == (0, "longshore")


@pytest.fixture
def broken_pipe() -> Iterator[int]:
    """Return the writing end of a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def in_a_process(*argv: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "longshore", *argv], text=True, timeout=60, check=False, **streams)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_causes_no_error(model: Path, broken_pipe: int, options: list[str]) -> None:
    done = in_a_process("plan", str(model), *options, stdout=broken_pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_does_not_hide_damage(
    run: Run, model: Path, broken_pipe: int, stream: str, options: list[str]
) -> None:
    run("publish", str(model))
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    done = in_a_process("verify", str(model), *options, **{"stdout": subprocess.DEVNULL, stream: broken_pipe})
    assert done.returncode == 6


def test_a_publish_ends_without_a_reader_of_its_progress(model: Path, broken_pipe: int) -> None:
    done = in_a_process("publish", str(model), stdout=subprocess.DEVNULL, stderr=broken_pipe)
    assert (done.returncode, (model / "longshore.manifest.json").exists()) == (0, True)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_unwritable_answer_is_one_line_and_exits_with_1(model: Path, options: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = in_a_process("plan", str(model), *options, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left" in done.stderr


def test_closed_streams_cause_no_error(model: Path) -> None:
    command = [sys.executable, "-m", "longshore", "plan", str(model)]
    assert subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *command], timeout=60, check=False).returncode == 0


def test_load_says_when_the_model_ends_with_the_command(
    run: Run, fake_load: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, err = run("load", "s3://models/llama")
    assert "local one was started" not in err
    monkeypatch.setattr(FakeModel, "ends_with_process", True)
    _, _, err = run("load", "s3://models/llama")
    assert "local one was started" in err


def test_a_demo_model_is_written_and_kept(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "model"
    code, out, err = run("demo", "--write", str(folder), "--size", "20MB", "--json")
    assert (code, err) == (0, "")
    written = json.loads(out)
    assert written["size_bytes"] == pytest.approx(20_000_000, rel=0.2)
    assert run("publish", str(folder))[0] == 0
    assert run("verify", str(folder))[0] == 0
    plan = json.loads(run("plan", str(folder), "--json")[1])
    assert sum(rank["size_bytes"] for rank in plan["ranks"]) == written["size_bytes"]
    # Nothing is overwritten. A size that is too small is refused before a folder is made.
    assert run("demo", "--write", str(folder))[0] == 2
    assert run("demo", "--write", str(tmp_path / "b"), "--size", "1MB")[0] == 2
    assert not (tmp_path / "b").exists()
    assert run("demo", "--write", str(folder / "config.json"))[0] == 2


HEAVY = {"numpy", "ray", "torch", "pydantic", "rich", "boto3", "botocore", "blake3", "awscrt", "fsspec", "psutil"}


@pytest.mark.parametrize(
    "argv", [["--version"], ["load", "--help"], ["plan", "u", "--tp", "abc"], ["status", "--watch", "x"]]
)
def test_help_and_version_import_no_heavy_library(argv: list[str]) -> None:
    code = (
        "import sys; from longshore.main import main; main(sys.argv[1:]);"
        f"print(sorted({HEAVY} & {{name.split('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
