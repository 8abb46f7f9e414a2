"""Where in a rank's memory each slice goes: a few blocks ("segments") that are allocated whole.

Tensors of one layer share a segment, so that an engine that repacks a layer can free it; a segment has at
most 512 MiB unless one tensor alone is larger. Tensors begin at multiples of 256 bytes. With a device map a segment
is on one device, and on disk it is a file: one tensor, of its very size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.device_map.deciding import DISK, DeviceKey

SEGMENT_BYTES = 512 << 20  # largest segment that several tensors share
ALIGNMENT_BYTES = 256

_LAYER = re.compile(r"(?:^|.*?\.)[0-9]+(?=\.|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Places of n slices, in the order they were given."""

    segment: tuple[int, ...]  # (n,) index into segment_bytes
    offset: tuple[int, ...]  # (n,) first byte inside the segment
    segment_bytes: tuple[int, ...]  # multiples of 256 but for files; (0,) when there are slices and all are empty
    segment_devices: tuple[DeviceKey, ...] = ()  # of each segment, with a device map


def place_in_segments(slices: Iterable[tuple[str, int]], limit_bytes: int = SEGMENT_BYTES) -> MemoryMap:
    """Places for slices given as (tensor name, size in bytes). Same input, same places.

    An empty slice takes no bytes and lies at the start of segment 0.
    """
    segment: list[int] = []
    offset: list[int] = []
    segment_bytes: list[int] = []
    open_segment: dict[str, int] = {}  # layer -> the segment that its next small tensor goes to
    for name, size_bytes in slices:
        padded = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if padded == 0:
            segment.append(0)
            offset.append(0)
            continue
        layer = layer_of(name)
        current = target = open_segment.get(layer)
        if target is None or segment_bytes[target] + padded > limit_bytes:
            target = len(segment_bytes)
            segment_bytes.append(0)
            # Of the old and the new segment, the one with more room takes the layer's next tensors.
            if padded <= limit_bytes and (current is None or padded < segment_bytes[current]):
                open_segment[layer] = target
        segment.append(target)
        offset.append(segment_bytes[target])
        segment_bytes[target] += padded
    if segment and not segment_bytes:
        segment_bytes.append(0)
    return MemoryMap(tuple(segment), tuple(offset), tuple(segment_bytes))


def place_on_devices(
    slices: Sequence[tuple[str, int]], devices: Sequence[DeviceKey], limit_bytes: int = SEGMENT_BYTES
) -> MemoryMap:
    """The same for slices that are on several devices; `devices` of each slice."""
    segment = [0] * len(slices)
    offset = [0] * len(slices)
    segment_bytes: list[int] = []
    segment_devices: list[DeviceKey] = []
    for device in dict.fromkeys(devices):
        here = [number for number, each in enumerate(devices) if each == device]
        if device == DISK:
            for number in here:
                segment[number] = len(segment_bytes)
                segment_bytes.append(slices[number][1])
                segment_devices.append(device)
            continue
        places = place_in_segments([slices[number] for number in here], limit_bytes)
        for number, at, start in zip(here, places.segment, places.offset, strict=True):
            segment[number], offset[number] = len(segment_bytes) + at, start
        segment_bytes += places.segment_bytes
        segment_devices += [device] * len(places.segment_bytes)
    return MemoryMap(tuple(segment), tuple(offset), tuple(segment_bytes), tuple(segment_devices))


def layer_of(name: str) -> str:
    """The name up to its first number, `model.layers.7` of `model.layers.7.mlp.up_proj.weight`; else ""."""
    match = _LAYER.match(name)
    return match.group() if match else ""
