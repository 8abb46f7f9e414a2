"""The manifest: what is built reads back equal, and nothing that contradicts itself gets through the door."""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from storage.checkpoints import manifest
from storage.checkpoints import manifest as manifest_module
from storage.checkpoints.manifest import (
    Manifest,
    ManifestFile,
    ManifestShard,
    contents_digest,
    manifest_front,
    parse_manifest,
)
from storage.checkpoints.model_index import Tensor, chunk_bounds
from storage.checkpoints.safetensors_header import parse_header
from storage.checksum import DIGEST_SIZES
from storage.errors import InvalidManifest
from storage.problems import Problems
from tests.support.checkpoints import TensorSpec, safetensors_bytes, tensor_specs

MIB = 1 << 20


def build(parts: list[list[TensorSpec]], hash_name: str = "blake3", files: int = 1) -> Manifest:
    """A manifest of shards with those tensors, with made-up digests."""
    digest = "ab" * DIGEST_SIZES[hash_name]
    shards, tensors = [], []
    for number, part in enumerate(parts):
        data = safetensors_bytes([(f"{number}.{name}", dtype, shape) for name, dtype, shape in part])
        header = parse_header(data, len(data))
        ends = tuple(chunk_bounds(header, len(data), MIB))
        shards.append(
            ManifestShard(
                path=f"shard-{number:03d}.safetensors",
                size_bytes=len(data),
                etag="e",
                source_etag=None,
                checked_by="read-twice",
                digest=digest,
                chunk_ends=ends,
                chunk_digests=(digest,) * len(ends),
            )
        )
        tensors += [
            Tensor(name=t.name, dtype=t.dtype, shape=t.shape, shard=number, start=t.start, end=t.end)
            for t in header.tensors
        ]
    others = [
        ManifestFile(
            path=f"file-{i:03d}", size_bytes=i, etag=None, source_etag=None, checked_by="store:md5", digest=digest
        )
        for i in range(files)
    ]
    return Manifest.build(hash_name=hash_name, chunk_bytes=MIB, shards=shards, tensors=tensors, files=others)


PARTS: list[list[TensorSpec]] = [
    [("w", "BF16", (1024, 1024)), ("b", "F32", (3,)), ("none", "U8", (0,))],
    [("w", "F32", (8, 8))],
]


@cache
def sound_json() -> bytes:
    """The manifest that the tests below break."""
    return build(PARTS).to_json()


def altered(change: Callable[[dict[str, Any]], Any], *, sign: bool = True) -> bytes:
    """A sound manifest with one change; with `sign`, the revision is made to fit again where that can be done."""
    content = json.loads(sound_json())
    change(content)
    if sign:
        rest = {key: value for key, value in content.items() if key != "revision"}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        content["revision"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(content).encode()


@settings(max_examples=50)
@given(st.lists(tensor_specs(), min_size=1, max_size=3), st.sampled_from(["blake3", "xxh3_128"]), st.integers(0, 3))
def test_a_built_manifest_reads_back_equal(parts: list[list[TensorSpec]], hash_name: str, files: int) -> None:
    manifest = build(parts, hash_name, files)
    assert parse_manifest(manifest.to_json()) == manifest
    assert contents_digest(manifest) == manifest.revision
    assert manifest.to_json().startswith(manifest_front(manifest.revision))


def test_the_revision_is_the_digest_of_canonical_json() -> None:
    odd = [[('a"b\\\n\u00e9\u2028', "F32", (2, 3)), ("s", "BF16", ()), ("e", "U8", (0,))]]
    for built in (build(PARTS, files=2), build(odd), build([[]])):
        rest = built.model_dump(exclude={"revision"})
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert built.revision == hashlib.sha256(text.encode()).hexdigest()


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "cut", "insert", "drop"]), st.integers(0), st.sampled_from('"{}[],:1n'))
    ),
    st.lists(tensor_specs(), min_size=1, max_size=2),
    st.integers(1, 200),
)
def test_pieces_are_accepted_as_the_whole_text_is(
    changes: list[tuple[str, int, str]], parts: list[list[TensorSpec]], piece_bytes: int
) -> None:
    data = bytearray(build(parts).to_json())
    for kind, place, character in changes[:3]:
        at = place % len(data)
        if kind == "cut":
            del data[at : at + 40]
        elif kind == "drop":
            del data[at]
        else:
            data[at : at + (kind == "set")] = character.encode()
    try:
        whole: Manifest | None = Manifest.model_validate_json(bytes(data))
    except ValidationError:
        whole = None
    with patch.object(manifest_module, "_PIECE_BYTES", piece_bytes), patch.object(manifest_module, "_BATCH", 2):
        try:
            pieces: Manifest | None = manifest_module._validated(bytes(data))
        except ValidationError:
            pieces = None
        assert pieces == whole


