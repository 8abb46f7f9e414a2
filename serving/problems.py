"""Errors as answers: RFC 9457 problem details. One table from the error tree to the status."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response

from cluster.errors import (
    ClusterError,
    ConfigError,
    LoadError,
    LoadTimeout,
    ModelNotFound,
    PlanError,
)
from storage.errors import (
    AccessDenied,
    CheckpointError,
    IntegrityError,
    InvalidKey,
    InvalidUri,
    LongshoreError,
    ManifestError,
    ObjectNotFound,
    SourceRefused,
    StoreError,
    UnsupportedStore,
)

MEDIA_TYPE = "application/problem+json"

# An error has the status of its nearest class in this table.
STATUS: dict[type[BaseException], HTTPStatus] = {
    ConfigError: HTTPStatus.UNPROCESSABLE_ENTITY,
    InvalidUri: HTTPStatus.UNPROCESSABLE_ENTITY,
    InvalidKey: HTTPStatus.UNPROCESSABLE_ENTITY,
    UnsupportedStore: HTTPStatus.UNPROCESSABLE_ENTITY,
    PlanError: HTTPStatus.UNPROCESSABLE_ENTITY,  # does not fit, cannot be cut
    CheckpointError: HTTPStatus.UNPROCESSABLE_ENTITY,
    ManifestError: HTTPStatus.UNPROCESSABLE_ENTITY,
    SourceRefused: HTTPStatus.FORBIDDEN,
    ModelNotFound: HTTPStatus.NOT_FOUND,
    ObjectNotFound: HTTPStatus.NOT_FOUND,
    AccessDenied: HTTPStatus.BAD_GATEWAY,  # the store refused us, not the caller
    StoreError: HTTPStatus.BAD_GATEWAY,
    IntegrityError: HTTPStatus.BAD_GATEWAY,
    ClusterError: HTTPStatus.SERVICE_UNAVAILABLE,
    LoadTimeout: HTTPStatus.GATEWAY_TIMEOUT,
    LoadError: HTTPStatus.INTERNAL_SERVER_ERROR,
    LongshoreError: HTTPStatus.INTERNAL_SERVER_ERROR,
}


class Json(JSONResponse):
    """In ASCII: names that others made up may hold what JSON can spell and UTF-8 cannot, and one such is no reason that
    nobody hears of the rest."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def status_of(error: BaseException) -> HTTPStatus:
    """500 for what nobody foresaw."""
    found = (STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    return next(found, HTTPStatus.INTERNAL_SERVER_ERROR)


def problem_of(error: BaseException) -> Response:
    """The answer to a request that ended with `error`. Of what nobody foresaw the caller learns the kind alone."""
    status = status_of(error)
    if not isinstance(error, LongshoreError):
        return problem(status, type(error).__name__, "something went wrong that was not foreseen; the log has it")
    details = json.loads(json.dumps(error.details, default=str), parse_constant=str)  # (NaN is no JSON)
    return problem(status, type(error).__name__, error.message, hint=error.hint, details=details)


def problem(
    status: HTTPStatus, kind: str, detail: str, *, headers: dict[str, str] | None = None, **more: Any
) -> Response:
    """`kind` names the problem for programs; members that are empty are left out."""
    body = {"type": f"urn:longshore:problem:{kind}", "title": status.phrase, "status": int(status), "detail": detail}
    return Json(
        {**body, **{name: value for name, value in more.items() if value}},
        status_code=int(status),
        headers=headers,
        media_type=MEDIA_TYPE,
    )
