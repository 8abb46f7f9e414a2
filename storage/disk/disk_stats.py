"""How a disk tier stands and what it has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counts since the tier was opened by this process; `budget_bytes`, `used_bytes` and `files` are now."""

    budget_bytes: int
    used_bytes: int  # files that are being written included
    files: int
    written_chunks: int
    evicted_chunks: int
    unkept_chunks: int  # that should be there and are not
