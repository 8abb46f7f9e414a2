"""Host memory of a rank: every dtype, strided copies, views that outlive it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from actors.devices import convert
from actors.devices.convert import torch_dtype
from actors.devices.cpu_device import CpuDevice
from actors.devices.device import open_device
from actors.shard import RankShard
from cluster.errors import DeviceUnavailable, DoesNotFit
from cluster.planning.plan import LoadPlan
from cluster.planning.read_items import ReadItems, expand_read_items
from storage.checkpoints.safetensors_header import DTYPE_BITS, tensor_bytes
from tests.support.checkpoints import odd_objects, safetensors_bytes
from tests.support.local_node import plan_of
from tests.support.reference_slices import as_bytes, stored_bytes


def filled(plan: LoadPlan, objects: dict[str, bytes], rank: int = 0) -> CpuDevice:
    """Return a device with one rank's slices, copied straight from the stored bytes."""
    device, mine = CpuDevice(), plan.ranks[rank]
    device.allocate(mine.segment_bytes)
    items = expand_read_items(mine.slices, plan.chunks)
    for chunk in mine.chunk_ids.tolist():
        span, key = plan.chunks.byte_range(chunk), plan.shards[plan.chunks.shard[chunk]].key
        device.place(memoryview(bytearray(objects[key][span.start : span.end])), items, items.for_chunk(chunk))
    device.synchronize()
    return device


def test_every_dtype_has_its_torch_dtype_and_its_bytes(tmp_path):
    objects = odd_objects()
    for key, data in objects.items():
        (tmp_path / key).write_bytes(data)
    plan = plan_of(objects, chunk_bytes=100)
    tensors = filled(plan, objects).tensors(plan.ranks[0].slices)
    for name, (dtype, shape, data) in stored_bytes(tmp_path).items():
        found = tensors[name]
        assert as_bytes(found).numpy().tobytes() == data, name
        if DTYPE_BITS[dtype] >= 8:
            assert tuple(found.shape) == shape
            assert found.element_size() * 8 == DTYPE_BITS[dtype]
        else:
            assert found.dtype == torch.uint8
    assert tensors["dtype.BF16"].dtype == torch.bfloat16
    assert tensors["dtype.F8_E4M3"].dtype == torch.float8_e4m3fn
    assert tensors["dtype.BOOL"].dtype == torch.bool
    assert tensors["dtype.C64"].dtype == torch.complex64
    assert tuple(tensors["dtype.F4"].shape) == (4, 3)  # two elements a byte
    assert tuple(tensors["dtype.F6_E2M3"].shape) == (18,)  # 24 elements of 6 bits: no whole bytes per row
    assert tensors["scalar"].shape == ()
    assert tuple(tensors["empty.matrix"].shape) == (3, 0, 5)


def test_a_dtype_that_torch_lacks_is_returned_as_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(convert._TORCH_NAMES, "F8_E8M0", "float8_of_tomorrow")
    assert torch_dtype("F8_E8M0", (2, 3)) == (torch.uint8, (2, 3))
    monkeypatch.setitem(convert._TORCH_NAMES, "F64", "")
    assert torch_dtype("F64", (2, 3)) == (torch.uint8, (2, 24))
    assert torch_dtype("F64", ()) == (torch.uint8, (8,))


@given(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 5), max_size=3).map(tuple))
def test_the_torch_shape_has_the_bytes_of_the_tensor(dtype: str, shape: tuple[int, ...]):
    if int(np.prod(shape)) * DTYPE_BITS[dtype] % 8:
        return  # no such tensor
    kind, found = torch_dtype(dtype, shape)
    assert int(np.prod(found)) * kind.itemsize == tensor_bytes(dtype, shape)


def test_tensors_align_to_256_bytes_within_the_planned_size():
    objects = odd_objects()
    plan = plan_of(objects)
    device = filled(plan, objects)
    for name, tensor in device.tensors(plan.ranks[0].slices).items():
        assert tensor.numel() == 0 or tensor.data_ptr() % 256 == 0, name
    assert tuple(len(segment.data) for segment in device._segments) == plan.ranks[0].segment_bytes


