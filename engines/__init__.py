"""Plug-ins: models from a store in the engines that people run.

They read with `actors.reader`, without Ray; only `ray_serve` needs it. Each module needs its engine, and is imported by
that engine or by the user. Importing this package costs nothing. `transformers` has a function like `from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from logging import Logger
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Return the future result of `work`, which runs in a thread of its own. The end of the process does not wait."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="longshore-open", daemon=True).start()
    return future


def warn_of_version(engine: str, version: str, tested: tuple[str, str], log: Logger) -> None:
    """Log a warning for a version of an engine that is older or newer than those that tests have run.

    `tested`: the oldest and the newest of them, such as "0.29".
    """
    oldest, newest = (tuple(map(int, text.split("."))) for text in tested)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and not oldest <= numbers <= newest:
        log.warning("%s %s was not tested with Longshore; %s and %s were", engine, version, *tested)
