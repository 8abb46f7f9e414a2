"""Waiting for a load that the coordinator works on, through restarts of the coordinator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cluster.connection import Connection
from cluster.errors import ClusterLost, LoadCancelled, LoadForgotten, LoadTimeout, ModelNotFound
from cluster.joining.patience import Patience
from cluster.load_request import LoadRequest
from cluster.reports.report import LoadProgress, LoadReport
from storage.errors import LongshoreError

EARLY = ("", "planning", "waiting", "starting")  # nothing moves yet: to ask anew costs nothing
TRIES = 5  # of a load that was forgotten; each is one coordinator's
REBUILD_GRACE_S = 20.0  # a restarted coordinator has heard every agent again by then
RELEASED_S = 2.0  # a caller that waits no more waits no longer than that for its hold to be taken back


def load_on(
    connection: Connection,
    request: LoadRequest,
    progress: Callable[[LoadProgress], None] | None,
    patience: Patience,
    *,
    called_s: float,
) -> tuple[str, LoadReport]:
    """(the model's id, the load's report): ask for a load and wait until it is ready; this client holds it then.

    `called_s`: when the user asked, on the monotonic clock. Raises as `wait_until_ready` does; nothing is held or asked
    for any more then. A KeyboardInterrupt has a note of what goes on in the cluster.
    """
    connect_s = time.monotonic() - called_s
    request = replace(request, client_id=connection.client_id)
    tries_left = TRIES
    while True:
        tries_left -= 1
        try:
            model_id, shared = connection.call("load", request, patience=patience)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(_what_goes_on(connection, request, ""))
            raise
        connection.hold(model_id, request.store)
        try:
            report, waited = wait_until_ready(connection, model_id, progress, patience)
            total_s = time.monotonic() - called_s
            return model_id, report.as_seen(total_s, connect_s, shared=shared, waited=waited)
        except LoadForgotten:  # by a coordinator that was killed before any agent knew of it
            connection.drop(model_id)
            if not tries_left:
                raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                error.add_note(_what_goes_on(connection, request, model_id))
            if connection.drop(model_id):
                with contextlib.suppress(LongshoreError):  # unheard, the hold lapses by itself
                    soon = Patience(time.monotonic() + RELEASED_S)
                    connection.call("release", model_id, connection.client_id, patience=soon)
            raise


def _what_goes_on(connection: Connection, request: LoadRequest, model_id: str) -> str:
    """Of a load that is interrupted here, in words. `model_id`: empty while the coordinator has not answered."""
    if connection.local:
        return "the local cluster that was started for the load ends with this process, and the load with it"
    how = f"`longshore status` shows it, `longshore release {model_id or 'MODEL_ID'}` ends it"
    if request.keep:
        begun = "the load goes on in the cluster" if model_id else "a load that the cluster has begun goes on there"
        return f"{begun}: {how}"
    if model_id:
        return "the load ends in the cluster, unless another process wants it"
    return f"a load that the cluster has begun ends there within a minute: {how} at once"


def wait_until_ready(
    connection: Connection,
    model_id: str,
    progress: Callable[[LoadProgress], None] | None,
    patience: Patience,
) -> tuple[LoadReport, bool]:
    """(the report, whether there was anything to wait for).

    Raises the load's error, LoadTimeout and LoadCancelled as `patience` says, ClusterLost; LoadForgotten when it had
    not begun to move.
    """
    seen, waited, state = -1, False, ""
    details: dict[str, Any] = {"model": model_id}
    unknown_since_s: float | None = None
    while True:
        try:
            seen, now, report, error = connection.call("wait", model_id, seen, patience.left_s(1.0), patience=patience)
            unknown_since_s = None
        except (LoadTimeout, LoadCancelled) as error:
            raise error.with_details(**details) from None
        except ModelNotFound as error:
            # A restarted coordinator does not know the load before the agents have told it.
            if state in EARLY:
                raise LoadForgotten(
                    "the coordinator was lost before the load had begun, and again when it was asked anew",
                    hint="see the coordinator's log in Ray's session folder; out of memory is the usual cause",
                    model=model_id,
                ) from error
            unknown_since_s = unknown_since_s or time.monotonic()
            if time.monotonic() - unknown_since_s > REBUILD_GRACE_S:
                raise ClusterLost(
                    "the cluster has forgotten the load: its coordinator and its agents were lost together",
                    hint="load again; chunks that the arena still has are not fetched again",
                    model=model_id,
                ) from error
            patience.sleep(0.2)
            continue
        state = now.state
        if progress is not None and (report is not None or now.state != "ready"):  # else its figures are not all in
            progress(now)
        if error is not None:
            raise error
        if report is not None and now.state == "ready":
            return report, waited
        waited = True
        details.update(state=now.state, placed_bytes=now.placed_bytes, total_bytes=now.total_bytes)
