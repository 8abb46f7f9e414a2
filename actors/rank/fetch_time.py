"""Where the time of a rank's requests goes. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FetchTime:
    """Seconds of the rank, each divided among the requests that it may have in flight; from `begin` on."""

    working_s: float = 0.0  # reading, verifying, and placing at once
    wait_retry_s: float = 0.0  # before another try
    wait_slot_s: float = 0.0  # the agent had no slot for a chunk
    wait_lease_s: float = 0.0  # the agent had not answered yet
    _until_s: float | None = None

    def begin(self, now_s: float) -> None:
        self._until_s = now_s

    def spend(self, now_s: float, requests: int, working: int, pausing: int, short_of: str) -> None:
        """Since the last call so many requests worked and paused; the others were short of "slots", "lease" or ""."""
        if self._until_s is None:
            return
        each_s = (now_s - self._until_s) / requests
        self._until_s = now_s
        working = min(working, requests)
        pausing = min(pausing, requests - working)
        free = requests - working - pausing
        self.working_s += working * each_s
        self.wait_retry_s += pausing * each_s
        if short_of == "slots":
            self.wait_slot_s += free * each_s
        elif short_of == "lease":
            self.wait_lease_s += free * each_s
