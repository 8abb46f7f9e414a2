"""A fault costs only the bytes in flight, never bytes that had arrived."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.counting_proxy import Request
from tests.support.gated_proxy import GatedProxy
from tests.support.half_load import HalfLoad
from tests.support.ray_clusters import Longshore, eventually
from tests.support.stored_models import CHUNK_BYTES, StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.long]

REQUESTS = 2  # at a time and rank
SETTLED_S = 2.0
PATIENCE_S = 240.0
MOST_MORE = 0.15  # of an undisturbed load's bytes, that the loss of one worker may cost


class HalfwayProxy(GatedProxy):
    """Stops every body of weights where it is, once so many bytes of them have passed, until `open`."""

    def __init__(self, upstream_url: str, passing_bytes: int) -> None:
        self._left_bytes = passing_bytes
        super().__init__(upstream_url, ranges=0)

    def before_request(self, request: Request) -> None:
        """Every request passes."""

    def passing(self, request: Request, size_bytes: int) -> None:
        if not request.path.endswith(".safetensors"):
            return
        with self._gate:
            self._left_bytes -= size_bytes
            if self._left_bytes < 0 and not self._open:
                self.wait_at_gate(request)

    def weights_bytes(self) -> int:
        return sum(size for path, size in self.bytes_by_path().items() if path.endswith(".safetensors"))


def test_a_killed_worker_costs_only_its_reads_in_flight(longshore: Longshore, llama: StoredModel) -> None:
    # What stands still must not be asked for again, however long the other rank takes to come up.
    patience = dict.fromkeys(("read_timeout_s", "lease_deadline_s", "stuck_after_s"), PATIENCE_S)
    longshore.configure(empty=True, fetch_threads=REQUESTS, **patience)
    half_bytes = sum(path.stat().st_size for path in llama.folder.glob("*.safetensors")) // 2
    with ThreadPoolExecutor(1) as pool, HalfwayProxy(llama.server.endpoint_url, half_bytes) as proxy:
        half = HalfLoad(longshore, llama, proxy, pool)
        loading = half.begin(tensor_parallel_size=2)
        time.sleep(SETTLED_S)  # the agent has received the reports of finished chunks by then
        victim = half.readers()[-1]
        longshore.kill(victim)
        replacement = victim.removesuffix("-0") + "-1"
        eventually(lambda: replacement in longshore.actor_names("worker-"), "no replacement came")
        proxy.open()
        with loading.result(300) as model:
            assert half.is_exact(model, 2)
            assert model.report.placement_mode == "via_arena"
            (node,) = model.report.nodes
        undisturbed_bytes = node.needed_bytes  # (see integration/test_store_traffic.py)
        assert node.store_bytes == undisturbed_bytes
        assert node.refetched_bytes == 0
        more_bytes = proxy.weights_bytes() - undisturbed_bytes
        assert 0 < more_bytes <= REQUESTS * CHUNK_BYTES
        assert more_bytes <= MOST_MORE * undisturbed_bytes
