"""SIGKILL of a whole cluster in mid-load: no code of ours runs, and a sweep still leaves no shared memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import psutil
import pytest

from storage.arena_files import SHM_DIRECTORY, sweep
from tests.support.gated_proxy import GatedProxy
from tests.support.ray_clusters import ENVIRONMENT, REPOSITORY, TEST_SETTINGS, eventually
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow

CLIENT = """
import json, sys, cluster
from storage.store_ref import Credentials
uri, endpoint, key, secret, settings = sys.argv[1:]
cluster.load(uri, tensor_parallel_size=2, device="cpu", endpoint_url=endpoint, region="us-east-1", address="local",
             credentials=Credentials(access_key_id=key, secret_access_key=secret),
             config=cluster.Config(**json.loads(settings)))
"""


def arenas_mapped_by(processes: list[psutil.Process]) -> set[str]:
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError), open(f"/proc/{process.pid}/maps") as maps:
            found |= {line.split()[-1] for line in maps if f"{SHM_DIRECTORY}/longshore-arena-" in line}
    return found


def test_sigkill_of_everything(llama: StoredModel) -> None:
    import json

    server = llama.server
    with GatedProxy(server.endpoint_url, ranges=5) as proxy:
        keys = (server.access_key_id, server.secret_access_key)
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, llama.uri, proxy.endpoint_url, *keys, json.dumps(TEST_SETTINGS)],
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT, "RAY_ADDRESS": ""},
            stdout=subprocess.DEVNULL,
        )
        everything = [psutil.Process(client.pid)]
        try:
            proxy.wait_until_held(2)
            everything += everything[0].children(recursive=True)
            arenas = arenas_mapped_by(everything)
        finally:
            for process in reversed(everything):  # parents last: nobody restarts or tidies anything
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            client.wait(30)
    assert len(arenas) == 1
    _, alive = psutil.wait_procs(everything, timeout=10)
    assert not alive
    (arena,) = arenas
    assert os.path.exists(arena)

    def swept() -> bool:
        sweep()
        return not os.path.exists(arena)

    eventually(swept, "the arena cannot be swept")
