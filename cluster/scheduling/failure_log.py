"""What went wrong with the chunks of one load on one node, and what each failure leads to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.scheduling.retry import Fail, Retry, decide


@dataclass(slots=True)
class _Failures:
    """What went wrong with one chunk so far."""

    by_rank: Counter[int] = field(default_factory=Counter)
    by_cause: Counter[str] = field(default_factory=Counter)
    log: list[tuple[int, str]] = field(default_factory=list)  # (rank, cause), in order


class FailureLog:
    """Failures by chunk; a chunk is any number that stands for one. Holds only those that ever failed."""

    def __init__(self) -> None:
        self._chunks: dict[int, _Failures] = {}

    def __contains__(self, chunk: int) -> bool:
        """Whether the chunk ever failed."""
        return chunk in self._chunks

    def __iter__(self) -> Iterator[int]:
        """Chunks that ever failed."""
        return iter(self._chunks)

    def add(self, chunk: int, rank: int, cause: str, chunk_attempts: int | None, fraction: float) -> Retry | Fail:
        """`rank` could not get the chunk. Fail when the cause's budget (`cluster.scheduling.retry`) is spent, or after
        `chunk_attempts` failures of any cause. `fraction` in [0, 1) spreads the delays.
        """
        failures = self._chunks.setdefault(chunk, _Failures())
        failures.by_rank[rank] += 1
        failures.by_cause[cause] += 1
        failures.log.append((rank, cause))
        decision = decide(cause, failures.by_cause[cause], fraction)
        if isinstance(decision, Retry) and chunk_attempts is not None and len(failures.log) >= chunk_attempts:
            return Fail(f"{cause.replace('_', ' ')}, after {len(failures.log)} workers' attempts")
        return decision

    def has_failed(self, chunk: int, rank: int) -> bool:
        """Whether this rank ever failed on the chunk."""
        failures = self._chunks.get(chunk)
        return failures is not None and failures.by_rank[rank] > 0

    def of(self, chunk: int) -> tuple[tuple[int, str], ...]:
        """(rank, cause) of every failure of the chunk, in order."""
        failures = self._chunks.get(chunk)
        return () if failures is None else tuple(failures.log)
