"""Converting loads on real agents and ranks: bytes, memory, staging and duplicate chunks."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from actors.devices.cpu_device import CpuDevice
from actors.rank.chunk_placer import ChunkPlacer
from cluster.fit.needs import min_slots
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.planning.make_plan import build_load_plan
from cluster.planning.packed_plan import pack_shared, rank_facts, unpack_shared
from cluster.planning.plan import LoadPlan, StagedTensor, TensorSlice
from cluster.precision.recipes import Precision
from cluster.telemetry.report import RankReport
from storage.checkpoints.checkpoint import open_model
from storage.errors import LongshoreError
from storage.stores.object_store import ByteRange, MemoryStore
from tests.support.local_node import Rank, SwitchedLink, local_node, run_all, start_all, with_digests
from tests.support.planned_models import NF4_STATE, assemble, llama_shapes
from tests.support.reference_quantized import quantized

pytestmark = pytest.mark.slow

CONFIG = ModelConfig(model_type="llama", num_attention_heads=4, num_key_value_heads=2, head_dim=64)
INT4, FP8 = Precision("auto", "int4"), Precision("auto", "fp8")


def weights_of(layers: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = llama_shapes(layers, 256, 512, 4, 2, 60)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def objects_of(weights: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {"model.safetensors": save(dict(weights))}


def plan_of(objects: Mapping[str, bytes], layout: Layout, precision: Precision, chunk_bytes: int = 40_009) -> LoadPlan:
    """Return the plan of the load. Its chunks end anywhere, also inside elements."""
    index = with_digests(open_model(MemoryStore(dict(objects)), chunk_bytes=chunk_bytes), objects)
    return build_load_plan(index, layout, None, CONFIG, precision)


def expected(weights: Mapping[str, torch.Tensor], scheme: str) -> dict[str, torch.Tensor]:
    found = {}
    for name, weight in weights.items():
        if "proj" in name:
            found |= {f"{name}{suffix}": made for suffix, made in quantized(weight, scheme).items()}
        else:
            found[name] = weight
    return found


def check(ranks: list[Rank], weights: Mapping[str, torch.Tensor], scheme: str) -> None:
    """Check every byte of every tensor, and that memory is as planned."""
    pieces = []
    for rank in ranks:
        assert isinstance(rank.outcome, RankReport), rank.outcome
        data = rank.tensor_bytes()
        plan = rank.loader.plan
        pieces += [(piece, np.frombuffer(data[piece.name][1], np.uint8)) for piece in plan.slices]
        assert tuple(len(segment.data) for segment in rank.device._segments) == plan.segment_bytes
        assert rank.outcome.device_bytes == sum(plan.segment_bytes)
        assert rank.outcome.size_bytes == sum(len(made) for _, made in data.values())
        assert rank.outcome.converted_tensors == len(plan.staged) > 0
        for staged in plan.staged if scheme == "nf4" else ():
            said = json.loads(data[staged.source.name + NF4_STATE][1])
            assert said == {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*staged.region.sizes]}
        assert not rank.device._staged
        assert rank.device._staging.kept_bytes == 0
    whole = assemble(pieces)
    for name, tensor in expected(weights, scheme).items():
        if scheme == "nf4" and name not in whole:
            assert name.endswith(NF4_STATE), name
            continue
        _, shape, found = whole[name]
        flat = scheme == "nf4" and "proj" in name  # the rows that its bytes cover here
        assert shape == tuple(tensor.shape) or (flat and math.prod(shape) == tensor.numel()), name
        assert found.tobytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize("placement", ["via_arena", "direct"])
@pytest.mark.parametrize(
    ("scheme", "sizes"),
    [
        *(("int4", (1, 1, 1)), ("int4", (2, 1, 1)), ("nf4", (1, 1, 1)), ("nf4", (2, 2, 1))),
        *(("fp8", (2, 2, 1)), ("fp8_tensor", (2, 1, 1)), ("int8", (1, 1, 2))),
    ],
)
def test_every_rank_holds_its_converted_slices(
    shm_dir: Path, scheme: str, sizes: tuple[int, int, int], placement: str
) -> None:
    weights = weights_of()
    objects = objects_of(weights)
    plan = plan_of(objects, Layout(*sizes), Precision("auto", scheme))
    with local_node(shm_dir, slots=2 * min_slots(len(plan.ranks)), placement=placement) as node:
        ranks, report = node.load(plan, MemoryStore(objects))
        check(ranks, weights, scheme)
        assert report.store_bytes == report.needed_bytes
        if placement == "direct" and len(ranks) == 1:
            assert report.direct_bytes > 0  # the embedding is held as it is stored


def test_casts_apply_to_tensors_that_are_not_matrices(shm_dir: Path) -> None:
    weights = {
        "a.weight": torch.randn(6, 4),
        "b.bias": torch.randn(5).double(),
        "c": torch.tensor(2.5, dtype=torch.float16),
        "d.ids": torch.arange(7),
        "e.empty": torch.ones(0, 3),
        "f.weight": torch.randn(3, 3).to(torch.float8_e4m3fn),
        "g.weight": torch.randn(2, 2).to(torch.bfloat16),
    }
    objects = objects_of(weights)
    for layout in (Layout(), Layout(1, 4)):
        plan = plan_of(objects, layout, Precision("bfloat16"), 7)
        with local_node(shm_dir, slots=16) as node:
            ranks, _ = node.load(plan, MemoryStore(objects))
        pieces = [
            (piece, np.frombuffer(rank.tensor_bytes()[piece.name][1], np.uint8))
            for rank in ranks
            for piece in rank.loader.plan.slices
        ]
        for name, (_, _, data) in assemble(pieces).items():
            made = weights[name] if name == "d.ids" else weights[name].to(torch.bfloat16)
            assert data.tobytes() == made.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name


def test_staging_is_bounded_by_one_tensor_and_chunks_in_flight(shm_dir: Path) -> None:
    """The number of layers does not matter."""
    weights = weights_of(layers=12)
    objects = objects_of(weights)
    chunk_bytes = 60_000
    plan = plan_of(objects, Layout(), INT4, chunk_bytes)
    largest = max(staged.source.size_bytes for staged in plan.ranks[0].staged)
    total = sum(staged.source.size_bytes for staged in plan.ranks[0].staged)
    with local_node(shm_dir, slots=3, fetch_threads=2) as node:
        (rank,), _ = node.load(plan, MemoryStore(objects))
        check([rank], weights, "int4")
        assert isinstance(rank.outcome, RankReport)
        (facts,) = rank_facts(plan.cut, plan.chunks.largest_bytes)
        assert largest <= rank.outcome.peak_staging_bytes <= facts.staging_bytes
        assert facts.staging_bytes <= 2 * largest + chunk_bytes < total / 4
        assert rank.outcome.converted_bytes == total


def test_scattered_cached_chunks_do_not_start_every_tensor(shm_dir: Path) -> None:
    """Half of each tensor is in the arena from another load, and is readable at once."""
    weights = weights_of(layers=4)
    objects = objects_of(weights)
    store = MemoryStore(objects)
    halves = plan_of(objects, Layout(1, 2), Precision())
    plan = plan_of(objects, Layout(), INT4)
    (facts,) = rank_facts(plan.cut, plan.chunks.largest_bytes)
    total = sum(staged.source.size_bytes for staged in plan.ranks[0].staged)
    with local_node(shm_dir, slots=len(plan.chunks) + 5) as node:
        load_id = node.begin(halves, ranks=[0])
        run_all([node.rank(halves, store, load_id, 0)])
        (rank,), report = node.load(plan, store)
        check([rank], weights, "int4")
        assert report.needed_chunks // 3 < report.cached_chunks < report.needed_chunks * 3 // 4
        assert isinstance(rank.outcome, RankReport)
        assert rank.outcome.peak_staging_bytes <= facts.staging_bytes < total / 4


def test_a_rank_keeps_its_staging_when_its_agent_restarts(shm_dir: Path) -> None:
    weights = weights_of()
    objects = objects_of(weights)
    plan = plan_of(objects, Layout(1, 2), INT4, 20_000)
    reached = threading.Event()
    with local_node(shm_dir, slots=8) as node:
        load_id = node.begin(plan)
        link = SwitchedLink(node.agent)
        store = _Watched(objects, reached, after=len(plan.chunks) // 2)
        ranks = node.ranks(plan, store, load_id, link)
        threads = start_all(ranks)
        assert reached.wait(30)
        link.cut.set()
        node.agent.shutdown()
        node.agent = link.agent = node.start_agent()
        node.begin(plan, load_id)
        link.cut.clear()
        store.go_on.set()
        for thread in threads:
            thread.join()
        check(ranks, weights, "int4")


def test_a_replaced_rank_stages_again(shm_dir: Path) -> None:
    weights = weights_of()
    objects = objects_of(weights)
    plan = plan_of(objects, Layout(1, 2), FP8, 20_000)
    reached = threading.Event()
    with local_node(shm_dir, slots=len(plan.chunks) + 5) as node:
        load_id = node.begin(plan)
        store = _Watched(objects, reached, after=len(plan.chunks) // 2)
        first, second = node.ranks(plan, store, load_id)
        threads = start_all([first, second])
        assert reached.wait(30)
        first.loader.cancel(LongshoreError("its worker was killed"))
        store.go_on.set()
        threads[0].join()
        node.agent.rank_lost(load_id, 0, 1)
        again = node.rank(plan, store, load_id, 0, incarnation=1)
        run_all([again])
        threads[1].join()
        assert isinstance(first.outcome, LongshoreError)
        check([again, second], weights, "fp8")


@pytest.mark.parametrize("seed", range(4))
def test_duplicate_concurrent_chunks_are_placed_once(seed: int) -> None:
    """Chunks arrive in several threads and any order. Nothing is converted early or twice, or changed afterwards."""
    weights = weights_of()
    objects = objects_of(weights)
    plan = plan_of(objects, Layout(), INT4, 30_000)
    device = _Recording()
    placer = ChunkPlacer(device, plan.ranks[0], unpack_shared(pack_shared(plan)))
    device.allocate(plan.ranks[0].segment_bytes)
    chunks = np.random.default_rng(seed).permutation(np.repeat(plan.ranks[0].chunk_ids, 2)).tolist()
    slots = _Slots(plan, objects)

    def work(number: int) -> None:
        clock = placer.clock()
        for chunk in chunks[number::4]:
            placer.place(slots, [(chunk, chunk)], clock)  # type: ignore[arg-type]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    placer.finish()
    assert sorted(device.converted) == sorted(staged.source.name for staged in plan.ranks[0].staged)
    made = device.tensors(plan.ranks[0].slices)
    for name, tensor in expected(weights, "int4").items():
        assert torch.equal(made[name], tensor), name


def test_a_conversion_that_fails_ends_every_thread() -> None:
    weights = weights_of()
    objects = objects_of(weights)
    plan = plan_of(objects, Layout(), INT4, 30_000)
    device = _Recording(fails=True)
    placer = ChunkPlacer(device, plan.ranks[0], unpack_shared(pack_shared(plan)))
    device.allocate(plan.ranks[0].segment_bytes)
    slots, outcomes = _Slots(plan, objects), []

    def work(chunks: list[int]) -> None:
        try:
            placer.place(slots, [(chunk, chunk) for chunk in chunks], placer.clock())  # type: ignore[arg-type]
        except (MemoryError, LongshoreError) as error:
            outcomes.append(error)

    everything = plan.ranks[0].chunk_ids.tolist()
    threads = [threading.Thread(target=work, args=(everything,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(error, MemoryError) for error in outcomes) >= 1
    assert len(outcomes) == 2


class _Slots:
    """Stands in for an arena: slot n has chunk n."""

    def __init__(self, plan: LoadPlan, objects: Mapping[str, bytes]) -> None:
        self._plan = plan
        self._files = [np.frombuffer(objects[shard.key], np.uint8) for shard in plan.shards]

    def slot(self, chunk: int) -> memoryview:
        span = self._plan.chunks.byte_range(chunk)
        return self._files[self._plan.chunks.shard[chunk]][span.start : span.end].data


class _Recording(CpuDevice):
    """Records conversions. `place` raises when memory is written after its release."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.converted: list[str] = []
        self._fails = fails

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        if self._fails:
            raise MemoryError("no memory to convert in")
        self.converted.append(staged.source.name)
        super().convert(staged, slices)


class _Watched(MemoryStore):
    """Reports when so many reads have begun, and holds the others until they may continue."""

    def __init__(self, objects: Mapping[str, bytes], reached: threading.Event, after: int) -> None:
        super().__init__(dict(objects))
        self.reached = reached
        self.go_on = threading.Event()
        self.left = after

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        self.left -= 1
        if self.left <= 0:
            self.reached.set()
            self.go_on.wait(30)
        return super().read_into(key, byte_range, buffer, etag=etag)
