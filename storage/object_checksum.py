"""What a store says of an object's bytes, asked while a load without a manifest is planned."""

from __future__ import annotations

from dataclasses import dataclass

from storage.checksum import DIGEST_SIZES
from storage.errors import AccessDenied, StoreError, UnsupportedStore
from storage.object_store import KeepsParts, ObjectInfo, ObjectStore
from storage.retrying import RetryPolicy, with_retries
from storage.store_checksum import StoreChecksum

NO_CHECKSUM = "the store keeps no checksum of it"
NOT_COMBINABLE = "the store keeps no checksum of it that chunks can be combined to"
_COMBINABLE = ("crc64nvme", "crc32c", "crc32")  # in order of preference: the widest, then the cheapest
_WHOLE_ONLY = ("sha256", "md5", "etag_md5")  # computed over one chunk that is the whole object


@dataclass(frozen=True, slots=True)
class AskedChecksum:
    """What came of asking."""

    checksum: StoreChecksum | None
    reason: str = ""  # why there is none

    def knowing(self, head: bytes) -> AskedChecksum:
        """With the digest of the object's first bytes, which no rank will read, where chunks can be combined to it."""
        if self.checksum is None or not self.checksum.combines:
            return self
        return AskedChecksum(self.checksum.knowing(head))


def ask_checksum(store: ObjectStore, info: ObjectInfo, chunk_bytes: int, policy: RetryPolicy) -> AskedChecksum:
    """The checksum by which a load in chunks of `chunk_bytes` can check the object. Two requests at most.

    A store that refuses to tell is no error: then the object is not checked.
    """
    try:
        now = with_retries(lambda: store.stat(info.key), policy)
        if (now.etag, now.size_bytes) != (info.etag, info.size_bytes):
            return AskedChecksum(None, "it was replaced while the load was planned")  # and its reads will fail
        found = _whole(now, chunk_bytes) or _composite(store, now, policy)
    except (AccessDenied, UnsupportedStore):
        return AskedChecksum(None, "the store may not be asked for its checksum")
    except StoreError as error:
        return AskedChecksum(None, f"the store could not be asked for its checksum ({type(error).__name__})")
    if found is not None:
        return AskedChecksum(found)
    return AskedChecksum(None, NOT_COMBINABLE if now.checksums or now.composites else NO_CHECKSUM)


def _whole(info: ObjectInfo, chunk_bytes: int) -> StoreChecksum | None:
    usable = _COMBINABLE if info.size_bytes > chunk_bytes else (*_COMBINABLE, *_WHOLE_ONLY)
    for name in usable:
        hash_name = name.removeprefix("etag_")
        digest = _digest(hash_name, info.checksums.get(name, ""))
        if digest is not None:
            return StoreChecksum(hash_name, digest, certain=hash_name == name)
    return None


def _composite(store: ObjectStore, info: ObjectInfo, policy: RetryPolicy) -> StoreChecksum | None:
    name = next((name for name in _COMBINABLE if name in info.composites), None)
    digest = _digest(name, info.composites[name]) if name is not None else None
    if name is None or digest is None or not isinstance(store, KeepsParts):
        return None
    ends = with_retries(lambda: store.part_ends(info.key, info.etag), policy)
    return StoreChecksum(name, digest, ends) if ends else None


def _digest(hash_name: str, text: str) -> bytes | None:
    """The bytes of a digest in hex; None for what is none. A store's word is not to be trusted."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_SIZES[hash_name] else None
