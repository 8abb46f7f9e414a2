"""Reports as tables for people. Each function takes a report and returns something `rich` prints.

Text from outside (URIs, names, errors) goes through `cell`, so it can be neither markup nor an escape code.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.units import printable, show_bytes

if TYPE_CHECKING:
    from cluster.doctor.check import Check
    from cluster.reports.report import ClusterStatus, NodeStatus
    from storage.publishing.publish import PublishReport
    from storage.publishing.verify import VerifyReport

NOT_ASKED = "not asked: no key is trusted"  # of a signature
PLAIN_WIDTH = 160  # columns of a table that goes to a file or a log
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def console_on(stream: TextIO) -> Console:
    """A console that neither wraps tables at 80 columns nor colours them where no terminal is."""
    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False)


def as_text(table: RenderableType) -> str:
    """A table as `print` shows it: plain text, no line feed at its end."""
    console = Console(file=io.StringIO(), width=PLAIN_WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def cell(value: object, style: str = "") -> Text:
    return Text(printable(value), style=style)


def table_of(headers: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A plain table; numbers are right-aligned, a header that ends in ` >` asks for that too."""
    table = Table(title=cell(title) if title else None, title_justify="left", box=None, pad_edge=False)
    for header in headers:
        right = header.endswith(" >")
        table.add_column(header.removesuffix(" >"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(value if isinstance(value, Text) else cell(value) for value in row))
    return table


def facts(pairs: Iterable[tuple[str, object]], title: str = "") -> Table:
    """Two columns: what, and its value."""
    table = Table(title=cell(title) if title else None, title_justify="left", box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(cell(name), cell(value))
    return table


def status_table(status: ClusterStatus) -> RenderableType:
    """Models and nodes of a cluster."""
    models = table_of(
        (
            "model",
            "state",
            "ranks >",
            "layout",
            "device",
            "size >",
            "holders >",
            "keep",
            "signed by",
            "uri",
        ),
        [
            (
                model.progress.model_id,
                model.progress.state,
                f"{model.progress.ranks_ready}/{model.progress.ranks_total}",
                f"{model.layout}{'; ' * bool(model.taken)}{model.taken}",
                model.device,
                show_bytes(model.progress.total_bytes),
                model.holders,
                "yes" if model.keep else "no",
                model.signed_by[:12] or "-",
                model.progress.uri,
            )
            for model in status.models
        ],
    )
    nodes = table_of(
        ("node", "host", "arena >", "used >", "leased >", "quarantined >", "disk >", "not on disk >", "heard >"),
        [
            (
                node.node[:12],
                node.host,
                show_bytes(node.arena_bytes),
                show_bytes(node.used_bytes),
                node.leased_slots,
                node.quarantined_slots,
                _disk(node),
                node.disk_unkept_chunks or "-",
                f"{node.heartbeat_age_s:.1f} s ago",
            )
            for node in status.nodes
        ],
    )
    gangs = [
        cell(f"{len(gang.rank_hosts)} {gang.device} workers of {gang.gang_id} idle for {gang.idle_s:.0f} s ({where})")
        for gang in status.gangs
        if (where := ", ".join(f"{host}: {count}" for host, count in Counter(gang.rank_hosts).items()))
    ]
    ended = table_of(
        ("ended lately", "state", "", "why"),
        [
            (
                model.progress.model_id,
                cell(model.progress.state, "red" if model.progress.state == "failed" else "dim"),
                f"{model.ended_age_s:.0f} s ago",
                model.error,
            )
            for model in status.ended
        ],
    )
    head = cell(f"Longshore {status.version}, coordinator {status.coordinator_incarnation}")
    scraped = [cell(f"metrics at {status.metrics_url}", "dim")] if status.metrics_url else []
    empty = cell("no models are loaded", "dim")
    after: list[RenderableType] = [Text(), ended] if status.ended else []
    after += _settings(status)
    return Group(head, *scraped, Text(), models if status.models else empty, *gangs, Text(), nodes, *after)


def _settings(status: ClusterStatus) -> list[RenderableType]:
    """Settings that somebody has given, each once, with all the places that it comes from."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for setting in (*status.settings, *(each for node in status.nodes for each in node.settings)):
        if not setting.is_default:
            found.setdefault((setting.name, str(setting.value)), {})[setting.source] = None
    rows = [(name, value, ", ".join(sources)) for (name, value), sources in found.items()]
    rest = cell("other settings have their defaults; --json shows them", "dim")
    return [Text(), table_of(("setting", "value", "from"), rows), rest] if rows else []


def _disk(node: NodeStatus) -> str:
    """The use of a node's disk tier."""
    return (
        f"{show_bytes(node.disk_used_bytes)} of {show_bytes(node.disk_budget_bytes)}" if node.disk_budget_bytes else "-"
    )


def publish_table(report: PublishReport) -> RenderableType:
    """What a publish read, checked and wrote."""
    state = "unchanged: the manifest was there and still fits" if report.unchanged else "manifest written"
    return facts(
        [
            ("published", report.uri),
            ("result", state),
            ("revision", report.revision),
            ("model", f"{report.tensors} tensors in {report.shards} shards, {show_bytes(report.size_bytes)}"),
            ("chunks", f"{report.chunks} of up to {show_bytes(report.chunk_bytes)}, {report.hash_name}"),
            ("other files", report.files),
            ("largest values of rows", "recorded" if report.amax else "not recorded"),
            ("signed", f"by {report.signed_by} as {report.signed_name}" if report.signed_by else "no"),
            ("read", f"{show_bytes(report.read_bytes)} in {report.elapsed_s:.1f} s"),
            ("copied", show_bytes(report.copied_bytes)),
            ("resumed", f"{report.resumed} objects" if report.resumed else "-"),
            ("source checked by", ", ".join(f"{how} ({count})" for how, count in report.checks.items()) or "-"),
            *(("left out", key) for key in report.skipped),
        ]
    )


def verify_table(report: VerifyReport) -> RenderableType:
    """What was compared, and everything that differs."""
    if report.source == "headers":
        verdict = cell("NOT published: nothing to compare with", "bold yellow")
    else:
        verdict = cell("ok", "green") if report.ok else cell("NOT the published bytes", "bold red")
    problems = [
        *(
            ("bad chunk", f"{chunk.key} bytes {chunk.start}-{chunk.end}, chunk {chunk.chunk}")
            for chunk in report.bad_chunks
        ),
        *(
            ("bad tensor", f"{bad.key}: {bad.name or 'header'} published as {bad.published}, stored as {bad.stored}")
            for bad in report.bad_tensors
        ),
        *(("bad shard", f"{key}: another digest as a whole") for key in report.bad_shards),
        *(("bad file", key) for key in report.bad_files),
        *(("missing", key) for key in report.missing),
        *(("wrong size", f"{o.key}: {o.found_bytes} bytes, published {o.expected_bytes}") for o in report.wrong_size),
    ]
    overall = facts(
        [
            ("verified", report.uri),
            ("revision", report.revision or "-"),
            ("checked", f"{report.checked_chunks} chunks and {report.checked_files} other files"),
            ("read", f"{show_bytes(report.checked_bytes)} in {report.elapsed_s:.1f} s"),
            *problems,
            *(("note", note) for note in report.notes),
        ]
    )
    return Group(verdict, overall)


def checks_table(checks: Sequence[Check]) -> RenderableType:
    """What `longshore doctor` found, hints under what needs one."""
    rows = []
    for check in checks:
        detail = cell(check.detail)
        if check.hint and check.outcome in ("warn", "fail"):
            detail.append(f"\n-> {printable(check.hint)}", style="italic")
        rows.append((cell(check.outcome, _STYLES[check.outcome]), check.name, detail))
    return table_of(("", "check", "found"), rows)


def digests(verified: str) -> str:
    """What `verified` of a report or plan means."""
    if verified == "transport":
        return "no digests: length, range and ETag only (`longshore publish` writes a manifest with digests)"
    if verified.startswith("store:"):
        return f"every object by the store's own {verified.removeprefix('store:').replace('+', ' or ')}; no digests"
    return f"each with its {verified} digest"
