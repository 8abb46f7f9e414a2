"""SIGKILL of a whole cluster in mid-load, so no code of ours runs: a sweep leaves no shared memory, and with a disk
tier the next cluster fetches only what had not been verified.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import cluster
from storage.arena.arena_files import sweep
from storage.disk.files import HEADER_BYTES, SUBFOLDER
from tests.support.counting_proxy import CountingProxy
from tests.support.disk_chunks import chunks_in
from tests.support.gated_proxy import GatedProxy
from tests.support.ray_clusters import (
    ENVIRONMENT,
    REPOSITORY,
    TEST_SETTINGS,
    Longshore,
    arenas_mapped_by,
    eventually,
)
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

RANGES = 7  # that pass before everything is killed
WAIT_S = 400.0  # until something is seen that must come, on however slow a machine
DISK_BYTES = 1 << 28

# A load on a cluster of its own.
CLIENT = """
import json, sys, cluster
from storage.store_ref import Credentials
uri, endpoint, key, secret, settings = sys.argv[1:]
cluster.load(uri, tensor_parallel_size=2, device="cpu", endpoint_url=endpoint, region="us-east-1", address="local",
             credentials=Credentials(access_key_id=key, secret_access_key=secret),
             config=cluster.Config(**json.loads(settings)))
"""


@contextlib.contextmanager
def everything_of(model: StoredModel, endpoint_url: str, settings: dict[str, Any]) -> Iterator[list[psutil.Process]]:
    """A client that loads, and all that it has started; all of it is killed at the end."""
    keys = (model.server.access_key_id, model.server.secret_access_key)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, model.uri, endpoint_url, *keys, json.dumps(settings)],
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT, "RAY_ADDRESS": "", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
    )
    everything = [psutil.Process(client.pid)]
    try:
        yield everything
    finally:
        everything += everything[0].children(recursive=True)
        for process in reversed(everything):  # parents last: nobody restarts or tidies anything
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        client.wait(30)
    _, alive = psutil.wait_procs(everything, timeout=10)
    assert not alive


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


def test_a_killed_cluster_leaves_a_usable_disk_and_no_arena(
    longshore: Longshore, llama: StoredModel, tmp_path: Path
) -> None:
    folder = tmp_path / SUBFOLDER
    disk = {"disk_cache_dir": str(tmp_path), "disk_cache_bytes": DISK_BYTES}
    with (
        GatedProxy(llama.server.endpoint_url, RANGES) as gate,
        everything_of(llama, gate.endpoint_url, {**TEST_SETTINGS, **disk}) as everything,
    ):
        gate.wait_until_held(2, WAIT_S)
        wait_for(folder, RANGES)
        (arena,) = arenas_mapped_by(everything[0].children(recursive=True))
        assert os.path.exists(arena)

    def swept() -> bool:  # if no agent of another cluster on this machine was first
        sweep()
        return not os.path.exists(arena)

    eventually(swept, "the arena cannot be swept")
    before_bytes = kept_bytes(folder)  # what was verified when everything was killed

    longshore.configure(empty=True, **disk)
    with CountingProxy(llama.server.endpoint_url) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "device": "cpu"}
        with cluster.load(llama.uri, tensor_parallel_size=2, **options) as model:
            assert model.call(shard_differs, str(llama.folder), 2, 1, KV_HEADS) == [[], []]
            (node,) = model.report.nodes
            wait_for(folder, node.needed_chunks)
        assert (node.disk_chunks, node.disk_bytes, node.cached_chunks) == (RANGES, before_bytes, 0)
        assert weights_bytes(proxy) == node.store_bytes == node.needed_bytes - before_bytes > 0
        assert kept_bytes(folder) == node.needed_bytes
        assert [status.disk_unkept_chunks for status in longshore.status().nodes if status.used_bytes] == [0]
