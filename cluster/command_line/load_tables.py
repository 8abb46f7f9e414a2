"""The tables of a load and of the demo: where the bytes came from, how fast, and what the limit was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from cluster.command_line.tables import NOT_ASKED, cell, digests, facts, table_of
from cluster.fit.search import steps_text
from cluster.units import show_bytes, show_rate

if TYPE_CHECKING:
    from cluster.command_line.demo import DemoReport
    from cluster.reports.report import LoadReport


def load_table(report: LoadReport) -> RenderableType:
    """What a load did: where the bytes came from, how fast, and each rank."""
    how = "when it was loaded; it was resident, nothing moved" if report.resident else digests(report.verified)
    unkept = sum(node.disk_unkept_chunks for node in report.nodes)
    unknown_bytes = sum(node.unknown_bytes for node in report.nodes)
    overall = facts(
        [
            ("model", report.model_id),
            ("uri", report.uri),
            ("revision", report.revision),
            ("layout", f"{len(report.ranks)} ranks ({report.layout}), {report.placement_mode}"),
            *([("fit", steps_text(report.fit))] if report.fit else []),
            ("model size", show_bytes(report.model_bytes)),
            ("placed", show_bytes(report.placed_bytes)),
            *([("converted", _converted(report))] if report.converted_tensors else []),
            ("from the store", show_bytes(report.store_bytes)),
            ("from the cache", show_bytes(report.cached_bytes)),
            *((("from disk", show_bytes(report.disk_bytes)),) if report.disk_bytes else ()),
            *((("from store or cache, not known", show_bytes(unknown_bytes)),) if unknown_bytes else ()),
            *((("not kept on disk", f"{unkept} chunks"),) if unkept else ()),
            ("overfetch", show_bytes(report.overfetch_bytes)),
            ("checked", how),
            ("signed by", report.signed_by or NOT_ASKED),
            ("chunks verified", report.verified_chunks),
            *([("objects checked", _objects(report))] if report.objects else []),
            (
                "connect / plan / start / load",
                f"{report.connect_s:.2f} s / {report.plan_s:.2f} s / {report.start_s:.2f} s / {report.load_s:.2f} s",
            ),
            (
                "to the first byte / READY after the last",
                f"{report.first_byte_s * 1e3:.0f} ms / {report.ready_after_last_byte_s * 1e3:.0f} ms",
            ),
            ("total", f"{report.total_s:.2f} s, {_rate(report)}"),
            ("limit", report.limit.sentence),
            ("retries", _counts(report.retries)),
            ("peak host memory", f"{show_bytes(report.peak_host_bytes)}, {_arenas(report)}"),
            ("beyond the tensors'", f"{show_bytes(report.host_bytes_beyond_destination)}, {_arenas(report)}"),
        ]
    )
    ranks = table_of(
        (
            "rank >",
            "host",
            "device",
            "pid >",
            "size >",
            "requests >",
            "fetch >",
            "verify >",
            "place >",
            "load >",
            "cpu >",
        ),
        [
            (
                rank.rank,
                rank.host,
                rank.device,
                rank.pid,
                show_bytes(rank.size_bytes),
                f"{rank.requests} (peak {rank.peak_requests})",
                show_rate(rank.stages.fetch_bytes, rank.stages.fetch_s),
                show_rate(rank.stages.verify_bytes, rank.stages.verify_s),
                show_rate(rank.stages.place_bytes, rank.stages.place_s),
                f"{rank.load_s:.2f} s",
                f"{rank.cpu_s:.2f} s",
            )
            for rank in report.ranks
        ],
    )
    return Group(overall, Text(), ranks)


def _rate(report: LoadReport) -> str:
    """How fast it came, from the call on; a model that was there did not come."""
    return "already resident" if report.resident else show_rate(report.placed_bytes, report.total_s)


def _arenas(report: LoadReport) -> str:
    return f"{show_bytes(report.arena_bytes)} of it the arena" + "s" * (len(report.nodes) > 1)


def _converted(report: LoadReport) -> str:
    seconds = max(rank.convert_s for rank in report.ranks)
    staged = f"at most {show_bytes(report.peak_staging_bytes)} staged on a rank"
    return f"{report.converted_tensors} tensors ({report.precision}), {staged}, up to {seconds:.2f} s"


def _objects(report: LoadReport) -> str:
    """Of a load without a manifest: how many objects have the store's checksum, and why others were not compared."""
    whole = f"{report.checked_objects} of {len(report.objects)} by the store's own checksums"
    return "; ".join([whole, *(f"{count} not: {reason}" for reason, count in report.unchecked_objects.items())])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in counts.items()) or "none"


def demo_table(report: DemoReport) -> RenderableType:
    """Both loads of the demo, side by side."""
    loads = (report.first, report.again)

    def rate(stage: str) -> list[str]:
        pairs = [(getattr(r.stages, f"{stage}_bytes"), getattr(r.stages, f"{stage}_s")) for r in loads]
        return [show_rate(count, seconds) for count, seconds in pairs]

    rows = [
        ("bytes placed", *(show_bytes(r.placed_bytes) for r in loads)),
        ("seconds, from the call", *(f"{r.total_s:.2f}" for r in loads)),
        ("seconds, first lease to last byte", *(f"{r.load_s:.2f}" for r in loads)),
        ("load", *(show_rate(r.placed_bytes, r.load_s) for r in loads)),
        ("fetch, per thread", *rate("fetch")),
        ("verify, per thread", *rate("verify")),
        ("place, per thread", *rate("place")),
        ("bytes that left the store", *(show_bytes(r.store_bytes) for r in loads)),
        ("chunks verified", *(r.verified_chunks for r in loads)),
        ("chunks from the cache", *(sum(node.cached_chunks for node in r.nodes) for r in loads)),
        ("peak host memory", *(show_bytes(r.peak_host_bytes) for r in loads)),
        ("of it beyond the tensors'", *(show_bytes(r.host_bytes_beyond_destination) for r in loads)),
        ("limit", *(f"{r.limit.stage}, {r.limit.share:.0%}" for r in loads)),
    ]
    times = f"written in {report.write_s:.1f} s, published in {report.publish_s:.1f} s"
    wrote = f"model {show_bytes(report.model_bytes)}: {times}"
    compared = f"compared {report.compared_tensors} slices, {show_bytes(report.compared_bytes)}: every byte equal"
    return Group(cell(wrote), table_of(("", "first load >", "from the cache >"), rows), cell(compared, "green"))
