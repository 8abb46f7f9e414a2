"""A load of two ranks in CPU memory that waits in its middle, and the workers that read there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cluster
from cluster import LoadedModel
from tests.support.gated_proxy import GatedProxy
from tests.support.ray_clusters import Longshore, eventually
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

RANKS = 2


def readers(longshore: Longshore, holds: Callable[[int], bool]) -> list[str]:
    """Names of the workers that have a request at a proxy's gate, once every rank's worker lives.

    `holds(pid)`: whether the gate holds one of that process.
    """
    workers = longshore.living_workers()
    return [name for name, pid in sorted(workers.items()) if holds(pid)] if len(workers) >= RANKS else []


class HalfLoad:
    """Some chunks have come; further reads wait at the gate until `proxy.open()`."""

    def __init__(self, longshore: Longshore, model: StoredModel, proxy: GatedProxy, pool: ThreadPoolExecutor) -> None:
        self.stored, self.proxy = model, proxy
        self._longshore, self._pool = longshore, pool

    def begin(self, *, reading: int = 1, **options: Any) -> Future[LoadedModel]:
        """Wait until this many ranks read. Raises the load's error when it ends before that."""
        options = {
            **self.stored.options,
            "endpoint_url": self.proxy.endpoint_url,
            "device": "cpu",
            "timeout_s": 300,
            **options,
        }
        loading = self._pool.submit(cluster.load, self.stored.uri, **options)

        def is_half() -> bool:
            if loading.done():
                loading.result()
            return len(self.readers()) >= reading

        eventually(is_half, "the load does not reach its middle")
        return loading

    def readers(self) -> list[str]:
        """Names of the workers that read, and so have sent their hello to the agent."""
        return readers(self._longshore, self.proxy.holds_for)

    def is_exact(self, model: LoadedModel, tensor_parallel_size: int) -> bool:
        """Return whether every slice of both ranks matches the safetensors library; the rest is split for FSDP."""
        fsdp = RANKS // tensor_parallel_size
        differs = model.call(shard_differs, str(self.stored.folder), tensor_parallel_size, fsdp, KV_HEADS)
        return differs == [[]] * RANKS
