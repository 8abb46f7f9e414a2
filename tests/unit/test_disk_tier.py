"""The disk tier on a real file system: budget, LRU, crashes, several processes, a full disk, a hostile folder."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.disk import files as disk_folder
from storage.disk import tier as disk_tier
from storage.disk.files import HEADER_BYTES, LOCK_NAME, SUBFOLDER, DiskReader, chunk_name
from storage.disk.tier import DiskTier, Written
from storage.errors import DiskChunkUnusable, DiskTierError
from storage.stores.local import is_temporary
from tests.support.disk_chunks import chunk_of, chunks_in, folder_bytes, read, write


def temporaries_in(path: str) -> list[Path]:
    return [Path(path, name) for name in os.listdir(path) if is_temporary(name)]


REPOSITORY = Path(__file__).parents[2]
FILE_BYTES = HEADER_BYTES + 1000


@contextmanager
def tier_in(parent: Path, chunks: int) -> Iterator[DiskTier]:
    """Return a tier with room for that many chunks of 1000 bytes."""
    tier = DiskTier(str(parent), chunks * FILE_BYTES)
    try:
        yield tier
    finally:
        tier.close()


@contextmanager
def reader_of(tier: DiskTier) -> Iterator[DiskReader]:
    reader = DiskReader(tier.path)
    try:
        yield reader
    finally:
        reader.close()


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(chunk_of(number)[0] for number in numbers)


def test_a_written_chunk_is_found_and_read(tmp_path: Path) -> None:
    with tier_in(tmp_path / "made" / "here", 3) as tier, reader_of(tier) as reader:
        assert write(tier, 1) is Written.DONE
        assert write(tier, 1) is Written.PRESENT
        assert chunk_of(1)[0] in tier
        assert read(reader, 1) == chunk_of(1)[1]
        with pytest.raises(DiskChunkUnusable, match="does not exist"):
            read(reader, 2)
        assert tier.used_bytes == folder_bytes(tier.path) == FILE_BYTES
        assert Path(tier.path).stat().st_mode & 0o777 == 0o700
        assert Path(tier.path, chunk_name(chunk_of(1)[0])).stat().st_mode & 0o777 == 0o600


def test_the_least_recently_used_chunk_is_evicted(tmp_path: Path) -> None:
    with tier_in(tmp_path, 3) as tier:
        for number in (1, 2, 3):
            write(tier, number)
        tier.touch(chunk_of(1)[0])
        write(tier, 4)
        assert tier.keys() == keys(3, 1, 4)
        assert chunks_in(tier.path) == set(keys(3, 1, 4))


def test_the_order_of_use_survives_the_process(tmp_path: Path) -> None:
    with tier_in(tmp_path, 3) as tier, reader_of(tier) as reader:
        for number in (1, 2, 3):
            write(tier, number)
        read(reader, 1)  # notes it on disk
    with tier_in(tmp_path, 3) as tier:
        assert tier.keys() == keys(2, 3, 1)
    with tier_in(tmp_path, 2) as tier:  # a smaller budget
        assert tier.keys() == keys(2, 3, 1)
        tier.trim()
        assert chunks_in(tier.path) == set(keys(3, 1))


@given(steps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 2600)), max_size=25))
def test_the_tier_never_exceeds_its_budget_or_alters_a_chunk(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    with tier_in(tmp_path_factory.mktemp("tier"), 2) as tier, reader_of(tier) as reader:
        for number, size_bytes in steps:
            written = write(tier, number, size_bytes)
            fits = HEADER_BYTES + size_bytes <= tier.budget_bytes
            assert written in ((Written.DONE, Written.PRESENT) if fits else (Written.NO_ROOM,))
            assert folder_bytes(tier.path) == tier.used_bytes <= tier.budget_bytes
            assert chunks_in(tier.path) == set(tier.keys())
            assert not fits or read(reader, number, size_bytes) == chunk_of(number, size_bytes)[1]


def test_the_default_budget_is_within_the_disk(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path))
    info = os.statvfs(tmp_path)
    assert 0 < tier.budget_bytes <= info.f_blocks * info.f_frsize
    tier.close()


# -- crashes -------------------------------------------------------------------------------------------------------

DIES = """
import os, signal, sys
from tests.support.disk_chunks import write
from storage.disk.tier import DiskTier
parent, call, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
tier = DiskTier(parent, 3000)
real, calls = getattr(os, call), 0
def dying(*arguments, **options):
    global calls
    calls += 1
    if calls == count:
        if call == "pwrite" and len(arguments[1]) > 8:  # in the middle of it
            real(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)
