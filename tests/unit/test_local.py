"""Errors that only a local folder can have: links, fifos, missing roots, writers in mid-read, half-written files."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.errors import AccessDenied, ObjectChanged, ObjectNotFound, ShortRead, StoreError
from storage.stores.local import LocalStore
from storage.stores.object_store import PIECE_BYTES, ByteRange, read_bytes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_missing_root_names_the_host(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "none")
    for ask in (
        lambda: store.stat("x"),
        lambda: list(store.list()),
        lambda: read_bytes(store, "x", ByteRange(0, 1)),
    ):
        with pytest.raises(ObjectNotFound, match="no such folder") as caught:
            ask()
        assert caught.value.details["host"] == socket.gethostname()


def test_links_inside_are_followed(root: Path) -> None:
    (root / "real").write_bytes(b"12345")
    (root / "link").symlink_to("real")
    assert read_bytes(LocalStore(root), "link", ByteRange(0, 5)) == b"12345"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_links_to_outside_the_root_are_refused(root: Path, kind: str) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"12345")
    (root / "link").symlink_to(outside / "secret" if kind == "file" else outside)
    key = "link" if kind == "file" else "link/secret"
    store = LocalStore(root)
    for ask in (lambda: store.stat(key), lambda: read_bytes(store, key, ByteRange(0, 5))):
        with pytest.raises(StoreError, match="leads out of the folder"):
            ask()
    if kind == "folder":
        with pytest.raises(StoreError, match="leads out of the folder"):
            store.put("link/new", b"x")
        store_keys = [info.key for info in store.list()]
        assert store_keys == []
        assert sorted(os.listdir(outside)) == ["secret"]


def test_a_hugging_face_cache_is_read_directly(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "abc").write_bytes(b"weights")
    (repo / "blobs" / "evil").symlink_to("/etc/passwd")
    snapshot = repo / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "passwd").symlink_to("../../blobs/evil")
    store = LocalStore(snapshot)
    assert read_bytes(store, "model.safetensors", ByteRange(0, 7)) == b"weights"
    assert "model.safetensors" in [info.key for info in store.list()]
    with pytest.raises(StoreError, match="leads out"):
        store.stat("passwd")


def test_special_files_are_refused_and_not_listed(root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "dangling").symlink_to("nowhere")
    store = LocalStore(root)
    with pytest.raises(StoreError, match="not a regular file"):
        store.stat("fifo")
    assert list(store.list()) == []


def test_a_folder_is_not_an_object(root: Path) -> None:
    (root / "folder").mkdir()
    with pytest.raises(ObjectNotFound):
        LocalStore(root).stat("folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_access_denied(root: Path) -> None:
    (root / "x").write_bytes(b"1")
    (root / "x").chmod(0)
    with pytest.raises(AccessDenied):
        LocalStore(root).stat("x")


def test_a_replaced_file_of_equal_size_and_time_is_detected(root: Path) -> None:
    store = LocalStore(root)
    etag = store.put("x", b"11111").etag
    facts = (root / "x").stat()
    (root / "y").write_bytes(b"22222")
    os.utime(root / "y", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.rename(root / "y", root / "x")
    with pytest.raises(ObjectChanged, match="same copy"):
        read_bytes(store, "x", ByteRange(0, 5), etag=etag)


def test_a_file_written_during_a_read_is_detected(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(root)
    store.put("x", b"1" * 100)
    preadv = os.preadv

    def write_in_between(*args: object) -> int:
        with open(root / "x", "r+b") as file:
            file.write(b"2")
        os.utime(root / "x", ns=(1, 1))
        return preadv(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", write_in_between)
    with pytest.raises(ObjectChanged, match="while it was read"):
        read_bytes(store, "x", ByteRange(0, 100))


@pytest.mark.parametrize(
    ("filled", "left_bytes", "received_bytes"), [(0, 0, 0), (0, PIECE_BYTES + 5, PIECE_BYTES + 5), (1, 5, PIECE_BYTES)]
)
def test_a_file_truncated_after_it_was_opened_is_a_short_read(
    root: Path, filled: int, left_bytes: int, received_bytes: int
) -> None:
    store = LocalStore(root)
    etag = store.put("x", bytes(3 * PIECE_BYTES)).etag

    def pieces() -> Iterator[memoryview]:
        for number in range(3):
            if number == filled:  # the file is open, and so many pieces are filled
                os.truncate(root / "x", left_bytes)
            yield memoryview(bytearray(PIECE_BYTES))

    with pytest.raises(ShortRead, match="became shorter") as caught:
        store.read_pieces("x", ByteRange(0, 3 * PIECE_BYTES), pieces(), etag=etag)
    assert caught.value.details["received_bytes"] == received_bytes


def test_a_link_changed_after_the_look_up_leads_nowhere_else(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root.parent / "secret").write_bytes(b"secret")
    (root / "real").write_bytes(b"12345")
    (root / "link").symlink_to("real")
    readlink = os.readlink

    def change_first(path: str) -> str:
        (root / "link").unlink()
        (root / "link").symlink_to(root.parent / "secret")
        return readlink(path)

    store = LocalStore(root)
    monkeypatch.setattr(os, "readlink", change_first)
    assert store.stat("link").size_bytes == 5
    monkeypatch.undo()
    with pytest.raises(StoreError, match="leads out of the folder"):
        store.stat("link")


def test_a_root_that_is_a_link_may_be_changed(root: Path) -> None:
    for name in ("v1", "v2"):
        (root / name).mkdir()
        (root / name / "x").write_bytes(name.encode())
    (root / "latest").symlink_to("v1")
    store = LocalStore(root / "latest")
    assert read_bytes(store, "x", ByteRange(0, 2)) == b"v1"
    (root / "latest").unlink()
    (root / "latest").symlink_to("v2")
    assert read_bytes(store, "x", ByteRange(0, 2)) == b"v2"


def test_uploads_in_progress_are_not_listed(root: Path) -> None:
    store = LocalStore(root)
    with store.upload("a/x") as upload:
        upload.write(memoryview(b"12345"))
        assert list(store.list()) == []
        assert len([path for path in root.rglob("*") if path.is_file()]) == 1
        upload.complete()
        with pytest.raises(StoreError, match="over"):
            upload.write(memoryview(b"6"))
    assert [path.name for path in root.rglob("*") if path.is_file()] == ["x"]


def test_leftovers_of_a_killed_writer_are_removed(root: Path) -> None:
    writer = """
