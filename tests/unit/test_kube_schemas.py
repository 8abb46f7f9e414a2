"""The manifests of k8s/ pass the schemas that a Kubernetes API server applies, without one.

Core kinds go through `kubernetes-validate`, with nothing unknown allowed. Ray's kinds go through KubeRay's definitions
as a server applies them: defaults are filled in, the schema is closed, CEL rules are run. Kinds of the Prometheus
operator have a small closed schema here, of the fields that we use.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.kube_manifests import COMPOSED, GONE, RENDERED, Manifest, changed, kustomize_missing, pods, render

KUBERNETES = "1.32"
CRDS = Path(os.environ.get("KUBERAY_CRDS") or Path(__file__).parents[3] / "shared" / "kuberay-crds")
FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
OPEN = "x-kubernetes-preserve-unknown-fields"

Schema = dict[str, Any]


def crds_missing() -> str | None:
    """Return why Ray's kinds cannot be checked here, or None."""
    if (CRDS / "ray.io_rayclusters.yaml").exists():
        return None
    return f"KubeRay's definitions are not in {CRDS}: name their folder in KUBERAY_CRDS"


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return the problems of an object by its schema; an empty list when a server would accept it."""
    return list(_problems(json.dumps(manifest)))


@cache
def _problems(written: str) -> list[str]:
    manifest = json.loads(written)
    group = manifest["apiVersion"].rpartition("/")[0]
    if group == "ray.io":
        return _custom_problems(manifest, definition(manifest["kind"]))
    if group == "monitoring.coreos.com":
        return _violations(manifest, MONITORING[manifest["kind"]])
    return _core_problems(manifest)


def _core_problems(manifest: dict[str, Any]) -> list[str]:
    """Check a kind that every API server knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package's own imports
        import kubernetes_validate

        try:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            path = "/".join(str(part) for part in getattr(error, "path", ()))
            return [f"{path}: {str(getattr(error, 'message', error))[:300]}"]
    return []


@cache
def definition(kind: str) -> Schema:
    """Return the stored version's schema of one of Ray's kinds."""
    crd = yaml.load((CRDS / f"ray.io_{kind.lower()}s.yaml").read_text(), Loader=FAST_LOADER)
    (version,) = (version for version in crd["spec"]["versions"] if version["storage"])
    return dict(version["schema"]["openAPIV3Schema"])


def _custom_problems(manifest: dict[str, Any], schema: Schema) -> list[str]:
    """Check a kind with a definition: its schema and its rules, after its defaults are filled in."""
    whole = with_defaults(copy.deepcopy(manifest), schema)
    return _violations(whole, closed(schema)) + broken_rules(whole, schema)


def _violations(manifest: dict[str, Any], schema: Schema) -> list[str]:
    found = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{'/'.join(str(part) for part in error.path)}: {error.message[:300]}" for error in found]


def with_defaults(value: Any, schema: Schema) -> Any:
    """Return the value with every default of the schema filled in, as a server stores it."""
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if "default" in part and name not in value:
                value[name] = copy.deepcopy(part["default"])
            if name in value:
                value[name] = with_defaults(value[name], part)
        rest = schema.get("additionalProperties")
        if isinstance(rest, dict):
            for name in value.keys() - schema.get("properties", {}).keys():
                value[name] = with_defaults(value[name], rest)
    elif isinstance(value, list) and "items" in schema:
        return [with_defaults(item, schema["items"]) for item in value]
    return value


