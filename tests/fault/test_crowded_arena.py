"""Two loads in an arena that has just their minimum of slots, and a rank that dies or stops: both come to their end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import cluster
from cluster.fit.needs import min_slots
from tests.support.gated_proxy import GatedProxy
from tests.support.half_load import readers
from tests.support.ray_clusters import MIB, Longshore, eventually
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = pytest.mark.slow


@pytest.fixture
def one_node(longshore: Longshore) -> Iterator[Any]:
    """Places for two ranks, all on one node; CPU ranks take nothing of them, so several loads can use them."""
    from ray.util import placement_group, remove_placement_group

    group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    assert group.wait(120)
    try:
        yield group
    finally:
        remove_placement_group(group)


def room_for(loads: int) -> pytest.MarkDecorator:
    """An arena in which so many loads have their minimum at once."""
    return pytest.mark.cluster_settings(empty=True, arena_bytes=loads * min_slots(2) * MIB, stuck_after_s=8)


@pytest.mark.parametrize(
    ("loads", "strike"),
    [
        pytest.param(1, signal.SIGSTOP, marks=room_for(1), id="one after the other-stopped"),
        pytest.param(2, signal.SIGKILL, marks=room_for(2), id="at once-killed"),
        pytest.param(1, signal.SIGKILL, marks=[room_for(1), pytest.mark.long], id="one after the other-killed"),
        pytest.param(2, signal.SIGSTOP, marks=[room_for(2), pytest.mark.long], id="at once-stopped"),
    ],
)
def test_a_rank_that_dies_or_stops_blocks_no_other(
    longshore: Longshore, llama: StoredModel, one_node: Any, loads: int, strike: int
) -> None:
    """`loads`: how many have their minimum at once, by the size of the arena."""
    layouts = [(2, 1), (1, 2)]  # the same chunks: one load waits for what the other fetches
    with ThreadPoolExecutor(2) as pool, GatedProxy(llama.server.endpoint_url, ranges=6) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "placement_group": one_node, "device": "cpu"}
        loading = [
            pool.submit(
                cluster.load, llama.uri, tensor_parallel_size=tensor_parallel, fsdp_size=fsdp, keep=True, **options
            )
            for tensor_parallel, fsdp in layouts
        ]
        proxy.wait_until_held(2)
        eventually(lambda: len(longshore.models()) == 2, "there are not two loads")
        longshore.kill(eventually(lambda: readers(longshore, proxy.holds_for), "no rank reads")[0], strike)
        proxy.open()
        for (tensor_parallel, fsdp), future in zip(layouts, loading, strict=True):
            model = future.result(300)
            differs = model.call(shard_differs, str(llama.folder), tensor_parallel, fsdp, KV_HEADS)
            assert differs == [[], []]


@pytest.mark.cluster_settings(empty=True, arena_bytes=min_slots(2) * MIB, slots_wait_s=2)
def test_a_load_waits_for_slots_until_its_time_is_over(longshore: Longshore, llama: StoredModel, one_node: Any) -> None:
    with ThreadPoolExecutor(1) as pool, GatedProxy(llama.server.endpoint_url, ranges=6) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "placement_group": one_node, "device": "cpu"}
        first = pool.submit(cluster.load, llama.uri, tensor_parallel_size=2, **options)
        proxy.wait_until_held()
        (holder,) = longshore.models()
        with pytest.raises(cluster.ArenaBusy, match=f"{holder.progress.model_id}: 5") as busy:
            cluster.load(llama.uri, fsdp_size=2, **options)
        assert busy.value.details["waited_s"] >= 2
        proxy.open()
        first.result(300).release()
