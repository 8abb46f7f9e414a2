"""Finds changes of a load that make it fit: less precision, more ranks, or offload. Pure.

Plans of changes come from `cluster.planning.make_plan.plan_changes`, and the caller decides what fits.

    steps_of_auto(request)     the request itself, then the steps that fit="auto" may take, in order
    changes_to_offer(request)  changes for a refused load; only planned ones are offered
    first_that_fits            the step that fit="auto" takes
    cheapest                   the changes that a refusal offers

For `cluster.plan` devices are known by their memory only:

    rooms      the memory of each device: given ("4x24GB"), or found on this machine
    weigh      the need and the memory of each rank's device, rank 0 on the first device
    find_fit   fit="auto": the first step of precision that fits; "strict": the cheapest change
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.config import Config
from cluster.errors import ConfigError
from cluster.fit.device_map import CPU, DeviceKey
from cluster.fit.needs import DeviceRoom, Place, gpu_bytes, misfit_text, place_on_devices
from cluster.fit.options import AUTO, DeviceMapOptions, FitTry
from cluster.layouts.mesh import MAX_RANKS, Layout
from cluster.planning.packed_plan import RankFacts
from cluster.request import LoadRequest
from cluster.units import parse_bytes, show_bytes

Limits = tuple[tuple[DeviceKey, int], ...]

AS_GIVEN = "as given"
OFFLOAD_POLICY = "sequential"  # the GPU is filled first
MAX_CHANGES = 32  # changes that are planned for one refusal
_STEPS = ("fp8", "int8", "int4")
_LOSS = {"": 0, "fp8": 2, "fp8_tensor": 2, "int8": 3, "int4": 4, "nf4": 4}  # a higher number loses more precision


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the request, of one argument or two."""

    what: str  # as a user writes it: 'quantization="int8"'
    kind: str  # "given", "dtype", "quantization", "ranks", "offload" or "both": more ranks and quantized
    loss: int  # loss of precision; 0 is none
    request: LoadRequest

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the changed request."""
        return self.request.layout.ranks


def steps_of_auto(request: LoadRequest, limits: Limits = ()) -> list[Change]:
    """Return what fit="auto" tries, in order: as given, bf16, fp8, int8, int4, offload. The layout stays the same.

    `limits` has the bytes of the GPU and of host memory for offload. Empty means no offload.
    """
    return [Change(AS_GIVEN, "given", 0, request), *_less_precision(request), *_offload(request, limits)]


def changes_to_offer(request: LoadRequest, limits: Limits = ()) -> list[Change]:
    """Return at most MAX_CHANGES changes that may help when the request does not fit."""
    alone = [*_less_precision(request), *_more_ranks(request), *_offload(request, limits)]
    quantized = [change for change in alone if change.kind == "quantization"]
    both = [
        Change(f"{more.what} and {less.what}", "both", less.loss, more.request)
        for less in quantized
        for more in _more_ranks(less.request)
    ]
    return [*alone, *both][:MAX_CHANGES]


def _less_precision(request: LoadRequest) -> Iterator[Change]:
    given = request.precision
    if not given.quantization and given.dtype != "bfloat16":
        yield Change('dtype="bfloat16"', "dtype", 1, replace(request, precision=replace(given, dtype="bfloat16")))
    for name in _STEPS:
        if _LOSS[name] > _LOSS[given.quantization]:
            kept = "auto" if given.dtype == "float32" else given.dtype
            less = replace(given, quantization=name, dtype=kept)
            yield Change(f'quantization="{name}"', "quantization", _LOSS[name], replace(request, precision=less))


def _more_ranks(request: LoadRequest) -> Iterator[Change]:
    layout, seen = request.layout, {request.layout}
    if request.device_map is not None:  # a device map is for one rank
        return
    if layout.data_parallel_size > 1:  # the same ranks, with slices instead of copies
        tensor = layout.tensor_parallel_size * layout.data_parallel_size
        yield from _with_layout(request, seen, tensor_parallel_size=tensor, data_parallel_size=1)
    for factor in (2, 4, 8):
        for size in ("tensor_parallel_size", "pipeline_parallel_size"):
            yield from _with_layout(request, seen, **{size: getattr(layout, size) * factor})
    # Fully sharded parallelism can cut any model, also one whose family has no rules.
    for factor in (2, 4, 8):
        yield from _with_layout(request, seen, fsdp_size=layout.fsdp_size * factor)


def _with_layout(request: LoadRequest, seen: set[Layout], **sizes: int) -> Iterator[Change]:
    try:
        layout = replace(request.layout, **sizes)
    except ConfigError:  # too many ranks, or experts cannot be spread over so many
        return
    if layout not in seen:
        seen.add(layout)
        what = ", ".join(f"{size}={count}" for size, count in sizes.items())
        yield Change(what, "ranks", 0, replace(request, layout=layout))


def _offload(request: LoadRequest, limits: Limits) -> Iterator[Change]:
    if limits and request.layout.ranks == 1 and request.device_map is None:
        mapped = replace(request, device_map=DeviceMapOptions(OFFLOAD_POLICY, (), limits, is_all=True))
        yield Change(f'device_map="{OFFLOAD_POLICY}" with the rest in host memory', "offload", 0, mapped)


OFFERED = 4  # changes that one message names
_WHY_CHARS = 90  # characters of a reason, if a message has several


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """A change with its plan, or with the reason why it has none."""

    change: Change
    ranks: tuple[RankFacts, ...] = ()
    problem: str = ""  # why it cannot be planned

    @property
    def need_bytes(self) -> int:
        """Return the peak bytes of the largest rank during the load."""
        return max((rank.device_bytes + rank.staging_bytes for rank in self.ranks), default=0)


def first_that_fits(
    planned: Sequence[PlannedChange], why_not: Callable[[PlannedChange], str], given_bytes: int = 0
) -> tuple[PlannedChange | None, tuple[FitTry, ...]]:
    """Return the first step that fits, or None, and every step up to it. `why_not` returns "" for a step that fits.

    A step that needs no less than the smallest step before it is skipped. `given_bytes` is the need of the request as
    given.
    """
    tried: list[FitTry] = []
    least_bytes = given_bytes
    for step in planned:
        if step.problem:
            reason = step.problem
        elif least_bytes and step.need_bytes >= least_bytes and step.change.kind != "offload":
            reason = "would not be smaller"
        else:
            reason = why_not(step)
            least_bytes = step.need_bytes
        tried.append(FitTry(step.change.what, step.need_bytes, reason))
        if not reason:
            return step, tuple(tried)
    return None, tuple(tried)


def cheapest(
    planned: Sequence[PlannedChange], fits: Callable[[PlannedChange], bool], devices_at_hand: int
) -> list[PlannedChange]:
    """Return the changes that fit, the cheapest first, one of each kind. Two at once only if no single one fits.

    A change is cheaper if it needs no more devices than present, then if it needs no offload (which makes the model
    slow), then if it loses less precision, then if it takes fewer ranks.
    """

    def cost(each: PlannedChange) -> tuple[bool, bool, int, int]:
        change = each.change
        return change.ranks > devices_at_hand, change.kind == "offload", change.loss, change.ranks

    fitting = [each for each in planned if not each.problem and fits(each)]
    alone = [each for each in fitting if each.change.kind != "both"]
    found: dict[str, PlannedChange] = {}
    for each in sorted(alone or fitting, key=cost):
        found.setdefault(each.change.kind, each)
    return list(found.values())[:OFFERED]


def offer(found: Sequence[PlannedChange], devices_at_hand: int, tried: int) -> str:
    """Return a sentence about the result of `cheapest`, out of `tried` changes."""
    if not found:
        return f"None of {tried} changes that were planned (less precision, more ranks) would fit"
    lines = []
    for each in found:
        ranks = each.change.ranks
        needs = f"up to {show_bytes(each.need_bytes)} on each of {ranks} ranks" if ranks > 1 else ""
        needs = needs or show_bytes(each.need_bytes)
        more = f", {devices_at_hand} present" if ranks > devices_at_hand else ""
        lines.append(f"{each.change.what} ({needs}{more})")
    also = f"; also {'; '.join(lines[1:])}" if lines[1:] else ""
    return f"The cheapest change that fits: {lines[0]}{also}"


def steps_text(tried: Sequence[FitTry]) -> str:
    """Return every step of fit="auto" with its result."""
    return "; ".join(
        f"{each.what}: " + (_short(each.why_not) if each.why_not else f"fits, {show_bytes(each.need_bytes)} per rank")
        for each in tried
    )


def _short(reason: str) -> str:
    """Return the reason without brackets, cut at the end of a word if it is too long."""
    if len(reason) > _WHY_CHARS:
        reason = re.sub(r" ?\([^()]*\)", "", reason)
    if len(reason) > _WHY_CHARS:
        reason = reason[: _WHY_CHARS - 3].rpartition(" ")[0].rstrip(",;:") + "..."
    return reason


GIVEN, SEEN, IN_CLUSTER = "given", "seen on this machine", "seen in the cluster"

Planner = Callable[[Sequence[Change]], list[PlannedChange]]


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that a plan must fit."""

    rooms: tuple[DeviceRoom, ...]
    source: str  # GIVEN: rank i has device i; else any rank may have any device


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """The need and the memory of one device of one rank."""

    rank: int
    device: int  # its number among the rank's own
    need_bytes: int  # slices, and the tensors under conversion
    have_bytes: int | None  # None: not known
    total_bytes: int | None
    free_bytes: int | None
    kept_free_bytes: int | None  # bytes that the user keeps free
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Offer:
    """A change that would fit."""

    what: str
    ranks: int
    need_bytes: int  # bytes of the largest rank


