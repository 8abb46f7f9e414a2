"""The contents, the owner and the leftovers of an offload folder."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.devices import mapped_device
from actors.devices.mapped_device import LOCK_NAME, LOCK_TITLE, OffloadFolder
from cluster.errors import ConfigError, DoesNotFit, PlanError
from tests.support.shared_memory import REPOSITORY

SIZES = {"a.weight": 10, "b": 0}
FILES = {LOCK_NAME, "a.weight.dat", "b.dat"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_unusable_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used") as missing:
        OffloadFolder(str(tmp_path / "no" / "such"), "load").open(SIZES)
    assert missing.value.details["cause"] == os.strerror(2)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        OffloadFolder(str(tmp_path / "file"), "load").open(SIZES)
    for path in ("/proc/longshore", f"/proc/{os.getpid()}"):
        with pytest.raises(ConfigError, match="cannot be used"):
            OffloadFolder(path, "load").open(SIZES)
    folder = OffloadFolder(str(tmp_path / "new"), "load")
    with pytest.raises(DoesNotFit, match="too small") as small:
        folder.open({"a": 1 << 60})
    assert small.value.details["need_bytes"] == 1 << 60
    assert small.value.details["free_bytes"] > 0
    folder.remove()
    assert not (tmp_path / "new").exists()


def test_the_folder_is_empty_again_after_it_was_used(tmp_path: Path) -> None:
    for made_before in (False, True):
        path = tmp_path / f"offload {made_before}"
        if made_before:
            path.mkdir()
        for load in ("load 1", "load 2"):
            folder = OffloadFolder(str(path), load)
            folder.open(SIZES)
            folder.write("a.weight", memoryview(b"0123456789"), 0)
            folder.seal({"a.weight": {}})
            assert names(path) == {*FILES, "index.json"}
            (path / "of the user's.dat").write_text("")
            folder.remove()
            folder.remove()
            assert names(path) == {"of the user's.dat"}
            (path / "of the user's.dat").unlink()
        assert path.exists()


def test_nothing_outside_the_folder_is_touched(tmp_path: Path) -> None:
    victim = tmp_path / "victim.dat"
    victim.write_text("before")
    path = tmp_path / "offload"
    for name in ("../victim", "a/b", "a\0b", "", "x" * 300, "a\nb"):
        with pytest.raises(PlanError, match="cannot be a file name"):
            OffloadFolder(str(path), "load").open({name: 1})
    path.mkdir()
    (path / "linked.dat").symlink_to(victim)
    (path / LOCK_NAME).write_text(f"{LOCK_TITLE}load\n../victim\nlinked\n/etc/passwd")
    with pytest.raises(ConfigError, match="not empty") as refused:
        OffloadFolder(str(path), "load").open(SIZES)
    assert refused.value.details["found"] == "'linked.dat'"
    (path / "linked.dat").unlink()
    (path / LOCK_NAME).unlink()
    (path / LOCK_NAME).symlink_to(victim)
    with pytest.raises(ConfigError, match="cannot be used"):
        OffloadFolder(str(path), "load").open(SIZES)
    assert victim.read_text() == "before"


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_is_full_before_the_first_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = OffloadFolder(str(tmp_path / "offload"), "load")
    with monkeypatch.context() as patched:
        patched.setattr(f"actors.devices.mapped_device.os.{call}", full)
        with pytest.raises(DoesNotFit, match="full"):
            folder.open(SIZES)
        folder.remove()
    assert list(tmp_path.iterdir()) == []
    again = OffloadFolder(str(tmp_path / "offload"), "another load")
    again.open(SIZES)
    again.remove()


@pytest.mark.parametrize("name", ["index.json", "index.json.part", "a.weight.dat", "notes.txt"])
def test_files_that_were_there_before_are_refused_and_stay(tmp_path: Path, name: str) -> None:
    """Also under the names that ours would have."""
    (tmp_path / name).write_text("of the user's")
    folder = OffloadFolder(str(tmp_path), "load")
    with pytest.raises(ConfigError, match="not empty") as refused:
        folder.open(SIZES)
    assert refused.value.details["found"] == f"'{name}'"
    folder.remove()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "of the user's"}


# -- whose it is -------------------------------------------------------------------------------------------------

USER = """
import sys
from actors.devices.mapped_device import OffloadFolder
folder = OffloadFolder(sys.argv[1], "load 1")
folder.open({"a.weight": 10, "b": 0})
print("open", flush=True)
sys.stdin.readline()
folder.remove()
"""


@contextlib.contextmanager
def user_of(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that uses the folder until it is ordered to leave."""
    with subprocess.Popen(
        [sys.executable, "-c", USER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def test_two_live_loads_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_device, "OTHER_LOAD_S", 0.2)
    path = tmp_path / "offload"
    with user_of(path):
        second = OffloadFolder(str(path), "load 2")
        with pytest.raises(ConfigError, match="another load uses the offload folder") as refused:
            second.open(SIZES)
        assert refused.value.details["used_by"] == "'load 1'"
        second.remove()
        assert names(path) == FILES


@pytest.mark.parametrize("owner", ["load 1", "load 2"])
def test_the_next_load_removes_files_of_a_killed_worker(tmp_path: Path, owner: str) -> None:
    path = tmp_path / "offload"
    path.mkdir()
    with user_of(path) as user:
        user.kill()
        user.wait()
        assert names(path) == FILES
        folder = OffloadFolder(str(path), owner)
        folder.open({"c": 1})
        assert names(path) == {LOCK_NAME, "c.dat"}
        folder.remove()
    assert names(path) == set()


def test_files_of_others_beside_those_of_a_killed_worker_stay(tmp_path: Path) -> None:
    path = tmp_path / "offload"
    with user_of(path) as user:
        user.kill()
        user.wait()
        (path / "of the user's.dat").write_text("kept")
        with pytest.raises(ConfigError, match="not empty") as refused:
            OffloadFolder(str(path), "load 2").open(SIZES)
        assert "of the user's.dat" in refused.value.details["found"]
    assert names(path) == {*FILES, "of the user's.dat"}


def test_a_load_waits_for_the_one_that_is_about_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one removes the folder, which it had made."""
    monkeypatch.setattr(mapped_device, "OTHER_LOAD_S", 60.0)
    path = tmp_path / "offload"
    with user_of(path) as user:
        second = OffloadFolder(str(path), "load 2")
        opening = threading.Thread(target=second.open, args=(SIZES,))
        opening.start()
        user.communicate("\n")
        opening.join(60)
        assert names(path) == FILES
        second.remove()
    assert not path.exists()


def test_a_folder_that_goes_before_it_is_opened_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other load removes it between the two calls."""
    path = tmp_path / "offload"
    path.mkdir()
    opened = os.open

    def goes_first(name: str, *args: Any, **options: Any) -> int:
        monkeypatch.setattr(os, "open", opened)
        path.rmdir()
        return opened(name, *args, **options)

    monkeypatch.setattr(os, "open", goes_first)
    folder = OffloadFolder(str(path), "load 1")
    folder.open(SIZES)
    assert names(path) == FILES
    folder.remove()
    assert not path.exists()


def test_the_locked_file_is_a_new_one_when_the_old_one_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a removed file excludes no other process."""
    path = tmp_path / "offload"
    path.mkdir()
    first, second = (OffloadFolder(str(path), load) for load in ("load 1", "load 2"))
    first.open(SIZES)
    locked = mapped_device.fcntl.flock

    def lock_when_it_is_gone(descriptor: int, how: int) -> None:
        monkeypatch.undo()
        first.remove()
        locked(descriptor, how)

    monkeypatch.setattr(mapped_device.fcntl, "flock", lock_when_it_is_gone)
    second.open(SIZES)
    monkeypatch.setattr(mapped_device, "OTHER_LOAD_S", 0.2)
    with pytest.raises(ConfigError, match="another load uses"):
        OffloadFolder(str(path), "load 3").open(SIZES)
    second.remove()
