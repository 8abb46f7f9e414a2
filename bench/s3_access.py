"""What S3 clients must be told to read from a server that checks no signature."""

from __future__ import annotations

import os

from bench.spec import Spec

ACCESS_KEY = "bench"  # any: the range server does not look
SECRET_KEY = "bench"
REGION = "us-east-1"


def s3_uris(spec: Spec) -> list[str]:
    """The model's files as s3://bucket/key."""
    return [f"s3://{spec.bucket}/{file.key}" for file in spec.files]


def set_s3_environment(spec: Spec) -> None:
    """Endpoint, keys and region for clients that look in the environment. What the user has there is not looked at."""
    os.environ.update(
        AWS_ENDPOINT_URL=spec.endpoint,
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
        AWS_REGION=REGION,
        AWS_DEFAULT_REGION=REGION,
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )
    os.environ.pop("AWS_PROFILE", None)
    os.environ.pop("AWS_SESSION_TOKEN", None)
    if spec.ca_bundle:
        os.environ["AWS_CA_BUNDLE"] = spec.ca_bundle
