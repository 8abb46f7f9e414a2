"""Assignment of a rank's tensors to a torch module. Nothing is copied: the module's parameters are the views.

tensors by name --prefix, rename, convert--> offered, by the module's names
module ----------------------find_places--> places, and which names are tied
                             both --------> `fill_module`: every problem at once, then put

A weight of bitsandbytes' `Linear4bit` is one parameter, made without a copy from the tensors that are stored for it.
The class of the parameter that is in the module makes it, so nothing of bitsandbytes is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from actors.devices.convert import as_bytes
from actors.handover import module_places
from actors.handover.module_places import Place, Rename, find_places, likely_prefix, new_names, put, tied_names
from cluster.errors import ConfigError, ModuleMismatch
from cluster.layouts.region import MeshCut, Region, dtensor_region, same_part
from cluster.planning.plan import TensorSlice
from cluster.precision import quantized_tensors
from cluster.precision.quantized_tensors import OF_MODULE, OF_WEIGHT
from cluster.units import show_some

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """Return the tensor when it is a DTensor, else None. Imports nothing: a DTensor implies the import."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return tensor if kind is not None and isinstance(tensor, kind) else None


def wanted_part(tensor: DTensor) -> Region:
    """Return the region of a DTensor that this process must hold, by its placements and its place in the mesh.

    Raises ConfigError for placements that hold no part of the values, such as Partial, and outside the mesh.
    """
    return place_of(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def place_of(shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]) -> Region:
    """Return the region that this process holds of a tensor of that shape. Raises ConfigError as `wanted_part` does."""
    here = mesh.get_coordinate()
    if here is None or len(placements) != mesh.ndim:
        raise ConfigError(f"{len(placements)} placements do not fit a mesh of {mesh.ndim} dimensions: {mesh}")
    cuts = []
    for number, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or not -len(shape) <= dim < len(shape):
            raise ConfigError(f"a tensor of shape {shape} cannot be filled by parts under {placement}")
        groups = int(getattr(placement, "split_factor", 1))  # of _StridedShard
        cuts.append(MeshCut(dim % len(shape), mesh.size(number), here[number], groups))
    return dtensor_region(shape, cuts)


