"""Signatures and allowed places through the whole stack: the coordinator decides, whatever a client sends."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import cluster
from actors.hosting import host_rank
from cluster.config import Config
from storage.checkpoints.manifest import MANIFEST_KEY
from storage.publishing.signing import SIGNATURE_KEY
from tests.support.checkpoints import safetensors_bytes, write_objects
from tests.support.forged_chunk import forged
from tests.support.ray_clusters import Longshore
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow


def test_only_what_the_cluster_and_the_client_trust_is_loaded(
    longshore: Longshore, llama: StoredModel, copy_of: Callable[[StoredModel], StoredModel], tmp_path: Path
) -> None:
    ours, theirs = cluster.generate_key(tmp_path / "ours"), cluster.generate_key(tmp_path / "theirs")
    model = copy_of(llama)
    with pytest.raises(cluster.ManifestUnsigned):
        cluster.load(model.uri, device="cpu", trusted_keys=[ours.public_path], **model.options)
    cluster.sign(model.uri, ours.path, **model.options)
    with cluster.load(model.uri, device="cpu", **model.options) as unchecked:
        with cluster.load(model.uri, device="cpu", trusted_keys=[ours.public_key], **model.options) as checked:
            assert checked.report.revision == unchecked.report.revision
            assert checked.model_id != unchecked.model_id  # who checks never shares with who did not
            assert (checked.report.signed_by, unchecked.report.signed_by) == (ours.key_id, "")
            shown = {status.progress.model_id: status.signed_by for status in longshore.models()}
            assert shown == {checked.model_id: ours.key_id, unchecked.model_id: ""}
        planned = cluster.plan(model.uri, trusted_keys=[ours.public_key], **model.options)
        assert (planned.signed_by, planned.verified) == (ours.key_id, checked.report.verified)
        with pytest.raises(cluster.UnknownSigner):
            cluster.load(model.uri, device="cpu", trusted_keys=[theirs.public_key], **model.options)
        for keys in ({"trusted_keys": [theirs.public_key]}, {"config": Config(trusted_keys=theirs.public_key)}):
            with pytest.raises(cluster.UnknownSigner), host_rank(model.uri, 0, **keys, **model.options):
                pass

    with cluster.load(
        model.uri, device="cpu", trusted_keys=[ours.public_key, theirs.public_key], **model.options
    ) as signed:
        cluster.sign(model.uri, theirs.path, **model.options)
        assert signed.update().signed_by == signed.report.signed_by == theirs.key_id
    cluster.sign(model.uri, ours.path, **model.options)

    # From here on the cluster itself wants signatures; the client's settings ask for nothing.
    longshore.configure(trusted_keys=ours.public_key)
    cluster.load(model.uri, device="cpu", config=Config(), **model.options).release()
    with pytest.raises(cluster.UnknownSigner):
        cluster.load(model.uri, device="cpu", config=Config(), trusted_keys=[theirs.public_key], **model.options)
    cluster.sign(model.uri, theirs.path, **model.options)
    with pytest.raises(cluster.UnknownSigner):
        cluster.load(model.uri, device="cpu", config=Config(), **model.options)
    cluster.sign(model.uri, ours.path, **model.options)
    with (model.in_bucket / MANIFEST_KEY).open("ab") as manifest:
        manifest.write(b"\n")
    model.server.refresh()
    with pytest.raises(cluster.BadSignature):
        cluster.load(model.uri, device="cpu", config=Config(), **model.options)
    for name in (SIGNATURE_KEY, MANIFEST_KEY):
        (model.in_bucket / name).unlink()
        model.server.refresh()
        with pytest.raises(cluster.ManifestUnsigned):
            cluster.load(model.uri, device="cpu", config=Config(), **model.options)
    assert not longshore.models()


def test_another_signed_model_is_not_loaded_as_this_one(
    longshore: Longshore,
    llama: StoredModel,
    odd: StoredModel,
    copy_of: Callable[[StoredModel], StoredModel],
    tmp_path: Path,
) -> None:
    ours = cluster.generate_key(tmp_path / "ours")
    model, other = copy_of(llama), copy_of(odd)
    for each in (model, other):
        cluster.sign(each.uri, ours.path, **each.options)
    longshore.configure(trusted_keys=f"{ours.public_key}:copy-*")
    cluster.load(model.uri, device="cpu", **model.options).release()
    shutil.rmtree(model.in_bucket)
    shutil.copytree(other.in_bucket, model.in_bucket)
    model.server.refresh()
    with pytest.raises(cluster.SignedNameMismatch, match="signed_name='copy-1-"):
        cluster.load(model.uri, device="cpu", **model.options)
    name = other.uri.removeprefix("s3://models/")
    with cluster.load(model.uri, device="cpu", signed_name=name, **model.options) as mirrored:
        with pytest.raises(cluster.SignedNameMismatch):
            cluster.load(
                model.uri, device="cpu", **model.options
            )  # the resident one is not given to who asks otherwise
        revision = mirrored.report.revision
        with cluster.load(model.uri, device="cpu", signed_name=name, revision=revision, **model.options) as same:
            assert same.model_id == mirrored.model_id
        with pytest.raises(cluster.RevisionMismatch):
            cluster.load(model.uri, device="cpu", signed_name=name, revision="0" * 64, **model.options)
    cluster.sign(model.uri, ours.path, signed_name="llama", **model.options)
    with pytest.raises(cluster.SignedNameMismatch, match="trusted for other names"):
        cluster.load(model.uri, device="cpu", signed_name="llama", **model.options)


def test_forged_chunks_of_one_tenant_reach_no_other(longshore: Longshore, tmp_path: Path) -> None:
    """Both publish with XXH3; the other tenant's file has the digests of ours, and other bytes."""
    ours = safetensors_bytes([("weight", "U8", (1 << 20,))], seed=1)
    longshore.configure(chunk_bytes=1 << 20)
    for name, content in (("theirs", forged(ours, block=2)), ("ours", ours)):
        write_objects(tmp_path / name, {"model.safetensors": content})
        cluster.publish(tmp_path / name, hash_name="xxh3_128")
        with cluster.load(tmp_path / name, device="cpu") as model:
            (found,) = model.call(lambda shard: shard["weight"].numpy().tobytes())
            assert found == content[-(1 << 20) :]


def test_the_coordinator_refuses_models_that_clients_would_allow(longshore: Longshore, llama: StoredModel) -> None:
    longshore.configure(allowed_schemes="s3", allowed_endpoints=llama.server.endpoint_url, allowed_buckets="models")
    cluster.load(llama.uri, device="cpu", config=Config(), **llama.options).release()
    refused = [
        (str(llama.folder), {}),
        ("s3://other/llama", llama.options),
        (llama.uri, {**llama.options, "endpoint_url": "http://169.254.169.254"}),
    ]
    for uri, options in refused:
        with pytest.raises(cluster.SourceRefused):
            cluster.load(uri, device="cpu", config=Config(), **options)
    assert not longshore.models()
