"""The ceiling: range GETs received straight into a little memory that stays warm. Nothing is hashed, nothing kept."""

from __future__ import annotations

from bench.contender import Case, run_contender
from bench.limits import SLOT_BYTES, Work, run_limit
from bench.spec import Spec

TITLE = "ceiling: raw range reads into warm memory"
CHECKS = False
KEEPS = False
CASES = (Case("", "", checks=False, keeps=False, memory="none", sources=("http", "https", "file")),)
SETTINGS = [
    {"processes": processes, "connections": connections, "piece_bytes": piece}
    for processes, connections in ((1, 2), (2, 1), (2, 2), (2, 4))
    for piece in (256 << 10, 1 << 20)
]


def main(spec: Spec) -> None:
    slots = int(spec.options["processes"]) * int(spec.options["connections"])
    run_limit(spec.with_options(arena_bytes=slots * SLOT_BYTES), Work(arena=True))


if __name__ == "__main__":
    run_contender(main)
