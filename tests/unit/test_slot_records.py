"""A slot record survives a write that was cut anywhere, and keys distinguish chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.arena.slots import (
    COPY_BYTES,
    FREE_RECORD,
    KEY_BYTES,
    MemoryJournal,
    SlotRecord,
    SlotState,
    digest_key,
    location_key,
    pack_copy,
    unpack_copy,
)
from storage.host.processes import ProcessId
from storage.stores.object_store import ByteRange

keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES).filter(any)
processes = st.builds(ProcessId, st.integers(1, 2**31), st.integers(0, 2**63))
records = st.builds(
    SlotRecord,
    st.sampled_from(SlotState),
    st.integers(0, 2**60),
    st.integers(0, 2**60),
    st.just(b"") | keys,
    st.none() | processes,
)


@given(st.integers(1, 2**60), records)
def test_a_copy_reads_back_as_written(sequence, record):
    data = pack_copy(sequence, record)
    assert len(data) == COPY_BYTES
    assert unpack_copy(data) == (sequence, record)


@given(st.integers(1, 2**60), records, records, st.integers(0, COPY_BYTES))
def test_a_torn_record_is_old_new_or_detected(sequence, old, new, written):
    before, after = pack_copy(sequence, old), pack_copy(sequence + 2, new)
    torn = unpack_copy(after[:written] + before[written:])
    assert torn in (None, (sequence, old), (sequence + 2, new))


@given(st.integers(1, 2**60), records, st.integers(0, 8 * 80 - 1))
def test_a_flipped_bit_is_noticed(sequence, record, bit):
    data = bytearray(pack_copy(sequence, record))
    data[bit // 8] ^= 1 << bit % 8
    assert unpack_copy(bytes(data)) != (sequence, record)


def test_fresh_memory_is_a_free_slot():
    assert unpack_copy(bytes(COPY_BYTES)) == (0, FREE_RECORD)


def test_a_key_of_another_length_is_refused():
    with pytest.raises(ValueError, match="32 bytes"):
        pack_copy(1, SlotRecord(key=b"short"))


def test_keys_differ_where_any_part_differs():
    made = [
        digest_key("blake3", b"\1" * 32, 8),
        digest_key("blake3", b"\2" * 32, 8),
        digest_key("xxh3_128", b"\1" * 32, 8),
        digest_key("blake3", b"\1" * 32, 9),
        location_key("s3://b", "k", "e", ByteRange(0, 8)),
        location_key("s3://b", "ke", "", ByteRange(0, 8)),
        location_key("s3://bk", "", "e", ByteRange(0, 8)),
        location_key("s3://b", "k", "e", ByteRange(0, 9)),
        location_key("s3://b", "k", "f", ByteRange(0, 8)),
    ]
    assert len(set(made)) == len(made)
    assert {len(key) for key in made} == {KEY_BYTES}


def test_journals_have_unique_names_and_outlive_their_writer():
    one, two = MemoryJournal(2), MemoryJournal(2)
    assert one.epoch != two.epoch
    record = SlotRecord(SlotState.COMMITTED, 3, 5, b"k" * KEY_BYTES)
    one.write_record(1, record)
    assert one.records() == (FREE_RECORD, record)
