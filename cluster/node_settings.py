"""The settings of a node, from the environment in which its `ray start` ran, whichever client loads first.

A client's `runtime_env` changes the environment of actors and tasks. It does not change that of the raylet, their
common parent process. So the raylet's environment is read. If a program starts a local Ray cluster itself, its
settings are those of the nodes. It passes them to the coordinator, which passes them to the agents.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.config import ENV_PREFIX, NO_KEYS, Config
from cluster.errors import ConfigError
from cluster.telemetry.report import DEFAULT, SettingStatus
from storage.host.processes import parent_of
from storage.publishing.signing import TrustedKey, key_id, with_absolute_files

# Settings of agents, which may differ between nodes. Only agents use the first ones.
_OF_AGENTS_ALONE = {
    *("arena_bytes", "window_bytes", "cache_idle_s", "slot_bytes", "disk_cache_dir", "disk_cache_bytes"),
    *("peer_port", "peer_bytes_per_s", "peer_carrier"),
}
_OF_AGENTS = _OF_AGENTS_ALONE | {"host_reserve_bytes", "heartbeat_s", "orphan_after_s", "log_format", "log_level"}
RAYLET = b"raylet"  # Ray's process on each node, as the kernel names it
KEYS = ENV_PREFIX + "TRUSTED_KEYS"
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The settings that an actor of Longshore uses, and the source of those that are not defaults."""

    config: Config
    source: str

    @classmethod
    def here(cls, node: str, given: Config | None = None) -> NodeSettings:
        """Return the settings of the node that this process runs on.

        Args:
            node: Name of the node, for messages.
            given: Settings of the program that started the cluster. None: the cluster was started by `ray start`.

        Raises:
            ConfigError: The environment of the node has invalid values.
        """
        if given is not None:
            return cls(given, "the program that started the cluster")
        shown = raylet_environment()
        source = f"environment of node {node}"
        if shown is None:
            source = f"environment of an actor on node {node} (the kernel does not show that of its raylet)"
        try:
            return cls(Config.from_env(os.environ if shown is None else shown), source)
        except ConfigError as error:
            raise ConfigError(
                f"environment of node {node}: {error.message}",
                hint="correct it where `ray start` runs on that node, and start the node again",
            ) from error

    def of_coordinator(self) -> tuple[SettingStatus, ...]:
        """Return each setting that the coordinator uses, with its source."""
        return self._status(set(Config.model_fields) - _OF_AGENTS_ALONE)

    def of_agent(self) -> tuple[SettingStatus, ...]:
        """Return each setting that an agent uses, with its source."""
        return self._status(_OF_AGENTS)

    def _status(self, names: Collection[str]) -> tuple[SettingStatus, ...]:
        values = self.config.model_dump()
        keys = (TrustedKey.parse(key) for key in self.config.public_keys())
        values["trusted_keys"] = ",".join(str(replace(key, public=key_id(key.public))) for key in keys) or NO_KEYS
        given = self.config.model_fields_set
        return tuple(
            SettingStatus(ENV_PREFIX + name.upper(), values[name], self.source if name in given else DEFAULT)
            for name in Config.model_fields
            if name in names
        )


def node_name(host: str, node_id: str) -> str:
    """Return the name of a node in messages. Several nodes may be on one host."""
    return f"{host} {node_id[:8]}"


def node_environment() -> Mapping[str, str]:
    """Return the environment of the raylet from which this process descends.

    Return this process's own if it has no raylet, or if the kernel hides the raylet's, as when another user runs it.
    """
    return raylet_environment() or os.environ


def raylet_environment() -> Mapping[str, str] | None:
    """Return the environment of the raylet from which this process descends, or None if the kernel shows none."""
    try:
        pid = os.getppid()
        while pid:
            if (_PROC / str(pid) / "comm").read_bytes().strip() == RAYLET:
                return _environment_of(pid)
            pid = parent_of(pid)
    except OSError:
        pass
    return None


def _environment_of(pid: int) -> dict[str, str]:
    variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(variable).partition("=") for variable in variables if b"=" in variable)
    environ = {name: value for name, _, value in pairs}
    if (keys := environ.get(KEYS, NO_KEYS)) != NO_KEYS:
        # Make paths absolute, because the working folder of an actor is the client's.
        environ[KEYS] = with_absolute_files(keys, os.readlink(_PROC / str(pid) / "cwd"))
    return environ
