"""Longshore itself: a whole load, a load into the arena only, and one rank without Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.contender import Spec
from bench.harness.measure import is_ray_daemon, measured, tree_cpu_s
from bench.harness.models import MODEL, PLAIN, SMALL, TWIN
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
    from cluster.planning.read_items import ReadItems
    from cluster.telemetry.report import RankReport

ARENA_BYTES = 256 << 20  # an eighth of the default model
RANKS = 2
WARM_S = 600.0
_QUIET_CPU = 0.1  # of one core: a cluster that uses less has nothing to do
_QUIET_INTERVAL_S = 0.4
_PATIENCE_S = 15.0


def load_whole(spec: Spec) -> None:
    """Call `cluster.load(device="cpu")` with two ranks, from the call to READY. Workers keep the tensors."""
    import cluster

    recycled = spec.options["memory"] == "recycled"
    arguments = {
        "fsdp_size": RANKS,
        "device": "cpu",
        "placement": spec.options["placement"],
        "progress": False,
        **store_arguments(spec),
    }
    with our_cluster(spec, our_config(spec)):
        # Starts the workers, which stay warm. The twin also touches the memory that is recycled. Workers keep the arena
        # mapped from their second load on.
        for _ in range(2):
            with cluster.load(model_uri(spec, TWIN if recycled else SMALL), **arguments) as other:
                touched_bytes = other.report.placed_bytes if recycled else 0
        settle()
        with measured(spec, touched_before_bytes=touched_bytes, memory_apart=is_ray_daemon) as m:
            model = cluster.load(main_model(spec), **arguments)
            m.stop()
            report = model.report
            if report.cached_bytes or report.resident:
                raise RuntimeError(f"not from the store: {report.cached_bytes} bytes were in the arena before")
            names = ("plan_s", "start_s", "total_s", "store_bytes", "verified")
            m.extra |= {"stream_s": report.load_s, "stages": dataclasses.asdict(report.stages)}
            m.extra |= {"placement": report.placement_mode, **{name: getattr(report, name) for name in names}}
        model.release()


def load_into_arena(spec: Spec) -> None:
    """Load from the store into the arena: a real agent, two processes that host ranks, leases, digests. Place nothing.

    The benchmark does the coordinator's part: it plans, and gives the agent and the ranks their jobs.
    """
    import ray

    from actors import launch

    config = our_config(spec)
    with our_cluster(spec, config):
        node_id = ray.get_runtime_context().get_node_id()
        agent: Any = ray.get(launch.ensure_coordinator(config).agent_of.remote(node_id))
        ranks: list[Any] = [ray.remote(ArenaRank).options(num_cpus=0).remote() for _ in range(RANKS)]

        def prepare(uri: str) -> NodeJob:
            """Plan that model and give the ranks their jobs. Nothing is read but the manifest."""
            node_job, jobs = plan_jobs(uri, config, f"bench-{uuid.uuid4().hex[:8]}", RANKS, store=store_arguments(spec))
            ray.get([rank.prepare.remote(node_id, job) for rank, job in zip(ranks, jobs, strict=True)])
            return node_job

        def run(job: NodeJob) -> list[RankReport]:
            while not ray.get(agent.begin.remote(job)):
                time.sleep(0.01)
            reports: list[RankReport] = ray.get([rank.run.remote() for rank in ranks])
            return reports

        run(prepare(model_uri(spec, TWIN)))  # so that agent and ranks are warm, and every slot was used
        job = prepare(main_model(spec))
        settle()
        with measured(spec, memory_apart=is_ray_daemon) as m:
            reports = run(job)
            m.stop()
            node = ray.get(agent.report.remote(job.load_id))
            if node.cached_bytes:
                raise RuntimeError(f"{node.cached_bytes} bytes were in the arena before")
            stages = sum((report.stages for report in reports[1:]), reports[0].stages)
            m.extra |= {"stream_s": max(report.load_s for report in reports), "stages": dataclasses.asdict(stages)}
            m.extra["store_bytes"] = node.store_bytes
            ray.get(agent.end.remote(job.load_id))


class ArenaRank:
    """An actor in a process of its own that hosts a rank, as a worker does, and places nothing."""

    def prepare(self, node_id: str, job: RankJob) -> None:
        """Make everything that a warm worker has before a load begins."""
        from actors.devices.cpu_device import CpuDevice
        from actors.links import RayAgentLink
        from actors.rank.executor import PROCESS_ARENAS, RankLoader

        class NoDevice(CpuDevice):
            """A device that takes no memory and copies nothing."""

            name = "none"

            def allocate(self, segment_bytes: tuple[int, ...]) -> None:
                pass

            def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
                pass

        PROCESS_ARENAS.keep(True)  # as a worker that is kept warm
        self._loader = RankLoader(RayAgentLink(node_id), job, NoDevice())

    def run(self) -> RankReport:
        """Load. Raises as RankLoader does."""
        return self._loader.run()


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
    store: dict[str, Any] | None = None,
) -> tuple[NodeJob, list[RankJob]]:
    """Plan a load by `ranks` ranks of one node, as the coordinator does. `store`: as `store_arguments` returns it."""
    options = LoadOptions(uri, fsdp_size=ranks, device=device, placement=placement, **(store or {}))
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


def our_config(spec: Spec, **wanted: Any) -> Config:
    """Return the settings of a run: a small arena, warm workers, and those that the options name."""
    values = {"arena_bytes": ARENA_BYTES, "warm_workers_s": WARM_S, **wanted}
    values |= {name: value for name, value in spec.options.items() if name in Config.model_fields}
    return Config(**values)


def store_arguments(spec: Spec) -> dict[str, Any]:
    """Return the arguments of `cluster.load` for the store. The server checks no signature, but each is made."""
    from storage.store_ref import Credentials

    if spec.source == "file":
        return {}
    return {"endpoint_url": spec.endpoint, "region": "us-east-1", "credentials": Credentials("bench", "bench")}


def model_uri(spec: Spec, name: str) -> str:
    """Return the URI of one of the run's models (`bench.harness.models`)."""
    if spec.source == "file":
        return (Path(spec.folder).parent / name).as_uri()
    return f"s3://{spec.bucket}/{name}"


def main_model(spec: Spec) -> str:
    """Return the URI of the model that is loaded under the clock."""
    # The second is the same files without a manifest.
    return model_uri(spec, spec.options.get("model", MODEL) if spec.options.get("verify", True) else PLAIN)


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


def settle() -> None:
    """Wait until the process tree has nothing to do: processes started, arena touched."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        before_s, since_s = tree_cpu_s(), time.monotonic()
        time.sleep(_QUIET_INTERVAL_S)
        if (tree_cpu_s() - before_s) / (time.monotonic() - since_s) < _QUIET_CPU:
            return
