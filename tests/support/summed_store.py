"""A store that keeps checksums of its objects: of the whole, or of the parts that it says they were uploaded in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from storage.checksum import digest_of
from storage.stores.object_store import ByteRange, MemoryStore, ObjectInfo
from tests.support.faulty_stores import WrappedStore


class SummedStore(WrappedStore):
    """`damage`: (key, byte) whose lowest bit is another in every read that has it, while it is not None."""

    def __init__(
        self,
        objects: Mapping[str, bytes],
        hash_name: str,
        part_bytes: int = 0,
        *,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """`part_bytes` 0: checksums of whole objects. Objects in `without` have none."""
        super().__init__(MemoryStore(dict(objects)))
        self.damage: tuple[str, int] | None = None
        self._objects = dict(objects)
        self._hash_name = hash_name
        self._part_bytes = part_bytes
        self._without = without

    def stat(self, key: str) -> ObjectInfo:
        info = super().stat(key)
        if key in self._without:
            return info
        data, name = self._objects[key], self._hash_name
        if not self._part_bytes:
            return replace(info, checksums={name: digest_of(name.removeprefix("etag_"), data).hex()})
        parts = [digest_of(name, data[start:end]) for start, end in pairwise((0, *self._ends(key)))]
        return replace(info, composites={name: digest_of(name, b"".join(parts)).hex()})

    def part_ends(self, key: str, etag: str | None) -> tuple[int, ...]:
        return tuple(self._ends(key))

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        found = super().read_into(key, byte_range, buffer, etag=etag)
        if self.damage is not None and self.damage[0] == key and byte_range.start <= self.damage[1] < byte_range.end:
            buffer[self.damage[1] - byte_range.start] ^= 1
        return found

    def _ends(self, key: str) -> list[int]:
        size_bytes = len(self._objects[key])
        return [*range(self._part_bytes, size_bytes, self._part_bytes), size_bytes]
