"""A rank that loads into the arena and places nothing: our path from the store to verified chunks, by itself."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from actors.devices.cpu_device import CpuDevice
from actors.rank.executor import PROCESS_ARENAS, RankLoader
from bench.our_cluster import RANKS

if TYPE_CHECKING:
    from cluster.config import Config
    from cluster.messages import NodeJob, RankJob
    from cluster.planning.read_items import ReadItems
    from cluster.telemetry.report import NodeReport, RankReport


class NoDevice(CpuDevice):
    """Takes no memory and copies nothing."""

    name = "none"

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        pass

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        pass


class ArenaRank:
    """An actor in a process of its own that hosts a rank, as a worker of ours does."""

    def __init__(self) -> None:
        PROCESS_ARENAS.keep(True)  # as a worker that is kept warm
        self._loader: RankLoader | None = None

    def prepare(self, node_id: str, job: RankJob) -> None:
        """Everything that a warm worker has before a load begins."""
        from actors.links import RayAgentLink

        self._loader = RankLoader(RayAgentLink(node_id), job, NoDevice())

    def run(self) -> RankReport:
        """Load. Raises as RankLoader does."""
        if self._loader is None:
            raise RuntimeError("prepare comes first")
        return self._loader.run()


class ArenaLoad:
    """Loads into the arena of this node, one after the other, by the same two ranks: what the coordinator does else."""

    def __init__(self, config: Config, store: dict[str, Any]) -> None:
        """`store`: arguments of cluster.load that say how the store is reached."""
        import ray

        from actors import launch

        self._config = config
        self._store = dict(store)
        self._credentials = self._store.pop("credentials", None)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._job: NodeJob | None = None
        self.agent: Any = ray.get(launch.ensure_coordinator(config).agent_of.remote(self._node_id))
        self._ranks: list[Any] = [ray.remote(ArenaRank).options(num_cpus=0).remote() for _ in range(RANKS)]

    @property
    def load_id(self) -> str:
        return self._job.load_id if self._job is not None else ""

    def prepare(self, uri: str) -> None:
        """Plan the load of that model and hand the ranks their jobs; nothing is read but the manifest."""
        import ray

        from actors.coordination.jobs import fetch_settings
        from cluster.fit.needs import min_slots
        from cluster.layouts.mesh import Layout
        from cluster.messages import NodeJob, RankJob
        from cluster.planning.make_plan import prepare_plan
        from cluster.planning.packed_plan import pack_shared
        from cluster.request import StoreOptions, make_request

        config = self._config
        request = make_request(
            uri,
            layout=Layout(fsdp_size=RANKS),
            store_options=StoreOptions(**self._store),
            credentials=self._credentials,
            layout_rules=None,
            device="cpu",
        )
        _, plan = prepare_plan(request, chunk_bytes=config.chunk_bytes, read_timeout_s=config.read_timeout_s)
        shared, load_id, settings = pack_shared(plan), f"bench-{uuid.uuid4().hex[:8]}", fetch_settings(config)
        self._job = NodeJob(
            load_id=load_id,
            attempt=1,
            shared=shared,
            store_identity=request.store.ref.identity(),
            ranks=tuple(range(RANKS)),
            done=frozenset(),
            min_slots=min_slots(RANKS),
            chunk_attempts=config.chunk_attempts,
            lease_deadline_s=config.lease_deadline_s,
            record=b"",
        )
        jobs = [RankJob(load_id, 1, rank, 0, shared, request.store, settings) for rank in range(RANKS)]
        ray.get([rank.prepare.remote(self._node_id, job) for rank, job in zip(self._ranks, jobs, strict=True)])

    def run(self) -> list[RankReport]:
        """Load what was prepared. Raises as RankLoader does."""
        import ray

        while not ray.get(self.agent.begin.remote(self._job)):
            time.sleep(0.01)
        reports: list[RankReport] = ray.get([rank.run.remote() for rank in self._ranks])
        return reports

    def node_report(self) -> NodeReport:
        """The agent's report of the load that was run last."""
        import ray

        report: NodeReport = ray.get(self.agent.report.remote(self.load_id))
        return report