def wrap_local(
    local: torch.Tensor, shape: torch.Size, stride: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """Return a DTensor of that global shape and stride whose local part is `local` itself."""
    from torch.distributed.tensor import DTensor

    wrapped: DTensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return wrapped


def slice_as_dtensor(
    tensor: torch.Tensor, piece: TensorSlice, mesh: DeviceMesh, placements: Sequence[Placement] | None
) -> DTensor:
    """Return a rank's slice as a DTensor. See `RankShard.dtensor`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import Placement

    if piece.form:
        raise ModuleMismatch(f"{piece.name:.300} is stored flat in its format, so a mesh cannot cut it")
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a DeviceMesh, not {mesh!r:.60}")
    if placements is not None and (
        not isinstance(placements, Sequence) or not all(isinstance(each, Placement) for each in placements)
    ):
        raise ConfigError(f"placements must be one for each dimension of the mesh, not {placements!r:.60}")
    placements = tuple(placements) if placements is not None else (Shard(0),)
    part = place_of(piece.shape, mesh, placements)
    if not same_part(part, piece.region):
        raise ModuleMismatch(
            f"this process's place in the mesh holds {part.ranges} of {piece.name}, the rank has {piece.region.ranges}",
            hint="the ranks of the load and of the mesh must be the same processes, cut in the same way",
        )
    local = tensor[: part.filled[0]] if piece.region.padding else tensor
    stride = torch.empty(piece.shape, device="meta").stride()
    return wrap_local(local, torch.Size(piece.shape), stride, mesh, placements)


_OF_BITSANDBYTES = (quantized_tensors.ABSMAX, quantized_tensors.QUANT_MAP, quantized_tensors.STATE)
_LISTED = 20  # names of a kind in one message


@dataclass(slots=True)
class Problems:
    """The problems of filling a module, by the module's names except for `unexpected`."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)  # the rank's own names
    offered: list[str] = field(default_factory=list)  # the same after prefix, rename and convert
    differing: list[str] = field(default_factory=list)  # names, each with the difference
    untied: list[str] = field(default_factory=list)
    unmade: list[str] = field(default_factory=list)  # buffers on the meta device that no checkpoint has
    dtypes: set[tuple[torch.dtype, torch.dtype]] = field(default_factory=set)  # wanted, had
    float32: frozenset[str] = frozenset()  # not a problem: names that may also have this dtype

    def any(self, *, strict: bool) -> bool:
        """Return whether there is a problem."""
        names = strict and (self.missing or self.unexpected)
        return bool(self.differing or self.untied or self.unmade or names)


def mismatch(problems: Problems, *, known: bool, convert: bool, strict: bool) -> ModuleMismatch:
    """Return the error for the problems. `known`: the module is a model of transformers."""
    parts, hints = [], []
    missing, unexpected = (problems.missing, problems.unexpected) if strict else ([], [])
    if missing:
        parts.append(f"{len(missing)} names of the module are not on this rank: {_some(missing)}")
    if unexpected:
        parts.append(f"{len(unexpected)} tensors have no place in the module: {_some(unexpected)}")
    if any(_is_of_quantization(name) for name in unexpected):
        hints.append("the rank's weights are quantized: make the module for them (see docs/handing_over.md)")
    elif missing or unexpected:
        hints += _hints_of_names(problems, known=known, convert=convert)
    if problems.differing:
        parts.append(
            f"{len(problems.differing)} tensors differ from what the module expects: {_some(problems.differing)}"
        )
    if problems.dtypes and not any("quantized" in hint for hint in hints):
        had = ", ".join(sorted({str(dtype) for _, dtype in problems.dtypes}))
        hints.append(f"make the module in the dtype of the checkpoint ({had}), or load with dtype=")
    if problems.untied:
        parts.append(f"{len(problems.untied)} tied names hold different values: {_some(problems.untied)}")
        hints.append("the module ties what the checkpoint does not: make it with tie_word_embeddings=False")
    if problems.unmade:
        parts.append(
            f"{len(problems.unmade)} buffers on the meta device are in no checkpoint: {_some(problems.unmade)}"
        )
        hints.append(
            "make the module with real buffers, as accelerate's init_empty_weights(include_buffers=False) does, "
            "or set them before the call"
        )
    return ModuleMismatch(
        "; ".join(parts),
        hint=". ".join(hints),
        missing=len(missing) or None,
        unexpected=len(unexpected) or None,
        differing=len(problems.differing) or None,
        untied=len(problems.untied) or None,
        unmade=len(problems.unmade) or None,
    )


def _hints_of_names(problems: Problems, *, known: bool, convert: bool) -> list[str]:
    hints = []
    if likely := likely_prefix(problems.missing, problems.offered):
        hints.append(f"{likely} would fit most names")
    elif problems.unexpected:
        hints.append("names can be changed with prefix= and rename=")
    elif problems.missing:
        hints.append("a pipeline stage holds only its part of the model: make only that part, or pass strict=False")
    if known and not convert:
        hints.append("convert=True names and stacks tensors as transformers' loader does")
    return hints


def _is_of_quantization(name: str) -> bool:
    return name.endswith((*OF_WEIGHT, *_OF_BITSANDBYTES)) or name.rpartition(".")[2] in OF_MODULE


def _some(names: Sequence[str]) -> str:
    return show_some((f"{name:.300}" for name in names), _LISTED)


def is_four_bit(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a `Params4bit`, quantized or still to be."""
    kinds = type(tensor).__mro__
    return any(kind.__name__ == "Params4bit" and kind.__module__.startswith("bitsandbytes.") for kind in kinds)


def stored_with(weight: str, names: Iterable[str]) -> list[str]:
    """Return the names of the tensors stored with a 4-bit weight: absmax, quant_map, the state..."""
    return [name for name in names if name.startswith(f"{weight}.")]


def make_four_bit(
    name: str, wanted: torch.Tensor, data: torch.Tensor, stored: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the parameter that replaces `wanted`. Raises ModuleMismatch for a state that bitsandbytes refuses."""
    kind: Any = type(wanted)
    try:
        made: torch.Tensor = kind.from_prequantized(data, dict(stored), requires_grad=False, device=data.device)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ModuleMismatch(f"bitsandbytes cannot read the tensors stored with {name:.300}: {exc!r:.300}") from exc
    return made


def four_bit_difference(wanted: Any, offered: Any) -> str:
    """Return why a `Linear4bit` cannot use that tensor as its parameter, or "" when it can."""
    if not is_four_bit(offered):
        return f"expected a 4-bit tensor of bitsandbytes, got {offered.dtype} {tuple(offered.shape)}"
    shape = tuple(wanted.shape if wanted.quant_state is None else wanted.quant_state.shape)
    if shape != tuple(offered.quant_state.shape):
        return f"expected a 4-bit tensor of shape {shape}, got shape {tuple(offered.quant_state.shape)}"
    return ""


def put_four_bit(place: Place, tensor: Any) -> None:
    """Replace the tensor at the place, and set its layer's quantization state."""
    tensor.module = owner = place.owner
    owner.quant_state = tensor.quant_state
    put(place, tensor)


@dataclass(frozen=True, slots=True)
class Filled:
    """The result of `RankShard.into`, by the module's names (`unexpected`: the rank's own)."""

    filled: int  # tensors that were put, tied ones once
    missing: tuple[str, ...] = ()  # left as they were; only with strict=False
    unexpected: tuple[str, ...] = ()  # not put anywhere; only with strict=False
    tied: tuple[tuple[str, ...], ...] = ()  # names that share one tensor
    copied: tuple[str, ...] = ()  # new memory, stacked or cast as transformers does; only with convert=True


@dataclass(frozen=True, slots=True)
class Offer:
    """A tensor for a name of the module."""

    source: str  # the rank's name for it, or the first name of those that it was made from
    tensor: torch.Tensor
    piece: TensorSlice | None  # None: stacked, split or transposed by transformers


def fill_module(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    slices: Mapping[str, TensorSlice],
    *,
    device: str,
    prefix: str = "",
    rename: Rename = None,
    convert: bool = False,
    strict: bool = True,
    requires_grad: bool | None = None,
) -> Filled:
    """Fill a module as `RankShard.into` describes. Either all tensors are put, or none, with an error."""
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"into fills a torch module, not {_shown(module)}", hint="make one on the meta device first")
    if requires_grad is not None and not isinstance(requires_grad, bool):
        raise ConfigError(f"requires_grad must be True, False or None, not {requires_grad!r:.60}")
    known = module_places.is_one(module)
    if convert and not known:
        raise ConfigError(f"convert=True is for models of transformers, not for a {type(module).__name__}")
    named = new_names(tensors, prefix, rename)
    offers = {name: Offer(source, tensors[source], slices.get(source)) for name, source in named.items()}
    copied: tuple[str, ...] = ()
    if convert:
        offers, copied = _converted(module, offers)
    places = find_places(module)
    offers = _joined(places, offers)
    tied = tied_names(module, places.values())
    problems = Problems()
    if known:
        halves = (name for name, place in places.items() if place.tensor.dtype in (torch.float16, torch.bfloat16))
        problems.float32 = module_places.kept_in_float32(module, halves)
    if convert:
        copied += _cast(offers, problems.float32)
    chosen = _choose(places, tied, offers, problems)
    if known:
        problems.unexpected = module_places.without_ignored(module, problems.unexpected)
    unmade = [place for place in places.values() if not place.saved and place.tensor.is_meta]
    if not known:
        problems.unmade = [place.name for place in unmade]
    if problems.any(strict=strict):
        raise mismatch(problems, known=known, convert=convert, strict=strict)
    if unmade:
        problems.unmade = module_places.make_buffers(module, unmade, device)
    if problems.unmade:
        raise mismatch(problems, known=known, convert=convert, strict=strict)
    made: dict[int, torch.Tensor] = {}
    for name, offer in chosen.items():
        key = id(offer)
        if key not in made:
            made[key] = _tensor_for(places[name], offer, requires_grad)
        fill = put_four_bit if is_four_bit(made[key]) else put
        fill(places[name], made[key])
    _move_unsaved(module, device)
    groups = {group for name, group in tied.items() if name in chosen}
    return Filled(len(made), tuple(problems.missing), tuple(problems.unexpected), tuple(sorted(groups)), copied)


def _shown(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"{given!r:.60}"


def _move_unsaved(module: torch.nn.Module, device: str) -> None:
    """Move buffers that no checkpoint has to the device of the rank's tensors. Shared buffers stay shared."""
    moved: dict[int, torch.Tensor] = {}
    for place in find_places(module).values():
        if not place.saved and place.tensor.device != torch.device(device):
            if id(place.tensor) not in moved:
                moved[id(place.tensor)] = place.tensor.to(device)
            put(place, moved[id(place.tensor)])


def _joined(places: Mapping[str, Place], offers: Mapping[str, Offer]) -> dict[str, Offer]:
    """Join the rank's tensors of each bitsandbytes weight, which is one tensor in the module."""
    joined = dict(offers)
    for name, place in places.items():
        if name in offers and is_four_bit(place.tensor) and (others := stored_with(name, offers)):
            stored = {other: joined.pop(other).tensor for other in others}
            joined[name] = replace(
                offers[name], tensor=make_four_bit(name, place.tensor, offers[name].tensor, stored), piece=None
            )
    return joined


def _converted(module: torch.nn.Module, offers: Mapping[str, Offer]) -> tuple[dict[str, Offer], tuple[str, ...]]:
    made = module_places.convert(module, {name: offer.tensor for name, offer in offers.items()})
    new = {}
    for name, one in made.items():
        first = offers[one.sources[0]]
        new[name] = first if one.tensor is first.tensor else Offer(first.source, one.tensor, None)
    return new, tuple(sorted(name for name, one in made.items() if one.copied))


def _cast(offers: dict[str, Offer], names: frozenset[str]) -> tuple[str, ...]:
    """Cast the named tensors to float32, unless they already are. Return the names of those cast."""
    halves = sorted(name for name in names & offers.keys() if offers[name].tensor.dtype != torch.float32)
    for name in halves:
        offers[name] = replace(offers[name], tensor=offers[name].tensor.float())
    return tuple(halves)


def _choose(
    places: Mapping[str, Place], tied: Mapping[str, tuple[str, ...]], offers: Mapping[str, Offer], problems: Problems
) -> dict[str, Offer]:
    """Return the offer for each place, the same for tied names. Add mismatches to `problems`."""
    chosen: dict[str, Offer] = {}
    for name, place in places.items():
        if not place.saved:
            continue
        names = tied.get(name, (name,))
        offered = [offers[each] for each in names if each in offers]
        if not offered:
            problems.missing.append(name)
            continue
        offer = offered[0]
        if name == names[0] and not all(_equal(offer.tensor, other.tensor) for other in offered[1:]):
            problems.untied.append(" = ".join(names))
        if problem := _difference(place, offer, problems):
            problems.differing.append(f"{name}: {problem}")
        chosen[name] = offer
    left = {name: offer for name, offer in offers.items() if name not in chosen}
    problems.unexpected += [offer.source for offer in left.values()]
    problems.offered += left
    return chosen


def _difference(place: Place, offer: Offer, problems: Problems) -> str:
    """Return why the tensor cannot be put at the place, or "" when it can."""
    wanted, tensor = place.tensor, offer.tensor
    if is_four_bit(wanted):
        return four_bit_difference(wanted, tensor)
    if torch.nn.parameter.is_lazy(wanted):
        return "a lazy module, which has a shape only after its first forward pass"
    alike = wanted.dtype == tensor.dtype or (place.name in problems.float32 and tensor.dtype == torch.float32)
    if not alike:
        problems.dtypes.add((wanted.dtype, tensor.dtype))
    distributed = as_dtensor(wanted)
    shape = tuple(wanted.shape)
    if distributed is not None:
        try:
            part = wanted_part(distributed)
        except ConfigError as error:
            return error.message
        shape = part.filled
        if distributed.device_mesh.device_type != tensor.device.type:
            return (
                f"the module's mesh is on {distributed.device_mesh.device_type}, the rank's tensor on {tensor.device}"
            )
        piece = offer.piece
        if piece is not None and alike and shape in (tuple(tensor.shape), piece.region.filled):
            if tuple(wanted.shape) != piece.shape:
                return f"the module has a DTensor of {_form(wanted)}, the checkpoint has {tuple(piece.shape)}"
            if not same_part(part, piece.region):
                return f"this process's place in the mesh holds {part.ranges}, the rank has {piece.region.ranges}"
    if not alike or shape not in (tuple(tensor.shape), _unpadded(offer)):
        local = " as this process's part of a DTensor" if distributed is not None else ""
        return f"expected {wanted.dtype} {shape}{local}, got {_form(tensor)}"
    return ""


def _tensor_for(place: Place, offer: Offer, requires_grad: bool | None) -> torch.Tensor:
    """Return the tensor to put. It is the offered memory itself."""
    wanted, tensor = place.tensor, offer.tensor
    if is_four_bit(tensor):
        return tensor
    distributed = as_dtensor(wanted)
    rows = (tuple(wanted.shape) if distributed is None else wanted_part(distributed).filled)[:1]
    if rows and len(tensor) != rows[0]:
        tensor = tensor[: rows[0]]  # without its padding
    if distributed is not None:
        tensor = wrap_local(
            tensor, distributed.shape, distributed.stride(), distributed.device_mesh, distributed.placements
        )
    if not isinstance(wanted, torch.nn.Parameter):
        return tensor
    trained = wanted.requires_grad if requires_grad is None else requires_grad
    return torch.nn.Parameter(tensor, trained and (tensor.is_floating_point() or tensor.is_complex()))


def _unpadded(offer: Offer) -> tuple[int, ...] | None:
    piece = offer.piece
    return piece.region.filled if piece is not None and piece.region.padding and not piece.form else None


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return bool(torch.equal(as_bytes(one), as_bytes(other).to(one.device)))  # a device map may put them on two devices


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
