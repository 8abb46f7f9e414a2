"""Weights of bitsandbytes' `Linear4bit`: one parameter, made of the tensors that are stored for it. No copy.

The class of the parameter that is in the module does it, so nothing is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from actors.handover.module_places import Place, put
from cluster.errors import ModuleMismatch

if TYPE_CHECKING:
    import torch


def is_four_bit(tensor: torch.Tensor) -> bool:
    """Whether it is a `Params4bit`, quantized or still to be."""
    kinds = type(tensor).__mro__
    return any(kind.__name__ == "Params4bit" and kind.__module__.startswith("bitsandbytes.") for kind in kinds)


def stored_with(weight: str, names: Iterable[str]) -> list[str]:
    """The tensors that a weight of that name is stored with, if it is in 4 bits: absmax, quant_map, the state..."""
    return [name for name in names if name.startswith(f"{weight}.")]


def make_four_bit(
    name: str, wanted: torch.Tensor, data: torch.Tensor, stored: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The parameter that takes the place of `wanted`. Raises ModuleMismatch for a state that bitsandbytes refuses."""
    kind: Any = type(wanted)
    try:
        made: torch.Tensor = kind.from_prequantized(data, dict(stored), requires_grad=False, device=data.device)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ModuleMismatch(f"bitsandbytes cannot read what is stored with {name:.300}: {exc!r:.300}") from exc
    return made


def four_bit_difference(wanted: Any, offered: Any) -> str:
    """Why a parameter of a `Linear4bit` cannot be that tensor; "" when it can."""
    if not is_four_bit(offered):
        return f"expected 4 bits of bitsandbytes, got {offered.dtype} {tuple(offered.shape)}"
    shape = tuple(wanted.shape if wanted.quant_state is None else wanted.quant_state.shape)
    if shape != tuple(offered.quant_state.shape):
        return f"expected 4 bits of {shape}, got those of {tuple(offered.quant_state.shape)}"
    return ""


def put_four_bit(place: Place, tensor: Any) -> None:
    """Replace what is at the place, and tell its layer."""
    tensor.module = owner = place.owner
    owner.quant_state = tensor.quant_state
    put(place, tensor)
