"""boto3 follows one kind of redirect, to another region; here that is kept within bounds.

It asks HeadBucket for the region, and follows redirects of that request in the same way: a server that redirects
everything would send it round until Python's stack ends. And where an endpoint was given, no region changes the place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from storage.s3.botocore_private import follow_no_redirects

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def bound_redirects(client: S3Client, *, own_endpoint: bool) -> None:
    """No redirect of HeadBucket is followed, and with an endpoint of its own none at all."""
    follow_no_redirects(client, lambda operation: own_endpoint or operation == "HeadBucket")