setattr(os, call, dying)
write(tier, 2)
write(tier, 3)
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("call", "count"),
    [
        ("truncate", 1),
        ("pwrite", 1),
        ("pwrite", 2),
        ("pwrite", 3),
        ("fsync", 1),
        ("utime", 1),
        ("rename", 1),
        ("unlink", 1),
    ],
)
def test_a_kill_at_any_step_leaves_only_whole_chunks(tmp_path: Path, call: str, count: int) -> None:
    """There is room for two chunks. One exists, the second is written, the third evicts the first."""
    with tier_in(tmp_path, 2) as tier:
        write(tier, 1)
        done = run(DIES, tmp_path, call, count)
        assert done.returncode == -9, done.stderr
        with reader_of(tier) as reader:
            for key in chunks_in(tier.path):
                number = keys(1, 2, 3).index(key) + 1
                assert read(reader, number) == chunk_of(number)[1]
        assert folder_bytes(tier.path) <= 3000
        assert write(tier, 4) is Written.DONE  # the next writer looks, and removes the leftovers
        assert not temporaries_in(tier.path)
        assert folder_bytes(tier.path) == tier.used_bytes <= tier.budget_bytes


def test_bytes_are_synced_before_the_file_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a loss of power could leave an empty file under the name."""
    calls: list[str] = []
    for name in ("pwrite", "fsync", "rename"):
        real = getattr(os, name)

        def noted(*arguments: Any, name: str = name, real: Callable[..., Any] = real, **options: Any) -> Any:
            if name != "pwrite" or len(arguments[1]) >= HEADER_BYTES:
                calls.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, noted)
    with tier_in(tmp_path, 1) as tier:
        assert write(tier, 1) is Written.DONE
    assert calls == ["pwrite", "pwrite", "fsync", "rename"]


def test_files_being_written_count_and_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tier_in(tmp_path, 2) as tier, tier_in(tmp_path, 2) as other:
        real = os.fsync

        def in_between(file: int) -> None:
            monkeypatch.setattr(os, "fsync", real)
            assert len(temporaries_in(tier.path)) == 1
            assert write(other, 2) is Written.DONE
            assert other.used_bytes == folder_bytes(tier.path) == 2 * FILE_BYTES
            assert write(other, 3) is Written.DONE  # in the place of 2
            assert len(temporaries_in(tier.path)) == 1
            real(file)

        monkeypatch.setattr(os, "fsync", in_between)
        assert write(tier, 1) is Written.DONE
        assert chunks_in(tier.path) == set(keys(1, 3)) == set(tier.keys())


def test_own_unfinished_writes_count_towards_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tier_in(tmp_path, 1) as tier:
        real = os.fsync

        def in_between(file: int) -> None:
            assert write(tier, 2) is Written.NO_ROOM
            assert folder_bytes(tier.path) == tier.used_bytes == FILE_BYTES
            real(file)

        monkeypatch.setattr(os, "fsync", in_between)
        assert write(tier, 1) is Written.DONE
        assert tier.used_bytes == FILE_BYTES


# -- several processes ---------------------------------------------------------------------------------------------

WRITES = """
import random, sys
from tests.support.disk_chunks import folder_bytes, write
from storage.disk.tier import DiskTier, Written
parent, seed, budget = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
chance, tier = random.Random(seed), DiskTier(parent, budget)
for _ in range(60):
    written = write(tier, chance.randrange(20))
    assert written in (Written.DONE, Written.PRESENT, Written.NO_ROOM), (written, tier.last_error)
    if chance.random() < 0.1:
        tier.discard(chance.choice(tier.keys() or (bytes(32),)))
