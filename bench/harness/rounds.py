"""Loads in turn: a contender in a process of its own, the search for its best setting, and the rounds."""

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
from bench.harness.results import Entry, Run

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600.0  # of one process
FINALISTS, FINAL_TRIES = 2, 2
# Proxies (the store is here), settings and accounts of the user would change how a contender works.
_NOT_PASSED_ON = re.compile(r"(.*_proxy|LONGSHORE_.*|AWS_.*|RUNAI_.*|RAY_.*)", re.IGNORECASE)
_GRACE_S = 15.0  # to end in order when it took too long

Setting = Mapping[str, Any]
RunEntry = Callable[[Entry, Setting], list[Run]]  # raises NotRunnable, RunFailed


class RunFailed(Exception):
    """The contender ended with an error, without measurements or not in time."""


def run_once(entry: Entry, setting: Setting, spec: Spec, timeout_s: float = TIMEOUT_S) -> list[Run]:
    """Let a process do the loads of a contender, with that setting. Raises NotRunnable, RunFailed."""
    given = spec.with_options(**{**entry.contender.options, **setting}).to_json()
    python = sys.executable
    if name := entry.contender.environment:
        python = str(REPOSITORY / f".venv-{name}/bin/python")
        if not (REPOSITORY / f".venv-{name}/.made").exists():  # make.sh writes it last
            raise NotRunnable(f"there is no .venv-{name}: tests/engine_environments/make.sh {name}")
    process = subprocess.Popen(
        [python, "-m", "bench.contenders", entry.contender.name, given],
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
    runs = []
    for text in stdout.splitlines():
        if text.startswith("{"):
            with contextlib.suppress(ValueError, TypeError):
                runs.append(Run(**json.loads(text)))
    if not runs:
        raise RunFailed("it printed no measurements")
    return runs


def run_rounds(entries: Sequence[Entry], rounds: int, run: RunEntry, *, tune: RunEntry | None = None) -> None:
    """Run each entry once a round, the next round starting elsewhere. Prints each run as it ends.

    `tune`: finds the setting of each contender before the rounds, in the first scene that it is in.
    """
    found: dict[str, Setting] = {}
    if tune is not None:
        for entry in entries:
            if entry.contender.name not in found:
                found[entry.contender.name] = _find_setting(entry, tune)
            entry.setting = found[entry.contender.name]
    for number in range(rounds):
        first = number * len(entries) // rounds
        for entry in [*entries[first:], *entries[:first]]:
            for one in _attempt(entry, entry.setting, run) or ():
                entry.runs.append(one)
                stats = f"{one.wall_s:7.2f} s  {one.gb_per_s:6.2f} GB/s  {one.cpu_s_per_gb:5.2f} CPU s/GB"
                store = f"  {one.store_bytes / one.bytes:5.2f} x out of the store" if one.store_bytes else ""
                print(f"{number + 1}  {entry.id:36} {one.case:16}  {stats}{store}", flush=True)


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
    """An entry that runs no more: it cannot run here, or failed."""


def _find_setting(entry: Entry, run: RunEntry) -> Setting:
    def gb_per_s(setting: Setting) -> float:
        if (found := _attempt(entry, setting, run)) is None:
            raise _Ended
        return found[-1].gb_per_s  # the last case is the warm one

    best = entry.setting
    with contextlib.suppress(_Ended):
        best = find_best(entry.contender.settings, gb_per_s)
        print(f"{entry.id}: best of {len(entry.contender.settings)} settings: {json.dumps(dict(best))}", flush=True)
    return best


def _attempt(entry: Entry, setting: Setting, run: RunEntry) -> list[Run] | None:
    """Return runs; None, and no more of that entry, when it cannot run here or failed."""
    if entry.absent or entry.failure:
        return None
    try:
        return run(entry, setting)
    except NotRunnable as error:
        entry.absent = str(error)
    except RunFailed as error:
        entry.failure = str(error)
    print(f"{entry.id}: {entry.absent or entry.failure}", flush=True)
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
