"""Opens the model in a store: from its manifest if there is one, else from the Hugging Face layout and headers.

    longshore.manifest.json? --yes--> one GET, signature checked if keys are trusted; each shard asked for by name,
                             |        sizes compared, current ETags pinned. Nothing is listed
                             \\--no--> root listed, or common names tried: index or files chosen by name
                                      -> headers read in parallel -> chunks derived

Only names, headers and JSON are read here, no weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from storage.checkpoints.checkpoint_files import (
    INDEX_KEY,
    OWN_KEYS,
    SUFFIX,
    Checkpoint,
    Inventory,
    candidates,
    read_index,
    read_whole,
    scan_checkpoint,
)
from storage.checkpoints.manifest import MANIFEST_KEY, MAX_MANIFEST_BYTES, Manifest, manifest_front, parse_manifest
from storage.checkpoints.model_index import DEFAULT_CHUNK_BYTES, ChunkTable, ModelIndex, OtherFile, Shard, chunk_bounds
from storage.checkpoints.replaced_files import published_bytes
from storage.checksum import digest_of
from storage.errors import (
    AccessDenied,
    BadSignature,
    IntegrityError,
    InvalidManifest,
    ManifestMismatch,
    ManifestUnsigned,
    ObjectNotFound,
    RangeMismatch,
    RevisionMismatch,
    SignatureError,
)
from storage.problems import Problems, quote, show_bytes
from storage.publishing.signing import MAX_SIGNATURE_BYTES, SIGN_HINT, SIGNATURE_KEY, check_signable, check_signature
from storage.store_ref import path_of
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, read_bytes
from storage.stores.requests import RetryPolicy, with_retries

NO_MANIFEST = (
    "no manifest: structure and transport are checked, and whole objects by the store's own checksums if it keeps any;"
    " chunks have no digests; `longshore publish` adds them"
)


def split_model_uri(uri: str) -> tuple[str, str | None]:
    """Split a URI into the root to open and the one file that it names, if any.

    `s3://bucket/llama/model.safetensors` gives `("s3://bucket/llama", "model.safetensors")`. A URI that does not end
    in `.safetensors`, or ends in `/`, is a root. So is a bucket whose name ends in `.safetensors`.
    """
    scheme, mark, path = uri.rpartition("://")
    folder, slash, name = path.rpartition("/")
    if not name.endswith(SUFFIX) or (mark and not slash):
        return uri, None
    return f"{scheme}{mark}{folder or ('/' if slash else '.')}", name


def open_model(
    store: ObjectStore,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    only_key: str | None = None,
    policy: RetryPolicy | None = None,
    trusted_keys: Sequence[str] = (),
    signed_name: str = "",
    revision: str = "",
) -> ModelIndex:
    """Return the index of the model at the store's root, or of one file in it.

    Args:
        store: opened on the model's root.
        chunk_bytes: size of chunks of a model without a manifest.
        only_key: the one file of the model to open; None: all.
        policy: how requests are retried.
        trusted_keys: public keys (`signing.trusted_key`), one of which must have signed the manifest; if empty, no
            signature is required.
        signed_name: the name under which the manifest must be signed; "": the path of the store's URI.
        revision: the only revision that is accepted; "": any.

    Raises NotACheckpoint, PickleRefused, InvalidHeader, InvalidIndex, InvalidManifest, ManifestMismatch (each lists
    all problems found), SignatureError, RevisionMismatch and the store's own errors.
    """
    policy = policy or RetryPolicy()
    inventory = Inventory(store, policy)
    found = inventory.look_up([MANIFEST_KEY]).get(MANIFEST_KEY)
    if found is not None:
        manifest, signed_by = _read_manifest(store, found, policy, trusted_keys, signed_name, inventory)
        index = replace(manifest.index(), signed_by=signed_by)
        if only_key is None or any(shard.key == only_key for shard in index.shards):
            index = index if only_key is None else _one_shard(index, only_key)
            check_wanted(revision, index.revision, store.uri)
            return _as_stored(index, inventory, store.uri)
    if trusted_keys:
        raise not_published(inventory, store.uri)
    checkpoint = scan_checkpoint(
        store, only_key=only_key, policy=policy, inventory=inventory, checksum_chunk_bytes=chunk_bytes
    )
    found_revision = _versions_digest(store, inventory, only_key, policy)
    check_wanted(revision, found_revision, store.uri)
    return _derived(checkpoint, chunk_bytes, found_revision)


def check_wanted(wanted: str, found: str, uri: str) -> None:
    """Raise RevisionMismatch unless the stored revision is the wanted one. A wanted "" accepts any."""
    if wanted not in ("", found):
        raise RevisionMismatch(
            "the stored revision of the model is not the one that was asked for",
            hint="the model was published again, or an older one was restored; `longshore plan` shows its revision",
            uri=uri,
            expected=wanted,
            found=found or "not published",
        )


def not_published(inventory: Inventory, uri: str) -> ManifestUnsigned | AccessDenied:
    """Return the error for a model without a readable manifest when only signed manifests are trusted.

    Raises ObjectNotFound if the root does not exist.
    """
    if inventory.listed is None and inventory.denied is not None:
        return AccessDenied(
            "the manifest is missing, or the credentials may not read it",
            hint=f"allow s3:ListBucket to tell one from the other; if the manifest is missing, {SIGN_HINT}",
            uri=uri,
        )
    return ManifestUnsigned(
        "the model is not published, and only models with a signed manifest are trusted", hint=SIGN_HINT, uri=uri
    )


def read_manifest(
    store: ObjectStore,
    info: ObjectInfo,
    policy: RetryPolicy,
    *,
    trusted_keys: Sequence[str] = (),
    signed_name: str = "",
    inventory: Inventory | None = None,
) -> Manifest:
    """Return the checked manifest, read in one request for the version that `info` describes.

    With `trusted_keys` its signature is checked before it is parsed, under `signed_name` or by default the path of the
    store's URI. `inventory` is used to look the signature up. Raises InvalidManifest, SignatureError.
    """
    return _read_manifest(store, info, policy, trusted_keys, signed_name, inventory)[0]


def _read_manifest(
    store: ObjectStore,
    info: ObjectInfo,
    policy: RetryPolicy,
    trusted_keys: Sequence[str],
    signed_name: str,
    inventory: Inventory | None,
) -> tuple[Manifest, str]:
    """Return the manifest and the id of the key that signed it; "" if no key is trusted."""
    check_manifest_size(info, store.uri)
    signed_by = ""
    try:
        data = read_whole(store, info, policy)
        if trusted_keys:
            signature = _read_signature(store, inventory or Inventory(store, policy), policy)
            signed_by = check_signature(data, signature, trusted_keys, signed_name or path_of(store.uri))
        manifest = parse_manifest(data)
        if trusted_keys:
            check_signable(manifest.hash)
        return manifest, signed_by
    except (InvalidManifest, SignatureError) as error:
        raise error.with_details(uri=store.uri) from error.__cause__


def check_manifest_size(info: ObjectInfo, uri: str) -> None:
    """Raise InvalidManifest for an object that is too large to be a manifest."""
    if info.size_bytes > MAX_MANIFEST_BYTES:
        raise InvalidManifest(
            f"the manifest has {info.size_bytes} bytes; at most {MAX_MANIFEST_BYTES} are read", uri=uri
        )


def _read_signature(store: ObjectStore, inventory: Inventory, policy: RetryPolicy) -> bytes | None:
    info = inventory.look_up([SIGNATURE_KEY]).get(SIGNATURE_KEY)
    if info is None:
        return None
    if info.size_bytes > MAX_SIGNATURE_BYTES:
        raise BadSignature(f"the signature has {info.size_bytes} bytes; at most {MAX_SIGNATURE_BYTES} are read")
    return read_whole(store, info, policy)


def check_revision(store: ObjectStore, revision: str, *, only_key: str | None = None) -> bool:
    """Return whether the root still has that revision, by the first bytes of the manifest or else one listing.

    Shards that were replaced under an unchanged manifest do not change the revision, but their digests are wrong.
    Raises StoreError if the store cannot answer.
    """
    policy = RetryPolicy()
    published = _published_revision(store, policy)
    if published is not None:
        if only_key is None:
            return published == revision
        if revision == shard_revision(published, only_key):
            return True
    return _versions_digest(store, Inventory(store, policy), only_key, policy) == revision


def chunk_table(shard_ends: Sequence[Sequence[int]]) -> ChunkTable:
    """Return a table without digests from the ends of each shard's chunks."""
    ends = [end for shard in shard_ends for end in shard]
    starts = [start for shard in shard_ends for start in (0, *shard[:-1])]
    return ChunkTable(
        shard=np.repeat(np.arange(len(shard_ends), dtype=np.int32), [len(shard) for shard in shard_ends]),
        start=np.array(starts, np.int64),
        end=np.array(ends, np.int64),
        hash_name=None,
        digests=None,
    )


