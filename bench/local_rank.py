"""Ours without Ray: one rank and the agent of its node in this process, as the executor's own tests run them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from actors.devices.device import open_device
from actors.node_agent import NodeAgent
from actors.rank.executor import RankLoader
from cluster.config import Config
from cluster.fit.needs import min_slots
from cluster.layouts.mesh import Layout
from cluster.messages import FetchSettings, NodeJob, RankJob
from cluster.planning.make_plan import prepare_plan
from cluster.planning.packed_plan import pack_shared
from cluster.precision.recipes import Precision
from cluster.request import StoreOptions, make_request

if TYPE_CHECKING:
    import torch

    from cluster.telemetry.report import RankReport

_LOAD_ID = "bench"


@contextmanager
def node_agent(config: Config) -> Iterator[NodeAgent]:
    """The agent of a node, with its arena; both are gone at the end. Raises ArenaError when first used."""
    agent = NodeAgent(config, "bench", "local")
    try:
        yield agent
    finally:
        agent.shutdown()


def load_rank(
    agent: NodeAgent,
    config: Config,
    model_uri: str,
    device_kind: str,
    placement: str,
    precision: Precision | None = None,
) -> tuple[dict[str, torch.Tensor], RankReport]:
    """All of a model, planned, fetched, verified where it can be, and on the device. Raises LongshoreError."""
    request = make_request(
        model_uri,
        layout=Layout(),
        store_options=StoreOptions(),
        credentials=None,
        layout_rules=None,
        device=device_kind,
        placement=placement,
        precision=precision,
    )
    _, plan = prepare_plan(request, chunk_bytes=config.chunk_bytes, read_timeout_s=config.read_timeout_s)
    shared = pack_shared(plan)
    job = NodeJob(
        load_id=_LOAD_ID,
        attempt=1,
        shared=shared,
        store_identity=request.store.ref.identity(),
        ranks=(0,),
        done=frozenset(),
        min_slots=min_slots(1),
        chunk_attempts=config.chunk_attempts,
        lease_deadline_s=config.lease_deadline_s,
        record=b"",
        placement=placement,
    )
    if not agent.begin(job):
        raise RuntimeError("the arena has not the slots that one rank needs")
    fetch = FetchSettings(config.fetch_threads, config.fetch_attempts, config.read_timeout_s, config.heartbeat_s)
    device = open_device(device_kind)
    rank_job = RankJob(
        load_id=_LOAD_ID,
        attempt=1,
        rank=0,
        incarnation=0,
        shared=shared,
        store=request.store,
        fetch=fetch,
        placement=placement,
    )
    loader = RankLoader(agent, rank_job, device)
    try:
        report = loader.run()
    finally:
        agent.end(_LOAD_ID)
    return device.tensors(loader.plan.slices), report
