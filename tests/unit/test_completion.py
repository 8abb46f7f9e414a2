"""The shells themselves run the scripts of `longshore completion`, where they are installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.command_line.cli import build_parser, main
from cluster.command_line.help_texts import PAGES, SHELLS, completion_script

pytest.importorskip("shtab")


def shell(name: str, *argv: str) -> str:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([program, *argv], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(params=SHELLS)
def script(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Return the shell and the path of its script."""
    path = tmp_path / "_longshore"
    path.write_text(completion_script(build_parser(), request.param))
    return request.param, str(path)


def test_the_shell_accepts_its_script(script: tuple[str, str]) -> None:
    name, path = script
    assert shell(name, "-n", path) == ""


def test_descriptions_run_nothing(script: tuple[str, str]) -> None:
    """Help texts have backquotes, which shells run."""
    name, path = script
    code = [line for line in Path(path).read_text().splitlines() if not line.lstrip().startswith("#")]
    assert not [line for line in code if "`" in line]
    if name != "bash":  # which shows none
        assert PAGES["verify"].summary in "\n".join(code)


COMPLETE_IN_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_longshore 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["longshore", "st"], "status"),
        (["longshore", "comp"], "completion"),
        (["longshore", "load", "--device", "cu"], "cuda"),
        (["longshore", "events", "x", "--fol"], "--follow"),
        (["longshore", "completion", "z"], "zsh"),
    ],
)
def test_words_are_completed(words: list[str], wanted: str, tmp_path: Path) -> None:
    scripts = {name: tmp_path / name for name in ("bash", "fish")}
    for name, path in scripts.items():
        path.write_text(completion_script(build_parser(), name))
    said = shell("bash", "-c", COMPLETE_IN_BASH, "bash", str(scripts["bash"]), *words)
    assert [word.strip() for word in said.split()] == [wanted]
    said = shell("fish", "--no-config", "-c", f"source {scripts['fish']}; complete -C '{' '.join(words)}'")
    assert [line.split("\t")[0] for line in said.splitlines()] == [wanted]


def test_the_command_prints_the_script_of_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert "longshore" in capsys.readouterr().out
    assert main(["completion", "zsh", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shell"] == "zsh"
    assert main(["completion", "tcsh"]) == 2


def test_without_the_package_it_names_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 7
    assert "pip install '.[completion]'" in capsys.readouterr().err
