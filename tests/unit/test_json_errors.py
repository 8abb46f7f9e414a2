"""With --json every error is one JSON document on stdout, from argparse, a verb or the shell's Ctrl-C."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import client
from cluster.command_line.cli import main
from cluster.command_line.help_texts import PAGES
from cluster.errors import ClusterLost, ConfigError, NoCoordinator
from cluster.joining.patience import Terminated
from cluster.telemetry.chunk_map import LoadEvent

ROOT = Path(__file__).parents[2]


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the error, and the text of stderr."""
    code = main(argv)
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["exit_code"] == code
    assert set(document["error"]) == {"type", "message", "hint", "details"}
    return code, document["error"], err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("plan", "u", "--tp", "abc", "--json"), "'abc' is not a whole number from 1 on"),
        (("plan", "u", "--tp", "abc", "--js"), "'abc'"),
        (("load", "--json"), "required: URI"),
        (("nothing", "--json"), "invalid choice: 'nothing'"),
        (("plann", "--json"), "did you mean plan?"),
        (("--json",), "required: VERB"),
        (("events", "a", "--until", "never", "--json"), "'never'"),
        (("logs", "--rank", "-1", "--json"), "'-1' is not a whole number from 0 on"),
        (("serve", "--port", "65536", "--json"), "'65536' is not a port from 1 to 65535"),
        (("serve", "--port", "0", "--json"), "'0' is not a port"),
    ],
)
def test_a_malformed_command_line_is_json(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    code, error, err = error_of(capsys, *argv)
    assert (code, error["type"]) == (2, "ConfigError")
    assert message in error["message"]
    assert error["hint"].startswith("longshore")
    assert err.startswith("usage: longshore")
    assert f"error: {error['message']}" in err


@pytest.mark.parametrize("verb", PAGES)
def test_an_unknown_option_of_any_verb_is_json(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, error, _ = error_of(capsys, verb, "--json", "--no-such-option")
    assert (code, error["type"]) == (2, "ConfigError")


def test_without_json_there_is_nothing_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "u", "--tp", "abc"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("longshore plan: error: argument --tp/--tensor-parallel-size: 'abc' is not a whole number from 1 on\n")  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(("raised", "kind", "code"), [(KeyboardInterrupt, "Interrupted", 130), (Terminated, "Terminated", 143)])  # fmt: skip  # noqa: E501
def test_an_interrupted_load_is_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, raised: Any, kind: str, code: int
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(client, "load_model", load)
    found, error, _ = error_of(capsys, "load", "s3://b/m", "--json")
    assert (found, error["type"]) == (code, kind)


def test_a_stream_of_documents_ends_with_its_error_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = iter([(LoadEvent(1, 1.0, "state", "planning -> starting"),)])

    def events(*_: Any, **__: Any) -> tuple[LoadEvent, ...]:
        if (found := next(happened, None)) is None:
            raise ClusterLost("gone", hint="for good")
        return found

    class Status:
        coordinator_incarnation = "c1"
        models = ()

    monkeypatch.setattr(client, "events", events)
    monkeypatch.setattr(client, "status", lambda address=None: Status())
    assert main(["events", "a", "--follow", "--json"]) == 7
    first, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["number"] == 1
    assert last["error"]["type"] == "ClusterLost"


def test_an_interrupted_watch_prints_nothing_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(address: str | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "status", status)
    assert main(["status", "--watch", "--json"]) == 130
    assert capsys.readouterr().out == ""


def test_shadowing_packages_are_json(tmp_path: Path) -> None:
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from longshore.main import main; sys.exit(main())"  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", code, "status", "--json"],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert (done.returncode, document["exit_code"], document["error"]["type"]) == (7, 7, "PackageShadowed")
    assert document["error"]["details"] == {"storage": str(tmp_path / "storage")}


@pytest.mark.parametrize(
    ("joined", "kind", "said"),
    [(False, "ClusterLost", "no Ray cluster runs here"), (True, "NoCoordinator", "no Longshore")],
)
def test_no_cluster_differs_from_a_cluster_without_loads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, joined: bool, kind: str, said: str
) -> None:
    monkeypatch.setattr(client, "connect", lambda *_, **__: None)
    monkeypatch.setattr(client, "import_ray", lambda: SimpleNamespace(is_initialized=lambda: joined))
    for verb in (["status"], ["events", "a"], ["events", "a", "--follow"], ["release", "a"], ["release", "--shutdown"]):
        assert main([*verb, "--json"]) == 7
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["type"] == kind
        assert error["message"].startswith(said)


@pytest.mark.parametrize("error", [ConfigError("x"), NoCoordinator("x")])
def test_status_names_the_type_of_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def status(address: str | None = None) -> None:
        raise error

    monkeypatch.setattr(client, "status", status)
    assert error_of(capsys, "status", "--json")[1]["type"] == type(error).__name__
