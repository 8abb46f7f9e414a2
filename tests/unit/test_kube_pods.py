"""Pods of k8s/ have consistent sizes and no more rights than they need.

Each rule has a case that fails. A rule is a function from the objects of one rendering to sentences about errors.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import pytest

from cluster.units import parse_bytes
from tests.support.kube_manifests import (
    COMPOSED,
    GONE,
    RENDERED,
    USER,
    Manifest,
    Pod,
    changed,
    kustomize_missing,
    nodes,
    pods,
    quantity,
    ray_spec,
    render,
    settings,
)

pytestmark = pytest.mark.skipif(kustomize_missing() is not None, reason=str(kustomize_missing()))

Rule = Callable[[list[Manifest]], Iterator[str]]
GIB = 1 << 30
RESOURCES = {
    "cpu",
    "memory",
    "ephemeral-storage",
    "nvidia.com/gpu",
}  # the last: NVIDIA's device plugin; Ray calls it GPU
NODE_PROCESSES_BYTES = (
    3 * GIB // 2
)  # raylet, its agents, our agent (and on the head: the control store, our coordinator)
GPU_RANK_BYTES = 3 * GIB  # PyTorch, a CUDA context and its pinned staging, on the host


def _containers(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return (where, container, pod's specification), with the autoscaler that KubeRay puts beside the head."""
    for pod in pods(manifests):
        for container in pod.spec["containers"] + pod.spec.get("initContainers", []):
            yield f"{pod.where} {container['name']}", container, pod.spec
    for manifest in manifests:
        if "spec" in manifest and (cluster := ray_spec(manifest)):
            yield (
                f"{manifest['kind']} autoscaler",
                cluster["autoscalerOptions"],
                cluster["headGroupSpec"]["template"]["spec"],
            )


def requests_within_limits(manifests: list[Manifest]) -> Iterator[str]:
    """Every container states its requests and limits, in resources that exist."""
    for where, container, _ in _containers(manifests):
        requests, limits = container["resources"].get("requests", {}), container["resources"].get("limits", {})
        for name in {"cpu", "memory"} - requests.keys() & limits.keys():
            yield f"{where}: no request or no limit of {name}"
        for name in (requests.keys() | limits.keys()) - RESOURCES:
            yield f"{where}: no such resource: {name}"
        for name in requests.keys() & limits.keys():
            if quantity(requests[name]) > quantity(limits[name]):
                yield f"{where}: asks for more {name} than it may take"
        if requests.get("nvidia.com/gpu") != limits.get("nvidia.com/gpu"):
            yield f"{where}: GPUs are not shared out: request and limit must be the same"
    for pod in nodes(manifests):
        given = pod.main["resources"]
        if given["requests"].get("memory") != given["limits"].get("memory"):
            yield f"{pod.where}: Ray counts on the limit of memory, the machine only has the request"


def _volume(pod: Pod, path: str) -> dict[str, Any]:
    names = {mount["mountPath"]: mount["name"] for mount in pod.main["volumeMounts"]}
    return next((volume for volume in pod.spec["volumes"] if volume["name"] == names.get(path)), {})


def shared_memory_fits(manifests: list[Manifest]) -> Iterator[str]:
    """/dev/shm holds the object store and the arena; with the processes' memory it is within the pod's limit."""
    arena = parse_bytes(settings(manifests).get("LONGSHORE_ARENA_BYTES", "0"))
    gpus_anywhere = any("nvidia.com/gpu" in pod.main["resources"]["limits"] for pod in nodes(manifests))
    for pod in nodes(manifests):
        shm = _volume(pod, "/dev/shm").get("emptyDir", {})
        if shm.get("medium") != "Memory" or "sizeLimit" not in shm:
            yield f"{pod.where}: /dev/shm is no memory volume of a known size"
            continue
        gpus = int(pod.main["resources"]["limits"].get("nvidia.com/gpu", 0))
        hosts_ranks = bool(gpus) or not gpus_anywhere
        store = int((pod.ray_start or {}).get("object-store-memory", 0))
        need = store + (arena if hosts_ranks else 0)
        if not store:
            yield f"{pod.where}: Ray would take 30 % of the memory for its object store"
        if need > quantity(shm["sizeLimit"]):
            yield f"{pod.where}: arena and object store need {need} bytes of /dev/shm, it has {shm['sizeLimit']}"
        heap = NODE_PROCESSES_BYTES + gpus * GPU_RANK_BYTES
        if quantity(shm["sizeLimit"]) + heap > quantity(pod.main["resources"]["limits"]["memory"]):
            yield f"{pod.where}: /dev/shm and {heap} bytes for processes are more than the pod's memory"


