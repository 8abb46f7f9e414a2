"""Random loads under random faults: `python -m tests.chaos --loads 200 --seed 7`.

Every load ends byte-exact, or refused with an error that the faults which struck it justify. Anything else makes the
exit code 1, and is run again alone by `python -m tests.chaos --only NUMBER`, with the number that its line begins with.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from storage.embedded_s3 import EmbeddedS3
from tests.chaos.cases import make_case
from tests.chaos.run_case import BAD, EXACT, HUNG, LEAKED, REFUSED, WRONG, Bench, Outcome
from tests.support.ray_clusters import ENVIRONMENT, Longshore, ray_cluster_of_two

CASES_PER_SEED = 100_000
KINDS = (EXACT, REFUSED, WRONG, HUNG, LEAKED)


@contextmanager
def bench() -> Iterator[Bench]:
    """A cluster of two nodes and a store, for as long as the block."""
    import ray

    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, ray_cluster_of_two() as there:
        (Path(folder) / "bucket").mkdir()
        ray.init(address=there.address, log_to_driver=False, configure_logging=False)
        longshore = Longshore(there)
        try:
            with EmbeddedS3(Path(folder) / "bucket") as server:
                yield Bench(longshore, server, Path(folder))
        finally:
            longshore.end_longshore()
            ray.shutdown()


def table(outcomes: Sequence[Outcome]) -> str:
    """One row per fault; a load under several faults counts in each of their rows."""
    rows: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for name in outcome.case.fault_names:
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--loads", type=int, default=50, help="how many cases")
    parser.add_argument("--seed", type=int, help="of the whole run; made up when not given, and printed")
    parser.add_argument("--only", type=int, nargs="+", help="these cases, by their numbers")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10_000) if options.seed is None else options.seed
    numbers = options.only or [seed * CASES_PER_SEED + number for number in range(options.loads)]
    begun_s = time.monotonic()
    outcomes: list[Outcome] = []
    with bench() as there:
        for number in numbers:
            outcomes.append(there.run(make_case(number)))
            print(line(outcomes[-1]), flush=True)
        left = there.leaks()
    bad = [outcome for outcome in outcomes if outcome.kind in BAD]
    print(f"\n{table(outcomes)}\n")
    which = "" if options.only else f"seed {seed}, "
    host = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(f"{len(outcomes)} loads, {which}{(time.monotonic() - begun_s) / 60:.1f} min, {host}")
    print(f"{sum(outcome.struck for outcome in outcomes)} faults struck")
    for outcome in bad:
        print(f"again alone: python -m tests.chaos --only {outcome.case.seed}    # {outcome.kind}")
    if left:
        print(f"left behind in the end: {left}")
    return 1 if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
