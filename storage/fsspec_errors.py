"""Whatever a file system of fsspec raised, as an error of ours."""

from __future__ import annotations

from typing import Any

from storage.errors import (
    AccessDenied,
    ObjectNotFound,
    ProxyRefused,
    RangeMismatch,
    StoreError,
    StoreUnavailable,
    Throttled,
)
from storage.problems import without_secrets
from storage.proxies import proxy_refusal
from storage.retrying import passing_refusal


def printable_cause(error: Exception) -> Exception:
    """Return what an error of ours is raised from: a library's error may quote a URL with a token in it."""
    return RuntimeError(f"{type(error).__name__}: {without_secrets(str(error))}").with_traceback(error.__traceback__)


def translated(error: Exception, uri: str, key: str | None) -> StoreError:
    """Our error for whatever a file system raised. Its text is not quoted: URLs in it may carry tokens."""
    if isinstance(error.__cause__, StoreError):
        return error.__cause__  # of the limits that we set, with a file system's own error round it
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        # fsspec's http says "not found" of every failure and keeps the true one as the cause.
        cause = translated(error.__cause__, uri, key)
        if isinstance(cause, AccessDenied | ProxyRefused | StoreUnavailable) or "certificate" in cause.message:
            return cause
    where: dict[str, Any] = {"uri": uri, "key": key, "cause": type(error).__name__}
    status = next((s for s in (getattr(error, n, None) for n in ("status", "code", "status_code")) if s), None)
    if isinstance(status, str) and status.isdigit():
        status = int(status)
    if status == 407:
        return proxy_refusal(status, **where)
    code = str(getattr(error, "error_code", None) or "")  # Azure's
    passing = passing_refusal(status if isinstance(status, int) else 0, code)
    if passing is Throttled:
        return Throttled("the store asks for fewer requests", status=status, **where)
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError) or status in (404, 410):
        return ObjectNotFound("no such object", **where)
    if isinstance(error, PermissionError) or status in (401, 403):
        return AccessDenied("the store refused access", hint="check the credentials for this store", **where)
    if status == 416:
        return RangeMismatch("range reaches past the object's end", **where)
    if "Certificate" in type(error).__name__:
        return StoreError("the store's certificate is not trusted", hint="name your CA's PEM file", **where)
    # Errors of connections are no OSErrors in aiohttp and in httpx, with which huggingface_hub asks.
    of_client = type(error).__module__.startswith(("aiohttp", "httpx", "httpcore"))
    is_transport = isinstance(error, OSError | EOFError) or (of_client and type(error).__name__ != "HTTPStatusError")
    if is_transport or passing is not None:
        return StoreUnavailable("the store could not be reached or failed", status=status, **where)
    if isinstance(error, NotImplementedError):
        return StoreError("this kind of store cannot do that", **where)
    return StoreError("the store refused the request", **where)
