"""Hand-written limit: two processes, straight into private memory, fresh or touched before."""

from __future__ import annotations

from bench.contender import run_contender
from bench.limits import KEEPING_CASES, SETTINGS, Work, run_limit
from bench.spec import Spec

TITLE = "hand-written limit, straight into private memory"
CHECKS = True
KEEPS = True
CASES = KEEPING_CASES
__all__ = ["CASES", "CHECKS", "KEEPS", "SETTINGS", "TITLE", "main"]


def main(spec: Spec) -> None:
    recycled = spec.options["memory"] == "recycled"
    run_limit(spec, Work(arena=False, private=True, recycled=recycled, verify=bool(spec.options["verify"])))


if __name__ == "__main__":
    run_contender(main)
