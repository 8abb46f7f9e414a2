"""Which code this is, and which messages it speaks."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PROTOCOL_VERSION = 5  # of the messages between client, coordinator, agents and workers: +1 when they change


def _installed_version() -> str:
    try:
        return version("longshore")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"


__version__ = _installed_version()

# What two processes say first. Always a number and a text, so that every version can read it.
VERSION = (PROTOCOL_VERSION, __version__)
