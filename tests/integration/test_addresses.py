"""Which cluster a client means, tried in processes that use none yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cluster
from cluster import residents
from cluster.config import Config
from tests.support.ray_clusters import ENVIRONMENT, REPOSITORY, TEST_SETTINGS, Longshore, eventually
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow

TRY = """
import sys, cluster
try:
    print(cluster.status(sys.argv[1]).version)
except cluster.LongshoreError as error:
    print(type(error).__name__, error)
"""


def said(address: str, code: str = TRY) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, address],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT},
    )
    return done.stdout + done.stderr[-2000:] * bool(done.returncode)


def test_ray_client_addresses_are_refused() -> None:
    text = said("ray://127.0.0.1:10001")
    assert text.startswith("ConfigError")
    assert "ray job submit" in text


def test_an_address_where_no_ray_is() -> None:
    text = said("127.0.0.1:1")
    assert text.startswith("ClusterLost")
    assert "127.0.0.1:1" in text


def test_status_starts_no_cluster() -> None:
    assert said("local").startswith("ClusterLost no Ray cluster runs here")


def test_another_process_finds_the_coordinator(longshore: Longshore) -> None:
    assert said(longshore.address).startswith(longshore.status().version)


def test_whoever_starts_the_cluster_anew_brings_the_settings_and_others_hear_which_are_in_force(
    longshore: Longshore, odd: StoredModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**odd.options, "device": "cpu"}
    cluster.load(odd.uri, **options, config=Config(**TEST_SETTINGS)).release()
    residents.shutdown(longshore.address)
    eventually(lambda: not longshore.actor_names(), "the cluster does not end")
    settings = {**TEST_SETTINGS, "disk_cache_dir": str(tmp_path), "disk_cache_bytes": 64 << 20}
    cluster.load(odd.uri, **options, config=Config(**settings)).release()
    eventually(lambda: list(tmp_path.glob("*/*.chunk")), "the second coordinator has no disk tier")
    assert not caplog.records
    cluster.load(odd.uri, **options, config=Config(**TEST_SETTINGS)).release()
    assert f"disk_cache_dir='{tmp_path}'" in caplog.text
    longshore.end_longshore()


INSIDE_RAY = """
import sys, ray, cluster
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=0)
def inside(uri):
    with cluster.load(uri, device="cpu") as model:
        return model.call(len)
print(ray.get(inside.remote(sys.argv[2])))
"""


def test_code_inside_ray_uses_its_connection(longshore: Longshore, odd: StoredModel) -> None:
    with longshore.run_client(INSIDE_RAY, longshore.address, str(odd.folder)) as client:
        assert client.stdout is not None
        assert client.stdout.readline().startswith("[")
    longshore.assert_nothing_left()
