"""Longshore beside its peers, on this machine: `python -m bench.run`.

    nginx <-- contender --> one line of JSON      each load a process of its own, one at a time, rounds interleaved
                              |
              results.json, and tables on the terminal and in benchmarks.md

Exit code 0; 1 when a contender failed, and not when one is merely absent; 2 when nothing could be run.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.contenders.table import CONTENDERS
from bench.harness.contender import Source, Spec
from bench.harness.models import TUNING_BUCKET, NoRoom, make_models
from bench.harness.report import describe_machine, describe_versions, markdown, tables
from bench.harness.results import Line, Results, Run, lines_of
from bench.harness.rounds import RunFailed, RunLine, run_once, run_rounds
from bench.harness.run_folder import NGINX, run_folder
from bench.harness.store import NoRangeServer, RangeServer, nginx_version
from bench.options import add_model_options, new_parser, size, write_json
from cluster.command_line.demo import sandbox
from cluster.joining.patience import sigterm_interrupts

SIZE, SMALL_SIZE = "2GB", "40MB"
TUNING_PART = 4  # settings are searched on models of that part of the size: some hundred runs
ROUNDS = 3
SOURCES: tuple[Source, ...] = ("http", "https", "file")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    patterns = [pattern.strip() for pattern in options.only.split(",")] if options.only is not None else ["*"]
    for pattern in patterns:
        if not choose_lines([pattern], SOURCES):
            parser.error(f"argument --only: no line is called {pattern!r}")
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
                lines = choose_lines(patterns, SOURCES if server.tls_endpoint else ("http", "file"))
                model = {"bytes": models.model_bytes, "files": len(models.files)}
                versions = {**describe_versions(), "nginx": nginx_version()}
                results = Results(describe_machine(), versions, model, rounds, lines, tuned)
                # In so small a model ranks share every chunk, which then goes through the arena.
                run = _runner(models, server, any_mode=options.small)
                tune = _runner(smaller, server, any_mode=False) if tuned else None
                run_rounds(lines, rounds, run, tune=tune)
    except (NoRangeServer, NoRoom) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if results is not None and any(line.runs for line in results.lines):
            write_json(options.out / "results.json", replace(results, partial=True).as_dict())
            print(tables(results))
            print(f"\ninterrupted; results so far: {options.out}/results.json", flush=True)
        return 130
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    text = markdown(results, f'make bench BENCH_ARGS="{given}"' if given else "make bench")
    write_json(options.out / "results.json", results.as_dict())
    (options.out / "benchmarks.md").write_text(text + "\n")
    print(f"\n{text}\n\nwritten: {options.out}/results.json, benchmarks.md", flush=True)
    return 1 if any(line.failure for line in lines) else 0


def choose_lines(patterns: Sequence[str], sources: Sequence[Source]) -> list[Line]:
    """Return the lines of those sources whose contender, mode or id matches a pattern, in the table's order."""
    return [
        line
        for line in lines_of(CONTENDERS.values(), sources)
        if any(
            fnmatch.fnmatchcase(text, pattern)
            for pattern in patterns
            for text in (line.contender, f"{line.contender}:{line.case.name}", line.id)
        )
    ]


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("bench.run", __doc__, json_option=False)
    # The defaults of --size and --rounds depend on --small.
    add_model_options(parser, None, None)
    parser.add_argument("--only", help="patterns of contenders or lines: 'longshore_*,limit_copy:fresh@http'")
    small = f"see that it works: {SMALL_SIZE} instead of {SIZE}, 1 round instead of {ROUNDS}, no tuning"
    parser.add_argument("--small", action="store_true", help=small)
    parser.add_argument("--no-tuning", action="store_true", help="take the first setting of each contender")
    return parser


def _runner(files: Spec, server: RangeServer, *, any_mode: bool) -> RunLine:
    """Return the function that does one load of a line.

    `any_mode`: accept a run that had another placement than its line asked for.
    """
    specs: dict[Source, Spec] = {
        "http": replace(files, source="http", endpoint=server.endpoint),
        "https": replace(files, source="https", endpoint=server.tls_endpoint, ca_bundle=server.ca_bundle),
        "file": files,
    }

    def run(line: Line, setting: Mapping[str, Any]) -> Run:
        found = run_once(line, setting, specs[line.source])
        if (other := line.other_mode(found)) and not any_mode:
            raise RunFailed(f"asked for {line.case.options['placement']}, ran {other}: is the model too small?")
        return found

    return run


if __name__ == "__main__":
    raise SystemExit(main())
