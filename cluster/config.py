"""All settings in one frozen object, which is read from the environment once and passed down."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from cluster.errors import ConfigError
from cluster.telemetry.logs import LogFormat, LogLevel, LogSettings
from cluster.units import parse_bytes
from storage.errors import InvalidKey, UnknownSigner
from storage.peers import PeerCarrier
from storage.publishing.signing import TrustedKey, key_id, trusted_key
from storage.store_ref import ANY, DEFAULT_SCHEMES, SourceRules, with_own_endpoint

if TYPE_CHECKING:
    from cluster.messages import FetchSettings

ENV_PREFIX = "LONGSHORE_"
SERVICE_PREFIX = "LONGSHORE_HTTP_"  # settings of the HTTP service, read by `serving.settings`
MIB = 1 << 20
NO_FOLDER = "none"
NO_KEYS = "none"
_OF_CLIENTS = {
    "cluster_lost_after_s",
    "allowed_schemes",
    "allowed_endpoints",
    "allowed_buckets",
    "trusted_keys",
}
MAX_S = 1_000_000.0  # more than eleven days is a mistake; sockets and locks fail with larger timeouts


class Config(BaseModel):
    """Settings of a cluster (see `cluster.node_settings`) or of a client. Each can be set as `LONGSHORE_<NAME>`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    arena_bytes: int = Field(0, ge=0)  # limit of shared memory per node; 0: a quarter of free /dev/shm, at most 8 GiB
    window_bytes: int = Field(0, ge=0)  # shared memory that loads work in; 0: 512 MiB, or all of an arena up to 1 GiB
    cache_idle_s: float = Field(3600.0, ge=0, le=MAX_S)  # kept chunks that nobody used for this long go; 0: they stay
    slot_bytes: int = Field(8 * MIB, ge=MIB, le=16 * MIB)  # one arena slot: the largest chunk that can be loaded
    chunk_bytes: int = Field(8 * MIB, ge=MIB, le=16 * MIB)  # chunk size for models without a manifest
    fetch_threads: int = Field(16, ge=1, le=64)  # limit of requests in flight per rank; the best number is measured
    lease_deadline_s: float = Field(60.0, gt=0, le=MAX_S)  # a chunk that is not committed by then returns to the queue
    read_timeout_s: float = Field(20.0, gt=0, le=MAX_S)  # no byte for this long fails a read
    fetch_attempts: int = Field(4, ge=1)  # tries without a new byte of one chunk by one worker before another gets it
    chunk_attempts: int = Field(3, ge=1)  # workers that try a chunk before the load fails
    hedge_factor: float = Field(4.0, ge=0)  # duplicate a fetch that takes this many times the median; 0: never
    hedge_after_s: float = Field(2.0, gt=0, le=MAX_S)  # and at least this long
    rank_restarts: int = Field(3, ge=0)  # replacements of one rank's worker before the load fails
    node_wait_s: float = Field(0.0, ge=0, le=MAX_S)  # ranks of a lost node wait this long for room; 0: not at all
    slots_wait_s: float = Field(600.0, gt=0, le=MAX_S)  # a load waits this long for arena slots that others hold
    heartbeat_s: float = Field(0.5, gt=0, le=MAX_S)  # worker to agent, agent to coordinator
    stuck_after_s: float = Field(
        60.0, gt=0, le=MAX_S
    )  # a rank that is alive without progress for this long is replaced
    orphan_after_s: float = Field(
        120.0, gt=0, le=MAX_S
    )  # agents and workers end themselves after this long without coordinator
    cluster_lost_after_s: float = Field(
        0.0, ge=0, le=MAX_S
    )  # clients wait this long for the head; 0: 3/4 of Ray's limit
    access_grace_s: float = Field(300.0, ge=0, le=MAX_S)  # how long access that worked attaches to a model offline
    group_patience_s: float = Field(5.0, gt=0, le=MAX_S)  # readers of a group wait this long for one without progress
    holder_ttl_s: float = Field(30.0, gt=0, le=MAX_S)  # a client silent for this long no longer holds its models
    warm_workers_s: float = Field(0.0, ge=0, le=MAX_S)  # workers of a released model wait this long for the next load
    idle_agent_s: float = Field(0.0, ge=0, le=MAX_S)  # agents end this long after their last model; 0: they stay
    gpus_per_node: int = Field(0, ge=0, le=64)  # GPUs of a node that will join; 0: as on present nodes
    cpu_ranks_per_node: int = Field(8, ge=1)  # bound for device="cpu", which takes no Ray resource
    host_reserve_bytes: int = Field(512 * MIB, ge=0)  # host memory a plan leaves free on each node
    device_reserve_bytes: int = Field(512 * MIB, ge=0)  # device memory a plan leaves free on each GPU
    disk_cache_dir: str = NO_FOLDER  # folder on each node in which verified chunks outlive the cluster
    disk_cache_bytes: int = Field(0, ge=0)  # limit of that folder; 0: half of the free space
    peer_port: int = Field(9465, ge=-1, le=65535)  # where a node serves chunks to other nodes; 0: any, -1: nowhere
    peer_bytes_per_s: int = Field(0, ge=0)  # limit of what a node sends to others, all together; 0: none
    peer_carrier: PeerCarrier = "http"  # how chunks come from there; "nixl": by RDMA, where both nodes have it
    pin_coordinator_to_head: bool = True
    metrics_port: int = Field(9464, ge=-1, le=65535)  # where Prometheus scrapes the coordinator; 0: any, -1: nowhere
    metrics_host: str = "127.0.0.1"  # its listening address; 0.0.0.0 to serve other hosts
    log_format: LogFormat = "text"  # format of the actors' logs: "text", or "json" with one object a line
    log_level: LogLevel = "INFO"  # DEBUG adds each failed try and each rank
    # Comma-separated lists; storage.store_ref documents them.
    allowed_schemes: str = DEFAULT_SCHEMES  # schemes that models may be read from; "any": all installed ones
    allowed_endpoints: str = ANY  # servers that may be read from
    allowed_buckets: str = ANY  # buckets that may be read from
    trusted_keys: str = NO_KEYS  # KEY or KEY:NAME, base64 or files: manifests must be signed with one of them

    def __init__(self, **values: Any) -> None:
        """Check the settings. Raises ConfigError, which names every bad one."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _refusal(error) from error

    @field_validator("*", mode="before")
    @classmethod
    def _size(cls, value: Any, info: ValidationInfo) -> Any:
        """Return a size in bytes. Sizes may be written as on the command line, such as `8MiB`."""
        if not isinstance(value, str) or not str(info.field_name).endswith("_bytes"):
            return value
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @field_validator("log_level", mode="before")
    @classmethod
    def _level(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value

    @property
    def logs(self) -> LogSettings:
        """Return the arguments of `cluster.telemetry.logs.configure_logs`."""
        return self.log_format, self.log_level

    @field_validator("metrics_host")
    @classmethod
    def _address(cls, value: str) -> str:
        """Return the IP address. Names are refused, so that the listener never waits for a resolver."""
        try:
            return str(ip_address("127.0.0.1" if value == "localhost" else value))
        except ValueError:
            raise ValueError("not an IP address") from None

    @field_validator("allowed_schemes", "allowed_endpoints", "allowed_buckets")
    @classmethod
    def _list(cls, value: str, info: ValidationInfo) -> str:
        given = {"schemes": ANY, "endpoints": ANY, "buckets": ANY}
        SourceRules.parse(**{**given, str(info.field_name).removeprefix("allowed_"): value})
        return value

    @field_validator("trusted_keys")
    @classmethod
    def _keys(cls, value: str) -> str:
        """Return the keys. Files are read now, because other nodes that receive the settings do not have them."""
        try:
            return value if value == NO_KEYS else ",".join(trusted_key(part.strip()) for part in value.split(","))
        except InvalidKey as error:
            raise ValueError(str(error)) from error

    def fetch_settings(self) -> FetchSettings:
        """Return the part of the settings that a rank or a reader reads by."""
        from cluster.messages import FetchSettings  # not at the top: clients need no messages

        return FetchSettings(self.fetch_threads, self.fetch_attempts, self.read_timeout_s, self.heartbeat_s)

    def source_rules(self) -> SourceRules:
        """Return the rules about places that may be read from."""
        return SourceRules.parse(self.allowed_schemes, self.allowed_endpoints, self.allowed_buckets)

    def public_keys(self) -> tuple[str, ...]:
        """Return the keys, one of which must have signed a manifest. Empty: no signature is needed."""
        return () if self.trusted_keys == NO_KEYS else tuple(self.trusted_keys.split(","))

    @field_validator("disk_cache_dir")
    @classmethod
    def _folder(cls, value: str) -> str:
        """Return the folder. Relative paths are refused, because each node has another working folder."""
        if value and value != NO_FOLDER and (not os.path.isabs(value) or "\0" in value):
            raise ValueError("not an absolute path")
        return value or NO_FOLDER

    @property
    def disk_folder(self) -> str | None:
        """Return the folder of the disk tier, or None without one."""
        return None if self.disk_cache_dir == NO_FOLDER else self.disk_cache_dir

    @classmethod
    def unknown_variables(cls, environ: Mapping[str, str] | None = None) -> list[str]:
        """Return variables that look like settings but are not, sorted.

        Args:
            environ: The environment. None: that of this process.

        Returns:
            Names of the variables.
        """
        known = {ENV_PREFIX + name.upper() for name in cls.model_fields}
        names = os.environ if environ is None else environ
        ours = (name for name in names if name.startswith(ENV_PREFIX) and not name.startswith(SERVICE_PREFIX))
        return sorted(name for name in ours if name not in known)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """Return the settings that are named in the environment, replaced by `overrides`.

        Args:
            environ: The environment. None: that of this process.
            **overrides: Settings by name. None leaves the setting as it is.

        Returns:
            Settings. Every other one has its default.

        Raises:
            ConfigError: Settings are wrong; the message names every one.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {
            name: environ[ENV_PREFIX + name.upper()]
            for name in cls.model_fields
            if ENV_PREFIX + name.upper() in environ
        }
        values.update({name: value for name, value in overrides.items() if value is not None})
        if "allowed_endpoints" in values:
            values["allowed_endpoints"] = with_own_endpoint(values["allowed_endpoints"], environ)
        return cls._checked(values, ENV_PREFIX)

    def without_effect(self, running: Mapping[str, Any]) -> list[str]:
        """Return settings that were given here and differ from those of a running cluster.

        Settings by which a client narrows what it may load, and those of the client itself, do have an effect. They are
        not returned.

        Args:
            running: Settings of the cluster, by name.

        Returns:
            `name=value` of the cluster for each.
        """
        own = self.model_dump(include=self.model_fields_set - _OF_CLIENTS)
        return [f"{name}={value!r}" for name, value in running.items() if name in own and own[name] != value]

    def changed(self, **overrides: Any) -> Config:
        """Return these settings with other values.

        Args:
            **overrides: Settings by name. None leaves the setting as it is.

        Returns:
            New settings, or these when nothing changes.

        Raises:
            ConfigError: Settings are wrong; the message names every one.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        return self._checked({**self.model_dump(exclude_unset=True), **given}, "") if given else self

    @classmethod
    def _checked(cls, values: dict[str, Any], prefix: str) -> Config:
        try:
            return cls(**values)
        except ConfigError as error:
            if isinstance(error.__cause__, ValidationError):
                raise _refusal(error.__cause__, prefix) from error.__cause__
            raise


def _refusal(error: ValidationError, prefix: str = "") -> ConfigError:
    found = ((".".join(map(str, e["loc"])), e["msg"]) for e in error.errors())
    problems = "; ".join(f"{prefix}{name.upper() if prefix else name}: {text}" for name, text in found)
    return ConfigError(f"bad settings: {problems}")


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """The sources and keys that one process allows. By default the usual schemes, and unsigned manifests."""

    sources: SourceRules = field(default_factory=SourceRules)
    keys: tuple[str, ...] = ()  # as `trusted_key` writes them; empty: manifests need no signature

    @classmethod
    def of(cls, config: Config) -> TrustPolicy:
        """Return the policy of these settings."""
        return cls(config.source_rules(), config.public_keys())

    def keys_for(self, asked: Sequence[str]) -> tuple[str, ...]:
        """Return the keys that count for a request that trusts `asked`. A request can narrow the list, not widen it.

        Raises UnknownSigner when no key is in both lists.
        """
        if not self.keys or not asked:
            return self.keys or tuple(asked)
        own, wanted = ([TrustedKey.parse(key) for key in keys] for keys in (self.keys, asked))
        both = dict.fromkeys(str(one.both(other)) for other in wanted for one in own if one.public == other.public)
        if not both:
            raise UnknownSigner(
                "no key is trusted both by the request and by the cluster's settings",
                hint="LONGSHORE_TRUSTED_KEYS of the coordinator's node lists the cluster's",
                trusted=",".join(sorted(key_id(key.public) for key in own)[:8]),
            )
        return tuple(both)
