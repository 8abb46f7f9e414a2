"""The place of a model, the credentials to read it, and the rules for which places are allowed.

    parse_uri("s3://models/llama", endpoint_url=...) -> StoreRef      names a place; contains no secrets

A StoreRef is parsed once and sent to every node, which opens it (`storage.stores.open_store`). It contains everything
that decides *which* bytes are meant, endpoint and region included. So nodes with different environments open the same
store, and it can be part of a cache key. Credentials are sent separately.

SourceRules are the operator's lists of places that may be read. Pure.

    schemes      always a list; DEFAULT_SCHEMES omits schemes that open local files, archives or other machines' shells
                 under another name (fsspec knows some thirty schemes, and chains of them)
    endpoints    "any", or scheme://host[:port] of servers, and "default" for the one of the node's AWS configuration or
                 environment
    buckets      "any", or names of buckets and containers

The client checks its own rules, and then the coordinator checks its own. The coordinator's rules decide.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from storage.errors import InvalidUri, SourceRefused, StoreError, UnsupportedStore
from storage.problems import printable_uri, quote
from storage.stores.requests import host_and_port

AddressingStyle = Literal["auto", "path", "virtual"]

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]{0,40})://")
_BUCKET = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._\-]{1,254}$")  # wider than S3 allows, because other servers accept more
_FROM_ABOVE = re.compile(r"^(?:\.{1,2}(?:/+|$))+")
ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
# fsspec options that only identify the caller. All others may name another host, a proxy or a second file system.
WHO_OPTIONS = frozenset({"token", "key", "secret", "project", "anon", "account_key", "sas_token"})
_WITHOUT_BUCKET = {"file", "memory"}  # everything after the scheme is a path


@dataclass(frozen=True, slots=True)
class StoreRef:
    """The root below which keys are stored. Hashable, picklable, without secrets."""

    scheme: str  # "s3", "file", or any scheme that fsspec knows
    bucket: str  # bucket, container, host or repository owner; "" for file and memory
    prefix: str  # key prefix without slashes at its ends; an absolute path for file
    endpoint_url: str | None = None  # None: from the AWS configuration of the node that opens it, else the provider's
    region: str | None = None
    profile: str | None = None  # name of a profile in the AWS configuration of the node that opens it
    addressing_style: AddressingStyle = "auto"
    anonymous: bool = False  # requests are not signed
    ca_bundle: str | None = None  # path of a PEM file, on the node that opens it
    options: str = ""  # the result of `Credentials.place`, if its options decide where the store is

    @property
    def uri(self) -> str:
        """Return the root for messages and for `parse_uri`: "s3://bucket/prefix"."""
        if self.scheme == "file":
            return f"file://{self.prefix}"
        return f"{self.scheme}://{'/'.join(part for part in (self.bucket, self.prefix) if part)}"

    def identity(self) -> str:
        """Return a stable string for cache keys, made from what decides which bytes a key names, not from who reads.

        The profile counts for S3 without an endpoint, because it may name one.
        """
        profile = (self.profile or "") if self.scheme == "s3" and not self.endpoint_url else ""
        endpoint = [self.scheme, self.endpoint_url or (profile and f"profile {profile}"), self.region or ""]
        parts = [*endpoint, self.bucket, self.prefix, *filter(None, [self.options])]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def child(self, path: str) -> StoreRef:
        """Return the ref of a folder below this one. `path` is relative and checked like a URI's."""
        if path.startswith("/"):
            raise StoreError(f"not a relative path: {quote(path)}", hint="write the path without a leading slash")
        _refuse_climbing(path, path)
        return replace(self, prefix="/".join(part for part in (self.prefix.rstrip("/"), path.strip("/")) if part))


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """Secrets for one store. They can be pickled, because messages contain them, but no repr shows them."""

    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    fsspec_options: dict[str, Any] = field(default_factory=dict)  # passed to the fsspec file system unchanged

    def __repr__(self) -> str:
        kinds = [name for name in ("access_key_id", "fsspec_options") if getattr(self, name)]
        return f"Credentials(<{', '.join(kinds) or 'none'}, redacted>)"

    __str__ = __repr__

    def place(self) -> str:
        """Return a digest of the options that may decide where the store is; "" if there are none."""
        options = sorted((name, value) for name, value in self.fsspec_options.items() if name not in WHO_OPTIONS)
        if not options:
            return ""
        text = json.dumps(options, skipkeys=True, default=lambda value: type(value).__qualname__)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The place of a model and how to read it. The repr of the credentials shows none."""

    ref: StoreRef
    credentials: Credentials | None = None  # None: the node's own (environment, profile, instance role)

    def without_credentials(self) -> StoreAccess:
        """Return the access to save or keep. Credentials that a client passed are in messages only."""
        return StoreAccess(self.ref)


def path_of(uri: str) -> str:
    """Return the path of a store's URI without scheme and bucket, which is the same for every mirror of a model.

    A whole bucket has no path, so its name is returned.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, path = ("", "", rest) if scheme in _WITHOUT_BUCKET else rest.partition("/")
    return path.strip("/") or bucket


