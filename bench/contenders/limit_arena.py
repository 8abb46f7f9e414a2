"""Hand-written limit: two processes receive and hash into a shared warm arena. Nothing leaves it."""

from __future__ import annotations

from bench.contender import Case, run_contender
from bench.limits import SETTINGS, Work, run_limit
from bench.sample import XXH3
from bench.spec import Spec

TITLE = "hand-written limit, into the arena"
CHECKS = True
KEEPS = False
CASES = (
    Case("verified", "verified", True, False, "arena", ("http", "https", "file"), {"verify": True}),
    Case(
        "xxh3",
        "verified by XXH3-128",
        True,
        False,
        "arena",
        ("http",),
        {"verify": True, "model": XXH3},
        hash_name="xxh3_128",
    ),
    Case("unverified", "not verified", False, False, "arena", ("http",), {"verify": False}),
)
__all__ = ["CASES", "CHECKS", "KEEPS", "SETTINGS", "TITLE", "main"]


def main(spec: Spec) -> None:
    run_limit(spec, Work(arena=True, verify=bool(spec.options["verify"])))


if __name__ == "__main__":
    run_contender(main)
