"""An agent begins a load: it reserves slots, then unpacks the tables once, and answers other calls meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from actors.node import chunk_flow
from cluster.fit.needs import min_slots
from cluster.messages import NodeJob
from cluster.planning.packed_plan import SharedTables, pack_shared
from tests.support.checkpoints import flat_objects
from tests.support.local_node import local_node, plan_of


def test_tables_are_unpacked_once_and_without_the_lock(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(flat_objects(tensors=4), (1, 1, 1), 1024)
    unpack, unpacked, at_it, go_on = chunk_flow.unpack_shared, [], threading.Event(), threading.Event()

    def slowly(data: bytes) -> SharedTables:
        unpacked.append(data)
        at_it.set()
        assert go_on.wait(20)
        return unpack(data)

    with local_node(shm_dir, slots=min_slots(1)) as node:
        first = node.begin(plan)
        monkeypatch.setattr(chunk_flow, "unpack_shared", slowly)
        job = NodeJob("second", 1, pack_shared(plan), "twin", (0,), frozenset(), min_slots(1), 3, 60.0, b"")
        for _ in range(3):
            assert not node.agent.begin(job)
        assert not unpacked
        node.agent.end(first)
        begun: list[bool] = []
        thread = threading.Thread(target=lambda: begun.append(node.agent.begin(job)))
        thread.start()
        assert at_it.wait(20)
        assert node.agent.facts().node_id == "node"  # answered meanwhile
        assert [str(holder) for holder in node.agent.slot_holders()] == [f"second: {min_slots(1)}"]
        go_on.set()
        thread.join()
        assert begun == [True]
        assert len(unpacked) == 1
        node.agent.end("second")
