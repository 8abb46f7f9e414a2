"""Whether a plan fits devices of which only the memory is known, and what to change when it does not. Pure.

rooms      what each device has: given ("4x24GB"), or seen on this machine
weigh      the ranks of a plan on them, rank 0 on the first device
find_fit   fit="auto": the first step of precision that fits; "strict": what would be the cheapest change
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.config import Config
from cluster.device_map.deciding import CPU
from cluster.errors import ConfigError
from cluster.fit.needs import DeviceRoom, Place, gpu_bytes, misfit_text, seat_on_devices
from cluster.fit.options import AUTO, FitTry
from cluster.fit.search import (
    Change,
    Limits,
    PlannedChange,
    changes_to_offer,
    cheapest,
    first_that_fits,
    offer,
    steps_of_auto,
    steps_text,
)
from cluster.layouts.mesh import MAX_RANKS, Layout
from cluster.plans.rank_plans import RankFacts
from cluster.request import LoadRequest
from cluster.units import parse_bytes, show_bytes

GIVEN, SEEN, IN_CLUSTER = "given", "seen on this machine", "seen in the cluster"

Planner = Callable[[Sequence[Change]], list[PlannedChange]]


@dataclass(frozen=True, slots=True)
class Devices:
    """What there is to fit into."""

    rooms: tuple[DeviceRoom, ...]
    source: str  # GIVEN: rank i has device i; else any rank may have any


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """One device of one rank."""

    rank: int
    device: int  # its number among the rank's own
    need_bytes: int  # slices, and the tensor that is just converted
    have_bytes: int | None  # None: not known
    total_bytes: int | None
    free_bytes: int | None
    kept_free_bytes: int | None  # as was asked
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Offer:
    """A change that would fit."""

    what: str
    ranks: int
    need_bytes: int  # of the largest rank


@dataclass(frozen=True, slots=True)
class PlanFit:
    """Whether a plan fits."""

    fits: bool | None  # None: nobody knows what there is
    memory: str  # where that is from: GIVEN, SEEN, IN_CLUSTER, "" when it is not known
    sentence: str  # for people
    devices: tuple[DeviceFit, ...]
    tried: tuple[FitTry, ...] = ()  # of fit="auto", the last of them taken when it fits
    offers: tuple[Offer, ...] = ()  # when it does not fit: the cheapest change first


def check_devices(layout: Layout, devices: Devices | None) -> None:
    """Raises ConfigError when the layout has more ranks than memory was given for."""
    if devices is not None and devices.source == GIVEN and layout.ranks > len(devices.rooms):
        raise ConfigError(
            f"the layout has {layout.ranks} ranks, and memory names {len(devices.rooms)} devices",
            hint=f'give memory="{layout.ranks}x24GB", or fewer ranks',
        )


def layouts_for(count: int) -> list[Layout]:
    """Ways to spread a model over so many devices when nobody said how, the best first."""
    return [Layout(tensor_parallel_size=count), Layout(pipeline_parallel_size=count), Layout(fsdp_size=count)]


def weigh(ranks: Sequence[RankFacts], devices: Devices | None) -> tuple[DeviceFit, ...]:
    """Each rank on its device."""
    needs = {(at, gpu): size for at, rank in enumerate(ranks) for gpu, size in gpu_bytes(rank, "cuda").items()}
    seats: dict[Place, DeviceRoom] = {}
    if devices is not None and len(needs) <= len(devices.rooms):
        seats = _seats(needs, devices)
    found = []
    for place, need_bytes in needs.items():
        room = seats.get(place)
        if room is None:
            found.append(DeviceFit(*place, need_bytes, None, None, None, None, None))
            continue
        told = (room.have_bytes, room.total_bytes, room.free_bytes, room.kept_free_bytes)
        found.append(DeviceFit(*place, need_bytes, *told, need_bytes <= room.have_bytes))
    return tuple(found)


def fits_on(ranks: Sequence[RankFacts], devices: Devices) -> bool:
    """Whether every rank has room; ranks beyond the devices that there are get more like the least roomy of them."""
    weighed = weigh(ranks, devices)
    if any(each.have_bytes is None for each in weighed):
        least = min(room.have_bytes for room in devices.rooms)
        return all(each.need_bytes <= least for each in weighed)
    return all(each.fits for each in weighed)


def find_fit(
    request: LoadRequest,
    ranks: tuple[RankFacts, ...],
    devices: Devices | None,
    plan: Planner,
    host_bytes: int = 0,
) -> tuple[LoadRequest, PlanFit]:
    """(the request that is taken, whether it fits). `ranks` of the request as it is; `plan` plans changes of it.

    `host_bytes`: of host memory for what a GPU has no room for; 0: none.
    """
    weighed = weigh(ranks, devices)
    if devices is None or any(each.have_bytes is None for each in weighed):
        return request, PlanFit(None, devices.source if devices else "", _unknown(devices, weighed), weighed)
    if all(each.fits for each in weighed):
        as_given = (FitTry("as given", _most(ranks)),) if request.fit.mode == AUTO else ()
        return request, PlanFit(True, devices.source, f"fits: {_tightest(weighed)}", weighed, as_given)
    rooms = devices
    limits: Limits = ((0, rooms.rooms[0].have_bytes), (CPU, host_bytes)) if host_bytes else ()
    given_problem = _problem(ranks, rooms)
    tried: tuple[FitTry, ...] = ()
    if request.fit.mode == AUTO:
        step, later = first_that_fits(
            plan(steps_of_auto(request, limits)[1:]),
            lambda each: "" if fits_on(each.ranks, rooms) else _problem(each.ranks, rooms),
            _most(ranks),
        )
        tried = (FitTry("as given", _most(ranks), given_problem), *later)
        if step is not None:
            weighed = weigh(step.ranks, rooms)
            taken = replace(step.change.request, tried=tried, auto_identity=request.identity())
            said = f"fits with {step.change.what}: {_tightest(weighed)} ({steps_text(tried)})"
            return taken, PlanFit(True, rooms.source, said, weighed, tried)
    planned = plan(changes_to_offer(request, limits))
    found = cheapest(planned, lambda each: fits_on(each.ranks, rooms), len(rooms.rooms))
    said = f"does not fit: {given_problem}. {offer(found, len(rooms.rooms), len(planned))}"
    if tried:
        said = f"does not fit: {steps_text(tried)}. {offer(found, len(rooms.rooms), len(planned))}"
    offers = tuple(Offer(each.change.what, each.change.ranks, each.need_bytes) for each in found)
    return request, PlanFit(False, rooms.source, said, weighed, tried, offers)


def fit_of_resident(model_id: str, taken: str, ranks: Sequence[RankFacts]) -> PlanFit:
    """Of a model that is there already: it needs nothing. `taken`: what fit="auto" had changed for it."""
    with_what = f" (with {taken})" if taken else ""
    said = f"resident as {model_id}{with_what}: a load would be given it at once, and needs no memory"
    return PlanFit(True, IN_CLUSTER, said, weigh(ranks, None))


def rooms_of(memory: Sequence[int], request: LoadRequest, config: Config) -> tuple[DeviceRoom, ...]:
    """Devices with so much memory each, of which as much stays free as was asked."""
    return tuple(DeviceRoom(size, None, request.fit.kept_free_bytes(size, config)) for size in memory)


def _problem(ranks: Sequence[RankFacts], devices: Devices) -> str:
    needs = {(each.rank, each.device): each.need_bytes for each in weigh(ranks, devices)}
    return misfit_text("", needs, _seats(needs, devices))


def _seats(needs: Mapping[Place, int], devices: Devices) -> dict[Place, DeviceRoom]:
    """The device of each place. Given: as they were numbered, by rank, or by device where one rank has them all."""
    if devices.source != GIVEN:
        return seat_on_devices(needs, devices.rooms)
    return {(rank, gpu): devices.rooms[rank + gpu] for rank, gpu in needs if rank + gpu < len(devices.rooms)}


def _tightest(weighed: Sequence[DeviceFit]) -> str:
    tight = min(weighed, key=lambda each: (each.have_bytes or 0) - each.need_bytes, default=None)
    if tight is None:
        return "no GPU has anything of it, all is in host memory or on disk"
    needs, has = show_bytes(tight.need_bytes), show_bytes(tight.have_bytes or 0)
    return f"rank {tight.rank} has the least to spare, it needs {needs} of {has}"


def _unknown(devices: Devices | None, weighed: Sequence[DeviceFit]) -> str:
    if not weighed:
        return "not known: no GPU has anything of it, and what the hosts have was not asked for"
    most = show_bytes(max((each.need_bytes for each in weighed), default=0))
    if devices is None:
        return f'not known: no GPU here, and no memory was given (memory="4x24GB"); a rank needs up to {most}'
    return (
        f"not known: {len(devices.rooms)} GPUs are {devices.source}, the plan needs {len(weighed)}; "
        f"a rank needs up to {most}"
    )


def _most(ranks: Sequence[RankFacts]) -> int:
    return max((rank.device_bytes + rank.staging_bytes for rank in ranks), default=0)


GivenDevices = str | int | Sequence[str | int]
LEAST_BYTES = 10**6  # of a device; less is a number without its unit
_HINT = 'write "4x24GB" for four devices, "2x80GB,24GB" for three, or a list with one size per device'


def parse_memory(given: GivenDevices) -> tuple[int, ...]:
    """Bytes of each device, in the order of ranks. Raises ConfigError."""
    if isinstance(given, str):
        parts: Sequence[str | int] = given.split(",")
    elif isinstance(given, bytes | bytearray | memoryview):  # a sequence of small numbers, which nobody means
        raise ConfigError(f"not a device's memory: {given!r:.60}", hint=_HINT)
    elif isinstance(given, Sequence):
        parts = given
    else:
        parts = [given]
    found: list[int] = []
    for part in parts:
        count, size_bytes = _parsed(part)
        if size_bytes < LEAST_BYTES:
            raise ConfigError(f"not a device's memory: {part!r:.60} is {size_bytes} bytes", hint=f"add a unit: {_HINT}")
        if len(found) + count > MAX_RANKS:
            raise ConfigError(f"memory names more than {MAX_RANKS} devices", hint=_HINT)
        found += [size_bytes] * count
    if not found:
        raise ConfigError("memory names no device", hint=_HINT)
    return tuple(found)


def parse_host_memory(given: str | int) -> int:
    """Bytes of `60GB`, or of a number. Raises ConfigError."""
    if isinstance(given, str):
        return parse_bytes(given)
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ConfigError(f"host_memory must be bytes or a size like 60GB, not {given!r:.40}")
    return given


def _parsed(part: object) -> tuple[int, int]:
    """(devices, bytes of each)."""
    if isinstance(part, int) and not isinstance(part, bool) and part > 0:
        return 1, part
    if isinstance(part, str):
        match = re.fullmatch(r"\s*(?:(\d{1,7})\s*[xX*]\s*)?(\S.*?)\s*", part)
        try:
            count, size_bytes = (int(match[1] or 1), parse_bytes(match[2])) if match else (0, 0)
        except ConfigError:
            count, size_bytes = 0, 0
        if count and size_bytes:
            return count, size_bytes
    raise ConfigError(f"not a device's memory: {part!r:.60}", hint=_HINT)
