"""The Dockerfile passes hadolint, and its versions, packages and user match the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ray.autoscaler._private import command_runner

from tests.support.kube_manifests import ROOT, USER, VARIANTS

DOCKERFILE = (ROOT / "Dockerfile").read_text()
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def hadolint(text: str) -> list[str]:
    """Return hadolint's findings in a Dockerfile, at its strictest; the project's own ignore comments count."""
    command = [str(HADOLINT), "--no-color", "--failure-threshold", "style", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: it has no wheel for this platform")
def test_hadolint_finds_nothing() -> None:
    assert hadolint(DOCKERFILE) == []
    assert hadolint(DOCKERFILE.replace("hadolint ignore=DL3008", "")) != []
    assert hadolint(DOCKERFILE.replace("--constraint constraints.txt", "")) != []
    assert hadolint(DOCKERFILE + "USER root\n") != []


def test_only_ignores_with_a_reason_silence_hadolint() -> None:
    silenced = re.findall(r"hadolint ignore=(\S+)", DOCKERFILE)
    assert silenced == ["DL3006", "DL3006", "DL3008"]  # the base image's tag is in its argument; Debian's versions


def test_the_image_runs_as_the_user_of_the_manifests() -> None:
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.M) == [f"{USER}:{USER}"]
    assert f"--uid {USER} --gid {USER}" in DOCKERFILE
    assert "HOME=/home/ray" in DOCKERFILE  # a volume of every pod


def test_programs_that_kuberay_and_ray_call_are_installed() -> None:
    (installed,) = re.findall(r"apt-get install -y --no-install-recommends (.*) \\", DOCKERFILE)
    called = set(
        re.findall(r"\b(ssh|rsync)\b", Path(command_runner.__file__).read_text())
    )  # on the head, for its workers
    assert called == {"ssh", "rsync"}
    assert {"openssh-client", "rsync", "wget"} == set(installed.split())


def test_no_pod_sees_gpus_that_it_did_not_request() -> None:
    assert "NVIDIA_VISIBLE_DEVICES" not in DOCKERFILE


def test_drivers_are_found_on_gke_too() -> None:
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in DOCKERFILE
    assert re.search(r"\bPATH=/opt/longshore/bin:\$PATH:/usr/local/nvidia/bin\b", DOCKERFILE)


def test_base_image_and_torch_are_one_version() -> None:
    (base,) = re.findall(r"^ARG PYTHON=(.*)$", DOCKERFILE, re.M)
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", base)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)) == {"${PYTHON}"}
    assert re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.M)
    installs = [line for line in re.findall(r"pip install [^&;\n]*", DOCKERFILE) if "torch.txt" not in line]
    assert installs
    assert all("--constraint constraints.txt" in line for line in installs)
    assert set(re.findall(r"^ARG TORCH=(.*)$", DOCKERFILE, re.M)) <= set(VARIANTS)


def test_the_images_extras_exist_in_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.M)
    offered = project["optional-dependencies"]
    assert set(extras.split(",")) <= offered.keys()
    of_the_service = {extra for extra, needs in offered.items() if extra != "dev" and "fastapi" in " ".join(needs)}
    assert of_the_service <= set(extras.split(","))


def test_the_build_context_is_every_package_and_little_else() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    first, *lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert first == "*"
    assert {package.rstrip("*") for package in packages} <= sent
    assert not sent & {".git", "tests", ".venv", "bench"}
    for copied in re.findall(r"^COPY (?!--from)(.*) \./$", DOCKERFILE, re.M):
        assert set(copied.split()) <= sent


def test_files_beside_the_code_are_installed_with_it() -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package, globs in given.items():
        installed = {found for glob in globs for found in (ROOT / package).glob(glob)}
        beside = {file for file in (ROOT / package).rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
        assert beside <= installed
