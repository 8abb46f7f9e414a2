"""A name service that fails for a while in mid-load: one budget of its own, and the load goes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ChunkFailed
from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.faulty_bucket import FSDP, IMPATIENT, OBJECTS, Bucket, check_at_rest, refused_with, run
from tests.support.local_node import Belongings, local_node
from tests.support.reference_slices import check_exact

pytestmark = pytest.mark.slow
HOST = "store.hiccup.test"


@pytest.fixture(scope="module")
def bucket(rclone: EmbeddedS3) -> Bucket:
    return Bucket(rclone, "unresolved-names")


@pytest.fixture(autouse=True)
def nothing_left_behind(rclone: EmbeddedS3) -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


class NameService:
    """A `socket.getaddrinfo` whose first `failing` look-ups of HOST fail; then HOST is this machine."""

    def __init__(self, failing: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing, self.failed = failing, 0
        self._lock = threading.Lock()
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: Any, *args: Any, **kwargs: Any) -> Any:
        if host != HOST:
            return self._real(host, *args, **kwargs)
        with self._lock:
            if self.failed < self.failing:
                self.failed += 1
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._real("127.0.0.1", *args, **kwargs)


def url(bucket: Bucket) -> str:
    return bucket.server.endpoint_url.replace("127.0.0.1", HOST)


def test_a_load_survives_failed_name_lookups(shm_dir: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    names = NameService(6, monkeypatch)
    with bucket.store(url(bucket)) as store, local_node(shm_dir, slots=32) as node:
        ranks, report = run(node, bucket.plan(), store)
        check_exact(ranks, OBJECTS, fsdp=FSDP)
        check_at_rest(node)
    assert names.failed == 6
    assert report.retries == {"dns": 6}
    assert report.store_bytes == report.needed_bytes


def test_an_unknown_host_name_is_a_typed_error(shm_dir: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    NameService(float("inf"), monkeypatch)
    with bucket.store(url(bucket)) as store, local_node(shm_dir, slots=32, **IMPATIENT) as node:
        error = refused_with(run(node, bucket.plan(), store)[0])
        assert isinstance(error, ChunkFailed)
        assert "name is not known" in str(error)
        check_at_rest(node)
