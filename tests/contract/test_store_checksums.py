"""A load without a manifest learns objects' checksums from real servers.

rclone keeps the checksum that came with a PUT, Ceph none but the ETag, ministack composite ones and the parts.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from itertools import pairwise

import pytest

from storage.checksum import NO_CHECKSUM, NOT_COMBINABLE, AskedChecksum, SpanHasher, StoreChecksum, ask_checksum
from storage.store_ref import Credentials, parse_uri
from storage.stores.embedded_s3 import EmbeddedS3
from storage.stores.object_store import ByteRange, ObjectInfo
from storage.stores.open_store import open_store
from storage.stores.requests import RetryPolicy
from storage.stores.s3.store import ends_of_parts, part_ends
from tests.contract.ceph_server import CephServer
from tests.support.emulators import MinistackServer
from tests.support.s3_servers import make_bucket, s3_client

pytestmark = pytest.mark.slow


Server = EmbeddedS3 | CephServer | MinistackServer
BUCKET = "checksums"
DATA = bytes(range(256)) * 40
PART_SIZES = (5 << 20, 6 << 20, 12_345)


@pytest.fixture(scope="module", params=["rclone", "ceph", "ministack"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    make_bucket(found, BUCKET)
    return found


def _ask(server: Server, key: str, chunk_bytes: int) -> tuple[ObjectInfo, AskedChecksum]:
    ref = parse_uri(f"s3://{BUCKET}", endpoint_url=server.endpoint_url, region="us-east-1", environ={})
    store = open_store(ref, Credentials(server.access_key_id, server.secret_access_key))
    try:
        info = store.stat(key)
        return info, ask_checksum(store, info, chunk_bytes, RetryPolicy())
    finally:
        store.close()


def _found(checksum: StoreChecksum, data: bytes, chunk_bytes: int) -> bytes | None:
    """The checksum of `data`, put together from chunks."""
    spans = []
    for start, end in pairwise([*range(0, len(data), chunk_bytes), len(data)]):
        hasher = SpanHasher(checksum, ByteRange(start, end))
        hasher.update(memoryview(data)[start:end])
        spans += hasher.spans()
    return checksum.found(len(data), spans)


@pytest.mark.parametrize("algorithm", ["CRC64NVME", "CRC32C", "CRC32", "SHA256", ""])
def test_checksums_of_an_object_in_one_piece(server: Server, algorithm: str) -> None:
    key, extra = f"one-{algorithm}", {"ChecksumAlgorithm": algorithm} if algorithm else {}
    with closing(s3_client(server)) as client:
        client.put_object(Bucket=BUCKET, Key=key, Body=DATA, **extra)
    _, small = _ask(server, key, len(DATA))
    _, large = _ask(server, key, 1000)
    for asked in (small, large):
        if asked.checksum is not None:
            chunk_bytes = 1000 if asked.checksum.combines else len(DATA)
            assert _found(asked.checksum, DATA, chunk_bytes) == asked.checksum.digest
    # Every one of these servers has at least the MD5 for its ETag, which is good for an object of one chunk.
    assert small.checksum is not None
    if isinstance(server, CephServer) or not algorithm:
        assert (small.checksum.hash_name, small.checksum.certain) == ("md5", False)
        assert large.reason == NOT_COMBINABLE
    elif algorithm == "SHA256":
        assert (small.checksum.hash_name, small.checksum.certain) == ("sha256", True)
        assert large.reason == NOT_COMBINABLE
    else:
        assert large.checksum == small.checksum
        assert large.checksum is not None
        assert (large.checksum.hash_name, large.checksum.part_ends) == (algorithm.lower(), ())


@pytest.mark.parametrize("algorithm", ["CRC32C", ""])
def test_checksums_of_an_object_in_parts(server: Server, algorithm: str) -> None:
    key, extra = f"parts-{algorithm}", {"ChecksumAlgorithm": algorithm} if algorithm else {}
    bodies = [bytes([number]) * size for number, size in enumerate(PART_SIZES)]
    with closing(s3_client(server)) as client:
        upload = client.create_multipart_upload(Bucket=BUCKET, Key=key, **extra)["UploadId"]
        parts = []
        for number, body in enumerate(bodies, start=1):
            answer = client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=number, Body=body, **extra)
            sums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
            parts.append({"PartNumber": number, "ETag": answer["ETag"], **sums})
        client.complete_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
    data = b"".join(bodies)
    _, asked = _ask(server, key, 1 << 20)
    if isinstance(server, MinistackServer) and algorithm:
        assert asked.checksum is not None
        assert asked.checksum.part_ends == ends_of_parts(PART_SIZES, len(data))
        for chunk_bytes in (1 << 20, 3_333_333, 8 << 20):
            assert _found(asked.checksum, data, chunk_bytes) == asked.checksum.digest
        changed = bytearray(data)
        changed[7_000_000] ^= 1
        assert _found(asked.checksum, bytes(changed), 1 << 20) != asked.checksum.digest
    else:
        assert asked.checksum is None
        # rclone makes one object of the parts, with an MD5; Ceph an ETag that says how many parts there were.
        assert asked.reason == (NOT_COMBINABLE if isinstance(server, EmbeddedS3) else NO_CHECKSUM)


def test_parts_of_another_version_are_ignored(ministack: MinistackServer) -> None:
    with closing(s3_client(ministack)) as client:
        key = "versions"
        if BUCKET not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
            client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key=key, Body=DATA)
        etag = hashlib.md5(DATA).hexdigest()
        assert part_ends(client, BUCKET, key, etag) == ()  # in one piece
        assert part_ends(client, BUCKET, key, "another") == ()


@pytest.mark.parametrize(
    ("sizes", "object_bytes", "ends"),
    [((5, 6, 1), 12, (5, 11, 12)), ((), 0, ()), ((5, 6), 12, ()), ((5, 0, 7), 12, ()), ((5, -1, 8), 12, ())],
)
def test_part_sizes_give_the_ends_of_parts(sizes: tuple[int, ...], object_bytes: int, ends: tuple[int, ...]) -> None:
    assert ends_of_parts(sizes, object_bytes) == ends
