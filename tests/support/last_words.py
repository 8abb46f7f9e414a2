"""A plug-in for pytest: the report of a test that failed on a cluster ends with the logs of the processes there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ray_clusters import Longshore

_LINES = 30  # of each file
_FILES = 12
_LOGS = ("worker-*.err", "worker-*.out", "raylet*.out", "raylet*.err", "gcs_server*.out")
_TOO_MUCH = "[state-dump]"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        try:
            if (said := _said_on_cluster(item, call.start)) is not None:
                report.sections.append((f"what processes said last, at {time.strftime('%X')}", said))
        except Exception as error:  # a hook that raises ends the report, and pytest-xdist then waits for ever
            report.sections.append(("what processes said last", f"their logs cannot be read: {error!r}"))
    return report


def _said_on_cluster(item: pytest.Item, since_s: float) -> str | None:
    """Return the last lines of the logs of the test's cluster. None: it had no cluster, or that was ended before."""
    for there in getattr(item, "funcargs", {}).values():
        if isinstance(there, Longshore) and there.ray_cluster.head_node is not None:
            return "\n".join(_last_words(Path(there.ray_cluster.head_node.get_logs_dir_path()), since_s))
    return None


def _last_words(folder: Path, since_s: float) -> Iterator[str]:
    """List the last lines of logs that changed since then (wall clock), the latest last."""
    dated: list[tuple[float, Path]] = []
    for path in (path for pattern in _LOGS for path in folder.glob(pattern)):
        with contextlib.suppress(OSError):  # Ray renames and removes logs meanwhile
            dated.append((path.stat().st_mtime, path))
    for changed_s, path in sorted(dated)[-_FILES:]:
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = path.read_text(errors="replace").splitlines() if changed_s >= since_s else []
        if lines := [line for line in lines if not line.startswith(_TOO_MUCH)][-_LINES:]:
            yield f"{path.name}, last written {time.strftime('%X', time.localtime(changed_s))}"
            yield from (f"    {line[:300]}" for line in lines)
