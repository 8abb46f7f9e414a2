"""The report of a change of the number of replicas (`cluster.scale`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.layouts.mesh import Layout
from cluster.telemetry.stats import Jsonable
from cluster.units import show_bytes


@dataclass(frozen=True, slots=True)
class ScaleReport(Jsonable):
    """The result of a change of the number of replicas."""

    model_id: str
    old_data_parallel_size: int
    layout: Layout  # that the model has now
    ranks: tuple[int, ...] = ()  # that were added, or removed
    hosts: tuple[str, ...] = ()  # of each of these ranks
    placed_bytes: int = 0  # of slices, in all added ranks
    bytes_by_source: dict[str, int] = field(default_factory=dict)  # on all nodes, as in a load's report
    place_s: float = 0.0  # until every added rank had its place and its memory was found to fit
    fill_s: float = 0.0  # until all of them had their slices; or until the removed ones were gone
    total_s: float = 0.0

    @property
    def data_parallel_size(self) -> int:
        """Return the number of replicas that the model has now."""
        return self.layout.data_parallel_size

    @property
    def store_bytes(self) -> int:
        """Return the bytes that came from the store."""
        return sum(size for source, size in self.bytes_by_source.items() if source.startswith("store"))

    def __str__(self) -> str:
        now, before = self.data_parallel_size, self.old_data_parallel_size
        has = f"{self.model_id} has {now} replica{'s' * (now > 1)}"
        if now == before:
            return f"{has}, as before"
        if now < before:
            return f"{has} now: {len(self.ranks)} ranks removed, {self.total_s:.1f} s"
        from_store = f"{show_bytes(self.store_bytes)} of {show_bytes(self.placed_bytes)} from the store"
        return f"{has} now: {len(self.ranks)} ranks added, {from_store}, {self.total_s:.1f} s"
