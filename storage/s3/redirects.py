"""boto3 follows one kind of redirect, to another region; here that is kept within bounds.

It asks HeadBucket for the region, and follows redirects of that request in the same way: a server that redirects
everything would send it round until Python's stack ends. And where an endpoint was given, no region changes the place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def bound_redirects(client: S3Client, *, own_endpoint: bool) -> None:
    """No redirect of HeadBucket is followed, and with an endpoint of its own none at all."""

    def mark(model: Any, context: dict[str, Any], **_: Any) -> None:
        if own_endpoint or model.name == "HeadBucket":
            context.setdefault("s3_redirect", {})["redirected"] = True

    client.meta.events.register("before-call.s3", mark)
