"""Ends the test process without the C++ teardown, if it has used Ray.

Each node that `ray.cluster_utils` has started leaves a client of its head behind, with threads of gRPC that nobody can
end (Ray 2.60). While destructors of static objects run, now and then one of them crashes the process, after the last
line of the tests and with a status that says nothing of them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

import pytest

_SESSION = pytest.StashKey[pytest.Session]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_SESSION] = session


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.stash.get(_SESSION, None)
    if session is None or "ray" not in sys.modules:
        return
    try:
        for work in (atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
            with contextlib.suppress(Exception):  # a closed pipe, for one
                work()
    finally:
        os._exit(int(session.exitstatus))
