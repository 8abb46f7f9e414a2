"""In which parts an S3 object was uploaded: what its composite checksum is made of."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from storage.s3.answer import normal_etag

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MAX_PARTS = 10_000  # of one object, by S3's own rules


def part_ends(client: S3Client, bucket: str, key: str, etag: str | None) -> tuple[int, ...]:
    """Where the parts end; () for an object of another version, or of which the server does not say.

    One request per thousand parts. Raises botocore's errors.
    """
    asked: dict[str, Any] = {"Bucket": bucket, "Key": key, "ObjectAttributes": ["ETag", "ObjectParts", "ObjectSize"]}
    sizes_bytes: list[int] = []
    while True:
        answer: Any = client.get_object_attributes(**asked)
        parts = answer.get("ObjectParts", {})
        page = [part.get("Size", 0) for part in parts.get("Parts", [])]
        sizes_bytes += page
        if normal_etag(answer.get("ETag")) != etag or len(sizes_bytes) > MAX_PARTS:
            return ()
        if not (page and parts.get("IsTruncated")):
            return ends_of_parts(sizes_bytes, answer.get("ObjectSize", 0))
        asked["PartNumberMarker"] = parts.get("NextPartNumberMarker", 0)


def ends_of_parts(sizes_bytes: Iterable[int], object_bytes: int) -> tuple[int, ...]:
    """Where parts of these sizes end; () when together they are not the object."""
    ends = tuple(accumulate(sizes_bytes))
    rising = all(one < other for one, other in pairwise((0, *ends)))
    return ends if rising and ends and ends[-1] == object_bytes else ()
