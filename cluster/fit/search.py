"""Which of several changes of a load fits: the first of the steps of fit="auto", the cheapest that a refusal offers.

Pure: the changes were planned (`cluster.plans.planning.plan_changes`), and whoever asks says what fits.

Pure: the changes were planned (`cluster.plans.planning.plan_changes`), and whoever asks says what fits.

What could be changed about a load so that it fits: less precision, more ranks, offload. Pure.

steps_of_auto(request)    the request itself, then the steps that fit="auto" may take, in order
changes_to_offer(request) what a refused load is offered; each is really planned before it is
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.device_map.deciding import DeviceKey
from cluster.device_map.options import DeviceMapOptions
from cluster.errors import ConfigError
from cluster.fit.options import FitTry
from cluster.layouts.mesh import Layout
from cluster.plans.rank_plans import RankFacts
from cluster.request import LoadRequest
from cluster.units import show_bytes

Limits = tuple[tuple[DeviceKey, int], ...]

AS_GIVEN = "as given"
OFFLOAD_POLICY = "sequential"  # the GPU is filled before anything stays outside
MAX_CHANGES = 32  # that are planned for one refusal
_STEPS = ("fp8", "int8", "int4")
_LOSS = {"": 0, "fp8": 2, "fp8_tensor": 2, "int8": 3, "int4": 4, "nf4": 4}  # order in which precision is given up


@dataclass(frozen=True, slots=True)
class Change:
    """One thing (or two) that could be done otherwise."""

    what: str  # as one writes it: 'quantization="int8"'
    kind: str  # "given", "dtype", "quantization", "ranks", "offload" or "both": more ranks and quantized
    loss: int  # of precision: 0 none, and more the more is lost
    request: LoadRequest

    @property
    def ranks(self) -> int:
        return self.request.layout.ranks


def steps_of_auto(request: LoadRequest, limits: Limits = ()) -> list[Change]:
    """What fit="auto" tries, in order: as given, bf16, fp8, int8, int4, offload. Ranks stay as they are.

    `limits`: bytes of the GPU and of host memory for offload; empty: there is none.
    """
    return [Change(AS_GIVEN, "given", 0, request), *_less_precision(request), *_offload(request, limits)]


def changes_to_offer(request: LoadRequest, limits: Limits = ()) -> list[Change]:
    """What could help when the request does not fit, MAX_CHANGES at most."""
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
    if request.device_map is not None:  # which is for one rank
        return
    if layout.data_parallel_size > 1:  # the ranks that are there, with parts in place of copies
        tensor = layout.tensor_parallel_size * layout.data_parallel_size
        yield from _with_layout(request, seen, tensor_parallel_size=tensor, data_parallel_size=1)
    for factor in (2, 4, 8):
        for size in ("tensor_parallel_size", "pipeline_parallel_size"):
            yield from _with_layout(request, seen, **{size: getattr(layout, size) * factor})
    # Any model can be cut like that, also one whose family has no rules.
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
_WHY_CHARS = 90  # of a reason, where several are told


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """A change as it would be loaded."""

    change: Change
    ranks: tuple[RankFacts, ...] = ()
    problem: str = ""  # why it cannot be planned

    @property
    def need_bytes(self) -> int:
        """Of the largest rank, while it is filled."""
        return max((rank.device_bytes + rank.staging_bytes for rank in self.ranks), default=0)


def first_that_fits(
    planned: Sequence[PlannedChange], why_not: Callable[[PlannedChange], str], given_bytes: int = 0
) -> tuple[PlannedChange | None, tuple[FitTry, ...]]:
    """(the first that fits, every step up to it). `why_not`: "" when a change fits, else what is missing.

    A step that would make nothing smaller than those before it, of which the one that was given needs `given_bytes`, is
    not asked about.
    """
    tried: list[FitTry] = []
    least_bytes = given_bytes
    for step in planned:
        if step.problem:
            reason = step.problem
        elif least_bytes and step.need_bytes >= least_bytes and step.change.kind != "offload":
            reason = "would be no smaller"
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
    """Those that fit, the cheapest first, one of each kind; two changes at once only where one alone does not do.

    Cheap is what needs no more devices than are there, then what needs no offload (the model would be slow), then what
    loses least precision, then what takes fewest ranks.
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
    """A sentence or two about what `cheapest` found, of `tried` changes."""
    if not found:
        return f"None of {tried} changes that were planned (less precision, more ranks) would fit"
    said = []
    for each in found:
        ranks = each.change.ranks
        needs = f"up to {show_bytes(each.need_bytes)} on each of {ranks} ranks" if ranks > 1 else ""
        needs = needs or show_bytes(each.need_bytes)
        more = f", {devices_at_hand} at hand" if ranks > devices_at_hand else ""
        said.append(f"{each.change.what} ({needs}{more})")
    also = f"; also {'; '.join(said[1:])}" if said[1:] else ""
    return f"The cheapest change that fits: {said[0]}{also}"


def steps_text(tried: Sequence[FitTry]) -> str:
    """Every step of fit="auto" and what became of it, one after the other."""
    return "; ".join(
        f"{each.what}: " + (_short(each.why_not) if each.why_not else f"fits, {show_bytes(each.need_bytes)} per rank")
        for each in tried
    )


def _short(reason: str) -> str:
    """Without what stands in brackets, then to the end of a word."""
    if len(reason) > _WHY_CHARS:
        reason = re.sub(r" ?\([^()]*\)", "", reason)
    if len(reason) > _WHY_CHARS:
        reason = reason[: _WHY_CHARS - 3].rpartition(" ")[0].rstrip(",;:") + "..."
    return reason
