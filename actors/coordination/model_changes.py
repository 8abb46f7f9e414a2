"""The changes of one resident model: updates in place, and other numbers of replicas. One runs at a time.

    lead(id, work) --> the work says what it does, and moves the life of an update --> its outcome stays for its client

`ModelChanges` owns its fields, as `ModelRecord` does. What an update changes in the model's record is in
`ModelRecord.adopt`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.errors import LoadCancelled
from cluster.messages import AgentBeat
from cluster.planning.packed_plan import RankFacts
from cluster.request import LoadRequest
from cluster.scheduling.update_state import RankStep, UpdateLife, UpdatePhase
from cluster.telemetry.report import UpdateProgress
from cluster.telemetry.scale_report import ScaleReport
from cluster.telemetry.update_report import UpdateReport
from storage.errors import LongshoreError

_UPDATE = "update-"
KEPT_OUTCOMES = 4  # of changes that are over, for clients that ask again
Changed = UpdateReport | ScaleReport
UPDATE, REPLICAS = "update", "change of replicas"  # kinds of changes, for people


@dataclass(frozen=True, slots=True)
class SavedUpdate:
    """An update that is under way, as agents keep it for a restarted coordinator."""

    update_id: str
    request: LoadRequest  # of a load of the new revision; saved without credentials
    base: str  # the revision before
    revision: str
    signed_by: str
    streaming: bool
    decided: bool = False  # every rank gets the new revision, whatever happens

    @property
    def load_id(self) -> str:
        """The id under which agents know the load of what changed."""
        return f"{_UPDATE}{self.update_id}"

    def saved(self) -> SavedUpdate:
        """Return it without credentials."""
        return replace(self, request=replace(self.request, store=self.request.store.without_credentials()))


def is_update(load_id: str) -> bool:
    """Return whether this is the id of an update's load."""
    return load_id.startswith(_UPDATE)


