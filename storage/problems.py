"""All that is wrong with one input, collected before it is refused, and safe to print."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator

MAX_LISTED = 20  # a hostile file can be wrong in a million places
MAX_QUOTED = 120  # characters of a name in a message


def quote(value: object) -> str:
    """`value` for a message: quoted, control characters escaped, cut when it is long or deep."""
    if not isinstance(value, str):
        return reprlib.repr(value)
    cut = value if len(value) <= MAX_QUOTED else f"{value[:MAX_QUOTED]}... ({len(value)} characters)"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in f"'{cut}'")


class Problems:
    """A list of sentences that keeps the first MAX_LISTED and counts the rest."""

    def __init__(self, problems: Iterable[str] = ()) -> None:
        self._listed: list[str] = []
        self.count = 0
        for problem in problems:
            self.add(problem)

    def add(self, problem: str) -> None:
        """Note one more."""
        self.count += 1
        if len(self._listed) < MAX_LISTED:
            self._listed.append(problem)

    @property
    def full(self) -> bool:
        """True when further problems would only be counted."""
        return len(self._listed) >= MAX_LISTED

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __str__(self) -> str:
        more = self.count - len(self._listed)
        return "; ".join(self._listed) + (f"; and {more} more" if more else "")
