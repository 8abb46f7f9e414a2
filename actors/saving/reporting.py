"""Reports of a save or a conversion to the coordinator, for metrics, events and the page.

    rank 0, each REPORT_S and at the end --SaveProgress--> coordinator
    the last rank, if rank 0 has died     --the error---->

A save needs no cluster and no coordinator. If its process is connected to a Ray cluster in which a coordinator runs,
the save is reported there. A thread of its own does that, so a coordinator that does not answer delays nothing but the
last report, by END_S at most. Nothing that goes wrong here reaches the save.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from actors.links import COORDINATOR, NAMESPACE, group_of_worker
from cluster.messages import pack_message
from cluster.telemetry.saves import FAILED, PLANNING, PUBLISHED, SaveProgress
from storage.problems import printable_uri, without_secrets

REPORT_S = 1.0
ANSWER_S = 5.0  # an answer that takes longer is not waited for
END_S = 2.0  # the longest time that the last report may delay the end of a save
LAST_TRIES = 10  # of the last report; the process need not wait for them
_LOG = logging.getLogger("longshore.save")


class SaveReporter:
    """Reports one save of one rank. Rank 0 reports from the start; the others know only the save's id.

    As a context manager it reports that what raises in its block has failed.
    """

    def __init__(self, uri: str, rank: int, ranks: int, started_s: float, *, source: str = "") -> None:
        """Begin to report.

        Args:
            uri: Where the checkpoint is written.
            rank: Number of this rank; 0 in the process that converts.
            ranks: Number of ranks, or of the workers of a conversion.
            started_s: When the save began, by the monotonic clock.
            source: URI that a conversion reads. Default: this is a save.
        """
        self._about = SaveProgress("", 1, printable_uri(uri), PLANNING, ranks, socket.gethostname())
        self._about = replace(self._about, reporter=rank, source=printable_uri(source))
        self.save_id = _save_id(self._about) if rank == 0 and _is_connected() else ""
        self._about = replace(self._about, save_id=self.save_id)
        self._started_s = started_s
        self._now: Callable[[], dict[str, Any]] = dict
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if self.save_id:
            self._thread = self._new_thread()
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(error)

    def enter(self, state: str, now: Callable[[], dict[str, Any]] = dict) -> None:
        """Note the save's state. `now` returns fields of `SaveProgress`; it is called when a report is made.

        Fields of earlier states are reported as before.
        """
        before = self._now
        self._now = lambda: {**before(), **now(), "state": state}

    def known_as(self, save_id: str) -> None:
        """Take the id of the save from rank 0. "": rank 0 does not report."""
        self.save_id = save_id

    def published(self, **fields: Any) -> None:
        """Report that the save is published. Returns after END_S at most."""
        self._end(state=PUBLISHED, **fields)

    def failed(self, error: BaseException) -> None:
        """Report that the save failed. Returns after END_S at most."""
        rank = getattr(error, "details", {}).get("rank", None if self._about.source else self._about.reporter)
        message = without_secrets(str(error) or type(error).__name__)
        is_last = self._about.reporter == self._about.ranks - 1
        if self._thread is None and is_last and rank == 0 and self.save_id and _is_connected():
            self._about = replace(self._about, save_id=self.save_id)
            self._thread = self._new_thread()  # started when it has the error
        self._end(state=FAILED, error=type(error).__name__, message=message, failed_rank=rank)

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="save-report", daemon=True)

    def _start(self) -> None:
        try:
            if self._thread is not None:
                self._thread.start()
        except RuntimeError:  # the process may have no more threads
            self._thread = None

    def _end(self, **fields: Any) -> None:
        if self._thread is not None and not self._is_over.is_set():
            now = self._now
            self._now = lambda: {**now(), **fields}
            self._is_over.set()
            if self._thread.ident is None:
                self._start()
        if self._thread is not None:
            self._thread.join(END_S)

    def _run(self) -> None:
        try:
            import ray

            # Asked once: a call that needs Ray's head may end the process when the head is gone.
            coordinator: Any = ray.get_actor(COORDINATOR, namespace=NAMESPACE)
            context: Any = ray.get_runtime_context()
            is_worker = getattr(getattr(context, "worker", None), "mode", None) == ray.WORKER_MODE
            group = group_of_worker(context.get_actor_name() or "") or "" if is_worker else ""
        except Exception as error:  # no coordinator runs, or the connection is closed
            _LOG.debug("the save is not reported: %s", error)
            return
        number = tries = 1
        while tries <= LAST_TRIES:
            is_over = self._is_over.is_set()
            elapsed_s = time.monotonic() - self._started_s
            try:
                about = replace(self._about, number=number, elapsed_s=elapsed_s, worker_group=group, **self._now())
                ray.get(coordinator.save_progress.remote(pack_message(about)), timeout=ANSWER_S)
            except Exception as error:  # the coordinator is restarted, busy, or of another version
                _LOG.debug("a report of the save was lost: %s", error)
                tries += is_over
            else:
                if is_over:
                    return
                number += 1
            if is_over:
                time.sleep(REPORT_S)
            else:
                self._is_over.wait(REPORT_S)


def _is_connected() -> bool:
    """Return whether this process is connected to a Ray cluster. Imports nothing."""
    ray: Any = sys.modules.get("ray")
    with contextlib.suppress(Exception):
        return bool(ray is not None and ray.is_initialized())
    return False


def _save_id(about: SaveProgress) -> str:
    """Return a readable id, unique for each save: "save-run-7-3f9a21c4", "conversion-run-7-04be71d2"."""
    return f"{about.what}-{about.model.lower()[:32]}-{uuid.uuid4().hex[:8]}"
