"""What fsspec's file systems say of an object, each in its own dialect, as size, version and checksums."""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Mapping
from typing import Any

from storage.object_store import ObjectInfo

# What file systems call a version, the strongest first; the last ones are dates.
_VERSION_FIELDS = ("ETag", "etag", "generation", "md5", "md5Hash", "blob_id", "sha", "version", "version_id")
_DATE_FIELDS = ("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "modified", "created")


def info_of(key: str, facts: Mapping[str, Any]) -> ObjectInfo:
    """`facts`: an entry of `info` or of a detailed listing, with its size."""
    return ObjectInfo(key, int(facts["size"]), version_of(facts), checksums_of(facts))


def version_of(facts: Mapping[str, Any]) -> str | None:
    """The best version among what `info` said. A date is taken with the size, and proves less than a tag."""
    if (tag := version_tag(facts)) is not None:
        return tag
    for name in _DATE_FIELDS:
        if value := facts.get(name):
            return f"{facts['size']}-{value.isoformat() if hasattr(value, 'isoformat') else value}"
    return None


def version_tag(facts: Mapping[str, Any]) -> str | None:
    """A version that is no date; None when the file system gives none."""
    for name in _VERSION_FIELDS:
        if isinstance(value := facts.get(name), str | int) and value != "":
            return str(value).strip().removeprefix("W/").strip('"')
    return None


def checksums_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """Whole-object checksums in hex: Google's md5Hash and crc32c, the sha256 that Hugging Face's LFS has."""
    found: dict[str, str] = {}
    for field, name in (("md5Hash", "md5"), ("crc32c", "crc32c")):
        if isinstance(value := facts.get(field), str):
            with contextlib.suppress(binascii.Error, ValueError):
                found[name] = base64.b64decode(value, validate=True).hex()
    lfs = facts.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, Mapping) else None
    if isinstance(sha256, str) and len(sha256) == 64:
        found["sha256"] = sha256
    return found
