"""Every parser of foreign bytes under atheris, one after the other: `make fuzz`.

    for each parser: its examples --> corpus --> tests.fuzz.target, its own process, with limits of time and memory
                     an input that broke it --> .fuzz/PARSER-crash-...

Ends with 1 when anything was found, with 0 and a reason when atheris is not installed.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz.parsers import PARSERS, Parser

FOUND = Path(".fuzz")
MEMORY_MIB = 2048  # of the process; atheris and its imports take some 200
INPUT_TIMEOUT_S = 25  # for one input
MAX_INPUT_BYTES = 1 << 16


def fuzz(parser: Parser, seconds: int, seed: int) -> bool:
    """Whether nothing was found."""
    FOUND.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="longshore-fuzz-") as corpus:
        for number, example in enumerate(parser.seeds()):
            (Path(corpus) / f"example-{number}").write_bytes(example)
        command = [sys.executable, "-m", "tests.fuzz.target", parser.name]
        options = [
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            f"-rss_limit_mb={MEMORY_MIB}",
            f"-timeout={INPUT_TIMEOUT_S}",
            f"-max_len={MAX_INPUT_BYTES}",
            f"-artifact_prefix={FOUND}/{parser.name}-",
            "-print_final_stats=1",
        ]
        done = subprocess.run([*command, *options, corpus], capture_output=True, text=True, errors="replace")
    output = done.stdout + done.stderr
    runs = next((line.split()[-1] for line in output.splitlines() if "number_of_executed_units" in line), "0")
    good = done.returncode == 0 and int(runs) > 0
    print(f"{parser.name:<20} {runs:>10} inputs  {'nothing found' if good else 'FOUND SOMETHING'}", flush=True)
    if not good:
        print(output[-5000:], file=sys.stderr)
    return good


def main() -> int:
    options = argparse.ArgumentParser(description="Fuzz the parsers of foreign bytes.")
    options.add_argument("--seconds", type=int, default=20, help="for each parser")
    options.add_argument("--only", default="*", help="names of parsers, as a pattern")
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1 << 31))
    args = options.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("skipped: atheris is not installed")
        return 0
    print(f"seed {args.seed}, {args.seconds} s for each parser")
    chosen = [parser for parser in PARSERS if fnmatch.fnmatch(parser.name, args.only)]
    results = [fuzz(parser, args.seconds, args.seed) for parser in chosen]
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
