"""Publishing checks its reads, reports problems, resumes, and never publishes damaged bytes."""

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from storage.checkpoints.checkpoint import open_model
from storage.checkpoints.checkpoint_files import JOURNAL_KEY
from storage.checkpoints.manifest import MANIFEST_KEY, parse_manifest
from storage.checkpoints.safetensors_header import encode_header
from storage.checksum import digest_of
from storage.errors import (
    IntegrityError,
    LongshoreError,
    NewerManifest,
    NotACheckpoint,
    ObjectChanged,
    PublishError,
    StoreUnavailable,
)
from storage.publishing.publish import PublishProgress, PublishReport, publish
from storage.publishing.verify import verify
from storage.stores.local import LocalStore
from storage.stores.object_store import ByteRange, MemoryStore, ObjectInfo, ObjectStore, read_bytes
from storage.stores.requests import RetryPolicy
from tests.support.checkpoints import odd_objects, safetensors_bytes, sharded_objects, write_objects
from tests.support.faulty_stores import FailingStore, FlipByteStore, NoListStore, WrappedStore


class ReplaceMidwayStore(WrappedStore):
    """A store that replaces an object by other bytes of the same length before the n-th read."""

    def __init__(self, inner: ObjectStore, key: str, data: bytes, before_read: int) -> None:
        super().__init__(inner)
        self.key, self.data, self.before_read = key, data, before_read

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        with self.lock:
            due = len(self.reads) + 1 == self.before_read
        if due:
            self.inner.put(self.key, self.data)
        return super().read_into(key, byte_range, buffer, etag=etag)


class ChecksumStore(WrappedStore):
    """A store whose `stat` has whole-object checksums, as S3 does; those of `damaged` keys are of other bytes."""

    def __init__(self, inner: ObjectStore, *names: str, damaged: str = "") -> None:
        super().__init__(inner)
        self.names, self.damaged = names, damaged

    def stat(self, key: str) -> ObjectInfo:
        info = super().stat(key)
        data = bytearray(info.size_bytes)
        self.inner.read_into(key, ByteRange(0, info.size_bytes), memoryview(data))
        if key == self.damaged:
            data[-1] ^= 1
        return replace(info, checksums={name: digest_of(name, data).hex() for name in self.names})


class DamagingStore(WrappedStore):
    """A store that changes one byte of each upload."""

    def __init__(self, inner: ObjectStore, key: str, offset: int) -> None:
        super().__init__(inner)
        self.key, self.offset = key, offset

    def stat(self, key: str) -> ObjectInfo:
        if key == self.key:
            info = self.inner.stat(key)
            data = bytearray(info.size_bytes)
            self.inner.read_into(key, ByteRange(0, info.size_bytes), memoryview(data))
            data[self.offset] ^= 1
            self.inner.put(key, bytes(data))
        return super().stat(key)


