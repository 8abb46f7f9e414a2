"""The arena's file: who owns its memory, which files are refused, what is left behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import resource
import stat
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from storage.arena.arena import GEOMETRY, KEPT, KEPT_FILES, OWNER_AT, RECORDS_AT, Arena, arena_size_bytes
from storage.arena.arena_files import (
    ARENA_PREFIX,
    SweptArena,
    arena_names,
    arena_path,
    check_room,
    default_arena_bytes,
    sweep,
    taken_bytes,
)
from storage.arena.slots import COPY_BYTES, FREE_RECORD, RECORD_BYTES, SlotRecord, SlotState
from storage.errors import ArenaCorrupt, ArenaError, ArenaTooLarge
from storage.host.memory import huge_pages
from storage.host.processes import ProcessId
from tests.support.python_processes import ask, start_python

SLOT = 64 << 10


@pytest.fixture
def path(shm_dir):
    return arena_path("cluster", "node", str(shm_dir))


@pytest.fixture
def arena(path):
    with Arena.create(path, slot_count=4, slot_bytes=SLOT) as arena:
        yield arena


# --- slots ---


def test_two_mappings_see_the_same_slots_and_nothing_else(arena, path):
    arena.reserve()
    with Arena.open(path) as other:
        for index in range(4):
            view = other.slot(index)
            assert (len(view), view.readonly) == (SLOT, False)
            view[:] = bytes([index + 1]) * SLOT
        assert arena.records() == (FREE_RECORD,) * 4
        for index in range(4):
            assert arena.slot(index) == bytes([index + 1]) * SLOT
        assert bytes(arena.data()) == b"".join(bytes([index + 1]) * SLOT for index in range(4))
        with pytest.raises(IndexError):
            other.slot(4)
        with pytest.raises(IndexError):
            other.slot(-1)


def test_slots_begin_on_a_page_and_the_file_is_private(arena, path):
    address = np.frombuffer(arena.slot(0), np.uint8).ctypes.data
    assert address % os.sysconf("SC_PAGE_SIZE") == 0
    info = os.stat(path)
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_size == arena.size_bytes == arena_size_bytes(4, SLOT, 4)


def test_kept_slots_take_memory_only_while_they_hold_a_chunk(path):
    with Arena.create(path, slot_count=6, slot_bytes=SLOT, window_slots=2) as arena:
        assert arena.reserve() == arena.ready_slots == 2
        empty = arena.taken_bytes
        assert 2 * SLOT <= empty < 3 * SLOT
        chunk = memoryview(os.urandom(SLOT - 4096))
        assert arena.keep(5, chunk)
        assert arena.taken_bytes - empty == len(chunk)
        with Arena.open(path) as worker:
            parts = [memoryview(bytearray(100)), memoryview(bytearray(len(chunk) - 100))]
            worker.read(5, parts)
            assert b"".join(parts) == chunk == worker.view(5, len(chunk))
            assert len(worker.data()) == 2 * SLOT
        arena.give_back(5)
        assert arena.taken_bytes == empty
        for outside in (1, 6, -1):
            with pytest.raises(IndexError):
                arena.keep(outside, chunk)
        with pytest.raises(IndexError):
            arena.slot(2)


def test_kept_slots_are_in_several_files_which_go_with_the_arena(path, shm_dir):
    """The kernel lets one process at a time write to a file."""
    slots = range(2, 2 + 2 * KEPT_FILES)
    chunks = {slot: memoryview(os.urandom(4096)) for slot in slots}
    with Arena.create(path, slot_count=slots.stop, slot_bytes=4096, window_slots=2) as arena:
        for slot, chunk in chunks.items():
            assert arena.keep(slot, chunk)
        assert len(os.listdir(shm_dir)) == 1 + KEPT_FILES
        with Arena.open(path) as worker:
            assert all(worker.view(slot, 4096) == chunk for slot, chunk in chunks.items())
        assert taken_bytes(str(shm_dir)) == arena.taken_bytes >= 4096 * len(slots)
        arena.unlink()
        assert os.listdir(shm_dir) == []
        assert arena.view(5, 4096) == chunks[5]  # until it is closed


def test_kept_slots_of_a_dead_process_are_swept_with_its_arena(path, shm_dir):
    arena = Arena.create(path, slot_count=5, slot_bytes=4096, window_slots=2)
    arena.keep(2, memoryview(bytes(4096)))
    took_bytes = arena.taken_bytes
    assert sweep(str(shm_dir)) == []
    arena.close()
    assert sweep(str(shm_dir)) == [SweptArena(path, took_bytes)]
    assert os.listdir(shm_dir) == []
    left = Path(f"{path}{KEPT}abc-0")  # somebody removed the arena's file only
    assert arena_names(str(shm_dir)) == []
    left.write_bytes(bytes(4096))
    assert arena_names(str(shm_dir)) == [os.path.basename(path)]
    assert sweep(str(shm_dir)) == [SweptArena(path, 4096)]
    assert not left.exists()


def test_an_arena_without_its_kept_slots_is_refused(path, shm_dir):
    with Arena.create(path, slot_count=5, slot_bytes=4096, window_slots=2):
        kept = next(shm_dir.glob(f"*{KEPT}*-1"))
        os.truncate(kept, 0)
        with pytest.raises(ArenaCorrupt, match="cut short"):
            Arena.open(path)
        kept.unlink()
        with pytest.raises(ArenaCorrupt, match="cannot open"):
            Arena.open(path)


def test_no_room_for_kept_slots_leaves_nothing(path, shm_dir, monkeypatch):
    truncate, calls = os.ftruncate, []

    def full(descriptor: int, size: int) -> None:
        calls.append(descriptor)
        if len(calls) == 4:
            raise OSError(errno.EFBIG, "File too large")
        truncate(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(ArenaTooLarge, match="kept slots"):
        Arena.create(path, slot_count=9, slot_bytes=4096, window_slots=2)
    assert os.listdir(shm_dir) == []
    for descriptor in calls:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_chunk_without_memory_is_not_kept(small_tmpfs):
    path = str(small_tmpfs / "arena")
    with Arena.create(path, slot_count=64, slot_bytes=1 << 20, window_slots=4) as arena:
        arena.reserve()
        chunk = memoryview(bytes(1 << 20))
        kept = [arena.keep(slot, chunk) for slot in range(4, 16)]
        assert kept[0]
        assert not kept[-1]
        arena.slot(3)[:] = chunk  # the window has its memory


def test_a_file_that_was_cut_short_is_an_error(path):
    with Arena.create(path, slot_count=4, slot_bytes=SLOT, window_slots=1) as arena:
        for file in Path(path).parent.glob(f"*{KEPT}*"):
            os.truncate(file, 0)
        with pytest.raises(ArenaCorrupt, match="cut short"):
            arena.read(3, [memoryview(bytearray(10))])


@pytest.mark.parametrize("small_tmpfs", ["size=64m,huge=within_size"], indirect=True)
def test_huge_pages_change_nothing_but_the_cost(small_tmpfs):
    assert huge_pages(small_tmpfs) == "within_size"
    path, slot_bytes = str(small_tmpfs / "arena"), 4 << 20
    with Arena.create(path, slot_count=5, slot_bytes=slot_bytes, window_slots=2) as arena:
        assert arena.reserve() == 2
        empty = arena.taken_bytes
        chunks = [memoryview(os.urandom(slot_bytes)) for _ in range(5)]
        for slot, chunk in enumerate(chunks):
            if slot < 2:
                arena.slot(slot)[:] = chunk
            else:
                assert arena.keep(slot, chunk)
        with Arena.open(path) as worker:
            assert all(worker.view(slot, slot_bytes) == chunk for slot, chunk in enumerate(chunks))
        assert arena.taken_bytes == empty + 3 * slot_bytes
        for slot in (2, 3, 4):
            arena.give_back(slot)
        assert arena.taken_bytes == empty


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, SLOT), (-1, SLOT), (1, 0), (1, 1000), (1 << 21, SLOT)])
def test_impossible_geometries_are_refused(path, slots, slot_bytes):
    with pytest.raises(ValueError, match="no arena has"):
        Arena.create(path, slot_count=slots, slot_bytes=slot_bytes)
    assert not os.path.exists(path)


# --- memory ---


def test_slots_take_memory_in_order_as_they_become_ready(arena, path):
    assert arena.ready_slots == 0
    empty = os.stat(path).st_blocks
    seen = []

    def stop() -> bool:
        seen.append(arena.ready_slots)
        return arena.ready_slots == 2

    assert arena.reserve(stop) == 2
    assert seen == [0, 1, 2]
    assert os.stat(path).st_blocks * 512 == empty * 512 + 2 * SLOT
    with Arena.open(path) as other:
        assert other.ready_slots == 2  # every process that maps it can see
    thread = threading.Thread(target=arena.reserve)
    thread.start()
    thread.join()
    assert arena.ready_slots == 4


def test_reserving_a_slot_maps_all_its_pages(path):
    """They are not faulted in one by one while the slot is filled."""
    pages = (4 << 20) // mmap.PAGESIZE
    with Arena.create(path, slot_count=2, slot_bytes=4 << 20) as arena:
        arena.reserve()
        with Arena.open(path) as other:
            data = b"x" * (4 << 20)
            for index in (0, 1, 0):
                slot = other.slot(index)
                before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
                slot[:] = data
                assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < pages // 4


def test_reserved_memory_is_released_when_memory_runs_out(small_tmpfs):
    path = arena_path("cluster", "node", str(small_tmpfs))
    free = os.statvfs(small_tmpfs).f_bavail
    with Arena.create(path, slot_count=64, slot_bytes=1 << 20) as arena:
        with pytest.raises(ArenaTooLarge, match="LONGSHORE_ARENA_BYTES") as caught:
            arena.reserve()
        assert caught.value.details["wanted_bytes"] == 64 << 20
        assert 0 < arena.ready_slots < 8
        assert os.listdir(small_tmpfs) == []
        arena.slot(0)[:] = b"x" * (1 << 20)  # slots that were ready stay usable until the arena is closed
    assert os.statvfs(small_tmpfs).f_bavail == free


def test_no_room_for_the_header_leaves_nothing(small_tmpfs):
    path = arena_path("cluster", "node", str(small_tmpfs))
    with pytest.raises(ArenaTooLarge):
        Arena.create(path, slot_count=1 << 20, slot_bytes=4096)
    assert os.listdir(small_tmpfs) == []


def test_a_folder_too_small_is_refused_before_anything_is_made(small_tmpfs):
    check_room(str(small_tmpfs), 1 << 20)
    with pytest.raises(ArenaTooLarge, match="--shm-size") as caught:
        check_room(str(small_tmpfs), 1 << 30)
    assert caught.value.details["wanted_bytes"] == 1 << 30
    with pytest.raises(ArenaTooLarge):
        check_room(str(small_tmpfs / "missing"), 1)


def test_the_host_behind_a_large_tmpfs_counts_too(small_tmpfs, monkeypatch):
    monkeypatch.setattr("storage.arena.arena_files.available_host_bytes", lambda: 4096)
    with pytest.raises(ArenaTooLarge, match="host"):
        check_room(str(small_tmpfs), 8192)


def test_the_default_size_is_a_share_of_memory_in_whole_slots():
    gib = 1 << 30
    assert default_arena_bytes(64 * gib, slot_bytes=16 << 20) == 8 * gib
    assert default_arena_bytes(4 * gib, slot_bytes=16 << 20) == gib
    assert default_arena_bytes(4 * gib, slot_bytes=16 << 20, available_bytes=gib) == gib // 4
    assert default_arena_bytes((400 << 20) + 4096, slot_bytes=16 << 20) == 96 << 20  # whole slots
    assert default_arena_bytes(63 << 20, slot_bytes=16 << 20) == 0
    assert default_arena_bytes(0, slot_bytes=16 << 20) == 0


# --- lifetime ---


def test_pages_and_lock_last_until_the_last_view_is_gone(path, shm_dir):
    arena = Arena.create(path, slot_count=2, slot_bytes=SLOT)
    arena.reserve()
    view = arena.slot(1)
    array = np.frombuffer(arena.slot(0), np.uint8)
    arena.close()
    arena.close()
    view[:] = b"y" * SLOT
    assert array[0] == 0
    assert sweep(str(shm_dir)) == []
    del array
    view.release()
    del view
    assert [swept.path for swept in sweep(str(shm_dir))] == [path]


def test_unlink_is_idempotent_and_spares_a_later_arena(path):
    first = Arena.create(path, slot_count=1, slot_bytes=SLOT)
    first.unlink()
    first.unlink()
    with Arena.create(path, slot_count=1, slot_bytes=SLOT):
        first.unlink()
        assert os.path.exists(path)
        first.close()
        first.unlink()
        assert os.path.exists(path)


def test_an_existing_file_is_not_overwritten(arena, path):
    with pytest.raises(ArenaError, match="already"):
        Arena.create(path, slot_count=4, slot_bytes=SLOT)
    assert os.path.exists(path)
    link = path + "-link"
    os.symlink("/nowhere", link)
    with pytest.raises(ArenaError):
        Arena.create(link, slot_count=4, slot_bytes=SLOT)
    with pytest.raises(ArenaCorrupt):
        Arena.open(link)


def test_reserve_may_run_while_the_arena_is_closed(path):
    for _ in range(20):
        arena = Arena.create(path, slot_count=64, slot_bytes=4096)
        thread = threading.Thread(target=arena.reserve)
        thread.start()
        arena.unlink()
        arena.close()
        thread.join()
    assert arena.reserve() == 0  # as it would for a thread that begins after that


# --- the header ---


def _damage(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def _resealed(path, field, value):
    """Return the header with one field changed and a valid checksum."""
    with open(path, "r+b") as file:
        fields = list(GEOMETRY.unpack(file.read(GEOMETRY.size)))
        fields[field] = value
        body = GEOMETRY.pack(*fields)
        file.seek(0)
        file.write(body + struct.pack("<I", zlib.crc32(body)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, 4096),
        lambda path: os.truncate(path, 8192),
        lambda path: _damage(path, 0, b"safetens"),
        lambda path: _damage(path, 16, b"\xff"),
        lambda path: _resealed(path, 1, 99),
        lambda path: _resealed(path, 3, 5),
        lambda path: _resealed(path, 3, 2**63),
        lambda path: _resealed(path, 4, 2**50),
        lambda path: _resealed(path, 5, 0),
        lambda path: _resealed(path, 6, 0),
        lambda path: _resealed(path, 6, 5),
        lambda path: os.unlink(path),
        lambda path: (os.unlink(path), os.mkfifo(path)),
        lambda path: (os.unlink(path), os.mkdir(path)),
    ],
)
def test_files_that_are_not_arenas_are_refused(path, damage):
    Arena.create(path, slot_count=4, slot_bytes=SLOT).close()
    damage(path)
    with pytest.raises(ArenaCorrupt):
        Arena.open(path)


@pytest.mark.parametrize("seed", range(50))
def test_any_change_to_the_header_is_refused_or_harmless(path, seed):
    with Arena.create(path, slot_count=4, slot_bytes=SLOT):
        pass
    random_bytes = random.Random(seed)
    _damage(path, random_bytes.randrange(96), random_bytes.randbytes(random_bytes.randrange(1, 64)))
    try:
        arena = Arena.open(path)
    except ArenaCorrupt:
        return
    with arena:
        assert (arena.slot_count, arena.slot_bytes) == (4, SLOT)


# --- owner and records ---


def test_records_survive_their_writer(path):
    record = SlotRecord(SlotState.LEASED, 7, 0, b"k" * 32, ProcessId.current())
    with Arena.create(path, slot_count=3, slot_bytes=SLOT) as arena:
        epoch = arena.epoch
        for generation in range(5):
            arena.write_record(1, SlotRecord(SlotState.COMMITTED, generation, 5, b"j" * 32))
        arena.write_record(1, record)
        with pytest.raises(IndexError):
            arena.write_record(3, record)
    with Arena.adopt(path) as again:
        assert again.epoch == epoch
        assert again.records() == (FREE_RECORD, record, FREE_RECORD)
        again.write_record(1, FREE_RECORD)
        assert again.records()[1] == FREE_RECORD


def test_only_the_owner_writes_records(arena, path):
    with Arena.open(path) as worker, pytest.raises(ArenaError, match="owner"):
        worker.write_record(0, FREE_RECORD)


def test_a_torn_record_leaves_the_previous_one(path):
    old = SlotRecord(SlotState.COMMITTED, 1, 5, b"j" * 32)
    with Arena.create(path, slot_count=1, slot_bytes=SLOT) as arena:
        arena.write_record(0, old)
        arena.write_record(0, SlotRecord(SlotState.LEASED, 2, 0, b"k" * 32, ProcessId.current()))
    _damage(path, RECORDS_AT + COPY_BYTES + 20, b"\xee" * 9)  # the second write went to the second copy
    with Arena.adopt(path) as arena:
        assert arena.records() == (old,)
        arena.write_record(0, FREE_RECORD)
        assert arena.records() == (FREE_RECORD,)


def test_a_slot_without_any_whole_record_is_corrupt(path):
    with Arena.create(path, slot_count=1, slot_bytes=SLOT) as arena:
        arena.write_record(0, SlotRecord(SlotState.COMMITTED, 1, 5, b"j" * 32))
        arena.write_record(0, SlotRecord(SlotState.COMMITTED, 2, 5, b"j" * 32))
    _damage(path, RECORDS_AT, b"\xee" * RECORD_BYTES)
    with Arena.adopt(path) as arena, pytest.raises(ArenaCorrupt, match="copies"):
        arena.records()


@pytest.mark.parametrize("known", [True, False])
def test_an_arena_of_a_living_owner_is_not_adopted(path, known):
    """`known`: the arena says who owns it. A pid of another PID namespace means nothing here."""
    code = (
        "import sys; from storage.arena.arena import Arena; "
        f"a = Arena.create({path!r}, slot_count=1, slot_bytes={SLOT}); "
        "print('up', flush=True); sys.stdin.read()"
    )
    child = start_python(code)
    try:
        assert ask(child) == "up"
        if not known:
            _damage(path, OWNER_AT, b"\xff" * 8)
        with pytest.raises(ArenaError, match="lives"):
            Arena.adopt(path)
    finally:
        child.kill()
        child.communicate()
    with Arena.adopt(path) as arena:
        assert arena.owner == ProcessId.current()


# --- names and sweeping ---


def test_names_are_safe_and_different():
    assert arena_path("c", "n").startswith(f"/dev/shm/{ARENA_PREFIX}c-n-")
    long = "x" * 300
    pairs = [("a-b", "c"), ("a", "b-c"), ("../../etc", "passwd"), (long, "y"), (long, "y" * 301)]
    paths = [arena_path(*pair) for pair in pairs]
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert os.path.dirname(os.path.normpath(path)) == "/dev/shm"
        assert len(os.path.basename(path)) < 128


def test_sweep_removes_unlocked_arenas_and_returns_freed_bytes(shm_dir):
    used = Arena.create(arena_path("c", "used", str(shm_dir)), slot_count=1, slot_bytes=SLOT)
    dead_path = arena_path("c", "dead", str(shm_dir))
    dead = Arena.create(dead_path, slot_count=2, slot_bytes=SLOT)
    dead.reserve()
    took_bytes = os.stat(dead_path).st_blocks * 512
    dead.close()
    (shm_dir / "another-file").write_text("not ours")
    (shm_dir / f"{ARENA_PREFIX}link").symlink_to(shm_dir / "another-file")
    os.mkfifo(shm_dir / f"{ARENA_PREFIX}pipe")
    (shm_dir / f"{ARENA_PREFIX}folder").mkdir()
    assert sweep(str(shm_dir)) == [SweptArena(dead_path, took_bytes)]
    assert took_bytes >= 2 * SLOT
    assert len(os.listdir(shm_dir)) == 5
    used.close()
    assert [swept.path for swept in sweep(str(shm_dir))] == [used.path]
    assert sweep(str(shm_dir / "missing")) == []


def test_a_racing_sweep_never_removes_an_arena_in_use(shm_dir):
    """A creator and a sweeper race. A created arena keeps its name until it is closed."""
    path = arena_path("c", "n", str(shm_dir))
    stop = threading.Event()

    def sweep_on() -> None:
        while not stop.is_set():
            sweep(str(shm_dir))

    sweeper = threading.Thread(target=sweep_on)
    sweeper.start()
    try:
        for _ in range(300):
            with Arena.create(path, slot_count=1, slot_bytes=4096) as arena, Arena.open(path) as worker:
                assert worker.epoch == arena.epoch
                arena.unlink()
    finally:
        stop.set()
        sweeper.join()
    assert os.listdir(shm_dir) == []


@pytest.fixture
def sweep_before_first_lock(shm_dir, monkeypatch):
    """Run one sweep exactly between a file's opening and its lock."""
    lock, pending = fcntl.flock, [True]

    def swept_first(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and pending:
            pending.clear()
            assert len(sweep(str(shm_dir))) == 1
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", swept_first)


def test_a_file_swept_before_its_lock_is_created_again(path, sweep_before_first_lock):
    with Arena.create(path, slot_count=1, slot_bytes=SLOT) as arena, Arena.open(path) as worker:
        assert worker.epoch == arena.epoch


def test_opening_an_arena_during_its_sweep_is_refused(path, request):
    Arena.create(path, slot_count=1, slot_bytes=SLOT).close()
    request.getfixturevalue("sweep_before_first_lock")
    with pytest.raises(ArenaCorrupt, match="swept"):
        Arena.open(path)


def test_an_os_error_while_reserving_is_translated(arena, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ArenaError, match="broken"):
        arena.reserve()
