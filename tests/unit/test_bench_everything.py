"""The steps of `make bench`: each is a command, leaves its tables in a file, and may fail alone."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import bench.everything
from bench.everything import SMALL, STEPS, main, markdown_tables


def test_tables_are_found_among_other_lines() -> None:
    assert markdown_tables(["hello\n", "| a |\n", "| - |\n", "\n", "| b |\n"]) == ["| a |\n| - |", "| b |"]


def test_every_step_is_a_command_with_a_small_run() -> None:
    assert STEPS.keys() == SMALL.keys()
    for module, *_ in STEPS.values():
        assert callable(importlib.import_module(module).main)


def test_a_step_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.py").write_text("print('| a |\\n| - |')\n")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(bench.everything, "STEPS", {"hashes": ("bad",), "memory": ("good", "--any")})
    assert main(["--steps", "hashes,memory", "--out", str(tmp_path / "out")]) == 1
    assert "failed: hashes" in capfd.readouterr().out
    assert not (tmp_path / "out" / "hashes.json").exists()
    found = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert found["tables"] == ["| a |\n| - |"]
    assert found["command"] == "python -m good --any"


def test_options_that_are_not_its_own_go_to_the_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loads.py").write_text("import sys; print('given', *sys.argv[1:])\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(bench.everything, "STEPS", {"loads": ("loads",)})
    assert main(["--steps", "loads", "--only", "tp4/http", "--out", str(tmp_path)]) == 0
    assert f"given --only tp4/http --out {tmp_path}" in capfd.readouterr().out
