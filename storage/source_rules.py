"""Which places may be read from: the operator's lists of schemes, endpoints and buckets. Pure.

    schemes      always a list; DEFAULT_SCHEMES leaves out what opens local files, archives or other machines' shells
                 under another name (fsspec knows some thirty schemes, and chains of them)
    endpoints    "any", or scheme://host[:port] of servers, and "default" for the one of the node's AWS configuration or
                 environment
    buckets      "any", or names of buckets and containers

A client checks its own settings, the coordinator its own again: the second decides, whatever a client sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from storage.errors import SourceRefused
from storage.problems import printable_uri, quote
from storage.store_ref import ALIASES, WHO_OPTIONS, Credentials, StoreRef, environment_endpoint
from storage.stores.connections import host_and_port

DEFAULT_SCHEMES = "file,s3,gs,az,hf,http,https,memory"
ANY = "any"
DEFAULT_ENDPOINT = "default"
_PORTS = {"http": 80, "https": 443}
_IN_NO_BUCKET = {"file", "memory", "http", "https"}
_OFF_THE_NET = {"file", "memory"}


@dataclass(frozen=True, slots=True)
class SourceRules:
    """What is allowed. None: anything."""

    schemes: frozenset[str] | None = frozenset(DEFAULT_SCHEMES.split(","))
    endpoints: frozenset[str] | None = None  # scheme://host:port, or DEFAULT_ENDPOINT
    buckets: frozenset[str] | None = None

    @classmethod
    def parse(cls, schemes: str, endpoints: str, buckets: str) -> SourceRules:
        """From lists as settings have them, separated by commas. Raises ValueError that names what cannot be meant."""
        names = _listed(schemes.lower())
        places = _listed(endpoints)
        return cls(
            None if names is None else frozenset(ALIASES.get(name, name) for name in names),
            None if places is None else frozenset(map(_endpoint, places)),
            _listed(buckets),
        )

    def check(self, ref: StoreRef, credentials: Credentials | None = None) -> None:
        """Raises SourceRefused for a place that is not allowed. Asks no store."""
        if self.schemes is not None and ref.scheme not in self.schemes:
            raise SourceRefused(
                f"the scheme {ref.scheme[:40]!r} is not allowed",
                hint="LONGSHORE_ALLOWED_SCHEMES lists those that are, on the coordinator's node and here",
                allowed=",".join(sorted(self.schemes)),
            )
        if self.endpoints is not None and ref.scheme not in _OFF_THE_NET:
            found = _endpoint_of(ref)
            if found not in self.endpoints:
                raise SourceRefused(
                    "this endpoint is not allowed",
                    hint="LONGSHORE_ALLOWED_ENDPOINTS lists those that are",
                    endpoint=found,
                )
        if self.buckets is not None and ref.scheme not in _IN_NO_BUCKET and ref.bucket not in self.buckets:
            raise SourceRefused(
                "this bucket is not allowed", hint="LONGSHORE_ALLOWED_BUCKETS lists those that are", bucket=ref.bucket
            )
        options = credentials.fsspec_options if credentials is not None else {}
        odd = sorted(k for k, v in options.items() if k not in WHO_OPTIONS or not isinstance(v, str | bool))
        if odd and (self.endpoints is not None or self.buckets is not None):
            raise SourceRefused(
                "with a list of allowed endpoints or buckets, options may say who asks and nothing else",
                options=",".join(name[:40] for name in odd[:8]),
            )


def origin(url: str) -> str:
    """scheme://host:port of a URL, in one spelling. Raises ValueError."""
    try:
        parts = urlsplit(url)
    except ValueError:  # its message may quote what stands before an @
        parts = urlsplit("")
    if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None or parts.password is not None:
        raise ValueError(f"not a server: {quote(printable_uri(url))}; write https://host or http://host:port")
    host = parts.hostname.rstrip(".").lower()
    return f"{parts.scheme}://{host_and_port(host, parts.port or _PORTS[parts.scheme])}"


def with_own_endpoint(endpoints: str, environ: Mapping[str, str]) -> str:
    """Return the list, with the endpoint that the AWS variables of `environ` name where `default` is on it.

    Requests carry that endpoint, as nodes may have another environment. So `default` covers it in the environment that
    the list comes from, and in no other.
    """
    if DEFAULT_ENDPOINT not in (part.strip() for part in endpoints.split(",")):
        return endpoints
    try:
        own = origin(environment_endpoint(environ) or "")
    except ValueError:  # none, or one with which no store could be opened
        return endpoints
    return f"{endpoints},{own}"


def _listed(text: str) -> frozenset[str] | None:
    names = frozenset(part.strip() for part in text.split(","))
    if names == {ANY}:
        return None
    if "" in names or ANY in names:
        raise ValueError(f"write `{ANY}`, or names separated by commas")
    return names


def _endpoint(text: str) -> str:
    if text == DEFAULT_ENDPOINT:
        return text
    found = origin(text)
    if urlsplit(text).path.strip("/") or "?" in text or "#" in text:
        raise ValueError(f"not a server: {quote(printable_uri(text))}; a server has no path here")
    return found


def _endpoint_of(ref: StoreRef) -> str:
    """Where requests for `ref` go; what cannot be told is no endpoint that a list could have."""
    try:
        if ref.scheme in _PORTS:
            return origin(f"{ref.scheme}://{ref.bucket}")
        return origin(ref.endpoint_url) if ref.endpoint_url else DEFAULT_ENDPOINT
    except ValueError:
        return ""
