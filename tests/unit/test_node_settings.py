"""A node's settings come from the right environment, and the node reports that environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cluster import node_settings
from cluster.command_line.tables import console_on, status_table
from cluster.config import Config
from cluster.errors import ConfigError
from cluster.node_settings import NodeSettings, node_environment
from cluster.telemetry.report import ClusterStatus, NodeStatus, SettingStatus
from storage.host import processes
from storage.publishing.signing import key_id
from tests.unit.test_trust import KEYS

NODE = "head-1 0a1b2c3d"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc in which this process descends from a raylet, over a wrapper with an odd name."""
    monkeypatch.setattr(node_settings, "_PROC", tmp_path)
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 71)
    chain = [(71, b"uv (run) 7", 70), (70, b"raylet", 1), (1, b"init", 0)]
    for pid, name, parent in chain:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / str(pid) / "comm").write_bytes(name + b"\n")
        (tmp_path / str(pid) / "stat").write_bytes(b"%d (%s) S %d 1 1" % (pid, name, parent))
        (tmp_path / str(pid) / "environ").write_bytes(b"LONGSHORE_FETCH_THREADS=%d\0NOT\0X=a=b\xff\0" % pid)
    return tmp_path


def test_the_environment_is_that_of_the_raylet(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSHORE_FETCH_THREADS", "3")  # as a client's runtime_env does
    found = node_environment()
    assert found == {"LONGSHORE_FETCH_THREADS": "70", "X": os.fsdecode(b"a=b\xff")}
    (proc / "70" / "comm").write_bytes(b"other\n")
    assert node_environment() is os.environ  # no raylet
    (proc / "70" / "comm").write_bytes(b"raylet\n")
    (proc / "70" / "environ").unlink()
    assert node_environment() is os.environ  # another user's


def test_the_source_says_when_the_kernel_shows_no_raylet(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (proc / "70" / "environ").write_bytes(b"LONGSHORE_FETCH_THREADS=7\0")
    monkeypatch.setenv("LONGSHORE_FETCH_THREADS", "3")
    assert (NodeSettings.here(NODE).config.fetch_threads, NodeSettings.here(NODE).source) == (
        7,
        f"environment of node {NODE}",
    )
    (proc / "70" / "comm").write_bytes(b"other\n")
    assert NodeSettings.here(NODE).config.fetch_threads == 3
    assert "environment of an actor" in NodeSettings.here(NODE).source


def test_a_key_file_is_that_of_the_nodes_folder(
    proc: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder of an actor is that of the client which loads first."""
    folder, evil = tmp_path_factory.mktemp("operator"), tmp_path_factory.mktemp("client")
    (folder / "signer.pub").write_text(KEYS[0])
    (evil / "signer.pub").write_text(KEYS[1])
    (proc / "70" / "cwd").symlink_to(folder)
    (proc / "70" / "environ").write_bytes(f"LONGSHORE_TRUSTED_KEYS=signer.pub:a/*, {KEYS[1]}\0".encode())
    monkeypatch.chdir(evil)
    assert NodeSettings.here(NODE).config.trusted_keys == f"{KEYS[0]}:a/*,{KEYS[1]}"


def test_bad_values_name_variable_and_node(proc: Path) -> None:
    with pytest.raises(ConfigError, match="LONGSHORE_FETCH_THREADS") as error:  # 70 are too many
        NodeSettings.here(NODE)
    assert NODE in str(error.value)
    assert "ray start" in error.value.hint


def test_each_setting_has_a_source() -> None:
    config = Config.from_env({"LONGSHORE_ARENA_BYTES": "64MiB", "LONGSHORE_TRUSTED_KEYS": KEYS[0]})
    settings = NodeSettings(config.changed(fetch_threads=3), "there")
    ours = {setting.name: setting for setting in settings.of_coordinator()}
    assert ours["LONGSHORE_TRUSTED_KEYS"] == SettingStatus("LONGSHORE_TRUSTED_KEYS", key_id(KEYS[0]), "there")
    assert ours["LONGSHORE_FETCH_THREADS"] == SettingStatus("LONGSHORE_FETCH_THREADS", 3, "there")
    assert ours["LONGSHORE_METRICS_PORT"] == SettingStatus("LONGSHORE_METRICS_PORT", 9464, "default")
    theirs = {setting.name: setting for setting in settings.of_agent()}
    assert theirs["LONGSHORE_ARENA_BYTES"] == SettingStatus("LONGSHORE_ARENA_BYTES", 64 << 20, "there")
    assert {name for name in ours.keys() | theirs.keys()} == {
        f"LONGSHORE_{name.upper()}" for name in Config.model_fields
    }
    assert NodeSettings.here(NODE, config) == NodeSettings(config, "the program that started the cluster")


def test_the_table_names_each_setting_once(capsys: pytest.CaptureFixture[str]) -> None:
    arena, default = "LONGSHORE_ARENA_BYTES", SettingStatus("LONGSHORE_SLOT_BYTES", 1, "default")
    nodes = tuple(
        NodeStatus(
            name, name, 1, 0, 0, 0, 0.1, settings=(SettingStatus(arena, 5, f"environment of node {name}"), default)
        )
        for name in ("a", "b")
    )
    keys = SettingStatus("LONGSHORE_TRUSTED_KEYS", "0123", "environment of node a")
    console_on(sys.stdout).print(status_table(ClusterStatus("1", "c", (), nodes, settings=(keys, default))))
    lines = capsys.readouterr().out.splitlines()
    assert [line.rstrip().split(None, 2) for line in lines if line.startswith("LONGSHORE_")] == [
        ["LONGSHORE_TRUSTED_KEYS", "0123", "environment of node a"],
        [arena, "5", "environment of node a, environment of node b"],
    ]
