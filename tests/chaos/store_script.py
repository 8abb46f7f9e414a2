"""When the store of a case fails, and how."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tests.chaos.cases import Case
from tests.support.faults import Asked, Before, Fault, Flip, Refuse, Script, Stall, merged, random_faults


def store_script(case: Case, size_bytes: int, replace: Callable[[], object]) -> Script:
    """What befalls reads of a case whose shards have `size_bytes` together; `replace` puts other objects there."""
    passing = random_faults(case.seed, case.passing, case.share) if case.passing else lambda asked: ()
    return merged(_staying(case, size_bytes, replace), passing)


def _staying(case: Case, size_bytes: int, replace: Callable[[], object]) -> Script:
    at = int(case.staying_at * size_bytes / 2)  # of either of two shards

    def of_chunk(asked: Asked) -> bool:
        return asked.start <= at < asked.end

    replaced = threading.Event()

    def replace_once() -> None:
        if not replaced.is_set():
            replaced.set()
            replace()

    faults: dict[str, Fault] = {
        "refuses one chunk": Refuse(500, "InternalError"),
        "throttles one chunk": Refuse(503, "SlowDown"),
        "denies from now on": Refuse(403, "ExpiredToken"),
        "has lost one chunk": Refuse(404, "NoSuchKey"),
        "damages one chunk": Flip(int(case.staying_at * 8000)),
        "stalls one chunk": Stall(int(case.staying_at * 1000)),
        "replaced the object": Before(replace_once),
    }

    def script(asked: Asked) -> Sequence[Fault]:
        if case.staying in ("denies from now on", "replaced the object"):
            return (faults[case.staying],) if asked.number > 12 * case.staying_at else ()
        return (faults[case.staying],) if case.staying and of_chunk(asked) else ()

    return script
