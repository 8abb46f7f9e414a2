"""What an HTTP server may make us do: no redirect to another place, no answer larger than what was asked for.

    ask --> redirect? --on_request_redirect--> same host, and not from https to http: followed; else StoreError
        --> body      --BoundedResponse.read--> the range's bytes at most (MAX_PAGE_BYTES without one); or RangeMismatch

aiohttp is imported where it is needed: few loads come over plain HTTP.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urljoin

from storage.errors import RangeMismatch, StoreError
from storage.proxies import find_proxy
from storage.source_rules import origin
from storage.store_ref import StoreRef
from storage.tls import tls_context

MAX_PAGE_BYTES = 64 << 20  # of an answer to a request without a range: a folder's page of links
MAX_ERROR_BYTES = 64 << 10  # of a refusal's body
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})")


def stays_at_home(asked_url: str, target_url: str) -> bool:
    """Whether a redirect leads to the same host: same port, or from http's to https's. Never from https to http."""
    try:
        old, new = origin(asked_url), origin(target_url)
    except ValueError:
        return False
    return new == old or (old.endswith(":80") and new == f"https{old[4:-3]}:443")


def most_bytes(range_header: str | None) -> int:
    """How much a good answer to a request with that Range header may have."""
    match = _RANGE.fullmatch(range_header or "")
    return int(match[2]) - int(match[1]) + 1 if match else MAX_PAGE_BYTES


def bounded_session_options() -> dict[str, Any]:
    """What `aiohttp.ClientSession` takes to keep these rules. Raises ImportError."""
    import aiohttp

    class BoundedResponse(aiohttp.ClientResponse):
        """Reads no more than was asked for, whatever length the server promises or sends."""

        async def read(self) -> bytes:
            if self._body is None:
                refused = self.status >= 400
                most = MAX_ERROR_BYTES if refused else most_bytes(self.request_info.headers.get("Range"))
                pieces: list[bytes] = []
                received_bytes = 0
                async for piece in self.content.iter_chunked(1 << 20):
                    received_bytes += len(piece)
                    if received_bytes > most:
                        self.close()
                        if refused:  # the status says enough
                            break
                        raise RangeMismatch("the answer is longer than what was asked for", at_most_bytes=most)
                    pieces.append(piece)
                self._body = b"".join(pieces)
            return await super().read()

    async def refuse_others(session: Any, context: Any, params: Any) -> None:
        target = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
        if not stays_at_home(str(params.response.url), urljoin(str(params.response.url), target)):
            raise StoreError("the store sends requests elsewhere", hint="use the URI of the place it sends them to")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse_others)
    # Nobody asked for compressed bytes, and a few of them can stand for any number.
    return {"response_class": BoundedResponse, "trace_configs": [trace], "auto_decompress": False}


def http_options(ref: StoreRef, read_timeout_s: float, connect_timeout_s: float) -> dict[str, Any]:
    """What fsspec's HTTP file system takes to keep these rules and times."""
    try:
        import aiohttp
    except ImportError:
        return {}  # url_to_fs says what is missing
    timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s, sock_read=read_timeout_s)
    # Compressed answers have other bytes and lengths than the object.
    options: dict[str, Any] = {
        "client_kwargs": {"timeout": timeout, **bounded_session_options()},
        "headers": {"Accept-Encoding": "identity"},
        "encoded": True,  # by _path
    }
    if (proxy := find_proxy(ref.uri)) is not None:
        options["client_kwargs"]["proxy"] = proxy.secret_url()
    if ref.ca_bundle:
        options["ssl"] = tls_context(ref.ca_bundle, ref.uri)
    return options
