"""Whether an object or a place is the one a publish has seen before: versions, and stores under two names."""

from __future__ import annotations

import uuid

from storage.checkpoints.checkpoint_files import PROBE_KEY
from storage.checkpoints.manifest import ManifestFile
from storage.errors import AccessDenied, ObjectChanged, ObjectNotFound
from storage.object_store import ObjectInfo, ObjectStore, read_bytes
from storage.ranges import ByteRange
from storage.retrying import RetryPolicy, with_retries


def same_place(source: ObjectStore, dest: ObjectStore, policy: RetryPolicy) -> bool:
    """Whether both stores are one: copying objects over themselves would end badly.

    URIs do not tell: two servers can have a bucket of one name, a folder many names. So something is written.
    """
    if source is dest or not (source.uri == dest.uri or source.uri[:5] == dest.uri[:5] == "file:"):
        return source is dest
    token = uuid.uuid4().hex.encode()
    with_retries(lambda: dest.put(PROBE_KEY, token), policy)
    try:
        return with_retries(lambda: read_bytes(source, PROBE_KEY, ByteRange(0, len(token))), policy) == token
    except (ObjectNotFound, AccessDenied):
        return False
    finally:
        with_retries(lambda: dest.delete(PROBE_KEY), policy)


def is_entry_of(entry: ManifestFile, source: ObjectInfo, stored: ObjectInfo | None) -> bool:
    """Whether an entry is for these very versions; without ETags nobody can tell."""
    return (
        stored is not None
        and None not in (entry.etag, entry.source_etag)
        and (entry.size_bytes, entry.source_etag) == (source.size_bytes, source.etag)
        and (entry.size_bytes, entry.etag) == (stored.size_bytes, stored.etag)
    )


def check_same(expected: ObjectInfo, now: ObjectInfo | None, uri: str) -> None:
    """Raise ObjectChanged unless size and, where both are known, ETag are the same."""
    same = (
        now is not None
        and now.size_bytes == expected.size_bytes
        and (expected.etag == now.etag or None in (expected.etag, now.etag))
    )
    if not same:
        raise ObjectChanged(
            "object was replaced or removed while it was published",
            hint="publish again when nobody writes to the folder",
            uri=uri,
            key=expected.key,
            expected=expected.etag,
            found=now.etag if now else "nothing",
        )
