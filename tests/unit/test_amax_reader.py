"""Recorded maxima in planning: they are read when they help, once, for the planned model only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config import TrustPolicy
from cluster.fit.search import Change
from cluster.options import LoadOptions
from cluster.planning import make_plan as amax_reader_module
from cluster.planning.make_plan import amax_reader, plan_changes, prepare_plan, read_model
from cluster.planning.packed_plan import unpack_shared
from cluster.planning.process import PlanningServer
from cluster.request import LoadRequest, make_request
from storage.checkpoints.amax import AMAX_KEY, read_amax
from storage.errors import IntegrityError, ManifestMismatch
from storage.publishing.publish import publish
from storage.stores.local import LocalStore
from tests.support.checkpoints import write_tiny_llama

MIB = 1 << 20
READING = {"chunk_bytes": MIB, "read_timeout_s": 5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path)
    publish(LocalStore(tmp_path), chunk_bytes=MIB, amax=True)
    return tmp_path


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The weights requested at each reading of the file."""
    asked: list[int] = []

    def counted(*args: Any) -> Any:
        asked.append(len(args[2]))
        return read_amax(*args)

    monkeypatch.setattr(amax_reader_module, "read_amax", counted)
    return asked


def request(place: str | Path, quantization: str, tensors: int = 2) -> LoadRequest:
    return make_request(
        LoadOptions(
            str(place),
            tensor_parallel_size=tensors,
            quantization=quantization,
        )
    )


def staged(place: str | Path, quantization: str) -> dict[str, bool]:
    """Map each staged tensor of the last rank to whether it reads only what it holds."""
    _, plan = prepare_plan(request(place, quantization), **READING)  # type: ignore[arg-type]
    return {each.source.name: each.source.region == each.region for each in plan.ranks[-1].staged}


def test_maxima_are_read_where_they_help(folder: Path, readings: list[int]) -> None:
    assert all(staged(folder, "fp8").values())
    assert all(staged(folder, "fp8_tensor").values())
    assert readings == [4, 14]  # two layers: the weights cut by rows; every matrix
    prepare_plan(request(folder, "int8", 1), **READING)  # type: ignore[arg-type]
    prepare_plan(request(folder, ""), **READING)  # type: ignore[arg-type]
    assert len(readings) == 2


def test_without_a_manifest_the_maxima_are_ignored(folder: Path, readings: list[int]) -> None:
    (folder / "longshore.manifest.json").unlink()
    assert not all(staged(folder, "fp8").values())
    assert readings == []


def test_one_shard_of_a_model_uses_its_own_maxima(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    found = staged(shard, "fp8_tensor")
    assert found
    assert all(found.values())


def test_many_plan_changes_read_the_maxima_once(folder: Path, readings: list[int]) -> None:
    asked = request(folder, "fp8_tensor")
    index, config = read_model(asked, **READING)  # type: ignore[arg-type]
    changes = [
        Change(f"{scheme} on {tensors}", "quantization", 0, request(folder, scheme, tensors))
        for scheme in ("fp8_tensor", "fp8", "int8", "int4")
        for tensors in (1, 2)
    ]
    planned = plan_changes(index, config, changes, read_amax=amax_reader(asked, index, 5.0))
    assert [bool(each.problem) for each in planned[:6]] == [False] * 6
    assert readings == [14]
    without = plan_changes(index, config, changes)
    assert planned[1].ranks[0].read_bytes < without[1].ranks[0].read_bytes


def test_the_planning_process_sends_the_maxima_along(folder: Path) -> None:
    packed = PlanningServer(MIB, 5.0).prepare(request(folder, "int8"), TrustPolicy())
    cut = unpack_shared(packed.shared).cut
    assert cut.amax is not None
    assert len(cut.amax.tensors) == 4


def test_a_bad_maxima_file_ends_the_planning(folder: Path) -> None:
    data = (folder / AMAX_KEY).read_bytes()
    (folder / AMAX_KEY).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(IntegrityError):
        staged(folder, "fp8")
    answer = PlanningServer(MIB, 5.0).answer("prepare", (request(folder, "fp8"), TrustPolicy()))
    assert isinstance(answer, IntegrityError)
    assert all(staged(folder, "").values())  # nothing needs it
    (folder / AMAX_KEY).unlink()
    with pytest.raises(ManifestMismatch):
        staged(folder, "fp8")
