"""The verbs of signatures: make a pair of keys, sign a manifest that is there."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass

from cluster.config import Config
from cluster.public_functions import checks_arguments, in_thread
from cluster.request import StoreOptions, open_uri, read_signed_name
from cluster.telemetry.rank_report import Jsonable
from storage.checkpoints.checkpoint import check_manifest_size
from storage.checkpoints.checkpoint_files import read_whole
from storage.checkpoints.manifest import MANIFEST_KEY, parse_manifest
from storage.errors import ObjectChanged, WeakDigest
from storage.publishing.signing import SIGNATURE_KEY, SigningKey, check_signable, key_id, sign_manifest, signed_name_of
from storage.store_ref import Credentials
from storage.stores.retrying import RetryPolicy, with_retries


@dataclass(frozen=True, slots=True)
class SignReport(Jsonable):
    """What was signed."""

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
    """Sign the manifest of a published model as it is stored now, with the private key in the file `key`.

    `signed_name`: the name under which whoever trusts the key will load it; None: the path without scheme and bucket.
    A signature there is replaced. What is signed is what the store answers: where others can write, publish with
    `sign_key` instead, or compare the revision. Raises InvalidKey, SigningUnavailable, InvalidManifest, WeakDigest
    (published with XXH3), StoreError (ObjectNotFound when the model was never published).
    """
    config = config or Config.from_env()
    signing_key = SigningKey.read(key)
    policy = RetryPolicy()
    options = StoreOptions(endpoint_url, region, profile, anonymous)
    store, _ = open_uri(uri, options, credentials, config.read_timeout_s, config.source_rules())
    with closing(store):
        name = signed_name_of(store.uri, read_signed_name(signed_name))
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
    """Write a new private key to `path` (mode 0600) and its public half to `path`.pub; nothing is overwritten.

    Raises InvalidKey, SigningUnavailable.
    """
    key = SigningKey.generate()
    public_path = key.save(path)
    return KeyReport(os.fspath(path), public_path, key.public, key_id(key.public))


asign = in_thread(sign)
