"""The plan of a save: every byte once, from a rank that has it, in rounds of bounded memory."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.saving.held import byte_slice, sample
from cluster.errors import SaveError
from cluster.layouts.region import Region
from cluster.saving.held import (
    Cutting,
    Merged,
    RankTable,
    Regions,
    bytes_before,
    differing,
    drifted,
    merge,
    shared_pieces,
)
from cluster.saving.plan import blocks, plan_parts, schedule
from cluster.saving.shards import lay_out

MIB = 1 << 20


def held(array: np.ndarray, region: Region) -> np.ndarray:
    for dim, ranges in enumerate(region.ranges):
        array = array.take([i for start, end in ranges for i in range(start, end)], axis=dim)
    return array


@st.composite
def cuttings(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> Cutting:
    """Cut a tensor by a mesh of all ranks, whose first dimension may replicate."""
    if not shape or draw(st.booleans()):
        return Cutting()
    mesh = draw(st.sampled_from([(a, world // a) for a in range(1, world + 1) if world % a == 0]))
    cuts = []
    for mesh_dim in range(2):
        if draw(st.booleans()):
            cuts.append((mesh_dim, draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([1, 1, 2, 3]))))
    return Cutting(mesh=mesh, ranks=tuple(range(world)), cuts=tuple(cuts))


def merged_job(shapes: Sequence[tuple[int, ...]], cuts: Sequence[Cutting], world: int) -> tuple[Merged, int]:
    table = RankTable(
        names=tuple(f"t{number}" for number in range(len(shapes))),
        dtypes=("I32",) * len(shapes),
        shapes=tuple(shapes),
        cuttings=tuple(cuts),
        cutting_of=tuple(range(len(shapes))),
    )
    merged = merge([RankTable.unpack(table.pack())], [0] * world)
    assert not merged.problems
    return merged, world


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Merged, int]:
    world = draw(st.integers(1, 6))
    shapes, cuts = [], []
    for _ in range(draw(st.integers(1, 8))):
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 700, 1500]), max_size=3)))
        if math.prod(shape) > 12 * MIB:
            shape = shape[:2]
        shapes.append(shape)
        cuts.append(draw(cuttings(shape, world)))
    return merged_job(shapes, cuts, world)


FSDP_64 = Cutting(mesh=(64,), ranks=tuple(range(64)), cuts=((0, 0, 1),))


@settings(max_examples=60, deadline=None)
@given(jobs(), st.integers(1, 3), st.booleans())
@example(merged_job([(256, 512)] * 20 + [(250, 500), (63,), ()], [FSDP_64] * 22 + [Cutting()], 64), 1, False)
def test_every_byte_is_written_once_from_who_has_it(job: tuple[Merged, int], per_round: int, in_order: bool) -> None:
    merged, world = job
    whole = {
        tensor.spec.name: np.random.default_rng(0).integers(0, 1 << 30, tensor.spec.shape, dtype=np.int32)
        for tensor in merged.tensors
    }
    layouts = lay_out(
        [tensor.spec for tensor in merged.tensors], revision="r", max_shard_bytes=8 * MIB, chunk_bytes=MIB
    )
    local = [
        [
            held(whole[tensor.spec.name][..., None].view(np.uint8).reshape(tensor.regions.shape), region).tobytes()
            for region, _ in tensor.regions.held
        ]
        for tensor in merged.tensors
    ]
    parts = list(plan_parts(layouts, merged.tensors, world, in_order=in_order))
    if in_order:
        assert len({(part.shard, part.assembler) for part in parts}) == len(layouts)
    assert [(p.shard, p.part) for p in parts] == [
        (s, n) for s, one in enumerate(layouts) for n in range(len(one.parts))
    ]
    for planned in parts:
        layout = layouts[planned.shard]
        place = layout.parts[planned.part]
        written = np.zeros(place.size_bytes, np.uint8)
        times = np.zeros(place.size_bytes, np.int64)
        in_header = max(0, min(len(layout.header), place.end) - place.start)
        times[:in_header] += 1
        starts = {tensor.name: tensor.start for tensor in layout.tensors}
        for rank, pieces in planned.sources.items():
            for piece in pieces:
                tensor = merged.tensors[piece.tensor]
                region, holders = tensor.regions.held[piece.region]
                assert rank in holders
                message = local[piece.tensor][piece.region][piece.local_start : piece.local_end]
                base = starts[tensor.spec.name] + piece.start - place.start
                used = 0
                for block in blocks(tensor.regions.shape, region, piece.start, piece.end):
                    for time in range(block.times):
                        at, source = base + block.into + time * block.into_step, block.source + time * block.source_step
                        written[at : at + block.run] = np.frombuffer(message[source : source + block.run], np.uint8)
                        times[at : at + block.run] += 1
                        used += block.run
                assert used == len(message)
        assert (times == 1).all()
        expected = layout.header + b"".join(whole[t.name].tobytes() for t in layout.tensors)
        assert written[in_header:].tobytes() == expected[place.start + in_header : place.end]
    plans = [schedule(layouts, merged.tensors, world, rank, per_round, in_order=in_order) for rank in range(world)]
    for one in plans:  # a rank ends a file before it begins another, whatever the rounds
        order = [(part.shard, part.part) for work in one.rounds for part in work.assemble]
        assert order == sorted(order)
    assert len({len(one.rounds) for one in plans}) == 1
    assert len({one.moved_bytes for one in plans}) == 1
    assert all(one.largest_round <= per_round for one in plans)
    for number in range(len(plans[0].rounds)):
        sent = sorted(
            (rank, to, sum(piece.size_bytes for piece in pieces))
            for rank, one in enumerate(plans)
            for to, _, pieces in one.rounds[number].send
        )
        expected_messages = sorted(
            (source, rank, part.message_bytes(source))
            for rank, one in enumerate(plans)
            for part in one.rounds[number].assemble
            for source in part.sources
            if source != rank
        )
        assert sent == expected_messages


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)),
            st.tuples(*(st.sets(st.integers(0, size - 1)).map(sorted) for size in shape)),
        )
    ),
    st.data(),
)
def test_positions_and_blocks_of_any_region(
    case: tuple[tuple[int, ...], tuple[list[int], ...]], data: st.DataObject
) -> None:
    shape, picked = case
    region = Region(tuple(tuple((i, i + 1) for i in indices) for indices in picked))
    inside = np.zeros(shape, bool)
    inside[np.ix_(*picked)] = True
    flat = np.flatnonzero(inside.reshape(-1))
    start = data.draw(st.integers(0, inside.size))
    end = data.draw(st.integers(start, inside.size))
    assert bytes_before(shape, region, start) == (flat < start).sum()
    found = {}
    for block in blocks(shape, region, start, end):
        for time in range(block.times):
            for byte in range(block.run):
                place = block.into + time * block.into_step + byte
                assert place not in found
                found[place] = block.source + time * block.source_step + byte
    expected = {int(at) - start: number for number, at in enumerate(flat[(flat >= start) & (flat < end)])}
    assert found == expected


def test_counts_of_boxes_at_once_equal_counts_one_by_one() -> None:
    regions = Regions((7, 9), 4, [(Region((((a, a + 3),), ((b, b + 2),))), (0,)) for a in (0, 4) for b in (1, 5)])
    for position in range(regions.size_bytes + 1):
        one_by_one = [bytes_before(regions.shape, region, position) for region, _ in regions.held]
        assert regions.before(position).tolist() == one_by_one


def table(shape: tuple[int, ...] = (4, 6), cutting: Cutting | None = None, **more: object) -> RankTable:
    columns = {"names": ("w",), "dtypes": ("F32",), "shapes": (shape,), "cutting_of": (0,)}
    return RankTable(**{**columns, "cuttings": (cutting or Cutting(),), **more})


def test_every_disagreement_is_a_problem_with_its_ranks() -> None:
    merged = merge([table(problems=("x is Partial",)), table((4, 7), arguments={"uri": "b"})], [0, 1, 1])
    assert merged.problems == (
        "rank 0: x is Partial",
        "ranks 1, 2: uri differs from that of rank 0",
        "'w' has another dtype or shape on some ranks",
    )
    boxes = ((0, (0, 0), (2, 6)), (1, (2, 0), (2, 5)))
    assert merge([table(cutting=Cutting(boxes=boxes))], [0, 0]).problems == (
        "'w': its parts do not make up the tensor",
    )
    boxes = ((0, (0, 0), (2, 6)), (1, (1, 0), (2, 6)))
    assert merge([table(cutting=Cutting(boxes=boxes))], [0, 0]).problems == ("'w': its parts overlap",)
    mesh = Cutting(mesh=(3,), ranks=(0, 1, 7), cuts=((0, 0, 1),))
    assert merge([table((6, 1), mesh)], [0, 0]).problems == ("'w': no rank of this save holds 1 of its 3 parts",)


def test_names_are_tied_only_if_every_holder_says_so() -> None:
    columns = {"names": ("a", "b"), "dtypes": ("F32",) * 2, "shapes": ((4,),) * 2, "cutting_of": (0, 0)}
    mesh = Cutting(mesh=(2,), ranks=(0, 1), cuts=((0, 0, 1),))
    tied = RankTable(**columns, cuttings=(mesh,), ties=(("b", "a"),))
    apart = RankTable(**columns, cuttings=(mesh,))
    assert merge([tied], [0, 0]).ties == {"b": "a"}
    assert [one.spec.name for one in merge([tied], [0, 0]).tensors] == ["a"]
    assert merge([tied, apart], [0, 1]).ties == {}
    assert merge([tied, apart], [0, 0, 1]).ties == {"b": "a"}  # rank 2 holds nothing of them


def test_pieces_that_differ_are_found_with_their_ranks() -> None:
    mesh = Cutting(mesh=(2, 2), ranks=(0, 1, 2, 3), cuts=((1, 0, 1),))  # 0 and 2 have the same rows, and 1 and 3
    columns = {"names": ("a", "b"), "dtypes": ("F32",) * 2, "shapes": ((4,),) * 2, "cutting_of": (0, 1)}
    merged = merge([RankTable(**columns, cuttings=(mesh, Cutting()))], [0] * 4)
    shared = shared_pieces(merged.tensors)
    assert shared == {(0, 2): [(0, 0)], (1, 3): [(0, 1)], (0, 1, 2, 3): [(1, 0)]}
    assert differing(list(shared), [b"xw", b"yw", b"xw", b"yw"], 1) == {}
    assert differing(list(shared), [b"xw", b"yv", b"xw", b"zw"], 1) == {1: [[1], [3]], 2: [[0, 2, 3], [1]]}
    assert drifted("b", [[0, 2, 3], [1]]) == "'b' differs between ranks 0, 2, 3 and rank 1"


@pytest.mark.parametrize("shape", [(700, 901), (3, 200, 301), (130_000,), (256, 64), (2, 3)])
def test_samples_are_equal_whatever_the_strides(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    turned = whole.permute(*reversed(range(whole.ndim))).contiguous().permute(*reversed(range(whole.ndim)))
    found = sample(whole).view(torch.int32)
    assert found.equal(sample(turned).view(torch.int32))
    assert len(found.unique()) == min(16384, whole.numel())
    assert found[0] == 0
    assert found[-1] >= whole.numel() - 300


def test_the_bytes_of_one_element_of_any_stride() -> None:
    assert byte_slice(torch.arange(10)[3::5][:1], 0, 8).tolist() == [3, *[0] * 7]
    assert byte_slice(torch.arange(10)[1::3], 4, 12).tolist() == [0] * 4 + [4] + [0] * 3


def test_replicas_share_the_work() -> None:
    merged = merge([table((4096, 4096))], [0] * 4)
    layouts = lay_out([merged.tensors[0].spec], revision="r", chunk_bytes=MIB)
    counts = [0] * 4
    for part in plan_parts(layouts, merged.tensors, 4):
        assert list(part.sources) == [part.assembler]
        counts[part.assembler] += 1
    assert max(counts) - min(counts) <= 1


def test_tables_of_many_ranks_are_small() -> None:
    names = tuple(f"model.layers.{n}.self_attn.{kind}_proj.weight" for n in range(80) for kind in "qkvo")
    mesh = Cutting(mesh=(512,), ranks=tuple(range(512)), cuts=((0, 0, 1),))
    one = RankTable(
        names=names,
        dtypes=("BF16",) * len(names),
        shapes=((8192, 8192),) * len(names),
        cuttings=(mesh,),
        cutting_of=(0,) * len(names),
    )
    assert len(one.pack()) < 8192  # even if no two ranks had the same table, 4 MB together
    assert RankTable.unpack(one.pack()) == one


@pytest.mark.parametrize("data", [b"", b"x", random.Random(0).randbytes(1000), table().pack()[:-3]])
def test_damaged_tables_are_typed_errors(data: bytes) -> None:
    with pytest.raises(SaveError):
        RankTable.unpack(data)


def test_512_ranks_are_planned_in_bounded_rounds() -> None:
    cuts = [Cutting(mesh=(512,), ranks=tuple(range(512)), cuts=((0, dim, 1),)) for dim in (0, 1)]
    names = tuple(f"w{n}" for n in range(8))
    one = RankTable(
        names=names,
        dtypes=("BF16",) * 8,
        shapes=((8192, 4096),) * 8,
        cuttings=tuple(cuts),
        cutting_of=(0, 1) * 4,
    )
    merged = merge([one], [0] * 512)
    layouts = lay_out([tensor.spec for tensor in merged.tensors], revision="r")
    plan = schedule(layouts, merged.tensors, 512, 3, 2)
    assert plan.largest_round <= 2
    assert 0 < plan.moved_bytes < sum(layout.size_bytes for layout in layouts)
