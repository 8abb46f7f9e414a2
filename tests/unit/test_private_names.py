"""Private names of botocore and Ray: each is there, and one that is gone is named with what to do."""

from __future__ import annotations

import importlib
import logging
import runpy
import subprocess
import sys
import tomllib
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from cluster.joining import ray_private
from storage.errors import DependencyChanged
from storage.private_names import TESTED, PrivateName, missing
from storage.store_ref import Credentials, StoreRef
from storage.stores.s3 import botocore_private
from storage.stores.s3.store import S3Store

ROOT = Path(__file__).resolve().parents[2]
BOTOCORE = [each for each in botocore_private.NAMES if "." not in each.name]
REF = StoreRef("s3", "bucket", "", endpoint_url="http://127.0.0.1:1", region="us-east-1")


def test_private_names_of_botocore_are_there() -> None:
    assert [str(error) for error in missing(botocore_private.NAMES)] == []
    with closing(S3Store(REF, Credentials("key", "secret"))) as store:  # attributes that only objects have
        assert type(store._client._endpoint.http_session).__name__ == "_BoundedSession"  # type: ignore[attr-defined]


def test_private_names_of_ray_are_there() -> None:
    pytest.importorskip("ray")
    assert [str(error) for error in missing(ray_private.NAMES)] == []


@pytest.mark.parametrize("gone", BOTOCORE, ids=lambda each: each.name)
def test_a_name_that_botocore_lost_is_named(gone: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(importlib.import_module(gone.module), gone.name)
    with pytest.raises(DependencyChanged, match=f"{gone.module}.{gone.name}") as caught:
        runpy.run_path(str(ROOT / "storage" / "stores" / "s3" / "botocore_private.py"))
    assert gone.needed_for in caught.value.message
    assert f"pip install 'botocore{TESTED['botocore']}'" in caught.value.hint
    assert caught.value.details["installed"] == version("botocore")


@pytest.mark.parametrize("has", ["", "_endpoint", "_endpoint.http_session"])
def test_an_attribute_that_botocore_lost_is_named(has: str) -> None:
    client = SimpleNamespace()
    owner = client
    for part in has.split(".") if has else ():
        setattr(owner, part, SimpleNamespace())
        owner = getattr(owner, part)
    lost = {"": "BaseClient._endpoint", "_endpoint": "Endpoint.http_session"}.get(has, "_pool_classes_by_scheme")
    with pytest.raises(DependencyChanged, match=lost):
        botocore_private.replace_http_session(client, {}, lambda session: session)  # type: ignore[arg-type]


def test_the_command_line_reports_a_lost_name() -> None:
    """It runs in a new process that has imported nothing."""
    script = (
        "import botocore.awsrequest as lost; del lost.AWSHTTPSConnectionPool\n"
        "from cluster.command_line.cli import main; raise SystemExit(main(['verify', 's3://bucket/model']))"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 7, ended.stderr
    assert "botocore has no botocore.awsrequest.AWSHTTPSConnectionPool, which bounding" in ended.stderr
    assert "Traceback" not in ended.stderr


RAY_CALLS = {
    "actors": ray_private.actor_table,
    "available_resources_per_node": ray_private.available_resources_per_node,
    "global_worker": ray_private.logs_folder,
    "PlacementGroupID": lambda: ray_private.placement_group_id("00"),
    "canonicalize_bootstrap_address": ray_private.address_here,
    "find_gcs_addresses": ray_private.heads_of_processes_here,
}


@pytest.mark.parametrize(
    "gone", [each for each in ray_private.NAMES if "." not in each.name], ids=lambda each: each.name
)
def test_a_name_that_ray_lost_is_named(gone: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.delattr(importlib.import_module(gone.module), gone.name)
    with pytest.raises(DependencyChanged, match=f"{gone.module}.{gone.name}.*{gone.needed_for}.*pip install 'ray"):
        RAY_CALLS[gone.name]()


def test_without_ids_of_placement_groups_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("ray")
    from actors.coordination import spawn

    monkeypatch.delattr("ray._raylet.PlacementGroupID")
    ended: list[str] = []
    monkeypatch.setattr(spawn, "_workers", lambda: {"worker": ("lost", "")})
    monkeypatch.setattr(spawn, "_groups", lambda: {"group": ("lost", "ab")})
    monkeypatch.setattr(spawn.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(spawn, "end_actor", ended.append)
    with caplog.at_level(logging.WARNING, "longshore.coordinator"):
        spawn.end_orphans(set(), {"worker", "group"})
    assert ended == ["worker"]
    assert "ray._raylet.PlacementGroupID" in caplog.text


def test_the_tested_versions_are_those_that_pyproject_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(each for some in project["optional-dependencies"].values() for each in some)]
    requirements = [Requirement(line) for line in lines]
    for package, tested in TESTED.items():
        ranges = {str(each.specifier) for each in requirements if each.name == package}
        assert {frozenset(each.split(",")) for each in ranges} == {frozenset(tested.split(","))}, package
    boto3 = {str(each.specifier) for each in requirements if each.name == "boto3"}
    assert {frozenset(each.split(",")) for each in boto3} == {
        frozenset(TESTED["botocore"].split(","))
    }  # they go together
    for package, tested in TESTED.items():
        assert Requirement(f"{package}{tested}").specifier.contains(version(package))
