"""Writes dashboard.json, for Grafana, with Grafana's own builders: `python k8s/monitoring/dashboard.py`.

Every agent is a series of its own (`node`, `incarnation`), so expressions take rates and then add agents up.
A test holds the two together, and checks every expression with promtool and against `cluster.telemetry.metrics`.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
)

HERE = Path(__file__).parent
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 24, 8
PICK = 'node=~"$node", model=~"$model"'  # of series that have both labels
STATES = {"ready": "green", "planning": "blue", "waiting": "orange", "starting": "purple", "loading": "yellow"}
STATES |= {"degraded": "red"}

Query = tuple[str, str]  # expression, legend


def series(title: str, unit: str, *queries: Query, span: int = 8, stacked: bool = False, help_: str = "") -> Any:
    """Lines over time."""
    panel = timeseries.Panel().title(title).unit(unit).span(span).height(HEIGHT).datasource(SOURCE).description(help_)
    panel = panel.line_width(1).fill_opacity(30 if stacked else 8).show_points(options.VisibilityMode.NEVER).min(0)
    panel = panel.tooltip(
        common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI).sort(options.SortOrder.DESCENDING)
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL))
    return _with(panel, queries)


def number(title: str, unit: str, expression: str, *, bad_above: float | None = None, span: int = 4) -> Any:
    """One figure; red when it is above `bad_above`."""
    steps = [Threshold(value=None, color="green" if bad_above is not None else "text")]
    steps += [] if bad_above is None else [Threshold(value=bad_above, color="red")]
    panel = stat.Panel().title(title).unit(unit).span(span).height(4).datasource(SOURCE)
    panel = panel.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    return _with(panel, [(expression, "")])


def bars(title: str, unit: str, expression: str, legend: str, *, span: int = 8, help_: str = "") -> Any:
    """One horizontal bar per series, of the whole time that is shown."""
    panel = bargauge.Panel().title(title).unit(unit).span(span).height(HEIGHT).datasource(SOURCE).description(help_)
    panel = panel.orientation(options.VizOrientation.HORIZONTAL).min(0)
    panel = panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    query = prometheus.Dataquery().expr(of_clusters(expression)).legend_format(legend).instant().ref_id("A")
    return panel.with_target(query.datasource(SOURCE))


def states(title: str, *queries: Query, span: int = 12, help_: str = "") -> Any:
    """A row per series, coloured by state."""
    panel = statetimeline.Panel().title(title).span(span).height(HEIGHT).datasource(SOURCE).description(help_)
    panel = panel.merge_values(True).show_value(options.VisibilityMode.AUTO)
    mapped = {
        str(value): ValueMappingResult(text=state, color=color, index=value - 1)
        for value, (state, color) in enumerate(STATES.items(), 1)
    }
    return _with(panel.mappings([ValueMap(options=mapped)]), queries)


def of_clusters(expression: str) -> str:
    """The same of the clusters that are picked: one Prometheus may have several."""
    picked = 'job=~"$job"'
    return re.sub(
        r"\b(longshore[_:][\w:]+)(\{?)", lambda found: f"{found[1]}{{{picked}{', ' if found[2] else '}'}", expression
    )


def _with(panel: Any, queries: Any) -> Any:
    for letter, (expression, legend) in zip("ABCDEF", queries, strict=False):
        query = prometheus.Dataquery().expr(of_clusters(expression)).legend_format(legend).ref_id(letter)
        panel = panel.with_target(query.datasource(SOURCE))
    return panel


def state_of_loads() -> str:
    """The state of a model's loads as a number; of several, one that is under way, and the furthest."""
    by_state = (
        f'(longshore_loads{{model=~"$model", state="{state}"}} > bool 0) * {value}'
        for value, state in enumerate(STATES, 1)
    )
    return f"max by (model) ({' or '.join(by_state)}) > 0"


