"""A rank with several devices: each tensor is on its own, and Accelerate reads what went to disk."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.devices.cpu_device import CpuDevice
from actors.devices.mapped_device import LOCK_NAME, MappedDevice, open_mapped
from actors.rank.chunk_placer import Staging
from cluster.errors import ConfigError, DoesNotFit, LayoutError
from cluster.fit.options import parse_device_map
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.planning.plan import LoadPlan
from cluster.planning.read_items import expand_read_items
from cluster.precision.recipes import Precision
from tests.support.plan_oracle import check_plan
from tests.support.planned_models import StoredModel, as_bf16, llama_shapes, random_arrays, store_arrays

torch = pytest.importorskip("torch")

ARRAYS = random_arrays(llama_shapes(3, 32, 48, 4, 2, 40))
BYTES = sum(array.nbytes for array in ARRAYS.values())
SPREAD = {"model.embed_tokens": 0, "model.layers.0": 1, "model.layers.1": "cpu", "model.layers.2": "disk"} | {
    "model.norm": "disk",
    "lm_head": 0,
}


def planned(stored: StoredModel, device_map: Any, folder: Path | None, **limits: Any) -> LoadPlan:
    options = parse_device_map(device_map, limits or None, folder, Layout(), "auto")
    plan = build_load_plan(stored.index, Layout(), device_map=options)
    assert check_plan(plan) == []
    return plan


class FakeGpu(CpuDevice):
    """Host memory under the name of a GPU; a socket cannot write to it."""

    receives = False

    def __init__(self, index: int) -> None:
        super().__init__()
        self.name = f"cuda:{index}"


def place_all(device: MappedDevice, plan: LoadPlan, stored: StoredModel) -> None:
    """Place all chunks as a rank does, without an arena."""
    rank = plan.ranks[0]
    items = expand_read_items(rank.sources, plan.chunks)
    device.allocate(rank.segment_bytes)
    for chunk in rank.chunk_ids.tolist():
        where = plan.chunks.byte_range(chunk)
        data = stored.files[int(plan.chunks.shard[chunk])][where.start : where.end]
        device.place(memoryview(data), items, items.for_chunk(chunk))
        device.synchronize()
    device.finish()
    assert device.held_bytes == rank.device_bytes


def as_numbers(tensors: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: tensor.view(torch.int16).reshape(-1).tolist() for name, tensor in tensors.items()}


WANTED = {name: array.view(np.int16).reshape(-1).tolist() for name, array in ARRAYS.items()}


@pytest.mark.parametrize("chunk_bytes", [700, 1 << 20])
def test_each_tensor_is_on_its_device(tmp_path: Path, chunk_bytes: int) -> None:
    stored = store_arrays(as_bf16(ARRAYS), shards=2, chunk_bytes=chunk_bytes)
    plan = planned(stored, SPREAD, tmp_path / "offload")
    gpus: dict[int, FakeGpu] = {}
    device = open_mapped(
        plan.ranks[0], str(tmp_path / "offload"), "load 0", lambda index: gpus.setdefault(index, FakeGpu(index))
    )
    assert (device.name, device.receives) == ("cuda:0+cuda:1+cpu+disk", False)
    place_all(device, plan, stored)
    tensors = device.tensors(plan.ranks[0].slices)
    assert list(tensors) == [piece.name for piece in plan.ranks[0].slices]
    assert as_numbers(tensors) == WANTED
    for index, wanted in ((0, ("model.embed_tokens", "lm_head")), (1, ("model.layers.0",))):
        memory = {segment.data.ctypes.data: len(segment.data) for segment in gpus[index]._segments}
        inside = {
            name
            for name, tensor in tensors.items()
            if any(start <= tensor.data_ptr() < start + size for start, size in memory.items())
        }
        assert inside == {name for name in ARRAYS if name.startswith(wanted)}
    device.free()


def test_accelerate_reads_what_is_on_disk(tmp_path: Path) -> None:
    offload = pytest.importorskip("accelerate.utils.offload")
    arrays: dict[str, tuple[str, Any]] = {
        "a.weight": ("BF16", np.arange(12, dtype=np.uint16).reshape(3, 4)),
        "a.half": ("F16", np.linspace(-1, 1, 7, dtype=np.float16)),
        "a.single": ("F32", np.float32(2.5).reshape(())),
        "a.small": ("F8_E4M3", np.arange(10, dtype=np.uint8).reshape(2, 5)),
        "a.number": ("I64", np.arange(3)),
        "a.true": ("BOOL", np.array([True, False])),
    }
    stored = store_arrays(arrays, chunk_bytes=11)
    folder = tmp_path / "offload"
    plan = planned(stored, "disk", folder)
    device = open_mapped(plan.ranks[0], str(folder), "load 0")
    place_all(device, plan, stored)
    ours = device.tensors(plan.ranks[0].slices)
    theirs = offload.OffloadedWeightsLoader(save_folder=str(folder))
    assert set(theirs) == set(arrays)
    for name, (_, array) in arrays.items():
        assert theirs[name].dtype == ours[name].dtype
        assert theirs[name].shape == ours[name].shape
        for tensor in (theirs[name], ours[name]):
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()
    ours["a.half"].fill_(0)
    assert theirs["a.half"].any(), "the file is not written through a tensor"
    files = {path.name: path for path in folder.iterdir()}
    assert set(files) == {LOCK_NAME, "index.json", *(f"{name}.dat" for name in arrays)}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    assert files["a.weight.dat"].stat().st_size == 24
    device.free()
    assert not folder.exists()
    assert ours["a.weight"].view(torch.uint16).tolist() == arrays["a.weight"][1].tolist(), "what maps a file keeps it"


def converted(device: Any, plan: LoadPlan, stored: StoredModel) -> dict[str, tuple[Any, ...]]:
    """The tensors of a plan that converts, when each chunk was placed once: dtype, shape, bytes."""
    rank = plan.ranks[0]
    items = expand_read_items(rank.sources, plan.chunks)
    staging = Staging(device, rank, items, plan.chunks.largest_bytes)
    device.allocate(rank.segment_bytes)
    for chunk in rank.chunk_ids.tolist():
        where = plan.chunks.byte_range(chunk)
        data = stored.files[int(plan.chunks.shard[chunk])][where.start : where.end]
        assert staging.begin(chunk)
        device.place(memoryview(data), items, items.for_chunk(chunk))
        staging.end(chunk)
    staging.finish()
    device.finish()
    assert device.held_bytes == rank.device_bytes
    return {
        name: (tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in device.tensors(rank.slices).items()
    }


@pytest.mark.parametrize(
    "precision",
    [Precision("float32"), *(Precision(quantization=scheme) for scheme in ("fp8", "int8", "nf4"))],
)
def test_tensors_are_converted_on_their_device(tmp_path: Path, precision: Precision) -> None:
    wide = random_arrays(llama_shapes(3, 64, 128, 4, 2, 33))  # nf4 takes rows of whole blocks
    stored = store_arrays(as_bf16({name: array & 0xBFFF for name, array in wide.items()}), shards=2, chunk_bytes=7000)
    folder = tmp_path / "offload"
    options = parse_device_map(SPREAD, None, folder, Layout(), "auto")
    plain = build_load_plan(stored.index, Layout(), precision=precision)
    mapped = build_load_plan(stored.index, Layout(), precision=precision, device_map=options)
    device = open_mapped(mapped.ranks[0], str(folder), "load 0", FakeGpu)
    expected = converted(CpuDevice(), plain, stored)
    assert converted(device, mapped, stored) == expected
    index = json.loads((folder / "index.json").read_text())
    assert index.keys() == {name for name in expected if name.startswith(("model.layers.2.", "model.norm."))}
    device.free()


def test_in_host_memory_alone_chunks_can_be_received() -> None:
    stored = store_arrays(as_bf16(ARRAYS), chunk_bytes=700)
    plan = planned(stored, "cpu", None)
    device = open_mapped(plan.ranks[0], "", "load 0")
    assert device.receives
    items = expand_read_items(plan.ranks[0].sources, plan.chunks)
    device.allocate(plan.ranks[0].segment_bytes)
    for chunk in plan.ranks[0].chunk_ids.tolist():
        where = plan.chunks.byte_range(chunk)
        rows = items.for_chunk(chunk)
        for row, view in zip(range(rows.start, rows.stop), device.parts(items, rows), strict=True):
            start = where.start + int(items.src_offset[row])
            view[:] = memoryview(stored.files[0][start : start + len(view)])
    assert as_numbers(device.tensors(plan.ranks[0].slices)) == WANTED


def disk_device(tmp_path: Path, owner: str = "load 0") -> tuple[MappedDevice, LoadPlan, StoredModel]:
    stored = store_arrays(as_bf16(ARRAYS), chunk_bytes=700)
    plan = planned(stored, SPREAD, tmp_path / "offload")
    return open_mapped(plan.ranks[0], str(tmp_path / "offload"), owner, FakeGpu), plan, stored


def test_a_load_that_fails_leaves_nothing(tmp_path: Path) -> None:
    device, plan, _ = disk_device(tmp_path)
    device.allocate(plan.ranks[0].segment_bytes)
    assert list((tmp_path / "offload").iterdir())
    device.free()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "offload").mkdir()
    device, plan, _ = disk_device(tmp_path)
    device.allocate(plan.ranks[0].segment_bytes)
    device.free()
    device.free()
    assert list((tmp_path / "offload").iterdir()) == [], "a folder that was there stays, empty as it was"


def test_devices_are_freed_after_all_copies_ended(tmp_path: Path) -> None:
    """The GPU that unpins the arena does so for all, and one that cannot go on is no reason to keep the files."""
    said: list[str] = []

    class Failing(FakeGpu):
        def synchronize(self) -> None:
            said.append(f"{self.name} waits")

        def free(self) -> None:
            said.append(f"{self.name} frees")
            super().free()
            raise RuntimeError(self.name)

    stored = store_arrays(as_bf16(ARRAYS), chunk_bytes=700)
    plan = planned(stored, SPREAD, tmp_path / "offload")
    device = open_mapped(plan.ranks[0], str(tmp_path / "offload"), "load 0", Failing)
    device.allocate(plan.ranks[0].segment_bytes)
    with pytest.raises(RuntimeError, match="cuda:"):
        device.free()
    assert [line for line in said if "waits" in line] == said[:2]
    assert sorted(said[2:]) == ["cuda:0 frees", "cuda:1 frees"]
    assert not (tmp_path / "offload").exists()


@pytest.mark.parametrize("found", ["a file", "a lock of somebody's"])
def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path, found: str) -> None:
    folder = tmp_path / "offload"
    folder.mkdir()
    (folder / ("mine.dat" if found == "a file" else LOCK_NAME)).write_text("load 1 0")
    device, plan, _ = disk_device(tmp_path)
    with pytest.raises(ConfigError, match="the offload folder is not empty") as refused:
        device.allocate(plan.ranks[0].segment_bytes)
    assert refused.value.details["path"] == str(folder)
    device.free()
    assert [path.read_text() for path in folder.iterdir()] == ["load 1 0"]


def test_hostile_names_are_refused_before_a_byte_moves(tmp_path: Path) -> None:
    stored = store_arrays(
        as_bf16({"../../up.weight": ARRAYS["model.norm.weight"], "fine.weight": ARRAYS["lm_head.weight"]})
    )
    with pytest.raises(
        LayoutError, match=r"1 tensors on disk have names that no file can have: '\.\./\.\./up\.weight'"
    ):
        planned(stored, "disk", tmp_path / "offload")
    planned(stored, {"": "disk", "../../up": "cpu"}, tmp_path / "offload")


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_disk_that_becomes_full_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    device, plan, stored = disk_device(tmp_path)
    monkeypatch.setattr(f"actors.devices.mapped_device.os.{call}", full)
    with pytest.raises(DoesNotFit, match="the disk of the offload folder is full") as refused:
        place_all(device, plan, stored)
    assert refused.value.details["path"] == str(tmp_path / "offload")
    device.free()
    assert not (tmp_path / "offload").exists()


def test_tensors_on_disk_keep_no_descriptors(tmp_path: Path) -> None:
    device, plan, stored = disk_device(tmp_path)
    place_all(device, plan, stored)
    before = len(os.listdir("/proc/self/fd"))
    with torch.device("meta"):  # whatever the caller makes its own tensors on
        tensors = device.tensors(plan.ranks[0].slices)
    assert len(os.listdir("/proc/self/fd")) == before
    assert as_numbers(tensors) == WANTED
    file = tmp_path / "offload" / "model.norm.weight.dat"
    written = file.read_bytes()
    tensors["model.norm.weight"].fill_(0)
    assert file.read_bytes() == written
    device.free()
    assert as_numbers(tensors) == WANTED | {"model.norm.weight": [0] * len(WANTED["model.norm.weight"])}


@pytest.mark.parametrize("how", ["gone", "cut short", "a link"])
def test_a_changed_offload_file_is_refused(tmp_path: Path, how: str) -> None:
    device, plan, stored = disk_device(tmp_path)
    place_all(device, plan, stored)
    file = tmp_path / "offload" / "model.norm.weight.dat"
    if how == "cut short":
        os.truncate(file, 10)
    else:
        file.rename(tmp_path / "elsewhere")
        if how == "a link":
            file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="the offload folder cannot be used"):
        device.tensors(plan.ranks[0].slices)
    device.free()
