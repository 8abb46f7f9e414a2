"""Session tokens that expire in mid-load, against a server that checks every signature, through the whole stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

import cluster
from storage.errors import AccessDenied, CredentialsExpired
from storage.store_ref import StoreRef
from storage.stores.object_store import ByteRange, read_bytes
from storage.stores.requests import RetryPolicy, with_retries
from storage.stores.s3.store import S3Store
from tests.support.ray_clusters import CREDENTIALS_FILE, Longshore
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel
from tests.support.token_s3 import TokenS3

pytestmark = pytest.mark.slow
PATIENT = RetryPolicy(attempts=4, base_s=0.01)


@pytest.fixture
def credentials_file() -> Iterator[Path]:
    yield CREDENTIALS_FILE
    CREDENTIALS_FILE.unlink(missing_ok=True)


def server_of(model: StoredModel) -> TokenS3:
    return TokenS3({f"models/llama/{path.name}": path.read_bytes() for path in sorted(model.in_bucket.iterdir())})


def test_every_request_takes_up_renewed_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listings and look-ups too, though the answer to a look-up cannot say why it was refused."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with TokenS3({"bucket/key": b"0123456789"}) as server:
        ref = StoreRef("s3", "bucket", "", endpoint_url=server.endpoint_url, region="us-east-1")
        requests = (
            lambda: store.stat("key").size_bytes,
            lambda: next(info.size_bytes for info in store.list()),
            lambda: len(read_bytes(store, "key", ByteRange(0, 10))),
        )
        old = server.issue(tmp_path / "credentials")
        with closing(S3Store(ref)) as store:
            for request in requests:
                server.expire(old)
                old = server.issue(tmp_path / "credentials")
                assert with_retries(request, PATIENT) == 10
                assert server.seen[f"{old} ExpiredToken"] == 0
            server.expire(old)  # and nobody writes new ones
            for request in requests:
                with pytest.raises(AccessDenied):
                    with_retries(request, PATIENT)
    assert not [what for what in server.seen if "Signature" in what or "Invalid" in what]


@pytest.mark.parametrize("hours", [-30, 2])
@pytest.mark.parametrize("first", ["look up", "list", "read"])
def test_every_request_is_signed_by_the_clock_of_the_store(
    hours: int, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with TokenS3({"bucket/key": b"0123456789"}, ahead=timedelta(hours=hours)) as server:
        server.issue(tmp_path / "credentials")
        ref = StoreRef("s3", "bucket", "", endpoint_url=server.endpoint_url, region="us-east-1")
        with closing(S3Store(ref)) as store:
            requests = {
                "look up": lambda: store.stat("key").size_bytes,
                "list": lambda: next(info.size_bytes for info in store.list()),
                "read": lambda: len(read_bytes(store, "key", ByteRange(0, 10))),
            }
            for name in sorted(requests, key=lambda name: name != first):
                assert with_retries(requests[name], PATIENT) == 10
        assert 1 <= server.seen["AK1 RequestTimeTooSkewed"] <= 2  # a look-up is asked for its reason by a read
        assert not [what for what in server.seen if "Signature" in what]


@pytest.mark.cluster_settings(empty=True)
def test_a_load_goes_on_with_renewed_credentials(
    longshore: Longshore, llama: StoredModel, credentials_file: Path
) -> None:
    """The planning process, and every rank for itself: each has the source of credentials, not a copy."""
    with server_of(llama) as server:
        first = server.issue(credentials_file)

        def renew() -> None:
            server.issue(credentials_file)
            server.expire(first)

        server.before[9] = renew  # manifest, its beginning and config come before
        options = {"endpoint_url": server.endpoint_url, "region": "us-east-1", "device": "cpu"}
        with cluster.load("s3://models/llama", fsdp_size=2, **options) as model:
            folder = str(llama.folder)
            assert model.call(lambda shard: shard_differs(shard, folder, 1, 2, KV_HEADS)) == [[], []]
            assert set(model.report.retries) == {"credentials_expired"}
            assert not server.before
            assert server.seen[f"{first} ExpiredToken"] >= 1
            assert server.seen[f"{first} 206"] < 9
            assert server.seen["AK2 206"] >= 9
        # Nobody renews them any more: one typed error, and nothing is left behind (`longshore` sees to that).
        longshore.configure(empty=True)
        server.expire("AK2")
        with pytest.raises(cluster.LongshoreError) as caught:
            cluster.load("s3://models/llama", fsdp_size=2, **options)
        assert isinstance(caught.value, CredentialsExpired)
        assert not [what for what in server.seen if "Signature" in what or "Invalid" in what]
