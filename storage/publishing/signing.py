"""Signatures of manifests, and the Ed25519 keys that make and check them.

    longshore.manifest.sig     {"format", "version", "algorithm": "ed25519", "key_id", "name", "signature": base64}

    what is signed: "longshore.signature\\n2\\n" name "\\n" SHA-256 of the manifest's exact bytes, in hex "\\n"

The digests of a manifest define the bytes of the model. Its signature proves who published it, and for which model. An
attacker who can write to the bucket can replace all files, even by those of another signed model. But nobody can sign
with a key that the loader trusts. The signed name is by default the path without scheme and bucket, so a mirror needs
no signature of its own. A signature is checked before its manifest is parsed.

    longshore keygen FILE  -->  FILE      PKCS#8 PEM, mode 0600: stays where models are published
                                FILE.pub  PEM: for everyone who loads them, or as base64 in LONGSHORE_TRUSTED_KEYS

The standard library reads public keys. Making keys, signing and checking need the package `cryptography`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from storage.checksum import COLLISION_RESISTANT
from storage.errors import (
    BadSignature,
    InvalidKey,
    ManifestUnsigned,
    PublishError,
    SignedNameMismatch,
    SigningUnavailable,
    UnknownSigner,
    WeakDigest,
)
from storage.problems import install_hint, quote
from storage.store_ref import path_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


KEY_BYTES = 32  # size of a raw public key
SIGNATURE_BYTES = 64
MAX_KEY_FILE_BYTES = 16 << 10
_READ_HINT = "give a file made by `longshore keygen`: FILE to sign with, FILE.pub to load with"
_SPKI_PREFIX = bytes.fromhex("302a300506032b6570032100")  # SubjectPublicKeyInfo of Ed25519, up to the raw key
_PUBLIC_HINT = "a public key is a PEM file (BEGIN PUBLIC KEY) or 32 bytes in base64, as `longshore keygen` prints it"


def public_key(source: str | os.PathLike[str]) -> str:
    """Return the public key that `source` is, or that the file `source` contains, in base64. Raises InvalidKey."""
    text = os.fspath(source)
    if isinstance(source, str):
        with contextlib.suppress(InvalidKey):
            return _from_base64(source)
    data = _read_key_file(text)
    if b"PRIVATE KEY" in data:
        raise InvalidKey("this is a private key, but a public one is needed", hint=_PUBLIC_HINT, path=text)
    lines = data.decode("ascii", "replace").split()
    body = "".join(lines)
    head, tail = "-----BEGINPUBLICKEY-----", "-----ENDPUBLICKEY-----"
    if body.startswith(head) and body.endswith(tail):
        der = _decoded(body[len(head) : -len(tail)])
        if len(der) == len(_SPKI_PREFIX) + KEY_BYTES and der.startswith(_SPKI_PREFIX):
            return base64.b64encode(der[len(_SPKI_PREFIX) :]).decode()
        raise InvalidKey("not an Ed25519 public key", hint=_PUBLIC_HINT, path=text)
    try:
        return _from_base64(body)
    except InvalidKey as error:
        raise error.with_details(path=text) from None


def trusted_key(source: str | os.PathLike[str]) -> str:
    """Return a trusted key as text: a public key, or `KEY:NAME` if it may sign only models of that name.

    Args:
        source: base64 or a file, as for `public_key`. A str may end in `:NAME`, the name under which a model must be
            signed. `*` in it matches any characters.

    Raises InvalidKey.
    """
    if not isinstance(source, str) or ":" not in source:
        return public_key(source)
    key, *names = (part.strip() for part in source.split(":"))
    if not all(name and name.isprintable() for name in names):
        raise InvalidKey("a trusted key has an empty name", hint="write KEY, or KEY:NAME")
    return str(TrustedKey(public_key(key), tuple(names)))


def with_absolute_files(keys: str, folder: str) -> str:
    """Return trusted keys, separated by commas, with relative file names joined to `folder`."""
    found = []
    for source in keys.split(","):
        key, colon, names = source.strip().partition(":")
        try:
            _from_base64(key)
        except InvalidKey:
            key = os.path.join(folder, key)
        found.append(key + colon + names)
    return ",".join(found)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key, and patterns that the name of a model must match. It must match all of them."""

    public: str
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the key from a text that `trusted_key` returned."""
        public, *names = text.split(":")
        return cls(public, tuple(names))

    def __str__(self) -> str:
        return ":".join((self.public, *self.names))

    def may_sign(self, name: str) -> bool:
        """Return whether the key is trusted for a model of that name."""
        return all(_matches(pattern, name) for pattern in self.names)

    def both(self, other: TrustedKey) -> TrustedKey:
        """Return the same key, trusted for the names that both keys are trusted for."""
        return TrustedKey(self.public, tuple(dict.fromkeys((*self.names, *other.names))))


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def key_id(public: str) -> str:
    """Return the id of a public key in signatures: 32 hex digits of its SHA-256."""
    return hashlib.sha256(_decoded(public)).hexdigest()[:32]


def is_signed_by(public: str, signature: bytes, data: bytes) -> bool:
    """Return whether the private half of `public` made `signature` over exactly `data`. Raises SigningUnavailable."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        _unavailable(error)
    try:
        Ed25519PublicKey.from_public_bytes(_decoded(public)).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


