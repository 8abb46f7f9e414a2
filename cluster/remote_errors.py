"""Errors that come back from actors."""

from __future__ import annotations

from cluster.errors import ClusterError
from storage.errors import LongshoreError


def unwrapped(error: Exception) -> Exception:
    """The typed error that an actor raised, out of Ray's wrapping."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, LongshoreError):
        return cause
    return ClusterError("an actor failed", cause=f"{type(cause).__name__}: {cause}"[:500])