def test_tensors_keep_their_memory_after_the_device_releases_it():
    objects = {"model.safetensors": safetensors_bytes([("a", "F32", (1000, 100)), ("b", "I64", (5,))])}
    plan = plan_of(objects)
    device = filled(plan, objects)
    shard = RankShard(plan.ranks[0], device)
    kept = shard["a"]
    before = as_bytes(kept).clone()
    assert (len(shard), sorted(shard), shard.device) == (2, ["a", "b"], "cpu")
    assert "rank=0" in repr(shard)
    device.free()
    device.free()
    del shard
    gc.collect()
    others = [CpuDevice() for _ in range(4)]
    for other in others:
        other.allocate(plan.ranks[0].segment_bytes)
        for segment in other._segments:
            segment.data[:] = 0xFF
    assert torch.equal(as_bytes(kept), before)


def test_a_model_of_empty_tensors_loads():
    objects = {"model.safetensors": safetensors_bytes([("none", "BF16", (0, 7)), ("nothing", "I64", (0,))])}
    plan = plan_of(objects)
    tensors = filled(plan, objects).tensors(plan.ranks[0].slices)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {"none": (0, 7), "nothing": (0,)}


def test_a_failed_allocation_is_a_typed_error(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DoesNotFit) as caught:
        CpuDevice().allocate((1 << 62,))
    assert caught.value.details["need_bytes"] == 1 << 62


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int, int, int, int]]]:
    """(chunk bytes, segment bytes, rows of src, dest, run, count, src_stride, dest_stride) that stay inside both."""
    rows = []
    chunk_bytes = segment_bytes = 1
    for _ in range(draw(st.integers(1, 5))):
        run, count = draw(st.integers(1, 20)), draw(st.integers(1, 6))
        src_stride, dest_stride = run + draw(st.integers(0, 9)), run + draw(st.integers(0, 9))
        src = draw(st.integers(0, 30))
        dest = segment_bytes  # one after the other, so that no byte is written twice
        rows.append((src, dest, run, count, src_stride, dest_stride))
        chunk_bytes = max(chunk_bytes, src + (count - 1) * src_stride + run)
        segment_bytes = dest + (count - 1) * dest_stride + run
    return chunk_bytes, segment_bytes, rows


def items_of(rows: list[tuple[int, int, int, int, int, int]]) -> ReadItems:
    src, dest, run, count, src_stride, dest_stride = np.array(rows, np.int64).T
    zero = np.zeros(len(rows), np.int64)
    return ReadItems(zero, src, zero, dest, run, count, src_stride, dest_stride)


def copied(chunk: NDArray[np.uint8], segment: NDArray[np.uint8], rows: list[tuple[int, ...]]) -> NDArray[np.uint8]:
    """Make the same copies, one run at a time."""
    for src, dest, run, count, src_stride, dest_stride in rows:
        for number in range(count):
            begin, at = src + number * src_stride, dest + number * dest_stride
            segment[at : at + run] = chunk[begin : begin + run]
    return segment


@given(copies(), st.integers(0, 2**32))
def test_strided_copies_equal_single_copies(
    case: tuple[int, int, list[tuple[int, int, int, int, int, int]]], seed: int
):
    chunk_bytes, segment_bytes, rows = case
    chunk = np.random.default_rng(seed).integers(0, 256, chunk_bytes, np.uint8)
    device = CpuDevice()
    device.allocate((segment_bytes,))
    device.place(memoryview(chunk), items_of(rows), slice(0, len(rows)))
    assert np.array_equal(device._segments[0].data, copied(chunk, np.zeros(segment_bytes, np.uint8), rows))


def test_an_unavailable_device_is_refused():
    assert open_device("cpu").name == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(DeviceUnavailable, match="cannot use"):
            open_device("cuda")
