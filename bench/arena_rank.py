"""A rank that loads into the arena and places nothing: our path from the store to verified chunks, by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.cpu_device import CpuDevice
from actors.executor import RankLoader

if TYPE_CHECKING:
    from cluster.messages import RankJob
    from cluster.read_items import ReadItems
    from cluster.report import RankReport


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
        self._loader: RankLoader | None = None

    def prepare(self, node_id: str, job: RankJob) -> None:
        """Everything that a warm worker has before a load begins."""
        from actors.agent_link import RayAgentLink

        self._loader = RankLoader(RayAgentLink(node_id), job, NoDevice())

    def run(self) -> RankReport:
        """Load. Raises as RankLoader does."""
        if self._loader is None:
            raise RuntimeError("prepare comes first")
        return self._loader.run()


def start_arena_ranks(count: int) -> list[Any]:
    """That many actors, each in its own process."""
    import ray

    return [ray.remote(ArenaRank).options(num_cpus=0).remote() for _ in range(count)]
