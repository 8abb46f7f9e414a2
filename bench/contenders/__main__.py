"""Runs one contender in this process: `python -m bench.contenders NAME SPEC`, with the spec as JSON."""

import sys

from bench.contenders.table import CONTENDERS, ON_DEVICE
from bench.harness.contender import run_contender

if __name__ == "__main__":
    name, spec = sys.argv[1:]
    sys.exit(run_contender({**CONTENDERS, **ON_DEVICE}[name], spec))
