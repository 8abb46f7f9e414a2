"""Reports as tables for people. Each function takes a report and returns something `rich` prints.

Text from outside (URIs, names, errors) goes through `cell`, so it can be neither markup nor an escape code.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.fit.device_map import device_name
from cluster.fit.search import steps_text
from cluster.planning.plan_picture import TensorPart, at_rank, fold_layers, row_name, row_sizes, show_ranges, show_runs
from cluster.telemetry.stats import unchecked_counts
from cluster.units import printable, show_bytes, show_rate

if TYPE_CHECKING:
    from cluster import ConvertReport
    from cluster.command_line.demo import DemoReport
    from cluster.doctor.host_checks import Check
    from cluster.planning.plan_summary import PlanSummary
    from cluster.telemetry.report import ClusterStatus, LoadReport, ModelStatus, NodeStatus
    from storage.publishing.publish import PublishReport
    from storage.publishing.saves import SavesReport
    from storage.publishing.verify import VerifyReport


NOT_ASKED = "not asked: no key is trusted"  # of a signature
PLAIN_WIDTH = 160  # columns of a table that goes to a file or a log
_OUTCOME_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


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
    """Return a printable text for a table or a line; markup and control characters in `value` have no effect."""
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
    """Models, nodes and saves of a cluster."""
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
        (
            "node",
            "host",
            "window >",
            "kept >",
            "limit >",
            "leased >",
            "quarantined >",
            "disk >",
            "not on disk >",
            "heard >",
        ),
        [
            (
                node.node[:12],
                node.host,
                show_bytes(node.window_bytes),
                show_bytes(node.used_bytes),
                show_bytes(node.arena_bytes),
                node.leased_slots,
                node.quarantined_slots,
                _disk(node),
                node.disk_unkept_chunks or "-",
                f"{node.heartbeat_age_s:.1f} s ago",
            )
            for node in status.nodes
        ],
    )
    worker_groups = [
        cell(
            f"{len(group.rank_hosts)} {group.device} workers of {group.worker_group_id} "
            f"idle for {group.idle_s:.0f} s ({where})"
        )
        for group in status.worker_groups
        if (where := ", ".join(f"{host}: {count}" for host, count in Counter(group.rank_hosts).items()))
    ]
    updates = [cell(_update(model)) for model in status.models if model.update]
    saves = table_of(
        ("save", "state", "ranks >", "in the store >", "time >", "uri", ""),
        [
            (
                save.progress.save_id,
                cell(save.progress.state, "red" if save.progress.message else ""),
                save.progress.ranks,
                f"{show_bytes(save.progress.done_bytes)} of {show_bytes(save.progress.total_bytes)}",
                f"{save.progress.elapsed_s:.0f} s",
                save.progress.place,
                save.progress.message or save.progress.revision[:12],
            )
            for save in status.saves
        ],
    )
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
    after += [Text(), saves] if status.saves else []
    after += _settings(status)
    return Group(
        head, *scraped, Text(), models if status.models else empty, *updates, *worker_groups, Text(), nodes, *after
    )


def _update(model: ModelStatus) -> str:
    """Return what an update of a model does, or how the last one ended."""
    name = "" if model.progress.model_id in model.update else f"{model.progress.model_id}: "
    now = model.updating
    read = f" ({show_bytes(now.read_bytes)} of {show_bytes(now.total_bytes)} read)" if now and now.total_bytes else ""
    return f"{name}{model.update}{read}"


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
    """Return a table of what a publish read, checked and wrote."""
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


def convert_table(report: ConvertReport) -> RenderableType:
    """Return a table of what a conversion read and wrote, or of its plan."""
    sizes = ", ".join(f"{count} {dtype}" for dtype, count in report.dtypes.items())
    rows: list[tuple[str, object]] = [
        ("source", f"{report.source}: {report.format}, {report.source_files} files"),
        ("result", f"{report.dest}{' (a plan: nothing was written)' if report.dry_run else ''}"),
        ("model", f"{report.tensors} tensors in {report.shards} shards, {show_bytes(report.size_bytes)}"),
        ("dtypes", f"{sizes}; {report.cast} cast" if report.cast else f"{sizes}, as in the source"),
        ("other files", ", ".join(report.files) or "-"),
    ]
    if not report.dry_run:
        rows += [
            ("revision", report.revision),
            ("read", f"{show_bytes(report.read_bytes)} in {report.seconds:.1f} s"),
            ("written", show_bytes(report.written_bytes)),
            ("kept", f"{show_bytes(report.reused_bytes)} of an interrupted conversion" if report.reused_bytes else "-"),
            ("verified", "read back, every digest is right" if report.verified else "no"),
        ]
    return facts(rows)


def saves_table(report: SavesReport) -> RenderableType:
    """Return a table of what interrupted saves left."""
    state = "removed" if report.cleaned else "left"
    rows: list[tuple[str, object]] = [("saves to", report.uri), ("published", ", ".join(report.published) or "no save")]
    for item in report.leftovers:  # sizes of journals and of S3's uploads are not known
        size = f", {show_bytes(item.size_bytes)}" if item.size_bytes else ""
        rows.append((f"{state}: {item.kind}", f"{item.key} of save {item.revision or '?'}{size}"))
    if report.problem:
        rows.append(("stays", report.problem))
    return facts(rows if report.leftovers or report.problem else [*rows, ("left", "nothing")])


def verify_table(report: VerifyReport) -> RenderableType:
    """Return a table of what was compared, and of every difference."""
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
    """Return a table of what `longshore doctor` found, with hints."""
    rows = []
    for check in checks:
        detail = cell(check.detail)
        if check.hint and check.outcome in ("warn", "fail"):
            detail.append(f"\n-> {printable(check.hint)}", style="italic")
        rows.append((cell(check.outcome, _OUTCOME_STYLES[check.outcome]), check.name, detail))
    return table_of(("", "check", "found"), rows)


def digests(verified: str) -> str:
    """Return the words for `verified` of a report or plan."""
    if verified == "transport":
        return "no digests: length, range and ETag only (`longshore publish` writes a manifest with digests)"
    if verified.startswith("store:"):
        return f"every object by the store's own {verified.removeprefix('store:').replace('+', ' or ')}; no digests"
    return f"each with its {verified} digest"


def load_table(report: LoadReport) -> RenderableType:
    """Return tables of a load: where its bytes came from, how fast, and each rank."""
    how = "when it was loaded; it was resident, nothing moved" if report.resident else digests(report.verified)
    unkept = sum(node.disk_unkept_chunks for node in report.nodes)
    unknown_bytes = sum(node.unknown_bytes for node in report.nodes)
    overall = facts(
        [
            ("model", report.model_id),
            ("uri", report.uri),
            ("revision", report.revision),
            ("layout", f"{len(report.ranks)} ranks ({report.layout})"),
            ("placement", ": ".join(filter(None, (report.placement_mode, report.placement_reason)))),
            *([("fit", steps_text(report.fit))] if report.fit else []),
            ("model size", show_bytes(report.model_bytes)),
            ("placed", show_bytes(report.placed_bytes)),
            *([("converted", _converted(report))] if report.converted_tensors else []),
            ("from the store", show_bytes(report.store_bytes)),
            ("from the cache", show_bytes(report.cached_bytes)),
            *((("from disk", show_bytes(report.disk_bytes)),) if report.disk_bytes else ()),
            *((("from other nodes", show_bytes(report.peer_bytes)),) if report.peer_bytes else ()),
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
    """Return the rate from the call on; none for a model that was resident."""
    return "already resident" if report.resident else show_rate(report.placed_bytes, report.total_s)


def _arenas(report: LoadReport) -> str:
    return f"{show_bytes(report.arena_bytes)} of it the arena" + "s" * (len(report.nodes) > 1)


def _converted(report: LoadReport) -> str:
    seconds = max(rank.convert_s for rank in report.ranks)
    staged = f"at most {show_bytes(report.peak_staging_bytes)} staged on a rank"
    return f"{report.converted_tensors} tensors ({report.precision}), {staged}, up to {seconds:.2f} s"


def _objects(report: LoadReport) -> str:
    """Return, without a manifest, how many objects match the store's checksum, and why others were not compared."""
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