"""


def test_several_processes_may_share_a_folder(tmp_path: Path) -> None:
    budget_bytes = 6 * FILE_BYTES
    arguments = [sys.executable, "-c", WRITES, str(tmp_path)]
    writers = [
        subprocess.Popen([*arguments, str(seed), str(budget_bytes)], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    said = [writer.communicate()[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], said
    with tier_in(tmp_path, 6) as tier, reader_of(tier) as reader:
        assert not temporaries_in(tier.path)
        assert 0 < folder_bytes(tier.path) == tier.used_bytes <= budget_bytes
        for number in range(20):
            if chunk_of(number)[0] in tier:
                assert read(reader, number) == chunk_of(number)[1]


def test_only_one_process_changes_the_folder_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_folder, "LOCK_PATIENCE_S", 0.0)  # of a process that is stopped while it holds the lock
    with tier_in(tmp_path, 2) as tier:
        write(tier, 1)
        with Path(tier.path, LOCK_NAME).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert write(tier, 2) is Written.FAILED
            tier.discard(chunk_of(1)[0])
            assert chunks_in(tier.path) == set(keys(1))
        assert write(tier, 2) is Written.DONE


def test_changes_of_other_processes_are_seen(tmp_path: Path) -> None:
    with tier_in(tmp_path, 2) as mine, tier_in(tmp_path, 2) as theirs:
        write(mine, 1)
        write(theirs, 2)
        write(mine, 3)
        assert set(mine.keys()) == chunks_in(mine.path) == set(keys(2, 3))
        assert folder_bytes(mine.path) <= mine.budget_bytes
        assert write(theirs, 3) is Written.PRESENT


# -- disks that do not do it ---------------------------------------------------------------------------------------


def failing(real: Callable[..., Any], code: int, times: int) -> Callable[..., Any]:
    left = [times]

    def call(*arguments: Any, **options: Any) -> Any:
        if left[0] and len(arguments) == 3 and len(arguments[1]) == 1000:
            left[0] -= 1
            real(arguments[0], arguments[1][:500], arguments[2])
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    return call


def test_only_new_files_of_a_large_folder_are_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of one host may share the folder. Each used to scan every file after each write of another."""
    monkeypatch.setattr(disk_tier, "LARGE", 2)
    monkeypatch.setattr(disk_tier, "LOOK_SHARE", 10**9)
    with tier_in(tmp_path, 6) as one, tier_in(tmp_path, 6) as two, reader_of(one) as reader:
        for number in range(4):
            write(one, number)
        two.trim()
        looked, real = [], os.stat
        monkeypatch.setattr(os, "stat", lambda *args, **named: (looked.append(args[0]), real(*args, **named))[1])
        write(one, 4)
        two.trim()
        assert looked == [chunk_name(keys(4)[0])]
        write(one, 5)
        write(one, 6)
        two.trim()
        assert two.keys() == one.keys() == keys(1, 2, 3, 4, 5, 6)
        assert two.used_bytes == one.used_bytes == 6 * FILE_BYTES
        read(reader, 1)
        two._look_again_s = 0.0  # the time has come to look at the order of use
        two.discard(keys(6)[0])
        write(one, 7)
        assert write(two, 8) is Written.DONE
        assert chunks_in(two.path) == {keys(number)[0] for number in (1, 3, 4, 5, 7, 8)}
        assert folder_bytes(two.path) == two.used_bytes == 6 * FILE_BYTES


def test_a_full_disk_evicts_older_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tier_in(tmp_path, 9) as tier:
        for number in (1, 2, 3):
            write(tier, number)
        monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.ENOSPC, 1))
        assert write(tier, 4) is Written.DONE
        assert tier.keys() == keys(2, 3, 4)


def test_a_disk_that_stays_full_does_not_empty_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tier_in(tmp_path, 9) as tier:
        for number in (1, 2, 3):
            write(tier, number)
        monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.ENOSPC, 100))
        for number in range(4, 9):
            assert write(tier, number) is Written.FULL
        assert tier.keys() == keys(2, 3)
        assert chunks_in(tier.path) == set(keys(2, 3))
        assert tier.counts[Written.FULL] == 5
        assert tier.last_error
        assert not temporaries_in(tier.path)
        monkeypatch.undo()
        assert write(tier, 9) is Written.DONE


@pytest.mark.parametrize("call", ["truncate", "pwrite", "fsync", "rename"])
def test_a_failed_write_keeps_earlier_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with tier_in(tmp_path, 2) as tier:
        write(tier, 1)
        real = getattr(os, call)

        def fails(*arguments: Any, **options: Any) -> Any:
            if call == "pwrite" and len(arguments[1]) < HEADER_BYTES:  # (of the lock's file)
                return real(*arguments, **options)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, call, fails)
        assert write(tier, 2) is Written.FAILED
        monkeypatch.undo()
        assert chunks_in(tier.path) == set(keys(1)) == set(tier.keys())
        assert folder_bytes(tier.path) == tier.used_bytes == FILE_BYTES
        assert write(tier, 2) is Written.DONE


