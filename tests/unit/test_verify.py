"""Verifying: every bad chunk is in the report with its place, and nothing else is."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.checkpoints.checkpoint import open_model
from storage.checkpoints.manifest import MANIFEST_KEY, Manifest, parse_manifest
from storage.checkpoints.model_index import Tensor
from storage.errors import InvalidHeader, InvalidManifest, NotACheckpoint, StoreUnavailable
from storage.publishing.publish import publish
from storage.publishing.verify import NOT_PUBLISHED, VerifyProgress, WrongSize, verify
from storage.stores.object_store import ByteRange, MemoryStore, read_bytes
from storage.stores.requests import RetryPolicy
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


def test_an_unchanged_model_is_ok(store: MemoryStore) -> None:
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
    with pytest.raises(NotACheckpoint, match="does not list that file"):
        verify(store, only_key="x.safetensors")


def test_an_unpublished_model_is_not_ok() -> None:
    report = verify(MemoryStore(OBJECTS))
    assert (report.ok, report.source, report.checked_chunks) == (False, "headers", 0)
    assert report.notes == (NOT_PUBLISHED,)
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


def rewrite(store: MemoryStore, **changes: Any) -> None:
    """Another manifest that holds together, in place of the one that is there."""
    data = read_bytes(store, MANIFEST_KEY, ByteRange(0, store.stat(MANIFEST_KEY).size_bytes))
    old = parse_manifest(data)
    fields: dict[str, Any] = {"shards": old.shards, "tensors": old.tensors, "files": old.files, **changes}
    store.put(MANIFEST_KEY, Manifest.build(hash_name=old.hash, chunk_bytes=old.chunk_bytes, **fields).to_json())


def tensors_of(store: MemoryStore) -> list[Tensor]:
    data = read_bytes(store, MANIFEST_KEY, ByteRange(0, store.stat(MANIFEST_KEY).size_bytes))
    return list(parse_manifest(data).tensors)


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"dtype": "F16"}, {"shape": (1000, 1024)}, {"shape": (2, 512, 1000)}]
)
def test_tensors_are_compared_with_the_header(store: MemoryStore, change: dict[str, Any]) -> None:
    tensors = tensors_of(store)
    tensors[1] = replace(tensors[1], **change)
    rewrite(store, tensors=tensors)
    report = verify(store)
    assert not report.ok
    assert {bad.key for bad in report.bad_tensors} == {KEYS[1]}
    assert {bad.name for bad in report.bad_tensors} == {"1.w", change.get("name", "1.w")}
    assert (report.bad_chunks, report.bad_shards, report.bad_files) == ((), (), ())


def test_a_shard_is_compared_as_a_whole_too(store: MemoryStore) -> None:
    data = read_bytes(store, MANIFEST_KEY, ByteRange(0, store.stat(MANIFEST_KEY).size_bytes))
    shards = list(parse_manifest(data).shards)
    shards[2] = shards[2].model_copy(update={"digest": "00" * 32})
    rewrite(store, shards=shards)
    report = verify(store)
    assert (report.ok, report.bad_shards, report.bad_chunks, report.bad_tensors) == (False, (KEYS[2],), (), ())


def test_a_header_in_a_bad_chunk_is_listed_once(store: MemoryStore) -> None:
    damaged = bytearray(OBJECTS[KEYS[0]])
    damaged[20] ^= 1
    store.put(KEYS[0], bytes(damaged))
    report = verify(store)
    assert [(bad.key, bad.start) for bad in report.bad_chunks] == [(KEYS[0], 0)]
    assert (report.bad_tensors, report.bad_shards) == ((), ())
