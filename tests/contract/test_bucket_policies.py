"""Loading takes s3:GetObject and nothing else, publishing s3:PutObject and s3:DeleteObject beside it. A real server."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import publishing
from cluster.planning.preview import plan
from cluster.publishing import generate_key, sign
from storage.errors import AccessDenied, ManifestMismatch
from storage.store_ref import parse_uri
from storage.stores.open_store import open_store
from tests.contract.ceph_server import CephServer
from tests.support.checkpoints import write_tiny_llama
from tests.support.counting_proxy import CountingProxy
from tests.support.s3_servers import make_bucket

pytestmark = pytest.mark.slow

GET, PUT, DELETE = "s3:GetObject", "s3:PutObject", "s3:DeleteObject"


@pytest.fixture
def key(tmp_path: Path) -> str:
    return generate_key(tmp_path / "signer").path


def owner(server: CephServer) -> dict[str, Any]:
    return {"endpoint_url": server.endpoint_url, "region": "us-east-1", "credentials": server.credentials()}


def everybody(endpoint_url: str) -> dict[str, Any]:
    """May do what the bucket's policy says."""
    return {"endpoint_url": endpoint_url, "region": "us-east-1", "anonymous": True}


def test_a_published_model_is_read_without_listing(ceph: CephServer, tmp_path: Path, key: str) -> None:
    make_bucket(ceph, "get-only", [GET])
    write_tiny_llama(tmp_path / "llama")
    uri = "s3://get-only/llama"
    published = publishing.publish(tmp_path / "llama", uri, sign_key=key, **owner(ceph))
    with CountingProxy(ceph.endpoint_url) as proxy:
        options = everybody(proxy.endpoint_url)
        for keys in ([], [f"{key}.pub"]):
            assert plan(uri, trusted_keys=keys, tensor_parallel_size=2, **options).revision == published.revision
            assert publishing.verify(uri, trusted_keys=keys, **options).ok
        requests = proxy.requests()
        assert requests[0].path.endswith("/longshore.manifest.json")
        assert all(request.path.startswith("/get-only/llama/") for request in requests), "the bucket was listed"
    place = parse_uri(uri, endpoint_url=ceph.endpoint_url, region="us-east-1")
    with closing(open_store(replace(place, anonymous=True))) as store, pytest.raises(AccessDenied):
        next(iter(store.list()))
    with closing(open_store(place, ceph.credentials())) as store:
        store.delete("model-00001-of-00002.safetensors")
    with pytest.raises(ManifestMismatch, match="is missing, or may not be read"):
        plan(uri, **everybody(ceph.endpoint_url))


def test_publishing_needs_no_listing(ceph: CephServer, tmp_path: Path, key: str) -> None:
    make_bucket(ceph, "no-list", [GET, PUT, DELETE])
    write_tiny_llama(tmp_path / "llama")
    options = everybody(ceph.endpoint_url)
    copied = publishing.publish(tmp_path / "llama", "s3://no-list/copied", **options)
    assert publishing.verify("s3://no-list/copied", **options).ok
    again = publishing.publish("s3://no-list/copied", sign_key=key, **options)  # in place
    assert (again.shards, again.files, again.size_bytes) == (copied.shards, copied.files, copied.size_bytes)
    assert publishing.publish("s3://no-list/copied", sign_key=key, **options).unchanged
    sign("s3://no-list/copied", key, signed_name="llama", **options)
    assert publishing.verify("s3://no-list/copied", trusted_keys=[f"{key}.pub"], signed_name="llama", **options).ok