def _derived(checkpoint: Checkpoint, chunk_bytes: int, revision: str) -> ModelIndex:
    shards = tuple(
        Shard(info.key, info.size_bytes, info.etag, asked.checksum, asked.reason)
        for info, asked in zip(checkpoint.shards, checkpoint.checksums, strict=True)
    )
    ends = [
        # Such a checksum can only be computed over the whole object in one piece.
        [shard.size_bytes]
        if shard.checksum is not None and not shard.checksum.combines
        else chunk_bounds(header, shard.size_bytes, chunk_bytes)
        for shard, header in zip(shards, checkpoint.headers, strict=True)
    ]
    notes = [NO_MANIFEST]
    if checkpoint.skipped:
        notes.append(f"not loaded: {Problems(map(quote, checkpoint.skipped))}")
    return ModelIndex(
        revision=revision,
        source="headers",
        shards=shards,
        tensors=checkpoint.tensors,
        chunks=chunk_table(ends),
        files=tuple(OtherFile(info.key, info.size_bytes, None) for info in checkpoint.files),
        notes=tuple(notes),
    )


def _as_stored(index: ModelIndex, inventory: Inventory, uri: str) -> ModelIndex:
    """Return the published model pinned to the current versions of its objects. Raises ManifestMismatch."""
    now = inventory.look_up([*(shard.key for shard in index.shards), *(file.key for file in index.files)])
    missing = "is missing" if inventory.denied is None else "is missing, or may not be read"
    problems = Problems()
    shards: list[Shard] = []
    copied = 0
    for shard in index.shards:
        info = now.get(shard.key)
        if info is None:
            problems.add(f"shard {quote(shard.key)} {missing}")
        elif info.size_bytes < shard.size_bytes:
            have, whole = show_bytes(info.size_bytes), show_bytes(shard.size_bytes)
            problems.add(f"shard {quote(shard.key)} is cut short: it has {have} of {whole}")
        elif info.size_bytes != shard.size_bytes:
            problems.add(
                f"shard {quote(shard.key)} has {info.size_bytes} bytes, but was published with {shard.size_bytes}"
            )
        else:
            copied += info.etag != shard.etag
            shards.append(replace(shard, etag=info.etag))
    if problems:
        raise ManifestMismatch(
            f"the manifest is for other bytes than are stored: {problems}",
            hint="upload the published files again, or publish the model again",
            uri=uri,
        )
    notes = []
    if copied:
        notes.append(f"{copied} shards have another ETag than when they were published; their digests decide")
    changed = [f.key for f in index.files if f.key not in now or now[f.key].size_bytes != f.size_bytes]
    if changed:
        notes.append(f"other files have changed since they were published: {Problems(map(quote, changed))}")
    return replace(index, shards=tuple(shards), notes=tuple(notes))