@dataclass(frozen=True, slots=True)
class PlanFit:
    """The answer if a plan fits, with the devices and with changes that would fit."""

    fits: bool | None  # None: the memory is not known
    memory: str  # source of the memory: GIVEN, SEEN, IN_CLUSTER, or "" if not known
    sentence: str  # for people
    devices: tuple[DeviceFit, ...]
    tried: tuple[FitTry, ...] = ()  # steps of fit="auto"; if the plan fits, the last one was taken
    offers: tuple[Offer, ...] = ()  # if it does not fit: changes that would, the cheapest first


def check_devices(layout: Layout, devices: Devices | None) -> None:
    """Raise ConfigError when the layout has more ranks than memory was given for."""
    if devices is not None and devices.source == GIVEN and layout.ranks > len(devices.rooms):
        raise ConfigError(
            f"the layout has {layout.ranks} ranks, but memory names {len(devices.rooms)} devices",
            hint=f'give memory="{layout.ranks}x24GB", or use fewer ranks',
        )


def layouts_for(count: int) -> list[Layout]:
    """Return layouts that spread a model over `count` devices, the best first."""
    return [Layout(tensor_parallel_size=count), Layout(pipeline_parallel_size=count), Layout(fsdp_size=count)]


def weigh(ranks: Sequence[RankFacts], devices: Devices | None) -> tuple[DeviceFit, ...]:
    """Return the need and the memory of each device of each rank."""
    needs = {(at, gpu): size for at, rank in enumerate(ranks) for gpu, size in gpu_bytes(rank, "cuda").items()}
    placements: dict[Place, DeviceRoom] = {}
    if devices is not None and len(needs) <= len(devices.rooms):
        placements = _placements(needs, devices)
    found = []
    for place, need_bytes in needs.items():
        room = placements.get(place)
        if room is None:
            found.append(DeviceFit(*place, need_bytes, None, None, None, None, None))
            continue
        sizes = (room.have_bytes, room.total_bytes, room.free_bytes, room.kept_free_bytes)
        found.append(DeviceFit(*place, need_bytes, *sizes, need_bytes <= room.have_bytes))
    return tuple(found)


