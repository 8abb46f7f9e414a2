"""`ray job submit -- longshore load ...` for real, with Ray's token authentication off and on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job_cluster import SCRIPTS, JobCluster, json_in
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow


@pytest.fixture
def jobs(request: pytest.FixtureRequest, llama: StoredModel) -> Iterator[JobCluster]:
    """A cluster whose nodes can read the store; the fixture's parameter says whether Ray asks for a token."""
    if not os.access(SCRIPTS / "longshore", os.X_OK):
        pytest.skip("longshore is not installed in this environment (pip install -e .)")
    server = llama.server
    environ = {
        "AWS_ACCESS_KEY_ID": server.access_key_id,  # nodes have their credentials; no command line carries any
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_REGION": server.region,
        "LONGSHORE_ARENA_BYTES": str(64 << 20),
        "LONGSHORE_SLOT_BYTES": str(1 << 20),
        "LONGSHORE_HOST_RESERVE_BYTES": str(64 << 20),
    }
    with JobCluster(token=request.param, environ=environ) as cluster:
        yield cluster


@pytest.mark.parametrize("jobs", [False], indirect=True, ids=["no authentication"])
def test_a_model_outlives_the_job_that_loaded_it(jobs: JobCluster, llama: StoredModel, tmp_path: Path) -> None:
    code, said = jobs.submit("longshore", "load", llama.uri, "--fsdp", "2", "--device", "cpu", "--json")
    assert code == 0, said
    report = json_in(said)
    assert (report["verified"], len(report["ranks"])) == ("blake3", 2)
    # A second job, by the other name of the command; then a driver that is no job at all.
    code, said = jobs.submit("python", "-m", "cluster", "status", "--json")
    assert code == 0, said
    (model,) = json_in(said)["models"]
    assert (model["progress"]["model_id"], model["progress"]["state"], model["keep"]) == (
        report["model_id"],
        "ready",
        True,
    )
    longshore = str(SCRIPTS / "longshore")
    code, said = jobs.run(longshore, "load", llama.uri, "--fsdp", "2", "--device", "cpu", "--json")
    assert code == 0, said
    again = json_in("\n" + said)
    assert (again["model_id"], again["resident"]) == (report["model_id"], True)
    # A job fails when its command does.
    code, said = jobs.submit("longshore", "load", "s3://no-such-bucket/model", "--device", "cpu")
    assert code == 1, said
    assert "no-such-bucket" in said
    # A working_dir that has a folder of our name in it.
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "__init__.py").write_text("")
    code, said = jobs.submit("python", "-m", "longshore", "status", working_dir=tmp_path)
    assert code == 1, said
    assert "not Longshore's own packages" in said
    assert "working_dir" in said
    code, said = jobs.run(longshore, "release", "--all", "--force", "--shutdown", "--json")
    assert code == 0, said
    code, said = jobs.run(longshore, "status")
    assert code == 7, said


@pytest.mark.parametrize("jobs", [True], indirect=True, ids=["token"])
def test_with_token_authentication(jobs: JobCluster, llama: StoredModel) -> None:
    code, said = jobs.submit("longshore", "load", llama.uri, "--device", "cpu", "--json")
    assert code == 0, said
    code, said = jobs.run(str(SCRIPTS / "longshore"), "status", "--json")
    assert code == 0, said
    (model,) = json_in("\n" + said)["models"]
    assert model["progress"]["state"] == "ready"
    # Without the token nobody gets in, and nobody hangs.
    jobs.environ["RAY_AUTH_TOKEN"] = "0" * 64
    code, said = jobs.run(str(SCRIPTS / "longshore"), "status")
    assert code == 7, said
