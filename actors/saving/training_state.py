"""The state of optimizers and schedulers: what a save takes from them, and how it comes back on other ranks.

    optimizer --get_optimizer_state_dict, flattened--> {"state.<parameter>.exp_avg": DTensor,
                                                        "param_groups.<parameter>.lr": 0.1, ...}
    tensors --> safetensors, as those of a model         everything else --> state.json (`cluster.saving.values`)

The names of torch's flattened state contain those of parameters, not positions of ranks. So another number of ranks
reads the same tensors, each rank the boxes that its own DTensors hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from actors.devices.convert import stored_dtype
from actors.handover.modules import as_dtensor, wanted_part
from actors.saving.boxed import as_sharded
from cluster.argument_types import checks_arguments
from cluster.errors import ConfigError, ModuleMismatch, SaveRefused
from cluster.layouts.region import Box
from cluster.saving.values import decode_values, encode_values
from cluster.small_files import read_small_file
from storage.errors import InvalidState, ObjectNotFound
from storage.problems import Problems, quote

if TYPE_CHECKING:
    from actors.reader.open_model import OpenModel

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


STATE_KEY = "state.json"  # in the folder of the training state
LINK_KEY = re.compile(r"training/([0-9a-f]{16})\.json")  # beside it; a file of the model, which names the revision
_NO_TENSORS = "longshore.no_tensors"  # a checkpoint has at least one tensor


def collect_state(
    model: torch.nn.Module | None,
    optimizer: Optimizers | None,
    scheduler: Any = None,
    extra_state: Mapping[str, Any] | None = None,
    rank: int = 0,
) -> tuple[dict[str, torch.Tensor], bytes]:
    """Return the state of a training run as tensors by name, and JSON with everything else.

    Args:
        model: The module whose parameters the optimizer has, as the training has wrapped it.
        optimizer: The optimizer, or several. None: no state of one.
        scheduler: A learning-rate scheduler, or anything else with `state_dict()`. Or None.
        extra_state: Values of the user by name: numbers, texts, lists, dicts, tensors.
        rank: Number of this rank. Those above 0 leave out the whole tensors of scheduler and user.

    Returns:
        The tensors, among them DTensors; they are the optimizer's own, not copies. And the JSON.

    Raises:
        SaveRefused: Values that only a pickle could hold, or an optimizer without the model.
    """
    if optimizer is not None and model is None:
        raise SaveRefused("an optimizer's state is saved by the names of a model's parameters", hint="pass model=")
    values: dict[str, Any] = {}
    if optimizer is not None and model is not None:
        values["optimizer"] = _optimizer_state(model, optimizer)
    if scheduler is not None:
        values["scheduler"] = scheduler.state_dict()
    if extra_state is not None:
        values["extra"] = dict(extra_state)
    data, tensors = encode_values(values, lambda value: isinstance(value, torch.Tensor))
    if rank:
        return {name: one for name, one in tensors.items() if name.startswith("optimizer.") or _is_cut(one)}, data
    return tensors or {_NO_TENSORS: torch.zeros(1, dtype=torch.uint8)}, data


@checks_arguments
def load_training_state(
    uri: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    **options: Any,
) -> Any:
    """Load what `save(optimizer=..., scheduler=..., extra_state=...)` saved, onto any number of ranks.

    Every rank calls it. Each reads only its own parts of the optimizer's tensors, and writes them in place. Weights are
    not touched: load them first.

    Args:
        uri: The URI that was saved to.
        model: The module whose parameters the optimizer has, as the training has wrapped it.
        optimizer: The optimizer, or several, for the same parameters as when it was saved. None: leave it out.
        scheduler: The learning-rate scheduler, or anything with `load_state_dict()`. None: leave it out.
        **options: Where and how the store is reached, as for `safe_open`.

    Returns:
        The `extra_state` that was saved, or None.

    Raises:
        InvalidState: No training state was saved there, or it is broken.
        ModuleMismatch: The optimizer's tensors have other names, shapes or dtypes; lists every one. Nothing was
            changed.
        StoreError: The store refused access, or has no such model.

    Example:
        ```python
        model.load_state_dict(...)
        extra = cluster.load_training_state("s3://runs/7", model, optimizer, scheduler)
        ```
    """
    if optimizer is not None and model is None:
        raise ConfigError("an optimizer's state is loaded by the names of a model's parameters", hint="pass model=")
    from actors.reader.open_model import safe_open

    uri = os.fspath(uri)
    try:
        link, _ = read_small_file(uri, LINK_KEY, **options)
    except ObjectNotFound as error:
        raise InvalidState(
            "no state of a training run was saved there", hint="save with optimizer=", uri=uri
        ) from error
    folder, revision = parse_link(link)
    options = {**options, "revision": revision}
    place = f"{uri.rstrip('/')}/{folder}"
    data, _ = read_small_file(place, STATE_KEY, **options)
    with safe_open(place, **options) as stored:
        values = decode_values(data, _Stored)
        for name, given in (("optimizer", optimizer), ("scheduler", scheduler)):
            if given is not None and not isinstance(values.get(name), dict):
                raise InvalidState(f"the saved state has no {name}", uri=uri)
        if model is not None and optimizer is not None:
            _load_optimizer(model, optimizer, values["optimizer"], stored)
        if scheduler is not None:
            scheduler.load_state_dict(_with_tensors(values["scheduler"], stored))
        return _with_tensors(values.get("extra"), stored)


def link_file(number: str, revision: str) -> dict[str, bytes]:
    """Return the file of a model that says where its training state is: a path and its contents.

    Each save has another path, so that the file of the revision before stays as it is until the new one is visible.
    """
    data, _ = encode_values({"folder": f"training/{number}", "revision": revision}, lambda value: False)
    return {f"training/{number}.json": data}


def parse_link(data: bytes) -> tuple[str, str]:
    """Return the folder and the revision that such a file names. Raises InvalidState."""
    found = decode_values(data, str)
    folder, revision = found.get("folder"), found.get("revision")
    if not isinstance(folder, str) or not LINK_KEY.fullmatch(f"{folder}.json") or not isinstance(revision, str):
        raise InvalidState("the model's file does not name the folder of a training state")
    return folder, revision


class _Stored(str):
    """The name of a stored tensor, in a place where a tensor was."""

    __slots__ = ()


def _optimizer_state(model: torch.nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    return dict(
        get_optimizer_state_dict(
            model,
            optimizer if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer),
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
    )


def _load_optimizer(model: torch.nn.Module, optimizer: Optimizers, saved: dict[str, Any], stored: OpenModel) -> None:
    """Compare everything, then read this rank's parts into the optimizer's tensors."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    optimizers = optimizer if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
    own = _optimizer_state(model, optimizers)
    problems = Problems()
    for name in sorted(set(own) ^ set(saved)):
        problems.add(f"{quote(name)} {'was not saved' if name in own else 'is not in this optimizer'}")
    for name in sorted(set(own) & set(saved)):
        if isinstance(own[name], torch.Tensor) != isinstance(saved[name], _Stored):
            problems.add(f"{quote(name)} is a tensor here or in the saved state, not in both")
        elif isinstance(own[name], torch.Tensor):
            found = stored.get_slice(saved[name])
            here = (stored_dtype(own[name].dtype), list(own[name].shape))
            if here != (found.get_dtype(), found.get_shape()):
                problems.add(
                    f"{quote(name)} is {here[0]} {here[1]} here, saved {found.get_dtype()} {found.get_shape()}"
                )
    if problems:
        raise ModuleMismatch(f"the optimizer is not the one that was saved: {problems}", problems=len(problems))
    for name, value in own.items():
        if isinstance(value, torch.Tensor):
            _read_into(value, saved[name], stored)
        else:
            own[name] = _with_tensors(saved[name], stored)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizers, own, options=options)


