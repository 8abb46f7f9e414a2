"""The root of every error that Longshore raises, and the errors about bytes.

    LongshoreError                  has .message, .hint, .details; pickles; str() says what, where, what to do
    +- StoreError                   an object store did not do what was asked
    |  +- ObjectNotFound            no such bucket, key or path
    |  +- AccessDenied              credentials missing, wrong or not allowed
    |  |  +- CredentialsExpired     they were valid and no longer are; renewed if possible      (worth a retry)
    |  +- StoreUnavailable          refused, reset, timed out, name not resolved, 408, 5xx    (worth a retry)
    |  |  +- Throttled              503 SlowDown, 429, KMS.ThrottlingException...             (worth a slower retry)
    |  |  +- ShortRead              fewer bytes than the range asked for                      (worth a retry)
    |  |  +- ReadEnded              the reader ended it: out of time, or no longer needed     (worth a retry)
    |  |  +- PeerUnavailable        another node did not send a chunk                         (worth a retry)
    |  +- ProxyRefused              an HTTP proxy did not pass the request on
    |  +- RangeMismatch             the answer has other bytes than were asked for            (worth a retry)
    |  +- ObjectChanged             ETag or size differs from what the load pinned
    |  +- UnsupportedStore          no such scheme, or its package is not installed
    |  +- SourceRefused             a scheme, endpoint or bucket that the settings do not allow; no request was sent
    |  +- InvalidUri                not a valid URI or endpoint; no request was sent
    +- CheckpointError              the files are not a checkpoint that can be loaded
    |  +- NotACheckpoint            nothing loadable under the URI
    |  +- PickleRefused             only pickle files (.bin, .pt) there
    |  +- InvalidHeader             a safetensors header breaks the format's rules
    |  +- InvalidIndex              model.safetensors.index.json and the files disagree
    |  +- InvalidState              the saved state of an optimizer is not one that is written here
    +- ManifestError
    |  +- InvalidManifest           not a manifest, or it contradicts itself
    |  |  +- NewerManifest          of a later format than this version reads
    |  +- ManifestMismatch          a valid manifest, for other bytes than are stored
    |  +- RevisionMismatch          the stored revision of the model is not the one that was asked for
    |  +- InvalidAmax               longshore.amax has the published bytes, but not the maxima of these weights
    |  +- SignatureError            only signed manifests are trusted, and this is not one
    |     +- ManifestUnsigned       without a signature, or without a manifest to sign
    |     +- UnknownSigner          signed with a key that is not trusted
    |     +- BadSignature           manifest or signature were changed, or it is not a signature
    |     +- SignedNameMismatch     signed under another name than the model's, or without a name
    |     +- WeakDigest             digests in the manifest can be forged, so a signature of it proves nothing
    +- IntegrityError               all bytes arrived, but they are not the published ones
    +- PublishError                 a checkpoint could not be published safely
    +- InvalidKey                   not a key of the required kind, or a key file that cannot be read or written
    +- DependencyChanged            a package lacks a private name that is needed, so its version was not tested
    +- SigningUnavailable           the package that signs and checks signatures is not installed
    +- ArenaError
    |  +- ArenaTooSmall             fewer slots than a load needs to make progress
    |  +- ArenaBusy                 other loads held the slots for too long; names them
    |  +- ArenaTooLarge             /dev/shm cannot hold it
    |  +- ArenaCorrupt              the file is not an arena of this version
    +- DiskTierError                the folder for chunks on disk cannot be used
       +- DiskChunkUnusable         a file in it is not exactly the chunk that its name says

Every error takes one message, an optional hint and keyword details, so all of them survive pickling between
actors (an exception whose __init__ takes several positional arguments does not, ray-project/ray#20830).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self


class LongshoreError(Exception):
    """The root of the tree. `details` contains plain values only (numbers, strings), never secrets."""

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message  # what was wrong
        self.hint = hint  # what to do about it; may be empty
        self.details = details  # where it was: bucket, key, chunk, worker, expected, found...

    def __str__(self) -> str:
        where = ", ".join(f"{name}={value}" for name, value in self.details.items() if value is not None)
        text = f"{self.message} ({where})" if where else self.message
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.details)

    def with_details(self, **details: Any) -> Self:
        """Add details and return the same error. Details that it has already are kept."""
        self.details = {**details, **self.details}
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Let pydantic write an error as JSON and read it back, without pickle. It calls this; nobody else does."""
        from pydantic_core import core_schema  # not at the top: ranks import this module

        written = core_schema.plain_serializer_function_ser_schema(_as_plain)
        return core_schema.no_info_plain_validator_function(_from_plain, serialization=written)


def _as_plain(error: LongshoreError) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None))
    details = {name: value if isinstance(value, plain) else str(value) for name, value in error.details.items()}
    return {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "details": details}


def _from_plain(given: Any) -> LongshoreError:
    """Return the error of a class that is known here, else a LongshoreError. Raises ValueError for other data."""
    if isinstance(given, LongshoreError):
        return given
    if not isinstance(given, dict) or given.keys() != {"kind", "message", "hint", "details"}:
        raise ValueError("not an error")
    details = given["details"]
    texts = isinstance(given["message"], str) and isinstance(given["hint"], str)
    if not texts or not isinstance(details, dict) or {"self", "message", "hint"} & details.keys():
        raise ValueError("not an error")
    kind = next((kind for kind in _kinds(LongshoreError) if kind.__name__ == given["kind"]), LongshoreError)
    return kind(given["message"], hint=given["hint"], **details)


