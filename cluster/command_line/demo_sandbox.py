"""Leaves no process and no shared memory behind, however the block inside ends."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
from collections.abc import Iterator

import psutil

from cluster.joining.interrupts import sigterm_interrupts

_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
GRACE_S = 5.0


@contextlib.contextmanager
def sandbox() -> Iterator[None]:
    """Every process begun inside is ended with the block; Ctrl-C and SIGTERM end it in order.

    This process becomes the parent of orphans, so that a daemon whose own parent is gone is found too.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mine = psutil.Process()
    before = {child.pid for child in mine.children(recursive=True)}
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        with sigterm_interrupts():
            yield
    finally:
        # From here on a second Ctrl-C or SIGTERM must not leave half of it.
        ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            _end_children(mine, before)
            importlib.import_module("storage.arena.arena_files").sweep()
        finally:
            signal.signal(signal.SIGINT, ignored)
            signal.signal(signal.SIGTERM, terminated)
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end_children(mine: psutil.Process, before: set[int]) -> None:
    for attempt in range(20):
        left = [child for child in mine.children(recursive=True) if child.pid not in before]
        if not left:
            return
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate() if attempt == 0 else child.kill()
        psutil.wait_procs(left, timeout=GRACE_S if attempt == 0 else 1.0)
    os.write(2, b"longshore: some processes of the demo could not be ended\n")
