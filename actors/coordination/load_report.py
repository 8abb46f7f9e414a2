"""The report of a load that has just become ready."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from actors.coordination.model_record import ModelRecord
from cluster.plans.packed_plan import PackedPlan
from cluster.telemetry.rank_report import join_checks, verified_by
from cluster.telemetry.report import LoadReport, NodeReport, ProcessMemory


def make_report(record: ModelRecord, plan: PackedPlan, answers: Sequence[NodeReport]) -> LoadReport:
    """What the load did; `answers` per node, in the order of `record.nodes`."""
    request = record.request
    objects = join_checks(check for node in answers for check in node.objects)
    ranks = tuple(seat.report for _, seat in sorted(record.seats.items()) if seat.report is not None)
    total_s = time.monotonic() - record.created_s
    # Clocks are not compared across hosts: what a rank measured is counted from when it was given its job.
    told = [(seat.told_s - record.created_s, seat.report) for seat in record.seats.values() if seat.told_s]
    first_s = [told_s + rank.start_s for told_s, rank in told if rank is not None]
    last_s = [told_s + rank.start_s + rank.load_s for told_s, rank in told if rank is not None]
    planned_s = record.planned_s - record.created_s
    if first_s:
        start_s, load_s = max(0.0, min(first_s) - planned_s), max(last_s) - min(first_s)
    else:  # the coordinator was killed meanwhile, and knows only what the ranks say
        load_s = max((rank.load_s for rank in ranks), default=0.0)
        start_s = max(0.0, total_s - planned_s - load_s)
    return LoadReport(
        model_id=record.model_id,
        uri=request.uri,
        revision=record.revision,
        verified=plan.verified if plan.verified != "transport" else verified_by(objects),
        signed_by=record.signed_by,
        placement_mode="direct" if any(node.direct_bytes for node in answers) else "via_arena",
        resident=False,
        layout=request.layout,
        model_bytes=plan.model_bytes,
        placed_bytes=sum(rank.size_bytes for rank in ranks),
        overfetch_bytes=sum(node.overfetch_bytes for node in answers),
        plan_s=planned_s,
        start_s=start_s,
        load_s=load_s,
        total_s=total_s,
        attempts=record.life.attempt,
        ranks=ranks,
        nodes=tuple(answers),
        first_byte_s=min(first_s, default=0.0),
        ready_after_last_byte_s=max(0.0, total_s - max(last_s, default=total_s)),
        control_plane=_control_plane(record, plan),
        precision=request.precision,
        quantization_config=plan.quantization_config,
        fit=request.tried,
    )


def _control_plane(record: ModelRecord, plan: PackedPlan) -> tuple[ProcessMemory, ...]:
    record.memory.sample()
    coordinator = ProcessMemory(
        "coordinator", socket.gethostname(), record.memory.baseline_bytes, record.memory.peak_bytes
    )
    return (coordinator,) if plan.memory is None else (coordinator, plan.memory)
