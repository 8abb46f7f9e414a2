"""What one rank has to tell its agent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from actors.rank.chunk_fetcher import FetchedChunk


@dataclass(slots=True)
class Results:
    """What happened since the agent was last told."""

    fetched: list[FetchedChunk] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)  # by cause
    requests: list[tuple[int, float, float]] = field(default_factory=list)  # bytes, seconds, when it ended
    throttled: int = 0

    def __len__(self) -> int:
        """Chunks that there is something to tell of; most are fetched and placed at once."""
        return max(len(self.fetched), len(self.placed))

    def add(self, result: FetchedChunk) -> None:
        """A lease ended."""
        self.fetched.append(result)
        self.retries.update(result.retries)
