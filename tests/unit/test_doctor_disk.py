"""Checks of the disk tier by `longshore doctor`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from cluster.config import MIB, Config
from cluster.doctor import doctor, host_checks
from cluster.doctor.doctor import run_checks
from cluster.doctor.host_checks import Check
from storage.disk.tier import DiskTier
from tests.support.disk_chunks import write


def check(folder: Path | str, budget_bytes: int = 100 * MIB) -> Check:
    config = Config(disk_cache_dir=str(folder), disk_cache_bytes=budget_bytes)
    (found,) = host_checks.check_disk_tier(config)
    return found


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that passes for one on a disk with 10 GB free."""
    monkeypatch.setattr(host_checks, "is_memory_backed", lambda _: False)
    monkeypatch.setattr(host_checks, "free_bytes", lambda _: 10**10)
    return tmp_path


def test_the_check_is_skipped_without_a_folder() -> None:
    assert check("").outcome == "skip"


def test_existing_chunks_are_reported_and_kept(on_disk: Path) -> None:
    tier = DiskTier(str(on_disk), 100 * MIB)
    write(tier, 1)
    tier.close()
    found = check(on_disk)
    assert found.outcome == "ok"
    assert "1 chunks" in found.detail
    tier = DiskTier(str(on_disk), 100 * MIB)
    assert len(tier) == 1
    tier.close()


def test_impossible_budgets_get_a_hint(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no chunk fits" in check(on_disk, MIB).hint
    monkeypatch.setattr(host_checks, "free_bytes", lambda _: MIB)
    assert "full before the budget" in check(on_disk).hint


def test_a_memory_file_system_is_not_a_disk() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = check(folder, 8 * MIB)
    assert found.outcome == "warn"
    assert "memory" in found.detail


def test_an_unusable_folder_fails_only_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_stale_arenas", "check_torch", "check_driver"):
        monkeypatch.setattr(host_checks, name, list)
    monkeypatch.setattr(doctor, "check_cluster", lambda _: [])
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("LONGSHORE_DISK_CACHE_DIR", str(tmp_path / "file"))
    found = {check.name: check for check in run_checks()}
    assert found[host_checks.NAME].outcome == "fail"
    assert "cannot create the folder" in found[host_checks.NAME].detail
    assert found["python"].outcome == "ok"


def test_the_check_removes_no_chunk(on_disk: Path) -> None:
    tier = DiskTier(str(on_disk), 100 * MIB)
    for number in range(3):
        write(tier, number)
    tier.close()
    check(on_disk, 1)
    tier = DiskTier(str(on_disk), 100 * MIB)
    assert len(tier) == 3
    tier.close()
