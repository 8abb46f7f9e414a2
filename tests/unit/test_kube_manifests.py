"""The manifests of k8s/ render, pass the schemas, fit together and to the code. Each check is seen to fail."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import deployment_rules, pod_rules
from tests.support.kube_manifests import (
    K8S,
    RENDERED,
    Manifest,
    kustomize_missing,
    only,
    pods,
    ray_spec,
    render,
    render_with,
)
from tests.support.kube_schemas import crds_missing, problems

pytestmark = pytest.mark.skipif(kustomize_missing() is not None, reason=str(kustomize_missing()))

FT, HTTP, HOST_PATH = (f"components/{name}" for name in ("gcs-fault-tolerance", "http-service", "host-path-cache"))
COMPOSED = {
    "cpu-dev+service": ("overlays/cpu-dev", [HTTP]),
    "cpu-dev+ft+monitoring": ("overlays/cpu-dev", [FT, "monitoring"]),
    "gpu+ft+host-path": ("overlays/gpu", [FT, HOST_PATH]),
    "gpu-spot+service": ("overlays/gpu-spot", [HTTP]),
    "gpu+ft+service": ("overlays/gpu", [FT, HTTP]),
    "gpu-service+ft+host-path": ("overlays/gpu-service", [FT, HOST_PATH]),
    "gpu-spot+service+host-path+ft": ("overlays/gpu-spot", [HTTP, HOST_PATH, FT]),
}
RULES = {rule.__name__: rule for rule in (*pod_rules.RULES, *deployment_rules.RULES)}
GONE = object()
Rendering = Callable[[str], list[Manifest]]


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    folders = {name: tmp_path_factory.mktemp("overlay") for name in COMPOSED}
    return lambda name: render_with(*COMPOSED[name], folders[name]) if name in COMPOSED else render(K8S / name)


def by_schema(manifests: list[Manifest]) -> Iterator[str]:
    """What a server would refuse of the objects, and of the pods that are made of them."""
    found = [problem for manifest in manifests for problem in problems(manifest)]
    yield from found
    for pod in pods(manifests) if not found else ():
        mounted = {mount["name"] for mount in pod.main["volumeMounts"]}
        claims = [{"name": "data", "emptyDir": {}}] if "data" in mounted else []  # of a StatefulSet
        spec = pod.spec | {"volumes": pod.spec.get("volumes", []) + claims}
        metadata = {"name": "pod", "labels": pod.labels}
        for problem in problems({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}):
            yield f"{pod.where}: {problem}"


def test_every_folder_is_rendered_by_a_test() -> None:
    found = {str(file.parent.relative_to(K8S)) for file in K8S.rglob("kustomization.yaml")}
    used = {"base", "monitoring", FT, HTTP, HOST_PATH, f"{HTTP}/from-cluster", f"{HTTP}/without-cluster"}
    assert found == {*RENDERED, *used}


@pytest.mark.skipif(crds_missing() is not None, reason=str(crds_missing()))
@pytest.mark.parametrize("name", [*RENDERED, *COMPOSED])
def test_passes_the_schemas(name: str, rendering: Rendering) -> None:
    assert list(by_schema(rendering(name))) == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*RENDERED, *COMPOSED])
def test_fits_together_and_to_the_code(name: str, rule: str, rendering: Rendering) -> None:
    assert list(RULES[rule](rendering(name))) == []


def test_alerts_are_those_that_promtool_checks() -> None:
    script = runpy.run_path(str(K8S / "monitoring" / "prometheus_rule.py"))
    assert (
        script["prometheus_rule"]((K8S / "monitoring" / "rules.yaml").read_text())
        == (K8S / "monitoring" / "prometheus-rule.yaml").read_text()
    ), "run k8s/monitoring/prometheus_rule.py"


def test_jobs_ask_the_cluster_that_the_overlays_make() -> None:
    for job in ("jobs/load", "jobs/load-cpu-dev"):
        asked = only(render(K8S / job), "RayJob")["spec"]["clusterSelector"]["ray.io/cluster"]
        for overlay in ("overlays/cpu-dev", "overlays/gpu", "overlays/gpu-spot"):
            assert only(render(K8S / overlay), "RayCluster")["metadata"]["name"] == asked


def test_the_service_runs_on_the_cluster_of_the_overlay() -> None:
    cluster = only(render(K8S / "overlays/gpu"), "RayCluster")["spec"]
    service = only(render(K8S / "overlays/gpu-service"), "RayService")["spec"]["rayClusterConfig"]
    assert service == cluster


def test_components_change_every_group_whatever_they_are_put_on(rendering: Rendering) -> None:
    for name in ("gpu+ft+host-path", "gpu-service+ft+host-path", "gpu-spot+service+host-path+ft"):
        (cluster,) = (
            spec for manifest in rendering(name) if (spec := ray_spec(manifest) if "spec" in manifest else None)
        )
        assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == "longshore-redis:6379"
        for group in cluster["workerGroupSpecs"]:
            (cache,) = (volume for volume in group["template"]["spec"]["volumes"] if volume["name"] == "cache")
            assert "hostPath" in cache, f"{name} {group['groupName']}"


def test_a_head_that_nothing_outlives_is_not_drained(rendering: Rendering) -> None:
    for name in ("overlays/cpu-dev", "overlays/gpu", "overlays/gpu-service"):
        budget = only(rendering(name), "PodDisruptionBudget")["spec"]
        assert budget["minAvailable"] == 1  # not a share, and not maxUnavailable: KubeRay's objects have no scale
    assert not [manifest for manifest in rendering("gpu+ft+host-path") if manifest["kind"] == "PodDisruptionBudget"]


def test_spot_workers_are_the_others_but_for_what_makes_them_spot() -> None:
    lasting, spot = only(render(K8S / "overlays/gpu-spot"), "RayCluster")["spec"]["workerGroupSpecs"]
    assert lasting["groupName"] != spot["groupName"]
    (label,) = spot["template"]["spec"]["nodeSelector"]
    assert f"'key': '{label}', 'operator': 'DoesNotExist'" in str(lasting["template"]["spec"]["affinity"])
    assert (
        spot["template"]["spec"]["containers"][0]["resources"]
        == lasting["template"]["spec"]["containers"][0]["resources"]
    )


HEAD = "spec/headGroupSpec/template/spec"
WORKER = "spec/workerGroupSpecs/0/template/spec"
MAIN = f"{WORKER}/containers/0"
IN_SERVICE = f"spec/rayClusterConfig/{MAIN.removeprefix('spec/')}"
SERVE = "http_options: {{host: 0.0.0.0, port: 8000}}\napplications: [{{name: l, import_path: '{}', args: {}}}]"
CHANGES: list[tuple[str, str, str, str, Any]] = [  # (rule, rendering, kind, path, value)
    ("by_schema", "overlays/gpu", "RayCluster", f"{MAIN}/livenesProbe", {}),
    ("by_schema", "overlays/gpu", "RayCluster", f"{MAIN}/resources/limits/memory", "160 GB"),
    ("by_schema", "overlays/gpu", "RayCluster", f"{MAIN}/ports/0/containerPort", "8080"),
    ("by_schema", "overlays/gpu", "RayCluster", "spec/workerGroupSpecs/0/maxReplicas", "four"),
    ("by_schema", "overlays/gpu", "RayCluster", "spec/autoscalerOptions/upscalingMode", "Fast"),
    ("by_schema", "overlays/gpu", "RayCluster", "spec/managedBy", "nobody.io/anything"),  # a CEL rule
    ("by_schema", "overlays/gpu", "RayCluster", "spec/headGroupSpec", GONE),
    ("by_schema", "jobs/load", "RayJob", "spec/deletionStrategy", {"onSuccess": {"policy": "DeleteSelf"}}),  # CEL
    ("by_schema", "overlays/gpu-service", "RayService", "spec/serveConfig", "x"),
    ("by_schema", "overlays/gpu", "NetworkPolicy", "spec/ingress/0/form", []),
    ("by_schema", "overlays/gpu", "PodMonitor", "spec/podMetricsEndpoints/0/intervall", "15s"),
    ("by_schema", "overlays/gpu", "PrometheusRule", "spec/groups/0/rules/0/expr", GONE),
    ("by_schema", "overlays/gpu", "ConfigMap", "data/LONGSHORE_METRICS_PORT", 9464),
    ("requests_within_limits", "overlays/gpu", "RayCluster", f"{MAIN}/resources/requests/cpu", "65"),
    ("requests_within_limits", "overlays/gpu", "RayCluster", f"{MAIN}/resources/requests/memory", "100Gi"),
    ("requests_within_limits", "overlays/gpu", "RayCluster", f"{MAIN}/resources/limits/memory", GONE),
    ("requests_within_limits", "overlays/gpu", "RayCluster", f"{MAIN}/resources/requests/nvidia.com~1gpu", "4"),
    ("requests_within_limits", "overlays/gpu", "RayCluster", f"{MAIN}/resources/limits/nvidia.com~1gpus", "8"),
    ("shared_memory_fits", "overlays/gpu", "ConfigMap", "data/LONGSHORE_ARENA_BYTES", "100GiB"),
    ("shared_memory_fits", "overlays/cpu-dev", "ConfigMap", "data/LONGSHORE_ARENA_BYTES", "1400MiB"),  # on the head
    ("shared_memory_fits", "overlays/gpu", "RayCluster", f"{MAIN}/resources/limits/memory", "100Gi"),
    ("shared_memory_fits", "overlays/gpu", "RayCluster", f"{WORKER}/volumes/0/emptyDir", {"sizeLimit": "80Gi"}),
    ("shared_memory_fits", "overlays/gpu", "RayCluster", "spec/headGroupSpec/rayStartParams/object-store-memory", GONE),
    ("disks_fit", "overlays/gpu", "ConfigMap", "data/LONGSHORE_DISK_CACHE_DIR", "/cache"),
    ("disks_fit", "overlays/gpu", "ConfigMap", "data/LONGSHORE_DISK_CACHE_DIR", "/var/chunks"),
    ("disks_fit", "overlays/gpu", "ConfigMap", "data/LONGSHORE_DISK_CACHE_BYTES", "2TiB"),
    ("disks_fit", "overlays/cpu-dev", "RayCluster", f"{WORKER}/volumes/1/emptyDir/sizeLimit", "40Gi"),
    ("disks_fit", "overlays/cpu-dev", "RayCluster", f"{WORKER}/volumes/1/emptyDir/sizeLimit", GONE),
    ("little_privilege", "overlays/gpu", "RayCluster", f"{HEAD}/securityContext/runAsNonRoot", False),
    ("little_privilege", "overlays/gpu", "RayCluster", f"{HEAD}/securityContext/runAsUser", 0),
    ("little_privilege", "overlays/gpu", "RayCluster", f"{HEAD}/securityContext/seccompProfile", GONE),
    ("little_privilege", "overlays/gpu", "RayCluster", f"{WORKER}/automountServiceAccountToken", GONE),
    ("little_privilege", "overlays/gpu", "RayCluster", f"{WORKER}/hostIPC", True),
    ("little_privilege", "overlays/gpu", "RayCluster", f"{MAIN}/securityContext/readOnlyRootFilesystem", False),
    ("little_privilege", "overlays/gpu", "RayCluster", f"{MAIN}/securityContext/capabilities", {"add": ["IPC_LOCK"]}),
    ("little_privilege", "overlays/gpu", "RayCluster", f"{MAIN}/volumeMounts/1/mountPath", "/scratch"),
    ("little_privilege", "overlays/gpu", "RayCluster", f"{MAIN}/volumeMounts/3/name", "cash"),
    ("little_privilege", "overlays/gpu", "RayCluster", "spec/autoscalerOptions/securityContext", {}),
    ("little_privilege", "jobs/load", "RayJob", "spec/submitterPodTemplate/spec/securityContext", {}),
    ("ends_in_peace", "overlays/gpu", "RayCluster", f"{HEAD}/terminationGracePeriodSeconds", 30),
    ("ends_in_peace", "overlays/gpu", "RayCluster", f"{MAIN}/lifecycle", GONE),
    ("ends_in_peace", "overlays/gpu", "RayCluster", f"{MAIN}/livenessProbe/httpGet/port", 8265),
    ("ends_in_peace", "overlays/gpu", "RayCluster", f"{HEAD}/containers/0/readinessProbe", GONE),
    ("ends_in_peace", "overlays/gpu-service", "RayService", f"{IN_SERVICE}/readinessProbe", {}),
    ("settings_are_known", "overlays/gpu", "ConfigMap", "data/LONGSHORE_ARENA_BITES", "1GiB"),
    ("settings_are_known", "overlays/gpu", "ConfigMap", "data/LONGSHORE_ARENA_BYTES", "much"),
    ("settings_are_known", "overlays/gpu", "ConfigMap", "data/ARENA_BYTES", "1GiB"),
    ("settings_are_known", "overlays/gpu", "ConfigMap", "data/LONGSHORE_HTTP_PORT", "http"),
    ("settings_are_known", "overlays/gpu", "ConfigMap", "data/LONGSHORE_HTTP_TOKEN", "a secret"),
    ("settings_are_known", "overlays/gpu", "RayCluster", f"{MAIN}/envFrom", []),
    ("settings_are_known", "overlays/gpu", "RayCluster", f"{MAIN}/env/0/name", "LONGSHORE_HTTP_SECRET"),
    ("workers_are_not_last", "overlays/gpu", "RayCluster", f"{MAIN}/env/1/value", "15"),
    ("workers_are_not_last", "overlays/gpu", "RayCluster", f"{HEAD}/containers/0/env/1", GONE),
    ("ports_are_ours", "overlays/gpu", "ConfigMap", "data/LONGSHORE_METRICS_PORT", "9465"),
    ("ports_are_ours", "overlays/gpu", "RayCluster", f"{HEAD}/containers/0/ports/1/containerPort", 8266),
    ("ports_are_ours", "overlays/gpu", "NetworkPolicy", "spec/ingress/1/ports/0/port", 8264),
    ("ports_are_ours", "overlays/gpu", "PodMonitor", "spec/podMetricsEndpoints/0/port", "coordinator"),
    ("ports_are_ours", "overlays/gpu-service", "RayService", "spec/serveConfigV2", "http_options: {port: 8265}"),
    ("image_is_built", "overlays/gpu", "RayCluster", f"{MAIN}/image", "registry.example.com/longshore:0.0.9-cu130"),
    ("image_is_built", "overlays/gpu", "RayCluster", f"{MAIN}/image", "registry.example.com/longshore:0.1.0-cpu"),
    ("image_is_built", "overlays/gpu", "RayCluster", "spec/rayVersion", "2.50.0"),
    ("image_is_built", "gpu+ft+host-path", "StatefulSet", "spec/template/spec/containers/0/image", "redis:latest"),
    ("selectors_find", "overlays/gpu", "RayCluster", "spec/headGroupSpec/template/metadata/labels", {}),
    ("selectors_find", "overlays/gpu", "NetworkPolicy", "spec/podSelector/matchLabels", {"app": "longshore"}),
    ("selectors_find", "overlays/gpu", "NetworkPolicy", "spec/egress/0/to/0/podSelector/matchLabels", {"app": "x"}),
    ("selectors_find", "overlays/gpu", "PodMonitor", "spec/selector/matchExpressions/0/values", ["leader"]),
    ("selectors_find", "gpu+ft+host-path", "Service", "spec/selector", {"app": "redis"}),
    ("selectors_find", "overlays/gpu", "PodDisruptionBudget", "spec/selector/matchLabels", {"app": "longshore"}),
    ("needed_gets_out", "overlays/gpu", "NetworkPolicy", "spec/egress/1/to/1", GONE),
    ("needed_gets_out", "overlays/gpu", "NetworkPolicy", "spec/egress/2/ports/0", GONE),
    ("needed_gets_out", "overlays/gpu", "NetworkPolicy", "spec/egress/3/to/0/ipBlock/cidr", "169.254.169.253/32"),
    ("needed_gets_out", "overlays/gpu", "NetworkPolicy", "spec/egress/0/ports", [{"port": 6379}]),
    ("needed_gets_out", "overlays/gpu", "NetworkPolicy", "spec/ingress/0", GONE),
    ("references_exist", "overlays/gpu", "RayCluster", f"{HEAD}/serviceAccountName", "default"),
    ("references_exist", "overlays/gpu", "RayCluster", f"{MAIN}/envFrom/1/secretRef/name", "keys"),
    ("references_exist", "overlays/gpu", "RayCluster", f"{MAIN}/envFrom/0/configMapRef/name", "settings"),
    ("references_exist", "overlays/gpu", "RayCluster", f"{HEAD}/containers/0/env/0/valueFrom/secretKeyRef/name", "t"),
    ("kuberay_takes_it", "jobs/load", "RayJob", "spec/submissionMode", "K8sJob"),  # which the definition lets pass
    ("kuberay_takes_it", "jobs/load", "RayJob", "spec/backoffLimit", 1),
    ("kuberay_takes_it", "jobs/load", "RayJob", "spec/clusterSelector", {}),
    ("kuberay_takes_it", "overlays/gpu", "RayCluster", "metadata/name", "l" * 48),
    ("kuberay_takes_it", "overlays/gpu", "RayCluster", "spec/workerGroupSpecs/0/minReplicas", 5),
    ("kuberay_takes_it", "overlays/gpu", "RayCluster", f"{HEAD}/restartPolicy", "Always"),
    ("commands_exist", "jobs/load", "RayJob", "spec/entrypoint", "longshore load s3://models/m --tensors 8"),
    ("commands_exist", "overlays/gpu", "RayCluster", "spec/headGroupSpec/rayStartParams/num-cpu", "0"),
    ("service_is_ours", "overlays/gpu-service", "RayService", "spec/serveConfigV2",
     SERVE.format("serving.deployment:app", "{}")),
    ("service_is_ours", "overlays/gpu-service", "RayService", "spec/serveConfigV2",
     SERVE.format("serving.deployment:build", "{hosts: 0.0.0.0}")),
    ("service_is_ours", "overlays/gpu-service", "RayService",
     f"{IN_SERVICE}/env", []),
    ("head_may_come_back", "gpu+ft+host-path", "ConfigMap", "data/LONGSHORE_ORPHAN_AFTER_S", "120"),
    ("head_may_come_back", "gpu+ft+host-path", "RayCluster", f"{HEAD}/containers/0/env/2", {"name": "RAY_X"}),
    ("head_may_come_back", "gpu+ft+host-path", "RayCluster", "spec/gcsFaultToleranceOptions/redisAddress",
     "longshore-redis:6380"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "name", "kind", "path", "value"), CHANGES)
def test_each_check_can_fail(rule: str, name: str, kind: str, path: str, value: Any, rendering: Rendering) -> None:
    if rule == "by_schema" and crds_missing():
        pytest.skip(str(crds_missing()))
    check: Callable[[list[Manifest]], Iterator[str]] = RULES.get(rule, by_schema)
    manifests = rendering(name)
    assert list(check(manifests)) == []
    ours = {"ConfigMap": "longshore-settings", "NetworkPolicy": "longshore"}
    _change(only(manifests, kind, ours.get(kind)), path, value)
    assert list(check(manifests))


def _change(node: Any, path: str, value: Any) -> None:
    *parents, last = [part.replace("~1", "/") for part in path.split("/")]
    for part in parents:
        node = node[int(part) if isinstance(node, list) else part]
    at: Any = int(last) if isinstance(node, list) else last
    if value is GONE:
        del node[at]
    else:
        node[at] = value