def _one_shard(index: ModelIndex, key: str) -> ModelIndex:
    """Return the index of one shard of a published model, as a model of its own with its own revision."""
    number = next(n for n, shard in enumerate(index.shards) if shard.key == key)
    rows = index.chunks.shard == number
    digests = index.chunks.digests
    return replace(
        index,
        revision=shard_revision(index.revision, key),
        shards=(index.shards[number],),
        tensors=tuple(replace(t, shard=0) for t in index.tensors if t.shard == number),
        chunks=ChunkTable(
            shard=np.zeros(int(rows.sum()), np.int32),
            start=index.chunks.start[rows],
            end=index.chunks.end[rows],
            hash_name=index.chunks.hash_name,
            digests=None if digests is None else digests[rows],
        ),
    )


def shard_revision(revision: str, key: str) -> str:
    """Return the revision of one file of a published model, as a model of its own."""
    return hashlib.sha256(f"{revision}/{key}".encode()).hexdigest()


def _published_revision(store: ObjectStore, policy: RetryPolicy) -> str | None:
    """Return the revision from its fixed place at the start of the manifest; None if there is no manifest."""
    front = manifest_front("0" * 64)
    try:
        data = with_retries(lambda: read_bytes(store, MANIFEST_KEY, ByteRange(0, len(front))), policy)
    except (ObjectNotFound, AccessDenied):  # S3 answers 403 for a missing object if the credentials may not list
        return None
    revision = data[-65:-1].decode("ascii", "replace")
    return revision if data == manifest_front(revision) else ""


