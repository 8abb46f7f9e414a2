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
from typing import Any

import torch

from actors.saving.boxed import BoxedTensor, as_boxed
from actors.saving.exchange import Ranks
from actors.saving.handles import SaveHandle, start_save, wait_for_background_saves
from actors.saving.hf_names import as_stored, config_files
from actors.saving.save import ExtraFiles, SaveReport, as_mapping, save, save_training
from actors.saving.training_state import collect_state
from cluster.argument_types import checks_arguments
from cluster.errors import NoRoomToStage, SaveError
from storage.errors import LongshoreError
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
    state: Mapping[str, Any] = {}
    values, refused = b"", None
    try:
        tensors = {name: as_boxed(value) for name, value in as_stored(state_dict, model).items()}
        if has_state:
            state, values = collect_state(model, optimizer, scheduler, extra_state)
    except LongshoreError as error:
        refused = error  # the other ranks hear of it below
    boxed = {name: as_boxed(value) for name, value in state.items()}
    _check_room([tensors, boxed], options, refused)
    copies: dict[Any, torch.Tensor] = {}
    tensors, boxed = _copied(tensors, copies), _copied(boxed, copies)
    files = {**config_files(model), **as_mapping(extra_files)}

    def work() -> SaveReport:
        link = save_training((boxed, values), place, **options) if has_state else {}
        return save(tensors, place, extra_files={**files, **link}, **options)

    return start_save(place, work)


def _check_room(states: list[dict[str, Any]], options: Mapping[str, Any], refused: LongshoreError | None) -> None:
    """Raise on every rank if one rank cannot save, or if one host lacks memory for the copies of its ranks."""
    memory = {_memory_of(tensor): tensor.numel() * tensor.element_size() for s in states for tensor in _local(s)}
    room_bytes = int(available_host_bytes() * (1 - SPARE_FRACTION))
    mine = [socket.gethostname(), sum(memory.values()), room_bytes, str(refused or "")]
    ranks = Ranks(options.get("process_group"), timeout_s=float(options.get("save_timeout_s", 600.0)))
    try:
        answers = [json.loads(answer) for answer in ranks.gather(json.dumps(mine).encode())]
    except BaseException as error:
        ranks.close(error)
        raise
    ranks.close()
    if refused is not None:
        raise refused
    for rank, answer in enumerate(answers):
        if answer[3]:
            raise SaveError(f"rank {rank} cannot save: {answer[3]}", hint="nothing was written", rank=rank)
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
