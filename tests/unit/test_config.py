"""Settings: named in the environment, checked at once, changed one by one."""

from __future__ import annotations

import pickle

import pytest

from cluster.config import MIB, Config
from cluster.errors import ConfigError


def test_settings_come_from_the_environment_and_overrides_win() -> None:
    config = Config.from_env({"LONGSHORE_CHUNK_BYTES": str(2 * MIB), "HOME": "/"}, fetch_threads=2, slot_bytes=None)
    assert config == Config(chunk_bytes=2 * MIB, fetch_threads=2)


@pytest.mark.parametrize("value", ["inf", "nan", "1e300", "0", "-1", "", "soon"])
@pytest.mark.parametrize("name", [name for name in Config.model_fields if name.endswith("_s")])
def test_impossible_times_are_refused(name: str, value: str) -> None:
    may_be_off = (
        "warm_workers_s",
        "node_wait_s",
        "cluster_lost_after_s",
        "idle_agent_s",
        "access_grace_s",
        "cache_idle_s",
        "peer_bytes_per_s",
    )
    if name in may_be_off and value == "0":
        assert getattr(Config.from_env({f"LONGSHORE_{name.upper()}": value}), name) == 0  # off, or Ray's
        return
    with pytest.raises(ConfigError, match=f"LONGSHORE_{name.upper()}"):
        Config.from_env({f"LONGSHORE_{name.upper()}": value})


def test_every_bad_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"LONGSHORE_CHUNK_BYTES.*LONGSHORE_FETCH_THREADS"):
        Config.from_env({"LONGSHORE_CHUNK_BYTES": "many", "LONGSHORE_FETCH_THREADS": "0"})


def test_bad_settings_of_a_program_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"bad settings: arena_bytes: .*; arena_bytez: "):
        Config(arena_bytes="x", arena_bytez=5)
    assert pickle.loads(pickle.dumps(Config(fetch_threads=2))) == Config(fetch_threads=2)


def test_settings_can_be_changed_one_by_one() -> None:
    config = Config(fetch_threads=2)
    assert config.changed(chunk_bytes=None) == config
    assert config.changed(chunk_bytes=MIB) == Config(fetch_threads=2, chunk_bytes=MIB)
    for wrong in (0, MIB - 1, 17 * MIB):
        with pytest.raises(ConfigError, match="chunk_bytes"):
            config.changed(chunk_bytes=wrong)


@pytest.mark.parametrize(("text", "size_bytes"), [("2MiB", 2 * MIB), ("8MB", 8_000_000), (" 2 MiB ", 2 * MIB)])
def test_sizes_are_written_as_the_options_are(text: str, size_bytes: int) -> None:
    assert Config.from_env({"LONGSHORE_CHUNK_BYTES": text}).chunk_bytes == size_bytes


@pytest.mark.parametrize("text", ["8 blocks", "-1", "", "inf", "9" * 400])
def test_a_malformed_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"LONGSHORE_ARENA_BYTES.*not a size"):
        Config.from_env({"LONGSHORE_ARENA_BYTES": text})


def test_unknown_variables_are_reported() -> None:
    environ = {"LONGSHORE_CHUNK_BYTES": "1", "LONGSHORE_CHUNK_SIZE": "1", "LONGSHORE_": "", "OTHER": "1"}
    environ["LONGSHORE_HTTP_TOKEN"] = "one of the service's"
    assert Config.unknown_variables(environ) == ["LONGSHORE_", "LONGSHORE_CHUNK_SIZE"]


def test_the_folder_for_chunks_on_disk_is_checked() -> None:
    assert Config().disk_folder is None
    for off in ("", "none"):
        assert Config.from_env({"LONGSHORE_DISK_CACHE_DIR": off}) == Config()
    assert Config(disk_cache_dir="/mnt/nvme").disk_folder == "/mnt/nvme"
    for wrong in ("nvme", "./nvme", "/mnt/\0"):
        with pytest.raises(ConfigError, match="disk_cache_dir"):
            Config().changed(disk_cache_dir=wrong)


def test_settings_that_differ_from_the_cluster_are_named() -> None:
    running = Config(heartbeat_s=0.25).model_dump()
    assert Config(heartbeat_s=0.25).without_effect(running) == []
    assert Config(heartbeat_s=0.25, fetch_threads=3).without_effect(running) == ["fetch_threads=16"]
    assert Config(heartbeat_s=0.5).without_effect({**running, "of_another_version": 1}) == ["heartbeat_s=0.25"]
    assert Config().without_effect(running) == []  # nothing was set here
    narrowing = {"allowed_schemes": "s3", "trusted_keys": "none", "cluster_lost_after_s": 3.0}
    assert Config(**narrowing).without_effect(running) == []
