"""What the README says about settings and commands is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.command_line.cli import build_parser
from cluster.config import ENV_PREFIX, Config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_settings_table_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(rf"^\| `{ENV_PREFIX}(\w+)` \| (\S+) \| \S.* \|$", README, re.MULTILINE))
    assert rows == {name.upper(): str(field.default) for name, field in Config.model_fields.items()}


def test_the_command_table_lists_every_verb() -> None:
    usage = build_parser().format_help()
    verbs = set(re.findall(r"^    ([a-z]+)(?: |$)", usage, re.MULTILINE))
    assert set(re.findall(r"^\| `longshore (\w+)[^|]*` \|", README, re.MULTILINE)) == verbs


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_commands_and_links_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make (\w[\w-]*)", text, re.MULTILINE)) <= set(targets)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