class SigningKey:
    """A private key. It stays in the process that read it: its repr is redacted, and it cannot be pickled or copied."""

    __slots__ = ("_key", "public")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = base64.b64encode(key.public_key().public_bytes_raw()).decode()

    @classmethod
    def generate(cls) -> Self:
        """Return a new key. Raises SigningUnavailable."""
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ImportError as error:
            _unavailable(error)
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Return the key in a PEM file without a passphrase. Raises InvalidKey, SigningUnavailable."""
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
        except ImportError as error:
            _unavailable(error)
        text = os.fspath(path)
        data = _read_key_file(text)
        try:
            key = load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            # `from None`, because the parser's message may quote the private key.
            raise InvalidKey(
                "not a private key in PEM without a passphrase", hint="longshore keygen makes one", path=text
            ) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidKey("a private key of another kind than Ed25519", hint="longshore keygen makes one", path=text)
        return cls(key)

    def sign(self, data: bytes) -> bytes:
        """Return the signature over exactly `data`, 64 bytes."""
        return self._key.sign(data)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the private key to a new file that only its owner can read, and the public key to `path`.pub.

        Returns the path of the public key. Raises InvalidKey if one of them exists or cannot be written.
        """
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

        text = os.fspath(path)
        _write_new(text, self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
        public_pem = self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        try:
            _write_new(f"{text}.pub", public_pem, 0o644)
        except InvalidKey:
            os.unlink(text)  # this call has just created it
            raise
        return f"{text}.pub"

    def __repr__(self) -> str:
        return f"SigningKey(<private, redacted>, key_id={key_id(self.public)})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SigningKey cannot be pickled or copied, so that a private key never leaves its process")


def _from_base64(text: str) -> str:
    data = _decoded(text.strip())
    if len(data) != KEY_BYTES:
        raise InvalidKey("not a public key", hint=_PUBLIC_HINT)
    return base64.b64encode(data).decode()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidKey("not base64", hint=_PUBLIC_HINT) from None