def _is_cut(tensor: torch.Tensor) -> bool:
    return as_dtensor(tensor) is not None or as_sharded(tensor) is not None


def _read_into(tensor: torch.Tensor, name: str, stored: OpenModel) -> None:
    """Read what this rank holds of a tensor."""
    whole, sharded = as_dtensor(tensor), as_sharded(tensor)
    places: list[tuple[Box, torch.Tensor]]  # boxes of the whole tensor, and where this rank has them
    if whole is not None:
        local = whole.to_local()
        places = [(box, local[_slices(place, box[1])]) for box, place in wanted_part(whole).boxes()]
    elif sharded is not None:
        held = sharded.local_shards()
        places = [((tuple(one.metadata.shard_offsets), tuple(one.metadata.shard_sizes)), one.tensor) for one in held]
    else:
        places = [(((0,) * tensor.ndim, tuple(tensor.shape)), tensor)]
    slices = stored.get_slice(name)
    with torch.no_grad():
        for (offsets, sizes), values in places:
            if values.numel():
                values.copy_(slices[_slices(offsets, sizes)])


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def _with_tensors(value: Any, stored: OpenModel) -> Any:
    """Return a decoded value with stored tensors in their places."""
    if isinstance(value, _Stored):
        return stored.get_tensor(value)
    if isinstance(value, dict):
        return type(value)({key: _with_tensors(one, stored) for key, one in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(one, stored) for one in value)
    return value
