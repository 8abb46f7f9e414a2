"""Only manifests signed with a trusted key: unsigned, another key and tampered are three different refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoints.checkpoint import open_model
from storage.checkpoints.manifest import MANIFEST_KEY, Manifest
from storage.errors import BadSignature, InvalidManifest, LongshoreError, ManifestUnsigned, UnknownSigner
from storage.object_store import MemoryStore, read_bytes
from storage.publishing.publish import publish
from storage.publishing.signature import (
    MAX_SIGNATURE_BYTES,
    SIGNATURE_KEY,
    check_signature,
    parse_signature,
    sign_manifest,
)
from storage.publishing.signing_keys import SigningKey, key_id
from storage.publishing.verify import verify
from storage.ranges import ByteRange
from tests.support.checkpoints import odd_objects
from tests.support.faulty_stores import NoListStore

MIB = 1 << 20
KEY, OTHER = SigningKey.generate(), SigningKey.generate()
MANIFEST = b'{"any": "bytes"}'


def stored(store: MemoryStore, key: str) -> bytes:
    return read_bytes(store, key, ByteRange(0, store.stat(key).size_bytes))


def signed_store(key: SigningKey | None = KEY) -> MemoryStore:
    store = MemoryStore(odd_objects())
    publish(store, chunk_bytes=MIB, sign_key=key)
    return store


@given(st.binary(max_size=2000), st.data())
def test_a_signature_is_for_exactly_those_bytes(manifest: bytes, data: st.DataObject) -> None:
    signature = sign_manifest(manifest, KEY)
    assert check_signature(manifest, signature, [OTHER.public, KEY.public]) == key_id(KEY.public)
    with pytest.raises(BadSignature):
        check_signature(manifest + b" ", signature, [KEY.public])
    if manifest:
        at = data.draw(st.integers(0, 8 * len(manifest) - 1))
        changed = bytearray(manifest)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(BadSignature):
            check_signature(bytes(changed), signature, [KEY.public])


@given(st.integers(0, 8 * len(sign_manifest(MANIFEST, KEY)) - 1))
def test_no_changed_bit_of_a_signature_makes_it_another_good_one(at: int) -> None:
    signature = bytearray(sign_manifest(MANIFEST, KEY))
    before = parse_signature(bytes(signature))
    signature[at // 8] ^= 1 << at % 8
    try:
        check_signature(MANIFEST, bytes(signature), [KEY.public])
    except (BadSignature, UnknownSigner):
        return
    assert parse_signature(bytes(signature)) == before  # white space is all that may differ


def test_another_key_is_no_tampering_and_none_at_all_is_neither() -> None:
    with pytest.raises(UnknownSigner) as unknown:
        check_signature(MANIFEST, sign_manifest(MANIFEST, OTHER), [KEY.public])
    assert unknown.value.details["found"] == key_id(OTHER.public)
    with pytest.raises(ManifestUnsigned):
        check_signature(MANIFEST, None, [KEY.public])
    claims = json.loads(sign_manifest(MANIFEST, OTHER)) | {"key_id": key_id(KEY.public)}
    with pytest.raises(BadSignature):
        check_signature(MANIFEST, json.dumps(claims).encode(), [KEY.public])


@pytest.mark.parametrize(
    "signature",
    [b"", b"{}", b"[" * 4000, b"x" * (MAX_SIGNATURE_BYTES + 1), b"\xff", b'{"format":"longshore.signature"}'],
)
def test_what_is_no_signature_is_refused_and_not_quoted(signature: bytes) -> None:
    with pytest.raises(BadSignature) as refused:
        check_signature(MANIFEST, signature, [KEY.public])
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "none"},
        {"algorithm": "hs256"},
        {"version": 2},
        {"signature": ""},
        {"more": 1},
        {"key_id": "0" * 31},
    ],
)
def test_other_forms_of_signatures_are_refused(change: dict[str, object]) -> None:
    document = json.dumps(json.loads(sign_manifest(MANIFEST, KEY)) | change)
    with pytest.raises(BadSignature):
        check_signature(MANIFEST, document.encode(), [KEY.public])


def test_a_signed_model_opens_where_its_key_is_trusted_and_where_none_is_asked_for() -> None:
    store = signed_store()
    index = open_model(store, trusted_keys=[KEY.public])
    assert index.source == "manifest"
    assert index == open_model(store) or index.revision == open_model(store).revision
    assert not [file for file in index.files if file.key == SIGNATURE_KEY]
    assert open_model(NoListStore(store), trusted_keys=[KEY.public]).revision == index.revision
    assert verify(store, trusted_keys=[KEY.public]).ok


def test_unsigned_another_key_and_tampered_are_told_apart() -> None:
    cases: list[tuple[MemoryStore, type[LongshoreError]]] = [
        (signed_store(None), ManifestUnsigned),
        (MemoryStore(odd_objects()), ManifestUnsigned),  # never published
        (signed_store(OTHER), UnknownSigner),
    ]
    tampered = signed_store()
    tampered.put(MANIFEST_KEY, stored(signed_store(None), MANIFEST_KEY) + b"\n")
    cases.append((tampered, BadSignature))
    huge = signed_store()
    huge.put(SIGNATURE_KEY, b" " * (MAX_SIGNATURE_BYTES + 1))
    cases.append((huge, BadSignature))
    for store, kind in cases:
        for check in (open_model, verify):
            with pytest.raises(kind) as refused:
                check(store, trusted_keys=[KEY.public])
            assert type(refused.value) is kind
            assert refused.value.details["uri"] == store.uri


def test_one_file_beside_a_signed_manifest_is_not_covered_by_it() -> None:
    store = signed_store()
    extra = next(data for key, data in odd_objects().items() if key.endswith(".safetensors"))
    store.put("extra.safetensors", extra)
    assert open_model(store, only_key="extra.safetensors").source == "headers"
    with pytest.raises(ManifestUnsigned):
        open_model(store, only_key="extra.safetensors", trusted_keys=[KEY.public])


def test_a_signature_is_checked_before_anything_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = signed_store()
    store.put(MANIFEST_KEY, b"[" * 1000)
    with pytest.raises(BadSignature):
        open_model(store, trusted_keys=[KEY.public])
    with pytest.raises(InvalidManifest):
        open_model(store)
    store.put(SIGNATURE_KEY, sign_manifest(b"[" * 1000, KEY))
    with pytest.raises(InvalidManifest):
        open_model(store, trusted_keys=[KEY.public])


def test_publishing_again_keeps_signature_and_manifest_together() -> None:
    store = signed_store()
    assert publish(store, chunk_bytes=MIB, sign_key=KEY).unchanged
    assert not publish(store, chunk_bytes=MIB, sign_key=OTHER).unchanged
    open_model(store, trusted_keys=[OTHER.public])
    assert publish(store, chunk_bytes=MIB).unchanged  # nobody asked for another signature
    open_model(store, trusted_keys=[OTHER.public])
    publish(store, chunk_bytes=2 * MIB)
    with pytest.raises(ManifestUnsigned):  # and not BadSignature: the old one was taken away
        open_model(store, trusted_keys=[OTHER.public])


def test_a_signing_publish_believes_no_manifest_and_no_journal_that_it_did_not_sign() -> None:
    """Who can write to the bucket must not get digests signed that the publisher never computed."""
    from storage.checkpoints.checkpoint_files import JOURNAL_KEY

    honest = signed_store(None)
    manifest = Manifest.model_validate_json(stored(honest, MANIFEST_KEY))
    lie = "0" * len(manifest.shards[0].digest)
    forged = [shard.model_copy(update={"chunk_digests": (lie,) * len(shard.chunk_ends)}) for shard in manifest.shards]
    evil = Manifest.build(
        hash_name=manifest.hash,
        chunk_bytes=manifest.chunk_bytes,
        shards=forged,
        tensors=manifest.tensors,
        files=manifest.files,
    )
    store = MemoryStore(odd_objects())
    store.put(MANIFEST_KEY, evil.to_json())
    report = publish(store, chunk_bytes=MIB, sign_key=KEY)
    assert (report.unchanged, report.revision) == (False, manifest.revision)

    journal = {
        "format": "longshore.publish",
        "version": 1,
        "hash": manifest.hash,
        "chunk_bytes": manifest.chunk_bytes,
        "shards": [json.loads(shard.model_dump_json()) for shard in forged],
        "files": [],
    }
    store = MemoryStore({**odd_objects(), JOURNAL_KEY: json.dumps(journal).encode()})
    assert publish(MemoryStore(store_objects(store)), chunk_bytes=MIB).resumed  # the journal is a good one, but a lie
    report = publish(store, chunk_bytes=MIB, sign_key=KEY)
    assert (report.resumed, report.revision, report.signed_by) == (0, manifest.revision, key_id(KEY.public))


def store_objects(store: MemoryStore) -> dict[str, bytes]:
    return {info.key: stored(store, info.key) for info in store.list()}


def test_a_copy_is_signed_where_it_is(tmp_path: Path) -> None:
    source, dest = MemoryStore(odd_objects()), MemoryStore(uri="twin://copy")
    publish(source, dest, chunk_bytes=MIB, sign_key=KEY)
    open_model(dest, trusted_keys=[KEY.public])
    assert SIGNATURE_KEY not in {info.key for info in source.list()}
