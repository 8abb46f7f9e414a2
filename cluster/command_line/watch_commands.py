"""Verbs that follow a cluster: `status --watch` and `events`. Each returns its exit code.

Both go on over a coordinator that is killed and restarted, and end with ClusterLost when none comes back.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Protocol

from cluster.command_line.answers import FAILED, OK, line_of_event, print_json, reader_left, write
from cluster.command_line.progress import write_line
from cluster.errors import ConfigError, ModelNotFound, NoCoordinator

if TYPE_CHECKING:
    from cluster.command_line.watch_view import Look
    from cluster.telemetry.chunk_map import LoadEvent
    from cluster.telemetry.report import ClusterStatus


WAIT_S = 2.0  # for news of a load, in one call; how it stands is asked in between
OVER = ("failed", "released")


class _Watch(Protocol):
    """A view of looks. Both calls return whether a reader is still there."""

    def show(self, look: Look) -> bool: ...

    def silence(self, silent_s: float) -> bool: ...


def watch_status(args: argparse.Namespace) -> int:
    """Show the cluster until interrupted, or until nobody reads any more. Raises ClusterLost, VersionMismatch.

    Where nothing was loaded yet it waits for the first load.
    """
    from cluster.command_line.watch_view import JsonWatch, LineWatch, Looks, looks_in_thread

    found = looks_in_thread(_from_first_load(Looks(args.address).look, args.watch), args.watch)
    with closing(found), ExitStack() as stack:
        watch: _Watch
        if args.json:
            watch = JsonWatch()
        elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":  # one that cannot move its cursor
            from cluster.command_line.watch_view import TerminalWatch

            watch = stack.enter_context(TerminalWatch(sys.stdout))
        else:
            watch = LineWatch()
        for look in found:
            if not (watch.silence(look) if isinstance(look, float) else watch.show(look)) or reader_left():
                break
    return OK


def _from_first_load(look: Callable[[], Look], interval_s: float) -> Callable[[], Look]:
    """The same; but where nothing was loaded in the cluster yet the first look waits until something is."""
    seen = False

    def patient_look() -> Look:
        nonlocal seen
        announced = False
        while True:
            try:
                found = look()
                seen = True
                return found
            except NoCoordinator:
                if seen:  # it was shut down
                    raise
            if not announced:
                write_line(sys.stderr, "longshore: nothing was loaded in this cluster yet; waiting for the first load")
            announced = True
            time.sleep(interval_s)

    return patient_look


def run_events(args: argparse.Namespace) -> int:
    """Print a load's events, with --follow or --until as they happen. Return FAILED if the awaited state is missed."""
    from cluster import client

    if args.follow or args.until is not None:
        args.follow, args.until = True, args.until or "end"
        return _follow(args)
    try:
        events = client.events(args.load, after=args.after, address=args.address)
    except ModelNotFound:
        args.load = _full_id(args)
        events = client.events(args.load, after=args.after, address=args.address)
    if args.json:
        print_json({"model_id": args.load, "events": [event.as_dict() for event in events]})
    else:
        _say_what_is_missing(args.after, events)
        write("".join(f"{line_of_event(event)}\n" for event in events))
    return OK


def _follow(args: argparse.Namespace) -> int:
    from cluster import client

    after, incarnation = args.after, ""
    known = named = False
    while True:
        try:
            events = client.events(args.load, after=after, wait_s=WAIT_S, address=args.address)
            status = client.status(args.address)
        except ModelNotFound:
            if known:
                return _end(args, _FORGOTTEN)
            if named:
                raise
            named, args.load = True, _full_id(args)
            continue
        known = True
        _say_what_is_missing(after, events)
        if not _put(args, events) or reader_left():
            return OK
        after = events[-1].number if events else after
        if incarnation not in ("", status.coordinator_incarnation):
            after = 0  # a coordinator that was restarted counts from 1 again
            write_line(sys.stderr, "longshore: the coordinator was restarted; its events are numbered from 1 again")
        elif not events and _is_over((now := _now(status, args.load))[1], args.until):
            return _end(args, now)
        incarnation = status.coordinator_incarnation


def _full_id(args: argparse.Namespace) -> str:
    from cluster import client

    return full_id(args.load, client.status(args.address))


def _put(args: argparse.Namespace, events: Sequence[LoadEvent]) -> bool:
    """False when nobody reads any more."""
    lines = (json.dumps(event.as_dict(), default=str) if args.json else line_of_event(event) for event in events)
    return write("".join(f"{line}\n" for line in lines))


def _end(args: argparse.Namespace, now: tuple[str, str, str]) -> int:
    """Report the end of a load or a save."""
    what, state, error = now
    if args.json:
        write(json.dumps({"kind": "end", "state": state, "error": error}) + "\n")
    if state in ("ready", "published") or (args.until == "end" and state == "released"):
        return OK
    failed = f"the {what} failed: {error}" if error else f"the {what} failed"
    write_line(sys.stderr, f"longshore: {'the load was released' if state == 'released' else failed}")
    return FAILED


_FORGOTTEN = ("load", "released", "")  # minutes after its end


def _now(status: ClusterStatus, load_id: str) -> tuple[str, str, str]:
    """Return what the id is (load, save or conversion), its state and its error."""
    for save in status.saves:
        if save.progress.save_id == load_id:
            return save.progress.what, save.progress.state, save.progress.message
    for model in status.listed:
        if model.progress.model_id == load_id:
            return "load", model.progress.state, model.error
    return _FORGOTTEN


def _is_over(state: str, until: str) -> bool:
    return state in (*OVER, "published", "lost") or (until == "ready" and state == "ready")


def _say_what_is_missing(after: int, events: Sequence[LoadEvent]) -> None:
    if events and events[0].number > after + 1:
        write_line(sys.stderr, f"longshore: events {after + 1} to {events[0].number - 1} are kept no longer")


_OVER = ("failed", "released")
SHOWN = 5


def full_id(given: str, status: ClusterStatus) -> str:
    """The id that is meant; `given` itself when nothing begins so. Those that are over count when no other does.

    Raises ConfigError when several may be meant. Pure.
    """
    states = {model.progress.model_id: model.progress.state for model in status.listed}
    states |= {save.progress.save_id: "failed" if save.progress.is_over else "" for save in status.saves}
    if given in states or not given:
        return given
    found = [model_id for model_id in states if model_id.startswith(given)]
    found = [model_id for model_id in found if states[model_id] not in _OVER] or found
    if len(found) > 1:
        names = ", ".join(found[:SHOWN]) + ", ..." * (len(found) > SHOWN)
        raise ConfigError(f"{len(found)} loads begin so: {names}", hint="give more of the id", load=given)
    return found[0] if found else given
