"""The tables of docs/benchmarks.md that `bench.page` writes: `make bench` or `python -m bench.everything`.

Each step is a command of its own and leaves a file in bench/out. `python -m bench.page` then writes the pages. Options
that are not named here go to `bench.run`. Exit code 0; 1 when a step failed; 130 after Ctrl-C.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from bench.harness.report import describe_machine
from bench.harness.rounds import REPOSITORY
from bench.options import new_parser, output_folder, write_json

# Name of the step, and of its file -> module and arguments. "loads" writes results.json by itself.
STEPS: dict[str, tuple[str, ...]] = {
    "loads": ("bench.run",),
    "engines": ("bench.run", "--only", "vllm*/*,transformers/*", "--out", "bench/out/engines"),
    "kept": ("bench.run", "--only", "tp2/kept", "--size", "2GB", "--out", "bench/out/kept"),
    "hashes": ("bench.hashes",),
    "startup": ("bench.startup",),
    "precision": ("bench.precision",),
    "saves": ("bench.saves",),
    "update": ("bench.update",),
    "memory": ("bench.memory",),
    "planning": ("bench.plan_scale",),
    "tensors": ("bench.plan_scale", "--tensors", "30000"),
    "simulated": ("bench.simulate",),
    # many chunks on slow links, so that neither the first chunks nor this machine's processors are the limit
    "peers": ("bench.peers", "--size", "700MB", "--chunk", "1MiB", "--mbit", "100", "--rounds", "1"),
    "carrier": ("bench.carrier",),
}
SMALL: dict[str, tuple[str, ...]] = {
    "loads": ("--small",),
    "engines": ("--small",),
    "kept": ("--small", "--size", "40MB"),
    "hashes": ("--rounds", "1", "--seconds", "0.05"),
    "startup": ("--rounds", "1"),
    "precision": ("--size", "64MiB"),
    "saves": ("--size", "20MB", "--rounds", "1"),
    "update": ("--size", "40MB", "--rounds", "1"),
    "memory": ("--slots", "2", "--rounds", "1"),
    "planning": ("--layers", "1", "--shards", "8", "--layout", "8x16x8"),
    "tensors": ("--tensors", "300", "--layout", "1x1x1"),
    "simulated": ("--nodes", "1", "--layers", "2"),
    "peers": ("--nodes", "1,2", "--size", "40MB", "--rounds", "1"),
    "carrier": ("--reads", "2", "--rounds", "1"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps. Returns the exit code."""
    parser = new_parser("bench.everything", __doc__)
    parser.add_argument("--steps", default=",".join(STEPS), help="names with commas")
    parser.add_argument("--small", action="store_true", help="see that it works; its numbers mean nothing")
    parser.add_argument("--out", type=output_folder, default=str(REPOSITORY / "bench" / "out"), help="for the results")
    options, of_loads = parser.parse_known_args(arguments)
    names = options.steps.split(",")
    if unknown := set(names) - set(STEPS):
        parser.error(f"argument --steps: no step {', '.join(sorted(unknown))}, only {', '.join(STEPS)}")
    failed = []
    for name in names:
        command = [*STEPS[name], *(SMALL[name] if options.small else ())]
        if name == "loads":
            command += [*of_loads, "--out", str(options.out)]
        shown = f"python -m {' '.join(command)}"
        print(f"\n== {name}: {shown}", flush=True)
        machine, begun_s = describe_machine(), time.monotonic()
        code, printed = _run([sys.executable, "-m", *command])
        if code == 130:
            return code
        if code:
            failed.append(name)
        elif name != "loads":
            found = {"command": shown, "machine": machine, "seconds": time.monotonic() - begun_s}
            write_json(options.out / f"{name}.json", {**found, "tables": markdown_tables(printed)})
    print(f"\nfailed: {', '.join(failed)}" if failed else f"\nall done: {options.out}", flush=True)
    return 1 if failed else 0


def markdown_tables(lines: Iterable[str]) -> list[str]:
    """Return the tables among these lines."""
    tables: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("|"):
            tables[-1].append(line.rstrip())
        elif tables[-1]:
            tables.append([])
    return ["\n".join(table) for table in tables if table]


def _run(command: list[str]) -> tuple[int, list[str]]:
    """Run a command and show its output as it comes. Returns the exit code and the lines."""
    printed = []
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as step:
        try:
            for line in step.stdout or ():
                printed.append(line)
                print(line, end="", flush=True)
        except KeyboardInterrupt:  # the step got it too, and ends in its order
            step.wait()
            return 130, printed
    return step.returncode, printed


if __name__ == "__main__":
    raise SystemExit(main())
