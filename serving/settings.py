"""Settings of the HTTP service, read once from `LONGSHORE_HTTP_*`. The token itself is never kept, only its digest."""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cluster.errors import ConfigError
from storage.store_ref import SourceRules, with_own_endpoint

ENV_PREFIX = "LONGSHORE_HTTP_"
TOKEN_VARIABLE = f"{ENV_PREFIX}TOKEN"
SHORTEST_TOKEN = 16  # characters: shorter ones are guessed
SCHEMES = "s3,gs,az,hf"  # no local files: whoever may call the service is not whoever may read its disk


class ServingSettings(BaseModel):
    """Each is `LONGSHORE_HTTP_<NAME>` too. Travels to the replicas, so nothing in it is a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    host: str = "127.0.0.1"  # beyond this machine only when told so, and then with a token
    port: int = Field(8000, ge=1, le=65535)
    token_sha256: str = ""  # of the bearer token, hex; empty: no token is asked for
    allowed_hosts: str = "localhost,127.0.0.1,[::1]"  # names by which requests may call the service without a token
    schemes: str = SCHEMES  # of model URIs
    endpoints: str = "default"  # servers that may be named in requests, as LONGSHORE_ALLOWED_ENDPOINTS lists them
    buckets: str = "any"
    body_bytes: int = Field(256 << 10, ge=1 << 10, le=16 << 20)  # largest request body
    requests_per_minute: int = Field(600, ge=1)  # of one caller
    streams: int = Field(64, ge=1, le=1000)  # event streams open at once
    loads: int = Field(16, ge=1, le=256)  # begun through one replica and not ready yet
    plans: int = Field(2, ge=1, le=16)  # worked out at once: a large one takes seconds of a processor

    @field_validator("schemes", "endpoints", "buckets")
    @classmethod
    def _lists(cls, value: str, info: Any) -> str:
        SourceRules.parse(**{"schemes": "any", "endpoints": "any", "buckets": "any", info.field_name: value})
        return value

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> ServingSettings:
        """Settings of the environment, then `overrides` that are not None. Raises ConfigError."""
        environ = os.environ if environ is None else environ
        names = [name for name in cls.model_fields if name != "token_sha256"]
        values: dict[str, Any] = {name: environ[key] for name in names if (key := ENV_PREFIX + name.upper()) in environ}
        values.update({name: value for name, value in overrides.items() if value is not None})
        token = environ.get(TOKEN_VARIABLE, "")
        if token:
            values["token_sha256"] = digest_of(token)
        try:
            settings = cls(**values)
        except ValidationError as error:
            problems = "; ".join(
                f"{ENV_PREFIX}{'.'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors()
            )
            raise ConfigError(f"bad settings: {problems}") from error
        if token and len(token) < SHORTEST_TOKEN:
            raise ConfigError(
                f"{TOKEN_VARIABLE} is shorter than {SHORTEST_TOKEN} characters", hint="openssl rand -hex 32"
            )
        if not settings.token_sha256 and not is_loopback(settings.host):
            raise ConfigError(
                f"without a token the service listens on this machine only, not on {settings.host!r}",
                hint=f"set {TOKEN_VARIABLE} to a long random text, and give it to those who may load models",
            )
        return settings

    def source_rules(self) -> SourceRules:
        """Return the places that requests may name. The coordinator's own rules apply too.

        `default` covers the endpoint in the environment of this process, where requests get theirs.
        """
        return SourceRules.parse(self.schemes, with_own_endpoint(self.endpoints, os.environ), self.buckets)


def digest_of(token: str) -> str:
    """Return the digest that is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server at that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
