"""Batches of a rank's tensors: each is bounded, and together they are every tensor, once and in order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.user_values import BATCH_BYTES, ENTRY_BYTES, Cursor, Entry, TensorBatch, cut_batch, tensors


def batches_of(stored: list[bytes], most_bytes: int) -> Iterator[TensorBatch]:
    """Yield the answers of a worker, one call after another."""
    sizes = [len(data) for data in stored]
    after: Cursor | None = Cursor()
    while after is not None:
        parts, after = cut_batch(sizes[after.tensor :], after, most_bytes)
        data = b"".join(stored[part.tensor][part.offset : part.offset + part.size_bytes] for part in parts)
        entries = tuple(
            Entry(f"t{part.tensor}", "uint8", (sizes[part.tensor],), sizes[part.tensor], part.offset, part.size_bytes)
            for part in parts
        )
        yield TensorBatch(entries, np.frombuffer(data, np.uint8), after)


@given(st.lists(st.binary(max_size=900)), st.integers(1, 3000))
def test_batches_are_bounded_and_bring_every_byte_once_in_order(stored: list[bytes], most_bytes: int) -> None:
    pytest.importorskip("torch")
    batches = list(batches_of(stored, most_bytes))
    found = [(name, tensor.numpy().tobytes()) for name, tensor in tensors(batches)]
    assert found == [(f"t{number}", data) for number, data in enumerate(stored)]
    for batch in batches:
        size_bytes = len(batch.data) + ENTRY_BYTES * len(batch.entries)
        assert size_bytes <= most_bytes or (len(batch.entries) == 1 and len(batch.data) <= 1)
        assert batch.entries or not stored  # every batch brings something


def test_small_tensors_come_many_at_once() -> None:
    parts, after = cut_batch([1000] * 3000, Cursor(), BATCH_BYTES)
    assert (len(parts), after) == (3000, None)


def test_a_large_tensor_comes_in_few_batches() -> None:
    count, after = 0, Cursor()
    while after is not None:
        _, after = cut_batch([10 * BATCH_BYTES][after.tensor :], after, BATCH_BYTES)
        count += 1
    assert count == 11
