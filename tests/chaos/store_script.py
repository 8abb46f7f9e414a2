"""Scripts the failures of a case's store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tests.chaos.cases import Case
from tests.support.fault_proxy import Asked, Before, Fault, Flip, Refuse, Script, Stall, merged, random_faults


class StoreScript:
    """The faults of a case's reads; its two shards have `size_bytes` together. `replace` swaps the objects.

    `stayed`: how often the fault that stays has struck.
    """

    def __init__(self, case: Case, size_bytes: int, replace: Callable[[], object]) -> None:
        self.stayed = 0
        self._case = case
        self._at = int(case.staying_at * size_bytes / 2)  # of either of two shards
        self._replace, self._replaced = replace, threading.Event()
        passing: Script = random_faults(case.seed, case.passing, case.share) if case.passing else lambda asked: ()
        self.script = merged(self._staying, passing)

    def _staying(self, asked: Asked) -> Sequence[Fault]:
        case = self._case
        faults: dict[str, Fault] = {
            "refuses one chunk": Refuse(500, "InternalError"),
            "throttles one chunk": Refuse(503, "SlowDown"),
            "denies from now on": Refuse(403, "ExpiredToken"),
            "has lost one chunk": Refuse(404, "NoSuchKey"),
            "damages one chunk": Flip(int(case.staying_at * 8000)),
            "stalls one chunk": Stall(int(case.staying_at * 1000)),
            "replaced the object": Before(self._replace_once),
        }
        if case.staying not in faults:
            return ()
        if case.staying in ("denies from now on", "replaced the object"):
            strikes = asked.number > 12 * case.staying_at
        else:
            strikes = asked.start <= self._at < asked.end
        self.stayed += strikes
        return (faults[case.staying],) if strikes else ()

    def _replace_once(self) -> None:
        if not self._replaced.is_set():
            self._replaced.set()
            self._replace()
