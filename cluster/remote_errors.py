"""Errors that come back from actors, and from Ray itself."""

from __future__ import annotations

from cluster.errors import ClusterError
from storage.errors import LongshoreError


def unwrapped(error: BaseException) -> LongshoreError:
    """The typed error in what a remote call raised; what nobody foresaw becomes a ClusterError that names it."""
    for found in (error, getattr(error, "cause", None)):
        # Ray's own wrapper is of the cause's class too, and does not pickle: the cause inside is what is wanted.
        if isinstance(found, LongshoreError) and not hasattr(found, "traceback_str"):
            return found
    cause = getattr(error, "cause", None) or error
    return ClusterError("a remote call failed", cause=f"{type(cause).__name__}: {cause}"[:500])
