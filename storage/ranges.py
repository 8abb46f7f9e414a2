"""Byte ranges, half-open: `start` is the first byte, `end` the first byte after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes `[start, end)` of one object. `ByteRange(0, 8)` is the first eight bytes."""

    start: int  # first byte, counted from 0
    end: int  # first byte that is not part of the range

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"not a byte range: [{self.start}, {self.end})")

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    def check_buffer(self, buffer: memoryview) -> None:
        """Raises ValueError for a buffer that the range does not fill exactly."""
        if len(buffer) != self.size_bytes:
            raise ValueError(f"buffer has {len(buffer)} bytes, the range {self.size_bytes}")

    def split(self, piece_bytes: int) -> Iterator[ByteRange]:
        """The range cut every `piece_bytes`; the last piece may be shorter, an empty range gives none."""
        for start in range(self.start, self.end, piece_bytes):
            yield ByteRange(start, min(start + piece_bytes, self.end))

    def http_header(self) -> str:
        """The value of an HTTP `Range` header (whose end is inclusive, RFC 9110 section 14.1.2)."""
        if not self.size_bytes:
            raise ValueError("HTTP cannot ask for an empty range")
        return f"bytes={self.start}-{self.end - 1}"

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"
