"""Which of several changes of a load fits: the first of the steps of fit="auto", the cheapest that a refusal offers.

Pure: the changes were planned (`cluster.plans.prepare.plan_changes`), and whoever asks says what fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.fit.changes import Change
from cluster.fit.options import FitTry
from cluster.plans.rank_plans import RankFacts
from cluster.units import show_bytes

OFFERED = 4  # changes that one message names
_WHY_CHARS = 90  # of a reason, where several are told


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """A change as it would be loaded."""

    change: Change
    ranks: tuple[RankFacts, ...] = ()
    problem: str = ""  # why it cannot be planned

    @property
    def need_bytes(self) -> int:
        """Of the largest rank, while it is filled."""
        return max((rank.device_bytes + rank.staging_bytes for rank in self.ranks), default=0)


def first_that_fits(
    planned: Sequence[PlannedChange], why_not: Callable[[PlannedChange], str], given_bytes: int = 0
) -> tuple[PlannedChange | None, tuple[FitTry, ...]]:
    """(the first that fits, every step up to it). `why_not`: "" when a change fits, else what is missing.

    A step that would make nothing smaller than those before it, of which the one that was given needs `given_bytes`, is
    not asked about.
    """
    tried: list[FitTry] = []
    least_bytes = given_bytes
    for step in planned:
        if step.problem:
            reason = step.problem
        elif least_bytes and step.need_bytes >= least_bytes and step.change.kind != "offload":
            reason = "would be no smaller"
        else:
            reason = why_not(step)
            least_bytes = step.need_bytes
        tried.append(FitTry(step.change.what, step.need_bytes, reason))
        if not reason:
            return step, tuple(tried)
    return None, tuple(tried)


def cheapest(
    planned: Sequence[PlannedChange], fits: Callable[[PlannedChange], bool], devices_at_hand: int
) -> list[PlannedChange]:
    """Those that fit, the cheapest first, one of each kind; two changes at once only where one alone does not do.

    Cheap is what needs no more devices than are there, then what needs no offload (the model would be slow), then what
    loses least precision, then what takes fewest ranks.
    """

    def cost(each: PlannedChange) -> tuple[bool, bool, int, int]:
        change = each.change
        return change.ranks > devices_at_hand, change.kind == "offload", change.loss, change.ranks

    fitting = [each for each in planned if not each.problem and fits(each)]
    alone = [each for each in fitting if each.change.kind != "both"]
    found: dict[str, PlannedChange] = {}
    for each in sorted(alone or fitting, key=cost):
        found.setdefault(each.change.kind, each)
    return list(found.values())[:OFFERED]


def offer(found: Sequence[PlannedChange], devices_at_hand: int, tried: int) -> str:
    """A sentence or two about what `cheapest` found, of `tried` changes."""
    if not found:
        return f"None of {tried} changes that were planned (less precision, more ranks) would fit"
    said = []
    for each in found:
        ranks = each.change.ranks
        needs = f"up to {show_bytes(each.need_bytes)} on each of {ranks} ranks" if ranks > 1 else ""
        needs = needs or show_bytes(each.need_bytes)
        more = f", {devices_at_hand} at hand" if ranks > devices_at_hand else ""
        said.append(f"{each.change.what} ({needs}{more})")
    also = f"; also {'; '.join(said[1:])}" if said[1:] else ""
    return f"The cheapest change that fits: {said[0]}{also}"


def steps_text(tried: Sequence[FitTry]) -> str:
    """Every step of fit="auto" and what became of it, one after the other."""
    return "; ".join(
        f"{each.what}: " + (_short(each.why_not) if each.why_not else f"fits, {show_bytes(each.need_bytes)} per rank")
        for each in tried
    )


def _short(reason: str) -> str:
    """Without what stands in brackets, then to the end of a word."""
    if len(reason) > _WHY_CHARS:
        reason = re.sub(r" ?\([^()]*\)", "", reason)
    if len(reason) > _WHY_CHARS:
        reason = reason[: _WHY_CHARS - 3].rpartition(" ")[0].rstrip(",;:") + "..."
    return reason
