"""Longshore itself: whole loads, and one rank without Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.contender import Spec
from bench.harness.measure import measured, settle
from bench.harness.models import BUCKET, MODEL, PART_BUCKET, PLAIN, SMALL, TWIN, TWIN_PLAIN, TWIN_XXH3, XXH3
from cluster.config import Config
from cluster.fit.needs import min_slots
from cluster.messages import FetchSettings, NodeJob, RankJob
from cluster.options import LoadOptions
from cluster.planning.make_plan import prepare_plan
from cluster.planning.packed_plan import pack_shared
from cluster.precision.recipes import Precision
from cluster.request import make_request

if TYPE_CHECKING:
    import torch

    from actors.node_agent import NodeAgent
    from cluster.telemetry.report import RankReport

WARM_S = 600.0
# case, bucket and model, new workers; each model has keys of its own, so none of its chunks is in the cache before
_LOADS = (
    ("cold", BUCKET, MODEL, True),
    ("cold_unverified", BUCKET, PLAIN, True),
    ("", BUCKET, XXH3, False),  # so that workers are warm
    ("warm", BUCKET, TWIN, False),
    ("warm_unverified", BUCKET, TWIN_PLAIN, False),
    ("warm_xxh3", BUCKET, TWIN_XXH3, False),
    ("part", PART_BUCKET, TWIN, False),
    ("part_unverified", PART_BUCKET, TWIN_PLAIN, False),
)


def load_whole(spec: Spec) -> None:
    """Call `cluster.load(device="cpu")`, from the call to READY, with default settings. Workers keep the tensors.

    "cold" loads start their workers. The other loads take over the workers of the load before, which is the one thing
    that is set: `warm_workers_s` is 0 by default. Options: "layout" and "placement", arguments of the call; "part":
    bytes of the smaller models, which show what a load costs however large it is; "arena_bytes", the setting.
    """
    import cluster
    from cluster.client import release_warm

    arguments = {"device": "cpu", "placement": spec.options["placement"], "progress": False}
    arguments |= {**spec.options["layout"], **store_arguments(spec)}
    part_bytes = int(spec.options.get("part", 0))
    with our_cluster(spec, cluster.Config(warm_workers_s=WARM_S, arena_bytes=spec.options.get("arena_bytes", 0))):
        # Starts the node's agent, as any load before would have.
        cluster.load(model_uri(spec, SMALL), device="cpu", progress=False, **store_arguments(spec)).release()
        for case, bucket, model, cold in _LOADS:
            if bucket == PART_BUCKET and not part_bytes:
                continue
            if cold:
                release_warm()
            is_part = bucket == PART_BUCKET
            loaded = dataclasses.replace(spec, bucket=bucket, model_bytes=part_bytes) if is_part else spec
            uri = model_uri(loaded, model)
            settle()
            if not case:
                cluster.load(uri, **arguments).release()
                continue
            with measured(loaded, case, watch_memory=False) as m:  # the cache takes new memory, also when warm
                loading = cluster.load(uri, **arguments)
                m.stop()
                report = loading.report
                if report.cached_bytes or report.resident:
                    raise RuntimeError(f"not from the store: {report.cached_bytes} bytes were in the cache before")
                m.extra |= {"stream_s": report.load_s, "ready_s": report.first_byte_s, "verified": report.verified}
                m.extra |= {"placement": report.placement_mode, "stages": dataclasses.asdict(report.stages)}
                m.store_bytes = m.store_bytes or report.store_bytes
            loading.release()


@contextlib.contextmanager
def node_agent(config: Config) -> Iterator[NodeAgent]:
    """Run the agent of a node in this process, with its arena. Raises ArenaError when first used."""
    import actors.devices.device
    import actors.rank.executor  # noqa: F401  # both for `load_rank`, which runs under the clock
    from actors.node_agent import NodeAgent

    agent = NodeAgent(config, "bench", "local")
    try:
        yield agent
    finally:
        agent.shutdown()


def load_rank(
    agent: NodeAgent, config: Config, uri: str, device_kind: str, placement: str, precision: Precision | None = None
) -> tuple[dict[str, torch.Tensor], RankReport]:
    """Load all of a model onto the device, with one rank in this process and without Ray. Raises LongshoreError."""
    from actors.devices.device import open_device
    from actors.rank.executor import RankLoader

    node_job, (job,) = plan_jobs(uri, config, "bench", 1, device_kind, placement, precision)
    if not agent.begin(node_job):
        raise RuntimeError("the arena has not the slots that one rank needs")
    device = open_device(device_kind)
    loader = RankLoader(agent, job, device)
    try:
        report = loader.run()
    finally:
        agent.end(node_job.load_id)
    return device.tensors(loader.plan.slices), report


def plan_jobs(
    uri: str,
    config: Config,
    load_id: str,
    ranks: int,
    device: str = "cpu",
    placement: str = "via_arena",
    precision: Precision | None = None,
) -> tuple[NodeJob, list[RankJob]]:
    """Plan a load by `ranks` ranks of one node, as the coordinator does."""
    options = LoadOptions(uri, fsdp_size=ranks, device=device, placement=placement)
    request = dataclasses.replace(make_request(options), precision=precision or Precision())
    _, plan = prepare_plan(request, chunk_bytes=config.chunk_bytes, read_timeout_s=config.read_timeout_s)
    shared = pack_shared(plan)
    node_job = NodeJob(
        load_id=load_id,
        attempt=1,
        shared=shared,
        store_identity=request.store.ref.identity(),
        ranks=tuple(range(ranks)),
        done=frozenset(),
        min_slots=min_slots(ranks),
        chunk_attempts=config.chunk_attempts,
        lease_deadline_s=config.lease_deadline_s,
        record=b"",
        placement=placement,
    )
    fetch = FetchSettings(config.fetch_threads, config.fetch_attempts, config.read_timeout_s, config.heartbeat_s)
    return node_job, [RankJob(load_id, 1, rank, 0, shared, request.store, fetch, placement) for rank in range(ranks)]


def store_arguments(spec: Spec) -> dict[str, Any]:
    """Return the arguments of `cluster.load` for the store. The server checks no signature, but each is made."""
    from storage.store_ref import Credentials

    if spec.source == "file":
        return {}
    return {"endpoint_url": spec.endpoint, "region": "us-east-1", "credentials": Credentials("bench", "bench")}


def model_uri(spec: Spec, name: str) -> str:
    """Return the URI of one of the run's models (`bench.harness.models`)."""
    if spec.source == "file":
        return (Path(spec.folder).parents[1] / spec.bucket / name).as_uri()
    return f"s3://{spec.bucket}/{name}"


@contextlib.contextmanager
def our_cluster(spec: Spec, config: Config) -> Iterator[None]:
    """Run a Ray cluster of one node with a coordinator, gone without a trace at the end."""
    from cluster.command_line.demo import sandbox
    from cluster.joining.connection import connect, disconnect

    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Workers import the actors of the benchmark from there.
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    if spec.ca_bundle:
        os.environ["AWS_CA_BUNDLE"] = spec.ca_bundle
    with sandbox():
        connect("local", config)
        try:
            yield
        finally:
            disconnect()
