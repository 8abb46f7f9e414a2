"""`python -m bench.run`: makes the models, starts the store, tunes, runs in rounds, writes what it found.

    nginx <-- contender --> one line of JSON      each run a process of its own, one at a time, rounds interleaved
                              |
              results.json, chart.png, tables on the terminal and, of a whole run, in docs/benchmarks.md

Exit code 0; 1 when a contender failed, and not when one is merely absent; 2 when nothing could be run.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import pkgutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench.contenders
from bench.arguments import output_folder, positive_int, size, writable_folder
from bench.chart import draw_chart
from bench.contender import NotRunnable, read_contender
from bench.goals import find_goals
from bench.machine import describe_machine, describe_versions
from bench.one_run import REPOSITORY, RunFailed, run_once
from bench.our_cluster import main_model_name
from bench.range_server import NoRangeServer, RangeServer
from bench.results import CEILING, HAND_WRITTEN, OURS, Line, Results, Run, lines_of
from bench.run_folder import NGINX, run_folder
from bench.sample import TUNING_BUCKET, Models, NoRoom, make_models
from bench.spec import Source, Spec
from bench.tables import check_docs, markdown, rewrite_docs, terminal
from bench.tuning import find_best
from cluster.command_line.demo import sandbox
from cluster.joining.patience import sigterm_interrupts

SIZE, SMALL_SIZE = "2GB", "40MB"
TUNING_PART = 4  # settings are searched on models of that part of the size: some hundred runs
ROUNDS = 3
TMPFS = "/dev/shm"
SOURCES: tuple[Source, ...] = ("http", "https", "file")
DOCS = REPOSITORY / "docs" / "benchmarks.md"
TIMEOUT_S = 300.0  # of one run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for pattern in _patterns(options.only):
        if not _chosen([pattern], SOURCES):
            parser.error(f"argument --only: no line is called {pattern!r}")
    docs = options.docs or (DOCS if is_whole(options) else None)
    if docs is not None:
        try:
            check_docs(docs)
        except (OSError, ValueError) as error:
            parser.error(f"argument --docs: {error}")
    size_bytes = options.size or size(SMALL_SIZE if options.small else SIZE)
    rounds = options.rounds or (1 if options.small else ROUNDS)
    tuned = not (options.small or options.no_tuning)
    results: Results | None = None
    try:
        with sigterm_interrupts(), run_folder(options.tmpfs, "longshore-bench-") as folder, sandbox():
            print(f"making the models ({size_bytes / 1e9:.2f} GB) in {options.tmpfs}", flush=True)
            models = make_models(folder / "www", size_bytes)
            smaller = make_models(folder / "www", size_bytes // TUNING_PART, TUNING_BUCKET) if tuned else models
            with RangeServer(folder / "www", folder / NGINX) as server:
                lines = _chosen(_patterns(options.only), _sources(server))
                model = {"bytes": models.size_bytes, "files": len(models.files)}
                results = Results(describe_machine(), describe_versions(), model, rounds, lines, tuned)
                # In so small a model ranks share every chunk, which then goes through the arena.
                bench_run = _Benchmark(_specs(models, server), lines, any_mode=options.small)
                bench_run.served_bytes = server.served_bytes
                if tuned:
                    bench_run.tune(_specs(smaller, server))
                bench_run.run(rounds)
    except (NoRangeServer, NoRoom) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if results is not None and any(line.runs for line in results.lines):
            _write_json(replace(results, partial=True), options.out)
            print(terminal(results))
            print(f"\ninterrupted; what there is: {options.out}/results.json", flush=True)
        return 130
    _write(results, options.out, docs, arguments)
    return 1 if any(line.failure for line in lines) else 0


def is_whole(options: argparse.Namespace) -> bool:
    """Whether its tables may stand in the docs unasked: every line, as large, as often and as tuned as they say."""
    few = options.rounds is not None and options.rounds < ROUNDS
    elsewhere = options.tmpfs != Path(TMPFS)
    return not (options.small or options.only or options.size or options.no_tuning or few or elsewhere)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m bench.run", description="Longshore beside its peers, on this machine.")
    parser.add_argument(
        "--size", type=size, help=f"of the model (default {SIZE}; twice that and 2 GB are needed in tmpfs)"
    )
    parser.add_argument("--rounds", type=positive_int, help=f"runs of each line (default {ROUNDS})")
    parser.add_argument(
        "--only", help="patterns of contenders or lines, with commas: 'longshore_*,limit_copy:fresh@http'"
    )
    parser.add_argument(
        "--small", action="store_true", help=f"to see that it works: {SMALL_SIZE}, one round, no tuning"
    )
    parser.add_argument("--no-tuning", action="store_true", help="take the first setting of each contender")
    parser.add_argument(
        "--out",
        type=output_folder,
        default=str(REPOSITORY / "bench" / "out"),
        help="folder for results.json and chart.png",
    )
    parser.add_argument("--docs", type=Path, help="rewrite the tables in this file (a whole run does it in docs/)")
    parser.add_argument("--tmpfs", type=writable_folder, default=TMPFS, help="where the models are made")
    return parser


def _sources(server: RangeServer) -> list[Source]:
    return ["http", "https", "file"] if server.tls_endpoint else ["http", "file"]


def _specs(models: Models, server: RangeServer) -> dict[Source, Spec]:
    return {
        "http": models.spec("http", server.endpoint),
        "https": models.spec("https", server.tls_endpoint, server.ca_bundle),
        "file": models.spec("file"),
    }


def _patterns(only: str | None) -> list[str]:
    return [pattern.strip() for pattern in only.split(",")] if only is not None else []


def _chosen(patterns: Sequence[str], sources: Sequence[Source]) -> list[Line]:
    """The lines to run: the ceilings first, then the limits, ours and the rest, each in order of name."""
    ranks = (CEILING, HAND_WRITTEN, OURS)
    names = [found.name for found in pkgutil.iter_modules(bench.contenders.__path__)]
    names.sort(key=lambda name: next((i for i, start in enumerate(ranks) if name.startswith(start)), len(ranks)))
    lines = lines_of(map(read_contender, names), sources)
    if not patterns:
        return lines
    return [
        line
        for line in lines
        if any(
            fnmatch.fnmatchcase(text, pattern)
            for pattern in patterns
            for text in (line.contender, f"{line.contender}:{line.case.name}", line.id)
        )
    ]


class _Benchmark:
    """The runs, one after the other."""

    def __init__(self, specs: Mapping[Source, Spec], lines: Sequence[Line], *, any_mode: bool = False) -> None:
        """`any_mode`: a run in another mode than was asked for is none that failed."""
        self._specs = specs
        self._lines = lines
        self._any_mode = any_mode
        self.served_bytes: Callable[[str], int] | None = None  # of the store so far, below a path

    def run(self, rounds: int) -> None:
        """All lines in each round, the next one starting where this one did not."""
        for number in range(rounds):
            first = number * len(self._lines) // max(1, rounds)
            for line in [*self._lines[first:], *self._lines[:first]]:
                self._one_round(line, number)

    def tune(self, specs: Mapping[Source, Spec]) -> None:
        """Find every line's best setting, on other models than those of the rounds."""
        for line in self._lines:
            self._find_setting(line, specs)

    def _find_setting(self, line: Line, specs: Mapping[Source, Spec]) -> None:
        def gb_per_s(setting: Mapping[str, Any]) -> float:
            run = self._attempt(line, setting, specs)
            if run is None:
                raise _Over
            return run.gb_per_s

        try:
            line.setting, line.tried = find_best(line.settings, gb_per_s)
        except _Over:
            return
        if line.tried:
            print(f"{line.id}: best of {len(line.settings)} settings: {json.dumps(dict(line.setting))}", flush=True)

    def _one_round(self, line: Line, number: int) -> None:
        run = self._attempt(line, line.setting, self._specs)
        if run is not None:
            line.runs.append(run)
            print(
                f"{number + 1}  {line.id:48}  {run.gb_per_s:6.2f} GB/s  {run.cpu_s_per_gb:5.2f} CPU s/GB  "
                f"{run.memory_over_bytes:5.2f} x memory",
                flush=True,
            )

    def _attempt(self, line: Line, setting: Mapping[str, Any], specs: Mapping[Source, Spec]) -> Run | None:
        """One run; None, and no more of that line, when it cannot be or failed."""
        if line.absent or line.failure:
            return None
        try:
            run = self._run_once(line, setting, specs[line.source])
            if (other := line.other_mode(run)) and not self._any_mode:
                raise RunFailed(f"asked for {line.case.options['placement']}, ran {other}: is the model too small?")
            return run
        except NotRunnable as error:
            line.absent = str(error)
        except RunFailed as error:
            line.failure = str(error)
        print(f"{line.id}: {line.absent or line.failure}", flush=True)
        return None

    def _run_once(self, line: Line, setting: Mapping[str, Any], spec: Spec) -> Run:
        """Raises as `run_once` does. What the store sent is in the `extra` of ours."""
        if self.served_bytes is None or line.source == "file" or not line.contender.startswith(OURS):
            return run_once(line, setting, spec, TIMEOUT_S)
        # Nothing but what is measured reads that model: what is loaded before is another one.
        prefix = f"/{spec.bucket}/{main_model_name(spec.with_options(**line.case.options))}/"
        before_bytes = self.served_bytes(prefix)
        run = run_once(line, setting, spec, TIMEOUT_S)
        return replace(run, extra={**run.extra, "served_bytes": self.served_bytes(prefix) - before_bytes})