@dataclass(slots=True)
class ModelChanges:
    """The change that is under way, and how the last ones ended."""

    model_id: str
    changed: asyncio.Condition  # of the record: notified with everything that a waiting client would want to see
    note: Callable[[str, Changed | LongshoreError | None], Coroutine[Any, Any, None]]  # what it does, or its outcome
    moved: Callable[[], None]  # it began, came to another phase, or ended
    update: SavedUpdate | None = None  # that is under way
    life: UpdateLife | None = None  # of the last update
    heard: Callable[[AgentBeat], None] | None = None  # takes heartbeats while an update reads
    read_bytes: dict[int, int] = field(default_factory=dict)  # by rank: that it has read for the update
    total_bytes: int = 0  # that all ranks read for the update
    promised: dict[int, tuple[int, RankFacts]] = field(default_factory=dict)  # by rank: host memory, and what it reads
    text: str = ""  # for people: what it does, or how it ended
    kind: str = ""  # of the change that is under way, or of the last one
    task: asyncio.Task[None] | None = None  # leads the change
    change_id: str = ""
    outcomes: dict[str, Changed | LongshoreError] = field(default_factory=dict)  # of the last changes, by id

    @property
    def is_running(self) -> bool:
        """True while an update or a change of the number of replicas is under way."""
        return self.task is not None and not self.task.done()

    @property
    def exchanges(self) -> bool:
        """True while some rank may have the old revision, and the new one was decided."""
        return self.is_running and self.update is not None and self.update.decided

    @property
    def state(self) -> str:
        """The phase of the update that is under way, "scaling" for a change of replicas, "" when nothing is."""
        if not self.is_running:
            return ""
        if self.kind != UPDATE:
            return "scaling"
        return "planning" if self.life is None or self.update is None else self.life.phase.value

    def lead(self, change_id: str, work: Coroutine[Any, Any, Changed], kind: str = UPDATE) -> None:
        """Run the task that leads the change. Its end is noted, however it comes."""
        self.change_id, self.kind = change_id, kind
        self.read_bytes, self.total_bytes = {}, 0
        self.task = asyncio.get_running_loop().create_task(self._lead(change_id, work))
        self.moved()

    async def _lead(self, change_id: str, work: Coroutine[Any, Any, Changed]) -> None:
        outcome: Changed | LongshoreError = LoadCancelled("the model was released", model=self.model_id)
        try:
            outcome = await work
        except LongshoreError as error:
            outcome = error
        except Exception as error:  # a bug must not leave the client waiting
            outcome = LongshoreError(f"{type(error).__name__} in the {self.kind}: {error}", model=self.model_id)
        finally:
            self.outcomes[change_id] = outcome
            while len(self.outcomes) > KEPT_OUTCOMES:
                del self.outcomes[next(iter(self.outcomes))]
            self.task, self.heard = None, None
            self.moved()
            failed = isinstance(outcome, LongshoreError)
            self.text = f"the {self.kind} failed: {outcome}" if failed else str(outcome)
            await self.note(self.text, outcome)

    async def say(self, text: str) -> None:
        """Note for people what the change does, and wake whoever waits."""
        self.text = text
        await self.note(text, None)

    def has_not_begun(self, change_id: str) -> bool:
        """Return whether this change is still to begin."""
        return change_id not in self.outcomes and change_id != self.change_id

    def doing(self) -> dict[str, str]:
        """Return the details of the error of a second change."""
        return {"hint": "wait for its end; longshore status shows it", "model": self.model_id, "doing": self.text}

    async def outcome_of(self, change_id: str, timeout_s: float) -> tuple[str, Changed | None, LongshoreError | None]:
        """Return what a change does, and its report or error once it has ended. Waits up to `timeout_s` for the end."""
        async with self.changed:
            with contextlib.suppress(TimeoutError):
                over = self.changed.wait_for(lambda: change_id in self.outcomes)
                await asyncio.wait_for(over, timeout_s)
        outcome = self.outcomes.get(change_id)
        if isinstance(outcome, LongshoreError):
            return self.text, None, outcome
        return self.text, outcome, None

    # -- an update -----------------------------------------------------------------------------------------------------

    def found(self, update: SavedUpdate | None) -> None:
        """Note the update that was under way when the coordinator was restarted."""
        self.update = update

    def begin(self, update: SavedUpdate, life: UpdateLife, heard: Callable[[AgentBeat], None]) -> None:
        """Note an update, before any rank is asked to read. `heard` takes the agents' heartbeats."""
        self.update, self.heard = update, heard
        self.move(life)

    def promise(self, host_bytes: Mapping[int, int], facts: Sequence[RankFacts]) -> None:
        """Note the host memory that ranks take for the update. `facts`: of what each rank reads."""
        self.promised = {rank: (size_bytes, facts[rank]) for rank, size_bytes in host_bytes.items()}

    def bytes_to_stage(self, ranks: Iterable[int]) -> int:
        """Return the host memory that these ranks have still to take for the update that they stage, or stream."""
        steps = () if self.life is None else self.life.ranks
        reading = [rank for rank in ranks if rank in self.promised and steps[rank] is RankStep.OLD]
        return sum(
            self.promised[rank][0] - taken_bytes(*self.promised[rank], self.read_bytes.get(rank, 0)) for rank in reading
        )

    def move(self, life: UpdateLife) -> None:
        """Note the next moment of the update's life."""
        self.life = life
        self.moved()

    def decided(self, update: SavedUpdate) -> None:
        """Note that every rank gets the new revision."""
        self.update = replace(update, decided=True)

    def reads(self, size_bytes: int) -> None:
        """Note how many bytes all ranks read for the update."""
        self.total_bytes = size_bytes

    def has_read(self, rank: int, size_bytes: int) -> None:
        """Note how many bytes a rank has read for the update."""
        self.read_bytes[rank] = max(size_bytes, self.read_bytes.get(rank, 0))

    def reads_no_more(self) -> None:
        """Note that the update reads nothing more."""
        self.heard = None

    def forget(self) -> None:
        """No update is under way any more."""
        self.update = None
        self.promised = {}

    def progress(self, ranks: int) -> UpdateProgress | None:
        """Return the progress of the update that is under way, over so many ranks; None if none is."""
        if not self.is_running or self.kind != UPDATE:
            return None
        life = self.life if self.update is not None else None
        steps = () if life is None else life.ranks
        not_yet = (RankStep.OLD, RankStep.STAGED) if life is not None and life.decided else (RankStep.OLD,)
        return UpdateProgress(
            phase=self.state,
            ranks_done=sum(step not in not_yet for step in steps),
            ranks_total=ranks,
            read_bytes=sum(self.read_bytes.values()),
            total_bytes=self.total_bytes,
        )


def taken_bytes(host_bytes: int, facts: RankFacts, placed_bytes: int) -> int:
    """Return what a rank of these facts has of its host's memory, `host_bytes` in the end, by what it placed."""
    elsewhere_bytes = facts.device_bytes - (host_bytes - facts.staging_bytes)
    there_bytes = facts.device_bytes * placed_bytes // max(1, facts.read_bytes)
    return min(host_bytes, max(0, there_bytes - elsewhere_bytes))


def details_of(outcome: Changed | LongshoreError | None) -> dict[str, Any]:
    """Return the details of the event of a change that has ended; none for one that is under way."""
    if isinstance(outcome, UpdateReport):
        return {
            "state": UpdatePhase.DONE.value,
            "revision": outcome.revision,
            "changed_bytes": outcome.changed_bytes,
            "read_bytes": outcome.read_bytes,
        }
    if isinstance(outcome, ScaleReport):
        return {"state": UpdatePhase.DONE.value, "store_bytes": outcome.store_bytes}
    return {} if outcome is None else {"state": UpdatePhase.FAILED.value, "error": type(outcome).__name__}