import sys, os, signal
from storage.stores.local import LocalStore
with LocalStore(sys.argv[1]).upload("a/x") as upload:
    upload.write(memoryview(b"12345"))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", writer, str(root)], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list((root / "a").iterdir())) == 1
    LocalStore(root).put("a/y", b"1")
    assert [path.name for path in (root / "a").iterdir()] == ["y"]


def test_files_being_written_are_not_swept(root: Path) -> None:
    with LocalStore(root).upload("x") as upload:
        upload.write(memoryview(b"12345"))
        LocalStore(root).put("y", b"1")
        assert upload.complete().size_bytes == 5
    assert sorted(path.name for path in root.iterdir()) == ["x", "y"]


def test_a_sweep_before_the_lock_does_not_break_a_write(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock
    sweeps = iter([True, False])

    def flock(file: int, operation: int) -> None:
        if not operation & fcntl.LOCK_NB and next(sweeps):
            for path in root.iterdir():
                path.unlink()
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    LocalStore(root).put("x", b"1")
    assert [path.name for path in root.iterdir()] == ["x"]


def test_a_full_disk_is_explained(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "as the kernel does")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StoreError, match=r"No space left on device.*free space") as caught:
        LocalStore(root).put("x", b"1")
    assert caught.value.details["cause"] == "ENOSPC"
    assert list(root.iterdir()) == []


def test_a_file_where_a_folder_should_be_is_refused(root: Path) -> None:
    store = LocalStore(root)
    store.put("a", b"1")
    with pytest.raises(ObjectNotFound):
        store.stat("a/b")
    with pytest.raises(StoreError):
        store.put("a/b", b"1")


def test_names_that_are_too_long_are_typed_errors(root: Path) -> None:
    with pytest.raises(StoreError, match="ENAMETOOLONG"):
        LocalStore(root).stat("x" * 5000)
