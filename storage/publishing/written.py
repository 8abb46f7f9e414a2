"""What a publish writes beside the model: recorded maxima, the manifest, its signature. Each is read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from storage.checkpoints.amax import AMAX_KEY, Amax, encode_amax
from storage.checkpoints.chunking import fixed_bounds
from storage.checkpoints.manifest import MANIFEST_KEY, MAX_MANIFEST_BYTES, Manifest, ManifestFile
from storage.checksum import digest_of
from storage.errors import IntegrityError, PublishError
from storage.object_store import ObjectStore, read_bytes
from storage.publishing.signature import SIGNATURE_KEY, sign_manifest
from storage.publishing.signing_keys import SigningKey
from storage.retrying import RetryPolicy, with_retries
from storage.streaming import ranges_of

PIECE_BYTES = 8 << 20  # written and read back at a time


def write_amax(
    store: ObjectStore, names: Sequence[str], rows: Mapping[str, Amax], hash_name: str, policy: RetryPolicy
) -> ManifestFile:
    """The manifest's entry of the maxima of those weights, in that order. Raises IntegrityError, StoreError."""
    data = encode_amax((name, rows[name]) for name in names)
    _write(store, AMAX_KEY, data, policy)
    info = with_retries(lambda: store.stat(AMAX_KEY), policy)
    return ManifestFile(
        path=AMAX_KEY,
        size_bytes=len(data),
        etag=info.etag,
        source_etag=info.etag,
        checked_by="read-twice+read-back",  # of what it was computed from, and of itself
        digest=digest_of(hash_name, data).hex(),
    )


def write_manifest(
    store: ObjectStore,
    manifest: Manifest,
    policy: RetryPolicy,
    *,
    sign_key: SigningKey | None,
    signed_name: str,
    signed_before: bool,
) -> None:
    """With `signed_before` there is a signature, of an older one. Raises PublishError, IntegrityError, StoreError."""
    data = manifest.to_json()
    if len(data) > MAX_MANIFEST_BYTES:
        raise PublishError(
            f"the manifest would have {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read",
            hint="publish with larger chunks",
        )
    if signed_before:  # it would call the new manifest tampered with
        with_retries(lambda: store.delete(SIGNATURE_KEY), policy)
    _write(store, MANIFEST_KEY, data, policy)
    if sign_key is not None:
        signature = sign_manifest(data, sign_key, signed_name)
        with_retries(lambda: store.put(SIGNATURE_KEY, signature), policy)


def _write(store: ObjectStore, key: str, data: bytes, policy: RetryPolicy) -> None:
    """Written and read back; what differs is taken away. Raises IntegrityError."""
    with_retries(lambda: _send(store, key, data), policy)
    for place in ranges_of(fixed_bounds(len(data), PIECE_BYTES)):
        written = with_retries(partial(read_bytes, store, key, place), policy)
        if written != data[place.start : place.end]:
            with_retries(lambda: store.delete(key), policy)
            what = "the manifest" if key == MANIFEST_KEY else key
            raise IntegrityError(f"{what} does not read as it was written", uri=store.uri)


def _send(store: ObjectStore, key: str, data: bytes) -> None:
    if key == MANIFEST_KEY or len(data) <= PIECE_BYTES:
        store.put(key, data)  # a manifest is there at once or not at all, on any store
        return
    with store.upload(key) as upload:
        for place in ranges_of(fixed_bounds(len(data), PIECE_BYTES)):
            upload.write(memoryview(data)[place.start : place.end])
        upload.complete()
