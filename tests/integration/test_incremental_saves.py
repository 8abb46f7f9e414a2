"""Parts that did not change since the published revision are copied by the store, and not sent."""

from __future__ import annotations

import uuid
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cluster
from actors.saving.writer import CheckpointWriter, begin_save, stored_chunks
from cluster.saving.shards import TensorSpec, lay_out
from cluster.saving.unchanged import StoredChunks
from storage.checkpoints.manifest import Manifest, ManifestShard
from storage.publishing.verify import verify
from storage.stores.local import LocalStore
from storage.stores.object_store import ByteRange, ObjectStore
from storage.stores.open_store import open_store
from storage.stores.requests import RetryPolicy
from tests.support.counting_proxy import CountingProxy
from tests.support.emulators import Emulator
from tests.support.gloo_ranks import run_ranks
from tests.support.s3_servers import make_bucket, server_ref

CHUNK = 5 << 20
POLICY = RetryPolicy(attempts=1)


def save(store: ObjectStore, model: dict[str, np.ndarray], since: StoredChunks | None = None) -> CheckpointWriter:
    specs = [TensorSpec(name, "F32", array.shape) for name, array in model.items()]
    layouts = lay_out(specs, revision="0", max_shard_bytes=40 << 20, chunk_bytes=CHUNK)
    layouts, begun = begin_save(store, layouts, chunk_bytes=CHUNK, policy=POLICY)
    writer = CheckpointWriter(store, layouts, begun, policy=POLICY, stored=since)
    for number, layout in enumerate(layouts):
        for tensor in layout.tensors:
            writer.write(number, tensor.start, memoryview(model[tensor.name].tobytes()))
    writer.commit(writer.take_records())
    return writer


@pytest.fixture
def model() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {f"layer.{n}": random.standard_normal((1 << 10, 5 << 9)).astype(np.float32) for n in range(6)}  # 10 MiB each


def test_a_folder_copies_what_did_not_change(tmp_path: Path, model: dict[str, np.ndarray]) -> None:
    store = LocalStore(tmp_path / "model")
    first = save(store, model)
    model["layer.2"] += 1
    second = save(store, model, stored_chunks(store, policy=POLICY))
    assert first.copied_bytes == 0
    assert second.copied_bytes + second.written_bytes == first.written_bytes
    assert second.copied_bytes >= 40 << 20
    assert verify(store).ok


def test_a_changed_source_is_not_copied(tmp_path: Path, model: dict[str, np.ndarray]) -> None:
    store = LocalStore(tmp_path / "model")
    save(store, model)
    chunks = stored_chunks(store, policy=POLICY)
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    second = save(store, model, chunks)
    assert second.copied_bytes == 0
    assert verify(store).ok


def test_parts_of_repeated_bytes_are_copied(tmp_path: Path) -> None:
    zeros_first = {name: torch.randn(4 << 20) for name in "ab"}  # 16 MiB each
    for tensor in zeros_first.values():
        tensor[:2_000_000] = 0
    model = {**zeros_first, "again": zeros_first["a"].clone(), "zeros": torch.zeros(4 << 20)}
    cluster.save(model, tmp_path / "model", chunk_bytes=1 << 20)
    again = cluster.save(model, tmp_path / "model", chunk_bytes=1 << 20)
    assert again.copied_bytes == again.size_bytes
    assert verify(LocalStore(tmp_path / "model")).ok


def test_a_part_is_found_behind_many_common_chunks() -> None:
    digests = [digest for number in range(1000) for digest in ("zeros", "zeros", f"{number}")]
    ends = tuple(range(1, len(digests) + 1))
    shard = ManifestShard.model_construct(path="m", etag="v1", chunk_ends=ends, chunk_digests=tuple(digests))
    chunks = StoredChunks(Manifest.model_construct(hash="blake3", shards=(shard,)))
    for number in (0, 700, 999):
        found = chunks.find(["zeros", "zeros", f"{number}"], 3)
        assert found is not None
        assert found.place == ByteRange(3 * number, 3 * number + 3)
    for other in ([], ["zeros"] * 3, ["999", "zeros"], ["0", "zeros", "1"], ["zeros", "none"]):
        assert chunks.find(other, len(other)) is None


@pytest.fixture(scope="module", params=["rclone", "ministack"])
def server(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.slow
def test_ranks_send_s3_only_what_changed(server: Any) -> None:
    bucket = f"ranks-{uuid.uuid4().hex[:12]}"
    make_bucket(server, bucket)
    keys = server.credentials()
    env = {"AWS_ACCESS_KEY_ID": keys.access_key_id, "AWS_SECRET_ACCESS_KEY": keys.secret_access_key}
    sent, reports = [], []
    with CountingProxy(server.endpoint_url) as proxy:
        options = {"endpoint_url": proxy.endpoint_url, "region": "us-east-1", "chunk_bytes": 1 << 20}
        for changed in ({}, {"changed": "b"}, {"changed": "b"}, {"changed": "b", "since": None}):
            proxy.clear()
            report, other = run_ranks(
                2, "tests.support.saving_ranks:save_rows", f"s3://{bucket}/model", env=env, **options, **changed
            )
            assert report == {**other, "writes": report["writes"]}
            sent.append(sum(int(request.fields.get("content-length", 0)) for request in proxy.requests("PUT")))
            reports.append(report)
    size_bytes = reports[0]["size_bytes"]
    for report, bytes_sent in zip(reports, sent, strict=True):
        assert report["copied_bytes"] + report["written_bytes"] == size_bytes
        assert report["written_bytes"] <= bytes_sent < report["written_bytes"] + (64 << 10)  # and the manifest
    first, one_of_three, same, without = (report["copied_bytes"] for report in reports)
    assert first == without == 0
    if isinstance(server, Emulator):
        assert size_bytes / 4 < one_of_three < size_bytes * 2 / 3
        assert same == size_bytes
    else:  # rclone takes UploadPartCopy for an empty part
        assert one_of_three == same == 0


@pytest.mark.slow
def test_s3_is_sent_only_what_changed(server: Any, model: dict[str, np.ndarray]) -> None:
    bucket = f"since-{uuid.uuid4().hex[:12]}"
    make_bucket(server, bucket)
    with CountingProxy(server.endpoint_url) as proxy:
        ref = replace(server_ref(server, f"{bucket}/model"), endpoint_url=proxy.endpoint_url)
        with closing(open_store(ref, server.credentials())) as store:
            first = save(store, model)
            proxy.clear()
            model["layer.2"] += 1
            second = save(store, model, stored_chunks(store, policy=POLICY))
            sent = sum(int(request.fields.get("content-length", 0)) for request in proxy.requests("PUT"))
            assert verify(store).ok
    if isinstance(server, Emulator):
        assert second.copied_bytes >= 40 << 20
        assert second.copied_bytes + second.written_bytes == first.written_bytes
        assert second.written_bytes <= sent < second.written_bytes + (64 << 10)  # and the manifest
    else:  # rclone takes UploadPartCopy for an empty part
        assert second.copied_bytes == 0
        assert sent >= first.written_bytes