ROWS: dict[str, list[Any]] = {
    "Now": [
        number(
            "Loads under way", "short", 'sum(longshore_loads{state=~"planning|waiting|starting|loading"}) or vector(0)'
        ),
        number("Models ready", "short", 'sum(longshore_loads{state="ready"}) or vector(0)'),
        number("From all sources", "Bps", f"sum(rate(longshore_chunk_bytes_total{{{PICK}}}[1m]))"),
        number("Corrupt chunks", "short", "sum(increase(longshore_chunks_corrupt_total[$__range]))", bad_above=0.5),
        number("Workers lost", "short", "sum(increase(longshore_ranks_lost_total[$__range]))", bad_above=0.5),
        number("Longest silence", "s", "max(longshore_heartbeat_age_seconds)", bad_above=15),
    ],
    "Loads": [
        states(
            "Load waterfall",
            (state_of_loads(), "{{model}}"),
            help_="The state of each model's load, one after the other.",
        ),
        series(
            "Placed, of what all ranks will hold",
            "percentunit",
            (
                'sum by (model) (longshore_model_placed_bytes{model=~"$model"}) '
                '/ (sum by (model) (longshore_model_size_bytes{model=~"$model"}) > 0)',
                "{{model}}",
            ),
            span=12,
        ),
        series(
            "Placed, by rank",
            "bytes",
            (
                f"sum by (node, model, rank) (longshore_rank_placed_bytes{{{PICK}}})",
                "{{model}} rank {{rank}} on {{node}}",
            ),
            help_="Ranks that fall behind are seen here.",
        ),
        bars(
            "Where the time of loads goes",
            "s",
            "sum by (state) (increase(longshore_load_state_duration_seconds_sum[$__range])) "
            "/ (sum by (state) (increase(longshore_load_state_duration_seconds_count[$__range])) > 0)",
            "{{state}}",
            help_="Mean seconds that a load stayed in each state.",
        ),
        series(
            "Duration of loads",
            "s",
            *(
                (
                    f"histogram_quantile({quantile}, sum by (le, outcome) "
                    '(rate(longshore_load_duration_seconds_bucket{model=~"$model"}[1h])))',
                    f"{{{{outcome}}}}, {name}",
                )
                for quantile, name in ((0.5, "half"), (0.9, "9 of 10"))
            ),
        ),
    ],
    "Bytes": [
        series(
            "By source",
            "Bps",
            (f"sum by (source) (rate(longshore_chunk_bytes_total{{{PICK}}}[1m]))", "{{source}}"),
            stacked=True,
        ),
        series("By node", "Bps", (f"sum by (node) (rate(longshore_chunk_bytes_total{{{PICK}}}[1m]))", "{{node}}")),
        series(
            "Requests in flight",
            "short",
            (f"sum by (node) (longshore_rank_requests{{{PICK}}})", "{{node}}"),
            (f"sum by (node) (longshore_rank_allowed_requests{{{PICK}}})", "{{node}}, allowed"),
        ),
    ],
    "Updates and replicas": [
        series(
            "Changes of resident models that run, by state",
            "short",
            ('sum by (model, state) (longshore_changes{model=~"$model"})', "{{model}}: {{state}}"),
            span=12,
            help_="Updates in place are planning, staging, streaming or exchanging; changes of replicas are scaling.",
        ),
        series(
            "Updates that ended, in 10 minutes",
            "short",
            (
                'sum by (model, outcome) (increase(longshore_updates_finished_total{model=~"$model"}[10m]))',
                "{{model}}: {{outcome}}",
            ),
            span=12,
        ),
    ],
    "Saves": [
        series(
            "In the store, of what is saved",
            "percentunit",
            (
                "sum by (model) (longshore_save_done_bytes) / (sum by (model) (longshore_save_size_bytes) > 0)",
                "{{model}}",
            ),
        ),
        series(
            "Written, copied in the store, skipped",
            "Bps",
            ("sum by (source) (rate(longshore_save_bytes_total[1m]))", "{{source}}"),
            stacked=True,
        ),
        series(
            "Saves that ended, in 10 minutes",
            "short",
            (
                "sum by (model, outcome) (increase(longshore_saves_finished_total[10m]))",
                "{{model}}: {{outcome}}",
            ),
        ),
        series(
            "Duration of saves",
            "s",
            *(
                (
                    f"histogram_quantile({quantile}, sum by (le, outcome) "
                    "(rate(longshore_save_duration_seconds_bucket[1h])))",
                    f"{{{{outcome}}}}, {name}",
                )
                for quantile, name in ((0.5, "half"), (0.9, "9 of 10"))
            ),
            span=12,
        ),
        series(
            "Most bytes of other ranks that a rank held",
            "bytes",
            ("max by (model) (longshore_save_peak_foreign_bytes)", "{{model}}"),
            span=12,
        ),
    ],
    "Stages and stalls": [
        series(
            "Threads at work, by stage",
            "short",
            (f"sum by (stage) (rate(longshore_stage_seconds_total{{{PICK}}}[1m]))", "{{stage}}"),
            span=12,
            stacked=True,
        ),
        series(
            "Ranks that wait, by reason",
            "short",
            (f"sum by (reason) (rate(longshore_stall_seconds_total{{{PICK}}}[1m]))", "{{reason}}"),
            span=12,
            stacked=True,
            help_="slot: the arena was full; lease: the agent had not answered; retry: before another try; chunk: "
            "nothing to copy yet.",
        ),
    ],
    "Cache, by tier": [
        series(
            "Found there, of what was needed",
            "percentunit",
            ('longshore:cache_hits:ratio10m{node=~"$node"}', "{{tier}} on {{node}}"),
        ),
        series(
            "Held",
            "bytes",
            ('sum by (tier) (longshore_cache_bytes{node=~"$node"})', "{{tier}}"),
            ('sum by (tier) (longshore_cache_limit_bytes{node=~"$node"})', "{{tier}}, at most"),
        ),
        series(
            "Evicted chunks a second",
            "short",
            ('sum by (tier, node) (rate(longshore_cache_evictions_total{node=~"$node"}[5m]))', "{{tier}} on {{node}}"),
        ),
        series(
            "Slots of the arena",
            "short",
            ('sum by (state) (longshore_slots{node=~"$node"})', "{{state}}"),
            span=12,
            stacked=True,
        ),
        series(
            "Chunks to disk a second",
            "short",
            ('sum by (node) (rate(longshore_disk_chunks_written_total{node=~"$node"}[5m]))', "written on {{node}}"),
            ('sum by (node) (rate(longshore_disk_chunks_unkept_total{node=~"$node"}[5m]))', "not kept on {{node}}"),
            span=12,
        ),
    ],
    "Failures": [
        series(
            "Retries a second, by cause",
            "short",
            (f"sum by (cause) (rate(longshore_retries_total{{{PICK}}}[5m]))", "{{cause}}"),
            stacked=True,
        ),
        series(
            "Throttled answers and second fetches a second",
            "short",
            (f"sum(rate(longshore_throttles_total{{{PICK}}}[5m]))", "throttled"),
            (f"sum(rate(longshore_hedges_total{{{PICK}}}[5m]))", "begun twice"),
            (f"sum(rate(longshore_hedges_won_total{{{PICK}}}[5m]))", "of these, won by the second"),
        ),
        series(
            "Lost and corrupt, in 10 minutes",
            "short",
            ('sum by (model) (increase(longshore_ranks_lost_total{model=~"$model"}[10m]))', "workers of {{model}}"),
            (f"sum by (node) (increase(longshore_chunks_corrupt_total{{{PICK}}}[10m]))", "corrupt chunks on {{node}}"),
            (f"sum by (node) (increase(longshore_leases_taken_back_total{{{PICK}}}[10m]))", "leases on {{node}}"),
        ),
        series(
            "Loads that ended with an error, in 10 minutes",
            "short",
            (
                'sum by (model, error) (increase(longshore_load_failures_total{model=~"$model"}[10m]))',
                "{{model}}: {{error}}",
            ),
            span=12,
        ),
        series(
            "Silence of agents and ranks",
            "s",
            ('max by (node) (longshore_heartbeat_age_seconds{node=~"$node"})', "agent of {{node}}"),
            (
                f"max by (node, model, rank) (longshore_rank_silent_seconds{{{PICK}}})",
                "{{model}} rank {{rank}}",
            ),
            span=12,
        ),
    ],
    "Memory": [
        series(
            "Of processes, without what they share",
            "bytes",
            (
                'max by (node, process, model) (longshore_process_memory_bytes{node=~"$node", model=~"$model|"})',
                "{{process}} {{model}} on {{node}}",
            ),
            span=12,
        ),
        series(
            "Free on hosts",
            "bytes",
            ('max by (node) (longshore_host_memory_free_bytes{node=~"$node"})', "{{node}}"),
            span=12,
        ),
        series("Free in /dev/shm", "percentunit", ('longshore:shm_free:ratio{node=~"$node"}', "{{node}}"), span=12),
        series(
            "Free on GPUs",
            "bytes",
            ('max by (node, gpu) (longshore_gpu_memory_free_bytes{node=~"$node"})', "{{node}} GPU {{gpu}}"),
            span=12,
        ),
    ],
}


def render() -> str:
    """The dashboard as JSON."""
    board = (
        dashboard.Dashboard("Longshore")
        .uid("longshore")
        .description("Loads of model weights: docs/metrics.md says what each figure is, and what to do at an alert.")
        .tags(["longshore"])
        .refresh("5s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus").label("Prometheus"))
    )
    told_by = {
        "job": "longshore_build_info",
        "node": of_clusters("longshore_heartbeat_age_seconds"),
        "model": of_clusters("longshore_loads"),
    }
    for name, metric in told_by.items():
        label = dashboard.QueryVariable(name).datasource(SOURCE).multi(True).include_all(True).all_value(".*")
        values = f"label_values({metric}, {name})"
        board = board.with_variable(label.query(values).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    ids = itertools.count(1)
    for title, panels in ROWS.items():
        board = board.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            board = board.with_panel(panel.id(next(ids)))
    return JSONEncoder(sort_keys=True, indent=1).encode(board.build()) + "\n"


if __name__ == "__main__":
    (HERE / "dashboard.json").write_text(render())
