"""Who vouches for a manifest, and under which name: a small object beside it, checked before the manifest is parsed.

    longshore.manifest.sig     {"format", "version", "algorithm": "ed25519", "key_id", "name", "signature": base64}

    what is signed: "longshore.signature\\n2\\n" name "\\n" SHA-256 of the manifest's exact bytes, in hex "\\n"

The digests of a manifest say which bytes are the model; its signature says who says so, and of which model. Whoever can
write to the bucket can replace all files, by those of another model too, but cannot make a signature of a key that the
loader trusts. A name is by default the path without scheme and bucket, so a mirror needs no signature of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from storage.checksum import COLLISION_RESISTANT
from storage.errors import BadSignature, ManifestUnsigned, PublishError, SignedNameMismatch, UnknownSigner, WeakDigest
from storage.problems import quote
from storage.publishing.signing_keys import SIGNATURE_BYTES, SigningKey, TrustedKey, is_signed_by, key_id
from storage.store_ref import path_of

SIGNATURE_KEY = "longshore.manifest.sig"
SIGNATURE_VERSION: Literal[2] = 2
MAX_SIGNATURE_BYTES = 4096
MAX_NAME_CHARACTERS = 512  # four bytes each at most, and the rest of the object beside them
SIGN_HINT = "sign it with `longshore sign` or `longshore publish --sign-key`"


class StoredSignature(BaseModel):
    """The stored JSON. Version 1 had no name, and its signature was of the manifest's bytes alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["longshore.signature"]
    version: Literal[1, 2]
    algorithm: Literal["ed25519"]
    key_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    name: Annotated[str, StringConstraints(max_length=MAX_NAME_CHARACTERS)] = ""
    signature: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{86}==$")]  # 64 bytes


def is_name(name: str) -> bool:
    """Whether a model can be signed under that name: one printable line of 512 characters at most."""
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and name == name.strip()


def signed_name_of(uri: str, given: str = "") -> str:
    """Return the name to sign a model under: `given`, or by default the path of its URI.

    Raises PublishError when neither can be a name.
    """
    name = given or path_of(uri)
    if not is_name(name):
        raise PublishError(
            f"a model cannot be signed as {quote(name)}",
            hint=f"give signed_name (--signed-name): one line of at most {MAX_NAME_CHARACTERS} printable characters",
            uri=uri,
        )
    return name


def sign_manifest(manifest: bytes, key: SigningKey, name: str) -> bytes:
    """Return what is stored under SIGNATURE_KEY for a manifest of exactly those bytes and that name (`is_name`)."""
    signature = base64.b64encode(key.sign(_statement(manifest, name))).decode()
    stored = StoredSignature(
        format="longshore.signature",
        version=SIGNATURE_VERSION,
        algorithm="ed25519",
        key_id=key_id(key.public),
        name=name,
        signature=signature,
    )
    return json.dumps(stored.model_dump(), indent=1, ensure_ascii=False).encode() + b"\n"


def check_signature(manifest: bytes, stored: bytes | None, trusted_keys: Collection[str], name: str) -> str:
    """Return the id of the trusted key that signed exactly these bytes under that name.

    Args:
        manifest: the manifest as it was read.
        stored: the object under SIGNATURE_KEY; None where there is none.
        trusted_keys: as `signing_keys.trusted_key` writes them.
        name: the one that is wanted.

    Raises ManifestUnsigned, UnknownSigner (of a key that is not trusted), BadSignature (tampered with, or not a
    signature at all), SignedNameMismatch, SigningUnavailable.
    """
    if stored is None:
        raise ManifestUnsigned("the manifest is not signed, and only signed ones are trusted", hint=SIGN_HINT)
    found = parse_signature(stored)
    trusted = [key for key in map(TrustedKey.parse, trusted_keys) if key_id(key.public) == found.key_id]
    if not trusted:
        raise UnknownSigner(
            "the manifest is signed with a key that is not trusted",
            hint="trust that key if you know whose it is, or have the model signed with one that you trust",
            found=found.key_id,
            trusted=",".join(sorted(key_id(TrustedKey.parse(key).public) for key in trusted_keys)[:8]),
        )
    signature = base64.b64decode(found.signature)
    signed = manifest if found.version == 1 else _statement(manifest, found.name)
    if len(signature) != SIGNATURE_BYTES or not is_signed_by(trusted[0].public, signature, signed):
        raise BadSignature(
            "the signature is not for this manifest: one of them was changed",
            hint="publish and sign the model again; who could write there?",
            key_id=found.key_id,
        )
    if found.version == 1:
        raise SignedNameMismatch(
            "the manifest was signed by an earlier version of Longshore, which did not say of which model it is",
            hint="sign it again: longshore sign URI --key FILE",
            key_id=found.key_id,
        )
    if found.name != name:
        raise SignedNameMismatch(
            f"the manifest is signed as {quote(found.name)}, not as {quote(name)}",
            hint=f"if that is the model you mean, a mirror or a copy of it, say signed_name={found.name!r}"
            " (--signed-name); else somebody has put another model in this place",
            key_id=found.key_id,
        )
    if not any(key.may_sign(name) for key in trusted):
        raise SignedNameMismatch(
            f"the key that signed the manifest is trusted for other names than {quote(name)}",
            hint="LONGSHORE_TRUSTED_KEYS, or trusted_keys, says for which: KEY:NAME",
            key_id=found.key_id,
        )
    return found.key_id


def _statement(manifest: bytes, name: str) -> bytes:
    """Return the bytes that a signature is over. A manifest begins with a brace, so this is none."""
    text = f"longshore.signature\n{SIGNATURE_VERSION}\n{name}\n{hashlib.sha256(manifest).hexdigest()}\n"
    return text.encode("utf-8", "surrogatepass")


def check_signable(hash_name: str) -> None:
    """Raise WeakDigest unless a signature of a manifest with such digests vouches for the bytes of the model.

    Args:
        hash_name: name of the manifest's hash (`storage.checksum`).
    """
    if hash_name not in COLLISION_RESISTANT:
        raise WeakDigest(
            f"{hash_name} digests are against accidents only: other bytes with the same digest are easily made, so a"
            " signature would not protect the weights",
            hint="publish the model again: longshore publish URI --hash blake3 --sign-key FILE",
            hash=hash_name,
        )


def parse_signature(data: bytes) -> StoredSignature:
    """The stored object, checked for its form only. Raises BadSignature."""
    if len(data) > MAX_SIGNATURE_BYTES:
        raise BadSignature(f"a signature of {len(data)} bytes; at most {MAX_SIGNATURE_BYTES} are read")
    try:
        return StoredSignature.model_validate_json(data)
    except ValidationError as error:
        fields = sorted({".".join(map(str, entry["loc"]))[:40] for entry in error.errors()})
        known = [name for name in fields if name in StoredSignature.model_fields]
        raise BadSignature(
            f"not a signature that this version reads{': ' + ', '.join(known) if known else ''}", hint=SIGN_HINT
        ) from None
