"""What a fault costs in bytes out of the store: what was on its way, and nothing that had arrived."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import cluster
from tests.support.counting_proxy import CountingProxy, ports_of
from tests.support.half_load import readers
from tests.support.ray_clusters import Longshore, eventually
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import CHUNK_BYTES, KV_HEADS, StoredModel

pytestmark = pytest.mark.slow

REQUESTS = 2  # at a time and rank
SETTLED_S = 2.0
PATIENCE_S = 240.0
MOST_MORE = 0.15  # of an undisturbed load's bytes, that the loss of one worker may cost


class HalfwayProxy(CountingProxy):
    """Stops every body of weights where it is, once so many bytes of them have passed, until `go_on`."""

    def __init__(self, upstream_url: str, passing_bytes: int) -> None:
        self._gate = threading.Condition()
        self._left_bytes = passing_bytes
        self._stopped: set[int] = set()
        self._open = False
        super().__init__(upstream_url)

    def passing(self, path: str, size_bytes: int) -> None:
        if not path.endswith(".safetensors"):
            return
        with self._gate:
            self._left_bytes -= size_bytes
            if self._left_bytes < 0 and not self._open:
                self._stopped.add(self.heads.port)
                self._gate.wait_for(lambda: self._open)

    def stopped_for(self, pid: int) -> bool:
        """Whether a body that this process reads stands still."""
        mine = ports_of(pid)
        with self._gate:
            return bool(self._stopped & mine)

    def go_on(self) -> None:
        with self._gate:
            self._open = True
            self._gate.notify_all()

    def close(self) -> None:
        self.go_on()
        super().close()

    def weights_bytes(self) -> int:
        return sum(size for path, size in self.bytes_by_path().items() if path.endswith(".safetensors"))


def test_a_worker_killed_half_way_costs_what_it_was_reading(longshore: Longshore, llama: StoredModel) -> None:
    # What stands still must not be asked for again, however long the other rank takes to come up.
    patience = dict.fromkeys(("read_timeout_s", "lease_deadline_s", "stuck_after_s"), PATIENCE_S)
    longshore.configure(empty=True, fetch_threads=REQUESTS, **patience)
    half_bytes = sum(path.stat().st_size for path in llama.folder.glob("*.safetensors")) // 2
    with ThreadPoolExecutor(1) as pool, HalfwayProxy(llama.server.endpoint_url, half_bytes) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "device": "cpu"}
        loading = pool.submit(cluster.load, llama.uri, tensor_parallel_size=2, **options)

        def reading() -> list[str]:
            if loading.done():
                loading.result()
            return readers(longshore, proxy.stopped_for)

        eventually(reading, "the load does not come half-way", 120)
        time.sleep(SETTLED_S)  # what had arrived has been told to the agent by then
        victim = reading()[-1]
        longshore.kill(victim)
        replacement = victim.removesuffix("-0") + "-1"
        eventually(lambda: replacement in longshore.actor_names("worker-"), "no replacement came", 60)
        proxy.go_on()
        with loading.result(180) as model:
            assert model.call(shard_differs, str(llama.folder), 2, 1, KV_HEADS) == [[], []]
            assert model.report.placement_mode == "via_arena"
            (node,) = model.report.nodes
        undisturbed_bytes = node.needed_bytes  # (see integration/test_store_traffic.py)
        assert node.store_bytes == undisturbed_bytes
        assert node.refetched_bytes == 0
        more_bytes = proxy.weights_bytes() - undisturbed_bytes
        assert 0 < more_bytes <= REQUESTS * CHUNK_BYTES
        assert more_bytes <= MOST_MORE * undisturbed_bytes
