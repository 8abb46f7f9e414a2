"""Verdicts on given memory agree with a calculation by hand, and fit on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import Config
from cluster.errors import ConfigError
from cluster.fit.needs import DeviceRoom
from cluster.fit.options import FitOptions
from cluster.fit.search import (
    GIVEN,
    SEEN,
    Change,
    Devices,
    PlanFit,
    PlannedChange,
    check_devices,
    find_fit,
    fits_on,
    layouts_for,
    rooms_of,
    weigh,
)
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.options import LoadOptions
from cluster.planning.cut_model import CutModel
from cluster.planning.make_plan import build_load_plan, plan_changes
from cluster.planning.packed_plan import RankFacts, rank_facts
from cluster.request import LoadRequest, make_request
from storage.checkpoints.model_index import ModelIndex
from tests.support.planned_models import llama_shapes, random_arrays, store_arrays

CONFIG = Config(device_reserve_bytes=0)
LLAMA = ModelConfig(model_type="llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=256)
SCREEN_LINES, SCREEN_COLUMNS = 24, 80


def request(layout: Layout, mode: str = "strict") -> LoadRequest:
    return make_request(LoadOptions("s3://bucket/model", **asdict(layout), region="r", fit=mode))


@pytest.fixture(scope="module")
def index() -> ModelIndex:
    arrays = random_arrays(llama_shapes(4, 256, 512, 8, 4, 128))
    return store_arrays({name: ("BF16", array) for name, array in arrays.items()}, chunk_bytes=16 << 10).index


def facts(index: ModelIndex, asked: LoadRequest) -> tuple[RankFacts, ...]:
    plan = build_load_plan(index, asked.layout, config=LLAMA, precision=asked.precision)
    return rank_facts(plan.cut, plan.chunks.largest_bytes)


def plan_of(index: ModelIndex, asked: LoadRequest) -> CutModel:
    return build_load_plan(index, asked.layout, config=LLAMA, device_map=asked.mapping).cut


def fit(index: ModelIndex, asked: LoadRequest, devices: Devices | None) -> tuple[LoadRequest, PlanFit]:
    return find_fit(asked, facts(index, asked), devices, lambda changes: plan_changes(index, LLAMA, changes))


def given_devices(*sizes: int) -> Devices:
    return Devices(tuple(DeviceRoom(size, None, 0) for size in sizes), GIVEN)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_fits_agree_with_a_calculation_by_hand(needs: list[int], haves: list[int]) -> None:
    ranks = tuple(RankFacts(need, need, need) for need in needs)
    in_order, any_order = given_devices(*haves), Devices(given_devices(*haves).rooms, SEEN)
    if len(needs) <= len(haves):
        assert fits_on(ranks, in_order) == all(n <= h for n, h in zip(needs, haves, strict=False))
        assert [each.fits for each in weigh(ranks, in_order)] == [n <= h for n, h in zip(needs, haves, strict=False)]
        best = sorted(haves, reverse=True)
        assert fits_on(ranks, any_order) == all(n <= h for n, h in zip(sorted(needs, reverse=True), best, strict=False))
    else:  # more devices like the least roomy one would be needed
        assert fits_on(ranks, in_order) == all(need <= min(haves) for need in needs)
        assert {each.fits for each in weigh(ranks, in_order)} == {None}


def test_devices_of_one_rank_are_numbered() -> None:
    """A map may leave GPU 0 empty."""
    (on_second,) = weigh((RankFacts(5, 5, 5, devices=((1, 5),)),), given_devices(9, 4))
    assert (on_second.device, on_second.have_bytes, on_second.fits) == (1, 4, False)


def test_the_tensor_that_is_converted_needs_room_too() -> None:
    (alone,) = weigh((RankFacts(5, 6, 5, 3),), given_devices(9))
    assert (alone.need_bytes, alone.fits) == (9, True)
    assert not fits_on((RankFacts(5, 6, 5, 4),), given_devices(9))


@pytest.mark.parametrize("mode", ["strict", "auto"])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(2), Layout(1, 2), Layout(pipeline_parallel_size=2), Layout(1, 1, 2)]
)
def test_every_size_of_memory(index: ModelIndex, layout: Layout, mode: str) -> None:
    """With less and less memory, auto lowers precision in steps, never in vain. Its offers really fit."""
    asked = request(layout, mode)
    full = max(rank.device_bytes for rank in facts(index, asked))
    taken_before = 0
    order = ["", "fp8", "int8", "int4"]
    for part in range(12, 0, -1):
        devices = given_devices(*[full * part // 11] * layout.ranks)
        taken, found = fit(index, asked, devices)
        assert found.fits == fits_on(facts(index, taken), devices)
        as_given = fits_on(facts(index, asked), devices)
        assert (taken.precision == asked.precision) == (as_given or not found.fits)
        if mode == "strict":
            assert taken is asked
        elif found.fits:
            step = order.index(taken.precision.quantization)
            assert step >= taken_before
            taken_before = step
            assert [each.why_not == "" for each in found.tried] == [False] * (len(found.tried) - 1) + [True]
            for less in order[1:step]:  # every step before it does not fit
                tried = replace(asked, precision=replace(asked.precision, quantization=less))
                assert not fits_on(facts(index, tried), devices)
        for offer in found.offers:
            assert not found.fits
            assert offer.need_bytes <= full * part // 11
            assert offer.what in found.sentence
        assert len(found.sentence) <= SCREEN_LINES * SCREEN_COLUMNS * 2 // 3
    assert mode == "strict" or taken_before == 3


def test_a_refusal_shows_need_have_and_the_cheapest_change(index: ModelIndex) -> None:
    asked = request(Layout())
    full = facts(index, asked)[0].device_bytes
    _, found = fit(index, asked, given_devices(full * 6 // 10, full * 6 // 10))
    assert found.fits is False
    assert "rank 0 needs" in found.sentence
    assert "a GPU has" in found.sentence
    assert found.offers[0].what == "tensor_parallel_size=2"  # the second device is there, and nothing is lost
    _, alone = fit(index, asked, given_devices(full * 7 // 10))
    assert alone.offers[0].what == 'quantization="fp8"'
    assert {offer.what for offer in alone.offers[1:]} == {"tensor_parallel_size=2"}
    assert ", 1 present" in alone.sentence
    _, hopeless = fit(index, asked, given_devices(1000))
    assert hopeless.offers == ()
    assert "None of " in hopeless.sentence


def test_offload_is_offered_only_as_a_last_resort(index: ModelIndex) -> None:
    asked = request(Layout(), "auto")
    full = facts(index, asked)[0].device_bytes
    devices = given_devices(full // 5)  # the largest layer fits, int4 does not

    def plan(changes: Sequence[Change]) -> list[PlannedChange]:
        return plan_changes(index, LLAMA, changes)

    taken, found = find_fit(asked, facts(index, asked), devices, plan, full)
    assert found.fits
    assert found.tried[-1].what.startswith("device_map=")
    assert taken.device_map is not None
    (rank,) = rank_facts(plan_of(index, taken))
    assert dict(rank.devices).get(0, 0) <= full // 5
    assert sum(size for _, size in rank.devices) >= sum(tensor.size_bytes for tensor in index.tensors)
    _, without = find_fit(asked, facts(index, asked), devices, plan)
    assert without.fits is False


def test_two_changes_are_offered_where_one_is_too_little(index: ModelIndex) -> None:
    asked = request(Layout())
    planned = []

    def plan(changes: Sequence[Change]) -> list[PlannedChange]:
        planned.extend(plan_changes(index, LLAMA, changes))
        return planned

    _, found = find_fit(asked, facts(index, asked), given_devices(facts(index, asked)[0].device_bytes // 12), plan)
    assert found.offers
    assert all(" and " in offer.what for offer in found.offers)


def test_plans_without_known_memory_give_no_verdict(index: ModelIndex) -> None:
    _, found = fit(index, request(Layout(2)), None)
    assert (found.fits, found.memory) == (None, "")
    assert 'memory="4x24GB"' in found.sentence
    one = Devices(given_devices(10**12).rooms, SEEN)
    _, few = fit(index, request(Layout(2)), one)
    assert few.fits is None
    assert "1 GPUs are seen on this machine, the plan needs 2" in few.sentence
    _, fitting = fit(index, request(Layout()), one)
    assert fitting.fits


def test_more_ranks_than_memory_is_an_error() -> None:
    with pytest.raises(ConfigError, match="4 ranks, but memory names 2 devices"):
        check_devices(Layout(4), given_devices(1, 1))
    check_devices(Layout(4), Devices((), SEEN))
    assert [way.ranks for way in layouts_for(6)] == [6, 6, 6]


def test_rooms_keep_the_requested_reserve() -> None:
    asked = replace(request(Layout()), fit=FitOptions(gpu_memory_utilization=0.75, reserve_bytes=10))
    assert [room.have_bytes for room in rooms_of((100, 20), asked, CONFIG)] == [75, 10]
