"""What the README says about settings and commands is what the code has."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from cluster.command_line.cli import build_parser
from cluster.config import ENV_PREFIX, Config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ROOMS = ("storage", "cluster", "actors", "serving")


def test_the_settings_table_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(rf"^\| `{ENV_PREFIX}(\w+)` \| (\S+) \| \S.* \|$", README, re.MULTILINE))
    assert rows == {name.upper(): str(field.default) for name, field in Config.model_fields.items()}


def test_the_command_table_lists_every_verb() -> None:
    usage = build_parser().format_help()
    verbs = set(re.findall(r"^    ([a-z]+)(?: |$)", usage, re.MULTILINE))
    assert set(re.findall(r"^\| `longshore (\w+)[^|]*` \|", README, re.MULTILINE)) == verbs


# PyPI has no longshore, so anybody could take the name there.
BY_NAME = re.compile(r"pip3? +install\b[^\n`]*?[\s'\"]longshore(?![\w./-])")
TEXTS = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".html", ".js", ".json", ""}
OTHERS = {"build", "dist", "node_modules", "__pycache__"}  # folders that are not ours


def test_nothing_says_to_install_longshore_by_name() -> None:
    wrong = ["pip install longshore", "pip install -U 'longshore[ray]'", 'pip install "longshore==1"']
    fine = ["pip install '.[ray]'", "pip install ./longshore-0.1.0-py3-none-any.whl"]
    assert [bool(BY_NAME.search(line)) for line in (*wrong, *fine)] == [True] * 3 + [False] * 2
    texts: dict[Path, str] = {}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in OTHERS and not name.startswith(".")]
        paths = [Path(folder) / name for name in names]
        texts |= {path: path.read_text(errors="replace") for path in paths if path.suffix in TEXTS and path.is_file()}
    del texts[Path(__file__).resolve()]
    assert len(texts) > 500
    assert not [f"{path}: {found[0]}" for path, text in texts.items() if (found := BY_NAME.search(text))]


def test_every_extra_that_a_hint_names_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = "\n".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    named = set(re.findall(r"install_hint\([\"'](\w+)[\"']\)", code))
    assert {"cluster", "serving", "signing", "completion", "demo"} <= named
    assert named | {"gs", "az", "hf"} <= extras.keys()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_commands_and_links_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make (\w[\w-]*)", text, re.MULTILINE)) <= set(targets)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
