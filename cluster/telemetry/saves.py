"""The saves of checkpoints that the coordinator knows of, for people who watch them. Pure; the caller passes the time.

    rank 0 of a save --SaveProgress, each second--> Saves.received --> events, counters, the status of each save

A conversion is a save whose tensors come from another checkpoint. The process that converts is its rank 0.
A save does not depend on any of this. Every report is whole, so a lost one costs nothing, and a restarted coordinator
goes on with the next. A save whose rank 0 has not reported for LOST_S is taken for lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cluster.telemetry import metrics
from cluster.telemetry.chunk_map import EventLog, LoadEvent
from cluster.telemetry.metrics import BoundedLabels, Family, model_label
from cluster.telemetry.stats import Jsonable
from cluster.units import show_bytes

PLANNING, WRITING, PUBLISHING, VERIFYING = "planning", "writing", "publishing", "verifying"
PUBLISHED, FAILED, LOST = "published", "failed", "lost"
UNDER_WAY = (PLANNING, WRITING, PUBLISHING, VERIFYING)
OUTCOMES = (PUBLISHED, FAILED, LOST)
LOST_S = 60.0  # without a report, a save is lost
KEPT_S = 300.0  # an ended save stays listed for so long
MOST_SAVES = 256  # that are remembered at a time; of more, the oldest is forgotten
_TRAINING = re.compile(r"/training/[^/]+/?$")  # folder of a training state, which has a new name in each save


@dataclass(frozen=True, slots=True)
class SaveProgress(Jsonable):
    """One moment of a save. Bytes are sums over all ranks; they are 0 until the save is planned."""

    save_id: str
    number: int  # of the report, from 1 on
    uri: str
    state: str  # one of UNDER_WAY, or of OUTCOMES
    ranks: int  # of a conversion its workers
    host: str = ""  # of rank 0
    total_bytes: int = 0  # of all files
    written_bytes: int = 0  # sent to the store
    copied_bytes: int = 0  # that the store copied from the revision before
    reused_bytes: int = 0  # skipped: an interrupted save had written them
    peak_foreign_bytes: int = 0  # most bytes of other ranks that one rank held at a time
    elapsed_s: float = 0.0
    revision: str = ""  # once published
    error: str = ""  # type of what it failed with
    message: str = ""  # of the error
    failed_rank: int | None = None
    worker_group: str = ""  # of the loaded model that saves itself
    reporter: int = 0  # the rank that reports; another than 0 reports the end of rank 0
    source: str = ""  # URI that a conversion reads; "" for a save
    verified_bytes: int = 0  # of a conversion: read back and compared

    @property
    def done_bytes(self) -> int:
        """Return the bytes that are in the store."""
        return self.written_bytes + self.copied_bytes + self.reused_bytes

    @property
    def what(self) -> str:
        """Return the noun for people: save or conversion."""
        return "conversion" if self.source else "save"

    @property
    def place(self) -> str:
        """Return the URI that is written, and the one that a conversion reads."""
        return f"{self.uri} from {self.source}" if self.source else self.uri

    @property
    def is_over(self) -> bool:
        """Return whether nothing follows."""
        return self.state not in UNDER_WAY

    @property
    def model(self) -> str:
        """Return the label of the model in metrics. A training state has that of its model."""
        return model_label(_TRAINING.sub("", self.uri))


@dataclass(frozen=True, slots=True)
class SaveStatus(Jsonable):
    """One save, as `cluster.status` shows it."""

    progress: SaveProgress
    silent_s: float = 0.0  # since its last report; 0 when it has ended
    ended_age_s: float = 0.0  # how long ago it ended


@dataclass(frozen=True, slots=True)
class SaveNow:
    """A save, with the times of what it did."""

    progress: SaveProgress
    model: str  # the label's value
    heard_s: float
    moved_s: float  # when it last wrote a byte or changed its state
    log: EventLog = field(default_factory=EventLog)


class Saves:
    """The saves that run, and those that ended within KEPT_S."""

    def __init__(
        self,
        add: Callable[[Family, tuple[str, ...], float], None],
        observe: Callable[[Family, tuple[str, ...], float], None],
    ) -> None:
        """`add(metric, labels, value)` adds to a counter, `observe` to a histogram."""
        self._add, self._observe = add, observe
        self._labels = BoundedLabels()  # apart from those of loads: a run may save to a new URI each time
        self._saves: dict[str, SaveNow] = {}

    def now(self) -> tuple[SaveNow, ...]:
        """Return every save that is known."""
        return tuple(self._saves.values())

    def find(self, save_id: str) -> SaveNow | None:
        """Return a save by its id."""
        return self._saves.get(save_id)

    def received(self, progress: SaveProgress, now_s: float, at_s: float) -> tuple[LoadEvent, ...]:
        """Take a report in, and return the events that it brings. One that is late or repeated changes nothing.

        `at_s`: seconds since the epoch.
        """
        save = self._saves.get(progress.save_id)
        if progress.reporter:
            if save is None:
                return ()
            known = save.progress
            progress = replace(
                known,
                number=known.number + 1,
                state=FAILED,
                error=progress.error,
                message=progress.message,
                failed_rank=progress.failed_rank,
                elapsed_s=known.elapsed_s + now_s - save.heard_s,
            )
        if save is None:
            save = self._begun(progress, now_s, at_s)
            last = 0
        elif save.progress.is_over or progress.number <= save.progress.number:
            return ()
        else:
            last = save.log.last_number
            self._moved(save, progress, now_s, at_s)
        return save.log.after(last)

    def look(self, now_s: float, at_s: float) -> tuple[tuple[SaveProgress, LoadEvent], ...]:
        """Note which saves are lost, and forget those that ended long ago. Return the events of the lost ones."""
        found: list[tuple[SaveProgress, LoadEvent]] = []
        for save_id, save in list(self._saves.items()):
            if save.progress.is_over:
                if now_s - save.heard_s > KEPT_S:
                    del self._saves[save_id]
            elif now_s - save.heard_s > LOST_S:
                who = "its process" if save.progress.source else "rank 0"
                lost = replace(
                    save.progress,
                    number=save.progress.number + 1,
                    state=LOST,
                    message=f"{who} has not reported for {LOST_S:.0f} s",
                    failed_rank=None if save.progress.source else 0,
                    elapsed_s=save.progress.elapsed_s + now_s - save.heard_s,
                )
                last = save.log.last_number
                self._moved(save, lost, now_s, at_s)
                found += [(lost, event) for event in save.log.after(last)]
        return tuple(found)

    def status(self, now_s: float) -> tuple[SaveStatus, ...]:
        """Return the status of every save."""
        found = []
        for save in self._saves.values():
            since_s = now_s - save.heard_s
            if save.progress.is_over:
                found.append(SaveStatus(save.progress, ended_age_s=since_s))
            else:
                progress = replace(save.progress, elapsed_s=save.progress.elapsed_s + since_s)
                found.append(SaveStatus(progress, silent_s=since_s))
        return tuple(found)

    def _begun(self, progress: SaveProgress, now_s: float, at_s: float) -> SaveNow:
        label = self._labels(progress.model)
        save = self._saves[progress.save_id] = SaveNow(progress, label, now_s, now_s)
        while len(self._saves) > MOST_SAVES:
            ended = (save_id for save_id, each in self._saves.items() if each.progress.is_over)
            del self._saves[next(ended, next(iter(self._saves)))]
        for outcome in OUTCOMES:  # Prometheus sees a counter grow only if it was there before
            self._add(metrics.SAVES_FINISHED, (label, outcome), 0)
        # What an earlier coordinator has counted is not counted again.
        first = SaveProgress(progress.save_id, 0, progress.uri, PLANNING, progress.ranks)
        self._count_bytes(label, first, progress if progress.number == 1 else first)
        how = "has begun" if progress.number == 1 else "goes on; the coordinator was restarted"
        save.log.add(
            at_s,
            "save",
            f"a {progress.what} {how}: {progress.place}, {progress.ranks} {'workers' if progress.source else 'ranks'}",
            rank=0,
            host=progress.host,
            state=progress.state,
            uri=progress.uri,
        )
        if progress.is_over:
            self._ended(save, progress, at_s)
        return save

    def _moved(self, save: SaveNow, progress: SaveProgress, now_s: float, at_s: float) -> None:
        before = save.progress
        self._count_bytes(save.model, before, progress)
        is_moved = (progress.state, progress.done_bytes, progress.verified_bytes) != (
            before.state,
            before.done_bytes,
            before.verified_bytes,
        )
        moved_s = now_s if is_moved else save.moved_s
        self._saves[progress.save_id] = replace(save, progress=progress, heard_s=now_s, moved_s=moved_s)
        if progress.is_over:
            self._ended(save, progress, at_s)
        elif progress.state != before.state:
            save.log.add(at_s, "save", f"{before.state} -> {progress.state}", state=progress.state)

    def _ended(self, save: SaveNow, progress: SaveProgress, at_s: float) -> None:
        label = save.model
        self._add(metrics.SAVES_FINISHED, (label, progress.state), 1)
        self._observe(metrics.SAVE_DURATION, (label, progress.state), progress.elapsed_s)
        if progress.state == PUBLISHED:
            save.log.add(
                at_s,
                "save",
                f"published as revision {progress.revision[:12]}: {show_bytes(progress.total_bytes)}, of these "
                f"{show_bytes(progress.written_bytes)} written, {show_bytes(progress.copied_bytes)} copied in the "
                f"store, {show_bytes(progress.reused_bytes)} skipped",
                state=progress.state,
                uri=progress.uri,
                revision=progress.revision,
                size_bytes=progress.total_bytes,
                written_bytes=progress.written_bytes,
                copied_bytes=progress.copied_bytes,
                reused_bytes=progress.reused_bytes,
            )
            return
        self._add(metrics.SAVE_FAILURES, (label, progress.error or "unknown"), 1)
        save.log.add(
            at_s,
            "save",
            f"the {progress.what} {'is lost' if progress.state == LOST else 'failed'}: {progress.message}",
            rank=progress.failed_rank,
            state=FAILED,
            uri=progress.uri,
            error=progress.error,
        )

    def _count_bytes(self, label: str, before: SaveProgress, now: SaveProgress) -> None:
        for what in ("written", "copied", "reused"):
            name = f"{what}_bytes"
            grown = getattr(now, name) - getattr(before, name)  # negative: the save began anew
            self._add(metrics.SAVE_BYTES, (label, what), max(0, grown))
