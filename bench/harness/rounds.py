"""Loads in turn: one load of a line in a process of its own, the search for its best setting, and the rounds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.harness.contender import EXIT_NOT_RUNNABLE, NotRunnable, Spec
from bench.harness.results import Line, Run

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0  # of one load
FINALISTS, FINAL_TRIES = 2, 2
# Proxies (the store is here), settings and accounts of the user would change how a contender works.
_NOT_PASSED_ON = re.compile(r"(.*_proxy|LONGSHORE_.*|AWS_.*|RUNAI_.*|RAY_.*)", re.IGNORECASE)
_GRACE_S = 15.0  # to end in order when it took too long

Setting = Mapping[str, Any]
RunLine = Callable[[Line, Setting], Run]  # raises NotRunnable, RunFailed


class RunFailed(Exception):
    """The contender ended with an error, without measurements or not in time."""


def run_once(line: Line, setting: Setting, spec: Spec, timeout_s: float = TIMEOUT_S) -> Run:
    """Do one load with that setting. Raises NotRunnable, RunFailed."""
    given = spec.with_options(**{**line.case.options, **setting}).to_json()
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.contenders", line.contender, given],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if not _NOT_PASSED_ON.fullmatch(name)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"not done after {timeout_s:.0f} s") from None
    finally:
        _end_tree(process)
    reason = next((text.strip()[:300] for text in reversed(stderr.splitlines()) if text.strip()), "it gives no reason")
    if process.returncode == EXIT_NOT_RUNNABLE:
        raise NotRunnable(reason)
    if process.returncode:
        raise RunFailed(f"exit code {process.returncode}: {reason}")
    for text in reversed(stdout.splitlines()):
        if text.startswith("{"):
            with contextlib.suppress(ValueError, TypeError):
                return Run(**json.loads(text))
    raise RunFailed("it printed no measurements")


def run_rounds(lines: Sequence[Line], rounds: int, run: RunLine, *, tune: RunLine | None = None) -> None:
    """Run each line once a round, the next round starting elsewhere. Prints each run as it ends.

    `tune`: finds each line's setting before the rounds, by loads that do not count.
    """
    if tune is not None:
        for line in lines:
            _find_setting(line, tune)
    for number in range(rounds):
        first = number * len(lines) // rounds
        for line in [*lines[first:], *lines[:first]]:
            if (found := _attempt(line, line.setting, run)) is not None:
                line.runs.append(found)
                stats = f"{found.gb_per_s:6.2f} GB/s  {found.cpu_s_per_gb:5.2f} CPU s/GB"
                print(f"{number + 1}  {line.id:48}  {stats}  {found.memory_over_bytes:5.2f} x memory", flush=True)


def find_best(settings: Sequence[Setting], gb_per_s: Callable[[Setting], float]) -> Setting:
    """Return the fastest of `settings`. Raises what `gb_per_s` raises.

    Each is tried once, then the fastest few again, so that one lucky try decides nothing. The median counts.
    """
    if len(settings) == 1:
        return settings[0]
    tries = [[gb_per_s(setting)] for setting in settings]
    finalists = sorted(range(len(settings)), key=lambda number: -tries[number][0])[:FINALISTS]
    for number in finalists * FINAL_TRIES:
        tries[number].append(gb_per_s(settings[number]))
    return settings[max(finalists, key=lambda number: statistics.median(tries[number]))]


class _Ended(Exception):
    """A line that runs no more: it cannot run here, or failed."""


def _find_setting(line: Line, run: RunLine) -> None:
    def gb_per_s(setting: Setting) -> float:
        if (found := _attempt(line, setting, run)) is None:
            raise _Ended
        return found.gb_per_s

    with contextlib.suppress(_Ended):
        line.setting = find_best(line.settings, gb_per_s)
        print(f"{line.id}: best of {len(line.settings)} settings: {json.dumps(dict(line.setting))}", flush=True)


def _attempt(line: Line, setting: Setting, run: RunLine) -> Run | None:
    """Return one run; None, and no more of that line, when it cannot run here or failed."""
    if line.absent or line.failure:
        return None
    try:
        return run(line, setting)
    except NotRunnable as error:
        line.absent = str(error)
    except RunFailed as error:
        line.failure = str(error)
    print(f"{line.id}: {line.absent or line.failure}", flush=True)
    return None


def _end_tree(process: subprocess.Popen[str]) -> None:
    """End the process and its descendants. One that still runs is asked first."""
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
