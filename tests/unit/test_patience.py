"""One deadline for all that a call does: nothing waits beyond it, or beyond a cancellation."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from actors import launch
from cluster.errors import LoadCancelled, LoadTimeout
from cluster.joining.patience import UNLIMITED, Patience

LONG_S = 300.0  # a test that waited for it would be ended


def test_no_limit_never_ends() -> None:
    UNLIMITED.check()
    assert UNLIMITED.left_s(LONG_S) == LONG_S


def test_time_left_is_never_negative_and_never_more_than_asked() -> None:
    now = [0.0]
    patience = Patience(10.0, clock=lambda: now[0])
    assert [patience.left_s(4.0), patience.left_s(LONG_S)] == [4.0, 10.0]
    now[0] = 11.0
    assert patience.left_s(4.0) == 0.0
    with pytest.raises(LoadTimeout):
        patience.check()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_waiting_ends_with_the_callers_patience(how: str) -> None:
    cancelled = threading.Event()
    patience = Patience(time.monotonic() + (0.2 if how == "deadline" else LONG_S), cancelled)
    if how == "cancelled":
        threading.Timer(0.2, cancelled.set).start()
    wanted = LoadTimeout if how == "deadline" else LoadCancelled
    with pytest.raises(wanted):
        patience.sleep(LONG_S)
    lock = threading.Lock()
    with lock, pytest.raises(wanted), patience.holding(lock):
        raise AssertionError("somebody else has the lock")
    assert lock.acquire(blocking=False)


def test_starting_a_coordinator_keeps_to_the_callers_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "ray", SimpleNamespace(wait=lambda references, timeout: ([], references)))
    with pytest.raises(LoadTimeout):
        launch._wait("reference", Patience(time.monotonic() + 0.05))
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(LoadCancelled):
        launch._wait("reference", Patience(None, cancelled))
    monkeypatch.setattr(launch, "START_S", 0.0)
    with pytest.raises(GetTimeoutError):
        launch._wait("reference", Patience())