def closed(schema: Schema) -> Schema:
    """Return the schema as JSON Schema that refuses unnamed fields, which a server would drop silently."""
    made = {name: part for name, part in schema.items() if not name.startswith("x-kubernetes-") and name != "format"}
    if "properties" in schema:
        made["properties"] = {name: closed(part) for name, part in schema["properties"].items()}
        if not schema.get(OPEN) and "additionalProperties" not in schema:
            made["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            made[name] = closed(schema[name])
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    return made


def broken_rules(value: Any, schema: Schema, path: str = "") -> list[str]:
    """Return the CEL rules that the value breaks, except those about an earlier version: there is none."""
    found = []
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"] and not _holds(rule["rule"], value):
            found.append(f"{path}: {rule.get('message') or rule['rule']}")
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if name in value:
                found += broken_rules(value[name], part, f"{path}/{name}")
        rest = schema.get("additionalProperties")
        if isinstance(rest, dict):
            for name in sorted(value.keys() - schema.get("properties", {}).keys()):
                found += broken_rules(value[name], rest, f"{path}/{name}")
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            found += broken_rules(item, schema["items"], f"{path}/{index}")
    return found


def _holds(rule: str, value: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package's own imports
        import celpy

        environment = celpy.Environment()
        return bool(environment.program(environment.compile(rule)).evaluate({"self": celpy.json_to_cel(value)}))


def _object(required: list[str], **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_TEXT: Schema = {"type": "string", "minLength": 1}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION: Schema = {"type": "string", "pattern": r"^(0|([0-9]+(ms|s|m|h|d|w|y))+)$"}
_METADATA = _object(["name"], name=_TEXT, namespace=_TEXT, labels=_TEXTS)
_EXPRESSION = _object(["key", "operator"], key=_TEXT, operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
                      values={"type": "array", "items": _TEXT})  # fmt: skip
_ENDPOINT = _object(["port"], port=_TEXT, path=_TEXT, interval=_DURATION)
_RULE: Schema = _object(
    ["expr"], alert=_TEXT, record=_TEXT, expr=_TEXT, labels=_TEXTS, annotations=_TEXTS,
    **{"for": _DURATION, "keep_firing_for": _DURATION},
)  # fmt: skip
_GROUP = _object(
    ["name", "rules"], name=_TEXT, interval=_DURATION, rules={"type": "array", "items": _RULE, "minItems": 1}
)


def _monitoring(kind: str, spec: Schema) -> Schema:
    return _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind={"const": kind},
        metadata=_METADATA,
        spec=spec,
    )


MONITORING: dict[str, Schema] = {
    "PodMonitor": _monitoring(
        "PodMonitor",
        _object(
            ["selector", "podMetricsEndpoints"],
            selector=_object([], matchLabels=_TEXTS, matchExpressions={"type": "array", "items": _EXPRESSION}),
            podMetricsEndpoints={"type": "array", "items": _ENDPOINT, "minItems": 1},
        ),
    ),
    "PrometheusRule": _monitoring(
        "PrometheusRule", _object(["groups"], groups={"type": "array", "items": _GROUP, "minItems": 1})
    ),
}


pytestmark = [
    pytest.mark.skipif(kustomize_missing() is not None, reason=str(kustomize_missing())),
    pytest.mark.skipif(crds_missing() is not None, reason=str(crds_missing())),
]


Rule = Callable[[list[Manifest]], Iterator[str]]


def by_schema(manifests: list[Manifest]) -> Iterator[str]:
    """Return what a server would refuse of the objects, and of the pods made from them."""
    found = [problem for manifest in manifests for problem in problems(manifest)]
    yield from found
    for pod in pods(manifests) if not found else ():
        mounted = {mount["name"] for mount in pod.main["volumeMounts"]}
        claims = [{"name": "data", "emptyDir": {}}] if "data" in mounted else []  # of a StatefulSet
        spec = pod.spec | {"volumes": pod.spec.get("volumes", []) + claims}
        metadata = {"name": "pod", "labels": pod.labels}
        for problem in problems({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}):
            yield f"{pod.where}: {problem}"


@pytest.mark.parametrize("name", [*RENDERED, *COMPOSED])
def test_manifests_pass_the_schemas(name: str) -> None:
    assert list(by_schema(render(name))) == []


WORKER = "spec/workerGroupSpecs/0/template/spec"
MAIN = f"{WORKER}/containers/0"
CHANGES: list[tuple[Rule, str, str, str, Any]] = [  # (rule, rendering, kind, path, value)
    (by_schema, "overlays/gpu", "RayCluster", f"{MAIN}/livenesProbe", {}),
    (by_schema, "overlays/gpu", "RayCluster", f"{MAIN}/resources/limits/memory", "160 GB"),
    (by_schema, "overlays/gpu", "RayCluster", f"{MAIN}/ports/0/containerPort", "8080"),
    (by_schema, "overlays/gpu", "RayCluster", "spec/workerGroupSpecs/0/maxReplicas", "four"),
    (by_schema, "overlays/gpu", "RayCluster", "spec/autoscalerOptions/upscalingMode", "Fast"),
    (by_schema, "overlays/gpu", "RayCluster", "spec/managedBy", "nobody.io/anything"),  # a CEL rule
    (by_schema, "overlays/gpu", "RayCluster", "spec/headGroupSpec", GONE),
    (by_schema, "jobs/load", "RayJob", "spec/deletionStrategy", {"onSuccess": {"policy": "DeleteSelf"}}),  # CEL
    (by_schema, "overlays/gpu-service", "RayService", "spec/serveConfig", "x"),
    (by_schema, "overlays/gpu", "NetworkPolicy", "spec/ingress/0/form", []),
    (by_schema, "overlays/gpu", "PodMonitor", "spec/podMetricsEndpoints/0/intervall", "15s"),
    (by_schema, "overlays/gpu", "PrometheusRule", "spec/groups/0/rules/0/expr", GONE),
    (by_schema, "overlays/gpu", "ConfigMap", "data/LONGSHORE_METRICS_PORT", 9464),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "name", "kind", "path", "value"), CHANGES)
def test_each_rule_can_fail(rule: Rule, name: str, kind: str, path: str, value: Any) -> None:
    assert list(rule(render(name))) == []
    assert list(rule(changed(name, kind, path, value)))
