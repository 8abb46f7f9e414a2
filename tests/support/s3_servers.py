"""Session-long real S3 servers as fixtures: `rclone` (from PyPI, always there) and `ceph` (Debian, skipped without)."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import boto3
import pytest
from botocore.config import Config

from storage.errors import StoreError
from storage.store_ref import StoreRef, parse_uri
from storage.stores.embedded_s3 import EmbeddedS3
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import open_store
from tests.support.ceph_server import CephServer, missing_programs
from tests.support.ray_clusters import eventually

S3Server = EmbeddedS3 | CephServer
START_S = 120.0  # on however slow a machine


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    """rclone over an empty folder: `server.folder / bucket / key` are its objects (`notice` after changes by hand)."""
    with EmbeddedS3(tmp_path_factory.mktemp("rclone"), start_timeout_s=START_S) as server:
        yield server


@pytest.fixture(scope="session")
def ceph() -> Iterator[CephServer]:
    """Ceph's radosgw. Its folder is short, since the paths of Unix sockets must be."""
    if missing := missing_programs():
        pytest.skip(f"Ceph is not installed: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="ceph-") as folder, CephServer(Path(folder)) as server:
        yield server


def make_bucket(server: S3Server, name: str, allowed: Sequence[str] = ()) -> None:
    """A bucket, by the S3 calls that any client would make. `allowed`: what everybody may do to its objects."""
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        region_name="us-east-1",
        config=Config(request_checksum_calculation="when_required", response_checksum_validation="when_required"),
    )
    client.create_bucket(Bucket=name)
    if allowed:
        statement = {"Effect": "Allow", "Principal": "*", "Action": allowed, "Resource": f"arn:aws:s3:::{name}/*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        client.put_bucket_policy(Bucket=name, Policy=policy)
    client.close()


def server_ref(server: S3Server, path: str) -> StoreRef:
    """The ref of `s3://<path>` on that server."""
    return parse_uri(f"s3://{path}", endpoint_url=server.endpoint_url, region="us-east-1", environ={})


def notice(server: EmbeddedS3, folder: Path) -> None:
    """Returns when the server has noticed what was changed by hand in this folder of it, a bucket or one below.

    `EmbeddedS3.refresh` is a signal, which is obeyed some time later. A folder's files are looked at together: once a
    file made after the changes is seen, so are they.
    """
    marker = f"noticed-{uuid.uuid4().hex}"
    (folder / marker).touch()
    ref = server_ref(server, str(folder.relative_to(server.folder)))
    with closing(open_store(ref, server.credentials())) as store:
        server.refresh()
        eventually(lambda: _is_seen(store, marker), f"{server.endpoint_url} does not look at {folder} again")
        store.delete(marker)  # by the server, so that it knows


def _is_seen(store: ObjectStore, key: str) -> bool:
    try:
        store.stat(key)
    except StoreError:  # also while a new folder is not known
        return False
    return True
