"""The file of recorded maxima: publish writes it, loads trust it only when it matches, verify checks it."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load as load_arrays

from storage.checkpoints.amax import AMAX_KEY, encode_amax, is_recorded, read_amax
from storage.checkpoints.checkpoint import open_model
from storage.checkpoints.checkpoint_files import JOURNAL_KEY
from storage.checkpoints.manifest import MANIFEST_KEY, Manifest, ManifestFile, parse_manifest
from storage.checkpoints.model_index import OtherFile, Tensor
from storage.checkpoints.safetensors_header import encode_header
from storage.checksum import digest_of
from storage.errors import (
    IntegrityError,
    InvalidAmax,
    LongshoreError,
    ManifestMismatch,
    ObjectChanged,
    StoreUnavailable,
)
from storage.publishing.publish import PublishReport, publish
from storage.publishing.signing import SigningKey
from storage.publishing.verify import verify
from storage.stores.local import LocalStore
from storage.stores.object_store import ByteRange, MemoryStore, ObjectStore, read_bytes
from storage.stores.requests import RetryPolicy
from tests.support.checkpoints import safetensors_bytes, sharded_objects
from tests.support.faulty_stores import FailingStore, FlipByteStore, WrappedStore

MIB = 1 << 20
FAST = RetryPolicy(attempts=2, base_s=0.0)
PARTS = [
    [("0.weight", "BF16", (1024, 1000)), ("0.bias", "BF16", (1024,)), ("0.norm.weight", "BF16", (64,))],
    [("mlp.experts.up_proj", "F32", (3, 70, 40)), ("1.weight", "F16", (50, 5000)), ("tiny.weight", "F32", (9, 3))],
    [("ids.weight", "I64", (10, 64)), ("2.weight", "F32", (64, 48))],
]
NAMES = ["0.weight", "mlp.experts.up_proj", "1.weight", "2.weight"]
SHAPES = {name: shape for part in PARTS for name, _, shape in part if name in NAMES}
OBJECTS = sharded_objects(PARTS, seed=11)
SHARDS = [key for key in OBJECTS if key.endswith(".safetensors")]


def run(store: ObjectStore, dest: ObjectStore | None = None, *, amax: bool = True, **how: object) -> PublishReport:
    return publish(store, dest, chunk_bytes=MIB, policy=FAST, concurrency=4, amax=amax, **how)  # type: ignore[arg-type]


def data_of(store: ObjectStore, key: str) -> bytes:
    return read_bytes(store, key, ByteRange(0, store.stat(key).size_bytes))


def keys_of(store: ObjectStore) -> set[str]:
    return {info.key for info in store.list()}


@pytest.fixture(scope="module")
def published() -> MemoryStore:
    store = MemoryStore(OBJECTS)
    run(store)
    return store


def copied(store: MemoryStore) -> MemoryStore:
    return MemoryStore({info.key: data_of(store, info.key) for info in store.list()})


def listed(store: ObjectStore) -> OtherFile:
    return next(file for file in open_model(store).files if file.key == AMAX_KEY)


def test_the_file_has_every_row_of_every_weight(published: MemoryStore) -> None:
    """Read with the safetensors library, compared with numpy over the stored arrays."""
    recorded = load_arrays(data_of(published, AMAX_KEY))
    assert set(recorded) == set(NAMES)
    for key in SHARDS:
        for tensor in (each for each in open_model(published).tensors if each.name in NAMES):
            if open_model(published).shards[tensor.shard].key != key:
                continue
            raw = OBJECTS[key][tensor.start : tensor.end]
            if tensor.dtype == "BF16":
                values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[tensor.dtype])
            most = np.abs(values).reshape(tensor.shape).max(axis=-1).astype(np.float32)
            np.testing.assert_array_equal(recorded[tensor.name], most)


def test_the_manifest_lists_it_and_verify_reads_it(published: MemoryStore) -> None:
    report = verify(published)
    assert report.ok
    assert report.checked_files == 3
    manifest = parse_manifest(data_of(published, MANIFEST_KEY))
    assert [file.path for file in manifest.files] == sorted(["config.json", AMAX_KEY, "model.safetensors.index.json"])
    assert run(copied(published)).amax


def test_only_the_requested_weights_are_read(published: MemoryStore) -> None:
    store = WrappedStore(published)
    found = read_amax(store, listed(published), {name: SHAPES[name] for name in NAMES[1:3]})
    assert {name: rows.shape for name, rows in found.items()} == {"mlp.experts.up_proj": (3, 70), "1.weight": (50,)}
    assert store.read_bytes == published.stat(AMAX_KEY).size_bytes


def test_without_amax_nothing_is_recorded() -> None:
    store = MemoryStore(OBJECTS)
    assert not run(store, amax=False).amax
    assert keys_of(store) == {*OBJECTS, MANIFEST_KEY}


def test_publishing_again_reads_shards_only_for_missing_maxima() -> None:
    store = WrappedStore(MemoryStore(OBJECTS))
    run(store, amax=False)
    report = run(store)
    sizes = sum(len(OBJECTS[key]) for key in SHARDS)
    assert (report.read_bytes, report.resumed, report.unchanged, report.amax) == (sizes, len(OBJECTS), False, True)
    assert run(store).unchanged
    again = run(store, amax=False)
    assert (again.unchanged, again.amax, again.read_bytes) == (True, True, 0)
    assert verify(store).ok


def test_maxima_of_earlier_weights_are_removed() -> None:
    """A changed model that is published without maxima has none; published with them, it has its own."""
    store = MemoryStore(OBJECTS)
    run(store)
    store.put(SHARDS[2], safetensors_bytes(PARTS[2], seed=99))
    run(store, amax=False)
    assert keys_of(store) == {*OBJECTS, MANIFEST_KEY}
    run(store)
    before = data_of(store, AMAX_KEY)
    store.put(SHARDS[2], safetensors_bytes(PARTS[2], seed=98))
    run(store)
    assert data_of(store, AMAX_KEY) != before
    assert verify(store).ok


def test_lost_maxima_are_written_again() -> None:
    store = MemoryStore(OBJECTS)
    run(store)
    before = data_of(store, AMAX_KEY)
    store.delete(AMAX_KEY)
    assert not verify(store).ok
    assert run(store).resumed == len(OBJECTS)
    assert data_of(store, AMAX_KEY) == before
    store.delete(AMAX_KEY)
    assert not run(store, amax=False).amax
    assert verify(store).ok


@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("fails_at", [3, 6, 12, 16])
def test_an_interrupted_publish_gives_the_same_file(published: MemoryStore, copying: bool, fails_at: int) -> None:
    """The second run reads finished shards once more for the maxima, and never trusts them unread."""
    inner = MemoryStore(OBJECTS)
    dest = MemoryStore() if copying else None
    failing = FailingStore(
        inner, lambda key, _, number: key.startswith("model-") and number >= fails_at + 3, lambda: ObjectChanged("gone")
    )
    with pytest.raises(LongshoreError):
        publish(failing, dest, chunk_bytes=MIB, policy=FAST, concurrency=1, amax=True)
    where = inner if dest is None else dest
    assert JOURNAL_KEY in keys_of(where)
    assert MANIFEST_KEY not in keys_of(where)
    report = run(inner, dest)
    assert (report.resumed > 0) == (fails_at >= 12)
    assert data_of(where, AMAX_KEY) == data_of(published, AMAX_KEY)
    assert JOURNAL_KEY not in keys_of(where)
    assert verify(where).ok


def test_a_shard_that_reads_differently_is_not_published() -> None:
    inner = MemoryStore(OBJECTS)
    run(inner, amax=False)
    flipping = FlipByteStore(inner, SHARDS[0], len(OBJECTS[SHARDS[0]]) - 1, lambda reading: True)
    with pytest.raises(IntegrityError, match="an earlier publish"):
        run(flipping)
    assert AMAX_KEY not in keys_of(inner)


def test_a_copy_has_maxima_of_its_own() -> None:
    source, dest = MemoryStore(OBJECTS), MemoryStore()
    run(source)
    run(source, dest, amax=False)
    assert AMAX_KEY not in keys_of(dest)
    run(source, dest)
    assert data_of(dest, AMAX_KEY) == data_of(source, AMAX_KEY)
    assert verify(dest).ok


def test_a_signed_manifest_covers_the_maxima() -> None:
    key = SigningKey.generate()
    store = MemoryStore(OBJECTS)
    run(store, sign_key=key)
    assert verify(store, trusted_keys=[key.public]).ok
    recorded = bytearray(data_of(store, AMAX_KEY))
    recorded[-1] ^= 1
    store.put(AMAX_KEY, bytes(recorded))
    report = verify(store, trusted_keys=[key.public])
    assert (report.ok, report.bad_files) == (False, (AMAX_KEY,))
    with pytest.raises(IntegrityError):
        read_amax(store, listed(store), SHAPES)


def test_a_large_file_is_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.publishing.publish.PIECE_BYTES", 1000)
    store = WrappedStore(MemoryStore(OBJECTS))
    run(store)
    assert "upload" in store.requests
    assert verify(store).ok


def republished(store: MemoryStore, data: bytes) -> MemoryStore:
    """With other maxima, listed by a manifest that is sound."""
    found = copied(store)
    found.put(AMAX_KEY, data)
    manifest = parse_manifest(data_of(store, MANIFEST_KEY))
    entry = {file.path: file for file in manifest.files}
    files = [
        *(file for path, file in entry.items() if path != AMAX_KEY),
        ManifestFile(
            **entry[AMAX_KEY].model_dump() | {"size_bytes": len(data), "digest": digest_of(manifest.hash, data).hex()}
        ),
    ]
    changed = Manifest.build(
        hash_name=manifest.hash,
        chunk_bytes=manifest.chunk_bytes,
        shards=manifest.shards,
        tensors=manifest.tensors,
        files=sorted(files, key=lambda file: file.path),
    )
    found.put(MANIFEST_KEY, changed.to_json())
    return found


def rows_of(store: MemoryStore) -> dict[str, np.ndarray]:
    return read_amax(store, listed(store), SHAPES)


def test_verify_reports_maxima_that_do_not_match_the_bytes(published: MemoryStore) -> None:
    rows = rows_of(published)
    rows["1.weight"] = rows["1.weight"].copy()
    rows["1.weight"][7] = 0.5
    store = republished(published, encode_amax(rows.items()))
    report = verify(store)
    assert not report.ok
    (bad,) = report.bad_tensors
    assert (bad.key, bad.name, bad.published) == (AMAX_KEY, "1.weight", "0.5 as the largest value of row 7")
    store.put(SHARDS[1], OBJECTS[SHARDS[1]][:-1] + b"\x55")  # a bad chunk already explains it, so it is reported once
    assert not verify(store).bad_tensors


BROKEN = {
    "no header": lambda rows: b"x" * 40,
    "empty": lambda rows: b"",
    "cut short": lambda rows: encode_amax(rows.items())[:-4],
    "no maxima": lambda rows: encode_amax([]),
    "another format": lambda rows: (
        encode_header([(n, "F32", r.shape) for n, r in rows.items()]) + b"\0" * 4 * sum(r.size for r in rows.values())
    ),
    "another shape": lambda rows: encode_amax((n, r[..., 1:]) for n, r in rows.items()),
    "below zero": lambda rows: encode_amax((n, -r - 1) for n, r in rows.items()),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_malformed_file_is_a_typed_error(published: MemoryStore, what: str) -> None:
    """This also holds when a sound manifest lists it."""
    rows = {name: np.nan_to_num(found, nan=1.0, posinf=2.0) for name, found in rows_of(published).items()}
    store = republished(published, BROKEN[what](rows))
    with pytest.raises(InvalidAmax) as error:
        read_amax(store, listed(store), SHAPES)
    assert str(error.value).isprintable()
    report = verify(store)
    assert [bad.key for bad in report.bad_tensors] == [AMAX_KEY] * len(report.bad_tensors)
    assert not report.ok


def test_missing_resized_and_unlisted_files_are_typed_errors(published: MemoryStore) -> None:
    store, file = copied(published), listed(published)
    with pytest.raises(InvalidAmax):
        read_amax(store, replace(file, digest=None), SHAPES)
    store.put(AMAX_KEY, data_of(store, AMAX_KEY) + b"x")
    with pytest.raises(ManifestMismatch, match="published with"):
        read_amax(store, file, SHAPES)
    store.delete(AMAX_KEY)
    with pytest.raises(ManifestMismatch, match="is missing"):
        read_amax(store, file, SHAPES)
    failing = FailingStore(published, lambda *_: True)
    with pytest.raises(StoreUnavailable):
        read_amax(failing, file, SHAPES, FAST)


def test_memory_depends_only_on_the_requested_weights() -> None:
    """The file has a hundred thousand rows; one weight of ten is read."""
    rows = [(f"{number}.weight", np.ones(1_000_000, np.float32)) for number in range(12)]
    data = encode_amax([*rows, ("small.weight", np.ones(10, np.float32))])
    store = MemoryStore({AMAX_KEY: data})
    file = OtherFile(AMAX_KEY, len(data), f"xxh3_128:{digest_of('xxh3_128', data).hex()}")
    tracemalloc.start()
    try:
        found = read_amax(store, file, {"small.weight": (10, 64)})
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["small.weight"].tolist() == [1.0] * 10
    assert peak_bytes < 26 * MIB < len(data)


def test_publishing_holds_one_number_a_row_and_a_few_chunks(tmp_path: Path) -> None:
    """The tensor has 24 MiB; some rows span chunks and some chunks span rows."""
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes([("a.weight", "BF16", (40, 314_573))]))
    store = LocalStore(tmp_path)
    tracemalloc.start()
    try:
        publish(store, chunk_bytes=MIB, concurrency=2, amax=True)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 6 * MIB
    assert verify(store).ok


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "recorded"),
    [
        ("layers.0.down_proj.weight", "BF16", (8, 32), True),
        ("layers.0.down_proj.weight", "BF16", (8, 31), False),
        ("layers.0.down_proj.weight", "I8", (8, 32), False),
        ("layers.0.down_proj.weight", "F8_E4M3", (8, 32), False),
        ("layers.0.down_proj.bias", "BF16", (8, 32), False),
        ("norm.weight", "BF16", (32,), False),
        ("mlp.experts.down_proj", "F16", (2, 8, 32), True),
        ("mlp.experts.down_proj_bias", "F16", (2, 8, 32), False),
        ("conv.weight", "F32", (2, 8, 32), False),
    ],
)
def test_option_decides_whether_maxima_are_recorded(
    name: str, dtype: str, shape: tuple[int, ...], recorded: bool
) -> None:
    assert is_recorded(Tensor(name, dtype, shape, 0, 0, 1)) is recorded
