"""Plug-ins: models from a store in the engines that people run.

They read with `actors.reader`, without Ray; only `ray_serve` needs it. Each module needs its engine, and is imported by
that engine or by the user. Importing this package costs nothing. `transformers` has a function like `from_pretrained`.
"""

from __future__ import annotations

from logging import Logger


def warn_of_version(engine: str, version: str, tested: tuple[str, str], log: Logger) -> None:
    """Log a warning for a version of an engine that is older or newer than those that tests have run.

    `tested`: the oldest and the newest of them, such as "0.29".
    """
    oldest, newest = (tuple(map(int, text.split("."))) for text in tested)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and not oldest <= numbers <= newest:
        log.warning("%s %s was not tested with Longshore; %s and %s were", engine, version, *tested)
