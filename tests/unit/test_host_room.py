"""Host memory that several nodes, loads and new processes share, checked before they take it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.config import Config
from cluster.fit.needs import WORKER_BYTES, Claim, NodeNeed, larger_claims, room_problems
from cluster.scheduling.topology import NodeInfo
from storage.host.memory import MemoryPool

GIB = 1 << 30
CONFIG = Config(host_reserve_bytes=GIB)
HOST = MemoryPool("host", 10 * GIB, 64 * GIB)
NODE = NodeInfo("a", "host-a", pools=(HOST,))
TWIN = replace(NODE, node_id="b", host="host-b")


def problems(
    needs: dict[int, NodeNeed], *nodes: NodeInfo, claims: tuple[Claim, ...] = (), config: Config = CONFIG
) -> list[str]:
    return room_problems(nodes, needs, claims, config)


def test_nodes_of_one_host_share_its_memory() -> None:
    need = NodeNeed(1, 5 * GIB)
    assert problems({0: need}, NODE, TWIN) == []
    (text,) = problems({0: need, 1: need}, NODE, TWIN)
    assert text == (
        "host-a, host-b: needs 10.7 GB of host memory (10.7 GB for 2 ranks, 0 B for the arena's window), "
        "has 9.66 GB beyond the reserve"
    )
    elsewhere = replace(TWIN, pools=(replace(HOST, pool_id="another host"),))
    assert problems({0: need, 1: need}, NODE, elsewhere) == []


def test_the_least_free_memory_of_a_shared_host_counts() -> None:
    """Two agents measured one after the other, and memory was taken in between."""
    later = replace(TWIN, pools=(replace(HOST, free_bytes=4 * GIB),))
    assert problems({0: NodeNeed(1, 2 * GIB), 1: NodeNeed(1, 2 * GIB)}, NODE, later)
    assert not problems({0: NodeNeed(1, GIB), 1: NodeNeed(1, 2 * GIB)}, NODE, later)


def test_containers_on_one_host_have_limits_of_their_own() -> None:
    pods = [replace(node, pools=(HOST, MemoryPool(f"pod {node.node_id}", 4 * GIB, 4 * GIB))) for node in (NODE, TWIN)]
    assert problems({0: NodeNeed(1, 3 * GIB), 1: NodeNeed(1, 3 * GIB)}, *pods) == []
    (text,) = problems({0: NodeNeed(1, 3 * GIB), 1: NodeNeed(1, 3 * GIB + 1)}, *pods)
    assert text.startswith("host-b: needs 3.22 GB")
    # Each has room in its own, the host has not for both.
    pods = [replace(pod, pools=(HOST, replace(pod.pools[1], free_bytes=9 * GIB))) for pod in pods]
    (text,) = problems({0: NodeNeed(1, 5 * GIB), 1: NodeNeed(1, 5 * GIB)}, *pods)
    assert text.startswith("host-a, host-b: needs")


def test_the_pool_that_lacks_most_is_reported() -> None:
    node = replace(NODE, pools=(HOST, MemoryPool("pod", 2 * GIB, 4 * GIB)))
    (text,) = problems({0: NodeNeed(1, 20 * GIB)}, node)
    assert "has 1.07 GB beyond the reserve" in text


@pytest.mark.parametrize(
    ("claim", "counts"),
    [
        (Claim("other", "a", ("host",), 5 * GIB), True),
        (Claim("other", "elsewhere", ("host",), 5 * GIB), True),  # another node of the same host
        (Claim("other", "a", (), 5 * GIB), True),  # its coordinator was restarted
        (Claim("other", "elsewhere", ("another host",), 5 * GIB), False),
        (Claim("other", "elsewhere", (), 5 * GIB), False),
    ],
)
def test_memory_promised_to_other_loads_is_not_free(claim: Claim, counts: bool) -> None:
    assert problems({0: NodeNeed(1, 4 * GIB)}, NODE, claims=(claim,)) == []
    found = problems({0: NodeNeed(1, 4 * GIB + 1)}, NODE, claims=(claim,))
    assert bool(found) == counts
    assert not found or found[0].endswith(
        "has 4.29 GB beyond the reserve and memory promised to other loads (5.37 GB to other)"
    )


def test_memory_of_processes_to_be_started_is_counted_first() -> None:
    room = 9 * GIB - 4 * WORKER_BYTES
    assert problems({0: NodeNeed(4, room, workers=4)}, NODE) == []
    (text,) = problems({0: NodeNeed(4, room + 1, workers=4)}, NODE)
    assert "1.26 GB for 4 new processes" in text
    assert problems({0: NodeNeed(4, room + 1)}, NODE) == []  # a worker group has its processes


def test_memory_kept_by_workers_is_available_to_them() -> None:
    kept = replace(NODE, kept_bytes=3 * GIB)
    assert problems({0: NodeNeed(1, 12 * GIB)}, kept) == []
    assert problems({0: NodeNeed(1, 12 * GIB + 1)}, kept)
    # More of it than the load can use makes no room for anything else.
    assert problems({0: NodeNeed(1, GIB, window_bytes=9 * GIB + 1)}, kept)


def test_the_limit_where_ray_kills_workers_is_a_reserve() -> None:
    tight = replace(NODE, pools=(replace(HOST, reserve_bytes=3 * GIB),))
    assert problems({0: NodeNeed(1, 7 * GIB)}, tight) == []
    assert problems({0: NodeNeed(1, 7 * GIB + 1)}, tight)
    larger = Config(host_reserve_bytes=4 * GIB)
    assert problems({0: NodeNeed(1, 6 * GIB + 1)}, tight, config=larger)


def test_larger_claims_keep_loads_that_changed_meanwhile() -> None:
    before = [Claim("goes on", "a", (), 9), Claim("ended", "a", (), 5)]
    after = [Claim("goes on", "a", (), 4), Claim("came", "a", (), 3)]
    assert [(claim.model_id, claim.size_bytes) for claim in larger_claims(before, after)] == [
        ("goes on", 9),
        ("came", 3),
    ]
