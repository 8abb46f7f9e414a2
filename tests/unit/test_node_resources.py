"""An agent takes memory of a host that it shares with others, and reports the rest."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from actors.node import node_resources
from actors.node.node_resources import LOOK_EVERY_SLOTS, host_pools, open_arena, ray_kills_above, room_for_slots
from cluster.config import Config
from storage.arena.arena import KEPT, Arena
from storage.arena.arena_files import LOCK_PATIENCE_S, arena_path, one_at_a_time, untouched_bytes
from storage.errors import ArenaTooLarge, ArenaTooSmall
from storage.host.memory import MemoryPool, memory_pools

MIB = 1 << 20


def config(arena_bytes: int, **settings: int) -> Config:
    return Config.model_validate({"arena_bytes": arena_bytes, "slot_bytes": MIB, "host_reserve_bytes": 0, **settings})


def test_agents_of_one_host_count_memory_the_others_will_take(small_tmpfs: Path) -> None:
    """Each arena of 5 MiB fits into 8 MiB, and neither has touched a page when the other one looks."""
    paths = [arena_path("cluster", f"node-{number}", str(small_tmpfs)) for number in range(4)]
    barrier = threading.Barrier(len(paths))

    def make(path: str) -> Arena | ArenaTooLarge:
        barrier.wait()
        try:
            return open_arena(config(5 * MIB), path, str(small_tmpfs))[0]
        except ArenaTooLarge as error:
            return error

    with ThreadPoolExecutor(len(paths)) as pool:
        made = list(pool.map(make, paths))
    (arena,) = [each for each in made if isinstance(each, Arena)]
    refused = [each for each in made if isinstance(each, ArenaTooLarge)]
    assert {error.details["wanted_bytes"] for error in refused} == {5 * MIB}
    assert all(error.details["free_bytes"] < 3 * MIB for error in refused)
    assert arena.reserve() == 5  # and it does get what it was promised
    arena.unlink()
    arena.close()


def test_an_arena_without_a_size_takes_a_quarter_of_the_rest(small_tmpfs: Path) -> None:
    def make(name: str) -> Arena:
        return open_arena(config(0), arena_path("cluster", name, str(small_tmpfs)), str(small_tmpfs))[0]

    with make("one") as first, Arena.create(str(small_tmpfs / "longshore-arena-x"), slot_count=3, slot_bytes=MIB):
        assert first.slot_count == 2
        with pytest.raises(ArenaTooSmall):
            make("two")  # 5 MiB are promised


def test_a_limit_beyond_the_file_system_is_no_error(small_tmpfs: Path) -> None:
    path = arena_path("cluster", "node", str(small_tmpfs))
    with open_arena(config(1 << 50, window_bytes=MIB), path, str(small_tmpfs))[0] as arena:
        assert (arena.window_slots, arena.slot_count) == (1, 8)
        arena.unlink()


def test_an_arena_that_cannot_be_used_is_replaced_though_a_process_maps_it(shm_dir: Path) -> None:
    path = arena_path("cluster", "node", str(shm_dir))
    first, _ = open_arena(config(4 * MIB, window_bytes=MIB), path, str(shm_dir))
    first.reserve()
    view = first.slot(0)
    view[:] = b"x" * MIB
    first.close()  # its lock on the arena's file lasts as long as the view
    for kept in shm_dir.glob(f"*{KEPT}*"):
        kept.unlink()
    again, adopted = open_arena(config(4 * MIB, window_bytes=MIB), path, str(shm_dir))
    assert (adopted, view[0]) == (False, ord("x"))
    assert again.keep(2, view)
    again.unlink()
    again.close()
    assert os.listdir(shm_dir) == []


def test_an_arena_leaves_the_reserve(small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.arena.arena_files.available_host_bytes", lambda: 6 * MIB)
    path = arena_path("cluster", "node", str(small_tmpfs))
    with pytest.raises(ArenaTooLarge, match="host has too little") as caught:
        open_arena(config(4 * MIB, host_reserve_bytes=3 * MIB), path, str(small_tmpfs))
    assert caught.value.details == {
        "wanted_bytes": 4 * MIB,
        "reserve_bytes": 3 * MIB,
        "available_bytes": 6 * MIB,
    }
    assert os.listdir(small_tmpfs) == []


def test_an_arena_stops_growing_when_memory_runs_short(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would kill a process otherwise. No further slot is requested, and the rest is freed."""
    settings = config(64 * MIB)
    arena, _ = open_arena(settings, arena_path("cluster", "node", str(shm_dir)), str(shm_dir))
    left = iter([1 << 40, 1 << 40, 0])
    monkeypatch.setattr(node_resources, "available_host_bytes", lambda: next(left))
    with pytest.raises(ArenaTooLarge, match="memory behind it") as caught:
        arena.reserve(room=room_for_slots(settings))
    assert caught.value.details["reserved_bytes"] == 2 * LOOK_EVERY_SLOTS * MIB
    assert os.listdir(shm_dir) == []
    arena.close()


def test_memory_promised_to_arenas_is_not_free(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = MemoryPool("host", 1 << 40, 1 << 41)  # else others take and give back meanwhile
    monkeypatch.setattr(node_resources, "memory_pools", lambda: (pool,))
    assert untouched_bytes(str(shm_dir)) == 0
    with Arena.create(arena_path("cluster", "node", str(shm_dir)), slot_count=512, slot_bytes=MIB) as arena:
        untouched = untouched_bytes(str(shm_dir))
        assert untouched >= 512 * MIB
        assert [seen.free_bytes for seen in host_pools(str(shm_dir))] == [pool.free_bytes - untouched]
        arena.reserve(stop=lambda: arena.ready_slots == 64)
        assert 447 * MIB < untouched_bytes(str(shm_dir)) <= 449 * MIB
    (shm_dir / "longshore-arena-link").symlink_to("/etc/passwd")
    (shm_dir / "other").write_bytes(b"x")
    assert untouched_bytes(str(shm_dir / "missing")) == 0


def test_a_process_stopped_while_making_an_arena_blocks_no_other(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LOCK_PATIENCE_S > 1
    monkeypatch.setattr("storage.arena.arena_files.LOCK_PATIENCE_S", 0.1)
    with one_at_a_time(str(shm_dir)), one_at_a_time(str(shm_dir)):
        pass
    with one_at_a_time(str(shm_dir / "missing")):
        pass


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        ({}, 0.95),
        ({"RAY_memory_usage_threshold": "0.8"}, 0.8),
        ({"RAY_memory_usage_threshold": "1.7"}, 0.95),
        ({"RAY_memory_usage_threshold": "much"}, 0.95),
        ({"RAY_memory_usage_threshold": "0.8", "RAY_memory_monitor_refresh_ms": "0"}, 1.0),
    ],
)
def test_rays_memory_threshold_sets_the_reserve(shm_dir: Path, environ: dict[str, str], share: float) -> None:
    assert ray_kills_above(environ) == share
    for pool, seen in zip(host_pools(str(shm_dir), environ), memory_pools(), strict=True):
        assert pool.pool_id == seen.pool_id
        assert pool.reserve_bytes == pool.total_bytes - int(pool.total_bytes * share)
