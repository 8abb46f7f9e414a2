"""Tensors that go to a device in pieces through host memory of a fixed size; here the device is the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.devices import cuda_device
from actors.devices.cuda_device import PinnedStaging, boxes


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 40))
def test_boxes_are_the_tensor_in_order(shape: list[int], most: int) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    found = []
    for offsets, sizes in boxes(shape, most):
        assert math.prod(sizes) <= most
        found.append(tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].reshape(-1))
    assert torch.equal(torch.cat(found), tensor.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(37, 13), (5,), (1, 4, 70), (3, 2, 2, 2)])
def test_a_tensor_has_its_bytes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(cuda_device, "STAGING_BYTES", 64)
    stored = torch.randint(0, 2, shape).to(dtype)

    def fill(offsets: Sequence[int], host: torch.Tensor) -> None:
        assert host.nbytes <= 64
        host.copy_(stored[tuple(slice(o, o + n) for o, n in zip(offsets, host.shape, strict=True))])

    staging = PinnedStaging()
    for _ in range(2):
        target = torch.zeros_like(stored)
        staging.copy(target, fill)
        assert torch.equal(target.view(torch.uint8), stored.view(torch.uint8))
    staging.close()
    assert staging._blocks == []


def test_an_error_of_a_read_leaves_the_memory_usable() -> None:
    def fail(offsets: Sequence[int], host: torch.Tensor) -> None:
        raise OSError("gone")

    staging, target = PinnedStaging(), torch.zeros(8)
    with pytest.raises(OSError, match="gone"):
        staging.copy(target, fail)
    staging.copy(target, lambda _, host: host.fill_(1))
    assert target.sum() == 8