def disks_fit(manifests: list[Manifest]) -> Iterator[str]:
    """Folders on disk are within the pod's limit, and the disk tier is within its volume, in its own folder."""
    given = settings(manifests)
    folder, budget = given.get("LONGSHORE_DISK_CACHE_DIR"), given.get("LONGSHORE_DISK_CACHE_BYTES")
    for pod in nodes(manifests):
        folders = [volume["emptyDir"] for volume in pod.spec["volumes"] if "emptyDir" in volume]
        on_disk = [folder for folder in folders if folder.get("medium") != "Memory"]
        if any("sizeLimit" not in folder for folder in on_disk):
            yield f"{pod.where}: a folder may fill the machine's disk"
        on_disk_bytes = sum(quantity(folder.get("sizeLimit", "0")) for folder in on_disk)
        if on_disk_bytes > quantity(pod.main["resources"]["limits"]["ephemeral-storage"]):
            yield f"{pod.where}: folders of {on_disk_bytes} bytes are more than its ephemeral-storage"
        if folder is None:
            continue
        parents = [str(parent) for parent in PurePosixPath(folder).parents if str(parent) != "/"]
        mounted = [
            mount for mount in pod.main["volumeMounts"] if mount["mountPath"] in parents and not mount.get("readOnly")
        ]
        if not mounted:
            yield f"{pod.where}: {folder} is not below a writable mount (a mount itself is not ours to close)"
            continue
        size = _size(_volume(pod, mounted[0]["mountPath"]))
        hosts_ranks = "nvidia.com/gpu" in pod.main["resources"]["limits"] or "head" not in pod.where
        if hosts_ranks and budget and size is not None and parse_bytes(budget) > size:
            yield f"{pod.where}: the disk tier may grow to {budget}, its volume has {size} bytes"


def _size(volume: dict[str, Any]) -> Decimal | None:
    if "emptyDir" in volume:
        return quantity(volume["emptyDir"].get("sizeLimit", "0"))
    if "ephemeral" in volume:
        return quantity(volume["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"])
    return None


def little_privilege(manifests: list[Manifest]) -> Iterator[str]:
    """No container runs as root, writes outside volumes or has capabilities.

    The API token is mounted only where needed.
    """
    for pod in pods(manifests):
        context = pod.spec.get("securityContext", {})
        if not context.get("runAsNonRoot") or not context.get("runAsUser"):
            yield f"{pod.where}: may run as root"
        if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{pod.where}: system calls are not filtered"
        if pod.ray_start is not None and context.get("runAsUser") != USER:
            yield f"{pod.where}: the image's user is {USER}"
        if pod.spec.get("automountServiceAccountToken") is not (pod.where.endswith(" head")):
            yield f"{pod.where}: only the head's autoscaler asks the API server"
        for name in {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys():
            yield f"{pod.where}: {name}"
    for where, container, spec in _containers(manifests):
        context = container.get("securityContext", {})
        if context.get("privileged") or context.get("allowPrivilegeEscalation") is not False:
            yield f"{where}: may gain privileges"
        if context.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{where}: keeps capabilities"
        if context.get("readOnlyRootFilesystem") is not True:
            yield f"{where}: writes to its root file system"
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
        if ("ray" in where or "autoscaler" in where) and "/tmp" not in mounts:
            yield f"{where}: Ray writes to /tmp"
        claimed = {volume["name"] for volume in spec.get("volumes", [])}
        for name in set(mounts.values()) - claimed - {"data"}:
            yield f"{where}: mounts {name}, which is no volume of the pod"


def ends_in_peace(manifests: list[Manifest]) -> Iterator[str]:
    """Ray's nodes are probed, and get the time to end that their own command takes."""
    from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT as AGENT_PORT

    for pod in nodes(manifests):
        named = ["startupProbe", "livenessProbe"]
        if pod.where.endswith(" head"):
            named.append("readinessProbe")
        elif "readinessProbe" in pod.main:
            yield f"{pod.where}: KubeRay's own would ask Serve's proxy as well, this one sends traffic where none is"
        for name in named:
            if pod.main.get(name, {}).get("httpGet") != {"path": "/api/healthz", "port": AGENT_PORT}:
                yield f"{pod.where}: {name} does not ask Ray's agent"
        words = shlex.split(pod.main.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [""])[-1])
        if words[:2] != ["ray", "stop"] or "--grace-period" not in words:
            yield f"{pod.where}: Ray is not asked to end"
        elif int(words[-1]) >= pod.spec["terminationGracePeriodSeconds"]:
            yield f"{pod.where}: Ray may take {words[-1]} s to end, the pod has less"


RULES = (requests_within_limits, shared_memory_fits, disks_fit, little_privilege, ends_in_peace)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*RENDERED, *COMPOSED])
def test_pods_fit_and_have_minimal_privileges(name: str, rule: Rule) -> None:
    assert list(rule(render(name))) == []