def parse_uri(
    uri: str,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    addressing_style: AddressingStyle = "auto",
    anonymous: bool = False,
    ca_bundle: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> StoreRef:
    """Return the place that a URI or a plain local path names.

    For s3, the standard variables AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION and AWS_DEFAULT_REGION of `environ`
    (default: the process's) supply what is not given. So nodes with another environment open the same place. Profile
    and CA bundle are those of the node that opens it.

    Raises InvalidUri for a URI with a user, a password, a query or a fragment. Raises StoreError for a URI without a
    bucket, or with `..` anywhere except at the start of a relative path. Raises UnsupportedStore for chained URIs
    ("a::b://").
    """
    environ = os.environ if environ is None else environ
    check_printable(uri)
    match = _SCHEME.match(uri)
    if not uri or "\0" in uri:
        raise StoreError("the URI is empty or contains a zero byte", hint="write s3://bucket/prefix or a local path")
    if match is None and "://" in uri:
        raise UnsupportedStore(
            f"not a URI: {quote(uri.split('://')[0])} is not a scheme",
            hint="write one plain URI; chained URIs (with '::') are not supported",
        )
    if match is None:
        return _file_ref(os.path.expanduser(uri), uri)
    scheme = ALIASES.get(match[1].lower(), match[1].lower())
    rest = uri[match.end() :]
    if "::" in rest and scheme not in ("s3", "file"):
        # fsspec would take the text after '::' for a second file system, of any scheme.
        raise UnsupportedStore(
            "chained URIs (with '::') are not supported",
            hint="name the place of the files with one plain URI",
            scheme=scheme[:40],
        )
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost"):
            raise StoreError(f"a file URI names another host: {quote(host)}", hint="write file:///absolute/path")
        return _file_ref(unquote(slash + path), uri)
    bucket, _, prefix = rest.partition("/")
    _refuse_climbing(prefix if scheme not in _WITHOUT_BUCKET else rest, f"{scheme}://{rest}")
    if scheme in _WITHOUT_BUCKET:
        return StoreRef(scheme, "", rest.strip("/"))
    if scheme in ("http", "https"):
        try:
            has_host = bool(urlsplit(uri).hostname)
        except ValueError:  # "http://[host"
            has_host = False
        if not has_host:
            raise StoreError("an http URI must be a folder: host and path", hint=f"write {scheme}://host/path")
        return StoreRef(scheme, bucket, prefix.strip("/"), ca_bundle=ca_bundle)
    if not bucket:
        raise StoreError(f"no bucket in the URI {quote(uri)}", hint=f"write {scheme}://bucket/prefix")
    if scheme != "s3":
        checked = _check_endpoint(endpoint_url) if endpoint_url else None
        return StoreRef(scheme, bucket, prefix.strip("/"), endpoint_url=checked, anonymous=anonymous)
    if not _BUCKET.match(bucket):
        raise StoreError(f"not a bucket name: {quote(bucket)}")
    endpoint_url = endpoint_url or environment_endpoint(environ)
    return StoreRef(
        scheme,
        bucket,
        prefix.strip("/"),
        endpoint_url=_check_endpoint(endpoint_url) if endpoint_url else None,
        region=region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or None,
        profile=profile,
        addressing_style=addressing_style,
        anonymous=anonymous,
        ca_bundle=ca_bundle,
    )


def check_printable(uri: str) -> None:
    """Raise InvalidUri for a URI that may contain a secret. The message contains nothing that may be secret."""
    shown = printable_uri(uri)
    if shown != uri:
        raise InvalidUri(
            "a URI must not contain a user, password, query or fragment",
            hint="presigned and SAS URLs name one object: write the folder's URI, such as s3://bucket/prefix, and pass"
            " credentials separately or in the environment; in the path of file:// write %3F for ? and %23 for #",
            uri=quote(shown),
        )


def environment_endpoint(environ: Mapping[str, str]) -> str | None:
    """Return the S3 endpoint in AWS's standard variables, unchecked; None if they name none."""
    if environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return None
    return environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None


def _file_ref(path: str, written: str) -> StoreRef:
    """Return the ref of a local path. It may begin with `..`, but must not contain it later."""
    _refuse_climbing(_FROM_ABOVE.sub("", path) if path == written else path, written)
    return StoreRef("file", "", os.path.abspath(path))


def _refuse_climbing(path: str, written: str) -> None:
    """Raise StoreError for '..' in a path, also percent-encoded, because a server may decode it."""
    if ".." in re.split(r"[/\\]", path) or ".." in re.split(r"[/\\]", unquote(path)):
        raise StoreError(f"'..' in {quote(written)}", hint="write the path without it")


def _check_endpoint(endpoint_url: str) -> str:
    try:
        parts = urlsplit(endpoint_url)
        port_ok = parts.port is None or 0 < parts.port < 65536
    except ValueError:
        port_ok = False
    if not port_ok or parts.scheme not in ("http", "https") or not parts.hostname:
        raise StoreError(
            "not an endpoint URL",
            hint="write http://host:port or https://host; without an endpoint_url, AWS_ENDPOINT_URL_S3 and"
            " AWS_ENDPOINT_URL are used",
        )
    if printable_uri(endpoint_url) != endpoint_url:
        raise StoreError(
            "an endpoint URL must not contain a user, password, query or fragment", hint="pass credentials separately"
        )
    return endpoint_url.rstrip("/")


DEFAULT_SCHEMES = "file,s3,gs,az,hf,http,https,memory"
ANY = "any"
DEFAULT_ENDPOINT = "default"
_PORTS = {"http": 80, "https": 443}
_IN_NO_BUCKET = {"file", "memory", "http", "https"}
_OFF_THE_NET = {"file", "memory"}


@dataclass(frozen=True, slots=True)
class SourceRules:
    """The places that may be read. None allows any."""

    schemes: frozenset[str] | None = frozenset(DEFAULT_SCHEMES.split(","))
    endpoints: frozenset[str] | None = None  # scheme://host:port, or DEFAULT_ENDPOINT
    buckets: frozenset[str] | None = None

    @classmethod
    def parse(cls, schemes: str, endpoints: str, buckets: str) -> SourceRules:
        """Return the rules from comma-separated lists of the settings. Raises ValueError, naming an invalid entry."""
        names = _listed(schemes.lower())
        places = _listed(endpoints)
        return cls(
            None if names is None else frozenset(ALIASES.get(name, name) for name in names),
            None if places is None else frozenset(map(_endpoint, places)),
            _listed(buckets),
        )

    def check(self, ref: StoreRef, credentials: Credentials | None = None) -> None:
        """Raise SourceRefused for a place that is not allowed. Sends no request."""
        if self.schemes is not None and ref.scheme not in self.schemes:
            raise SourceRefused(
                f"the scheme {ref.scheme[:40]!r} is not allowed",
                hint="LONGSHORE_ALLOWED_SCHEMES lists the allowed schemes, on the coordinator's node and here",
                allowed=",".join(sorted(self.schemes)),
            )
        if self.endpoints is not None and ref.scheme not in _OFF_THE_NET:
            found = _endpoint_of(ref)
            if found not in self.endpoints:
                raise SourceRefused(
                    "this endpoint is not allowed",
                    hint="LONGSHORE_ALLOWED_ENDPOINTS lists the allowed endpoints",
                    endpoint=found,
                )
        if self.buckets is not None and ref.scheme not in _IN_NO_BUCKET and ref.bucket not in self.buckets:
            raise SourceRefused(
                "this bucket is not allowed",
                hint="LONGSHORE_ALLOWED_BUCKETS lists the allowed buckets",
                bucket=ref.bucket,
            )
        options = credentials.fsspec_options if credentials is not None else {}
        odd = sorted(k for k, v in options.items() if k not in WHO_OPTIONS or not isinstance(v, str | bool))
        if odd and (self.endpoints is not None or self.buckets is not None):
            raise SourceRefused(
                "if endpoints or buckets are restricted, options may only contain credentials",
                options=",".join(name[:40] for name in odd[:8]),
            )


def origin(url: str) -> str:
    """Return scheme://host:port of a URL in one spelling. Raises ValueError."""
    try:
        parts = urlsplit(url)
    except ValueError:  # its message may quote the text before an @
        parts = urlsplit("")
    if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None or parts.password is not None:
        raise ValueError(f"not a server: {quote(printable_uri(url))}; write https://host or http://host:port")
    host = parts.hostname.rstrip(".").lower()
    return f"{parts.scheme}://{host_and_port(host, parts.port or _PORTS[parts.scheme])}"


def with_own_endpoint(endpoints: str, environ: Mapping[str, str]) -> str:
    """Return the list, plus the endpoint of the AWS variables in `environ` if `default` is in the list.

    Requests contain that endpoint, because nodes may have another environment. So `default` covers the endpoint of the
    environment that the list comes from, and no other.
    """
    if DEFAULT_ENDPOINT not in (part.strip() for part in endpoints.split(",")):
        return endpoints
    try:
        own = origin(environment_endpoint(environ) or "")
    except ValueError:  # no endpoint, or an invalid one, with which no store can be opened
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
    """Return the endpoint of requests for `ref`; "", which no list can contain, if it is unknown."""
    try:
        if ref.scheme in _PORTS:
            return origin(f"{ref.scheme}://{ref.bucket}")
        return origin(ref.endpoint_url) if ref.endpoint_url else DEFAULT_ENDPOINT
    except ValueError:
        return ""
