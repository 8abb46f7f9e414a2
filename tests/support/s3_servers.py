"""Session-long real S3 servers as fixtures: `rclone` (from PyPI, always there) and `ceph` (Debian, skipped without)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.config import Config

from storage.embedded_s3 import EmbeddedS3
from storage.store_ref import StoreRef, parse_uri
from tests.support.ceph_server import CephServer, missing_programs

S3Server = EmbeddedS3 | CephServer


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    """rclone over an empty folder: `server.folder / bucket / key` are its objects (`refresh` after changes by hand)."""
    with EmbeddedS3(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def ceph() -> Iterator[CephServer]:
    """Ceph's radosgw. Its folder is short, since the paths of Unix sockets must be."""
    if missing := missing_programs():
        pytest.skip(f"Ceph is not installed: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="ceph-") as folder, CephServer(Path(folder)) as server:
        yield server


def make_bucket(server: S3Server, name: str) -> None:
    """A bucket, by the S3 call that any client would make."""
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        region_name="us-east-1",
        config=Config(request_checksum_calculation="when_required", response_checksum_validation="when_required"),
    )
    client.create_bucket(Bucket=name)
    client.close()


def server_ref(server: S3Server, path: str) -> StoreRef:
    """The ref of `s3://<path>` on that server."""
    return parse_uri(f"s3://{path}", endpoint_url=server.endpoint_url, region="us-east-1", environ={})