class _Over(Exception):
    """A line that has no runs any more."""


def _write(results: Results, out: Path, docs: Path | None, arguments: Sequence[str] | None) -> None:
    goals = find_goals(results)
    _write_json(results, out)
    print(", ".join(f"{name} {value}" for name, value in results.machine.items()))
    print(", ".join(f"{name} {value}" for name, value in results.versions.items()))
    print(terminal(results), flush=True)
    print()
    for goal in goals:
        print(f"{goal.verdict or '-':8}  {goal.found:>8}  {goal.wanted:14}  {goal.what.replace('`', '')}")
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    command = f'make bench BENCH_ARGS="{given}"' if given else "make bench"
    (out / "benchmarks.md").write_text(markdown(results, goals, command) + "\n")
    chart = ", chart.png"
    try:
        draw_chart(results, out / "chart.png")
    except ImportError:
        chart = ""
        print("\nno chart: matplotlib is not installed (make peers)")
    if docs is not None:
        rewrite_docs(docs, markdown(results, goals, command))
    print(f"\nwritten: {out}/results.json{chart}, benchmarks.md" + (f" and {docs}" if docs else ""), flush=True)


def _write_json(results: Results, out: Path) -> None:
    (out / "results.json").write_text(json.dumps({**results.as_dict(), "written": time.time()}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
