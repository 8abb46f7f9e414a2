"""Limits in front of every route, also of those that do not exist: access, rate and size of requests.

host        without a token, only by the names of this machine, and where only this machine listens: a page of somebody
            else's that a browser of ours opened could otherwise reach the service under a name of its own (DNS
            rebinding)
origin      without a token, no page of another site asks for more than our page's files. What was refused until here
            is not counted: else such a page could use up what its reader may ask
rate        so many requests a minute for each caller
token       compared in constant time; the page's own files and the health checks need none
body        no longer than allowed, whatever its length says, and there in time
"""

from __future__ import annotations

import asyncio
import hmac
import importlib.resources
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.schemas import problem
from serving.settings import ServingSettings, digest_of, is_loopback

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_NAMES = ("index.html", "page.css", "page.js", "api.js", "chunks.js", "dom.js", "rate.js", "ranks.js")

PATHS = {"/" if name == "index.html" else f"/{name}": name for name in _NAMES}


def read_page() -> dict[str, tuple[bytes, str]]:
    """path -> (content, media type)."""
    folder = importlib.resources.files("serving") / "page"
    return {path: ((folder / name).read_bytes(), _TYPES[name.rpartition(".")[2]]) for path, name in PATHS.items()}


OPEN_PATHS = frozenset({*PATHS, "/healthz", "/readyz"})
CALLERS = 4096  # remembered at once
BODY_S = 10.0  # by then a request's body is there: who sends it slowly holds a place that others wait for
BODIES = 64  # on their way at once
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


class Rates:
    """A bucket of requests for each caller, refilled over a minute."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # caller -> (requests left, when)

    def wait_s(self, caller: str) -> float:
        """0: the caller may ask now, and has. Else seconds until it may."""
        now_s = self._clock()
        left, then_s = self._left.pop(caller, (float(self._per_minute), now_s))
        left = min(float(self._per_minute), left + (now_s - then_s) * self._per_minute / 60)
        allowed = left >= 1
        self._left[caller] = (left - 1 if allowed else left, now_s)
        while len(self._left) > CALLERS:
            self._left.popitem(last=False)
        return 0.0 if allowed else (1 - left) * 60 / self._per_minute


class Access:
    """ASGI middleware: see above."""

    def __init__(self, app: ASGIApp, settings: ServingSettings) -> None:
        self._app = app
        self._settings = settings
        self._rates = Rates(settings.requests_per_minute)
        self._bodies = 0  # on their way
        self._hosts = frozenset(name.strip().lower() for name in settings.allowed_hosts.split(",")) - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = [(n.encode(), v.encode()) for n, v in SECURITY_HEADERS.items() if n.encode() not in own]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if refusal is not None:
            await refusal(scope, receive, send_safely)
            return
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            await self._app(scope, receive, send_safely)
            return
        if self._bodies >= BODIES:
            await _too_many({"retry-after": f"{BODY_S:.0f}"})(scope, receive, send_safely)
            return
        self._bodies += 1
        body = _Body(receive, self._settings.body_bytes, self._arrived)
        try:
            await self._app(scope, body.receive, send_safely)
        finally:
            body.end()

    def _arrived(self) -> None:
        self._bodies -= 1

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        settings, path = self._settings, scope["path"]
        if not settings.token_sha256 and (stranger := self._strange(scope, headers)) is not None:
            return stranger
        given = _bearer(headers.get("authorization", ""))
        known = bool(settings.token_sha256) and hmac.compare_digest(digest_of(given), settings.token_sha256)
        client = scope.get("client")
        caller = f"{'token ' if known else ''}{client[0] if client else ''}"
        if (wait_s := self._rates.wait_s(caller)) > 0:
            return _too_many({"retry-after": str(max(1, round(wait_s)))})
        if settings.token_sha256 and not known and path not in OPEN_PATHS:
            challenge = {"www-authenticate": 'Bearer realm="longshore"'}
            text = "the token is not the service's" if given else "a bearer token is needed"
            return problem(HTTPStatus.UNAUTHORIZED, "Unauthorized", text, headers=challenge)
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            return problem(HTTPStatus.BAD_REQUEST, "BadLength", "not a content length")
        return _too_large(settings.body_bytes) if int(length[:20]) > settings.body_bytes else None

    def _strange(self, scope: Scope, headers: Headers) -> Response | None:
        """Return why this request is refused where no token is set."""
        here = scope.get("server")
        if here and here[1] is not None and not is_loopback(str(here[0])):  # (a Unix socket has no port)
            return problem(
                HTTPStatus.FORBIDDEN,
                "ListensBeyond",
                "without a token the service answers where only its own machine can reach it",
                hint="LONGSHORE_HTTP_TOKEN sets a token, for whatever host Ray Serve was told to listen on",
            )
        if _host(headers.getlist("host")) not in self._hosts:
            return problem(
                HTTPStatus.FORBIDDEN,
                "HostRefused",
                "without a token the service answers to the names of its own machine only",
                hint="LONGSHORE_HTTP_ALLOWED_HOSTS lists them; LONGSHORE_HTTP_TOKEN sets a token",
            )
        if scope["path"] not in OPEN_PATHS and _foreign(headers):
            return problem(HTTPStatus.FORBIDDEN, "OriginRefused", "a page of another origin may not ask this")
        return None


class _Body:
    """More came than was announced or allowed, or it took too long: the route that reads it ends with that."""

    def __init__(self, receive: Receive, most_bytes: int, arrived: Callable[[], None]) -> None:
        self._receive = receive
        self._left_bytes = most_bytes
        self._arrived = arrived
        self._ended = False
        self._give_up_s = asyncio.get_running_loop().time() + BODY_S

    async def receive(self) -> Message:
        if self._ended:  # what comes now is the client's going away, whenever that is
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._give_up_s):
                message = await self._receive()
        except TimeoutError as error:
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, f"the body was not there after {BODY_S:.0f} s") from error
        if not message.get("more_body", False):
            self.end()
        self._left_bytes -= len(message.get("body", b""))
        if self._left_bytes < 0:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request's body may not be so long")
        return message

    def end(self) -> None:
        """It is there, or nobody waits for it any more."""
        if not self._ended:
            self._ended = True
            self._arrived()


def _too_many(headers: dict[str, str]) -> Response:
    return problem(HTTPStatus.TOO_MANY_REQUESTS, "TooManyRequests", "too many requests", headers=headers)


def _too_large(most_bytes: int) -> Response:
    return problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BodyTooLarge", f"a request may have {most_bytes} bytes at most"
    )


def _bearer(header: str) -> str:
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _host(given: list[str]) -> str:
    """Without its port; nothing when it is none, or several."""
    found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^\[\]:@/]+)(?::[0-9]*)?", given[0].lower()) if len(given) == 1 else None
    return found[1] if found else ""


def _foreign(headers: Headers) -> bool:
    """Return whether a browser marks the request as one from another site's page."""
    origin = headers.get("origin", "")
    if origin and origin != "null":
        return origin.partition("://")[2].lower() != headers.get("host", "").lower()
    return origin == "null" or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
