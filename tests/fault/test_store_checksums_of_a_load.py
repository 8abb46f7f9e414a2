"""An unpublished model in a real S3 server with checksums: READY reports that every object matches its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import cluster
from storage.errors import IntegrityError
from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.checkpoints import write_tiny_llama
from tests.support.ray_clusters import Longshore
from tests.support.reference_slices import shard_differs
from tests.support.s3_servers import s3_client
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def unpublished(s3_server: EmbeddedS3, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StoredModel]:
    """A tiny Llama as a client uploads it that has its SDK send CRC64NVME."""
    write_tiny_llama(tmp_path)
    model = StoredModel(f"s3://models/unpublished-{abs(hash(request.node.name)) % 10**8}", tmp_path, s3_server)
    client = s3_client(s3_server)
    prefix = model.uri.removeprefix("s3://models/")
    for path in sorted(tmp_path.iterdir()):
        client.put_object(
            Bucket="models", Key=f"{prefix}/{path.name}", Body=path.read_bytes(), ChecksumAlgorithm="CRC64NVME"
        )
    client.close()
    yield model
    for path in sorted(tmp_path.iterdir()):
        (model.in_bucket / path.name).unlink()
    model.in_bucket.rmdir()
    s3_server.refresh()


def _flip(path: Path, at: int) -> None:
    """Flip a bit as a rotting disk does. The file keeps its date, so the server keeps its ETag and checksum."""
    date = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(date.st_atime_ns, date.st_mtime_ns))


@pytest.mark.cluster_settings(empty=True)
def test_objects_are_checked_and_a_flipped_byte_ends_the_load(longshore: Longshore, unpublished: StoredModel) -> None:
    fsdp = 2

    def load() -> cluster.LoadedModel:
        return cluster.load(unpublished.uri, device="cpu", fsdp_size=fsdp, placement="via_arena", **unpublished.options)

    with load() as model:
        assert model.report.verified == "store:crc64nvme"
        assert (model.report.checked_objects, model.report.unchecked_objects) == (2, {})
        assert model.call(shard_differs, str(unpublished.folder), 1, fsdp, 1) == [[]] * fsdp
    longshore.configure(empty=True)
    damaged = unpublished.in_bucket / SHARD
    at = damaged.stat().st_size - 1000
    _flip(damaged, at)
    with pytest.raises(IntegrityError) as caught:
        load()
    assert caught.value.details["shard"] == SHARD
    assert caught.value.details["expected"] != caught.value.details["found"]
    (failed,) = (m for m in longshore.status().ended if m.progress.uri == unpublished.uri and m.error)
    assert failed.progress.state == "failed"
    longshore.assert_nothing_left()
    # Once fixed, it loads: nothing of the damaged object was kept.
    _flip(damaged, at)
    with load() as model:
        assert model.report.verified == "store:crc64nvme"
        assert model.call(shard_differs, str(unpublished.folder), 1, fsdp, 1) == [[]] * fsdp
