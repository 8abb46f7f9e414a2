"""Tensors by the suffixes of their names, compared byte for byte."""

from __future__ import annotations

import torch


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes, shapes and bytes: NaN is itself, and zeros have their signs."""
    assert found.keys() == expected.keys()
    for suffix, tensor in expected.items():
        assert found[suffix].dtype == tensor.dtype, suffix
        assert found[suffix].shape == tensor.shape, suffix
        assert torch.equal(found[suffix].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), suffix