MIB = 1 << 20
FAST = RetryPolicy(attempts=3, base_s=0.0)
KEYS = [f"model-{n:05d}-of-00004.safetensors" for n in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """Four shards of about 2 MiB: a header and two or three chunks each."""
    return sharded_objects([[(f"{n}.w", "BF16", (1024, 1000)), (f"{n}.b", "F32", (50,))] for n in range(4)], seed=3)


def run(
    store: ObjectStore, dest: ObjectStore | None = None, *, force: bool = False, concurrency: int = 4
) -> PublishReport:
    return publish(store, dest, chunk_bytes=MIB, policy=FAST, force=force, concurrency=concurrency)


def keys_of(store: ObjectStore) -> set[str]:
    return {info.key for info in store.list()}


def check_digests(store: ObjectStore, objects: dict[str, bytes]) -> None:
    """Every digest of the manifest is what blake3 says of the very bytes."""
    size = store.stat(MANIFEST_KEY).size_bytes
    manifest = parse_manifest(read_bytes(store, MANIFEST_KEY, ByteRange(0, size)))
    for shard in manifest.shards:
        data = objects[shard.path]
        starts = (0, *shard.chunk_ends[:-1])
        assert shard.digest == blake3(data).hexdigest()
        assert list(shard.chunk_digests) == [
            blake3(data[start:end]).hexdigest() for start, end in zip(starts, shard.chunk_ends, strict=True)
        ]
    for file in manifest.files:
        assert file.digest == blake3(objects[file.path]).hexdigest()
    assert {entry.path for entry in (*manifest.shards, *manifest.files)} == set(objects)


def test_in_place_everything_is_read_twice(objects: dict[str, bytes]) -> None:
    store = WrappedStore(MemoryStore(objects))
    report = run(store)
    assert store.requests[-1] == "delete"  # the journal, last of all
    check_digests(store, objects)
    assert keys_of(store) == {*objects, MANIFEST_KEY}
    assert report.checks == {"read-twice": 6}
    assert report.read_bytes == 2 * sum(map(len, objects.values()))
    assert (report.shards, report.tensors, report.files) == (4, 8, 2)
    assert (report.copied_bytes, report.resumed, report.unchanged) == (0, 0, False)
    assert report.as_dict()["size_bytes"] == sum(len(objects[key]) for key in KEYS)


@pytest.mark.parametrize("names", [("crc64nvme",), ("sha256",), ("md5", "crc32c"), ("blake3-of-the-future", "md5")])
def test_the_stores_own_checksum_saves_the_second_reading(objects: dict[str, bytes], names: tuple[str, ...]) -> None:
    known = [name for name in names if "future" not in name]

    class Store(ChecksumStore):
        def stat(self, key: str):  # type: ignore[no-untyped-def]
            info = super().stat(key)
            info.checksums.update({name: "00" for name in names if name not in known})
            return info

    store = Store(MemoryStore(objects), *known)
    report = run(store)
    check_digests(store, objects)
    assert report.checks == {f"store:{known[-1]}": 6}
    assert report.read_bytes == sum(map(len, objects.values()))


def test_another_checksum_stops_the_publish(objects: dict[str, bytes]) -> None:
    store = ChecksumStore(MemoryStore(objects), "crc32c", damaged=KEYS[2])
    with pytest.raises(IntegrityError, match=f"crc32c.*{KEYS[2]}"):
        run(store)
    assert MANIFEST_KEY not in keys_of(store)


@pytest.mark.parametrize("reading", [1, 2])
def test_a_byte_that_reads_differently_is_named(objects: dict[str, bytes], reading: int) -> None:
    offset = len(objects[KEYS[1]]) - 5
    store = FlipByteStore(MemoryStore(objects), KEYS[1], offset, lambda number: number == reading)
    with pytest.raises(IntegrityError, match="two readings") as caught:
        run(store)
    details = caught.value.details
    assert details["key"] == KEYS[1]
    start, end = (int(text) for text in details["range"].strip("[)").split(","))
    assert start <= offset < end
    assert details["expected"] != details["found"]
    assert MANIFEST_KEY not in keys_of(store)


def test_a_damaged_copy_is_found_and_removed(objects: dict[str, bytes]) -> None:
    dest = DamagingStore(MemoryStore(uri="twin://dest"), KEYS[3], 1_500_000)
    with pytest.raises(IntegrityError, match="the copy differs") as caught:
        run(MemoryStore(objects), dest)
    assert (caught.value.details["key"], caught.value.details["chunk"]) == (KEYS[3], 2)
    assert not {MANIFEST_KEY, KEYS[3]} & keys_of(dest)


def test_a_copy_is_complete_and_verified(objects: dict[str, bytes]) -> None:
    source, dest = WrappedStore(MemoryStore(objects)), WrappedStore(MemoryStore(uri="twin://dest"))
    report = run(source, dest)
    check_digests(dest, objects)
    assert keys_of(dest) == {*objects, MANIFEST_KEY}
    assert keys_of(source) == set(objects)
    assert report.checks == {"read-twice+read-back": 6}
    assert report.copied_bytes == sum(map(len, objects.values()))
    assert report.uri == "twin://dest"
    assert {"put", "upload", "delete"}.isdisjoint(source.requests)
    assert verify(dest).ok


@pytest.mark.parametrize("copying", [False, True])
def test_a_second_publish_has_nothing_to_do(objects: dict[str, bytes], copying: bool) -> None:
    source = WrappedStore(MemoryStore(objects))
    dest = WrappedStore(MemoryStore(uri="twin://dest")) if copying else None
    first = run(source, dest)
    target = dest or source
    target.requests.clear()
    again = run(source, dest)
    assert again.unchanged
    assert (again.read_bytes, again.revision, again.chunks) == (0, first.revision, first.chunks)
    assert not {"put", "upload", "delete"} & set(target.requests)
    forced = run(source, dest, force=True)
    assert not forced.unchanged
    assert forced.read_bytes == first.read_bytes
    assert forced.revision == first.revision


@pytest.mark.parametrize("change", ["shard", "file", "new file", "other settings", "broken manifest"])
def test_changed_objects_are_published_again(objects: dict[str, bytes], change: str) -> None:
    store = MemoryStore(objects)
    first = run(store)
    if change == "shard":
        store.put(KEYS[0], objects[KEYS[0]][:-1] + b"\x01")
    elif change == "file":
        store.put("config.json", b"{}")
    elif change == "new file":
        store.put("tokenizer.json", b"{}")
    elif change == "broken manifest":
        store.put(MANIFEST_KEY, b"{")
    again = publish(store, chunk_bytes=2 * MIB if change == "other settings" else MIB, policy=FAST)
    assert not again.unchanged
    assert (again.revision == first.revision) == (change == "broken manifest")
    assert verify(store).ok


@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("finished", [1, 3])
def test_an_interrupted_publish_goes_on(objects: dict[str, bytes], copying: bool, finished: int) -> None:
    inner, target = MemoryStore(objects), MemoryStore(uri="twin://dest") if copying else None
    good = set(KEYS[:finished])
    # One reader, so that shards are finished in order; they are of the same size.
    broken = FailingStore(inner, lambda key, r, number: key in KEYS and key not in good and r.start > 0 and number > 8)
    with pytest.raises(StoreUnavailable):
        publish(broken, target, chunk_bytes=MIB, policy=FAST, concurrency=1)
    assert JOURNAL_KEY in keys_of(target or inner)
    assert MANIFEST_KEY not in keys_of(target or inner)
    store = WrappedStore(inner)
    report = publish(store, target, chunk_bytes=MIB, policy=FAST)
    assert report.resumed == finished
    read = {key for key, byte_range in store.reads if byte_range.start > 0}
    assert not read & good
    left = sum(len(data) for key, data in objects.items() if key not in good)
    assert report.read_bytes == left * (3 if copying else 2)
    assert JOURNAL_KEY not in keys_of(target or inner)
    check_digests(target or inner, objects)


def test_objects_changed_since_an_interruption_are_read_again(objects: dict[str, bytes]) -> None:
    store = MemoryStore(objects)
    broken = FailingStore(store, lambda key, r, number: key == KEYS[3] and r.start > 0)
    with pytest.raises(StoreUnavailable):
        publish(broken, chunk_bytes=MIB, policy=FAST, concurrency=1)
    changed = {**objects, KEYS[0]: objects[KEYS[0]][:-1] + b"\x01"}
    store.put(KEYS[0], changed[KEYS[0]])
    report = run(store)
    assert report.resumed == 2
    check_digests(store, changed)


@pytest.mark.parametrize("journal", [b"", b"{}", b"\xff", b'{"format":"longshore.publish","version":2}'])
def test_a_foreign_journal_is_ignored(objects: dict[str, bytes], journal: bytes) -> None:
    store = MemoryStore({**objects, JOURNAL_KEY: journal})
    assert run(store).resumed == 0
    check_digests(store, objects)


def test_a_journal_of_other_settings_is_ignored(objects: dict[str, bytes]) -> None:
    store = MemoryStore(objects)
    broken = FailingStore(store, lambda key, r, number: key == KEYS[3] and r.start > 0)
    with pytest.raises(StoreUnavailable):
        publish(broken, chunk_bytes=MIB, policy=FAST, concurrency=1)
    report = publish(store, hash_name="xxh3_128", chunk_bytes=MIB, policy=FAST)
    assert report.resumed == 0
    assert open_model(store).chunks.hash_name == "xxh3_128"


def test_passing_faults_are_retried(objects: dict[str, bytes]) -> None:
    seen: set[tuple[str, ByteRange]] = set()

    def first_time(key: str, byte_range: ByteRange, number: int) -> bool:
        fresh = (key, byte_range) not in seen
        seen.add((key, byte_range))
        return fresh

    store = FailingStore(MemoryStore(objects), first_time)
    run(store)
    check_digests(store.inner, objects)


@pytest.mark.parametrize("before_read", [8, 15])
def test_an_object_replaced_meanwhile_stops_the_publish(objects: dict[str, bytes], before_read: int) -> None:
    for key in (KEYS[0], KEYS[3]):  # read already, or not yet
        other = objects[key][:-1] + b"\x02"
        store = ReplaceMidwayStore(MemoryStore(objects), key, other, before_read)
        with pytest.raises(ObjectChanged) as caught:
            run(store, concurrency=1)
        assert caught.value.details["key"] == key
        assert MANIFEST_KEY not in keys_of(store)


def test_an_old_manifest_is_deleted_before_any_overwrite(objects: dict[str, bytes]) -> None:
    dest = MemoryStore(uri="twin://dest")
    run(MemoryStore(objects), dest)
    other = {**objects, KEYS[0]: objects[KEYS[0]][:-1] + b"\x01"}
    broken = FailingStore(MemoryStore(other), lambda key, r, number: key == KEYS[3] and r.start > 0)
    with pytest.raises(StoreUnavailable):
        run(broken, dest)
    assert MANIFEST_KEY not in keys_of(dest)


def test_the_destination_may_be_the_source(objects: dict[str, bytes]) -> None:
    store = MemoryStore(objects)
    assert run(store, WrappedStore(store)).copied_bytes == 0  # another connection to the same place
    assert keys_of(store) == {*objects, MANIFEST_KEY}


def test_two_places_may_have_the_same_name(objects: dict[str, bytes]) -> None:
    source, dest = MemoryStore(objects), MemoryStore()
    assert source.uri == dest.uri
    run(source, dest)
    check_digests(dest, objects)
    assert keys_of(source) == set(objects)


def test_weights_that_are_not_part_of_the_model_are_left_out(objects: dict[str, bytes]) -> None:
    more = {
        **objects,
        "pytorch_model.bin": b"\x80",
        "consolidated.safetensors": safetensors_bytes([("0.b", "F32", (50,))]),
        "1_Pooling/config.json": b"{}",
    }
    dest = MemoryStore(uri="twin://dest")
    report = run(MemoryStore(more), dest)
    assert report.skipped == ("consolidated.safetensors", "pytorch_model.bin")
    assert keys_of(dest) == {*objects, "1_Pooling/config.json", MANIFEST_KEY}


def test_names_that_no_manifest_can_have_are_skipped_and_listed(objects: dict[str, bytes]) -> None:
    store = MemoryStore({**objects, "a\nb.txt": b"1", "c:d.txt": b"2", "x" * 1025: b"3"})
    assert run(store).skipped == ("a\nb.txt", "c:d.txt", "x" * 1025)
    check_digests(store, objects)


def test_entries_that_are_not_files_are_skipped_and_listed(objects: dict[str, bytes], tmp_path: Path) -> None:
    write_objects(tmp_path, objects)
    (tmp_path / "sub").mkdir()
    for name in ("a\nb.txt", "back\\slash.txt", "sub/\x1b.json"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "nowhere.json").symlink_to("gone")
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "folder").symlink_to("sub")
    os.mkfifo(tmp_path / "pipe")
    expected = ("a\nb.txt", "back\\slash.txt", "folder", "loop.json", "nowhere.json", "pipe", "sub/\x1b.json")
    assert run(LocalStore(tmp_path)).skipped == expected
    again = run(LocalStore(tmp_path))
    assert (again.unchanged, again.skipped) == (True, expected)


