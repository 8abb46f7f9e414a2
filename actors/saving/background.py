"""`cluster.asave`: a save that goes on in the background, from a copy in host memory.

    asave: the checks of `save` --> every rank: room for the copy? --> copy --> return the handle
                                                                        thread: `save` of the copy --> the handle

The copy is the one exception to the rule that a save needs memory for a few parts only. All ranks compare what they
need with what their hosts have before the first copy, and all of them raise the same error.

One save runs at a time in a process. A later one waits for it. An error that nobody has asked for is reported by the
next save, and at the end of the process at the latest.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, get_type_hints

import torch

from actors.saving.boxed import BoxedTensor, as_boxed
from actors.saving.exchange import Agreed, Ranks
from actors.saving.handles import SaveHandle, start_save, wait_for_background_saves
from actors.saving.save import (
    Arguments,
    ExtraFiles,
    SaveReport,
    agree_on_state,
    check_tensors,
    save,
    save_tensors,
    save_training,
)
from actors.saving.training_state import collect_state
from cluster.argument_types import check_types, checks_arguments
from cluster.errors import NoRoomToStage
from storage.host.memory import available_host_bytes
from storage.problems import show_bytes

SPARE_FRACTION = 0.05  # of the free memory, which stays free


@checks_arguments
def asave(
    state_dict: Mapping[str, Any],
    uri: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    extra_state: Mapping[str, Any] | None = None,
    extra_files: ExtraFiles | None = None,
    **options: Any,
) -> SaveHandle:
    """Copy the tensors of a job to host memory, and save the copy in the background. Every rank calls it.

    Training can go on, and change the tensors, when this returns. Do not destroy the process group before the save has
    ended.

    Args:
        state_dict: As for `save`.
        uri: As for `save`.
        model: As for `save`.
        optimizer: As for `save`.
        scheduler: As for `save`.
        extra_state: As for `save`.
        extra_files: As for `save`. Rank 0 reads them before this returns. They are small files: their memory is not
            compared with what the host has.
        **options: Further keyword arguments of `save`.

    Returns:
        The handle of the save. The next `save` or `asave` of this process waits for it.

    Raises:
        NoRoomToStage: A host has no room for the copy. Every rank raises it, and nothing was copied.
        SaveRefused: Arguments or tensors cannot be saved, as `save` says it. Nothing was copied.
        SaveError: Another rank did not come.

    Example:
        ```python
        handle = cluster.asave(model.state_dict(), "s3://models/run-7", model=model, optimizer=optimizer)
        train_on()
        print(handle.result(timeout_s=600).revision)
        ```
    """
    wait_for_background_saves()
    place = os.fspath(uri)
    bound = signature(save).bind(state_dict, place, model=model, **options)  # TypeError for a name that `save` lacks
    bound.apply_defaults()
    check_types(get_type_hints(Arguments), options, "asave: ")
    given = Arguments(**{name: value for name, value in bound.arguments.items() if name in Arguments.__slots__})
    has_state = not (optimizer is None and scheduler is None and extra_state is None)
    state: dict[str, Any] = {}
    values = b""
    with given.meet() as ranks:  # which hear of an error
        given = given.with_files(extra_files, ranks)
        if has_state:
            state, values = collect_state(model, optimizer, scheduler, extra_state, ranks.rank)
        number = agree_on_state(ranks, optimizer, has_state)
        tensors = check_tensors(state_dict, given, ranks)
        given = replace(given, model=None, keeps_names=True)
        state = check_tensors(state, given, ranks) if number else {}
        tensors, state = ({name: as_boxed(name, one) for name, one in found.items()} for found in (tensors, state))
        _check_room(ranks, [tensors, state])
    copies: dict[Any, torch.Tensor] = {}
    try:
        tensors, state = _copied(tensors, copies), _copied(state, copies)
    except BaseException:
        with given.meet():  # the others wait for this rank, and get the error
            raise

    # Not a nested function: the frame of one keeps its variables, the copy among them, as long as its error is kept.
    return start_save(place, partial(_save_copy, tensors, number, (state, values), given))


def _save_copy(
    tensors: Mapping[str, Any], number: str, state: tuple[Mapping[str, Any], bytes], given: Arguments
) -> SaveReport:
    started_s = time.monotonic()
    given = save_training(number, state, given)
    with given.meet() as ranks:
        return save_tensors(tensors, given, ranks, started_s)


def _check_room(ranks: Ranks, states: list[dict[str, Any]]) -> None:
    """Raise on every rank if one host lacks memory for the copies of its ranks."""
    memory = {_memory_of(tensor): tensor.numel() * tensor.element_size() for s in states for tensor in _local(s)}
    room_bytes = int(available_host_bytes() * (1 - SPARE_FRACTION))
    mine = [socket.gethostname(), sum(memory.values()), room_bytes]
    answers = [json.loads(answer) for answer in ranks.gather(json.dumps(mine).encode())]
    needed: dict[str, int] = {}
    room: dict[str, int] = {}
    for host, need, have in answers:
        needed[host] = needed.get(host, 0) + need
        room[host] = min(room.get(host, have), have)
    for host in needed:
        if needed[host] > room[host]:
            raise Agreed(
                NoRoomToStage(
                    f"a copy of the tensors takes {show_bytes(needed[host])} of memory on {host}, which has "
                    f"{show_bytes(room[host])}: {show_bytes(needed[host] - room[host])} are missing",
                    hint="call save, which copies nothing, or free memory there",
                    host=host,
                    needed_bytes=needed[host],
                    free_bytes=room[host],
                    missing_bytes=needed[host] - room[host],
                )
            )


def _local(state: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in state.values():
        found += value.local.values() if isinstance(value, BoxedTensor) else [value]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _memory_of(tensor: torch.Tensor) -> Any:
    if not tensor.numel():
        return id(tensor)
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _copied(state: Mapping[str, Any], copies: dict[Any, torch.Tensor]) -> dict[str, Any]:
    """Return the state with copies of its tensors in host memory. Tied tensors stay tied."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = _memory_of(tensor)
        if key not in copies:
            copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        return copies[key]

    return {
        name: BoxedTensor(value.shape, value.dtype, value.boxes, {at: copy(one) for at, one in value.local.items()})
        if isinstance(value, BoxedTensor)
        else copy(value)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }
