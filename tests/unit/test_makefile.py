"""The Makefile: what each target would install, by `make -n`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALLS = " -m pip "


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def steps(checkout: Path, *arguments: str) -> list[str]:
    """The commands that make would run, in order."""
    done = subprocess.run(
        ["make", "-n", "-C", checkout, "--no-print-directory", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
    )
    return done.stdout.splitlines()


def installed(checkout: Path, *stamps: str, torch: str = "") -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    for name in ("bin/python", *stamps):
        (checkout / ".venv" / name).write_text(torch if name == ".demo" else "")


def test_demo_installs_only_what_it_needs(checkout: Path) -> None:
    commands = "\n".join(steps(checkout, "demo"))
    assert "-e '.[demo]'" in commands
    assert ".[dev" not in commands


def test_venv_adds_to_what_the_demo_installed(checkout: Path) -> None:
    installed(checkout, ".demo")
    commands = "\n".join(steps(checkout, "venv"))
    assert "-e '.[dev]'" in commands
    assert "-e '.[demo]'" not in commands


@pytest.mark.parametrize("torch", ["", "cpu"])
def test_nothing_is_installed_twice(checkout: Path, torch: str) -> None:
    installed(checkout, ".demo", ".installed", torch=torch)
    assert steps(checkout, "demo") == [".venv/bin/longshore demo "]
    assert not [step for step in steps(checkout, "demo", "venv", f"TORCH={torch}") if INSTALLS in step]


def test_another_torch_replaces_the_installed_one(checkout: Path) -> None:
    installed(checkout, ".demo", ".installed", torch="cpu")
    commands = [step for step in steps(checkout, "demo", "TORCH=cu130") if INSTALLS in step]
    assert "--force-reinstall --index-url https://download.pytorch.org/whl/cu130 torch" in commands[0]
