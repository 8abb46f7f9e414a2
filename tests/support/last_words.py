"""A plug-in for pytest: the report of a test that failed on a cluster ends with the logs of the processes there."""

from __future__ import annotations

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
        for there in getattr(item, "funcargs", {}).values():
            if isinstance(there, Longshore):
                if there.ray_cluster.head_node is None:  # the cluster was ended before what failed
                    break
                said = "\n".join(_last_words(Path(there.ray_cluster.head_node.get_logs_dir_path()), call.start))
                report.sections.append((f"what processes said last, at {time.strftime('%X')}", said))
                break
    return report


def _last_words(folder: Path, since_s: float) -> Iterator[str]:
    """List the last lines of logs that changed since then (wall clock), the latest last."""
    dated = sorted((path.stat().st_mtime, path) for pattern in _LOGS for path in folder.glob(pattern))
    for changed_s, path in dated[-_FILES:]:
        lines = path.read_text(errors="replace").splitlines() if changed_s >= since_s else []
        if lines := [line for line in lines if not line.startswith(_TOO_MUCH)][-_LINES:]:
            yield f"{path.name}, last written {time.strftime('%X', time.localtime(changed_s))}"
            yield from (f"    {line[:300]}" for line in lines)
