"""TCP ports of 127.0.0.1 for servers that a test starts later."""

from __future__ import annotations

import os
import random
import socket

# Below what Linux gives to whoever asks for any port (32768 and up), so that nobody is given one of them before the
# server takes it; and beside what Ray takes for its workers (10002-19999).
_FIRST, _END = 20_000, 32_000
_given: set[int] = set()


def _own_range() -> range:
    """The ports of this test process, apart from those of the others that pytest-xdist runs beside it."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = (_END - _FIRST) // (count + 1)  # a process that died has a successor, with the next number
    first = _FIRST + number % (count + 1) * size
    return range(first, first + size)


def free_ports(count: int) -> list[int]:
    """Return ports that are free now and that this process has not returned before."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(_own_range())
        if port not in _given and _is_free(port):
            _given.add(port)
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
