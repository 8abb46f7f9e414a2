"""The manifests of k8s/ as `kubectl kustomize` renders them, and the pods that are in them."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OLDEST_KUSTOMIZE = (4, 1)  # components and replacements
RENDERED = (
    "overlays/cpu-dev",
    "overlays/gpu",
    "overlays/gpu-spot",
    "overlays/gpu-service",
    "overlays/gpu-llm",
    "jobs/load",
    "jobs/load-cpu-dev",
)
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
USER = 1000  # of the image
VARIANTS = ("cpu", "cu130")  # of the image: the Dockerfile's TORCH
GONE = object()
CLUSTER_LABEL = "ray.io/cluster"  # KubeRay puts it on every node, with the name of the cluster
SUFFIXES = {"": 1, "m": Decimal("0.001"), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SUFFIXES |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}

Manifest = dict[str, Any]


def kustomize_missing() -> str | None:
    """Why nothing can be rendered here; None when it can."""
    if shutil.which("kubectl") is None:
        return "kubectl is not installed"
    said = subprocess.run(["kubectl", "version", "--client", "--output=json"], capture_output=True, text=True)
    version = json.loads(said.stdout or "{}").get("kustomizeVersion", "v0.0.0")
    numbers = tuple(int(part) for part in version.removeprefix("v").split(".")[:2])
    return None if numbers >= OLDEST_KUSTOMIZE else f"kubectl brings kustomize {version}, which knows no components"


@cache
def _rendered(name: str) -> list[Manifest]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = K8S / name
        if name in COMPOSED:  # an overlay with components on top of it, as its user would list them
            folder, (overlay, components) = Path(scratch), COMPOSED[name]
            up = os.path.relpath(K8S, folder.resolve())
            kustomization = {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": [f"{up}/{overlay}"],
                "components": [f"{up}/{component}" for component in components],
            }
            (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    if done.returncode or done.stderr.strip():
        raise RuntimeError(f"{name}: {done.stderr.strip()}")  # kustomize only warns of what it cannot apply
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [manifest for manifest in yaml.load_all(done.stdout, Loader=loader) if manifest]


def render(name: str) -> list[Manifest]:
    """Return new copies of the objects of a folder of k8s/, or of a name in COMPOSED. Raises RuntimeError."""
    return copy.deepcopy(_rendered(name))


def changed(name: str, kind: str, path: str, value: Any) -> list[Manifest]:
    """Return the objects with one value of one object replaced, or removed when `value` is GONE."""
    manifests = render(name)
    ours = {"ConfigMap": "longshore-settings", "NetworkPolicy": "longshore"}
    node: Any = only(manifests, kind, ours.get(kind))
    *parents, last = path.split("/")
    for part in parents:
        node = node[int(part) if isinstance(node, list) else part]
    at: Any = int(last) if isinstance(node, list) else last
    if value is GONE:
        del node[at]
    else:
        node[at] = value
    return manifests


@dataclass(frozen=True)
class Pod:
    """A pod template, and what stands beside it."""

    where: str  # RayCluster/longshore head
    labels: dict[str, str]
    spec: dict[str, Any]
    ray_start: dict[str, str] | None  # parameters of `ray start`; None where it is not a node of Ray's
    replicas: tuple[int, int, int] | None = None  # least, now, most

    @property
    def main(self) -> dict[str, Any]:
        """The container that KubeRay takes for Ray's."""
        return dict(self.spec["containers"][0])


def ray_spec(manifest: Manifest) -> dict[str, Any] | None:
    """The specification of a Ray cluster in an object, if there is one."""
    if manifest["kind"] == "RayCluster":
        return dict(manifest["spec"])
    found = manifest["spec"].get(
        {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}.get(manifest["kind"], "")
    )
    return dict(found) if found else None


def pods(manifests: list[Manifest]) -> Iterator[Pod]:
    """Every pod template of the objects."""
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if cluster := ray_spec(manifest) if "spec" in manifest else None:
            # A RayService makes up the name of its cluster.
            cluster_name = manifest["metadata"]["name"] + ("" if manifest["kind"] == "RayCluster" else "-x7k2p")
            head = cluster["headGroupSpec"]
            yield _pod(f"{name} head", head["template"], head["rayStartParams"], cluster_name=cluster_name)
            for group in cluster["workerGroupSpecs"]:
                bounds = (group["minReplicas"], group["replicas"], group["maxReplicas"])
                yield _pod(
                    f"{name} {group['groupName']}", group["template"], group["rayStartParams"], bounds, cluster_name
                )
        elif manifest["kind"] == "RayJob":
            yield _pod(f"{name} submitter", manifest["spec"]["submitterPodTemplate"])
        elif manifest["kind"] in ("StatefulSet", "Deployment", "Job"):
            yield _pod(name, manifest["spec"]["template"])


def _pod(
    where: str,
    template: dict[str, Any],
    ray_start: dict[str, str] | None = None,
    replicas: tuple[int, int, int] | None = None,
    cluster_name: str = "",
) -> Pod:
    labels = template["metadata"].get("labels", {}) | ({CLUSTER_LABEL: cluster_name} if cluster_name else {})
    return Pod(where, labels, template["spec"], ray_start, replicas)


def only(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The one object of a kind (and name)."""
    (found,) = (
        manifest for manifest in manifests if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
    )
    return found


def quantity(text: str) -> Decimal:
    """A quantity of Kubernetes as a number: 1536Mi, 250m, 8."""
    number, suffix = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text)).groups()  # type: ignore[union-attr]
    return Decimal(number) * SUFFIXES[suffix]


def settings(manifests: list[Manifest]) -> dict[str, str]:
    """Return the settings of the ConfigMap; empty without one."""
    if not any(manifest["kind"] == "ConfigMap" for manifest in manifests):
        return {}
    return dict(only(manifests, "ConfigMap", "longshore-settings")["data"])


def nodes(manifests: list[Manifest]) -> list[Pod]:
    """The pods that are nodes of Ray's."""
    return [pod for pod in pods(manifests) if pod.ray_start is not None]