def _versions_digest(store: ObjectStore, inventory: Inventory, only_key: str | None, policy: RetryPolicy) -> str:
    """Return the SHA-256 in hex of (key, size, ETag) of every object of an unpublished model. One listing is enough."""
    if only_key is not None:
        infos = inventory.find([only_key])
        if not infos and inventory.denied is not None:
            raise inventory.denied
    else:
        infos = candidates(inventory, None)
        if inventory.listed is None and INDEX_KEY in infos:
            infos |= inventory.find(sorted(set(read_index(store, infos[INDEX_KEY], policy).values())))
    rows = sorted([i.key, i.size_bytes, i.etag or ""] for i in infos.values() if i.key not in OWN_KEYS)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


_UPLOAD_HINT = "upload the published file again, or publish the model again"


def read_other_file(store: ObjectStore, file: OtherFile) -> bytes:
    """Return a small file of the model, such as its config.json. The caller has checked its size.

    If it was published, it must be the published one: raises ManifestMismatch for another size, IntegrityError for
    other bytes. While a save replaces it, the old bytes are read. Raises StoreError.
    """
    if file.digest is None:
        return read_bytes(store, file.key, ByteRange(0, file.size_bytes))
    try:
        _check_published_size(store, file)
        data = read_bytes(store, file.key, ByteRange(0, file.size_bytes))
        name, _, expected = file.digest.partition(":")
        if digest_of(name, data).hex() != expected:
            raise IntegrityError(
                f"{file.key} is not the published one", hint=_UPLOAD_HINT, key=file.key, expected=file.digest
            )
    except (ManifestMismatch, IntegrityError, RangeMismatch):  # the last: replaced by a shorter file just now
        if (before := published_bytes(store, file)) is None:
            raise
        return before
    return data


def _check_published_size(store: ObjectStore, file: OtherFile) -> None:
    """Raise ManifestMismatch for another size. Otherwise the store would refuse the range of a shorter file."""
    where = {"uri": store.uri, "key": file.key}
    try:
        found_bytes = store.stat(file.key).size_bytes
    except ObjectNotFound as error:
        message = f"{file.key} was published and is now missing"
        raise ManifestMismatch(message, hint=_UPLOAD_HINT, **where) from error
    if found_bytes < file.size_bytes:
        message = f"{file.key} is cut short: {show_bytes(found_bytes)} of {show_bytes(file.size_bytes)} are there"
        raise ManifestMismatch(message, hint=_UPLOAD_HINT, **where)
    if found_bytes > file.size_bytes:
        message = f"{file.key} has {found_bytes} bytes, published with {file.size_bytes}"
        raise ManifestMismatch(message, hint=_UPLOAD_HINT, **where)
