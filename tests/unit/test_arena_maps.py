"""Mappings of arenas: ranks of a process share them; a warm process keeps one until its arena is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.rank.loader import ArenaMaps
from storage.arena.arena import Arena
from storage.arena.arena_files import arena_path, sweep
from storage.errors import ArenaError

SLOT = 64 << 10


def mapped(path: str) -> int:
    """Return the number of times this process has the file mapped."""
    return Path("/proc/self/maps").read_text().count(path)


@pytest.fixture
def path(shm_dir: Path) -> str:
    return arena_path("cluster", "node", str(shm_dir))


def test_ranks_share_a_mapping_and_the_last_one_closes_it(path: str) -> None:
    maps = ArenaMaps()
    with Arena.create(path, slot_count=2, slot_bytes=SLOT) as owner:
        before = mapped(path)
        first, second = maps.open(path, owner.epoch), maps.open(path, owner.epoch)
        assert first is second
        assert mapped(path) == before + 1
        maps.close(first)
        assert len(first.slot(0)) == SLOT
        maps.close(second)
        assert mapped(path) == before


def test_a_warm_process_keeps_its_mapping_until_a_new_arena(path: str) -> None:
    maps = ArenaMaps()
    maps.keep(True)
    with Arena.create(path, slot_count=2, slot_bytes=SLOT) as owner:
        arena = maps.open(path, owner.epoch)
        maps.close(arena)
        assert maps.open(path, owner.epoch) is arena
        maps.close(arena)
        owner.unlink()
    with Arena.create(path, slot_count=2, slot_bytes=SLOT) as owner:
        other = maps.open(path, owner.epoch)
        assert other.epoch == owner.epoch != arena.epoch
        assert Path("/proc/self/maps").read_text().count(f"{path} (deleted)") == 0
        maps.close(other)
        maps.keep(False)
        assert mapped(path) == 1  # the owner's mapping


def test_an_arena_with_an_unexpected_epoch_is_still_opened(path: str) -> None:
    """The agent restarted in between; the rank sends hello again and receives the new epoch."""
    maps = ArenaMaps()
    with Arena.create(path, slot_count=2, slot_bytes=SLOT) as owner:
        first, again = maps.open(path, "before"), maps.open(path, "before")
        assert first is again
        assert first.epoch == owner.epoch
        maps.close(first)
        maps.close(again)
        assert mapped(path) == 1


def test_opening_a_missing_arena_is_refused(path: str) -> None:
    with pytest.raises(ArenaError):
        ArenaMaps().open(path, "any")
    assert not os.path.exists(path)
    sweep(os.path.dirname(path))


def test_a_rank_sees_only_the_claims_of_other_ranks() -> None:
    maps = ArenaMaps()
    maps.claim(1, "/arena", "agent")
    maps.claim(2, "/arena", "agent")
    assert maps.access(but=1) == (("/arena", "agent"),)
    maps.release(2)
    maps.release(2)
    assert maps.access(but=1) == ()
