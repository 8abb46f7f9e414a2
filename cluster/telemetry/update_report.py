"""The report of an update in place (`cluster.update`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.telemetry.stats import Jsonable
from cluster.units import show_bytes


@dataclass(frozen=True, slots=True)
class UpdateReport(Jsonable):
    """What an update did. Bytes are 0 where the coordinator was restarted in its middle (`resumed`)."""

    model_id: str
    update_id: str
    uri: str  # of the new revision
    old_revision: str
    revision: str
    tensors: int  # of the model
    changed_tensors: int
    changed_bytes: int  # of the chunks that differ and had to be read, each counted once
    reused_bytes: int  # of the model's other chunks, which no rank read
    bytes_by_source: dict[str, int] = field(default_factory=dict)  # on all nodes, as in a load's report
    staged_bytes: int = 0  # host memory that all ranks took for what changed; 0 when streaming
    streaming: bool = False
    ranks: tuple[str, ...] = ()  # "exchanged", or "replaced" where a worker died after the decision
    plan_s: float = 0.0
    stage_s: float = 0.0  # reading and verifying what changed; with streaming also placing it
    exchange_s: float = 0.0  # from the decision until every rank had the new revision
    total_s: float = 0.0
    resumed: bool = False  # by a coordinator that was restarted
    signed_by: str = ""  # id of the trusted key that signed the new revision's manifest

    @property
    def read_bytes(self) -> int:
        """Return the bytes that came from the store."""
        return sum(size for source, size in self.bytes_by_source.items() if source.startswith("store"))

    def __str__(self) -> str:
        what = f"{self.changed_tensors} of {self.tensors} tensors, {show_bytes(self.read_bytes)} from the store"
        replaced = sum(step == "replaced" for step in self.ranks)
        more = f", {replaced} ranks replaced meanwhile" if replaced else ""
        return f"{self.model_id} has revision {self.revision[:12]} now: {what}, {self.total_s:.1f} s{more}"
