"""One checkpoint of small chunks in a bucket of a real S3 server, and loads of it by ranks in threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from cluster.layouts.mesh import Layout
from cluster.layouts.rules import rules_for
from cluster.planning.make_plan import build_load_plan
from cluster.planning.plan import LoadPlan
from cluster.telemetry.report import NodeReport
from storage.checkpoints.checkpoint import open_model
from storage.errors import LongshoreError
from storage.stores.embedded_s3 import EmbeddedS3
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import open_store
from tests.support.checkpoints import flat_objects
from tests.support.local_node import LocalNode, Rank, run_all, with_digests
from tests.support.s3_servers import server_ref

KEY = "model.safetensors"
CHUNK_BYTES = 64 << 10
TENSORS = 16
READ_TIMEOUT_S = 10.0  # a loaded machine is no fault
SHORT_TIMEOUT_S = 0.4  # where an answer stalls; others may be late by then too, so more may be fetched again
FSDP = 2
OBJECTS = flat_objects(tensors=TENSORS, rows=4096, seed=3)  # a tensor is a chunk
# One worker's tries and the node's, few enough that a hopeless case ends within a second or two.
IMPATIENT = {"fetch_attempts": 2, "chunk_attempts": 2}


class Bucket:
    """A bucket of one checkpoint, without a manifest in it: its chunks would be too large for these tests."""

    def __init__(self, server: EmbeddedS3, name: str) -> None:
        self.server, self.name = server, name
        self.path = server.make_bucket(name) / KEY
        self.path.write_bytes(OBJECTS[KEY])
        server.refresh()

    @contextmanager
    def store(self, endpoint_url: str, read_timeout_s: float = READ_TIMEOUT_S) -> Iterator[ObjectStore]:
        ref = replace(server_ref(self.server, self.name), endpoint_url=endpoint_url)
        store = open_store(ref, self.server.credentials(), read_timeout_s=read_timeout_s)
        try:
            yield store
        finally:
            store.close()

    def plan(self, objects: Mapping[str, bytes] = OBJECTS) -> LoadPlan:
        """Ranks that share all tensors by rows, so that every chunk is needed by both."""
        with self.store(self.server.endpoint_url) as store:
            index = with_digests(open_model(store, chunk_bytes=CHUNK_BYTES), objects)
        return build_load_plan(index, Layout(1, FSDP, 1), rules_for(None, None), None)

    def become(self, data: bytes | None) -> None:
        """Replace or (None) remove the object; returns when the server has noticed."""
        if data is None:
            self.path.unlink()
        else:
            fresh = self.path.with_suffix(".new")
            fresh.write_bytes(data)
            fresh.replace(self.path)
        self.server.refresh()


def run(node: LocalNode, plan: LoadPlan, store: ObjectStore) -> tuple[list[Rank], NodeReport]:
    load_id = node.begin(plan)
    ranks = node.ranks(plan, store, load_id)
    run_all(ranks)
    return ranks, node.agent.report(load_id)


def check_at_rest(node: LocalNode) -> None:
    """No slot is leased, fenced or held."""
    stats = node.agent._ledger._cache.stats()
    assert (stats.leased_slots, stats.quarantined_slots) == (0, 0)


def refused_with(ranks: list[Rank]) -> LongshoreError:
    """The one error that all ranks of a failed load have."""
    for rank in ranks:
        assert isinstance(rank.outcome, LongshoreError), rank.outcome
        assert rank.device._segments == []
    outcome = ranks[0].outcome
    assert isinstance(outcome, LongshoreError)
    assert {type(rank.outcome) for rank in ranks} == {type(outcome)}
    return outcome
