"""Every rank holds exactly its slices: against `safetensors` and slicing, inside the workers and by `state_dict`."""

from __future__ import annotations

import pytest

import cluster
from cluster.planning.plan import TensorSlice
from tests.support import reference_slices
from tests.support.ray_clusters import Longshore
from tests.support.reference_slices import differing_slices, shard_differs, stored_bytes, torch_share
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = pytest.mark.slow

# (fully sharded over 2 and 4 is below, with a real checkpoint)
LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 3, 1), (2, 2, 1), (2, 1, 2)]


@pytest.mark.parametrize(("tp", "fsdp", "dp"), LAYOUTS, ids=lambda n: str(n))
def test_llama_slices(longshore: Longshore, llama: StoredModel, tp: int, fsdp: int, dp: int) -> None:
    with cluster.load(
        llama.uri,
        tensor_parallel_size=tp,
        fsdp_size=fsdp,
        data_parallel_size=dp,
        device="cpu",
        **llama.options,
    ) as model:
        assert list(model.ranks) == list(range(tp * fsdp * dp))
        assert model.call(shard_differs, str(llama.folder), tp, fsdp, KV_HEADS) == [[]] * len(model.ranks)
        last = model.ranks[-1]
        assert differing_slices(model.state_dict(last), last, str(llama.folder), tp, fsdp, KV_HEADS) == []
        assert model.report.verified == "blake3"
        assert model.report.attempts == 1
        assert [rank.rank for rank in model.report.ranks] == list(model.ranks)


@pytest.mark.cluster_settings(empty=True)
@pytest.mark.parametrize(("fsdp", "placement"), [(1, "direct"), (2, "via_arena"), (4, "direct")])
def test_a_third_party_checkpoint_loads_exactly(
    longshore: Longshore, minilm: StoredModel, fsdp: int, placement: str
) -> None:
    with cluster.load(minilm.uri, fsdp_size=fsdp, device="cpu", placement=placement, **minilm.options) as model:
        assert model.report.placement_mode == placement
        assert model.report.store_bytes == sum(node.needed_bytes for node in model.report.nodes)
        assert model.call(shard_differs, str(minilm.folder), 1, fsdp, 1) == [[]] * fsdp
        for rank in model.ranks:
            assert differing_slices(model.state_dict(rank), rank, str(minilm.folder), 1, fsdp, 1) == []


def _slices(shard: object) -> dict[str, TensorSlice]:
    return shard.slices  # type: ignore[attr-defined,no-any-return]


def _bytes_of(shard: object) -> dict[str, bytes]:
    return {name: reference_slices.as_bytes(tensor).numpy().tobytes() for name, tensor in shard.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("fsdp", [1, 2])
def test_odd_tensors(longshore: Longshore, odd: StoredModel, fsdp: int) -> None:
    """Every dtype, 0-d, zero-size, Unicode: compared as bytes, as this torch may lack a dtype."""
    stored = stored_bytes(odd.folder)
    with cluster.load(odd.uri, fsdp_size=fsdp, device="cpu", **odd.options) as model:
        slices, found = model.call(_slices), model.call(_bytes_of)
        for rank in model.ranks:
            assert set(found[rank]) == set(stored) == set(model.state_dict(rank))
            for name, (dtype, shape, data) in stored.items():
                expected_shape, expected = torch_share(shape, data, fsdp, rank)
                assert (slices[rank][name].dtype, slices[rank][name].sizes) == (dtype, expected_shape)
                assert found[rank][name] == expected, f"rank {rank}: {name}"


def test_one_file_of_the_model_by_its_own_uri(longshore: Longshore, minilm: StoredModel) -> None:
    """A URI that names a file, from a folder of this machine, without a manifest: nothing can be checked by digest."""
    with cluster.load(str(minilm.folder / "model.safetensors"), device="cpu") as model:
        assert model.report.verified == "transport"
        assert model.report.verified_chunks == 0
        assert model.call(shard_differs, str(minilm.folder), 1, 1, 1) == [[]]
