"""Rules, alerts and the dashboard: Prometheus can read them, and they ask for metrics that there are."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.telemetry.metrics import FAMILIES
from tests.support.promtool import needs_promtool, promtool

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "k8s" / "monitoring"
PAGE = ROOT / "docs" / "metrics.md"
NAME = re.compile(r"\blongshore[_:][A-Za-z0-9_:]*")
LABELS = {series: {*family.labels, "le", "job", "namespace"} for family in FAMILIES for series in family.series}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return board


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def shown() -> Iterator[tuple[str, str]]:
    """(expression, legend) of every panel, as Grafana would ask for it."""
    for panel in panels():
        for target in panel["targets"]:
            expression = re.sub(r"\$(job|node|model)\b", ".*", target["expr"]).replace("$__range", "30m")
            yield expression, target["legendFormat"]


def unknown(expression: str) -> set[str]:
    """Return the names in an expression that nothing exposes or records."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    return set(NAME.findall(expression)) - set(LABELS) - recorded


EXPRESSIONS = {
    **{rule.get("record") or rule["alert"]: rule["expr"] for rule in rules()},
    **{f"panel {number}": expression for number, (expression, _) in enumerate(shown())},
    **{f"page {n}": found for n, found in enumerate(re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL))},
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_name_existing_metrics(name: str) -> None:
    assert NAME.findall(EXPRESSIONS[name])
    assert not unknown(EXPRESSIONS[name])


def test_an_unknown_metric_is_noticed() -> None:
    assert unknown("rate(longshore_bytes_total[5m]) + longshore:made:up") == {
        "longshore_bytes_total",
        "longshore:made:up",
    }


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_select_by_labels_that_the_metrics_have(name: str) -> None:
    for metric, selected in re.findall(r"\b(longshore_\w+)\{([^}]*)\}", EXPRESSIONS[name]):
        assert set(re.findall(r"(\w+)\s*[=!]", selected)) <= LABELS[metric], metric


@needs_promtool
def test_rules_pass_prometheus_own_check() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(MONITORING / "rules.yaml"))


@needs_promtool
def test_rules_pass_their_unit_tests() -> None:
    promtool("test", "rules", str(MONITORING / "rules_test.yaml"))


@needs_promtool
def test_every_expression_that_is_shown_can_be_parsed(tmp_path: Path) -> None:
    lines = [
        line.partition("#")[0] for name, text in EXPRESSIONS.items() if "page" in name for line in text.splitlines()
    ]
    expressions = [expression for expression, _ in shown()] + [line for line in lines if line.strip()]
    made = [{"record": f"x:{number}:y", "expr": expression} for number, expression in enumerate(expressions)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": made}]}))
    assert f"{len(expressions)} rules" in promtool("check", "rules", "--lint=none", str(tmp_path / "rules.yaml"))


def test_every_alert_is_tested_to_fire_and_not_to() -> None:
    tested = yaml.safe_load((MONITORING / "rules_test.yaml").read_text())["tests"]
    cases = [
        (case["alertname"], bool(case["exp_alerts"])) for test in tested for case in test.get("alert_rule_test", ())
    ]
    for rule in rules():
        if "alert" in rule:
            assert {(rule["alert"], True), (rule["alert"], False)} <= set(cases), rule["alert"]


def test_every_alert_has_a_severity_and_a_documented_action() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `Longshore")]
    assert {row[1].strip(" `") for row in rows} == {rule["alert"] for rule in alerts}
    assert all(row[3].strip() for row in rows)


def test_panels_show_what_an_operator_looks_for() -> None:
    titles = {panel["title"] for panel in dashboard()["panels"]}
    assert {
        "Load waterfall",
        "By source",
        "Ranks that wait, by reason",
        "Cache, by tier",
        "Failures",
        "Memory",
    } <= titles


def test_clusters_are_kept_apart() -> None:
    """One Prometheus may have several; their nodes and models may have the same names."""
    for expression, _ in shown():
        assert len(re.findall(r'\{job=~"[^"]*"', expression)) == len(NAME.findall(expression)), expression
    for rule in rules():
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]):
            assert {"namespace", "job"} <= {label.strip() for label in labels.split(",")}, rule["expr"]


def test_panels_lie_beside_each_other_and_have_a_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)


def test_legends_name_labels_that_the_answer_has() -> None:
    for expression, legend in shown():
        labels = set(re.findall(r"\{\{(\w+)\}\}", legend))
        grouped = re.search(r"by \(([\w, ]+)\)", expression)
        metric = NAME.findall(expression)[0]
        if grouped is not None:
            assert labels <= {label.strip() for label in grouped[1].split(",")}, expression
        elif metric in LABELS:
            assert labels <= LABELS[metric], expression


def test_the_dashboard_is_generated_by_its_script() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    spec = importlib.util.spec_from_file_location("longshore_dashboard", MONITORING / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (MONITORING / "dashboard.json").read_text() == made.render()


def test_the_dashboard_is_read_back_by_grafanas_own_types() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder
    text = (MONITORING / "dashboard.json").read_text()
    assert encoder(sort_keys=True, indent=1).encode(models.Dashboard.from_json(json.loads(text))) + "\n" == text
