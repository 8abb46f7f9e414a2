"""Waiting for a load that the coordinator works on, through restarts of the coordinator."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from cluster.connection import Connection
from cluster.errors import ClusterLost, LoadCancelled, LoadForgotten, LoadTimeout, ModelNotFound
from cluster.load_request import LoadRequest
from cluster.reports.report import LoadProgress, LoadReport
from storage.errors import LongshoreError

EARLY = ("", "planning", "waiting", "starting")  # nothing moves yet: to ask anew costs nothing
TRIES = 5  # of a load that was forgotten; each is one coordinator's
REBUILD_GRACE_S = 20.0  # a restarted coordinator has heard every agent again by then


def load_on(
    connection: Connection,
    request: LoadRequest,
    progress: Callable[[LoadProgress], None] | None,
    given_up: threading.Event | None,
    *,
    called_s: float,
    timeout_s: float | None,
) -> tuple[str, LoadReport]:
    """(the model's id, the load's report): ask for a load and wait until it is ready; this client holds it then.

    `called_s`: when the user asked, on the monotonic clock. Raises as `wait_until_ready` does; nothing is held or asked
    for any more then.
    """
    connect_s = time.monotonic() - called_s
    deadline_s = None if timeout_s is None else called_s + timeout_s
    request = replace(request, client_id=connection.client_id)
    tries_left = TRIES
    while True:
        tries_left -= 1
        model_id, shared = connection.call("load", request)
        connection.hold(model_id, request.store.credentials)
        try:
            report, waited = wait_until_ready(connection, model_id, progress, deadline_s, given_up)
            total_s = time.monotonic() - called_s
            return model_id, report.as_seen(total_s, connect_s, shared=shared, waited=waited)
        except LoadForgotten:  # by a coordinator that was killed before any agent knew of it
            connection.drop(model_id)
            if not tries_left:
                raise
        except BaseException:
            with contextlib.suppress(LongshoreError):
                if connection.drop(model_id):
                    connection.call("release", model_id, connection.client_id)
            raise


def wait_until_ready(
    connection: Connection,
    model_id: str,
    progress: Callable[[LoadProgress], None] | None,
    deadline_s: float | None,
    given_up: threading.Event | None,
) -> tuple[LoadReport, bool]:
    """(the report, whether there was anything to wait for). `deadline_s` is on the monotonic clock.

    Raises the load's error, LoadTimeout at the deadline, LoadCancelled when `given_up` is set, ClusterLost;
    LoadForgotten when it had not begun to move.
    """
    seen, waited, state = -1, False, ""
    unknown_since_s: float | None = None
    while True:
        left_s = 1.0 if deadline_s is None else min(1.0, max(0.0, deadline_s - time.monotonic()))
        try:
            seen, now, report, error = connection.call("wait", model_id, seen, left_s)
            unknown_since_s = None
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
            time.sleep(0.2)
            continue
        state = now.state
        if progress is not None and (report is not None or now.state != "ready"):  # else its figures are not all in
            progress(now)
        if error is not None:
            raise error
        if report is not None and now.state == "ready":
            return report, waited
        waited = True
        if given_up is not None and given_up.is_set():
            raise LoadCancelled("the caller gave the load up", model=model_id)
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise LoadTimeout(
                "the load did not end in time",
                hint="it goes on only when the model is kept or somebody else waits for it",
                model=model_id,
                state=now.state,
                placed_bytes=now.placed_bytes,
                total_bytes=now.total_bytes,
            )