HEAD = "spec/headGroupSpec/template/spec"
WORKER = "spec/workerGroupSpecs/0/template/spec"
MAIN = f"{WORKER}/containers/0"
IN_SERVICE = f"spec/rayClusterConfig/{MAIN.removeprefix('spec/')}"
CHANGES: list[tuple[Rule, str, str, str, Any]] = [  # (rule, rendering, kind, path, value)
    (requests_within_limits, "overlays/gpu", "RayCluster", f"{MAIN}/resources/requests/cpu", "65"),
    (requests_within_limits, "overlays/gpu", "RayCluster", f"{MAIN}/resources/requests/memory", "100Gi"),
    (requests_within_limits, "overlays/gpu", "RayCluster", f"{MAIN}/resources/limits/memory", GONE),
    (requests_within_limits, "overlays/gpu", "RayCluster", f"{MAIN}/resources/requests/nvidia.com~1gpu", "4"),
    (requests_within_limits, "overlays/gpu", "RayCluster", f"{MAIN}/resources/limits/nvidia.com~1gpus", "8"),
    (shared_memory_fits, "overlays/gpu", "ConfigMap", "data/LONGSHORE_ARENA_BYTES", "100GiB"),
    (shared_memory_fits, "overlays/cpu-dev", "ConfigMap", "data/LONGSHORE_ARENA_BYTES", "1400MiB"),  # on the head
    (shared_memory_fits, "overlays/gpu", "RayCluster", f"{MAIN}/resources/limits/memory", "100Gi"),
    (shared_memory_fits, "overlays/gpu", "RayCluster", f"{WORKER}/volumes/0/emptyDir", {"sizeLimit": "80Gi"}),
    (shared_memory_fits, "overlays/gpu", "RayCluster", "spec/headGroupSpec/rayStartParams/object-store-memory", GONE),
    (disks_fit, "overlays/gpu", "ConfigMap", "data/LONGSHORE_DISK_CACHE_DIR", "/cache"),
    (disks_fit, "overlays/gpu", "ConfigMap", "data/LONGSHORE_DISK_CACHE_DIR", "/var/chunks"),
    (disks_fit, "overlays/gpu", "ConfigMap", "data/LONGSHORE_DISK_CACHE_BYTES", "2TiB"),
    (disks_fit, "overlays/cpu-dev", "RayCluster", f"{WORKER}/volumes/1/emptyDir/sizeLimit", "40Gi"),
    (disks_fit, "overlays/cpu-dev", "RayCluster", f"{WORKER}/volumes/1/emptyDir/sizeLimit", GONE),
    (little_privilege, "overlays/gpu", "RayCluster", f"{HEAD}/securityContext/runAsNonRoot", False),
    (little_privilege, "overlays/gpu", "RayCluster", f"{HEAD}/securityContext/runAsUser", 0),
    (little_privilege, "overlays/gpu", "RayCluster", f"{HEAD}/securityContext/seccompProfile", GONE),
    (little_privilege, "overlays/gpu", "RayCluster", f"{WORKER}/automountServiceAccountToken", GONE),
    (little_privilege, "overlays/gpu", "RayCluster", f"{WORKER}/hostIPC", True),
    (little_privilege, "overlays/gpu", "RayCluster", f"{MAIN}/securityContext/readOnlyRootFilesystem", False),
    (little_privilege, "overlays/gpu", "RayCluster", f"{MAIN}/securityContext/capabilities", {"add": ["IPC_LOCK"]}),
    (little_privilege, "overlays/gpu", "RayCluster", f"{MAIN}/volumeMounts/1/mountPath", "/scratch"),
    (little_privilege, "overlays/gpu", "RayCluster", f"{MAIN}/volumeMounts/3/name", "cash"),
    (little_privilege, "overlays/gpu", "RayCluster", "spec/autoscalerOptions/securityContext", {}),
    (little_privilege, "jobs/load", "RayJob", "spec/submitterPodTemplate/spec/securityContext", {}),
    (ends_in_peace, "overlays/gpu", "RayCluster", f"{HEAD}/terminationGracePeriodSeconds", 30),
    (ends_in_peace, "overlays/gpu", "RayCluster", f"{MAIN}/lifecycle", GONE),
    (ends_in_peace, "overlays/gpu", "RayCluster", f"{MAIN}/livenessProbe/httpGet/port", 8265),
    (ends_in_peace, "overlays/gpu", "RayCluster", f"{HEAD}/containers/0/readinessProbe", GONE),
    (ends_in_peace, "overlays/gpu-service", "RayService", f"{IN_SERVICE}/readinessProbe", {}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "name", "kind", "path", "value"), CHANGES)
def test_each_rule_can_fail(rule: Rule, name: str, kind: str, path: str, value: Any) -> None:
    assert list(rule(render(name))) == []
    assert list(rule(changed(name, kind, path, value)))
