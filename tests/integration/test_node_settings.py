"""Nodes that start with an environment of their own keep their own settings."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cluster
from actors.hosting import host_rank
from cluster import client
from cluster.command_line.cli import main
from cluster.config import Config
from cluster.doctor.doctor import run_checks
from cluster.joining.connection import disconnect
from cluster.node_settings import node_name
from storage.disk.files import SUBFOLDER
from tests.support.ray_clusters import (
    ENVIRONMENT,
    OBJECT_STORE_BYTES,
    REPOSITORY,
    TEST_SETTINGS,
    Longshore,
    environment,
    eventually,
    new_ray_cluster,
    variables,
)
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow

ARENA_BYTES = {"head": 48 << 20, "other": 64 << 20}
DISK_BYTES = 64 << 20


class Operated(Longshore):
    """A head with a policy and a disk tier, and a node with a larger arena and no disk tier."""

    def __init__(self, ray_cluster: Any, signer: Any, disk: Path) -> None:
        super().__init__(ray_cluster)
        self.signer = signer
        self.disk = disk


def node_of(**settings: Any) -> dict[str, Any]:
    environ = variables({**TEST_SETTINGS, **settings})
    return {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES, "env_vars": environ}


@pytest.fixture(scope="module")
def operated_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operator")
    signer = cluster.generate_key(folder / "signer")
    head = node_of(
        trusted_keys=signer.public_path,  # a file: read where the coordinator runs
        allowed_schemes="s3",
        arena_bytes=ARENA_BYTES["head"],
        cpu_ranks_per_node=1,
        disk_cache_dir=folder / "disk",
        disk_cache_bytes=DISK_BYTES,
    )
    other = node_of(arena_bytes=ARENA_BYTES["other"])
    with environment(ENVIRONMENT), new_ray_cluster(**head) as ray_cluster:
        ray_cluster.add_node(**other)
        there = Operated(ray_cluster, signer, folder / "disk" / SUBFOLDER)
        yield there


@pytest.fixture
def operated(operated_cluster: Operated) -> Iterator[Operated]:
    """A client whose own environment and runtime_env say the opposite of what the operator says."""
    import ray

    wider = variables(
        {"trusted_keys": "none", "allowed_schemes": "any", "arena_bytes": 32 << 20, "disk_cache_dir": "/nowhere"}
    )
    with environment(wider):
        ray.init(
            address=operated_cluster.address,
            runtime_env={"env_vars": wider},
            log_to_driver=False,
            configure_logging=False,
        )
        try:
            yield operated_cluster
            operated_cluster.end_longshore()
        finally:
            disconnect()
            ray.shutdown()


@pytest.fixture
def signed(operated_cluster: Operated, llama: StoredModel, copy_of: Any) -> StoredModel:
    model: StoredModel = copy_of(llama)
    cluster.sign(model.uri, operated_cluster.signer.path, **model.options)
    return model


def test_clients_cannot_widen_the_operators_policy(operated: Operated, llama: StoredModel, signed: StoredModel) -> None:
    """Neither their environment, a runtime_env, `config` nor a new coordinator widens it."""
    for ended in (False, True):
        for config in (None, Config()):
            with pytest.raises(cluster.ManifestUnsigned):
                cluster.load(llama.uri, device="cpu", config=config, **llama.options)
            with pytest.raises(cluster.SourceRefused):
                cluster.load(str(llama.folder), device="cpu", config=config)
            for uri, error in ((llama.uri, cluster.ManifestUnsigned), (str(llama.folder), cluster.SourceRefused)):
                options = llama.options if uri == llama.uri else {}
                with pytest.raises(error), host_rank(uri, 0, config=config, **options):
                    pass
        with cluster.load(signed.uri, device="cpu", **signed.options) as model:
            assert model.report.signed_by == operated.signer.key_id
        with host_rank(signed.uri, 0, **signed.options) as shard:
            assert len(shard)
        if not ended:
            client.shutdown()
            eventually(lambda: not operated.actor_names(), "the cluster does not end")


def test_clients_can_narrow_the_operators_policy(operated: Operated, signed: StoredModel, tmp_path: Path) -> None:
    theirs = cluster.generate_key(tmp_path / "theirs")
    options = {**signed.options, "config": Config(trusted_keys=theirs.public_key)}
    with pytest.raises(cluster.UnknownSigner):
        cluster.load(signed.uri, device="cpu", **options)
    with pytest.raises(cluster.UnknownSigner), host_rank(signed.uri, 0, **options):
        pass
    options["config"] = Config(allowed_buckets="others")
    with pytest.raises(cluster.SourceRefused):
        cluster.load(signed.uri, device="cpu", **options)
    with pytest.raises(cluster.SourceRefused), host_rank(signed.uri, 0, **options):
        pass


def test_each_node_has_the_arena_and_disk_of_its_environment(operated: Operated, signed: StoredModel) -> None:
    with cluster.load(signed.uri, tensor_parallel_size=2, device="cpu", **signed.options):
        nodes = sorted(operated.status().nodes, key=lambda node: node.arena_bytes)
        assert [node.arena_bytes for node in nodes] == [ARENA_BYTES["head"], ARENA_BYTES["other"]]
        assert [node.disk_budget_bytes for node in nodes] == [DISK_BYTES, 0]
        eventually(lambda: list(operated.disk.glob("*.chunk")), "no chunk comes to the head's disk")


def test_bad_settings_of_a_node_are_an_error_that_names_it(operated: Operated, signed: StoredModel) -> None:
    bad = operated.ray_cluster.add_node(**node_of(disk_cache_bytes="much"))
    try:
        operated.ray_cluster.wait_for_nodes()
        with pytest.raises(cluster.ConfigError, match="LONGSHORE_DISK_CACHE_BYTES") as error:
            cluster.load(signed.uri, fsdp_size=3, device="cpu", **signed.options)
        assert bad.node_id[:8] in str(error.value)
        gone = f"agent-{bad.node_id}"
        eventually(lambda: gone not in operated.actor_names(), "the agent with the bad settings stays")
    finally:
        operated.ray_cluster.remove_node(bad)


BAD_HEAD = """
import sys, cluster, ray
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
for _ in range(2):
    try:
        cluster.load(sys.argv[2], device="cpu")
    except cluster.ConfigError as error:
        print(error, flush=True)
