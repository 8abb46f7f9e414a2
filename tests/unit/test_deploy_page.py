"""docs/troubleshooting.md quotes messages of the code; docs/deploy.md names folders that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from cluster.errors import NotEnoughResources
from cluster.layouts.mesh import Layout
from cluster.scheduling.topology import assign_ranks
from tests.support.kube_manifests import K8S, ROOT

DEPLOY = (ROOT / "docs" / "deploy.md").read_text()
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
FOREIGN = {  # messages of Kubernetes, KubeRay and Ray
    'secret "longshore-http" not found', "Insufficient nvidia.com/gpu", "Waiting for GCS to be ready", "OOMKilled",
    'storageclass.storage.k8s.io "longshore-nvme" not found', "Usage of EmptyDir volume", "CreateContainerConfigError",
    "Failed", "Init", "0/1", "Readiness probe failed", "kubectl drain", "would violate the pod's disruption budget",
    "Temporary failure in name resolution", "TargetDown", "No available agent to submit job",
}  # fmt: skip
OTHER_COMMANDS = {"doctor", "status"}  # words of the table that are verbs


@cache
def texts_of_the_code() -> str:
    """Return every piece of text in the packages, one a line, with class names. Adjacent pieces are joined."""
    return "\n".join(_texts())


def _texts() -> Iterator[str]:
    for package in ("actors", "cluster", "longshore", "serving", "storage"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.ClassDef):
                    yield node.name


def symptoms() -> list[str]:
    rows = [line.split("|")[1] for line in TROUBLES.splitlines() if line.startswith("| ")][1:]
    return [quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("message", symptoms())
def test_quoted_messages_exist_in_the_code(message: str) -> None:
    if message in FOREIGN | OTHER_COMMANDS or message.startswith(("--", "ray ")):
        return
    if " ranks need " in message:
        with pytest.raises(NotEnoughResources, match=re.escape(message)):
            assign_ranks([], Layout(tensor_parallel_size=8), device="cuda", cpu_ranks_per_node=8)
        return
    assert message in texts_of_the_code()


def test_named_folders_and_files_exist() -> None:
    for folder in re.findall(r"^\| `([a-z/-]+)`(?:, `[a-z-]+`)? \|", DEPLOY, re.M):
        assert (K8S / folder).is_dir(), folder
    for named_path in re.findall(r"k8s/[a-z0-9/_.-]*[a-z]", DEPLOY):
        assert (ROOT / named_path).exists(), named_path
