"""What one check of `longshore doctor` found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Outcome = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found."""

    name: str
    outcome: Outcome
    detail: str  # what was seen, with numbers
    hint: str = ""  # what to do about it

    def as_dict(self) -> dict[str, str]:
        """Plain strings, ready for `json.dumps`."""
        return asdict(self)
