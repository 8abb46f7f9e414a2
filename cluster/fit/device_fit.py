"""Whether GPUs hold what ranks put on them. Pure.

    have = free now (all of it where that is not known) - what was asked to stay free
    need = the rank's slices, alignment included

Ray says how many GPUs of a node a load gets, not which: ranks fit a node when they can be put on different GPUs of it
so that each has room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.config import Config
from cluster.fit.options import FitOptions
from cluster.units import show_bytes, show_some
from storage.host.gpu_memory import GpuMemory

_SHOWN_RANKS = 8


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """What one GPU has for a load."""

    total_bytes: int
    free_bytes: int | None  # None: not known, taken for all
    kept_free_bytes: int  # that was asked to stay free

    @property
    def have_bytes(self) -> int:
        """Bytes that ranks can take."""
        free_bytes = self.total_bytes if self.free_bytes is None else self.free_bytes
        return max(0, free_bytes - self.kept_free_bytes)

    def emptied(self) -> DeviceRoom:
        """The same without what others have in use."""
        return replace(self, free_bytes=None)


def room_on(gpu: GpuMemory, options: FitOptions, config: Config) -> DeviceRoom:
    """What the load can take of a GPU."""
    return DeviceRoom(gpu.total_bytes, gpu.free_bytes, options.kept_free_bytes(gpu.total_bytes, config))


Place = tuple[int, int]  # (rank, number of the GPU among the rank's own)


def seat_on_devices(needs: Mapping[Place, int], rooms: Sequence[DeviceRoom]) -> dict[Place, DeviceRoom]:
    """A GPU for each place, the largest need on the roomiest. `needs`: bytes, of one node; `rooms`: its GPUs.

    If there is any way that all fit, they do so. Places beyond the number of GPUs get the least roomy one.
    """
    roomiest = sorted(rooms, key=lambda room: room.have_bytes, reverse=True)
    largest = sorted(needs, key=lambda place: (-needs[place], place))
    return {place: roomiest[min(at, len(roomiest) - 1)] for at, place in enumerate(largest)} if roomiest else {}


def device_problem(host: str, needs: Mapping[Place, int], rooms: Sequence[DeviceRoom]) -> str:
    """Which ranks lack memory on the GPUs of a node, with need and have; "" when all have it, or nobody knows."""
    return misfit_text(host, needs, seat_on_devices(needs, rooms))


def misfit_text(host: str, needs: Mapping[Place, int], seats: Mapping[Place, DeviceRoom]) -> str:
    """The same for places that have their GPUs."""
    tight = [place for place, room in seats.items() if needs[place] > room.have_bytes]
    if not tight:
        return ""
    worst = max(sorted(tight), key=lambda place: needs[place] - seats[place].have_bytes)
    ranks = sorted({rank for rank, _ in tight})
    many = len(tight) > 1
    return (
        f"{host}{': ' * bool(host)}rank{'s' * (len(ranks) > 1)} {show_some(ranks, _SHOWN_RANKS)} "
        f"need{'s' * (len(ranks) == 1)} {'up to ' * many}{show_bytes(needs[worst])} of device memory, "
        f"{show_room(seats[worst])}"
    )


def show_room(room: DeviceRoom) -> str:
    """`a GPU has 1.07 GB (of 2.15 GB; 0.5 GB in use, 0.57 GB kept free)`."""
    parts = []
    if room.free_bytes is not None and room.free_bytes < room.total_bytes:
        parts.append(f"{show_bytes(room.total_bytes - room.free_bytes)} in use")
    if room.kept_free_bytes:
        parts.append(f"{show_bytes(room.kept_free_bytes)} kept free")
    of = f" (of {show_bytes(room.total_bytes)}{'; ' * bool(parts)}{', '.join(parts)})" if parts else ""
    return f"a GPU has {show_bytes(room.have_bytes)}{of}"