@pytest.mark.parametrize("keys_sorted", [False, True])
def test_a_newer_manifest_is_replaced_only_by_force(objects: dict[str, bytes], keys_sorted: bool) -> None:
    document = {"format": "longshore.manifest", "version": 2, "revision": "r", "blocks": [[1, 2]]}
    newer = json.dumps(document, sort_keys=keys_sorted).encode()
    store = MemoryStore({**objects, MANIFEST_KEY: newer})
    dest = MemoryStore({MANIFEST_KEY: newer}, uri="twin://dest")
    for target in (None, dest):
        with pytest.raises(NewerManifest, match=r"version 2.*update Longshore"):
            run(store if target is None else MemoryStore(objects), target)
    assert read_bytes(store, MANIFEST_KEY, ByteRange(0, len(newer))) == newer
    assert keys_of(dest) == {MANIFEST_KEY}
    run(store, force=True)
    check_digests(store, objects)


@pytest.mark.parametrize("error", [ObjectChanged("gone"), KeyboardInterrupt()])
def test_finished_objects_are_saved_when_publish_is_stopped(objects: dict[str, bytes], error: BaseException) -> None:
    """However little time has passed since the last save."""
    store = MemoryStore(objects)

    def stop(moment: PublishProgress) -> None:
        if moment.key == KEYS[3]:
            raise error

    with pytest.raises(type(error)):
        publish(store, chunk_bytes=MIB, policy=FAST, concurrency=1, progress=stop)
    assert run(store).resumed == 3


