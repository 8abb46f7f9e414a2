"""What the head of an S3 server's answer must say before a byte of its body is believed. Pure.

What a server may get wrong (200 for a range, no If-Match, other range, other length, an encoding, a header twice)
is refused here; what it refuses itself becomes an error of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from storage.errors import ObjectChanged, RangeMismatch, StoreError
from storage.ranges import ByteRange
from storage.s3.errors import one_line, parse_error_body, store_error

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\s*", re.ASCII)
# The last: stored by mistake by old SDKs, the body is as uploaded.
_PLAIN_ENCODINGS = {"", "identity", "aws-chunked"}
_MUST_BE_ONE = {"content-length", "content-range", "etag", "content-encoding"}


def head_of(headers: Iterable[tuple[str, str]], **where: Any) -> dict[str, str]:
    """Headers by lower-case name. Raises RangeMismatch when one that decides has two values."""
    head: dict[str, str] = {}
    for name, value in headers:
        if head.setdefault(name.lower(), value) != value and name.lower() in _MUST_BE_ONE:
            raise RangeMismatch(f"the answer has two {name} headers", **where)
    return head


def normal_etag(value: str | None) -> str | None:
    """An ETag header's value without W/ and quotes; None for none."""
    value = (value or "").strip()
    return value.removeprefix("W/").strip('"') or None


def check_answer(
    status: int, headers: Mapping[str, str], byte_range: ByteRange, etag: str | None, **where: Any
) -> str | None:
    """Raise unless an answer's head promises exactly `byte_range` of version `etag`; its ETag.

    Pure; `headers` has lower-case names. The status decides little: real servers answer 200 with a
    Content-Range to a range request (rclone does), and some ignore If-Match (the same).
    """
    found = normal_etag(headers.get("etag"))
    if etag is not None and found != etag:
        raise ObjectChanged("object is not the pinned version", expected=etag, found=found and one_line(found), **where)
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in _PLAIN_ENCODINGS:
        raise RangeMismatch("the answer is encoded, so its bytes are others", encoding=one_line(encoding)[:40], **where)
    length = headers.get("content-length", "").strip()
    if not re.fullmatch(r"[0-9]{1,19}", length) or "chunked" in headers.get("transfer-encoding", "").lower():
        raise RangeMismatch("the answer does not say its length", **where)
    content_range = headers.get("content-range")
    if content_range is not None:
        match = _CONTENT_RANGE.fullmatch(content_range.strip())
        if match is None:
            raise RangeMismatch("the answer's Content-Range cannot be read", **where)
        start, end = int(match[1]), int(match[2]) + 1
        total = None if match[3] == "*" else int(match[3])
        if total is not None and byte_range.end > total:
            raise RangeMismatch("range reaches past the object's end", size_bytes=total, **where)
        if (start, end) != (byte_range.start, byte_range.end):
            raise RangeMismatch("the answer is for another range", found=f"[{start}, {end})", **where)
    elif status != 200 or byte_range.start != 0:
        raise RangeMismatch("the store did not answer with the range", **where)
    if int(length) != byte_range.size_bytes:
        # Without a Content-Range this is the whole object, wanted only when the range is all of it.
        raise RangeMismatch("the answer has another length than the range", found_bytes=int(length), **where)
    return found


def refusal(status: int, headers: Mapping[str, str], body: bytes, etag: str | None, **where: Any) -> StoreError:
    """The error for a read of version `etag` that was refused; `body` is what could be read of the answer's."""
    code, message = parse_error_body(body)
    error = store_error(status, code, message, headers, **where)
    found = normal_etag(headers.get("etag"))
    if isinstance(error, RangeMismatch) and etag is not None and found not in (None, etag):
        return ObjectChanged(
            "object is not the pinned version", expected=etag, found=found and one_line(found), **where
        )
    return error
