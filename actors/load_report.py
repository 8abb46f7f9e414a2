"""The report of a load that has just become ready."""

from __future__ import annotations

import time
from collections.abc import Sequence

from actors.model_record import ModelRecord
from cluster.packed_plan import PackedPlan
from cluster.report import LoadReport, NodeReport


def make_report(record: ModelRecord, plan: PackedPlan, answers: Sequence[NodeReport]) -> LoadReport:
    """What the load did; `answers` per node, in the order of `record.nodes`."""
    request = record.request
    ranks = tuple(seat.report for _, seat in sorted(record.seats.items()) if seat.report is not None)
    now_s = time.monotonic()
    load_s = max((rank.load_s for rank in ranks), default=0.0)
    return LoadReport(
        model_id=record.model_id,
        uri=request.uri,
        revision=record.revision,
        verified=plan.verified,
        placement_mode="via_arena",
        resident=False,
        tensor_parallel_size=request.tensor_parallel_size,
        fsdp_size=request.fsdp_size,
        data_parallel_size=request.data_parallel_size,
        model_bytes=plan.model_bytes,
        placed_bytes=sum(rank.size_bytes for rank in ranks),
        overfetch_bytes=sum(node.overfetch_bytes for node in answers),
        plan_s=record.planned_s - record.created_s,
        start_s=max(0.0, now_s - record.planned_s - load_s),
        load_s=load_s,
        total_s=now_s - record.created_s,
        attempts=record.life.attempt,
        ranks=ranks,
        nodes=tuple(answers),
    )