def _read_key_file(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "not a path"
        raise InvalidKey(f"cannot read the key: {what}", hint=_READ_HINT, path=path[:200]) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidKey("the key is not a regular file", hint=_READ_HINT, path=path)
        data = os.read(descriptor, MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidKey(f"cannot read the key: {error.strerror}", hint=_READ_HINT, path=path) from error
    finally:
        os.close(descriptor)
    if len(data) > MAX_KEY_FILE_BYTES:
        raise InvalidKey(f"not a key: the file has more than {MAX_KEY_FILE_BYTES} bytes", hint=_READ_HINT, path=path)
    return data


def _write_new(path: str, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except FileExistsError as error:
        raise InvalidKey(
            "the file exists already, and keys are never overwritten", hint="choose another file name", path=path
        ) from error
    except OSError as error:
        raise InvalidKey(f"cannot write the key: {error.strerror}", path=path) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        os.unlink(path)  # this call has just created it
        raise InvalidKey(f"cannot write the key: {error.strerror}", path=path) from error


def _unavailable(error: ImportError) -> NoReturn:
    raise SigningUnavailable("signatures need the package cryptography", hint=install_hint("signing")) from error


SIGNATURE_KEY = "longshore.manifest.sig"
SIGNATURE_VERSION: Literal[2] = 2
MAX_SIGNATURE_BYTES = 4096
MAX_NAME_CHARACTERS = 512  # at most four bytes each, so that name and signature fit MAX_SIGNATURE_BYTES
SIGN_HINT = "sign it with `longshore sign` or `longshore publish --sign-key`"


class StoredSignature(BaseModel):
    """The JSON of a stored signature. Version 1 had no name, and was a signature of the manifest's bytes alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["longshore.signature"]
    version: Literal[1, 2]
    algorithm: Literal["ed25519"]
    key_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    name: Annotated[str, StringConstraints(max_length=MAX_NAME_CHARACTERS)] = ""
    signature: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{86}==$")]  # 64 bytes


def is_name(name: str) -> bool:
    """Return whether a model can be signed under that name: one printable line of at most 512 characters."""
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and name == name.strip()


def signed_name_of(uri: str, given: str = "") -> str:
    """Return the name under which to sign a model: `given`, or by default the path of its URI.

    Raises PublishError if the result is not a valid name.
    """
    name = given or path_of(uri)
    if not is_name(name):
        raise PublishError(
            f"a model cannot be signed under the name {quote(name)}",
            hint=f"give signed_name (--signed-name): one line of at most {MAX_NAME_CHARACTERS} printable characters",
            uri=uri,
        )
    return name


def sign_manifest(manifest: bytes, key: SigningKey, name: str) -> bytes:
    """Return the object to store under SIGNATURE_KEY, for a manifest of exactly these bytes and a name (`is_name`)."""
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
        manifest: the bytes of the manifest.
        stored: the object under SIGNATURE_KEY; None if there is none.
        trusted_keys: as `trusted_key` returns them.
        name: the name under which the manifest must be signed.

    Raises ManifestUnsigned, UnknownSigner (its key is not trusted), BadSignature (changed, or not a signature at all),
    SignedNameMismatch, SigningUnavailable.
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
            "the signature does not fit this manifest; one of them was changed",
            hint="publish and sign the model again, and check who can write to this place",
            key_id=found.key_id,
        )
    if found.version == 1:
        raise SignedNameMismatch(
            "the manifest was signed by an earlier version of Longshore, whose signatures do not name the model",
            hint="sign it again: longshore sign URI --key FILE",
            key_id=found.key_id,
        )
    if found.name != name:
        raise SignedNameMismatch(
            f"the manifest is signed as {quote(found.name)}, not as {quote(name)}",
            hint=f"if that is the right model, and this a mirror or copy of it, set signed_name={found.name!r}"
            " (--signed-name); otherwise somebody has put another model in this place",
            key_id=found.key_id,
        )
    if not any(key.may_sign(name) for key in trusted):
        raise SignedNameMismatch(
            f"the key that signed the manifest is trusted for other names than {quote(name)}",
            hint="LONGSHORE_TRUSTED_KEYS or trusted_keys limits the names: KEY:NAME",
            key_id=found.key_id,
        )
    return found.key_id


def _statement(manifest: bytes, name: str) -> bytes:
    """Return the bytes that are signed. They cannot be a manifest, which begins with a brace."""
    text = f"longshore.signature\n{SIGNATURE_VERSION}\n{name}\n{hashlib.sha256(manifest).hexdigest()}\n"
    return text.encode("utf-8", "surrogatepass")


def check_signable(hash_name: str) -> None:
    """Raise WeakDigest unless a signature of a manifest with such digests protects the bytes of the model.

    Args:
        hash_name: name of the manifest's hash (`storage.checksum`).
    """
    if hash_name not in COLLISION_RESISTANT:
        raise WeakDigest(
            f"{hash_name} digests only detect accidents: other bytes with the same digest are easy to make, so a"
            " signature would not protect the weights",
            hint="publish the model again: longshore publish URI --hash blake3 --sign-key FILE",
            hash=hash_name,
        )


def parse_signature(data: bytes) -> StoredSignature:
    """Parse a stored signature and check its form only. Raises BadSignature."""
    if len(data) > MAX_SIGNATURE_BYTES:
        raise BadSignature(f"the signature has {len(data)} bytes; at most {MAX_SIGNATURE_BYTES} are read")
    try:
        return StoredSignature.model_validate_json(data)
    except ValidationError as error:
        fields = sorted({".".join(map(str, entry["loc"]))[:40] for entry in error.errors()})
        known = [name for name in fields if name in StoredSignature.model_fields]
        raise BadSignature(
            f"not a signature that this version reads{': ' + ', '.join(known) if known else ''}", hint=SIGN_HINT
        ) from None
