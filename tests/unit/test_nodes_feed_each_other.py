"""Several nodes load one model, with real agents and ranks over real sockets: the store sends each byte once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cluster.messages import NodePeer
from cluster.planning.plan import LoadPlan
from cluster.telemetry.report import NodeReport
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import read_objects, write_tiny_llama
from tests.support.faulty_stores import WrappedStore
from tests.support.local_node import LocalNode, local_node, plan_of, run_all
from tests.support.reference_slices import check_exact

KEY = b"key of the load"
CHUNK_BYTES = 4096


class Nodes:
    """Nodes of one load, each with the same number of ranks."""

    def __init__(self, nodes: Sequence[LocalNode], objects: dict[str, bytes], sizes: tuple[int, int, int]) -> None:
        self.nodes, self.objects, self.sizes = nodes, objects, sizes
        self.plan: LoadPlan = plan_of(objects, sizes, CHUNK_BYTES)
        self.store = WrappedStore(MemoryStore(objects))
        each = len(self.plan.ranks) // len(nodes)
        self.ranks_of = [tuple(range(at * each, (at + 1) * each)) for at in range(len(nodes))]
        for node in nodes:
            node.agent.serve_peers("127.0.0.1")

    def load(self, only: Sequence[int] | None = None) -> list[NodeReport]:
        """Run the ranks of `only` these nodes, compare what they have, and return the report of each node."""
        members = tuple(
            NodePeer(f"node-{at}", ranks, node.agent.facts().peer)
            for at, (ranks, node) in enumerate(zip(self.ranks_of, self.nodes, strict=True))
        )
        found = []
        for at in range(len(self.nodes)) if only is None else only:
            node, ranks = self.nodes[at], self.ranks_of[at]
            node.begin(self.plan, "llama", ranks, peers=members, node_id=f"node-{at}", peer_key=KEY)
            found += [(rank, node.rank(self.plan, self.store, "llama", rank)) for rank in ranks]
        run_all([rank for _, rank in found])
        for number, rank in found:
            if isinstance(rank.outcome, BaseException):
                raise rank.outcome
            assert rank.loader.plan.rank == number
        if only is None:
            check_exact([rank for _, rank in found], self.objects, *self.sizes[:2])
        return [node.agent.report("llama") for at, node in enumerate(self.nodes) if only is None or at in only]


@pytest.fixture
def nodes_of(tmp_path: Path) -> Iterator[Any]:
    write_tiny_llama(tmp_path / "llama")
    objects = read_objects(tmp_path / "llama")
    with ExitStack() as stack:

        def make(count: int, sizes: tuple[int, int, int], slots: int = 8, **settings: Any) -> Nodes:
            nodes = []
            for number in range(count):
                (folder := tmp_path / f"node-{number}").mkdir()
                nodes.append(stack.enter_context(local_node(folder, slots, peer_port=0, **settings)))
            return Nodes(nodes, objects, sizes)

        yield make


def touched_bytes(plan: LoadPlan) -> int:
    touched = sorted(set().union(*(rank.chunk_ids.tolist() for rank in plan.ranks)))
    return int(plan.chunks.sizes_bytes()[touched].sum())


LAYOUTS = {
    "replicas": (2, (1, 1, 2)),
    "four replicas": (4, (1, 1, 4)),
    "tensor parallel over nodes": (2, (2, 1, 1)),
    "fully sharded over nodes": (3, (1, 3, 1)),
    "replicas of two ranks": (2, (2, 1, 2)),
}


@pytest.mark.parametrize("slots", [8, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_store_sends_each_byte_once(nodes_of: Any, layout: str, slots: int):
    nodes = nodes_of(*LAYOUTS[layout], slots)
    reports = nodes.load()
    assert nodes.store.read_bytes == touched_bytes(nodes.plan)
    for report in reports:
        assert report.store_bytes + report.peer_bytes + report.cached_bytes == report.needed_bytes
        assert not report.retries
    assert sum(report.store_bytes for report in reports) == nodes.store.read_bytes
