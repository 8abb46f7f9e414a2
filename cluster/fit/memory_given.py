"""Memory of devices as a person gives it: `4x24GB`, `2x80GB,24GB`, or a list. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cluster.errors import ConfigError
from cluster.layouts.mesh import MAX_RANKS
from cluster.units import parse_bytes

GivenDevices = str | int | Sequence[str | int]
LEAST_BYTES = 10**6  # of a device; less is a number without its unit
_HINT = 'write "4x24GB" for four devices, "2x80GB,24GB" for three, or a list with one size per device'


def parse_memory(given: GivenDevices) -> tuple[int, ...]:
    """Bytes of each device, in the order of ranks. Raises ConfigError."""
    if isinstance(given, str):
        parts: Sequence[str | int] = given.split(",")
    elif isinstance(given, bytes | bytearray | memoryview):  # a sequence of small numbers, which nobody means
        raise ConfigError(f"not a device's memory: {given!r:.60}", hint=_HINT)
    elif isinstance(given, Sequence):
        parts = given
    else:
        parts = [given]
    found: list[int] = []
    for part in parts:
        count, size_bytes = _parsed(part)
        if size_bytes < LEAST_BYTES:
            raise ConfigError(f"not a device's memory: {part!r:.60} is {size_bytes} bytes", hint=f"add a unit: {_HINT}")
        if len(found) + count > MAX_RANKS:
            raise ConfigError(f"memory names more than {MAX_RANKS} devices", hint=_HINT)
        found += [size_bytes] * count
    if not found:
        raise ConfigError("memory names no device", hint=_HINT)
    return tuple(found)


def parse_host_memory(given: str | int) -> int:
    """Bytes of `60GB`, or of a number. Raises ConfigError."""
    if isinstance(given, str):
        return parse_bytes(given)
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ConfigError(f"host_memory must be bytes or a size like 60GB, not {given!r:.40}")
    return given


def _parsed(part: object) -> tuple[int, int]:
    """(devices, bytes of each)."""
    if isinstance(part, int) and not isinstance(part, bool) and part > 0:
        return 1, part
    if isinstance(part, str):
        match = re.fullmatch(r"\s*(?:(\d{1,7})\s*[xX*]\s*)?(\S.*?)\s*", part)
        try:
            count, size_bytes = (int(match[1] or 1), parse_bytes(match[2])) if match else (0, 0)
        except ConfigError:
            count, size_bytes = 0, 0
        if count and size_bytes:
            return count, size_bytes
    raise ConfigError(f"not a device's memory: {part!r:.60}", hint=_HINT)
