"""Which ranks of a node still need which chunks of a load. Chunks are positions in the plan's order. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


class RankNeeds:
    """Ranks count as present from the start. One byte per rank and chunk; every question is O(ranks of the node)."""

    def __init__(self, positions: Mapping[int, NDArray[np.int64]], count: int) -> None:
        """`positions`: what each rank touches, of `count` in all."""
        self.present = set(positions)
        self.left = dict.fromkeys(positions, 0)  # chunks that the rank has not placed
        self._wants = {rank: np.unique(touched) for rank, touched in positions.items()}
        self._outstanding = {rank: np.zeros(count, np.uint8) for rank in positions}  # 1: not placed
        for rank in positions:
            self.begin_anew(rank)

    @property
    def complete(self) -> bool:
        """Every rank is there and has placed everything."""
        return len(self.present) == len(self.left) and not any(self.left.values())

    def begin_anew(self, rank: int) -> None:
        """The rank is there, and has placed nothing."""
        self.present.add(rank)
        self._outstanding[rank][self._wants[rank]] = 1
        self.left[rank] = len(self._wants[rank])

    def placed(self, rank: int, position: int) -> bool:
        """The rank has it now. False when that was known, never needed, or nobody is there for the rank."""
        if not self.needs(rank, position):
            return False
        self._outstanding[rank][position] = 0
        self.left[rank] -= 1
        return True

    def needs(self, rank: int, position: int) -> bool:
        """Whether the rank is present and has not placed it."""
        return rank in self.present and bool(self._outstanding[rank][position])

    def needing(self, position: int) -> tuple[int, ...]:
        """Present ranks that have not placed it, ascending."""
        return tuple(rank for rank in sorted(self.present) if self._outstanding[rank][position])

    def wants(self, rank: int) -> NDArray[np.int64]:
        """What the rank touches, placed or not, ascending."""
        return self._wants[rank]

    def wanted_by(self, position: int) -> tuple[int, ...]:
        """Ranks that touch it, present or not, placed or not, ascending."""
        return tuple(rank for rank in sorted(self._wants) if _holds(self._wants[rank], position))

    def missing(self, rank: int) -> list[int]:
        """What the rank has not placed, ascending."""
        found: list[int] = np.flatnonzero(self._outstanding[rank]).tolist()
        return found


def _holds(ascending: NDArray[np.int64], position: int) -> bool:
    index = int(np.searchsorted(ascending, position))
    return index < len(ascending) and int(ascending[index]) == position
