"""Writes prometheus-rule.yaml, the Prometheus operator's object, from rules.yaml, which promtool reads.

    python k8s/monitoring/prometheus_rule.py

Kustomize cannot put one file's YAML into another's, so the object is made here; a test holds the two together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
HEAD = "# Made from rules.yaml by prometheus_rule.py; change that, not this.\n"


class _Readable(yaml.SafeDumper):
    """Texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Readable.add_representer(str, _text)


def prometheus_rule(rules: str) -> str:
    """The object that holds the groups of a Prometheus rule file."""
    groups: list[dict[str, Any]] = yaml.safe_load(rules)["groups"]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "longshore"},
        "spec": {"groups": groups},
    }
    return HEAD + yaml.dump(rule, Dumper=_Readable, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    (HERE / "prometheus-rule.yaml").write_text(prometheus_rule((HERE / "rules.yaml").read_text()))
