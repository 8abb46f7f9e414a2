"""What a node keeps in files of its own, and what boto3 reads of an S3 server, as parsers for `hostile_parsers`."""

from __future__ import annotations

import functools
import os
import struct
import warnings
import zlib
from typing import Any

import botocore.session
from botocore.awsrequest import HeadersDict
from botocore.parsers import create_parser

from storage.arena.slots import COPY_BYTES, SlotRecord, SlotState, pack_copy, unpack_copy
from storage.checksum import new_hasher
from storage.disk.files import HEADER_BYTES, ChunkHeader, chunk_name, key_of, pack_header, read_chunk, unpack_header
from storage.host.processes import ProcessId
from storage.stores.s3.answers import asking, checksums_of_head, composites_of_head, object_info
from storage.stores.s3.session import check_document

KEY = bytes(range(32))
CHUNK = b"what a chunk holds " * 5
_CHECKED_BYTES = struct.calcsize("<8sQ32s16s32s")  # of a header: what its checksum is of


def disk_file(data: bytes) -> None:
    """A file of the disk tier that claims to be a chunk of CHUNK's size."""
    descriptor = os.memfd_create("longshore-hostile")
    found = bytearray(len(CHUNK))
    try:
        os.write(descriptor, data)
        read_chunk(descriptor, KEY, [memoryview(found)], None)
    finally:
        os.close(descriptor)
    if len(data) != HEADER_BYTES + len(CHUNK) or bytes(found) != data[HEADER_BYTES:]:
        raise ValueError("other bytes than the file's were taken")


def disk_file_checksummed(data: bytes) -> None:
    """The same with a header whose checksum is right."""
    head = data[:_CHECKED_BYTES].ljust(_CHECKED_BYTES, b"\0")
    disk_file(head + struct.pack("<I", zlib.crc32(head)) + data[_CHECKED_BYTES + 4 :])


def disk_header(data: bytes) -> None:
    header = unpack_header(data)
    if unpack_header(pack_header(header)) != header:
        raise ValueError("a header that cannot be written again was taken")


def disk_seeds() -> list[bytes]:
    found = []
    for name in ("blake3", "xxh3_128"):
        hasher = new_hasher(name)
        hasher.update(CHUNK)
        found.append(pack_header(ChunkHeader(KEY, len(CHUNK), name, hasher.digest())) + CHUNK)
    return found


def disk_name(data: bytes) -> None:
    name = data.decode("utf-8", "surrogateescape")
    key = key_of(name)
    if key is not None and chunk_name(key) != name:
        raise ValueError("a second name for a chunk was taken")


def slot_record(data: bytes) -> None:
    found = unpack_copy(data[:COPY_BYTES].ljust(COPY_BYTES, b"\0"))
    if found is not None and found[0] and unpack_copy(pack_copy(*found)) != found:
        raise ValueError("a record that cannot be written again was taken")


def slot_record_checksummed(data: bytes) -> None:
    body = data[: struct.calcsize("<QQQqQ32sB3x")].ljust(struct.calcsize("<QQQqQ32sB3x"), b"\0")
    slot_record(body + struct.pack("<I", zlib.crc32(body)))


def slot_record_seeds() -> list[bytes]:
    holder = ProcessId(4711, 99)
    return [
        pack_copy(1, SlotRecord(SlotState.COMMITTED, 3, 1000, KEY)),
        pack_copy(9, SlotRecord(SlotState.LEASED, 1, 0, KEY, holder)),
        bytes(COPY_BYTES),
    ]


@functools.cache
def _operation(name: str) -> Any:
    return botocore.session.get_session().get_service_model("s3").operation_model(name).output_shape


def s3_listing(data: bytes) -> None:
    """The body of an answer, and what our store makes of it."""
    with warnings.catch_warnings(action="ignore"), asking(uri="s3://bucket/model"):  # of times in odd zones
        check_document(data)
        answer = {"status_code": 200, "headers": {}, "body": data, "context": {"operation_name": "ListObjectsV2"}}
        page = create_parser("rest-xml").parse(answer, _operation("ListObjectsV2"))
        for entry in page.get("Contents", []):
            object_info(entry["Key"], entry["Size"], entry.get("ETag"))


def s3_listing_seeds() -> list[bytes]:
    entries = b"".join(
        b"<Contents><Key>a%d</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;v&quot;</ETag>"
        b"<Size>%d</Size></Contents>" % (number, number)
        for number in range(3)
    )
    start = b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    return [start + b"<IsTruncated>false</IsTruncated>" + entries + b"</ListBucketResult>", start[:38] + b"<a/>"]


def s3_head(data: bytes) -> None:
    """One header a line, of an answer to HEAD."""
    lines = (line.partition(b":") for line in data.split(b"\n"))
    pairs = ((name.decode("latin-1"), value.decode("latin-1").strip()) for name, mark, value in lines if mark)
    with warnings.catch_warnings(action="ignore"), asking(uri="s3://bucket/model", key="key"):
        headers = HeadersDict(pairs)
        answer = {"status_code": 200, "headers": headers, "body": b"", "context": {"operation_name": "HeadObject"}}
        head = create_parser("rest-xml").parse(answer, _operation("HeadObject"))
        object_info("key", head["ContentLength"], head.get("ETag"), checksums_of_head(head), composites_of_head(head))


def s3_head_seeds() -> list[bytes]:
    return [
        b'content-length: 20\netag: "0123456789abcdef0123456789abcdef"\nx-amz-checksum-crc64nvme: AAAAAAAAAAA=\n'
        b"x-amz-checksum-type: FULL_OBJECT\nlast-modified: Sun, 22 Nov 2026 01:00:00 GMT",
        b'content-length: 20\netag: "0123456789abcdef0123456789abcdef-3"\nx-amz-checksum-crc32c: AAAAAA==-3\n'
        b"x-amz-checksum-type: COMPOSITE\nx-amz-meta-a: b",
    ]