def _kinds(kind: type[LongshoreError]) -> Iterator[type[LongshoreError]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)


def _rebuild(kind: type[LongshoreError], message: str, hint: str, details: dict[str, Any]) -> LongshoreError:
    return kind(message, hint=hint, **details)


class StoreError(LongshoreError):
    """An object store did not do what was asked."""


class ObjectNotFound(StoreError):
    """No such bucket, key or path."""


class AccessDenied(StoreError):
    """Credentials are missing, wrong or not allowed to do this."""


class CredentialsExpired(AccessDenied):
    """The credentials or the signature are no longer valid; new ones may be available."""


class StoreUnavailable(StoreError):
    """The store could not be reached or answered with a server error; worth a retry."""


class Throttled(StoreUnavailable):
    """The store asked for fewer requests (503 SlowDown, 429)."""


class ShortRead(StoreUnavailable):
    """The body ended before the range was filled."""


class PeerUnavailable(StoreUnavailable):
    """Another node did not send a chunk. It comes from a further node, or from the store."""


class ReadEnded(StoreUnavailable):
    """The reader itself ended the read, because its time was over or its bytes were no longer needed."""


class ProxyRefused(StoreError):
    """An HTTP proxy refused to pass the request on. The store did not receive it."""


class RangeMismatch(StoreError):
    """The answer's Content-Range or length is not what was requested."""


class ObjectChanged(StoreError):
    """The object is not the version that was pinned."""


class UnsupportedStore(StoreError):
    """No store for this URI scheme, or the package it needs is not installed."""


class SourceRefused(StoreError):
    """A place that the settings do not allow. No request was sent."""


class InvalidUri(StoreError):
    """Not a valid URI, path or endpoint. No request was sent."""


class CheckpointError(LongshoreError):
    """The files are not a checkpoint that can be loaded."""


class NotACheckpoint(CheckpointError):
    """No safetensors files under the URI."""


class PickleRefused(CheckpointError):
    """Only pickle checkpoints are there. Loading those runs code."""


class InvalidHeader(CheckpointError):
    """A safetensors header breaks the format's rules; the message lists every problem found."""


class InvalidIndex(CheckpointError):
    """model.safetensors.index.json is broken or names other tensors than the files hold."""


class InvalidState(CheckpointError):
    """The saved state of a training run is missing, broken, or not one that this version writes."""


class ManifestError(LongshoreError):
    """Something is wrong with longshore.manifest.json."""


class InvalidManifest(ManifestError):
    """Not a manifest this version reads, or one that contradicts itself."""


class NewerManifest(InvalidManifest):
    """A manifest of a later format than this version reads. It may be valid."""


class ManifestMismatch(ManifestError):
    """A valid manifest, for other bytes than the ones stored."""


class RevisionMismatch(ManifestError):
    """The stored revision of the model is not the one that was asked for. Nothing of it was loaded."""


class InvalidAmax(ManifestError):
    """The recorded largest values of weights cannot be read, or belong to other weights."""


class SignatureError(ManifestError):
    """Only signed manifests are trusted, and this is not one."""


class ManifestUnsigned(SignatureError):
    """There is no signature, or not even a manifest."""


class UnknownSigner(SignatureError):
    """Signed with a key that is not trusted."""


class BadSignature(SignatureError):
    """The signature does not fit this manifest: one of them was changed, or it is not a signature."""


class SignedNameMismatch(SignatureError):
    """The signature is valid, but for a model of another name, or without a name."""


class WeakDigest(SignatureError):
    """The manifest's digests are not collision resistant, so a signature of it would not protect the weights."""


class IntegrityError(LongshoreError):
    """All bytes arrived, but they are not the ones that were published."""


class PublishError(LongshoreError):
    """A checkpoint could not be published safely."""


class InvalidKey(LongshoreError):
    """Not a key of the required kind, or a file that cannot be read or written. Never quotes the key."""


class DependencyChanged(LongshoreError):
    """A package lacks a private name that Longshore needs, so its version is not one that was tested."""


class SigningUnavailable(LongshoreError):
    """The package that signs and checks signatures is not installed."""


class ArenaError(LongshoreError):
    """Something is wrong with a node's shared-memory arena."""


class ArenaTooSmall(ArenaError):
    """The arena has fewer slots than a load needs to make progress."""


class ArenaBusy(ArenaError):
    """Other loads held slots that this one needs for longer than it may wait. `details` name them."""


class ArenaTooLarge(ArenaError):
    """/dev/shm (or host memory) cannot hold the arena that was asked for."""


class ArenaCorrupt(ArenaError):
    """The file is not an arena of this version."""


class DiskTierError(LongshoreError):
    """The folder for chunks on disk cannot be used. Loads continue without it."""


class DiskChunkUnusable(DiskTierError):
    """A file of the disk tier is not exactly the chunk that its name says. The chunk is read from elsewhere."""
