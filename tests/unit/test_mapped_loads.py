"""Loads of a rank with several devices, by a real agent over a real arena."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from actors.devices.mapped_device import open_mapped_rank
from actors.rank.executor import RankLoader
from actors.shard import RankShard
from cluster.fit.needs import min_slots
from cluster.fit.options import parse_device_map
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.planning.plan import LoadPlan
from cluster.telemetry.report import RankReport
from storage.checkpoints.checkpoint import open_model
from storage.errors import IntegrityError
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import read_objects, write_tiny_llama
from tests.support.faulty_stores import FlipByteStore
from tests.support.local_node import LocalNode, Rank, local_node, run_all, with_digests

CHUNK_BYTES = 8192
HALVES = {"model": "disk", "model.layers.0": "cpu", "lm_head": "cpu"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder, shards=2)
    return folder


@pytest.fixture(scope="module")
def llama(checkpoint: Path) -> dict[str, bytes]:
    return read_objects(checkpoint)


def plan_of(objects: dict[str, bytes], device_map: Any, folder: Path | None) -> LoadPlan:
    index = with_digests(open_model(MemoryStore(dict(objects)), chunk_bytes=CHUNK_BYTES), objects)
    options = parse_device_map(device_map, None, folder, Layout(), "cpu")
    return build_load_plan(index, Layout(), device_map=options)


def mapped_rank(node: LocalNode, plan: LoadPlan, store: Any, folder: Path, load_id: str, incarnation: int = 0) -> Rank:
    job = replace(node.job(plan, load_id, 0, incarnation), offload_folder=str(folder))
    devices: list[Any] = []

    def opened(rank_plan: Any) -> Any:
        devices.append(open_mapped_rank(rank_plan, job))
        return devices[0]

    return Rank(RankLoader(node.agent, job, opened, store=store), devices[0])


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


@pytest.mark.parametrize(("device_map", "placement"), [(HALVES, "via_arena"), ("cpu", "direct"), ("disk", "direct")])
def test_every_tensor_is_exact_on_its_device(
    shm_dir: Path, tmp_path: Path, checkpoint: Path, llama: dict[str, bytes], device_map: Any, placement: str
) -> None:
    folder = tmp_path / "offload"
    plan = plan_of(llama, device_map, folder)
    with local_node(shm_dir, slots=min_slots(1) + 2, placement=placement) as node:
        rank = mapped_rank(node, plan, MemoryStore(llama), folder, node.begin(plan))
        run_all([rank])
        assert isinstance(rank.outcome, RankReport), rank.outcome
        shard = RankShard(plan.ranks[0], rank.device)
        expected = stored(checkpoint)
        assert set(shard) == set(expected)
        assert all(torch.equal(shard[name], tensor) for name, tensor in expected.items())
        assert shard.device == "cpu"
        assert shard.device_map == (device_map if isinstance(device_map, dict) else {"": device_map})
        assert rank.outcome.bytes_by_device == plan.ranks[0].bytes_by_device
        assert rank.outcome.destination_host_bytes == plan.ranks[0].bytes_by_device.get("cpu", 0)
        on_disk = {path.name.removesuffix(".dat") for path in folder.glob("*.dat")}
        devices = plan.ranks[0].segment_devices
        assert (folder / "index.json").exists() == bool(on_disk)
        assert on_disk == {piece.name for piece in plan.ranks[0].slices if devices[piece.segment] == "disk"}
        rank.device.free()


def test_a_load_that_fails_removes_its_files(shm_dir: Path, tmp_path: Path, llama: dict[str, bytes]) -> None:
    folder = tmp_path / "offload"
    plan = plan_of(llama, HALVES, folder)
    key = plan.shards[1].key
    store = FlipByteStore(MemoryStore(llama), key, plan.shards[1].size_bytes - 1, lambda reading: True)
    with local_node(shm_dir, slots=min_slots(1) + 2, fetch_attempts=1, chunk_attempts=1) as node:
        rank = mapped_rank(node, plan, store, folder, node.begin(plan))
        run_all([rank])
        assert isinstance(rank.outcome, IntegrityError), rank.outcome
        assert not folder.exists()


def test_a_second_worker_of_the_rank_fills_the_folder_again(
    shm_dir: Path, tmp_path: Path, checkpoint: Path, llama: dict[str, bytes]
) -> None:
    folder = tmp_path / "offload"
    plan = plan_of(llama, "disk", folder)
    with local_node(shm_dir, slots=len(plan.chunks) + min_slots(1)) as node:
        load_id = node.begin(plan)
        first = mapped_rank(node, plan, MemoryStore(llama), folder, load_id)
        run_all([first])
        assert isinstance(first.outcome, RankReport), first.outcome
        first.device.free()  # its worker has ended
        node.agent.rank_lost(load_id, 0, 0)
        second = mapped_rank(node, plan, MemoryStore(llama), folder, load_id, incarnation=1)
        run_all([second])
        assert isinstance(second.outcome, RankReport), second.outcome
        shard = RankShard(plan.ranks[0], second.device)
        assert all(torch.equal(shard[name], tensor) for name, tensor in stored(checkpoint).items())
        for rank in (first, second):
            rank.device.free()
