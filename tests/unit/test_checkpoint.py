"""Opening a model: with a manifest, without one, one file of it, on stores that cannot list."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize

from storage.checkpoints import checkpoint_files
from storage.checkpoints.checkpoint import check_revision, open_model, read_manifest, split_model_uri
from storage.checkpoints.manifest import MANIFEST_KEY, MAX_MANIFEST_BYTES
from storage.checkpoints.model_index import ModelIndex
from storage.errors import (
    AccessDenied,
    InvalidHeader,
    InvalidIndex,
    InvalidManifest,
    ManifestMismatch,
    NotACheckpoint,
    ObjectNotFound,
    PickleRefused,
    StoreUnavailable,
    UnsupportedStore,
)
from storage.publishing.publish import publish
from storage.publishing.signing import SigningKey
from storage.stores.object_store import ByteRange, MemoryStore, ObjectInfo
from storage.stores.requests import RetryPolicy
from tests.support.checkpoints import (
    INDEX_KEY,
    odd_objects,
    odd_parts,
    read_objects,
    safetensors_bytes,
    sharded_objects,
    write_tiny_llama,
)
from tests.support.faulty_stores import FailingStore, NoListStore, WrappedStore

MIB = 1 << 20
FAST = RetryPolicy(attempts=3, base_s=0.0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder, shards=3)
    return read_objects(folder)


def published(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore(objects)
    publish(store, chunk_bytes=MIB)
    return store


def check_whole(index: ModelIndex, objects: dict[str, bytes]) -> None:
    """Check that tensors match the reference and chunks tile every shard."""
    reference = {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for key, data in objects.items()
        if key.endswith(".safetensors")
        for name, tensor in deserialize(data)
    }
    ours = {t.name: (t.dtype, t.shape, objects[index.shards[t.shard].key][t.start : t.end]) for t in index.tensors}
    assert ours == reference
    for number, shard in enumerate(index.shards):
        rows = np.flatnonzero(index.chunks.shard == number)
        assert index.chunks.start[rows[0]] == 0
        assert index.chunks.end[rows[-1]] == shard.size_bytes == len(objects[shard.key])
        assert (index.chunks.start[rows[1:]] == index.chunks.end[rows[:-1]]).all()
    order = [(t.shard, t.start, t.end, t.name) for t in index.tensors]
    assert order == sorted(order)


def test_without_a_manifest_the_headers_are_read(llama: dict[str, bytes]) -> None:
    index = open_model(MemoryStore(llama), chunk_bytes=MIB)
    check_whole(index, llama)
    assert index.source == "headers"
    assert index.chunks.digests is None
    assert index.chunks.digest(0) is None
    assert [file.key for file in index.files] == ["config.json", INDEX_KEY]
    assert "no manifest" in index.notes[0]


def test_odd_checkpoints_open_both_ways() -> None:
    objects = odd_objects()
    derived = open_model(MemoryStore(objects), chunk_bytes=MIB)
    check_whole(derived, objects)
    assert {t.name for t in derived.tensors} == {name for part in odd_parts() for name, _, _ in part}
    assert open_model(published(objects)).tensors == derived.tensors


def test_with_a_manifest_it_is_read_first_and_nothing_is_listed(llama: dict[str, bytes]) -> None:
    store = WrappedStore(published(llama))
    index = open_model(store)
    check_whole(index, llama)
    assert index.source == "manifest"
    assert index.notes == ()
    assert store.requests[:2] == ["stat", "read_into"]
    assert store.requests[2:] == ["stat"] * len(llama)  # each object of the model, by name
    assert index.chunks.digests is not None
    assert len(index.chunks.digests) == len(index.chunks)


def test_copied_objects_are_pinned_to_their_new_versions(llama: dict[str, bytes]) -> None:
    class Copied(WrappedStore):
        def stat(self, key: str) -> ObjectInfo:
            return replace(super().stat(key), etag=f"new-{super().stat(key).etag}")

        def read_into(self, key, byte_range, buffer, *, etag=None):  # type: ignore[no-untyped-def]
            return super().read_into(key, byte_range, buffer, etag=(etag or "").removeprefix("new-") or None)

    index = open_model(Copied(published(llama)))
    assert all(shard.etag is not None and shard.etag.startswith("new-") for shard in index.shards)
    assert "another ETag" in index.notes[0]


def test_a_manifest_for_other_bytes_is_refused_with_a_list(llama: dict[str, bytes]) -> None:
    store = published(llama)
    first, second, _ = (key for key in llama if key.endswith(".safetensors"))
    store.put(first, llama[first] + b"x")
    store.delete(second)
    store.put("config.json", b"{ }")
    with pytest.raises(ManifestMismatch) as caught:
        open_model(store)
    assert f"'{first}' has {len(llama[first]) + 1} bytes, but was published with {len(llama[first])}" in str(
        caught.value
    )
    assert f"'{second}' is missing" in str(caught.value)


def test_other_files_that_changed_are_noted(llama: dict[str, bytes]) -> None:
    store = published(llama)
    store.put("config.json", b"{}")
    assert open_model(store).notes == ("other files have changed since they were published: 'config.json'",)


def test_broken_manifests_are_refused_not_ignored(llama: dict[str, bytes]) -> None:
    store = MemoryStore({**llama, MANIFEST_KEY: b"{}"})
    with pytest.raises(InvalidManifest, match="twin://memory"):
        open_model(store)
    with pytest.raises(InvalidManifest, match="at most"):
        read_manifest(store, ObjectInfo(MANIFEST_KEY, MAX_MANIFEST_BYTES + 1, None), FAST)


def test_one_file_of_a_folder_opens_alone(llama: dict[str, bytes]) -> None:
    keys = [key for key in llama if key.endswith(".safetensors")]
    for store in (MemoryStore(llama), published(llama)):
        index = open_model(store, only_key=keys[1], chunk_bytes=MIB)
        check_whole(index, {keys[1]: llama[keys[1]]})
        assert check_revision(store, index.revision, only_key=keys[1])
        assert not check_revision(store, index.revision)
        assert not check_revision(store, index.revision, only_key=keys[2])
    with pytest.raises(NotACheckpoint, match="no such file"):
        open_model(MemoryStore(llama), only_key="x.safetensors")


def test_expired_credentials_do_not_count_as_a_new_revision(llama: dict[str, bytes]) -> None:
    """This also holds for a single-file model, which is opened by name."""
    keys = [key for key in llama if key.endswith(".safetensors")]
    for only_key in (None, keys[1]):
        index = open_model(MemoryStore(llama), only_key=only_key)
        with pytest.raises(AccessDenied):
            check_revision(DeniedStore(MemoryStore(llama)), index.revision, only_key=only_key)


class DeniedStore(NoListStore):
    """A store from which nothing may be read."""

    def stat(self, key: str) -> ObjectInfo:
        raise AccessDenied("expired")

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        raise AccessDenied("expired")


def test_a_file_beside_the_published_ones_opens_by_its_header(llama: dict[str, bytes]) -> None:
    extra = safetensors_bytes([("x", "F32", (3,))])
    store = published(llama)
    store.put("extra.safetensors", extra)
    index = open_model(store, only_key="extra.safetensors")
    assert index.source == "headers"
    assert check_revision(store, index.revision, only_key="extra.safetensors")


@pytest.mark.parametrize("with_manifest", [False, True])
def test_the_revision_changes_when_the_model_does(llama: dict[str, bytes], with_manifest: bool) -> None:
    store = published(llama) if with_manifest else MemoryStore(llama)
    index = open_model(store)
    counting = WrappedStore(store)
    assert check_revision(counting, index.revision)
    assert counting.read_bytes < 200
    assert len(counting.requests) <= (1 if with_manifest else 2)
    key = index.shards[0].key
    store.put(key, llama[key][:-1] + b"\x00")
    if with_manifest:
        assert check_revision(store, index.revision)  # the digests will show it
        publish(store, chunk_bytes=MIB)
    assert not check_revision(store, index.revision)
    again = open_model(store)
    assert again.revision != index.revision
    assert check_revision(store, again.revision)


def test_a_foreign_manifest_does_not_match_the_revision(llama: dict[str, bytes]) -> None:
    store = MemoryStore({**llama, MANIFEST_KEY: b"\xff" * 500})
    assert not check_revision(store, "0" * 64)


@pytest.mark.parametrize("error", [AccessDenied, UnsupportedStore])
@pytest.mark.parametrize("with_manifest", [False, True])
def test_models_open_on_stores_that_cannot_list(
    llama: dict[str, bytes], with_manifest: bool, error: type[AccessDenied | UnsupportedStore]
) -> None:
    store = NoListStore(published(llama) if with_manifest else MemoryStore(llama), error)
    index = open_model(store, chunk_bytes=MIB)
    check_whole(index, llama)
    assert {file.key for file in index.files} == {"config.json", INDEX_KEY}
    assert check_revision(store, index.revision)
    key = next(key for key in llama if key.endswith(".safetensors"))
    check_whole(open_model(store, only_key=key), {key: llama[key]})
    with pytest.raises(AccessDenied if error is AccessDenied else NotACheckpoint):
        open_model(NoListStore(MemoryStore(), error))


class ReadOnlyByName(NoListStore):
    """A store like S3 with read but no list permission: a missing key is forbidden."""

    def stat(self, key: str) -> ObjectInfo:
        try:
            return super().stat(key)
        except ObjectNotFound:
            raise AccessDenied("403", key=key) from None

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        self.stat(key)
        return super().read_into(key, byte_range, buffer, etag=etag)


def test_missing_and_forbidden_look_alike_without_list_access(llama: dict[str, bytes]) -> None:
    store = ReadOnlyByName(MemoryStore(llama))
    index = open_model(store, chunk_bytes=MIB)
    check_whole(index, llama)
    assert check_revision(store, index.revision)
    published_one = ReadOnlyByName(published(llama))
    check_whole(open_model(published_one), llama)
    assert published_one.requests.count("list") == 0
    with pytest.raises(AccessDenied, match="the manifest is missing, or the credentials may not read it"):
        open_model(store, trusted_keys=[SigningKey.generate().public])
    shard = next(key for key in llama if key.endswith(".safetensors"))
    published_one.delete(shard)
    with pytest.raises(ManifestMismatch, match=f"'{shard}' is missing, or may not be read"):
        open_model(published_one)
    for nothing in ({}, {"x.safetensors": b""}):
        with pytest.raises(AccessDenied):
            open_model(ReadOnlyByName(MemoryStore(nothing)))


def test_a_root_with_too_many_objects_is_read_by_name(llama: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "MAX_LISTED", 3)
    check_whole(open_model(MemoryStore(llama), chunk_bytes=MIB), llama)


def test_temporary_faults_are_retried_and_lasting_ones_raised(llama: dict[str, bytes]) -> None:
    store = FailingStore(MemoryStore(llama), lambda key, r, number: number == 2)
    check_whole(open_model(store, policy=FAST), llama)
    broken = FailingStore(MemoryStore(llama), lambda key, r, number: True)
    with pytest.raises(StoreUnavailable):
        open_model(broken, policy=FAST)


def test_all_broken_headers_are_named(llama: dict[str, bytes]) -> None:
    keys = [key for key in llama if key.endswith(".safetensors")]
    broken = {**llama, keys[0]: b"\xff" * 100, keys[2]: llama[keys[2]][:-1]}
    with pytest.raises(InvalidHeader) as caught:
        open_model(MemoryStore(broken))
    assert keys[0] in str(caught.value)
    assert keys[2] in str(caught.value)
    with pytest.raises(InvalidHeader, match=f"key={keys[0]}"):
        open_model(MemoryStore({**llama, keys[0]: b"\xff" * 100}))


def test_missing_shards_of_the_index_are_listed(llama: dict[str, bytes]) -> None:
    keys = [key for key in llama if key.endswith(".safetensors")]
    store = MemoryStore({key: data for key, data in llama.items() if key != keys[1]})
    with pytest.raises(InvalidIndex, match=f"do not exist: '{keys[1]}'"):
        open_model(store)


def test_hostile_and_oversized_indexes_are_refused(llama: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = json.dumps({"weight_map": {"a": "../../secret.safetensors"}}).encode()
    store = WrappedStore(MemoryStore({**llama, INDEX_KEY: hostile}))
    with pytest.raises(InvalidIndex, match="hostile path"):
        open_model(store)
    assert [key for key, _ in store.reads] == [INDEX_KEY]
    monkeypatch.setattr("storage.checkpoints.checkpoint_files.MAX_INDEX_BYTES", 5)
    with pytest.raises(InvalidIndex, match="at most 5"):
        open_model(MemoryStore(llama))


def test_copies_in_another_layout_are_left_out_and_named() -> None:
    objects = sharded_objects([[("a", "U8", (4,))], [("b", "U8", (4,))]])
    objects["consolidated.safetensors"] = safetensors_bytes([("a", "U8", (4,)), ("b", "U8", (4,))])
    objects["pytorch_model.bin"] = b"\x80\x04."
    index = open_model(MemoryStore(objects))
    assert len(index.shards) == 2
    assert "'consolidated.safetensors'; 'pytorch_model.bin'" in index.notes[1]
    assert not any(file.key.endswith((".bin", ".safetensors")) for file in index.files)


def test_pickles_alone_are_refused() -> None:
    with pytest.raises(PickleRefused, match="convert"):
        open_model(MemoryStore({"pytorch_model.bin": b"\x80", "config.json": b"{}"}))
    with pytest.raises(NotACheckpoint):
        open_model(MemoryStore())


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://b/llama", ("s3://b/llama", None)),
        ("s3://b/llama/", ("s3://b/llama/", None)),
        ("s3://b/llama/model.safetensors", ("s3://b/llama", "model.safetensors")),
        ("s3://b/model.safetensors", ("s3://b", "model.safetensors")),
        ("s3://model.safetensors", ("s3://model.safetensors", None)),
        ("/data/m.safetensors", ("/data", "m.safetensors")),
        ("/m.safetensors", ("/", "m.safetensors")),
        ("file:///m.safetensors", ("file:///", "m.safetensors")),
        ("m.safetensors", (".", "m.safetensors")),
        ("models/llama", ("models/llama", None)),
        ("models/m.safetensors/", ("models/m.safetensors/", None)),
    ],
)
def test_uris_may_name_folders_or_files(uri: str, expected: tuple[str, str | None]) -> None:
    assert split_model_uri(uri) == expected


def test_a_real_checkpoint_opens_as_the_reference_reads_it(minilm_checkpoint: Path, minilm_shards: Path) -> None:
    """all-MiniLM-L6-v2: 104 tensors, stored in another order than their names'."""
    for folder in (minilm_checkpoint, minilm_shards):
        objects = {key: data for key, data in read_objects(folder).items() if key.endswith((".safetensors", ".json"))}
        index = open_model(MemoryStore(objects))
        check_whole(index, objects)
        assert len(index.tensors) == 104
