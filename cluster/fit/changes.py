"""What could be changed about a load so that it fits: less precision, more ranks, offload. Pure.

steps_of_auto(request)    the request itself, then the steps that fit="auto" may take, in order
changes_to_offer(request) what a refused load is offered; each is really planned before it is
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cluster.device_map.deciding import DeviceKey
from cluster.device_map.options import DeviceMapOptions
from cluster.errors import ConfigError
from cluster.layouts.mesh import Layout
from cluster.load_request import LoadRequest

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
