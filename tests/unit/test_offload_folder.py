"""An offload folder: what is in it, whose it is, and what is left of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from actors.devices.offload_folder import OWNER_NAME, OffloadFolder
from cluster.errors import ConfigError, DoesNotFit, PlanError


def test_a_folder_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used") as missing:
        OffloadFolder(str(tmp_path / "no" / "such"), "load").open(1)
    assert missing.value.details["cause"] == os.strerror(2)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        OffloadFolder(str(tmp_path / "file"), "load").open(1)
    with pytest.raises(ConfigError, match="cannot be used"):
        OffloadFolder("/proc/longshore", "load").open(1)
    folder = OffloadFolder(str(tmp_path / "new"), "load")
    with pytest.raises(DoesNotFit, match="too small") as small:
        folder.open(1 << 60)
    assert small.value.details["need_bytes"] == 1 << 60
    assert small.value.details["free_bytes"] > 0
    folder.remove()
    assert not (tmp_path / "new").exists()


def test_nothing_outside_the_folder_is_touched(tmp_path: Path) -> None:
    victim = tmp_path / "victim.dat"
    victim.write_text("before")
    folder = OffloadFolder(str(tmp_path / "offload"), "load")
    folder.open(0)
    for name in ("../victim", "a/b", "a\0b", "", "x" * 300, "a\nb"):
        with pytest.raises(PlanError, match="no file can have"):
            folder.create(name, 1)
    (tmp_path / "offload" / "linked.dat").symlink_to(victim)
    with pytest.raises(ConfigError, match="cannot be used"):
        folder.create("linked", 1)
    assert victim.read_text() == "before"
    folder.remove()
    assert victim.read_text() == "before"


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_is_full_before_the_first_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = OffloadFolder(str(tmp_path / "offload"), "load")
    with monkeypatch.context() as patched:
        patched.setattr(f"actors.devices.offload_folder.os.{call}", full)
        with pytest.raises(DoesNotFit, match="full"):
            folder.open(0)
        folder.remove()
    assert list(tmp_path.iterdir()) == []
    again = OffloadFolder(str(tmp_path / "offload"), "another load")
    again.open(0)
    again.remove()


def test_two_loads_that_take_a_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (OffloadFolder(str(tmp_path / "offload"), owner) for owner in ("load 1", "load 2"))
    listed = os.listdir

    def listed_just_before(folder: int) -> list[str]:
        names = listed(folder)
        monkeypatch.undo()
        first.open(0)
        first.create("a", 1)
        return names

    monkeypatch.setattr("actors.devices.offload_folder.os.listdir", listed_just_before)
    with pytest.raises(ConfigError, match="belongs to another load"):
        second.open(0)
    second.remove()
    assert {path.name for path in (tmp_path / "offload").iterdir()} == {OWNER_NAME, "a.dat"}
    first.remove()