SHOWN_RANKS = 64  # rows; ranks of a large layout differ in little
BAR_CHARS = 40  # of the widest bar
SHOWN_ROWS = 24  # of bars; with more, only those of whole ranks
_STYLES = {True: "green", False: "bold red", None: "yellow"}


def plan_table(plan: PlanSummary) -> RenderableType:
    """Return tables of a plan: whether it fits, and what would be loaded where."""
    first = [cell(plan.fit.sentence, _STYLES[plan.fit.fits]), Text()] if plan.fit else []
    overall = facts(
        [
            *([] if plan.estimated else [("revision", plan.revision)]),
            ("layout", f"{len(plan.ranks)} ranks ({plan.layout}) on {len(plan.nodes)} nodes"),
            ("precision", plan.precision or "as stored"),
            *(_estimate(plan) if plan.estimated else _stored(plan)),
            *_sources(plan),
            ("of that overfetch", show_bytes(plan.overfetch_bytes)),
            ("would be placed", show_bytes(plan.placed_bytes)),
            ("device memory", show_bytes(plan.device_bytes)),
            *_beside(plan),
            *([("expected time", plan.expected.sentence)] if plan.expected else []),
            *(("note", note) for note in plan.notes),
        ]
    )
    shown = plan.ranks[:SHOWN_RANKS]
    kept = {device.rank: device for device in plan.fit.devices if not device.device} if plan.fit else {}
    memory = any(device.have_bytes is not None for device in kept.values())
    headers = ["rank >", "node", "tp >", "pp >", "ep >", "fsdp >", "dp >", "tensors >", "size >", "memory >"]
    headers += ["reads >", "staging >"] if any(rank.staging_bytes for rank in shown) else []
    headers += ["has >", "kept free >", "spare >"] if memory else []
    rows = []
    for rank in shown:
        row: list[object] = [rank.rank, rank.node, rank.tensor, rank.stage, rank.expert, rank.fsdp, rank.data]
        row += [rank.tensors, show_bytes(rank.size_bytes), show_bytes(rank.device_bytes)]
        if "staging >" in headers:
            row += [show_bytes(rank.read_bytes), show_bytes(rank.staging_bytes)]
        if memory:
            on = kept.get(rank.rank)
            if on is None or on.have_bytes is None:
                row += ["-"] * 3
            else:
                spare = cell(show_bytes(on.have_bytes - on.need_bytes), _STYLES[on.fits])
                row += [show_bytes(on.have_bytes), show_bytes(on.kept_free_bytes or 0), spare]
        row += [rank.chunks, ", ".join(f"{dtype} {show_bytes(size)}" for dtype, size in rank.bytes_by_dtype.items())]
        rows.append(row)
    ranks = table_of((*headers, "chunks >", "dtypes"), rows)
    more = [cell(f"and {len(plan.ranks) - len(shown)} more ranks", "dim")] if len(plan.ranks) > len(shown) else []
    devices = [Text(), _devices_table(plan)] if plan.device_map else []
    parts = [Text(), _parts_table(plan.of_rank)] if plan.of_rank else []
    return Group(*first, overall, Text(), *_picture(plan), ranks, *more, *devices, *parts)


