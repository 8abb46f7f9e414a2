"""Mappings of arenas: shared by the ranks of a process, kept when it is warm, and not for an arena that is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.rank.executor import ArenaMaps
from storage.arena.arena import Arena
from storage.arena.arena_files import arena_path, sweep
from storage.errors import ArenaError

SLOT = 64 << 10


def mapped(path: str) -> int:
    """How often this process has the file mapped."""
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


def test_a_warm_process_keeps_it_until_another_arena_comes(path: str) -> None:
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
        assert mapped(path) == 1  # the owner's


def test_an_arena_of_another_epoch_than_was_said_is_taken_as_it_is(path: str) -> None:
    """The agent was restarted in between: the rank says hello again and is told the new one."""
    maps = ArenaMaps()
    with Arena.create(path, slot_count=2, slot_bytes=SLOT) as owner:
        first, again = maps.open(path, "before"), maps.open(path, "before")
        assert first is again
        assert first.epoch == owner.epoch
        maps.close(first)
        maps.close(again)
        assert mapped(path) == 1


def test_an_arena_that_is_not_there(path: str) -> None:
    with pytest.raises(ArenaError):
        ArenaMaps().open(path, "any")
    assert not os.path.exists(path)
    sweep(os.path.dirname(path))


def test_claims_are_those_of_the_others() -> None:
    maps = ArenaMaps()
    maps.claim(1, "/arena", "agent")
    maps.claim(2, "/arena", "agent")
    assert maps.words(but=1) == (("/arena", "agent"),)
    maps.release(2)
    maps.release(2)
    assert maps.words(but=1) == ()
