"""Manifests need a signature of a trusted key. Unsigned, unknown key and tampered are three different refusals."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoints.checkpoint import open_model
from storage.checkpoints.manifest import MANIFEST_KEY, Manifest
from storage.errors import (
    BadSignature,
    InvalidKey,
    InvalidManifest,
    LongshoreError,
    ManifestUnsigned,
    PublishError,
    SignedNameMismatch,
    UnknownSigner,
)
from storage.publishing.publish import publish
from storage.publishing.signing import (
    MAX_NAME_CHARACTERS,
    MAX_SIGNATURE_BYTES,
    SIGNATURE_KEY,
    SigningKey,
    check_signature,
    is_name,
    key_id,
    parse_signature,
    sign_manifest,
    trusted_key,
)
from storage.publishing.verify import verify
from storage.stores.object_store import ByteRange, MemoryStore, read_bytes
from tests.support.checkpoints import odd_objects, odd_parts, sharded_objects
from tests.support.faulty_stores import NoListStore

MIB = 1 << 20
KEY, OTHER = SigningKey.generate(), SigningKey.generate()
MANIFEST = b'{"any": "bytes"}'
NAME = "memory"  # of a model in a MemoryStore


def stored(store: MemoryStore, key: str) -> bytes:
    return read_bytes(store, key, ByteRange(0, store.stat(key).size_bytes))


def signed_store(key: SigningKey | None = KEY) -> MemoryStore:
    store = MemoryStore(odd_objects())
    publish(store, chunk_bytes=MIB, sign_key=key)
    return store


@given(st.binary(max_size=2000), st.data())
def test_a_signature_is_for_exactly_those_bytes(manifest: bytes, data: st.DataObject) -> None:
    signature = sign_manifest(manifest, KEY, NAME)
    assert check_signature(manifest, signature, [OTHER.public, KEY.public], NAME) == key_id(KEY.public)
    with pytest.raises(BadSignature):
        check_signature(manifest + b" ", signature, [KEY.public], NAME)
    if manifest:
        at = data.draw(st.integers(0, 8 * len(manifest) - 1))
        changed = bytearray(manifest)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(BadSignature):
            check_signature(bytes(changed), signature, [KEY.public], NAME)


@given(st.integers(0, 8 * len(sign_manifest(MANIFEST, KEY, NAME)) - 1))
def test_any_changed_bit_makes_a_signature_invalid(at: int) -> None:
    signature = bytearray(sign_manifest(MANIFEST, KEY, NAME))
    before = parse_signature(bytes(signature))
    signature[at // 8] ^= 1 << at % 8
    try:
        check_signature(MANIFEST, bytes(signature), [KEY.public], NAME)
    except (BadSignature, UnknownSigner):
        return
    assert parse_signature(bytes(signature)) == before  # white space is all that may differ


def test_an_unknown_key_and_no_signature_are_not_tampering() -> None:
    with pytest.raises(UnknownSigner) as unknown:
        check_signature(MANIFEST, sign_manifest(MANIFEST, OTHER, NAME), [KEY.public], NAME)
    assert unknown.value.details["found"] == key_id(OTHER.public)
    with pytest.raises(ManifestUnsigned):
        check_signature(MANIFEST, None, [KEY.public], NAME)
    claims = json.loads(sign_manifest(MANIFEST, OTHER, NAME)) | {"key_id": key_id(KEY.public)}
    with pytest.raises(BadSignature):
        check_signature(MANIFEST, json.dumps(claims).encode(), [KEY.public], NAME)


@pytest.mark.parametrize(
    "signature",
    [b"", b"{}", b"[" * 4000, b"x" * (MAX_SIGNATURE_BYTES + 1), b"\xff", b'{"format":"longshore.signature"}'],
)
def test_invalid_signatures_are_refused_and_not_quoted(signature: bytes) -> None:
    with pytest.raises(BadSignature) as refused:
        check_signature(MANIFEST, signature, [KEY.public], NAME)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "none"},
        {"algorithm": "hs256"},
        {"version": 3},
        {"version": 1},
        {"name": "other"},
        {"name": "n" * 513},
        {"signature": ""},
        {"more": 1},
        {"key_id": "0" * 31},
    ],
)
def test_other_forms_of_signatures_are_refused(change: dict[str, object]) -> None:
    document = json.dumps(json.loads(sign_manifest(MANIFEST, KEY, NAME)) | change)
    with pytest.raises(BadSignature):
        check_signature(MANIFEST, document.encode(), [KEY.public], NAME)


def test_a_signed_model_opens_with_a_trusted_key_or_no_policy() -> None:
    store = signed_store()
    index = open_model(store, trusted_keys=[KEY.public])
    assert index.source == "manifest"
    assert index == open_model(store) or index.revision == open_model(store).revision
    assert not [file for file in index.files if file.key == SIGNATURE_KEY]
    assert open_model(NoListStore(store), trusted_keys=[KEY.public]).revision == index.revision
    assert verify(store, trusted_keys=[KEY.public]).ok


def test_unsigned_unknown_key_and_tampered_are_distinct_errors() -> None:
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
    store.put(SIGNATURE_KEY, sign_manifest(b"[" * 1000, KEY, NAME))
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


def test_a_signing_publish_ignores_unsigned_files() -> None:
    """Writers to the bucket must not get digests signed that the publisher never computed."""
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


def signed_at(uri: str, seed: int = 7, **publishing: object) -> MemoryStore:
    store = MemoryStore(sharded_objects(odd_parts(), seed), uri)
    publish(store, chunk_bytes=MIB, sign_key=KEY, **publishing)  # type: ignore[arg-type]
    return store


def test_a_signed_model_in_the_place_of_another_is_refused() -> None:
    """Manifest, signature and shards are all good ones, of the same signer."""
    other = signed_at("s3://models/qwen", seed=8)
    swapped = MemoryStore(store_objects(other), "s3://models/llama")
    assert open_model(swapped).revision == open_model(other, trusted_keys=[KEY.public]).revision
    for check in (open_model, verify):
        with pytest.raises(SignedNameMismatch, match="signed as 'qwen', not as 'llama'") as refused:
            check(swapped, trusted_keys=[KEY.public])
        assert refused.value.details["uri"] == swapped.uri


def test_a_mirror_needs_no_signature_of_its_own() -> None:
    objects = store_objects(signed_at("s3://models/team/llama"))
    for uri in ("s3://mirror/team/llama", "gs://models/team/llama", "https://host/team/llama", "file:///team/llama"):
        open_model(MemoryStore(objects, uri), trusted_keys=[KEY.public])
    elsewhere = MemoryStore(objects, "s3://mirror/cache/team/llama")
    with pytest.raises(SignedNameMismatch, match="signed_name='team/llama'"):
        open_model(elsewhere, trusted_keys=[KEY.public])
    for check in (open_model, verify):
        check(elsewhere, trusted_keys=[KEY.public], signed_name="team/llama")
        with pytest.raises(SignedNameMismatch):
            check(MemoryStore(objects, "s3://models/team/llama"), trusted_keys=[KEY.public], signed_name="llama")


def test_a_model_is_signed_under_the_name_of_where_it_is_written() -> None:
    source, dest = MemoryStore(odd_objects(), "file:///data/llama"), MemoryStore(uri="s3://models/llama-8b")
    assert publish(source, dest, chunk_bytes=MIB, sign_key=KEY).signed_name == "llama-8b"
    assert publish(source, dest, chunk_bytes=MIB, sign_key=KEY).unchanged
    again = publish(source, dest, chunk_bytes=MIB, sign_key=KEY, signed_name="other")
    assert (again.unchanged, again.signed_name) == (False, "other")
    open_model(dest, trusted_keys=[KEY.public], signed_name="other")
    assert publish(MemoryStore(odd_objects(), "s3://whole-bucket"), chunk_bytes=MIB, sign_key=KEY).signed_name == (
        "whole-bucket"
    )
    for name in ("two\nlines", "n" * 513, " "):
        with pytest.raises(PublishError, match="signed_name"):
            publish(MemoryStore(odd_objects()), chunk_bytes=MIB, sign_key=KEY, signed_name=name)
    with pytest.raises(PublishError, match="signed_name"):
        publish(MemoryStore(odd_objects(), "file:///"), chunk_bytes=MIB, sign_key=KEY)


def test_a_signature_without_a_name_is_refused_with_what_to_do() -> None:
    store = signed_store(None)
    manifest = stored(store, MANIFEST_KEY)
    before = json.loads(sign_manifest(manifest, KEY, NAME)) | {
        "version": 1,
        "signature": base64.b64encode(KEY.sign(manifest)).decode(),
    }
    del before["name"]
    store.put(SIGNATURE_KEY, json.dumps(before).encode())
    assert open_model(store).source == "manifest"  # who trusts no key does not mind
    for check in (open_model, verify):
        with pytest.raises(SignedNameMismatch, match="longshore sign URI --key FILE"):
            check(store, trusted_keys=[KEY.public])
        with pytest.raises(UnknownSigner):
            check(store, trusted_keys=[OTHER.public])
    named = json.dumps(before | {"name": NAME}).encode()  # the name was not signed
    with pytest.raises(SignedNameMismatch):
        check_signature(manifest, named, [KEY.public], NAME)
    with pytest.raises(BadSignature):
        check_signature(manifest, json.dumps(before | {"version": 2, "name": NAME}).encode(), [KEY.public], NAME)


@given(st.text(), st.text())
def test_a_signature_is_for_exactly_that_name(name: str, other: str) -> None:
    if not is_name(name):
        return
    signature = sign_manifest(MANIFEST, KEY, name)
    assert len(signature) <= MAX_SIGNATURE_BYTES
    check_signature(MANIFEST, signature, [KEY.public], name)
    if other != name:
        with pytest.raises(SignedNameMismatch):
            check_signature(MANIFEST, signature, [KEY.public], other)
    renamed = json.dumps(json.loads(signature) | {"name": name + "x"}).encode()
    with pytest.raises(BadSignature):
        check_signature(MANIFEST, renamed, [KEY.public], name + "x")


@pytest.mark.parametrize("character", ["n", "é", "層", "🚢", '"', "\\"])
def test_the_longest_name_fits_a_signature(character: str) -> None:
    name = character * MAX_NAME_CHARACTERS
    assert is_name(name)
    signature = sign_manifest(MANIFEST, KEY, name)
    check_signature(MANIFEST, signature, [KEY.public], name)


def test_a_key_can_be_trusted_for_some_names_only() -> None:
    def check(name: str, *trusted: str) -> None:
        check_signature(MANIFEST, sign_manifest(MANIFEST, KEY, name), list(map(trusted_key, trusted)), name)

    team, other = f"{KEY.public}:team-a/*", f"{KEY.public}:llama"
    check("team-a/llama", team)
    check("team-a/llama", OTHER.public, other, team)
    check("anything", other, KEY.public)
    for name, trusted in (("team-b/llama", [team]), ("anything", [team, other]), ("llama", [f"{team}:llama"])):
        with pytest.raises(SignedNameMismatch, match="trusted for other names"):
            check(name, *trusted)
    for broken in (f"{KEY.public}:", f"{KEY.public}:a:", ":llama", f"{KEY.public}:a\nb"):
        with pytest.raises(InvalidKey):
            trusted_key(broken)