small = st.integers(0, 3)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["U8", "?"]), small, small, small), max_size=4))
def test_quick_checks_find_problems_where_the_whole_check_does(rows: list[tuple[str, str, int, int, int]]) -> None:
    tensors = tuple(
        Tensor(name, dtype, (size,), shard, start, start + size) for name, dtype, size, shard, start in rows
    )
    changed = build([[], [], []]).model_copy(update={"tensors": tensors})
    shards = tuple(shard.model_copy(update={"size_bytes": 4}) for shard in changed.shards)
    changed = changed.model_copy(update={"shards": shards})
    quick, whole = Problems(), Problems()
    manifest_module._check_tensors(changed, quick)
    with patch.object(manifest_module, "_tensors_are_sound", return_value=False):
        manifest_module._check_tensors(changed, whole)
    assert list(quick) == list(whole)


def test_the_index_of_a_manifest_has_the_same_facts() -> None:
    manifest = build(PARTS)
    index = manifest.index()
    assert (index.revision, index.source) == (manifest.revision, "manifest")
    assert [(s.key, s.size_bytes, s.etag) for s in index.shards] == [
        (s.path, s.size_bytes, s.etag) for s in manifest.shards
    ]
    assert [t.name for t in index.tensors] == ["0.w", "0.b", "0.none", "1.w"]
    assert index.size_bytes == 2 * MIB + 12 + 256
    assert len(index.chunks) == sum(len(s.chunk_ends) for s in manifest.shards)
    assert index.chunks.digest(0) == bytes.fromhex("ab" * 32)
    assert index.chunks.byte_range(0).start == 0
    for number, shard in enumerate(manifest.shards):
        rows = index.chunks.shard == number
        assert index.chunks.end[rows].tolist() == list(shard.chunk_ends)
        assert index.chunks.sizes_bytes()[rows].sum() == shard.size_bytes
    assert index.files[0].digest == "blake3:" + "ab" * 32


def set_in(*path: Any) -> Callable[[dict[str, Any]], None]:
    """`set_in("shards", 0, "path", "x")` sets content["shards"][0]["path"] = "x"."""

    def change(content: Any) -> None:
        for step in path[:-2]:
            content = content[step]
        content[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            set_in("version", 2),
            "the manifest has version 2, this Longshore reads version 1 (version=2). update Longshore",
        ),
        (set_in("format", "other"), "not a Longshore manifest"),
        (set_in("hash", "md4"), "hash: Input should be 'blake3' or 'xxh3_128'"),
        (set_in("hash", "xxh3_128"), "not a xxh3_128 digest"),
        (set_in("chunk_bytes", 64 * MIB), "chunk_bytes"),
        (set_in("chunk_bytes", 1000), "chunk_bytes"),
        (set_in("extra", 1), "extra: Extra inputs are not permitted"),
        (set_in("shards", []), "no shards"),
        (set_in("shards", 0, "path", "../shard"), "not a relative path below the model: '../shard'"),
        (set_in("shards", 0, "path", "/etc/passwd"), "not a relative path below the model: '/etc/passwd'"),
        (set_in("files", 0, "path", "a/../../b"), "not a relative path below the model"),
        (set_in("files", 0, "path", "a\\b"), "not a relative path below the model"),
        (set_in("files", 0, "path", "a\x1b[0m"), "unsafe characters"),
        (set_in("files", 0, "path", "s3://b"), "not a relative path below the model"),
        (set_in("files", 0, "path", "c:x"), "unsafe characters"),
        (set_in("files", 0, "path", "x" * 2000), "at most 1024 characters"),
        (set_in("files", 0, "path", "longshore.manifest.json"), "the manifest lists itself"),
        (set_in("files", 0, "path", "shard-000.safetensors"), "both a shard and another file"),
        (set_in("shards", 1, "path", "shard-000.safetensors"), "out of order or twice"),
        (set_in("shards", 0, "size_bytes", 5), "chunks do not tile its 5 bytes"),
        (set_in("shards", 0, "chunk_ends", 0, 0), "chunks do not tile"),
        (set_in("shards", 0, "chunk_ends", 1, 9 * MIB), "chunks do not tile"),
        (set_in("shards", 0, "chunk_ends", []), "0 chunks and"),
        (set_in("shards", 0, "chunk_digests", []), "and 0 chunk digests"),
        (set_in("shards", 0, "chunk_digests", 0, "ab"), "a digest is not a blake3 digest"),
        (set_in("shards", 0, "chunk_digests", 0, "zz" * 32), "String should match pattern"),
        (set_in("shards", 0, "checked_by", "trust me"), "checked_by"),
        (set_in("tensors", 0, "shard", 7), "shard 7 of 2"),
        (set_in("tensors", 1, "end", 2**40), "of 2097"),
        (set_in("tensors", 0, "dtype", "F99"), "unknown dtype 'F99'"),
        (set_in("tensors", 0, "shape", [1000, 3]), "bytes stored"),
        (set_in("tensors", 0, "shape", [2**62, 2**62]), "elements"),
        (set_in("tensors", 0, "shape", [1] * 65), "65 dimensions"),
        (set_in("tensors", 0, "shape", [-1]), "greater than or equal to 0"),
        (set_in("tensors", 1, "name", "1.w"), "tensor '1.w' twice"),
        (set_in("tensors", 0, "start", "1"), "valid integer"),
        (lambda c: c["tensors"].reverse(), "out of order"),
    ],
)
def test_contradictions_are_reported(change: Callable[[dict[str, Any]], Any], said: str) -> None:
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(altered(change))
    assert said in str(caught.value)


