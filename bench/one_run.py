"""One run of one contender in a process of its own: started, waited for, read, ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from bench.contender import EXIT_NOT_RUNNABLE, NotRunnable
from bench.results import Line, Run
from bench.spec import Spec

REPOSITORY = Path(__file__).resolve().parents[1]
_NOT_PASSED_ON = re.compile(r"(.*_proxy|LONGSHORE_.*|AWS_.*|RUNAI_.*|RAY_.*)", re.IGNORECASE)
_GRACE_S = 15.0  # to end in order when it took too long


class RunFailed(Exception):
    """The contender ended with an error, without stats or not in time."""


def run_once(line: Line, setting: Mapping[str, Any], spec: Spec, timeout_s: float) -> Run:
    """Run it with that setting. Raises NotRunnable, RunFailed."""
    command = [sys.executable, "-m", f"bench.contenders.{line.contender}"]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "spec.json"
        spec.with_options(**{**line.case.options, **setting}).write(path)
        process = subprocess.Popen(
            [*command, str(path)],
            cwd=REPOSITORY,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            said, complained = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"not done after {timeout_s:.0f} s") from None
        finally:
            _end_tree(process)
    if process.returncode == EXIT_NOT_RUNNABLE:
        raise NotRunnable(_last_line(complained) or "it gives no reason")
    if process.returncode:
        raise RunFailed(f"exit code {process.returncode}: {_last_line(complained)}")
    return _stats(said)


def _environment() -> dict[str, str]:
    """Ours, without what would change a contender's ways: proxies (the store is here), settings, accounts."""
    return {name: value for name, value in os.environ.items() if not _NOT_PASSED_ON.fullmatch(name)}


def _stats(said: str) -> Run:
    """The last line that is JSON. Raises RunFailed."""
    for line in reversed(said.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError, TypeError):
                return Run(**json.loads(line))
    raise RunFailed("it printed no stats")


def _end_tree(process: subprocess.Popen[str]) -> None:
    """Nothing of it is left running. One that is still at it is asked first."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        process.terminate()
        _, alive = psutil.wait_procs(tree, timeout=_GRACE_S)
        for each in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.communicate()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
