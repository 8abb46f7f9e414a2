"""Which chunks are on disk, in order of their last use, and what has to go for a new one. Pure: no file is touched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class DiskIndex:
    """Sizes of finished files by key, least recently used first, and of files that are being written, by name.

    The law: what fits goes in only after enough was taken out, so `used_bytes` never rises above `budget_bytes`.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0  # finished files and reservations
        self._chunks: OrderedDict[bytes, int] = OrderedDict()
        self._reserved: dict[str, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Finished ones, least recently used first."""
        return tuple(self._chunks)

    def replace(
        self,
        chunks: Iterable[tuple[bytes, int]],
        reserved: Iterable[tuple[str, int]],
        *,
        kept: bool = False,
        gone: Iterable[bytes] = (),
    ) -> None:
        """What a look at the folder has shown; `chunks` least recently used first. `kept`: it was a look for what is
        new, and what was known is still there but for what is `gone`.
        """
        if kept:
            for key in gone:
                self.remove(key)
            for key, size_bytes in chunks:
                self.add(key, size_bytes)
            for name in tuple(self._reserved):
                self.release(name)
            for name, size_bytes in reserved:
                self.reserve(name, size_bytes)
            return
        self._chunks = OrderedDict(chunks)
        self._reserved = dict(reserved)
        self.used_bytes = sum(self._chunks.values()) + sum(self._reserved.values())

    def make_room(self, size_bytes: int) -> list[bytes] | None:
        """Keys that are out now, so that `size_bytes` more fit; None, and no change, when nothing helps."""
        fixed_bytes = self.used_bytes - sum(self._chunks.values()) if self._reserved else 0
        if fixed_bytes + size_bytes > self.budget_bytes:
            return None
        gone = []
        while self.used_bytes + size_bytes > self.budget_bytes:
            gone.append(self.drop_oldest())
        return gone

    def drop_oldest(self) -> bytes:
        """The key of the one used least recently, which is out now. Raises KeyError when there is none."""
        key, size_bytes = self._chunks.popitem(last=False)
        self.used_bytes -= size_bytes
        return key

    def reserve(self, name: str, size_bytes: int) -> None:
        """A file of that size is about to be written; `make_room` was asked first."""
        self.release(name)
        self._reserved[name] = size_bytes
        self.used_bytes += size_bytes

    def release(self, name: str) -> None:
        """Nothing came of it, or it is finished."""
        self.used_bytes -= self._reserved.pop(name, 0)

    def add(self, key: bytes, size_bytes: int) -> None:
        """A finished file, used last of all."""
        self.remove(key)
        self._chunks[key] = size_bytes
        self.used_bytes += size_bytes

    def touch(self, key: bytes) -> None:
        """It was used last of all."""
        if key in self._chunks:
            self._chunks.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """It is not there any more."""
        self.used_bytes -= self._chunks.pop(key, 0)
