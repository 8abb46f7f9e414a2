"""The head of the Ray cluster is killed. With GCS fault tolerance loads go on; without it clients get an error."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from storage.disk.files import SUBFOLDER
from tests.support.counting_proxy import CountingProxy
from tests.support.disk_chunks import chunks_in
from tests.support.gated_proxy import GatedProxy
from tests.support.head_cluster import WAIT_S, HeadCluster, Redis, said
from tests.support.ray_clusters import TEST_SETTINGS, eventually, variables
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

LOAD = """
import json, cluster
from ray.util import get_placement_group, placement_group
from storage.store_ref import Credentials
from tests.support.reference_slices import shard_differs
given = json.loads(sys.argv[1])
group = None
if given["grouped"]:
    try:
        group = get_placement_group("ranks")
    except ValueError:
        group = placement_group([{NODE: 0.01}] * 2, name="ranks", lifetime="detached")
model = cluster.load(given["uri"], tensor_parallel_size=2, device="cpu", endpoint_url=given["endpoint"], keep=True,
                     region="us-east-1", credentials=Credentials(*given["keys"]), placement_group=group)
result = {"model": model.model_id, "nodes": model.report.as_dict()["nodes"],
        "ranks": model.report.as_dict()["ranks"],
        "different": model.call(shard_differs, given["folder"], 2, 1, given["kv_heads"])}
print("LOADED " + json.dumps(result), flush=True)
"""

OUTLIVE = """
import json, time, cluster
from concurrent.futures import ThreadPoolExecutor
from storage.store_ref import Credentials
given = json.loads(sys.argv[1])
options = dict(device="cpu", region="us-east-1", credentials=Credentials(*given["keys"]))
group = ray.util.placement_group([{NODE: 0.01}] * 2)
model = cluster.load(given["uri"], tensor_parallel_size=2, endpoint_url=given["open"], placement_group=group,
                     **options)
def raised(verb, *arguments, **options):
    try:
        return repr(verb(*arguments, **options))
    except Exception as error:
        return type(error).__name__
pool = ThreadPoolExecutor()
group = ray.util.placement_group([{NODE: 0.01}])
loading = pool.submit(raised, cluster.load, given["uri"], endpoint_url=given["endpoint"], placement_group=group,
                      **options)
calling = pool.submit(raised, model.call, lambda shard: time.sleep(3600))
print("READY", model.report.nodes[0].needed_chunks, flush=True)
sys.stdin.readline()
said = {"load": loading.result(), "call": calling.result(), "next call": raised(model.call, len),
        "status": raised(cluster.status)}
print("SAID " + json.dumps(said), flush=True)
ray.shutdown()
print("SHUT", flush=True)
"""


def arguments(model: StoredModel, proxy: CountingProxy, *, grouped: bool = True) -> str:
    """`grouped`: all ranks are on the worker node."""
    given = {
        "uri": model.uri,
        "folder": str(model.folder),
        "kv_heads": KV_HEADS,
        "endpoint": proxy.endpoint_url,
        "open": model.server.endpoint_url,
        "keys": [model.server.access_key_id, model.server.secret_access_key],
        "grouped": grouped,
    }
    return json.dumps(given)


def loaded(client: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a client of LOAD printed. Every slice of every rank must be right."""
    result: dict[str, Any] = json.loads(said(client, "LOADED "))
    assert result["different"] == [[], []]
    return result


def weights_bytes(proxy: CountingProxy) -> int:
    return sum(size for path, size in proxy.bytes_by_path().items() if path.endswith(".safetensors"))


@pytest.mark.skipif(not Redis.is_installed(), reason="there is no redis-server (Debian: apt-get install redis-server)")
def test_with_gcs_fault_tolerance_a_load_goes_on(llama: StoredModel) -> None:
    """A rank beside the head goes on without it; one that was lost with it begins anew on the next."""
    patience = {"node_wait_s": 2 * WAIT_S, "orphan_after_s": 4 * WAIT_S}  # a head may take long to start
    patience |= {"read_timeout_s": 2 * WAIT_S, "lease_deadline_s": 2 * WAIT_S}  # who waits at the gate waits once
    environ = variables({**TEST_SETTINGS, **patience, "cpu_ranks_per_node": 1})
    with (
        Redis() as redis,
        HeadCluster(redis, **environ) as there,
        GatedProxy(llama.server.endpoint_url, ranges=4) as proxy,
    ):
        asked = arguments(llama, proxy, grouped=False)
        first = there.client(LOAD, asked)
        proxy.wait_until_held(4, WAIT_S)
        there.lose_head()
        proxy.open()
        size_bytes = sum(path.stat().st_size for path in llama.folder.glob("*.safetensors"))
        eventually(lambda: weights_bytes(proxy) > 0.45 * size_bytes, "the rank does not go on without the head", WAIT_S)
        there.start_head()
        results = [loaded(first), loaded(there.client(LOAD, asked))]
        assert results[0]["model"] == results[1]["model"]
        kept, lost = sorted(results[0]["ranks"], key=lambda rank: int(rank["incarnation"]))
        assert kept["incarnation"] == 0 < lost["incarnation"]
        nodes = {node["node"]: node for node in results[0]["nodes"]}
        node = nodes[kept["node"]]
        assert node["store_chunks"] + node["peer_chunks"] == node["needed_chunks"]
        assert node["refetched_chunks"] == 0


def test_without_gcs_recovery_loads_fail_and_the_disk_is_reused(llama: StoredModel, tmp_path: Path) -> None:
    disk = {"disk_cache_dir": str(tmp_path), "disk_cache_bytes": 1 << 28}
    with HeadCluster(**variables({**TEST_SETTINGS, **disk})) as there:
        with GatedProxy(llama.server.endpoint_url, ranges=0) as proxy:
            proxy.hold_all()  # the chunks will be in the arena
            patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600", "LONGSHORE_CLUSTER_LOST_AFTER_S": "4"}
            client = there.client(OUTLIVE, arguments(llama, proxy), **patience)  # Ray would end it
            chunks = int(said(client, "READY"))
            on_disk = str(tmp_path / SUBFOLDER)
            eventually(lambda: len(chunks_in(on_disk)) == chunks, "chunks do not come to disk", WAIT_S)
            proxy.wait_until_held(1, WAIT_S)
            there.lose_head()
            print("lost", file=client.stdin, flush=True)
            errors = json.loads(said(client, "SAID"))
            assert errors == dict.fromkeys(("load", "call", "next call", "status"), "ClusterLost")
            said(client, "SHUT")
            assert client.wait() == 0  # Ray did not end it
        before = there.arenas()
        there.start_head()
        eventually(lambda: not there.worker_is_up, "the worker node stays with the lost head", WAIT_S)
        there.start_worker()
        with CountingProxy(llama.server.endpoint_url) as proxy:
            node = loaded(there.client(LOAD, arguments(llama, proxy)))["nodes"][0]
            assert (node["disk_chunks"], node["disk_bytes"]) == (node["needed_chunks"], node["needed_bytes"])
            assert weights_bytes(proxy) == 0
        assert len(before) == len(there.arenas()) == 1
        assert before != there.arenas()  # that of the lost cluster was swept