print(ray.util.list_named_actors(all_namespaces=True))
"""


def test_bad_settings_of_the_head_leave_nothing_behind(llama: StoredModel) -> None:
    with environment(ENVIRONMENT), new_ray_cluster(**node_of(trusted_keys="/no/such/key")) as ray_cluster:
        command = [sys.executable, "-c", BAD_HEAD, ray_cluster.address, str(llama.folder)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
        *errors, actors = said.stdout.splitlines()
        assert len(errors) == 2, said
        assert all("LONGSHORE_TRUSTED_KEYS" in text and ray_cluster.head_node.node_id[:8] in text for text in errors)
        assert actors == "[]"


def test_status_and_doctor_show_the_settings_in_force(
    operated: Operated, signed: StoredModel, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster.load(signed.uri, tensor_parallel_size=2, device="cpu", **signed.options):
        eventually(lambda: all(node.settings for node in operated.status().nodes), "agents do not say their settings")
        status = operated.status()
        head, other = (name_of(operated, node) for node in ("head", "other"))
        found = {setting.name: (setting.value, setting.source) for setting in status.settings}
        assert found["LONGSHORE_TRUSTED_KEYS"] == (operated.signer.key_id, f"environment of node {head}")
        assert found["LONGSHORE_ALLOWED_SCHEMES"] == ("s3", f"environment of node {head}")
        assert found["LONGSHORE_ALLOWED_BUCKETS"] == ("any", "default")
        assert "LONGSHORE_ARENA_BYTES" not in found  # which each node has for itself
        for node, name in (("head", head), ("other", other)):
            (agent,) = (each for each in status.nodes if each.node.startswith(name.split()[-1]))
            theirs = {setting.name: (setting.value, setting.source) for setting in agent.settings}
            assert theirs["LONGSHORE_ARENA_BYTES"] == (ARENA_BYTES[node], f"environment of node {name}")
        assert main(["status"]) == 0
        shown = capsys.readouterr().out
        assert f"{ARENA_BYTES['other']} " in shown
        assert f"environment of node {other}" in shown
        checks = {check.name: check for check in run_checks()}
        assert operated.signer.key_id in checks["settings in force"].detail
        assert str(ARENA_BYTES["other"]) in checks[f"settings {other}"].detail


def name_of(there: Operated, which: str) -> str:
    """Return the node's name as messages give it."""
    nodes = there.ray_cluster
    node_id = nodes.head_node.node_id if which == "head" else next(iter(nodes.worker_nodes)).node_id
    return node_name(socket.gethostname(), node_id)
