"""The manifests of k8s/ render, and agree with each other and with the code.

Each rule has a case that fails. A rule is a function from the objects of one rendering to sentences about errors. It
covers names, ports, settings, image and commands, which no schema checks.
"""

from __future__ import annotations

import ast
import runpy
import shlex
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from cluster.config import ENV_PREFIX, Config
from cluster.errors import ConfigError
from cluster.joining.patience import RAY_LIMIT_VARIABLE
from engines.ray_serve import ConfigFolder
from serving.settings import ENV_PREFIX as SERVICE_PREFIX
from serving.settings import TOKEN_VARIABLE as HTTP_TOKEN
from serving.settings import ServingSettings
from tests.support.kube_manifests import (
    CLUSTER_LABEL,
    COMPOSED,
    FT,
    GONE,
    HOST_PATH,
    HTTP,
    K8S,
    RENDERED,
    ROOT,
    VARIANTS,
    Manifest,
    changed,
    kustomize_missing,
    nodes,
    only,
    pods,
    ray_spec,
    render,
    settings,
)

pytestmark = pytest.mark.skipif(kustomize_missing() is not None, reason=str(kustomize_missing()))

Rule = Callable[[list[Manifest]], Iterator[str]]
RAY_PORTS = {"gcs-server": "DEFAULT_PORT", "dashboard": "DEFAULT_DASHBOARD_PORT"}  # names as KubeRay has them
PEER_PORT = 9465  # the manifests' choice where the settings name none
KUBERAY_PORTS = {"metrics": 8080, "serve": 8000}  # KubeRay's own defaults; the second also serveConfigV2's
SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")  # KubeRay's definition takes any word
SELECTING = ("NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "Service", "StatefulSet")
NEEDED = {  # what pods must reach: (a namespace, a network, or "" for everything; port)
    ("kube-system", 53), ("169.254.20.10/32", 53),  # names, also from NodeLocal DNSCache, which is in no namespace
    ("", 443), ("", 6443),  # stores, the cloud's tokens, the API server
    ("169.254.169.254/32", 80), ("169.254.170.23/32", 80), ("169.254.169.252/32", 988),  # roles: EC2, EKS, GKE
}  # fmt: skip
PART_OF_US = {"app.kubernetes.io/part-of": "longshore"}
STRANGERS: list[tuple[str, dict[str, str], set[str]]] = [  # pods that are no nodes: namespace, labels, reached ports
    ("longshore", {**PART_OF_US, "app.kubernetes.io/component": "submitter"}, {"dashboard", "serve"}),
    ("longshore", {"longshore-client": "true"}, {"dashboard", "serve"}),
    ("longshore", {CLUSTER_LABEL: "another"}, set()),
    ("kuberay-system", {}, {"dashboard", "serve", "agent"}),
    ("monitoring", {}, {"longshore", "metrics"}),
    ("elsewhere", {**PART_OF_US, CLUSTER_LABEL: "longshore", "longshore-client": "true"}, set()),
]
GUIDE = (ROOT / "docs" / "deploy.md").read_text()


def settings_are_known(manifests: list[Manifest]) -> Iterator[str]:
    """Every variable is one that the code reads, with a value that it takes."""
    given = settings(manifests)
    of_the_service = {f"{SERVICE_PREFIX}{name.upper()}" for name in ServingSettings.model_fields} - {HTTP_TOKEN}
    unknown = Config.unknown_variables(given)
    unknown += [name for name in given if name.startswith(SERVICE_PREFIX) and name not in of_the_service]
    yield from (f"ConfigMap: no such setting: {name}" for name in unknown)
    yield from (f"ConfigMap: not a setting of ours: {name}" for name in given if not name.startswith(ENV_PREFIX))
    try:
        Config.from_env({name: value for name, value in given.items() if name not in unknown})
        ServingSettings.from_env({**given, HTTP_TOKEN: "a" * 64})
    except ConfigError as error:
        yield f"ConfigMap: {error}"
    for pod in nodes(manifests):
        sources = [source.get("configMapRef", {}).get("name") for source in pod.main.get("envFrom", [])]
        if "longshore-settings" not in sources:
            yield f"{pod.where}: does not get the settings"
        for variable in pod.main.get("env", []):
            if variable["name"].startswith(ENV_PREFIX) and variable["name"] != HTTP_TOKEN:
                yield f"{pod.where}: {variable['name']} belongs in the ConfigMap"


def workers_are_not_last(manifests: list[Manifest]) -> Iterator[str]:
    """Ray's workers run with the machine's normal priority, because the raylet passes its environment to them."""
    for pod in nodes(manifests):
        given = {variable["name"]: variable.get("value") for variable in pod.main.get("env", [])}
        if given.get("RAY_worker_niceness") != "0":
            yield f"{pod.where}: workers run with niceness {given.get('RAY_worker_niceness', 15)}"


def ports_are_ours(manifests: list[Manifest]) -> Iterator[str]:
    """Ports have the numbers that Ray, KubeRay and the settings give them; policies and scrapes name no other."""
    expected = _ports(manifests)
    for pod in nodes(manifests):
        for port in pod.main["ports"]:
            if expected.get(port["name"]) != port["containerPort"]:
                yield f"{pod.where}: port {port['name']} is {expected.get(port['name'])}, not {port['containerPort']}"
        if "longshore-peers" not in [port["name"] for port in pod.main["ports"]]:
            yield f"{pod.where}: does not name the port where it serves chunks"
    for policy in (manifest for manifest in manifests if manifest["metadata"]["name"] == "longshore"):
        if policy["kind"] == "NetworkPolicy":
            opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
            for port in opened - {*expected.values()}:
                yield f"NetworkPolicy: nothing of ours listens on {port}"
            for port in {expected["dashboard"], expected["serve"], expected["longshore"]} - opened:
                yield f"NetworkPolicy: nobody reaches {port}"
        if policy["kind"] == "PodMonitor":
            named = {port["name"] for pod in nodes(manifests) for port in pod.main["ports"]}
            for endpoint in policy["spec"]["podMetricsEndpoints"]:
                if endpoint["port"] not in named:
                    yield f"PodMonitor: no pod has a port {endpoint['port']}"
        if policy["kind"] == "RayService":
            serve = yaml.safe_load(policy["spec"]["serveConfigV2"])
            if serve["http_options"] != {"host": "0.0.0.0", "port": expected["serve"]}:
                yield "RayService: the service does not listen where the pods' port is"


def _ports(manifests: list[Manifest]) -> dict[str, int]:
    """Return the number of each port by its name in the manifests. `agent` is Ray's, which they do not name."""
    from ray._private import ray_constants

    given = settings(manifests)
    found = {name: getattr(ray_constants, constant) for name, constant in RAY_PORTS.items()} | KUBERAY_PORTS
    found["agent"] = ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
    found["longshore"] = int(given.get("LONGSHORE_METRICS_PORT", 0))
    found["longshore-peers"] = int(given.get("LONGSHORE_PEER_PORT", PEER_PORT))
    return found


def image_is_built(manifests: list[Manifest]) -> Iterator[str]:
    """Every image has one version: ours that of the code, with the Ray of the constraints; others are pinned."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for pod in pods(manifests):
        for container in pod.spec["containers"]:
            name, _, tag = container["image"].rpartition(":")
            if name.endswith("/longshore") or pod.ray_start is not None:
                if tag not in [f"{version}-{variant}" for variant in VARIANTS]:
                    yield f"{pod.where}: {container['image']} is not an image of version {version}"
                elif ("nvidia.com/gpu" in container["resources"]["limits"]) and tag.endswith("-cpu"):
                    yield f"{pod.where}: GPUs, and a PyTorch without CUDA"
            elif not name or tag == "latest":
                yield f"{pod.where}: {container['image']} is not one version"
    for manifest in manifests:
        cluster = ray_spec(manifest) if "spec" in manifest else None
        if cluster and cluster["rayVersion"] != pins["ray"]:
            yield f"{manifest['kind']}: KubeRay is told of Ray {cluster['rayVersion']}, the image has {pins['ray']}"


def selectors_find(manifests: list[Manifest]) -> Iterator[str]:
    """Every selector of pods matches some."""
    labels = [pod.labels for pod in pods(manifests)]
    for manifest in manifests:
        spec, kind = manifest.get("spec", {}), manifest["kind"]
        selector = spec.get("podSelector") or spec.get("selector")
        if not selector or kind not in SELECTING:
            continue
        if not any(_matches(selector if kind != "Service" else {"matchLabels": selector}, found) for found in labels):
            yield f"{kind} {manifest['metadata']['name']}: selects no pod"
        for pod in nodes(manifests):
            scraped = {endpoint["port"] for endpoint in spec.get("podMetricsEndpoints", [])}
            meant = kind == "NetworkPolicy" and manifest["metadata"]["name"] == "longshore"
            meant |= any(port["name"] in scraped for port in pod.main["ports"])
            meant |= kind == "PodDisruptionBudget" and pod.where.endswith(" head")
            if meant and not _matches(selector, pod.labels):
                yield f"{kind} {manifest['metadata']['name']}: does not select {pod.where}"
        peers = [peer for rule in spec.get("ingress", []) for peer in rule.get("from", [])]
        peers += [peer for rule in spec.get("egress", []) for peer in rule.get("to", [])]
        for peer in peers:
            wanted = peer.get("podSelector", {})
            foreign = "namespaceSelector" in peer or "longshore-client" in wanted.get("matchLabels", {})
            if wanted and not foreign and not any(_matches(wanted, found) for found in labels):
                yield f"NetworkPolicy {manifest['metadata']['name']}: {wanted} is no pod"


def needed_gets_out(manifests: list[Manifest]) -> Iterator[str]:
    """Pods can reach each other, DNS, the stores, and the services that issue credentials."""
    for policy in (manifest for manifest in manifests if manifest["metadata"]["name"] == "longshore"):
        if policy["kind"] != "NetworkPolicy":
            continue
        let_out: set[tuple[str, int]] = set()
        for rule in policy["spec"]["egress"]:
            for peer in rule.get("to", [{}]):
                labels = peer.get("namespaceSelector", {}).get("matchLabels", {})
                where = labels.get("kubernetes.io/metadata.name") or peer.get("ipBlock", {}).get("cidr", "")
                if "podSelector" not in peer:
                    let_out |= {(where, port["port"]) for port in rule["ports"]}
        yield from (f"NetworkPolicy: {where or 'nothing'} is reached at {port}" for where, port in NEEDED - let_out)
        to_nodes = {"podSelector": policy["spec"]["podSelector"]}
        among = [rule for rule in policy["spec"]["egress"] if to_nodes in rule.get("to", [])]
        if not any("ports" not in rule for rule in among):  # workers and agents of Ray take any port
            yield "NetworkPolicy: pods of the cluster do not get out to each other"


def nobody_else_gets_in(manifests: list[Manifest]) -> Iterator[str]:
    """Nodes reach each other at every port. Other pods reach what is meant for them, and never the port for chunks."""
    policies = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy" and "Ingress" in m["spec"]["policyTypes"]]
    ports = _ports(manifests) | {"any of Ray's": 10002}
    for pod in nodes(manifests):
        rules = [r for spec in policies if _matches(spec["podSelector"], pod.labels) for r in spec["ingress"]]
        sources = [("longshore", other.labels, set(ports)) for other in nodes(manifests)]
        for namespace, labels, reached in (*sources, *STRANGERS):
            for name, port in ports.items():
                let_in = any(_lets_in(rule, namespace, labels, port) for rule in rules)
                if let_in != (name in reached):
                    found = "reaches" if let_in else "does not reach"
                    yield f"{pod.where}: a pod in {namespace} with {labels} {found} port {port} ({name})"


def _lets_in(rule: dict[str, Any], namespace: str, labels: dict[str, str], port: int) -> bool:
    """Return whether an ingress rule of the namespace `longshore` lets a pod of this namespace reach a port."""
    if "ports" in rule and port not in [each["port"] for each in rule["ports"]]:
        return False
    ours = {"matchLabels": {"kubernetes.io/metadata.name": "longshore"}}
    return any(
        _matches(peer.get("namespaceSelector", ours), {"kubernetes.io/metadata.name": namespace})
        and _matches(peer.get("podSelector", {}), labels)
        for peer in rule["from"]
    )


def _matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        part["key"] in labels and (part["operator"] == "Exists" or labels[part["key"]] in part["values"])
        for part in selector.get("matchExpressions", [])
    )  # we use the operators In and Exists only


def references_exist(manifests: list[Manifest]) -> Iterator[str]:
    """Every ConfigMap, Secret, account and storage class is among the objects, or in docs/deploy.md."""
    there = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    for kind, name in _references(manifests):
        if (kind, name) not in there and f"`{name}`" not in GUIDE:
            yield f"{kind} {name}: neither here nor in docs/deploy.md"


def _references(node: Any) -> Iterator[tuple[str, str]]:
    named = {
        "configMapRef": "ConfigMap",
        "configMapKeyRef": "ConfigMap",
        "secretRef": "Secret",
        "secretKeyRef": "Secret",
    }
    if isinstance(node, list):
        for item in node:
            yield from _references(item)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name in named and isinstance(value, dict):
                yield named[name], value["name"]
            elif name in ("serviceAccountName", "storageClassName"):
                yield name[0].upper() + name[1:].removesuffix("Name"), value
            else:
                yield from _references(value)


def kuberay_takes_it(manifests: list[Manifest]) -> Iterator[str]:
    """Conditions that KubeRay checks only at run time hold."""
    for manifest in manifests:
        spec, name = manifest.get("spec", {}), manifest["metadata"]["name"]
        if manifest["kind"].startswith("Ray") and len(name) > 47:
            yield f"{manifest['kind']} {name}: longer than the names that KubeRay makes of it may be"
        if manifest["kind"] == "RayJob":
            if spec["submissionMode"] not in SUBMISSION_MODES:
                yield f"RayJob: no such submission mode: {spec['submissionMode']}"
            if not spec["clusterSelector"].get("ray.io/cluster"):
                yield "RayJob: on which cluster?"
            if spec.get("backoffLimit") or spec.get("shutdownAfterJobFinishes"):
                yield "RayJob: a job on a cluster that is there neither tries again nor ends the cluster"
    for pod in nodes(manifests):
        if "restartPolicy" in pod.spec:
            yield f"{pod.where}: the autoscaler (v2) sets the restart policy"
        least, now, most = pod.replicas or (0, 0, 0)
        if not 0 <= least <= now <= most:
            yield f"{pod.where}: {now} replicas are not between {least} and {most}"


def commands_exist(manifests: list[Manifest]) -> Iterator[str]:
    """A job's command line parses; parameters of `ray start` and `ray stop` exist."""
    from ray.scripts import scripts

    from cluster.command_line.cli import build_parser

    for manifest in manifests:
        if manifest["kind"] == "RayJob":
            words = shlex.split(manifest["spec"]["entrypoint"])
            try:
                build_parser().parse_args(words[1:])
            except (SystemExit, ConfigError):
                yield f"RayJob: {manifest['spec']['entrypoint']!r} is refused"
    known = {option for parameter in scripts.start.params for option in parameter.opts}
    known |= {option for parameter in scripts.stop.params for option in parameter.opts}
    for pod in nodes(manifests):
        stop = shlex.split(pod.main["lifecycle"]["preStop"]["exec"]["command"][-1])
        used = [f"--{name}" for name in pod.ray_start or {}] + [word for word in stop if word.startswith("-")]
        yield from (f"{pod.where}: Ray has no option {option}" for option in used if option not in known)


def engine_is_ours(manifest: Manifest) -> Iterator[str]:
    """Ray Serve LLM has our callback, and an engine's ranks are on one machine, where they read each chunk once."""
    spec = manifest["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    for config in application["args"]["llm_configs"]:
        if config["callback_config"]["callback_class"] != f"{ConfigFolder.__module__}.{ConfigFolder.__qualname__}":
            yield "RayService: Ray would download the weights"
        if config["engine_kwargs"]["tensor_parallel_size"] != int(container["resources"]["limits"]["nvidia.com/gpu"]):
            yield "RayService: an engine does not fill one machine"


def service_is_ours(manifests: list[Manifest]) -> Iterator[str]:
    """A RayService runs our application with arguments that it accepts, and has a token."""
    for manifest in manifests:
        if manifest["kind"] != "RayService":
            continue
        (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
        module, _, name = application["import_path"].partition(":")
        if module == "ray.serve.llm":
            yield from engine_is_ours(manifest)
            continue
        source = ROOT.joinpath(*module.split(".")).with_suffix(".py")  # read, not imported: it brings all of Ray Serve
        if not source.exists() or name not in [
            getattr(node, "name", "") for node in ast.parse(source.read_text()).body
        ]:
            yield f"RayService: there is no {application['import_path']}"
        try:
            ServingSettings.from_env({HTTP_TOKEN: "a" * 64}, **application.get("args", {}))
        except ConfigError as error:
            yield f"RayService: {error}"
        for pod in nodes(manifests):
            if HTTP_TOKEN not in [variable["name"] for variable in pod.main.get("env", [])]:
                yield f"{pod.where}: the service may run there, and finds no token"


def head_may_come_back(manifests: list[Manifest]) -> Iterator[str]:
    """With GCS fault tolerance Ray stops waiting before our actors do, on every node."""
    for manifest in manifests:
        cluster = ray_spec(manifest) if "spec" in manifest else None
        if not cluster or "gcsFaultToleranceOptions" not in cluster:
            continue
        service, _, port = cluster["gcsFaultToleranceOptions"]["redisAddress"].partition(":")
        redis = only(manifests, "Service", service)
        if [str(p["port"]) for p in redis["spec"]["ports"]] != [port]:
            yield "Redis: another port than the cluster asks"
        config = Config.from_env(settings(manifests))
        (head,) = (pod for pod in nodes(manifests) if pod.where.endswith(" head"))
        given = {variable["name"]: variable.get("value") for variable in head.main["env"]}
        patience_s = float(given.get(RAY_LIMIT_VARIABLE) or 60)
        if patience_s < 600 or config.orphan_after_s <= patience_s or config.cluster_lost_after_s >= patience_s:
            yield f"head: Ray waits {patience_s} s for it, our actors {config.orphan_after_s} s"


RULES = (
    settings_are_known, workers_are_not_last, ports_are_ours, image_is_built, selectors_find, needed_gets_out,
    nobody_else_gets_in, references_exist, kuberay_takes_it, commands_exist, service_is_ours, head_may_come_back,
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*RENDERED, *COMPOSED])
def test_manifests_agree_with_each_other_and_the_code(name: str, rule: Rule) -> None:
    assert list(rule(render(name))) == []


def test_every_folder_is_rendered_by_a_test() -> None:
    found = {str(file.parent.relative_to(K8S)) for file in K8S.rglob("kustomization.yaml")}
    used = {"base", "monitoring", FT, HTTP, HOST_PATH, f"{HTTP}/from-cluster", f"{HTTP}/without-cluster"}
    assert found == {*RENDERED, *used}


def test_alerts_equal_those_that_promtool_checks() -> None:
    script = runpy.run_path(str(K8S / "monitoring" / "prometheus_rule.py"))
    assert (
        script["prometheus_rule"]((K8S / "monitoring" / "rules.yaml").read_text())
        == (K8S / "monitoring" / "prometheus-rule.yaml").read_text()
    ), "run k8s/monitoring/prometheus_rule.py"


def test_jobs_use_the_cluster_of_the_overlays() -> None:
    for job in ("jobs/load", "jobs/load-cpu-dev"):
        asked = only(render(job), "RayJob")["spec"]["clusterSelector"]["ray.io/cluster"]
        for overlay in ("overlays/cpu-dev", "overlays/gpu", "overlays/gpu-spot"):
            assert only(render(overlay), "RayCluster")["metadata"]["name"] == asked


@pytest.mark.parametrize("name", ["overlays/gpu-service", "overlays/gpu-llm"])
def test_the_service_runs_on_the_cluster_of_the_overlay(name: str) -> None:
    cluster = only(render("overlays/gpu"), "RayCluster")["spec"]
    assert only(render(name), "RayService")["spec"]["rayClusterConfig"] == cluster


def test_components_change_every_worker_group_of_any_overlay() -> None:
    for name in ("gpu+ft+host-path", "gpu-service+ft+host-path", "gpu-spot+service+host-path+ft"):
        (cluster,) = (spec for manifest in render(name) if (spec := ray_spec(manifest) if "spec" in manifest else None))
        assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == "longshore-redis:6379"
        for group in cluster["workerGroupSpecs"]:
            (cache,) = (volume for volume in group["template"]["spec"]["volumes"] if volume["name"] == "cache")
            assert "hostPath" in cache, f"{name} {group['groupName']}"


def test_a_head_without_fault_tolerance_is_not_drained() -> None:
    for name in ("overlays/cpu-dev", "overlays/gpu", "overlays/gpu-service"):
        budget = only(render(name), "PodDisruptionBudget")["spec"]
        assert budget["minAvailable"] == 1  # not a share, and not maxUnavailable: KubeRay's objects have no scale
    assert not [manifest for manifest in render("gpu+ft+host-path") if manifest["kind"] == "PodDisruptionBudget"]


def test_spot_workers_differ_only_in_being_spot() -> None:
    lasting, spot = only(render("overlays/gpu-spot"), "RayCluster")["spec"]["workerGroupSpecs"]
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
ENGINE = "{{llm_configs: [{{callback_config: {{callback_class: {}}}, engine_kwargs: {{tensor_parallel_size: {}}}}}]}}"
SERVE = "http_options: {{host: 0.0.0.0, port: 8000}}\napplications: [{{name: l, import_path: '{}', args: {}}}]"
CHANGES: list[tuple[Rule, str, str, str, Any]] = [  # (rule, rendering, kind, path, value)
    (settings_are_known, "overlays/gpu", "ConfigMap", "data/LONGSHORE_ARENA_BITES", "1GiB"),
    (settings_are_known, "overlays/gpu", "ConfigMap", "data/LONGSHORE_ARENA_BYTES", "much"),
    (settings_are_known, "overlays/gpu", "ConfigMap", "data/ARENA_BYTES", "1GiB"),
    (settings_are_known, "overlays/gpu", "ConfigMap", "data/LONGSHORE_HTTP_PORT", "http"),
    (settings_are_known, "overlays/gpu", "ConfigMap", "data/LONGSHORE_HTTP_TOKEN", "a secret"),
    (settings_are_known, "overlays/gpu", "RayCluster", f"{MAIN}/envFrom", []),
    (settings_are_known, "overlays/gpu", "RayCluster", f"{MAIN}/env/0/name", "LONGSHORE_HTTP_SECRET"),
    (workers_are_not_last, "overlays/gpu", "RayCluster", f"{MAIN}/env/1/value", "15"),
    (workers_are_not_last, "overlays/gpu", "RayCluster", f"{HEAD}/containers/0/env/1", GONE),
    (ports_are_ours, "overlays/gpu", "ConfigMap", "data/LONGSHORE_METRICS_PORT", "9465"),
    (ports_are_ours, "overlays/gpu", "ConfigMap", "data/LONGSHORE_PEER_PORT", "9466"),
    (ports_are_ours, "overlays/gpu", "RayCluster", f"{HEAD}/containers/0/ports/1/containerPort", 8266),
    (ports_are_ours, "overlays/gpu", "RayCluster", f"{MAIN}/ports/2", GONE),
    (ports_are_ours, "overlays/gpu", "NetworkPolicy", "spec/ingress/1/ports/0/port", 8264),
    (ports_are_ours, "overlays/gpu", "PodMonitor", "spec/podMetricsEndpoints/0/port", "coordinator"),
    (ports_are_ours, "overlays/gpu-service", "RayService", "spec/serveConfigV2", "http_options: {port: 8265}"),
    (image_is_built, "overlays/gpu", "RayCluster", f"{MAIN}/image", "registry.example.com/longshore:0.0.9-cu130"),
    (image_is_built, "overlays/gpu", "RayCluster", f"{MAIN}/image", "registry.example.com/longshore:0.1.0-cpu"),
    (image_is_built, "overlays/gpu", "RayCluster", "spec/rayVersion", "2.50.0"),
    (image_is_built, "gpu+ft+host-path", "StatefulSet", "spec/template/spec/containers/0/image", "redis:latest"),
    (selectors_find, "overlays/gpu", "RayCluster", "spec/headGroupSpec/template/metadata/labels", {}),
    (selectors_find, "overlays/gpu", "NetworkPolicy", "spec/podSelector/matchLabels", {"app": "longshore"}),
    (selectors_find, "overlays/gpu", "NetworkPolicy", "spec/egress/0/to/0/podSelector/matchLabels", {"app": "x"}),
    (selectors_find, "overlays/gpu", "PodMonitor", "spec/selector/matchExpressions/0/values", ["leader"]),
    (selectors_find, "gpu+ft+host-path", "Service", "spec/selector", {"app": "redis"}),
    (selectors_find, "overlays/gpu", "PodDisruptionBudget", "spec/selector/matchLabels", {"app": "longshore"}),
    (needed_gets_out, "overlays/gpu", "NetworkPolicy", "spec/egress/1/to/1", GONE),
    (needed_gets_out, "overlays/gpu", "NetworkPolicy", "spec/egress/2/ports/0", GONE),
    (needed_gets_out, "overlays/gpu", "NetworkPolicy", "spec/egress/3/to/0/ipBlock/cidr", "169.254.169.253/32"),
    (needed_gets_out, "overlays/gpu", "NetworkPolicy", "spec/egress/0/ports", [{"port": 6379}]),
    (nobody_else_gets_in, "overlays/gpu", "NetworkPolicy", "spec/ingress/0", GONE),
    (nobody_else_gets_in, "overlays/gpu", "NetworkPolicy", "spec/ingress/0/ports", [{"port": 6379}]),
    (nobody_else_gets_in, "overlays/gpu", "NetworkPolicy",
     "spec/ingress/0/from/0/podSelector", {"matchLabels": PART_OF_US}),
    (nobody_else_gets_in, "overlays/gpu-service", "NetworkPolicy",
     "spec/ingress/0/from/0/podSelector", {"matchLabels": {CLUSTER_LABEL: "longshore"}}),
    (nobody_else_gets_in, "overlays/gpu", "NetworkPolicy", "spec/ingress/1/ports/1", GONE),
    (nobody_else_gets_in, "overlays/gpu", "NetworkPolicy", "spec/ingress/2/ports/0/port", 9465),
    (nobody_else_gets_in, "overlays/gpu", "NetworkPolicy", "spec/ingress/3/from/0", GONE),
    (references_exist, "overlays/gpu", "RayCluster", f"{HEAD}/serviceAccountName", "default"),
    (references_exist, "overlays/gpu", "RayCluster", f"{MAIN}/envFrom/1/secretRef/name", "keys"),
    (references_exist, "overlays/gpu", "RayCluster", f"{MAIN}/envFrom/0/configMapRef/name", "settings"),
    (references_exist, "overlays/gpu", "RayCluster", f"{HEAD}/containers/0/env/0/valueFrom/secretKeyRef/name", "t"),
    (kuberay_takes_it, "jobs/load", "RayJob", "spec/submissionMode", "K8sJob"),  # which the definition lets pass
    (kuberay_takes_it, "jobs/load", "RayJob", "spec/backoffLimit", 1),
    (kuberay_takes_it, "jobs/load", "RayJob", "spec/clusterSelector", {}),
    (kuberay_takes_it, "overlays/gpu", "RayCluster", "metadata/name", "l" * 48),
    (kuberay_takes_it, "overlays/gpu", "RayCluster", "spec/workerGroupSpecs/0/minReplicas", 5),
    (kuberay_takes_it, "overlays/gpu", "RayCluster", f"{HEAD}/restartPolicy", "Always"),
    (commands_exist, "jobs/load", "RayJob", "spec/entrypoint", "longshore load s3://models/m --tensors 8"),
    (commands_exist, "overlays/gpu", "RayCluster", "spec/headGroupSpec/rayStartParams/num-cpu", "0"),
    (service_is_ours, "overlays/gpu-llm", "RayService", "spec/serveConfigV2",
     SERVE.format("ray.serve.llm:build_openai_app", ENGINE.format("engines.Folder", 8))),
    (service_is_ours, "overlays/gpu-llm", "RayService", "spec/serveConfigV2",
     SERVE.format("ray.serve.llm:build_openai_app", ENGINE.format("engines.ray_serve.ConfigFolder", 4))),
    (service_is_ours, "overlays/gpu-service", "RayService", "spec/serveConfigV2",
     SERVE.format("serving.app:app", "{}")),
    (service_is_ours, "overlays/gpu-service", "RayService", "spec/serveConfigV2",
     SERVE.format("serving.app:build", "{hosts: 0.0.0.0}")),
    (service_is_ours, "overlays/gpu-service", "RayService",
     f"{IN_SERVICE}/env", []),
    (head_may_come_back, "gpu+ft+host-path", "ConfigMap", "data/LONGSHORE_ORPHAN_AFTER_S", "120"),
    (head_may_come_back, "gpu+ft+host-path", "RayCluster", f"{HEAD}/containers/0/env/2", {"name": "RAY_X"}),
    (head_may_come_back, "gpu+ft+host-path", "RayCluster", "spec/gcsFaultToleranceOptions/redisAddress",
     "longshore-redis:6380"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "name", "kind", "path", "value"), CHANGES)
def test_each_rule_can_fail(rule: Rule, name: str, kind: str, path: str, value: Any) -> None:
    assert list(rule(render(name))) == []
    assert list(rule(changed(name, kind, path, value)))
