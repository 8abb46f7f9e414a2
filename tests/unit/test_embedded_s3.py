"""The embedded server starts, serves, keeps its secrets, and ends with its parent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from storage.errors import StoreUnavailable, UnsupportedStore
from storage.stores.embedded_s3 import EmbeddedS3, find_rclone
from storage.stores.object_store import ByteRange, read_bytes
from storage.stores.open_store import open_store
from tests.support.counting_proxy import CountingProxy
from tests.support.ray_clusters import eventually
from tests.support.s3_servers import make_bucket, server_ref


def _is_gone(pid: int, within_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_missing_rclone_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UnsupportedStore, match="pip install"):
        find_rclone()


def test_a_missing_folder_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="does not exist"):
        EmbeddedS3(tmp_path / "none")


@pytest.mark.slow
def test_serves_a_folder_and_ends(tmp_path: Path) -> None:
    with EmbeddedS3(tmp_path) as server:
        (server.make_bucket("bucket") / "x").write_bytes(b"12345")
        with closing(open_store(server_ref(server, "bucket"), server.credentials())) as store:
            assert read_bytes(store, "x", ByteRange(1, 4)) == b"234"
            (tmp_path / "bucket" / "x").write_bytes(b"123456789")
            server.refresh()
            assert store.stat("x").size_bytes == 9
            assert read_bytes(store, "x", ByteRange(5, 9)) == b"6789"
        assert server.secret_access_key not in Path(f"/proc/{server.pid}/cmdline").read_text()
        pid = server.pid
    assert pid is not None
    assert _is_gone(pid)
    server.close()


@pytest.mark.slow
def test_files_are_looked_at_again_after_an_object_that_was_alone_in_its_folder_was_deleted(tmp_path: Path) -> None:
    with EmbeddedS3(tmp_path) as server:
        bucket = server.make_bucket("bucket")
        with closing(open_store(server_ref(server, "bucket"), server.credentials())) as store:
            store.put("folder/x", b"1")
            store.delete("folder/x")
            (bucket / "y").write_bytes(b"12")
            server.refresh()
            assert store.stat("y").size_bytes == 2


@pytest.mark.slow
def test_taken_port_is_reported(tmp_path: Path) -> None:
    with EmbeddedS3(tmp_path) as first, pytest.raises(StoreUnavailable, match="did not start"):
        EmbeddedS3(tmp_path, port=int(first.endpoint_url.rpartition(":")[2]))


@pytest.mark.slow
def test_the_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    servers: list[EmbeddedS3] = []
    thread = threading.Thread(target=lambda: servers.append(EmbeddedS3(tmp_path)))
    thread.start()
    thread.join()
    with servers[0] as server, closing(open_store(server_ref(server, "bucket"), server.credentials())) as store:
        make_bucket(server, "bucket")
        assert store.put("x", b"1").size_bytes == 1


@pytest.mark.slow
def test_the_server_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from storage.stores.embedded_s3 import EmbeddedS3\n"
        "print(EmbeddedS3(sys.argv[1]).pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.send_signal(signal.SIGKILL)
    assert _is_gone(pid)


@pytest.mark.slow
def test_proxy_counts_what_leaves_the_store(rclone: EmbeddedS3) -> None:
    make_bucket(rclone, "counted")
    data = os.urandom(100_000)
    with CountingProxy(rclone.endpoint_url) as proxy:
        ref = server_ref(rclone, "counted")
        through = server_ref(proxy, "counted")  # type: ignore[arg-type]
        with closing(open_store(ref, rclone.credentials())) as store:
            store.put("a/b c", data)
        with closing(open_store(through, rclone.credentials())) as store:
            assert read_bytes(store, "a/b c", ByteRange(10, 60_010)) == data[10:60_010]
            assert read_bytes(store, "a/b c", ByteRange(0, 100)) == data[:100]
            with store.upload("up") as upload:
                upload.write(memoryview(data))
                upload.complete()
            assert read_bytes(store, "up", ByteRange(0, len(data))) == data
        # A request counts when the proxy has passed its last byte on, and the client may have read that before.
        eventually(lambda: len(proxy.requests()) == 3, lambda: f"requests: {proxy.requests()}")
        assert [request.range for request in proxy.requests()] == [(10, 60_010), (0, 100), (0, 100_000)]
        assert proxy.bytes_by_path() == {"/counted/a/b c": 60_100, "/counted/up": 100_000}
        proxy.clear()
        assert proxy.requests() == []