LIMITED = """
import resource, sys
from tests.support.disk_chunks import write
from storage.disk.tier import DiskTier
tier = DiskTier(sys.argv[1], 100_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
print(write(tier, 1).name, write(tier, 2, 20_000).name, write(tier, 3).name)
"""


def test_a_file_size_limit_counts_as_a_full_disk(tmp_path: Path) -> None:
    done = run(LIMITED, tmp_path)
    assert done.stdout.split() == ["DONE", "FULL", "DONE"], done.stderr
    assert chunks_in(str(tmp_path / SUBFOLDER)) == set(keys(1, 3))
    assert not temporaries_in(str(tmp_path / SUBFOLDER))


SMALL_DISK = """
import subprocess, sys
mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", sys.argv[1]]
if subprocess.run(mount, capture_output=True).returncode:
    print("REFUSED")
    sys.exit()
from tests.support.disk_chunks import folder_bytes, read, write
from storage.disk.files import DiskReader
from storage.disk.tier import DiskTier
tier = DiskTier(sys.argv[1], 1_000_000)
written = [write(tier, number, 8000).name for number in range(20)]
reader = DiskReader(tier.path)
for number in range(20):
    if len(written) - number <= len(tier):
        read(reader, number, 8000)
print(*sorted(set(written)), len(tier), write(tier, 99, 200_000).name)
"""


def test_a_really_full_file_system_still_takes_chunks(tmp_path: Path) -> None:
    """A file system of 64 KiB, where this user may mount one."""
    try:
        done = subprocess.run(
            ["unshare", "--mount", "--map-root-user", sys.executable, "-c", SMALL_DISK, str(tmp_path)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.stdout.strip() == "REFUSED" or "unshare" in done.stderr:
        pytest.skip("no file system can be mounted here")
    outcome, left, large = done.stdout.split()
    assert outcome == "DONE", done.stderr
    assert 2 <= int(left) <= 8
    assert large == "FULL"


# -- a folder that anybody may have been in ------------------------------------------------------------------------


def test_foreign_files_are_kept_and_links_never_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * FILE_BYTES)
    with tier_in(tmp_path / "cache", 3) as tier:
        folder = Path(tier.path)
    names = [chunk_name(key) for key in keys(1, 2, 3, 4)]
    (folder / names[0]).symlink_to(secret)
    (folder / names[1]).mkdir()
    os.mkfifo(folder / names[2])
    (folder / names[3]).write_bytes(b"y" * 10)
    (folder / "README").write_text("mine")
    (folder / ".longshore-link.part").symlink_to(secret)
    with tier_in(tmp_path / "cache", 3) as tier, reader_of(tier) as reader:
        assert tier.keys() == keys(4)
        for number in (1, 2, 3, 4):
            with pytest.raises(DiskChunkUnusable):
                read(reader, number)
        assert write(tier, 1) is Written.DONE  # in the place of the link, not through it
        assert read(reader, 1) == chunk_of(1)[1]
        assert write(tier, 2) is Written.FAILED
        tier.discard(chunk_of(4)[0])
        assert write(tier, 4) is Written.DONE
    assert secret.read_bytes() == b"x" * FILE_BYTES
    assert (folder / "README").read_text() == "mine"


def test_a_link_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / SUBFOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DiskTierError):
        DiskTier(str(tmp_path), 1000)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_link_in_the_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / SUBFOLDER).mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / SUBFOLDER / LOCK_NAME).symlink_to(tmp_path / "secret")
    with pytest.raises(DiskTierError):
        DiskTier(str(tmp_path), 1000)
    assert (tmp_path / "secret").read_text() == "x"


def test_a_folder_writable_by_others_is_made_private(tmp_path: Path) -> None:
    (tmp_path / SUBFOLDER).mkdir()
    (tmp_path / SUBFOLDER).chmod(0o777)
    with tier_in(tmp_path, 1) as tier:
        assert Path(tier.path).stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiskTierError, match="cannot create"):
        DiskTier(str(tmp_path / "file"), 1000)
