"""bench.contenders.buffers accepts correct tensors, and finds one wrong byte or one missing tensor."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bench.contenders.buffers import Buffer, WrongDelivery, allocate, check_tensors, file_ranges, tensors_of
from bench.harness.contender import BenchFile, Spec
from cluster.command_line.demo import write_llama_checkpoint


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    write_llama_checkpoint(
        tmp_path, hidden=32, layers=1, intermediate=48, heads=4, kv_heads=2, vocab=64, shards=2, seed=7
    )
    paths = sorted(tmp_path.glob("*.safetensors"))
    files = tuple(BenchFile(f"m/{path.name}", str(path), path.stat().st_size) for path in paths)
    return Spec("file", "", "b", str(tmp_path), files, sum(file.size_bytes for file in files))


def filled(spec: Spec, *, touched: bool) -> list[Buffer]:
    buffers = allocate(spec, touched=touched)
    for one in file_ranges(spec, 1000):
        content = Path(spec.files[one.file].path).read_bytes()
        buffers[one.file].data[one.start : one.end] = content[one.start : one.end]
    return buffers


@pytest.mark.parametrize("touched", [False, True])
def test_correct_tensors_pass(spec: Spec, touched: bool) -> None:
    check_tensors(spec, tensors_of(filled(spec, touched=touched)))


@pytest.mark.parametrize("offset_from_end", [1, 100, 4000])
def test_one_wrong_byte_is_found(spec: Spec, offset_from_end: int) -> None:
    buffers = filled(spec, touched=False)
    buffers[1][-offset_from_end] ^= 1
    with pytest.raises(WrongDelivery, match="other bytes"):
        check_tensors(spec, tensors_of(buffers))


def test_a_missing_tensor_is_found(spec: Spec) -> None:
    tensors = tensors_of(filled(spec, touched=False))
    del tensors["model.norm.weight"]
    with pytest.raises(WrongDelivery, match=r"1 tensors were not delivered, model\.norm\.weight"):
        check_tensors(spec, tensors)


def test_another_shape_or_dtype_is_found(spec: Spec) -> None:
    import torch

    tensors = tensors_of(filled(spec, touched=False))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(2, -1)
    with pytest.raises(WrongDelivery, match="not"):
        check_tensors(spec, tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(-1).view(torch.float16)
    with pytest.raises(WrongDelivery, match="not"):
        check_tensors(spec, tensors)


def test_ranges_tile_every_file(spec: Spec) -> None:
    for range_bytes in (1, 777, 1 << 20):
        ranges = file_ranges(spec, range_bytes)
        for number, file in enumerate(spec.files):
            own = [one for one in ranges if one.file == number]
            assert [own[0].start, own[-1].end] == [0, file.size_bytes]
            assert all(before.end == after.start for before, after in pairwise(own))
            assert all(0 < one.end - one.start <= range_bytes for one in own)