def _picture(plan: PlanSummary) -> Iterator[RenderableType]:
    """Bars of what ranks have of each layer, those that are alike in one row; `|`: where the device's memory ends."""
    if plan.layers is None:
        return
    folded, counts = fold_layers(plan.layers)
    names = [row_name(layer, count) for layer, count in zip(folded.layers, counts, strict=True)]
    verdict = plan.verdict
    alike: dict[tuple[tuple[int, ...], int | None, int | None], list[int]] = {}
    cells_of = folded.by_rank()
    for rank, cells in cells_of.items():
        sizes = tuple(sum(each.values()) for each in cells)
        alike.setdefault((sizes, at_rank(verdict.have_bytes, rank), at_rank(verdict.need_bytes, rank)), []).append(rank)
    most = max((max(sum(sizes), have or 0, need or 0) for sizes, have, need in alike), default=0) or 1
    each_layer = sum(1 + sum(map(bool, sizes)) for sizes, _, _ in alike) <= SHOWN_ROWS
    rows: list[tuple[object, ...]] = []
    for (sizes, have, need), ranks in list(alike.items())[:SHOWN_ROWS]:
        total = max(sum(sizes), need or 0)
        room = "" if have is None else f", has {show_bytes(have)}"
        room += f", {show_bytes(total - have)} too much" if have is not None and total > have else ""
        who = f"{'ranks' if len(ranks) > 1 else 'rank'} {show_runs(ranks)}"
        rows.append((who, "whole rank", _bar(total, have, most), cell(f"{show_bytes(total)}{room}")))
        for name, each, size, count in zip(names, cells_of[ranks[0]], sizes, counts, strict=True):
            if size and each_layer:
                rows.append(("", name, _bar(size, None, most), row_sizes([each], count)))
    table = table_of(("", "", "", ""), rows)
    table.show_header = False
    yield table
    yield Text()


