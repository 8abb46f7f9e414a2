"""A byte that changes in the bucket after publishing: no rank hands out a tensor, and the error names the chunk."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import cluster
from storage.errors import IntegrityError
from tests.support.ray_clusters import Longshore
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow

SHARD = "model-00002-of-00003.safetensors"
AT = 3_000_000


@pytest.mark.cluster_settings(empty=True)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_flipped_byte_is_found_by_its_digest(
    longshore: Longshore, llama: StoredModel, copy_of: Callable[[StoredModel], StoredModel], tp: int
) -> None:
    damaged = copy_of(llama)
    # The object keeps its size, ETag and date, so only the digest changes.
    with (damaged.in_bucket / SHARD).open("r+b") as file:
        file.seek(AT)
        byte = file.read(1)[0]
        file.seek(AT)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(IntegrityError) as caught:
        cluster.load(damaged.uri, tensor_parallel_size=tp, device="cpu", **damaged.options)
    details = caught.value.details
    start, end = (int(number) for number in details["range"].strip("[)").replace(",", " ").replace("-", " ").split())
    assert details["shard"] == SHARD
    assert start <= AT < end
    assert details["chunk"] >= 0
    assert details["rank"] in range(tp)
    assert details["expected"] != details["found"]
    (model,) = (m for m in longshore.status().ended if m.progress.uri == damaged.uri)
    assert model.progress.state == "failed"
    assert SHARD in model.error
    longshore.assert_nothing_left()
    # What was good of it, and the model it was copied from, load on.
    with cluster.load(llama.uri, tensor_parallel_size=tp, device="cpu", **llama.options) as good:
        assert good.report.nodes[0].cached_chunks > 0
