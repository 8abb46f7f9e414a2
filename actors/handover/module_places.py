"""The places of a torch module's tensors by name, the names that share one tensor, and the names of a checkpoint.

Models of transformers need two more things to be filled: their names for a checkpoint's tensors, and their rotary
buffers. transformers 5 stacks experts that checkpoints keep one by one, and renames the parts of some models. Its own
loader follows a mapping for this. `convert` uses the mapping of the installed version, so no names are fixed here.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from actors.devices.convert import as_bytes
from cluster.errors import ConfigError, ModuleMismatch


@dataclass(frozen=True, slots=True)
class Place:
    """One name of one parameter or buffer."""

    name: str  # dotted, from the module that is filled
    owner: torch.nn.Module
    attribute: str
    tensor: torch.Tensor  # the current one, usually on the meta device
    saved: bool  # a checkpoint has it; False: a buffer that the module computes itself


def find_places(module: torch.nn.Module) -> dict[str, Place]:
    """Return every parameter and buffer under every name that it has."""
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
    """Return, for each name of a tensor with several names, all its names.

    A module ties names when they share one object. Models of transformers also list tied names in
    `all_tied_weights_keys`, because cutting them into DTensors makes two objects of one.
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
        listed = getattr(part, "all_tied_weights_keys", None)
        if isinstance(listed, dict):
            prefix = f"{path}." if path else ""
            for name, other in listed.items():
                if {prefix + name, prefix + other} <= names:
                    tie(prefix + name, prefix + other)
    return {name: tuple(sorted(together)) for name, together in group.items()}


def put(place: Place, tensor: torch.Tensor) -> None:
    """Replace the tensor at the place."""
    setattr(place.owner, place.attribute, tensor)


_INITIALISED = "_is_hf_initialized"  # transformers' own mark on modules, parameters and buffers
_UNTOUCHED = 0xA5  # every byte of a buffer that the model has not initialised yet


@dataclass(frozen=True, slots=True)
class Converted:
    """A tensor under the module's name."""

    tensor: torch.Tensor
    sources: tuple[str, ...]  # names of the tensors that it was made from
    copied: bool  # it does not share their memory


def is_one(module: torch.nn.Module) -> bool:
    """Return whether the module is a model of transformers. Imports nothing: a model implies the import."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def convert(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Converted]:
    """Return the tensors as transformers' loader would make them, by the module's names.

    Raises ConfigError when the installed transformers has no such mapping, or cannot convert the rank's tensors.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError as error:
        raise ConfigError(
            "convert=True needs transformers 5 with a conversion mapping", hint="or pass rename=", cause=str(error)
        ) from error
    model: Any = module
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    there = model.state_dict()
    found: dict[str, Converted] = {}
    collected: dict[str, Any] = {}
    sources: dict[str, list[str]] = {}
    for name in sorted(tensors, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, there)
        if new not in there and name in there:
            new, pattern = name, None
        if pattern is None or new not in there:
            found[new if new in there else name] = Converted(tensors[name], (name,), copied=False)
            continue
        if new not in collected:
            collected[new] = deepcopy(of_pattern[pattern])
        collected[new].add_tensor(new, name, pattern, tensors[name])
        sources.setdefault(new, []).append(name)
    for first, converter in collected.items():
        for name, made in _made(model, first, converter).items():
            storages = {tensors[source].untyped_storage().data_ptr() for source in sources[first]}
            copied = made.untyped_storage().data_ptr() not in storages
            found[name] = Converted(made, tuple(sources[first]), copied)
    return found


