"""Everything killed in mid-load, and the arena with it: the next cluster fetches only what had not been verified."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage.arena_files import sweep
from storage.disk_folder import SUBFOLDER
from storage.disk_format import HEADER_BYTES
from tests.support.counting_proxy import CountingProxy
from tests.support.disk_chunks import chunks_in
from tests.support.gated_proxy import GatedProxy
from tests.support.ray_clusters import ENVIRONMENT, REPOSITORY, TEST_SETTINGS, eventually
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANGES = 7  # that pass before the first cluster is killed
WAIT_S = 400.0  # until something is seen that must come, on however slow a machine

# Loads on a cluster of its own, compares every slice, says what it did, and waits for its end.
CLIENT = """
import json, sys, cluster
from storage.store_ref import Credentials
from tests.support.reference_slices import shard_differs
uri, endpoint, key, secret, settings, folder, kv_heads = sys.argv[1:]
model = cluster.load(uri, tensor_parallel_size=2, device="cpu", endpoint_url=endpoint, region="us-east-1",
                     address="local", credentials=Credentials(access_key_id=key, secret_access_key=secret),
                     config=cluster.Config(**json.loads(settings)))
different = model.call(shard_differs, folder, 2, 1, int(kv_heads))
print(json.dumps({"node": model.report.as_dict()["nodes"][0], "different": different}), flush=True)
sys.stdin.read()
"""


@contextmanager
def client_of(model: StoredModel, proxy: CountingProxy, disk: Path) -> Iterator[subprocess.Popen[str]]:
    """A client with a cluster of its own; all of it is killed at the end, and its arena is gone."""
    # No second request for what is slow: bytes are counted.
    settings = {**TEST_SETTINGS, "disk_cache_dir": str(disk), "disk_cache_bytes": 1 << 28, "hedge_factor": 0}
    keys = (model.server.access_key_id, model.server.secret_access_key)
    client = subprocess.Popen(
        [
            *(sys.executable, "-c", CLIENT, model.uri, proxy.endpoint_url, *keys),
            *(json.dumps(settings), str(model.folder), str(KV_HEADS)),
        ],
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT, "RAY_ADDRESS": "", "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with client:
        try:
            yield client
        finally:
            everything = [psutil.Process(client.pid)]
            everything += everything[0].children(recursive=True)
            for process in reversed(everything):  # parents last: nobody restarts or tidies anything
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            client.wait(30)
    _, alive = psutil.wait_procs(everything, timeout=10)
    assert not alive
    sweep()


def loaded(client: subprocess.Popen[str]) -> dict[str, Any]:
    """The node's report, when every slice of every rank was the right one."""
    assert client.stdout is not None
    said = client.stdout.readline()
    assert said, f"the client ended with {client.wait()}"
    result: dict[str, Any] = json.loads(said)
    assert result["different"] == [[], []]
    node: dict[str, Any] = result["node"]
    assert node["cached_chunks"] == 0
    return node


def weights_bytes(proxy: CountingProxy) -> int:
    return sum(size for path, size in proxy.bytes_by_path().items() if path.endswith(".safetensors"))


def kept_bytes(folder: Path) -> int:
    return sum(path.stat().st_size - HEADER_BYTES for path in folder.glob("*.chunk"))


def wait_for(folder: Path, chunks: int) -> None:
    eventually(
        lambda: folder.exists() and len(chunks_in(str(folder))) == chunks,
        lambda: f"{len(chunks_in(str(folder)))} of {chunks} chunks came to disk",
        WAIT_S,
    )


def test_the_next_cluster_goes_on_where_the_last_one_was(llama: StoredModel, tmp_path: Path) -> None:
    folder = tmp_path / SUBFOLDER
    with GatedProxy(llama.server.endpoint_url, RANGES) as gate, client_of(llama, gate, tmp_path):
        gate.wait_until_held(2, WAIT_S)
        wait_for(folder, RANGES)
    before_bytes = kept_bytes(folder)

    with CountingProxy(llama.server.endpoint_url) as proxy:
        with client_of(llama, proxy, tmp_path) as client:
            node = loaded(client)
            wait_for(folder, node["needed_chunks"])
        assert (node["disk_chunks"], node["disk_bytes"]) == (RANGES, before_bytes)
        assert weights_bytes(proxy) == node["store_bytes"] == node["needed_bytes"] - before_bytes > 0
        assert kept_bytes(folder) == node["needed_bytes"]
