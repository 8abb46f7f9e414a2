"""All private or undocumented names of botocore that Longshore uses. No other module uses any.

    signatures    S3SigV4Auth with another clock; the headers and requests that are signed; the CAs that botocore trusts
    answers       the client's HTTP session, wrapped by our own session, with our own connection classes in its pools
    events        before-call, request-created and needs-retry are not documented by botocore; before-send is
    components    the parsed descriptions of S3, shared by all clients of a process

If a name is missing, DependencyChanged is raised when this module is imported, or when the name is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import botocore.loaders
import botocore.session

from storage.private_names import PrivateName, attribute

if TYPE_CHECKING:
    from botocore.auth import SIGV4_TIMESTAMP, S3SigV4Auth
    from botocore.awsrequest import (
        AWSHTTPConnection as AWSHTTPConnection,
    )
    from botocore.awsrequest import (
        AWSHTTPConnectionPool as AWSHTTPConnectionPool,
    )
    from botocore.awsrequest import (
        AWSHTTPSConnection as AWSHTTPSConnection,
    )
    from botocore.awsrequest import (
        AWSHTTPSConnectionPool as AWSHTTPSConnectionPool,
    )
    from botocore.awsrequest import (
        AWSRequest as AWSRequest,
    )
    from botocore.awsrequest import (
        AWSResponse as AWSResponse,
    )
    from botocore.compat import HTTPHeaders as HTTPHeaders
    from botocore.httpsession import get_cert_path as get_cert_path
    from mypy_boto3_s3.client import S3Client


_BOUNDS, _SIGNING = "bounding the store's answers", "signing reads"
NAMES = (
    PrivateName("botocore.auth", "SIGV4_TIMESTAMP", _SIGNING),
    PrivateName("botocore.auth", "S3SigV4Auth", _SIGNING),
    PrivateName("botocore.auth", "S3SigV4Auth._modify_request_before_signing", "signing by the store's clock"),
    PrivateName("botocore.awsrequest", "AWSHTTPConnection", _BOUNDS),
    PrivateName("botocore.awsrequest", "AWSHTTPConnectionPool", _BOUNDS),
    PrivateName("botocore.awsrequest", "AWSHTTPSConnection", _BOUNDS),
    PrivateName("botocore.awsrequest", "AWSHTTPSConnectionPool", _BOUNDS),
    PrivateName("botocore.awsrequest", "AWSRequest", _SIGNING),
    PrivateName("botocore.awsrequest", "AWSResponse", "asking where a bucket is"),
    PrivateName("botocore.compat", "HTTPHeaders", "asking where a bucket is"),
    PrivateName("botocore.httpsession", "get_cert_path", "trusting the CAs that botocore trusts"),
)
if not TYPE_CHECKING:
    # Looked up by name, because an ImportError in the middle of a load would not say what to do.
    globals().update({each.name: found for each in NAMES if (found := each.find()) and "." not in each.name})

_RETRY_EVENT = "needs-retry.s3"  # a handler that returns a number of seconds causes another try after that time
_SIGNED_EVENT = "request-created.s3"
_CALL_EVENT = "before-call.s3"


class OffsetAuth(S3SigV4Auth):
    """A SigV4 signer that uses another clock than this machine's."""

    def __init__(self, credentials: Any, service_name: str, region_name: str, clock_offset_s: float) -> None:
        super().__init__(credentials, service_name, region_name)
        self._clock_offset_s = clock_offset_s

    def _modify_request_before_signing(self, request: AWSRequest) -> None:
        if self._clock_offset_s:
            now = datetime.now(UTC) + timedelta(seconds=self._clock_offset_s)
            request.context["timestamp"] = now.strftime(SIGV4_TIMESTAMP)
        super()._modify_request_before_signing(request)  # type: ignore[misc]


def on_signed(client: S3Client, sign_again: Callable[..., None]) -> None:
    """Call `sign_again(request)` for every request of the client, after botocore has signed it."""
    client.meta.events.register_last(_SIGNED_EVENT, sign_again)


def on_refused(client: S3Client, pause_s: Callable[[int, Mapping[str, Any], int], float | None]) -> None:
    """Call `pause_s(status, parsed answer, tries so far)` after each answer of the client. None means no other try."""

    def decide(response: Any, attempts: int, **_: Any) -> float | None:
        return None if response is None else pause_s(response[0].status_code, response[1], attempts)

    events: Any = client.meta.events  # the stubs do not know handlers that return a value
    events.register(_RETRY_EVENT, decide)


def follow_no_redirects(client: S3Client, operation: str) -> None:
    """Stop the client from following redirects of that operation, by marking its one redirect as used."""

    def mark(model: Any, context: dict[str, Any], **_: Any) -> None:
        if model.name == operation:
            context.setdefault("s3_redirect", {})["redirected"] = True

    client.meta.events.register(_CALL_EVENT, mark)


def replace_http_session(client: S3Client, pools: Mapping[str, type[Any]], wrap: Callable[[Any], Any]) -> None:
    """Replace the client's HTTP session by `wrap(session)`, and its connection pools by `pools` (by scheme)."""
    endpoint = attribute(client, "botocore.client", "BaseClient._endpoint", _BOUNDS)
    session = attribute(endpoint, "botocore.endpoint", "Endpoint.http_session", _BOUNDS)
    attribute(session, "botocore.httpsession", "URLLib3Session._pool_classes_by_scheme", _BOUNDS)
    session._pool_classes_by_scheme = dict(pools)
    for manager in _managers(session):
        manager.pool_classes_by_scheme = session._pool_classes_by_scheme
    endpoint.http_session = wrap(session)


def close_idle_connections(session: Any) -> None:
    """Close the idle connections of an HTTP session now; otherwise they stay open while an old error refers to them."""
    for manager in _managers(session):
        for key in manager.pools.keys():  # noqa: SIM118  # it cannot be iterated
            if (pool := manager.pools.get(key)) is not None:
                pool.close()


def _managers(session: Any) -> list[Any]:
    own = attribute(session, "botocore.httpsession", "URLLib3Session._manager", _BOUNDS)
    proxies = attribute(session, "botocore.httpsession", "URLLib3Session._proxy_managers", _BOUNDS)
    return [own, *proxies.values()]


def share_service_models(core: botocore.session.Session) -> None:
    """Let this session share S3 descriptions that are parsed once per process, the largest cost of a client."""
    core.register_component("data_loader", _service_models(core.get_config_variable("data_path")))


@functools.cache
def _service_models(data_path: str | None) -> Any:
    return botocore.loaders.create_loader(data_path)
