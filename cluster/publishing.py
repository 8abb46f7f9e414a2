"""The functions of the client for checkpoints in stores: publish, verify, sign, list saves.

They run in this process and need no Ray. `a` before a name makes its asyncio twin.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.argument_types import checks_arguments
from cluster.command_line.progress import byte_counter, shown_progress
from cluster.config import Config
from cluster.errors import ConfigError, LoadCancelled
from cluster.model import GIVEN_UP, in_thread
from cluster.options import check_revision, check_signed_name
from cluster.request import StoreOptions, open_destination, open_uri, read_keys
from cluster.telemetry.stats import Jsonable
from storage.checkpoints.checkpoint import check_manifest_size
from storage.checkpoints.checkpoint_files import read_whole
from storage.checkpoints.manifest import MANIFEST_KEY, parse_manifest
from storage.errors import ObjectChanged, WeakDigest
from storage.publishing.signing import SIGNATURE_KEY, SigningKey, check_signable, key_id, sign_manifest, signed_name_of
from storage.store_ref import Credentials
from storage.stores.requests import RetryPolicy, with_retries

if TYPE_CHECKING:
    from storage.publishing.publish import PublishReport
    from storage.publishing.saves import SavesReport
    from storage.publishing.verify import VerifyReport


@checks_arguments
def publish(
    uri_or_path: str | os.PathLike[str],
    dest: str | os.PathLike[str] | None = None,
    *,
    hash_name: str = "blake3",
    chunk_bytes: int | None = None,
    force: bool = False,
    amax: bool = False,
    sign_key: str | os.PathLike[str] | None = None,
    signed_name: str | None = None,
    progress: bool | Callable[..., None] | None = None,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    credentials: Credentials | None = None,
    config: Config | None = None,
) -> PublishReport:
    """Write the manifest of a checkpoint beside it, or copy the checkpoint to `dest` and write it there.

    What is read is compared with the store's own checksums, or read twice. An interrupted publish continues where it
    stopped.

    Args:
        uri_or_path: Folder of the checkpoint, as for `load`.
        dest: Folder to copy it to. None: the manifest is written beside the checkpoint.
        hash_name: Digest of the chunks: "blake3", or "xxh3_128", which is faster, finds accidents only and cannot be
            signed.
        chunk_bytes: Size of chunks in bytes, 1 MiB to 16 MiB. None: as the settings say, 8 MiB.
        force: Replace a manifest that is there, also one of a later version of Longshore.
        amax: Record the largest absolute value of each row of the weights. Loads that quantize then read less
            (docs/precision.md).
        sign_key: File with the private key that signs the manifest. None: it is not signed.
        signed_name: Name under which it is signed. None: the path without scheme and bucket.
        progress: As for `load`; a function is called with `done_bytes`, `total_bytes` and `key`.
        endpoint_url: URL of an S3-compatible server, for both URIs. None: as the AWS configuration says, else the
            provider's own.
        region: Region of the bucket. None: as the environment says.
        profile: Name of a profile in the AWS configuration.
        anonymous: Send unsigned requests, for public buckets.
        credentials: Keys for the store, a `storage.store_ref.Credentials`. None: those that the environment provides.
        config: Settings. None: read from the `LONGSHORE_*` variables of the environment.

    Returns:
        What was published, and how it was checked.

    Raises:
        ConfigError: An argument is wrong: a destination inside the source or around it, a `signed_name` without a key.
        PublishError: The model cannot be published there.
        IntegrityError: Two readings differ, or what was written reads otherwise.
        CheckpointError: No checkpoint is there.
        NewerManifest: A later version of Longshore wrote the manifest, and `force` is False.
        InvalidKey: `sign_key` is no private key.
        StoreError: A store cannot be read or written.

    Example:
        ```python
        report = cluster.publish("/models/llama", "s3://models/llama")
        print(report.revision)
        ```
    """
    from storage.publishing.publish import publish as publish_store

    config = (config or Config.from_env()).changed(chunk_bytes=chunk_bytes)
    if signed_name is not None and sign_key is None:
        raise ConfigError("signed_name names a model that is signed, but there is no sign_key")
    options = StoreOptions(endpoint_url, region, profile, anonymous)
    rules = config.source_rules()
    with contextlib.ExitStack() as stack:
        source, only_key = open_uri(uri_or_path, options, credentials, config.read_timeout_s, rules)
        stack.callback(source.close)
        target = None
        if dest is not None:
            target = open_destination(dest, uri_or_path, options, credentials, config.read_timeout_s, rules)
            stack.callback(target.close)
        show = stack.enter_context(shown_progress(progress, lambda display: byte_counter(display, "publish")))
        return publish_store(
            source,
            target,
            hash_name=hash_name,
            chunk_bytes=config.chunk_bytes,
            force=force,
            amax=amax,
            progress=_until_given_up(show),
            only_key=only_key,
            sign_key=None if sign_key is None else SigningKey.read(sign_key),
            signed_name=check_signed_name(signed_name),
        )


@checks_arguments
def verify(
    uri: str | os.PathLike[str],
    *,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    signed_name: str | None = None,
    revision: str | None = None,
    progress: bool | Callable[..., None] | None = None,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    credentials: Credentials | None = None,
    config: Config | None = None,
) -> VerifyReport:
    """Read everything that the manifest names, and compare digests and tensors.

    Damage is in the report and raises nothing. A model that was not published has nothing to compare with: its report
    is not `ok`, and its `source` is "headers".

    Args:
        uri: Folder of the checkpoint, as for `load`.
        trusted_keys: Public keys of which one must have signed the manifest, as for `load`.
        signed_name: Name under which the manifest must be signed, as for `load`.
        revision: The only revision that is accepted. None: the one that is stored.
        progress: As for `load`; a function is called with `done_bytes`, `total_bytes` and `key`.
        endpoint_url: URL of an S3-compatible server. None: as the AWS configuration says, else the provider's own.
        region: Region of the bucket. None: as the environment says.
        profile: Name of a profile in the AWS configuration.
        anonymous: Send unsigned requests, for public buckets.
        credentials: Keys for the store, a `storage.store_ref.Credentials`. None: those that the environment provides.
        config: Settings. None: read from the `LONGSHORE_*` variables of the environment.

    Returns:
        What was compared, and everything that is wrong; `ok` when nothing is.

    Raises:
        ConfigError: An argument is wrong.
        SignatureError: The manifest is not signed as it must be. Nothing else was read.
        RevisionMismatch: The store has another revision than `revision`. Nothing else was read.
        InvalidManifest: The manifest cannot be read.
        CheckpointError: No checkpoint is there.
        ObjectChanged: An object was replaced meanwhile.
        StoreError: The store cannot be read.

    Example:
        ```python
        print(cluster.verify("s3://models/llama").ok)
        ```
    """
    from storage.publishing.verify import verify as verify_store

    config = config or Config.from_env()
    options = StoreOptions(endpoint_url, region, profile, anonymous)
    store, only_key = open_uri(uri, options, credentials, config.read_timeout_s, config.source_rules())
    keys = config.public_keys() if trusted_keys is None else read_keys(trusted_keys)
    shown = shown_progress(progress, lambda display: byte_counter(display, "verify"))
    with contextlib.closing(store), shown as show:
        return verify_store(
            store,
            progress=_until_given_up(show),
            only_key=only_key,
            trusted_keys=keys,
            signed_name=check_signed_name(signed_name),
            revision=check_revision(revision),
        )


@checks_arguments
def list_saves(
    uri: str | os.PathLike[str],
    *,
    clean: bool = False,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    credentials: Credentials | None = None,
    config: Config | None = None,
) -> SavesReport:
    """List what interrupted saves left at a URI, and remove it on request.

    Published files are never among it, nor those of older revisions in the history of saves.

    Args:
        uri: Folder of the checkpoint, as for `save`.
        clean: Put small files back as they were, and remove what is listed. No save to this URI may run meanwhile: it
            would end with SaveConflict.
        endpoint_url: URL of an S3-compatible server. None: as the AWS configuration says, else the provider's own.
        region: Region of the bucket. None: as the environment says.
        profile: Name of a profile in the AWS configuration.
        anonymous: Send unsigned requests, for public buckets.
        credentials: Keys for the store, a `storage.store_ref.Credentials`. None: those that the environment provides.
        config: Settings. None: read from the `LONGSHORE_*` variables of the environment.

    Returns:
        The published revision, and every upload, file and journal that no revision uses.

    Raises:
        ConfigError: An argument is wrong.
        UnsupportedStore: No save can write to this kind of store.
        StoreError: The store cannot be read, or refuses a removal.
    """
    from cluster.saving.shards import revision_of_file
    from storage.publishing.save_history import interrupted_saves

    config = config or Config.from_env()
    options = StoreOptions(endpoint_url, region, profile, anonymous)
    store, only_key = open_uri(uri, options, credentials, config.read_timeout_s, config.source_rules())
    with contextlib.closing(store):
        if only_key is not None:
            raise ConfigError("saves are listed for a folder, not for one file", uri=os.fspath(uri))
        return interrupted_saves(store, revision_of_file, RetryPolicy(), clean=clean)


def _until_given_up(progress: Callable[..., None] | None) -> Callable[..., None] | None:
    """Return `progress` that raises LoadCancelled once the task of an asyncio twin was cancelled."""
    given_up = GIVEN_UP.get()
    if given_up is None:
        return progress

    def report(moment: object) -> None:
        if given_up.is_set():
            raise LoadCancelled("the task was cancelled")
        if progress is not None:
            progress(moment)

    return report


apublish = in_thread(publish)


averify = in_thread(verify)


@dataclass(frozen=True, slots=True)
class SignReport(Jsonable):
    """The result of `sign`."""

    uri: str
    revision: str
    name: str  # the model's, under which it was signed
    key_id: str


@dataclass(frozen=True, slots=True)
class KeyReport(Jsonable):
    """A new pair of keys: where they are, and the public one."""

    path: str  # of the private key
    public_path: str
    public_key: str  # base64, for LONGSHORE_TRUSTED_KEYS and `trusted_keys`
    key_id: str


@checks_arguments
def sign(
    uri: str | os.PathLike[str],
    key: str | os.PathLike[str],
    *,
    signed_name: str | None = None,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    credentials: Credentials | None = None,
    config: Config | None = None,
) -> SignReport:
    """Sign the manifest of a published model as it is stored now, in place of a signature that is there.

    What is signed is what the store answers. Where others can write, publish with `sign_key` instead, or compare the
    revision.

    Args:
        uri: Folder of the published checkpoint.
        key: File with the private key, as `generate_key` writes it.
        signed_name: Name under which those who trust the key will load it. None: the path without scheme and bucket.
        endpoint_url: URL of an S3-compatible server. None: as the AWS configuration says, else the provider's own.
        region: Region of the bucket. None: as the environment says.
        profile: Name of a profile in the AWS configuration.
        anonymous: Send unsigned requests, for public buckets.
        credentials: Keys for the store, a `storage.store_ref.Credentials`. None: those that the environment provides.
        config: Settings. None: read from the `LONGSHORE_*` variables of the environment.

    Returns:
        The revision that was signed, the name and the id of the key.

    Raises:
        ConfigError: An argument is wrong.
        InvalidKey: The file holds no private key.
        SigningUnavailable: The package `cryptography` is not installed.
        InvalidManifest: The manifest cannot be read.
        WeakDigest: It was published with XXH3, which proves nothing against an attacker.
        ObjectNotFound: The model was never published.
        ObjectChanged: The manifest was replaced meanwhile.
        StoreError: The store cannot be read or written.

    Example:
        ```python
        key = cluster.generate_key("release.key")
        cluster.sign("s3://models/llama", key.path)
        ```
    """
    config = config or Config.from_env()
    signing_key = SigningKey.read(key)
    policy = RetryPolicy()
    options = StoreOptions(endpoint_url, region, profile, anonymous)
    store, _ = open_uri(uri, options, credentials, config.read_timeout_s, config.source_rules())
    with closing(store):
        name = signed_name_of(store.uri, check_signed_name(signed_name))
        info = with_retries(lambda: store.stat(MANIFEST_KEY), policy)
        check_manifest_size(info, store.uri)
        data = read_whole(store, info, policy)
        manifest = parse_manifest(data)
        try:
            check_signable(manifest.hash)
        except WeakDigest as error:
            raise error.with_details(uri=store.uri) from None
        signature = sign_manifest(data, signing_key, name)
        with_retries(lambda: store.put(SIGNATURE_KEY, signature), policy)
        now = with_retries(lambda: store.stat(MANIFEST_KEY), policy)
        if (now.size_bytes, now.etag) != (info.size_bytes, info.etag):
            raise ObjectChanged("the manifest was replaced while it was signed: sign it again", uri=store.uri)
        return SignReport(store.uri, manifest.revision, name, key_id(signing_key.public))


@checks_arguments
def generate_key(path: str | os.PathLike[str]) -> KeyReport:
    """Write a new private key, and its public half to a file beside it that ends in `.pub`. Nothing is overwritten.

    Args:
        path: File for the private key, which only its owner can read (mode 0600).

    Returns:
        Both paths, the public key for `trusted_keys`, and its id.

    Raises:
        InvalidKey: A file is there already, or it cannot be written.
        SigningUnavailable: The package `cryptography` is not installed.
    """
    key = SigningKey.generate()
    public_path = key.save(path)
    return KeyReport(os.fspath(path), public_path, key.public, key_id(key.public))


asign = in_thread(sign)
