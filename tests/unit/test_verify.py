"""Verifying: every bad chunk is in the report with its place, and nothing else is."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.checkpoint import open_model
from storage.errors import InvalidHeader, InvalidManifest, NotACheckpoint, StoreUnavailable
from storage.manifest import MANIFEST_KEY
from storage.object_store import MemoryStore, read_bytes
from storage.publish import publish
from storage.ranges import ByteRange
from storage.retrying import RetryPolicy
from storage.verify import VerifyProgress, WrongSize, verify
from tests.support.checkpoints import sharded_objects
from tests.support.faulty_stores import FailingStore, WrappedStore

MIB = 1 << 20
FAST = RetryPolicy(attempts=3, base_s=0.0)
KEYS = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
OBJECTS = sharded_objects([[(f"{n}.w", "BF16", (1024, 1000))] for n in range(3)], seed=5)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore(OBJECTS)
    publish(store, chunk_bytes=MIB, policy=FAST)
    return store


def test_what_is_as_published_is_ok(store: MemoryStore) -> None:
    counting = WrappedStore(store)
    seen: list[VerifyProgress] = []
    report = verify(counting, progress=seen.append)
    index = open_model(store)
    assert report.ok
    assert (report.source, report.revision, report.hash_name) == ("manifest", index.revision, "blake3")
    assert (report.checked_chunks, report.checked_files) == (len(index.chunks), 2)
    assert report.checked_bytes == sum(map(len, OBJECTS.values())) == seen[-1].done_bytes == seen[-1].total_bytes
    assert report.as_dict()["bad_chunks"] == ()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sets(st.tuples(st.sampled_from(KEYS), st.integers(0, len(OBJECTS[KEYS[0]]) - 1)), max_size=4))
def test_exactly_the_chunks_with_a_changed_byte_are_bad(store: MemoryStore, places: set[tuple[str, int]]) -> None:
    index = open_model(store)
    damaged = {key: bytearray(OBJECTS[key]) for key in KEYS}
    for key, offset in places:
        damaged[key][offset] ^= 0x40
    copy = MemoryStore(
        {
            info.key: bytes(damaged.get(info.key) or read_bytes(store, info.key, ByteRange(0, info.size_bytes)))
            for info in store.list()
        }
    )
    expected = {
        chunk
        for chunk in range(len(index.chunks))
        for key, offset in places
        if index.shards[index.chunks.shard[chunk]].key == key
        and index.chunks.start[chunk] <= offset < index.chunks.end[chunk]
    }
    report = verify(copy)
    assert {bad.chunk for bad in report.bad_chunks} == expected
    assert report.ok == (not expected)
    for bad in report.bad_chunks:
        place = index.chunks.byte_range(bad.chunk)
        assert (bad.start, bad.end) == (place.start, place.end)
        assert bad.key == index.shards[index.chunks.shard[bad.chunk]].key
        assert bad.expected == (index.chunks.digest(bad.chunk) or b"").hex()
        assert bad.found != bad.expected


def test_missing_resized_and_changed_files_are_listed(store: MemoryStore) -> None:
    store.delete(KEYS[0])
    store.put(KEYS[1], OBJECTS[KEYS[1]] + b"x")
    store.put("config.json", OBJECTS["config.json"].replace(b"odd", b"ODD"))
    report = verify(store)
    assert not report.ok
    assert report.missing == (KEYS[0],)
    assert report.wrong_size == (WrongSize(KEYS[1], len(OBJECTS[KEYS[1]]), len(OBJECTS[KEYS[1]]) + 1),)
    assert report.bad_files == ("config.json",)
    assert report.bad_chunks == ()


def test_one_shard_alone(store: MemoryStore) -> None:
    store.put(KEYS[0], OBJECTS[KEYS[0]][:-1] + b"\x00")
    assert verify(store, only_key=KEYS[1]).ok
    assert len(verify(store, only_key=KEYS[0]).bad_chunks) == 1
    with pytest.raises(NotACheckpoint, match="does not name that file"):
        verify(store, only_key="x.safetensors")


def test_without_a_manifest_it_says_what_it_could_not_check() -> None:
    report = verify(MemoryStore(OBJECTS))
    assert (report.ok, report.source, report.checked_chunks) == (True, "headers", 0)
    assert "no manifest" in report.notes[0]
    with pytest.raises(InvalidHeader):
        verify(MemoryStore({**OBJECTS, KEYS[0]: OBJECTS[KEYS[0]][:-1]}))


def test_a_broken_manifest_and_a_dead_store_are_errors(store: MemoryStore) -> None:
    with pytest.raises(InvalidManifest):
        verify(MemoryStore({**OBJECTS, MANIFEST_KEY: b"{}"}))
    dead = FailingStore(store, lambda key, r, number: key == KEYS[1])
    with pytest.raises(StoreUnavailable):
        verify(dead, policy=FAST)


def test_passing_faults_are_retried(store: MemoryStore) -> None:
    shaky = FailingStore(store, lambda key, r, number: number % 4 == 0)
    assert verify(shaky, policy=RetryPolicy(attempts=20, base_s=0.0)).ok
