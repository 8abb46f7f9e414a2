"""A real GPU as a rank's memory. Skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from actors.devices.cuda_device import ALREADY_REGISTERED, CudaDevice
from actors.devices.device import open_device
from actors.rank.executor import RankLoader
from cluster.errors import DoesNotFit
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.planning.read_items import ReadItems, expand_read_items
from cluster.precision.recipes import Precision
from cluster.telemetry.report import RankReport
from storage.arena.arena import Arena
from storage.checkpoints.checkpoint import open_model
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import odd_objects, read_objects, write_objects, write_tiny_llama
from tests.support.local_node import Rank, local_node, plan_of, run_all
from tests.support.reference_slices import as_bytes, differing_slices, stored_bytes
from tests.support.shared_memory import REPOSITORY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

SLOT_BYTES = 1 << 20


@pytest.fixture
def arena(shm_dir: Path) -> Iterator[Arena]:
    """Four slots with random contents."""
    with Arena.create(str(shm_dir / "longshore-arena-test"), slot_count=4, slot_bytes=SLOT_BYTES) as arena:
        arena.reserve()
        for slot in range(arena.slot_count):
            arena.slot(slot)[:] = np.random.default_rng(slot).bytes(SLOT_BYTES)
        yield arena
        arena.unlink()


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.free()


def items_of(*rows: tuple[int, int, int, int, int, int]) -> ReadItems:
    """Rows of src, dest, run, count, src_stride, dest_stride, all into segment 0."""
    src, dest, run, count, src_stride, dest_stride = np.array(rows, np.int64).T
    zero = np.zeros(len(rows), np.int64)
    return ReadItems(zero, src, zero, dest, run, count, src_stride, dest_stride)


def carried_out(chunk: memoryview, segment_bytes: int, items: ReadItems) -> NDArray[np.uint8]:
    source, segment = np.frombuffer(chunk, np.uint8), np.zeros(segment_bytes, np.uint8)
    for row in range(len(items)):
        run = int(items.run_bytes[row])
        for number in range(int(items.count[row])):
            begin = int(items.src_offset[row] + number * items.src_stride[row])
            at = int(items.dest_offset[row] + number * items.dest_stride[row])
            segment[at : at + run] = source[begin : begin + run]
    return segment


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_of_one_and_of_many_runs(arena: Arena, device: CudaDevice, pinned: bool):
    """Odd offsets, odd runs, strided items of several chunks in a row: the staging block is used again."""
    if pinned:
        device.attach_arena(arena.data(), arena.slot_bytes)
    device.allocate((SLOT_BYTES,))
    device._segments[0].zero_()
    torch.cuda.synchronize()
    items = items_of(
        (3, 0, 1001, 1, 1001, 1001),
        (5, 1536, 7, 300, 333, 7),
        (200_000, 8192, 512, 200, 2048, 512),
        (1, 300_001, 100, 64, 1000, 128),
    )
    for slot in (0, 1, 2, 3, 0, 3):
        chunk = arena.slot(slot)
        device.place(chunk, items, slice(0, len(items)))
        device.synchronize()
        assert np.array_equal(device._segments[0].cpu().numpy(), carried_out(chunk, SLOT_BYTES, items))
    device.detach_arena()


def test_chunks_in_flight_do_not_mix(arena: Arena, device: CudaDevice):
    """Several chunks between two waits, each through the one staging block."""
    device.attach_arena(arena.data(), arena.slot_bytes)
    device.allocate((4 * SLOT_BYTES,))
    wanted = []
    for slot in range(4):
        items = items_of((0, slot * SLOT_BYTES, 256, 1024, 1024, 256))
        device.place(arena.slot(slot), items, slice(0, 1))
        wanted.append(carried_out(arena.slot(slot), 4 * SLOT_BYTES, items)[slot * SLOT_BYTES :][: 256 * 1024])
    device.synchronize()
    for slot, expected in enumerate(wanted):
        found = device._segments[0][slot * SLOT_BYTES :][: 256 * 1024].cpu().numpy()
        assert np.array_equal(found, expected)


def place_slot(device: CudaDevice, arena: Arena, slot: int) -> None:
    """Copy a whole slot to the start of segment 0."""
    device.place(arena.slot(slot), items_of((0, 0, SLOT_BYTES, 1, SLOT_BYTES, SLOT_BYTES)), slice(0, 1))
    device.synchronize()
    assert bytes(device._segments[0].cpu().numpy()) == bytes(arena.slot(slot))


def is_pinned(arena: Arena, slot: int) -> bool:
    return bool(torch.frombuffer(arena.slot(slot), dtype=torch.uint8).is_pinned())


def test_blocks_of_the_arena_are_pinned_as_they_are_used_and_let_go(
    arena: Arena, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.devices.cuda_device.PIN_BYTES", 3 * SLOT_BYTES)  # the last block has one slot
    device.allocate((SLOT_BYTES,))
    device.attach_arena(arena.data(), arena.slot_bytes)
    assert not any(is_pinned(arena, slot) for slot in range(4))
    place_slot(device, arena, 1)
    assert [is_pinned(arena, slot) for slot in range(4)] == [True, True, True, False]
    for slot in (3, 2, 0, 3):
        place_slot(device, arena, slot)
    assert all(is_pinned(arena, slot) for slot in range(4))
    device.detach_arena()
    device.detach_arena()
    assert not any(is_pinned(arena, slot) for slot in range(4))
    device.attach_arena(arena.data(), arena.slot_bytes)  # after the agent was restarted
    place_slot(device, arena, 3)
    device.detach_arena()


@pytest.mark.parametrize("error", [ALREADY_REGISTERED, 1])
def test_an_arena_that_cannot_be_pinned_is_no_failure(
    arena: Arena, device: CudaDevice, monkeypatch: pytest.MonkeyPatch, error: int
):
    device.allocate((SLOT_BYTES,))
    device.attach_arena(arena.data(), arena.slot_bytes)
    place_slot(device, arena, 0)
    twin = CudaDevice()
    if error != ALREADY_REGISTERED:
        monkeypatch.setattr("actors.devices.cuda_device.ALREADY_REGISTERED", 0)  # so that it looks like another error
    twin.attach_arena(arena.data(), arena.slot_bytes)  # CUDA refuses a range that is registered already
    twin.allocate((SLOT_BYTES,))
    place_slot(twin, arena, 1)
    assert set(twin._pinned.values()) == {0}
    assert bool(twin._block_bytes) == (error == ALREADY_REGISTERED)
    assert torch.ones(4, device="cuda").sum().item() == 4  # and the refusal is not left for the next kernel
    twin.free()
    assert is_pinned(arena, 0)


def test_memory_that_is_still_written_by_what_was_launched_before(arena: Arena, device: CudaDevice):
    """In a process that uses the GPU: torch hands out again what was freed, in the order of its own stream only."""
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    address = block.data_ptr()
    torch.cuda._sleep(1 << 29)  # cycles, some 0.3 s
    block.fill_(7)
    del block
    device.allocate((64 << 20,))
    assert device._segments[0].data_ptr() == address
    device.place(arena.slot(0), items_of((0, 0, SLOT_BYTES, 1, SLOT_BYTES, SLOT_BYTES)), slice(0, 1))
    device.synchronize()
    torch.cuda.synchronize()
    assert bytes(device._segments[0][:SLOT_BYTES].cpu().numpy()) == bytes(arena.slot(0))


def test_memory_goes_back_to_the_system(device: CudaDevice):
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    device.allocate((256 << 20, 64 << 20))
    assert torch.cuda.mem_get_info()[0] <= free - (320 << 20)
    device.free()
    device.free()
    assert torch.cuda.mem_get_info()[0] >= free - (32 << 20)


def test_more_memory_than_there_is(device: CudaDevice):
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(DoesNotFit) as caught:
        device.allocate((total, total))
    assert caught.value.details["need_bytes"] == 2 * total
    assert caught.value.details["total_bytes"] == total
    assert device._segments == []


@pytest.mark.parametrize("step", ["stage", "convert", "place"])
def test_no_memory_while_it_loads(arena: Arena, device: CudaDevice, monkeypatch: pytest.MonkeyPatch, step: str):
    def none_left(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("none left")

    index = open_model(MemoryStore({"m.safetensors": save({"a": torch.ones(64, 64)})}), chunk_bytes=4096)
    rank = build_load_plan(index, Layout(), precision=Precision("bfloat16")).ranks[0]
    (staged,) = rank.staged
    device.allocate((SLOT_BYTES,))
    if step != "stage":
        device.stage(staged)
    monkeypatch.setattr("actors.devices.cuda_device.convert" if step == "convert" else "torch.empty", none_left)
    steps = {
        "stage": lambda: device.stage(staged),
        "convert": lambda: device.convert(staged, rank.slices[staged.first : staged.end]),
        "place": lambda: device.place(arena.slot(0), items_of((0, 0, 100, 2, 200, 100)), slice(0, 1)),
    }
    with pytest.raises(DoesNotFit) as caught:
        steps[step]()
    assert caught.value.details["free_bytes"] > 0


def test_every_dtype(tmp_path: Path, device: CudaDevice):
    objects = odd_objects()
    write_objects(tmp_path, objects)
    plan = plan_of(objects, chunk_bytes=4096)
    device.allocate(plan.ranks[0].segment_bytes)
    items = expand_read_items(plan.ranks[0].slices, plan.chunks)
    for chunk in plan.ranks[0].chunk_ids.tolist():
        span, key = plan.chunks.byte_range(chunk), plan.shards[plan.chunks.shard[chunk]].key
        device.place(memoryview(bytearray(objects[key][span.start : span.end])), items, items.for_chunk(chunk))
        device.synchronize()
    tensors = device.tensors(plan.ranks[0].slices)
    for name, (_, _, data) in stored_bytes(tmp_path).items():
        assert tensors[name].device.type == "cuda"
        assert as_bytes(tensors[name]).numpy().tobytes() == data, name


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_load_from_store_to_gpu(shm_dir: Path, tmp_path: Path, tp: int):
    """All ranks on one GPU here; each has its own device object, as it has its own process in a cluster."""
    write_tiny_llama(tmp_path)
    objects = read_objects(tmp_path)
    plan = plan_of(objects, (tp, 1, 1), 65536)
    with local_node(shm_dir, slots=2 * tp + 3) as node:
        load_id = node.begin(plan)
        ranks = []
        for rank in range(tp):
            device = CudaDevice()
            loader = RankLoader(node.agent, node.job(plan, load_id, rank), device, store=MemoryStore(objects))
            ranks.append(Rank(loader, device))  # type: ignore[arg-type]
        run_all(ranks)
        for number, rank in enumerate(ranks):
            assert isinstance(rank.outcome, RankReport), rank.outcome
            tensors = rank.device.tensors(plan.ranks[number].slices)
            assert differing_slices(tensors, number, str(tmp_path), tp, 1, kv_heads=2) == []
            rank.device.free()


def test_only_the_first_visible_gpu_gets_a_context():
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU: nothing else could get a context")
    code = """
import torch
from actors.devices.cuda_device import ALREADY_REGISTERED, CudaDevice
before = torch.cuda.device_count()
device = CudaDevice()
device.allocate((1 << 20,))
device.attach_arena(memoryview(bytearray(1 << 20)), 1 << 20)
device.free()
import subprocess, os
found = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"],
                       capture_output=True, text=True).stdout
print(sum(line.startswith(str(os.getpid())) for line in found.splitlines()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert int(result.stdout) <= 1


def test_the_device_is_named_after_its_index():
    device = open_device("cuda")
    assert device.name == "cuda:0"
    device.free()
