"""The manifests of k8s/ as `kubectl kustomize` renders them, and the pods that are in them."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
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
    "jobs/load",
    "jobs/load-cpu-dev",
)

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
def _rendered(folder: Path) -> list[Manifest]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    if done.returncode or done.stderr.strip():
        raise RuntimeError(f"{folder}: {done.stderr.strip()}")  # warnings of things that kustomize gives up are errors
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [manifest for manifest in yaml.load_all(done.stdout, Loader=loader) if manifest]


def render(folder: Path) -> list[Manifest]:
    """The objects of a folder with a kustomization, each time new ones. Raises RuntimeError."""
    return copy.deepcopy(_rendered(folder))


def render_with(overlay: str, components: list[str], scratch: Path) -> list[Manifest]:
    """An overlay with components on top of it, as its user would list them."""
    up = os.path.relpath(K8S, scratch.resolve())
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{up}/{overlay}"],
        "components": [f"{up}/{component}" for component in components],
    }
    (scratch / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return render(scratch)


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
            head = cluster["headGroupSpec"]
            yield _pod(f"{name} head", head["template"], head["rayStartParams"])
            for group in cluster["workerGroupSpecs"]:
                bounds = (group["minReplicas"], group["replicas"], group["maxReplicas"])
                yield _pod(f"{name} {group['groupName']}", group["template"], group["rayStartParams"], bounds)
        elif manifest["kind"] == "RayJob":
            yield _pod(f"{name} submitter", manifest["spec"]["submitterPodTemplate"])
        elif manifest["kind"] in ("StatefulSet", "Deployment", "Job"):
            yield _pod(name, manifest["spec"]["template"])


def _pod(
    where: str,
    template: dict[str, Any],
    ray_start: dict[str, str] | None = None,
    replicas: tuple[int, int, int] | None = None,
) -> Pod:
    return Pod(where, template["metadata"].get("labels", {}), template["spec"], ray_start, replicas)


def only(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The one object of a kind (and name)."""
    (found,) = (
        manifest for manifest in manifests if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
    )
    return found