def test_a_chunk_larger_than_declared_is_refused() -> None:
    def merge(content: dict[str, Any]) -> None:
        shard = content["shards"][0]
        shard["chunk_ends"] = shard["chunk_ends"][:1] + shard["chunk_ends"][2:]
        shard["chunk_digests"].pop()

    with pytest.raises(InvalidManifest, match="a chunk of 2097152 bytes, more than 1048576"):
        parse_manifest(altered(merge))


def test_overlapping_tensors_are_refused() -> None:
    def overlap(content: dict[str, Any]) -> None:
        tensor = content["tensors"][-2]  # the last of the first shard
        tensor["start"] -= 4
        tensor["end"] -= 4

    with pytest.raises(InvalidManifest, match="overlaps"):
        parse_manifest(altered(overlap))


def test_a_changed_manifest_has_another_revision() -> None:
    with pytest.raises(InvalidManifest, match="the revision does not match the contents"):
        parse_manifest(altered(set_in("shards", 0, "chunk_digests", 0, "00" * 32), sign=False))


def test_all_problems_are_listed_at_once() -> None:
    def change(content: dict[str, Any]) -> None:
        content["tensors"][0]["dtype"] = "X"
        content["shards"][1]["chunk_digests"] = []
        content["files"][0]["path"] = "longshore.manifest.json"

    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(altered(change))
    assert all(said in str(caught.value) for said in ("'X'", "0 chunk digests", "lists itself"))


@settings(max_examples=200)
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_bytes_are_refused_without_a_crash(data: bytes) -> None:
    with pytest.raises(InvalidManifest):
        parse_manifest(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200)
@given(st.data())
def test_any_value_anywhere_gives_a_manifest_or_an_error(data: st.DataObject) -> None:
    content: Any = json.loads(sound_json())
    place: Any = content
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        deeper = place[key]
        if not isinstance(deeper, dict | list) or not deeper or data.draw(st.booleans()):
            place[key] = data.draw(json_values)
            break
        place = deeper
    try:
        parse_manifest(json.dumps(content).encode())
    except InvalidManifest as error:
        said = str(error)
    else:
        said = ""
    assert said.isprintable()
    assert len(said) < 20_000


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"shards":' * 50_000, b"9" * 10_000])
def test_deep_and_long_json_is_an_error_not_a_crash(data: bytes) -> None:
    with pytest.raises(InvalidManifest):
        parse_manifest(data)


def test_size_and_number_of_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sound_json()
    with monkeypatch.context() as patch:
        patch.setattr(manifest_module, "MAX_JSON_VALUES", 10)
        with pytest.raises(InvalidManifest, match="JSON values"):
            parse_manifest(data)
    with monkeypatch.context() as patch:
        patch.setattr(manifest_module, "MAX_MANIFEST_BYTES", 10)
        with pytest.raises(InvalidManifest, match="at most 10 are read"):
            parse_manifest(data)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "MAX_ERRORS_LISTED", 2)
        with pytest.raises(InvalidManifest, match="entries do not follow the format"):
            parse_manifest(b'{"format": "longshore.manifest"}')


def test_contradictory_manifests_cannot_be_built() -> None:
    with pytest.raises(InvalidManifest, match="no shards"):
        Manifest.build(hash_name="blake3", chunk_bytes=MIB, shards=[], tensors=[], files=[])
    with pytest.raises(InvalidManifest, match="hash"):
        Manifest.build(hash_name="sha1", chunk_bytes=MIB, shards=[], tensors=[], files=[])