def fits_on(ranks: Sequence[RankFacts], devices: Devices) -> bool:
    """Return whether every rank has room. Ranks beyond the present devices get devices like the one with least room."""
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
    """Return the request to load, possibly changed, and whether it fits.

    `ranks` are those of the request as given. `plan` plans changes of it. `host_bytes` is the host memory for offload;
    0 means no offload.
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
            text = f"fits with {step.change.what}: {_tightest(weighed)} ({steps_text(tried)})"
            return taken, PlanFit(True, rooms.source, text, weighed, tried)
    planned = plan(changes_to_offer(request, limits))
    found = cheapest(planned, lambda each: fits_on(each.ranks, rooms), len(rooms.rooms))
    text = f"does not fit: {given_problem}. {offer(found, len(rooms.rooms), len(planned))}"
    if tried:
        text = f"does not fit: {steps_text(tried)}. {offer(found, len(rooms.rooms), len(planned))}"
    offers = tuple(Offer(each.change.what, each.change.ranks, each.need_bytes) for each in found)
    return request, PlanFit(False, rooms.source, text, weighed, tried, offers)


def fit_of_resident(model_id: str, taken: str, ranks: Sequence[RankFacts]) -> PlanFit:
    """Return the fit of a resident model, which needs no memory. `taken` is the change by fit="auto"."""
    with_what = f" (with {taken})" if taken else ""
    text = f"resident as {model_id}{with_what}: a load would attach to it at once and need no memory"
    return PlanFit(True, IN_CLUSTER, text, weigh(ranks, None))


def rooms_of(memory: Sequence[int], request: LoadRequest, config: Config) -> tuple[DeviceRoom, ...]:
    """Return devices with this memory each, less the bytes that the request keeps free."""
    return tuple(DeviceRoom(size, None, request.fit.kept_free_bytes(size, config)) for size in memory)


def _problem(ranks: Sequence[RankFacts], devices: Devices) -> str:
    needs = {(each.rank, each.device): each.need_bytes for each in weigh(ranks, devices)}
    return misfit_text("", needs, _placements(needs, devices))


def _placements(needs: Mapping[Place, int], devices: Devices) -> dict[Place, DeviceRoom]:
    """Return the device of each place. Given devices are numbered by rank, or by GPU if there is one rank."""
    if devices.source != GIVEN:
        return place_on_devices(needs, devices.rooms)
    return {(rank, gpu): devices.rooms[rank + gpu] for rank, gpu in needs if rank + gpu < len(devices.rooms)}


def _tightest(weighed: Sequence[DeviceFit]) -> str:
    tight = min(weighed, key=lambda each: (each.have_bytes or 0) - each.need_bytes, default=None)
    if tight is None:
        return "no tensor is on a GPU, all are in host memory or on disk"
    needs, has = show_bytes(tight.need_bytes), show_bytes(tight.have_bytes or 0)
    return f"rank {tight.rank} has the least to spare, it needs {needs} of {has}"


def _unknown(devices: Devices | None, weighed: Sequence[DeviceFit]) -> str:
    if not weighed:
        return "not known: no tensor is on a GPU, and the memory of the hosts was not given"
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
LEAST_BYTES = 10**6  # of a device; a smaller number probably lacks its unit
_HINT = 'write "4x24GB" for four devices, "2x80GB,24GB" for three, or a list with one size per device'


def parse_memory(given: GivenDevices) -> tuple[int, ...]:
    """Return the bytes of each device, in the order of ranks. Raises ConfigError."""
    if isinstance(given, str):
        parts: Sequence[str | int] = given.split(",")
    elif isinstance(given, bytes | bytearray | memoryview):  # these are sequences of integers too
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
    """Return the bytes of `60GB` or of a number. Raises ConfigError."""
    if isinstance(given, str):
        return parse_bytes(given)
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ConfigError(f"host_memory must be bytes or a size like 60GB, not {given!r:.40}")
    return given


def _parsed(part: object) -> tuple[int, int]:
    """Return (number of devices, bytes of each)."""
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
