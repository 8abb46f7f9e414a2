"""`cluster.asave`: a save that goes on in the background, from a copy in host memory.

    asave: names, training state --> every rank: room for the copy? --> copy --> return the handle
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
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from actors.saving.boxed import BoxedTensor, as_boxed
from actors.saving.exchange import Ranks
from actors.saving.handles import SaveHandle, start_save, wait_for_background_saves
from actors.saving.hf_names import as_stored, config_files
from actors.saving.save import (
    ExtraFiles,
    SaveReport,
    agree_on_state,
    as_mapping,
    save,
    save_training,
    state_answer,
)
from actors.saving.training_state import collect_state
from cluster.argument_types import checks_arguments
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
        extra_files: As for `save`.
        **options: Further keyword arguments of `save`.

    Returns:
        The handle of the save. The next `save` or `asave` of this process waits for it.

    Raises:
        NoRoomToStage: A host has no room for the copy. Every rank raises it, and nothing was copied.
        SaveRefused: Names or values cannot be saved.
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
    has_state = not (optimizer is None and scheduler is None and extra_state is None)
    tensors: dict[str, Any] = {}
    state: dict[str, Any] = {}
    files: dict[str, Any] = {}
    values, refused = b"", None
    try:
        tensors = {name: as_boxed(value) for name, value in as_stored(state_dict, model).items()}
        files = {**config_files(model), **as_mapping(extra_files)}
        if has_state:
            found, values = collect_state(model, optimizer, scheduler, extra_state)
            state = {name: as_boxed(value) for name, value in found.items()}
    except Exception as error:
        refused = error  # the other ranks hear of it below
    number = _agree([tensors, state], options, refused, state_answer(optimizer, has_state))
    copies: dict[Any, torch.Tensor] = {}
    try:
        tensors, state = _copied(tensors, copies), _copied(state, copies)
    except BaseException:
        with _ranks(options):  # the others wait for this rank, and get the error
            raise

    # Not a nested function: the frame of one keeps its variables, the copy among them, as long as its error is kept.
    return start_save(place, partial(_save_copy, tensors, place, number, (state, values), files, options))


def _save_copy(
    tensors: Mapping[str, Any],
    place: str,
    number: str,
    state: tuple[Mapping[str, Any], bytes],
    files: Mapping[str, Any],
    options: Mapping[str, Any],
) -> SaveReport:
    link = save_training(number, state, place, **options) if number else {}
    return save(tensors, place, extra_files={**files, **link}, **options)


def _ranks(options: Mapping[str, Any]) -> Ranks:
    given = {name: options[name] for name in ("process_group", "rank", "world_size") if name in options}
    return Ranks(**given, timeout_s=float(options.get("save_timeout_s", 600.0)))


def _agree(
    states: list[dict[str, Any]], options: Mapping[str, Any], refused: Exception | None, about_state: bytes
) -> str:
    """Return the number of the training state, "" without one.

    Raises on every rank if one rank cannot save, or if one host lacks memory for the copies of its ranks.
    """
    memory = {_memory_of(tensor): tensor.numel() * tensor.element_size() for s in states for tensor in _local(s)}
    room_bytes = int(available_host_bytes() * (1 - SPARE_FRACTION))
    mine = [socket.gethostname(), sum(memory.values()), room_bytes, about_state.decode()]
    with _ranks(options) as ranks:
        if refused is not None:
            raise refused
        answers = [json.loads(answer) for answer in ranks.gather(json.dumps(mine).encode())]
        number = agree_on_state([answer[3].encode() for answer in answers])
    needed: dict[str, int] = {}
    room: dict[str, int] = {}
    for host, need, have, _ in answers:
        needed[host] = needed.get(host, 0) + need
        room[host] = min(room.get(host, have), have)
    for host in needed:
        if needed[host] > room[host]:
            raise NoRoomToStage(
                f"a copy of the tensors takes {show_bytes(needed[host])} of memory on {host}, which has "
                f"{show_bytes(room[host])}: {show_bytes(needed[host] - room[host])} are missing",
                hint="call save, which copies nothing, or free memory there",
                host=host,
                needed_bytes=needed[host],
                free_bytes=room[host],
                missing_bytes=needed[host] - room[host],
            )
    return number


def _local(state: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in state.values():
        found += value.local.values() if isinstance(value, BoxedTensor) else [value]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _memory_of(tensor: torch.Tensor) -> Any:
    if tensor.is_meta or not tensor.numel():
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
