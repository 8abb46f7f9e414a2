"""Proxies and TLS settings for every connection that Longshore opens itself.

    HTTPS_PROXY, HTTP_PROXY    the proxy for requests by https and by http: http://[user:password@]host[:port]
    NO_PROXY                   hosts, domains or host:port that need no proxy, separated by commas; "*" for all

The names may also be in lower case, which takes precedence. `urllib.request` reads them, for botocore as well. So reads
of weights use the same proxy as listings, stats and uploads. No message contains the user or the password.
"""

from __future__ import annotations

import base64
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from storage.errors import InvalidUri, ProxyRefused, StoreError
from storage.stores.requests import passing_refusal


def host_and_port(host: str, port: int) -> str:
    """Return host:port, with an IPv6 address in brackets."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy. Its str and repr contain no credentials."""

    host: str
    port: int
    user: str | None = field(default=None, repr=False)
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"http://{host_and_port(self.host, self.port)}"

    def secret_url(self) -> str:
        """Return the URL with user and password, for libraries that accept no other form."""
        credentials = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@" if self.user is not None else ""
        return f"http://{credentials}{str(self).removeprefix('http://')}"

    def headers(self) -> dict[str, str]:
        """Return the headers that are sent to the proxy and not to the server."""
        if self.user is None:
            return {}
        token = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        return {"Proxy-Authorization": f"Basic {token}"}


def find_proxy(url: str) -> Proxy | None:
    """Return the proxy for requests to `url`, or None if the environment names none for it.

    Args:
        url: scheme, host and optionally port of the server; the rest is ignored.

    Raises:
        InvalidUri: the variable does not hold the URL of a usable proxy.
    """
    parts = urlsplit(url)
    named = getproxies().get(parts.scheme)
    if not named or proxy_bypass(parts.netloc):
        return None
    try:
        proxy = urlsplit(named if "://" in named else f"http://{named.removeprefix('//')}")
        usable = proxy.scheme == "http" and bool(proxy.hostname)
        port = proxy.port or 80
    except ValueError:
        usable = False
    if not usable:
        raise InvalidUri(
            f"{parts.scheme.upper()}_PROXY is not the URL of a usable proxy",
            hint="write http://host:port; a proxy that is itself reached by https or SOCKS is not supported",
        )
    user = unquote(proxy.username) if proxy.username else None
    return Proxy(str(proxy.hostname), port, user, unquote(proxy.password or ""))


def proxy_refusal(status: int, **where: Any) -> StoreError:
    """Return the error for a proxy that answered with `status` instead of passing a request on."""
    if status == 407:
        return ProxyRefused(
            "the proxy requires a user and a password, or refused those that were sent",
            hint="write them into HTTPS_PROXY or HTTP_PROXY, percent-encoded: http://user:password@host:port",
            status=status,
            **where,
        )
    if (passing := passing_refusal(status)) is not None:
        return passing("the proxy could not reach the store", status=status, **where)
    return ProxyRefused(
        "the proxy refused to pass the request on",
        hint="allow the store's host and port at the proxy, or list the host in NO_PROXY",
        status=status,
        **where,
    )


def tls_context(ca_bundle: str | None, uri: str) -> ssl.SSLContext:
    """Return a TLS context that trusts the CAs in that PEM file, or the system's. Raises StoreError, naming `uri`."""
    try:
        return ssl.create_default_context(cafile=ca_bundle)
    except (OSError, ssl.SSLError) as error:
        raise StoreError(
            "the CA bundle cannot be read",
            hint="ca_bundle must name a PEM file with certificates, readable on this host",
            ca_bundle=ca_bundle,
            uri=uri,
        ) from error
