"""bench.gpu: all of it but the CUDA calls, where there is no GPU and no Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.ray_clusters import eventually

REPOSITORY = Path(__file__).resolve().parents[2]


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "ray.py").write_text("raise ImportError('Ray is not there')\n")
    search = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--rounds", "1", "--no-tuning", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
def test_without_a_gpu_it_refuses_in_one_line(tmp_path: Path) -> None:
    refused = run(tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("bench.gpu: no CUDA")
    assert refused.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.long
def test_dry_run_loads_and_compares_every_tensor(tmp_path: Path) -> None:
    wanted = ("pinned_copy", "read_and_copy", "longshore", "longshore_unverified", "safetensors_device")
    arguments = ("--device", "cpu", "--size", "20MB", "--folder", str(tmp_path), "--out", str(tmp_path / "out"))
    done = run(tmp_path, *arguments, "--only", ",".join(wanted))
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads((tmp_path / "out" / "gpu.json").read_text())["entries"]
    assert [len(entry["runs"]) for entry in entries] == [1] * len(wanted)
    assert list(tmp_path.glob("longshore-gpu-*")) == []


@pytest.mark.slow
@pytest.mark.long
def test_sigterm_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    place, state = tmp_path / "place", tmp_path / "tmp"
    place.mkdir()
    state.mkdir()
    arguments = ["--device", "cpu", "--size", "20MB", "--rounds", "1000", "--no-tuning", "--only", "safetensors_device"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "bench.gpu", *arguments, "--folder", str(place), "--out", str(tmp_path / "out")],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(state)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline()  # a run is over, the next one goes on
        assert len(list(place.iterdir())) == 1
        # Not between two runs, where the signal could come when a folder is made and nobody knows it yet.
        eventually(lambda: psutil.Process(process.pid).children(), "there is no further run")
        process.terminate()
        process.stdout.read()
    assert process.returncode == 130
    assert list(place.iterdir()) == []
    assert list(state.iterdir()) == []
