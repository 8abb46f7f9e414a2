"""`rclone`, a real S3 server for all tests of a session, and requests that tests make to any S3 server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from storage.store_ref import StoreRef, parse_uri
from storage.stores.embedded_s3 import EmbeddedS3

START_S = 120.0  # on however slow a machine


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    """rclone over an empty folder: `server.folder / bucket / key` are its objects (`refresh` after changes by hand)."""
    with EmbeddedS3(tmp_path_factory.mktemp("rclone"), start_timeout_s=START_S) as server:
        yield server


def s3_client(server: Any) -> Any:
    """Return boto3's client of a server, which adds no checksums of its own."""
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        region_name="us-east-1",
        config=Config(request_checksum_calculation="when_required", response_checksum_validation="when_required"),
    )


def make_bucket(server: Any, name: str, allowed: Sequence[str] = ()) -> None:
    """Create a bucket. `allowed`: the actions that everybody may do to its objects."""
    with closing(s3_client(server)) as client:
        client.create_bucket(Bucket=name)
        if allowed:
            statement = {"Effect": "Allow", "Principal": "*", "Action": allowed, "Resource": f"arn:aws:s3:::{name}/*"}
            policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
            client.put_bucket_policy(Bucket=name, Policy=policy)


def write_credentials(file: Path, key_id: str, secret: str, token: str = "") -> None:
    """Replace an AWS credentials file in one step."""
    lines = ["[default]", f"aws_access_key_id={key_id}", f"aws_secret_access_key={secret}"]
    lines += [f"aws_session_token={token}"] if token else []
    fresh = file.with_suffix(".new")
    fresh.write_text("\n".join([*lines, ""]))
    fresh.replace(file)


def server_ref(server: Any, path: str) -> StoreRef:
    """The ref of `s3://<path>` on that server."""
    return parse_uri(f"s3://{path}", endpoint_url=server.endpoint_url, region="us-east-1", environ={})