def _bar(size: int, have: int | None, most: int) -> Text:
    """A bar to scale; what is beyond `have` in red."""
    length = max(1, round(size / most * BAR_CHARS))
    if have is None:
        return Text("#" * length)
    end = round(have / most * BAR_CHARS)
    over = max(1, length - end) if size > have else 0
    return Text.assemble("#" * min(length, end), " " * (end - length), "|", ("#" * over, _STYLES[False]))


def _parts_table(parts: Sequence[TensorPart]) -> RenderableType:
    """Return a table of the named rank's slice of each tensor."""
    rows = [
        (part.name, part.rule or "-", "x".join(map(str, part.shape)), show_ranges(part), part.dtype, part.size_bytes)
        for part in parts
    ]
    return table_of(("tensor", "rule", "shape", "held", "dtype", "bytes >"), rows)


def _stored(plan: PlanSummary) -> Iterator[tuple[str, object]]:
    """Return the row on what is stored, and how it is checked."""
    yield "model", f"{plan.tensors} tensors in {plan.shards} shards, {show_bytes(plan.stored_bytes)}"
    yield "chunks", f"{plan.chunks}, {digests(plan.verified)}"
    if plan.objects:
        yield "objects", _planned_checks(plan)
    yield "signed by", plan.signed_by or NOT_ASKED


def _sources(plan: PlanSummary) -> Iterator[tuple[str, object]]:
    """By the words of a load's report; of the cache and the disk only what a cluster has said."""
    if plan.resident:
        yield "resident", f"{plan.resident}: a load would be given it at once"
    sources = plan.bytes_by_source
    yield "would leave the store", show_bytes(sources["store"])
    if plan.cluster:
        yield "would come from the cache", show_bytes(sources["arena"])
        yield "would come from disk", show_bytes(sources["disk"])


def _estimate(plan: PlanSummary) -> Iterator[tuple[str, object]]:
    yield "model", f"{plan.tensors} tensors, {show_bytes(plan.stored_bytes)}, from config.json alone"


def _beside(plan: PlanSummary) -> Iterator[tuple[str, object]]:
    """Return the row on memory beside that of the tensors."""
    staging = max((rank.staging_bytes for rank in plan.ranks), default=0)
    if staging:
        yield "beside it, while converting", f"{show_bytes(staging)} per rank, and what is in flight"
    windows = {node.window_bytes for node in plan.nodes}
    yield (
        "host arena, window per node",
        ", ".join(show_bytes(size) if size else "0.54 GB, or what a small /dev/shm allows" for size in windows),
    )
    arenas = {node.arena_bytes for node in plan.nodes}
    sizes = ", ".join(show_bytes(size) if size else "a quarter of free /dev/shm, 8.59 GB at most" for size in arenas)
    yield "with chunks that it keeps, at most", sizes


def _devices_table(plan: PlanSummary) -> RenderableType:
    """Return a table of the device map, with consecutive modules in one line."""
    rows = []
    for key, run in groupby((plan.device_map or {}).items(), key=lambda entry: entry[1]):
        modules = [module or "(the whole model)" for module, _ in run]
        name, which = device_name(key), modules[0] if len(modules) == 1 else f"{modules[0]} ... {modules[-1]}"
        rows.append((name, show_bytes(plan.ranks[0].bytes_by_device.get(name, 0)), len(modules), which))
    return table_of(("device", "in all >", "modules >", "which"), rows)


def _planned_checks(plan: PlanSummary) -> str:
    """Return, for a model without a manifest, what the load will compare, and what it cannot."""
    unchecked = unchecked_counts(plan.objects)
    whole = f"{len(plan.objects) - sum(unchecked.values())} of {len(plan.objects)} by the store's own checksums"
    return "; ".join([whole, *(f"{count} not: {reason}" for reason, count in unchecked.items())])