def test_odd_checkpoints_and_empty_files() -> None:
    objects = {**odd_objects(), "empty.txt": b""}
    store, dest = MemoryStore(objects), MemoryStore(uri="twin://dest")
    run(store, dest)
    check_digests(dest, objects)
    assert open_model(dest).tensors == open_model(store).tensors


def test_one_file_can_be_published_alone(objects: dict[str, bytes]) -> None:
    store = MemoryStore(objects)
    report = publish(store, chunk_bytes=MIB, only_key=KEYS[1], policy=FAST)
    assert report.shards == 1
    assert [shard.key for shard in open_model(store).shards] == [KEYS[1]]


def test_a_source_that_cannot_list_can_be_copied(objects: dict[str, bytes]) -> None:
    dest = MemoryStore(uri="twin://dest")
    run(NoListStore(MemoryStore(objects)), dest)
    check_digests(dest, objects)


def test_progress_ends_at_the_total_and_never_falls(objects: dict[str, bytes]) -> None:
    seen: list[PublishProgress] = []
    publish(MemoryStore(objects), chunk_bytes=MIB, progress=seen.append)
    done = [moment.done_bytes for moment in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total_bytes == 2 * sum(map(len, objects.values()))
    assert {moment.key for moment in seen} == set(objects)


@pytest.mark.parametrize(
    "wrong", [{"hash_name": "md5"}, {"chunk_bytes": 1000}, {"chunk_bytes": 17 * MIB}, {"concurrency": 0}]
)
def test_invalid_arguments_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(PublishError, match=r"unknown hash|chunk_bytes|concurrency"):
        publish(MemoryStore(), **wrong)  # type: ignore[arg-type]


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(NotACheckpoint):
        publish(MemoryStore({"README.md": b""}))


def test_a_read_only_store_is_refused_before_any_read(objects: dict[str, bytes]) -> None:
    class ReadOnly(WrappedStore):
        def put(self, key: str, data: bytes):  # type: ignore[no-untyped-def]
            raise StoreUnavailable("read only")

    store = ReadOnly(MemoryStore(objects))
    with pytest.raises(LongshoreError, match="read only"):
        run(store)
    assert all(byte_range.start == 0 for _, byte_range in store.reads)


class HugeStore(MemoryStore):
    """One safetensors file whose tensor is made when it is read, and zero but for the first byte of a range."""

    def __init__(self, header: bytes, size_bytes: int) -> None:
        super().__init__({"model.safetensors": header})
        self.header, self.size_bytes = header, size_bytes

    def stat(self, key: str) -> ObjectInfo:
        info = super().stat(key)
        return replace(info, size_bytes=self.size_bytes) if key == "model.safetensors" else info

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        if key != "model.safetensors":
            return super().read_into(key, byte_range, buffer, etag=etag)
        front = self.header[byte_range.start : byte_range.end]
        buffer[: len(front)] = front
        if byte_range.start >= len(self.header):
            buffer[0] = byte_range.start % 251
        return etag


def test_memory_is_bounded_by_chunks_not_by_the_model() -> None:
    header = encode_header([("w", "U8", (64, MIB))])
    store = HugeStore(header, len(header) + 64 * MIB)
    tracemalloc.start()
    try:
        report = publish(store, chunk_bytes=MIB, concurrency=4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.chunks == 65
    assert peak < 12 * MIB


@pytest.mark.slow
def test_the_real_checkpoint_is_copied_and_verified(minilm_shards: Path, tmp_path: Path) -> None:
    """It goes from a folder to a bucket of a real S3 server, and loads from there."""
    from storage.store_ref import parse_uri
    from storage.stores.embedded_s3 import EmbeddedS3
    from storage.stores.open_store import open_store

    source = open_store(parse_uri(str(minilm_shards)))
    (tmp_path / "models").mkdir()
    with EmbeddedS3(tmp_path) as server:
        dest = open_store(parse_uri("s3://models/minilm", endpoint_url=server.endpoint_url), server.credentials())
        report = publish(source, dest, chunk_bytes=MIB)
        assert report.shards == 4
        assert report.tensors == 104
        assert verify(dest).ok
        assert publish(source, dest, chunk_bytes=MIB).unchanged
        path = tmp_path / "models" / "minilm" / "model-1.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        server.refresh()
        found = verify(dest)
        assert not found.ok
        (bad,) = found.bad_chunks
        assert bad.start <= len(data) // 2 < bad.end
        dest.close()
    source.close()


def test_a_folder_is_not_copied_onto_itself_by_another_name(tmp_path: Path) -> None:
    write_objects(tmp_path / "model", odd_objects())
    before = {path: path.stat().st_ino for path in (tmp_path / "model").iterdir()}
    (tmp_path / "link").symlink_to("model")
    report = publish(LocalStore(tmp_path / "model"), LocalStore(tmp_path / "link"), force=True)
    assert report.copied_bytes == 0
    assert verify(LocalStore(tmp_path / "model")).source == "manifest"
    assert {path: path.stat().st_ino for path in before} == before
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(
        [*(path.name for path in before), MANIFEST_KEY]
    )