def _made(model: Any, first: str, converter: Any) -> dict[str, torch.Tensor]:
    try:
        with torch.no_grad():
            made = converter.convert(first, model=model, config=model.config)
    except Exception as error:  # transformers may raise any type
        message = f"transformers cannot make {first} from this rank's tensors"
        raise ConfigError(message, cause=str(error)[:300]) from error
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def without_ignored(module: torch.nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Return the unexpected names without those that the model ignores in checkpoints."""
    ignored = [re.compile(pattern) for pattern in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in module.named_buffers()):
        ignored.append(re.compile(r"rotary_emb\.inv_freq"))  # early checkpoints have one in each layer
    return [name for name in unexpected if not any(pattern.search(name) for pattern in ignored)]


def kept_in_float32(module: torch.nn.Module, halves: Iterable[str]) -> frozenset[str]:
    """Return the names of 16-bit tensors that the model wants in float32 whatever its own dtype is."""
    always = _patterns(module, "_keep_in_fp32_modules_strict")
    not_float16 = _patterns(module, "_keep_in_fp32_modules") if getattr(module, "dtype", None) == torch.float16 else []
    patterns = (*always, *not_float16)
    return frozenset(name for name in halves if any(pattern.search(name) for pattern in patterns))


def make_buffers(module: torch.nn.Module, places: Sequence[Place], device: str) -> list[str]:
    """Make buffers that no checkpoint has, on the device, by the model's own initialisation. Nothing else changes.

    Returns the names of those that the model does not make. When there are any, all of them stay on the meta device.
    """
    everything: list[Any] = [*module.modules(), *module.parameters(), *module.buffers()]
    marked = [one for one in everything if not hasattr(one, _INITIALISED)]
    for one in everything:
        setattr(one, _INITIALISED, True)  # transformers leaves these alone
    for place in places:
        buffer = torch.empty_like(place.tensor, device=device, memory_format=torch.contiguous_format)
        as_bytes(buffer).fill_(_UNTOUCHED)
        put(place, buffer)
        setattr(place.owner, _INITIALISED, False)
    model: Any = module
    model.initialize_weights()
    unmade = []
    for place in places:
        data = as_bytes(getattr(place.owner, place.attribute))
        if len(data) and bool((data == _UNTOUCHED).all()):
            unmade.append(place.name)
    if unmade:
        for place in places:
            put(place, place.tensor)
        for one in marked:
            delattr(one, _INITIALISED)
    return unmade


def _patterns(module: torch.nn.Module, attribute: str) -> list[re.Pattern[str]]:
    """Compile the patterns in the model's attribute, in which `*` matches any text."""
    return [re.compile(pattern.replace("*", ".*")) for pattern in getattr(module, attribute, None) or ()]


Rename = Mapping[str, str | None] | Callable[[str], str | None] | None


def new_names(names: Iterable[str], prefix: str = "", rename: Rename = None) -> dict[str, str]:
    """Return new name -> name for the names that begin with `prefix`, with the prefix removed and then renamed.

    A mapping's keys are whole names, or the beginnings of names up to a dot. The longest matching key counts:
    {"model": "model.language_model", "visual": "model.visual"}. {"model": ""} removes `model.`. The value None, from a
    mapping or a function, leaves a tensor out.

    Raises:
        ModuleMismatch: Two names become one.
        ConfigError: `prefix` or `rename` has the wrong type, or `rename` returns something else than a name or None.
    """
    if not isinstance(prefix, str):
        raise ConfigError(f"prefix must be the text that names begin with, not {prefix!r:.60}")
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        raise ConfigError(f"rename must be a function or a mapping of names, not {rename!r:.60}")
    prefix = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    found: dict[str, str] = {}
    twice: list[str] = []
    for name in names:
        if not name.startswith(prefix):
            continue
        new = _renamed(name[len(prefix) :], rename)
        if new is None:
            continue
        if not isinstance(new, str):
            raise ConfigError(f"rename must return a name or None: for {name!r:.200} it returned {new!r:.60}")
        if new in found:
            twice.append(f"{found[new]} and {name} -> {new}")
        found[new] = name
    if twice:
        raise ModuleMismatch(f"rename gives several tensors one name: {', '.join(twice[:20])}", clashes=len(twice))
    return found


def likely_prefix(missing: Iterable[str], offered: Iterable[str]) -> str:
    """Return the argument of `into` that would supply most of the missing names from the offered ones, or "".

    "prefix='model'" when they are offered below that name, "rename=lambda name: 'model.' + name" in the opposite case.
    """
    wanted, there = set(missing), set(offered)
    for longer, shorter, how in (
        (there, wanted, "prefix={!r}"),
        (wanted, there, "rename=lambda name: {!r} + name"),
    ):
        count = Counter(
            name[:at] for name in longer for at in range(len(name)) if name[at] == "." and name[at + 1 :] in shorter
        )
        prefix, fitting = next(iter(count.most_common(1)), ("", 0))
        if 2 * fitting > len(wanted):
            return how.format(prefix if shorter is wanted else f"{prefix}.")
    return ""


def _renamed(name: str, rename: Rename) -> str | None:
    if rename is None:
        return name
    if not isinstance(rename, Mapping):
        return rename(name)
    if name in rename:
        return rename[name]
    at = name.rfind(".")
    while at > 0:
        if name[:at] in rename:
            target = rename[name[:at]]
            return f"{target}{name[at:]}" if target else target if target is None else name[at + 1 :]
        at = name.rfind(".", 0, at)
    return name
