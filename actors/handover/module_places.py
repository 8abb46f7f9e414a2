"""Where the tensors of a torch module are, by name, and which names stand for one tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """One name of one parameter or buffer."""

    name: str  # dotted, from the module that is filled
    owner: torch.nn.Module
    attribute: str
    tensor: torch.Tensor  # what is there now, on the meta device as a rule
    saved: bool  # a checkpoint has it; False: a buffer that its module makes for itself


def find_places(module: torch.nn.Module) -> dict[str, Place]:
    """Every parameter and buffer under every name that it has."""
    found: dict[str, Place] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                found[prefix + attribute] = Place(prefix + attribute, owner, attribute, parameter, saved=True)
        for attribute, buffer in owner._buffers.items():
            if buffer is not None:
                saved = attribute not in owner._non_persistent_buffers_set
                found[prefix + attribute] = Place(prefix + attribute, owner, attribute, buffer, saved)
    return found


def tied_names(module: torch.nn.Module, places: Iterable[Place]) -> dict[str, tuple[str, ...]]:
    """For each name of a tensor that has several, all of them.

    A module ties names when one object is there under each of them, or when it says so, as models of transformers do in
    `all_tied_weights_keys`: cutting them into DTensors makes two objects of one.
    """
    one_of: dict[int, str] = {}
    group: dict[str, set[str]] = {}

    def tie(name: str, other: str) -> None:
        together = group.get(name, {name}) | group.get(other, {other})
        for each in together:
            group[each] = together

    names = set()
    for place in places:
        names.add(place.name)
        first = one_of.setdefault(id(place.tensor), place.name)
        if first != place.name:
            tie(first, place.name)
    for path, part in module.named_modules():
        said = getattr(part, "all_tied_weights_keys", None)
        if isinstance(said, dict):
            prefix = f"{path}." if path else ""
            for name, other in said.items():
                if {prefix + name, prefix + other} <= names:
                    tie(prefix + name, prefix + other)
    return {name: tuple(sorted(together)) for name, together in group.items()}


def put(place: Place, tensor: torch.Tensor) -> None:
    """Replace what is at the place."""
    setattr(place.owner, place.attribute, tensor)
