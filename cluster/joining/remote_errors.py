"""Errors that come back from actors, and from Ray itself."""

from __future__ import annotations

from cluster.errors import ClusterError
from storage.errors import LongshoreError


def unwrapped(error: BaseException) -> LongshoreError:
    """The typed error in what a remote call raised; what nobody foresaw becomes a ClusterError that names it."""
    # The cause first: Ray's own wrapper is of the cause's class too, says a traceback and does not pickle.
    for found in (getattr(error, "cause", None), error):
        if isinstance(found, LongshoreError):
            return found
    cause = getattr(error, "cause", None) or error
    return ClusterError("a remote call failed", cause=f"{type(cause).__name__}: {cause}"[:500])
