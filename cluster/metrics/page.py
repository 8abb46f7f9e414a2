"""The tables of docs/metrics.md, printed from the metrics: `python -m cluster.metrics.page docs/metrics.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.metrics.families import FAMILIES

BEGIN, END = "<!-- printed by cluster.metrics.page -->", "<!-- end of what is printed -->"


def metrics_table() -> str:
    """One row per metric."""
    rows = ["| metric | labels | what it says |", "|---|---|---|"]
    rows += [f"| `{family.name}` | {', '.join(family.labels) or '-'} | {family.help} |" for family in FAMILIES]
    return "\n".join(rows)


def render_page(page: str) -> str:
    """The page with the table as it is now. Raises ValueError when it has no place for it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{metrics_table()}\n\n{END}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(render_page(Path(name).read_text()))
