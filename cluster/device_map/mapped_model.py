"""A cut model with a device for each module: the map is decided, and checked against the limits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.device_map.deciding import (
    DISK,
    DeviceKey,
    DeviceMap,
    Memory,
    balanced_memory,
    device_name,
    infer_device_map,
    module_tree,
)
from cluster.device_map.options import DeviceMapOptions, offload_name
from cluster.errors import DoesNotFit, LayoutError
from cluster.layouts.families import TOKEN_EMBEDDINGS
from cluster.plans.cut_model import CutModel
from cluster.plans.rank_plans import rank_facts
from cluster.plans.read_items import ALIGNMENT_BYTES
from cluster.units import show_bytes
from storage.problems import MAX_LISTED, quote

if TYPE_CHECKING:
    from cluster.layouts.model_config import ModelConfig  # brings pydantic

_EMBEDDINGS = tuple(f".{module}.weight" for module in TOKEN_EMBEDDINGS)
_HEAD = "lm_head"


def with_device_map(
    cut: CutModel, options: DeviceMapOptions, config: ModelConfig | None = None, chunk_bytes: int = 0
) -> CutModel:
    """The same model with each tensor on a device. For layouts of one rank.

    Tensors count as they will be held, converted and aligned. Raises LayoutError listing tensors that the map does not
    name, or whose names no file can have; DoesNotFit with need and have of each device; ConfigError for a policy
    without limits. `chunk_bytes`: as for `rank_facts`.
    """
    pieces = cut.slices(cut.layout.rank_coords(0))
    sizes = [
        (name, sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in pieces[kind].sizes_bytes))
        for name, kind in zip(cut.names, cut.kind.tolist(), strict=True)
    ]
    tied = _tied(cut.names, config)
    options = options.beside(rank_facts(cut, chunk_bytes)[0].staging_bytes)
    found = options.device_map or _inferred(sizes, options, tied)
    devices = found.assign(cut.names)
    found.check_modules(cut.names)
    _check_limits(sizes, devices, options)
    _check_files(cut.names, devices)
    return replace(cut, device_map=_with_tied_head(found, tied))


def _inferred(sizes: list[tuple[str, int]], options: DeviceMapOptions, tied: Sequence[str]) -> DeviceMap:
    tree = module_tree(sizes)
    memory: Memory = options.memory
    if options.policy != "sequential":
        memory = balanced_memory(tree, memory, low_zero=options.policy == "balanced_low_0")
    return infer_device_map(tree, memory, [tied] if len(tied) > 1 else [])


def _check_limits(sizes: Sequence[tuple[str, int]], devices: Sequence[DeviceKey], options: DeviceMapOptions) -> None:
    needs: Counter[DeviceKey] = Counter()
    for (_, size_bytes), device in zip(sizes, devices, strict=True):
        needs[device] += size_bytes
    have = dict(options.max_memory or ())
    said = []
    for device, need_bytes in sorted(needs.items(), key=lambda need: device_name(need[0])):
        if device in have and need_bytes > have[device]:
            said.append(f"{device_name(device)} needs {show_bytes(need_bytes)}, has {show_bytes(have[device])}")
    if needs[DISK] and not options.offload_folder:
        limits = "free for it" if options.is_all else "max_memory"
        rest = ", ".join(f"{device_name(device)} {show_bytes(limit)}" for device, limit in have.items())
        said.append(f"{show_bytes(needs[DISK])} have no room on any device ({limits}: {rest or 'none'})")
    if said:
        raise DoesNotFit(
            f"the device map does not fit: {'; '.join(said)}",
            hint=_what_helps(options),
            need_bytes=sum(needs.values()),
            have_bytes=sum(limit for device, limit in have.items() if device != DISK) if have else None,
        )


def _what_helps(options: DeviceMapOptions) -> str:
    limits = "use a node with more memory" if options.is_all else "raise max_memory"
    if options.offload_folder:
        return f"{limits}, of disk too where it has a limit, or quantize" if not options.is_all else limits
    return f"{limits}, or give an offload_folder for what is left over"


def _check_files(names: Sequence[str], devices: Sequence[DeviceKey]) -> None:
    wrong = [
        quote(name)
        for name, device in zip(names, devices, strict=True)
        if device == DISK and offload_name(name) is None
    ]
    if wrong:
        raise LayoutError(
            f"{len(wrong)} tensors on disk have names that no file can have: {', '.join(wrong[:MAX_LISTED])}",
            hint="map their modules to another device",
        )


def _tied(names: Sequence[str], config: ModelConfig | None) -> list[str]:
    """The embedding and, when it is stored, the head that is the same tensor."""
    if config is None or not config.tie_word_embeddings:
        return []
    embedding = [name for name in names if f".{name}".endswith(_EMBEDDINGS)][:1]
    return embedding + [name for name in names if name == f"{_HEAD}.weight"] if embedding else []


def _with_tied_head(found: DeviceMap, tied: Sequence[str]) -> DeviceMap:
    """A head that is not stored is where its embedding is: whoever runs the model by the map looks for it."""
    known = {name for name, _ in found.modules}
    if len(tied) != 1 or "" in known or _HEAD in known:
        return found
    device = found.devices_of(tied)[0]
    return found if device is None else DeviceMap((*found.modules, (_HEAD, device)))
