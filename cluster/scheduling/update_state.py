"""The life of one update of a resident model, and what a restarted coordinator makes of it. Pure.

    staging --decide: every rank has staged--> exchanging ----every rank is new----> done
       `--a rank failed or died, or nobody leads it any more--> failed: every rank has the old revision

    streaming ----every rank is new----> done
       `--a rank failed--> broken: ranks have contents of two revisions

The step to "exchanging" is the decision. Before it, every failure leaves the old revision. After it, every rank gets
the new one: by its exchange, or, when it died, by a load of its replacement. A streaming update is decided when it
begins.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cluster.errors import IllegalTransition


class UpdatePhase(enum.Enum):
    """The phases of an update."""

    STAGING = "staging"
    STREAMING = "streaming"
    EXCHANGING = "exchanging"
    DONE = "done"
    FAILED = "failed"
    BROKEN = "broken"

    @property
    def is_over(self) -> bool:
        """Return whether nothing follows."""
        return self in (UpdatePhase.DONE, UpdatePhase.FAILED, UpdatePhase.BROKEN)


class RankStep(enum.Enum):
    """What one rank has of an update."""

    OLD = "old"  # the old revision, and nothing staged
    STAGED = "staged"  # the old revision, and all of the new one beside it
    NEW = "exchanged"  # the new revision, by its exchange or its stream
    REPLACED = "replaced"  # its worker died after the decision: the next one loads the new revision
    MIXED = "mixed"  # its stream failed


@dataclass(frozen=True, slots=True)
class UpdateLife:
    """One update."""

    phase: UpdatePhase
    ranks: tuple[RankStep, ...]

    @staticmethod
    def new(ranks: int, *, streaming: bool) -> UpdateLife:
        """Return the begin of an update of so many ranks."""
        return UpdateLife(UpdatePhase.STREAMING if streaming else UpdatePhase.STAGING, (RankStep.OLD,) * ranks)

    @property
    def decided(self) -> bool:
        """Return whether the new revision is the model's from now on."""
        return self.phase in (UpdatePhase.EXCHANGING, UpdatePhase.STREAMING, UpdatePhase.DONE, UpdatePhase.BROKEN)

    def staged(self, rank: int) -> UpdateLife:
        """Return the life after a rank has staged."""
        if self.phase is not UpdatePhase.STAGING:
            return self  # late: the update failed meanwhile
        return replace(self, ranks=_with(self.ranks, rank, RankStep.STAGED))

    def decide(self) -> UpdateLife:
        """Return the life after the decision for the new revision. Raises IllegalTransition before all have staged."""
        if self.phase is not UpdatePhase.STAGING or any(step is not RankStep.STAGED for step in self.ranks):
            raise IllegalTransition("an exchange was decided before all ranks had staged", state=self.phase.value)
        return replace(self, phase=UpdatePhase.EXCHANGING)

    def failed(self, rank: int | None = None) -> UpdateLife:
        """Return the life after a rank could not read its part, or (None) the update was given up.

        Raises IllegalTransition when an exchange was decided: nothing can fail it.
        """
        if self.phase is UpdatePhase.STAGING:
            return UpdateLife(UpdatePhase.FAILED, (RankStep.OLD,) * len(self.ranks))
        if self.phase is UpdatePhase.STREAMING:
            ranks = self.ranks if rank is None else _with(self.ranks, rank, RankStep.MIXED)
            return UpdateLife(UpdatePhase.BROKEN, ranks)
        if self.phase.is_over:
            return self
        raise IllegalTransition("an update failed after its decision", rank=rank, state=self.phase.value)

    def lost(self, rank: int) -> UpdateLife:
        """Return the life after a rank's worker died."""
        if self.phase is UpdatePhase.STAGING:
            return self.failed(rank)
        return self._new(rank, RankStep.REPLACED)

    def exchanged(self, rank: int) -> UpdateLife:
        """Return the life after a rank has the new contents. Raises IllegalTransition before the decision."""
        if self.phase is UpdatePhase.STAGING:
            raise IllegalTransition("a rank was exchanged before the decision", rank=rank)
        return self._new(rank, RankStep.NEW)

    def _new(self, rank: int, step: RankStep) -> UpdateLife:
        if self.phase.is_over:
            return self
        ranks = _with(self.ranks, rank, step)
        over = all(each in (RankStep.NEW, RankStep.REPLACED) for each in ranks)
        return replace(self, phase=UpdatePhase.DONE if over else self.phase, ranks=ranks)


def _with(ranks: tuple[RankStep, ...], rank: int, step: RankStep) -> tuple[RankStep, ...]:
    return (*ranks[:rank], step, *ranks[rank + 1 :])


def is_decided(saved: bool, target: str, revisions: Iterable[str]) -> bool:
    """Return whether a coordinator that was restarted goes on with an update, or ends it.

    `saved`: the decision is in the record that it got. `revisions`: those that living ranks have. A rank has the
    `target` only after the decision, so one of them tells it as surely as the record does.
    """
    return saved or target in set(revisions)
