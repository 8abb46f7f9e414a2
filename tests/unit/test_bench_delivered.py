"""Deliveries are compared with the files: one wrong byte and one missing tensor are found."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.contenders.buffers import WrongDelivery, check_tensors, file_ranges, file_tensors
from bench.contenders.ranks import Slice, check_slices, rank_slices
from bench.harness.contender import BenchFile, Spec
from cluster.command_line.demo import write_llama_checkpoint

pytestmark = pytest.mark.long


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    write_llama_checkpoint(
        tmp_path, hidden=32, layers=1, intermediate=48, heads=4, kv_heads=2, vocab=64, shards=2, seed=7
    )
    paths = sorted(tmp_path.glob("*.safetensors"))
    files = tuple(BenchFile(f"m/{path.name}", str(path), path.stat().st_size) for path in paths)
    return Spec("file", "", "b", str(tmp_path), files, sum(file.size_bytes for file in files))


def delivered(spec: Spec) -> dict[str, Any]:
    import torch

    tensors = {}
    for file in spec.files:
        data = bytearray(Path(file.path).read_bytes())
        tensors.update(file_tensors(memoryview(data), torch.frombuffer(data, dtype=torch.uint8)))
    return tensors


def test_correct_tensors_pass(spec: Spec) -> None:
    check_tensors(spec, delivered(spec))


def test_one_wrong_byte_is_found(spec: Spec) -> None:
    import torch

    tensors = delivered(spec)
    tensors["model.norm.weight"].view(torch.uint8)[-1] ^= 1
    with pytest.raises(WrongDelivery, match="other bytes"):
        check_tensors(spec, tensors)


def test_a_missing_tensor_is_found(spec: Spec) -> None:
    tensors = delivered(spec)
    del tensors["model.norm.weight"]
    with pytest.raises(WrongDelivery, match=r"1 tensors were not delivered, model\.norm\.weight"):
        check_tensors(spec, tensors)


def test_another_shape_or_dtype_is_found(spec: Spec) -> None:
    import torch

    tensors = delivered(spec)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(2, -1)
    with pytest.raises(WrongDelivery, match="not"):
        check_tensors(spec, tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(-1).view(torch.float16)
    with pytest.raises(WrongDelivery, match="not"):
        check_tensors(spec, tensors)


def taken(spec: Spec, slices: list[Slice]) -> dict[str, Any]:
    tensors = delivered(spec)
    return {
        name: tensors[name][tuple(slice(start, end) for start, end in ranges)].clone()
        for name, _, _, _, _, ranges in slices
    }


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"fsdp_size": 2}])
def test_slices_of_all_ranks_hold_every_element(spec: Spec, layout: dict[str, int]) -> None:
    ranks = rank_slices(spec.with_options(layout=layout))
    assert len(ranks) == 2
    for slices in ranks:
        check_slices(spec, slices, taken(spec, slices))
    elements: dict[str, int] = {}
    for slices in ranks:
        for name, tensor in taken(spec, slices).items():
            elements[name] = elements.get(name, 0) + tensor.numel()
    whole = {name: tensor.numel() for name, tensor in delivered(spec).items()}
    assert elements.keys() == whole.keys()
    assert all(elements[name] in (whole[name], 2 * whole[name]) for name in whole)  # norms are replicated


def test_a_wrong_or_missing_slice_is_found(spec: Spec) -> None:
    import torch

    slices = rank_slices(spec.with_options(layout={"tensor_parallel_size": 2}))[1]
    held = taken(spec, slices)
    name = "model.layers.0.mlp.down_proj.weight"
    held[name].view(torch.uint8)[0, -1] ^= 1
    with pytest.raises(WrongDelivery, match=name):
        check_slices(spec, slices, held)
    del held[name]
    with pytest.raises(WrongDelivery, match=name):
        check_slices(spec, slices, held)


def test_ranges_tile_every_file(spec: Spec) -> None:
    for range_bytes in (1, 777, 1 << 20):
        ranges = file_ranges(spec, range_bytes)
        for number, file in enumerate(spec.files):
            own = [one for one in ranges if one.file == number]
            assert [own[0].start, own[-1].end] == [0, file.size_bytes]
            assert all(before.end == after.start for before, after in pairwise(own))
            assert all(0 < one.end - one.start <= range_bytes for one in own)
