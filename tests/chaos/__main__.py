"""Random loads and saves under random faults: `python -m tests.chaos --loads 200 --seed 7`.

Every load ends byte-exact, or refused with an error that the faults which struck it justify. Anything else makes the
exit code 1, and is run again alone by `python -m tests.chaos --only NUMBER`, with the number that its line begins with.
For ten loads one save is drawn, which is judged likewise; `--saves NUMBER` runs it again.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray._private.worker

from tests.chaos.bench import bench
from tests.chaos.cases import Case, make_case
from tests.chaos.interrupts import Interrupted, check_interrupted, listen
from tests.chaos.judge import BAD, KINDS
from tests.chaos.run_case import CaseRunner, Outcome
from tests.chaos.saves import SaveOutcome, make_save_case, run_saves

CASES_PER_SEED = 100_000
LOADS_PER_SAVE = 10
ray_worker: Any = ray._private.worker


def table(outcomes: Sequence[Outcome | SaveOutcome]) -> str:
    """One row per fault that struck; a load that several struck counts in each of their rows."""
    rows: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for name in outcome.struck or ("none",):
            rows.setdefault(name, Counter())[outcome.kind] += 1
    lines = [f"| fault | loads | {' | '.join(KINDS)} |", f"|---|---|{'---|' * len(KINDS)}"]
    total = Counter(outcome.kind for outcome in outcomes)
    for name, found in [*sorted(rows.items()), ("**all**", total)]:
        lines.append(f"| {name} | {found.total()} | {' | '.join(str(found[kind]) for kind in KINDS)} |")
    return "\n".join(lines)


def line(outcome: Outcome) -> str:
    """One case in one line."""
    extra = f", {outcome.extra_bytes / 1e6:.1f} MB again" if outcome.extra_bytes else ""
    said = f" ({outcome.said})" if outcome.said else ""
    return f"{outcome.case.seed}: {outcome.kind}{said}, {outcome.took_s:.1f} s{extra} | {outcome.case}"


def in_order(cases: Sequence[Case]) -> list[Case]:
    """Cases with the same settings one after another: each change of them costs a start of everything."""
    return sorted(cases, key=lambda case: (case.own_cluster, case.arena, case.peers))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--loads", type=int, default=50, help="how many cases")
    parser.add_argument("--seed", type=int, help="of the whole run; made up when not given, and printed")
    parser.add_argument("--only", type=int, nargs="+", help="these cases, by their numbers")
    parser.add_argument("--saves", type=int, nargs="+", help="these saves and no loads, by their numbers")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10_000) if options.seed is None else options.seed
    numbers = options.only or [seed * CASES_PER_SEED + number for number in range(options.loads)]
    saves = options.saves or ([] if options.only else numbers[::LOADS_PER_SAVE])
    numbers = [] if options.saves else numbers
    cases = in_order([make_case(number) for number in numbers])
    ray_worker.print_to_stdstream = lambda *said, **options: None  # a thousand characters for each worker that dies
    outcomes: list[Outcome] = []
    begun_s = time.monotonic()
    print(f"{len(cases)} loads{'' if options.only else f', seed {seed}'}", flush=True)
    saved = run_saves([make_save_case(number) for number in saves])
    for outcome in saved:
        print(f"save {outcome}", flush=True)
    try:
        left, watched = _run(cases, outcomes) if cases else ("", "")
    except Interrupted as interrupted:
        print(f"interrupted after {len(outcomes)} of {len(cases)} loads", flush=True)
        return 128 + interrupted.number
    bad = [outcome for outcome in (*outcomes, *saved) if outcome.kind in BAD]
    code = 1 if bad or left else 0
    print(f"\n{table([*outcomes, *saved])}\n")
    which = "" if options.only else f"seed {seed}, "
    host = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    struck = sum(sum(outcome.struck.values()) for outcome in (*outcomes, *saved))
    minutes = (time.monotonic() - begun_s) / 60
    counted = f"{len(outcomes)} loads, {len(saved)} saves, {which}{struck} faults struck"
    print(f"{counted}, {minutes:.1f} min, {host}, exit code {code}")
    print(watched)
    for outcome in bad:
        option = "--saves" if isinstance(outcome, SaveOutcome) else "--only"
        print(f"again alone: python -m tests.chaos {option} {outcome.case.seed}    # {outcome.kind}")
    if left:
        print(f"left behind in the end: {left}")
    return code


def _run(cases: Sequence[Case], outcomes: list[Outcome]) -> tuple[str, str]:
    """Run all cases; return (leaks, summary of watched processes). Raises Interrupted once all is taken down."""
    listen()
    with bench() as there:
        listen()
        runner = CaseRunner(there)
        width = len(str(len(cases)))
        for case in cases:
            check_interrupted()
            outcomes.append(runner.run(case))
            print(f"[{len(outcomes):{width}}/{len(cases)}] {line(outcomes[-1])}", flush=True)
        watched = (
            f"{runner.leaks.watched}; ranks asked in mid-load gave {runner.early_reads} times, each time what is right"
        )
        return runner.leaks.found(), watched


if __name__ == "__main__":
    sys.exit(main())
