"""Who vouches for a manifest: a small object beside it, checked over the manifest's exact bytes before they are parsed.

    longshore.manifest.sig     {"format", "version", "algorithm": "ed25519", "key_id", "signature": base64}

The digests of a manifest say which bytes are the model; its signature says who says so. Whoever can write to the
bucket can replace both files, but cannot make a signature of a key that the loader trusts.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from storage.errors import BadSignature, ManifestUnsigned, UnknownSigner
from storage.publishing.signing_keys import SIGNATURE_BYTES, SigningKey, is_signed_by, key_id

SIGNATURE_KEY = "longshore.manifest.sig"
MAX_SIGNATURE_BYTES = 4096
SIGN_HINT = "sign it with `longshore sign` or `longshore publish --sign-key`"


class StoredSignature(BaseModel):
    """The stored JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["longshore.signature"]
    version: Literal[1]
    algorithm: Literal["ed25519"]
    key_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    signature: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{86}==$")]  # 64 bytes


def sign_manifest(manifest: bytes, key: SigningKey) -> bytes:
    """What is stored under SIGNATURE_KEY for a manifest of exactly those bytes."""
    signature = base64.b64encode(key.sign(manifest)).decode()
    stored = StoredSignature(
        format="longshore.signature", version=1, algorithm="ed25519", key_id=key_id(key.public), signature=signature
    )
    return json.dumps(stored.model_dump(), indent=1).encode() + b"\n"


def check_signature(manifest: bytes, stored: bytes | None, trusted_keys: Collection[str]) -> str:
    """The id of the trusted key that signed exactly these bytes; `stored` is None where there is no signature.

    Raises ManifestUnsigned, UnknownSigner (of a key that is not trusted), BadSignature (tampered with, or not a
    signature at all), SigningUnavailable.
    """
    if stored is None:
        raise ManifestUnsigned("the manifest is not signed, and only signed ones are trusted", hint=SIGN_HINT)
    found = parse_signature(stored)
    public = next((key for key in trusted_keys if key_id(key) == found.key_id), None)
    if public is None:
        raise UnknownSigner(
            "the manifest is signed with a key that is not trusted",
            hint="trust that key if you know whose it is, or have the model signed with one that you trust",
            found=found.key_id,
            trusted=",".join(sorted(map(key_id, trusted_keys))[:8]),
        )
    signature = base64.b64decode(found.signature)
    if len(signature) != SIGNATURE_BYTES or not is_signed_by(public, signature, manifest):
        raise BadSignature(
            "the signature is not for this manifest: one of them was changed",
            hint="publish and sign the model again; who could write there?",
            key_id=found.key_id,
        )
    return found.key_id


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
