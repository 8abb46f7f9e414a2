"""A client declares the head of its cluster lost after a long absence, and before Ray ends the process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from cluster.errors import ClusterLost
from cluster.joining import patience
from cluster.joining.patience import RAY_LIMIT_S, RAY_LIMIT_VARIABLE, HeadWatch, lost_after_s


@pytest.mark.parametrize(("variable", "expected_s"), [(None, 45.0), ("600", 450.0), ("12", 9.0), ("soon", 45.0)])
def test_the_head_is_declared_lost_before_ray_does_so(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected_s: float
) -> None:
    monkeypatch.delenv(RAY_LIMIT_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(RAY_LIMIT_VARIABLE, variable)
    assert lost_after_s(0) == expected_s
    assert lost_after_s(7) == 7


class Head:
    """A port that can be closed and opened again."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._name = self._socket.getsockname()
        self.address = f"127.0.0.1:{self._name[1]}"
        self._socket.listen()

    def lose(self) -> None:
        self._socket.close()

    def start(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(self._name)
        self._socket.listen()


@pytest.fixture
def head() -> Iterator[Head]:
    head = Head()
    yield head
    head.lose()


def test_an_absent_head_is_lost_after_a_wait(head: Head) -> None:
    now_s = 100.0
    watch = HeadWatch(head.address, RAY_LIMIT_S, lambda: now_s)
    try:
        assert watch.check()
        head.lose()
        assert not watch.check()
        now_s += RAY_LIMIT_S - 1
        assert not watch.check()
        now_s += 2
        with pytest.raises(ClusterLost, match="gone and did not come back") as raised:
            watch.check()
        assert raised.value.details["away_s"] == RAY_LIMIT_S + 1
        with pytest.raises(ClusterLost):
            watch.wait()
        head.start()
        watch.wait()
        head.lose()
        assert not watch.check()  # the time starts again
    finally:
        watch.close()


def test_the_watch_checks_in_the_background(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late check does not start a new wait: Ray's own clock began when the head was lost."""
    looked = threading.Semaphore(0)
    is_there = HeadWatch.is_there

    def counted(watch: HeadWatch) -> bool:
        found = is_there(watch)
        looked.release()
        return found

    monkeypatch.setattr(HeadWatch, "is_there", counted)
    monkeypatch.setattr(patience, "SHORTEST_LOOK_S", 0.01)
    watch = HeadWatch(head.address, 0.02)
    head.lose()
    try:
        for _ in range(10):
            assert looked.acquire(timeout=60)
        with pytest.raises(ClusterLost):
            watch.check()
    finally:
        watch.close()
