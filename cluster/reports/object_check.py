"""Which objects of a load without a manifest were checked, by which of the store's checksums; why others were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

ONLY_PART = "only part of it is needed on the node"


@dataclass(frozen=True, slots=True)
class ObjectCheck:
    """What came of one object, on one node or on all that needed it."""

    key: str
    checked_by: str = ""  # name of the hash that the store keeps of it; empty when it was not checked
    reason: str = ""  # why it was not checked


def join_checks(checks: Iterable[ObjectCheck]) -> tuple[ObjectCheck, ...]:
    """One for each object, by key: checked when every node that needed it did."""
    joined: dict[str, ObjectCheck] = {}
    for check in checks:
        before = joined.get(check.key)
        if before is None or before.checked_by:
            joined[check.key] = check
    return tuple(joined[key] for key in sorted(joined))


def verified_by(checks: Iterable[ObjectCheck]) -> str:
    """What can be said of all of them: "store:crc64nvme"; "transport" when any was not checked, or there are none."""
    names = {check.checked_by for check in checks}
    return "transport" if not names or "" in names else f"store:{'+'.join(sorted(names))}"


def unchecked_counts(checks: Iterable[ObjectCheck]) -> dict[str, int]:
    """How many objects were not checked, by reason."""
    return dict(Counter(check.reason for check in checks if not check.checked_by))
