"""Ranks on GPUs, against an exhaustive search of the ways to place them."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import Config
from cluster.errors import ConfigError
from cluster.fit.needs import DeviceRoom, device_problem, place_on_devices, room_on
from cluster.fit.options import FitOptions
from cluster.options import LoadOptions
from storage.host.memory import GpuMemory

CONFIG = Config(device_reserve_bytes=2)
rooms = st.builds(DeviceRoom, st.integers(0, 12), st.none() | st.integers(0, 12), st.integers(0, 4))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.lists(rooms, min_size=1, max_size=5))
def test_ranks_fit_if_any_assignment_does(sizes: list[int], gpus: list[DeviceRoom]) -> None:
    needs = {(rank, 0): size for rank, size in enumerate(sizes)}
    placements = place_on_devices(needs, gpus)
    fits = all(need <= placements[place].have_bytes for place, need in needs.items())
    assert fits == (device_problem("host", needs, gpus) == "")
    if len(sizes) <= len(gpus):
        by_hand = any(
            all(need <= room.have_bytes for need, room in zip(sizes, chosen, strict=True))
            for chosen in permutations(gpus, len(sizes))
        )
        assert fits == by_hand


@given(
    total=st.integers(0, 1000),
    free=st.none() | st.integers(0, 1000),
    share=st.none() | st.floats(0.01, 1.0),
    reserve=st.none() | st.integers(0, 1000),
    settings=st.integers(0, 100),
)
def test_memory_requested_to_stay_free_stays_free(
    total: int, free: int | None, share: float | None, reserve: int | None, settings: int
) -> None:
    options = FitOptions(gpu_memory_utilization=share, reserve_bytes=reserve)
    free = None if free is None else min(free, total)
    room = room_on(GpuMemory(total, free), options, Config(device_reserve_bytes=settings))
    used = total - (total if free is None else free)
    full = used + room.have_bytes  # with all of it taken
    assert 0 <= room.have_bytes <= total
    if room.have_bytes:
        assert total - full >= max(settings, reserve or 0)
        assert share is None or full <= total * share


def test_the_problem_names_ranks_need_and_free_memory() -> None:
    gpus = [DeviceRoom(24 * 10**9, 20 * 10**9, 10**9)] * 2
    said = device_problem("a", {(0, 0): 10**9, (1, 0): 30 * 10**9}, gpus)
    assert said == (
        "a: rank 1 needs 30.0 GB of device memory, a GPU has 19.0 GB (of 24.0 GB; 4.00 GB in use, 1.00 GB kept free)"
    )
    many = device_problem("a", {(rank, 0): 30 * 10**9 for rank in range(99)}, gpus * 50)
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 91 more need up to 30.0 GB" in many
    assert device_problem("a", {(0, 0): 1}, []) == ""  # the GPU is unknown


@pytest.mark.parametrize(
    "bad",
    [
        {"fit": "maybe"},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.5},
        {"gpu_memory_utilization": float("nan")},
        {"gpu_memory_utilization": True},
        {"gpu_memory_utilization": "0.9"},
        {"reserve_bytes": -1},
        {"reserve_bytes": 1.5},
        {"reserve_bytes": True},
    ],
)
def test_impossible_options_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        LoadOptions("/model", **bad)  # type: ignore[arg-type]


def test_gpu_utilisation_is_refused_for_cpu_ranks() -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization is about GPUs"):
        FitOptions(gpu_memory_utilization=0.9).check_device("cpu")
    FitOptions(gpu_memory_utilization=0.9).check_device("cuda")
    FitOptions(reserve_bytes=5).check_device("cpu")
