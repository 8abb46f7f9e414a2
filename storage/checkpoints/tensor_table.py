"""A shard's published tensors against the header that is stored, read with the rest of the shard."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.checkpoints.safetensors_header import LENGTH_BYTES, Header, HeaderTensor, header_bytes, parse_header
from storage.errors import InvalidHeader

if TYPE_CHECKING:
    from storage.checkpoints.manifest import ManifestTensor  # brings pydantic

NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class BadTensor:
    """A tensor that the manifest and the stored header describe differently."""

    key: str  # of the shard
    name: str  # "": the header as a whole
    published: str  # dtype, shape and byte range, or NOTHING
    stored: str


class HeaderBytes:
    """The first bytes of a shard, kept while the whole of it goes by: its header and no more."""

    def __init__(self, size_bytes: int) -> None:
        """`size_bytes` of the whole shard."""
        self._size_bytes = size_bytes
        self._data = bytearray()
        self.end = LENGTH_BYTES  # first byte after what is kept; the header's end once its length was seen

    def add(self, view: memoryview) -> None:
        """The next bytes of the shard, in order."""
        while len(view) and len(self._data) < self.end:
            part = view[: self.end - len(self._data)]
            self._data += part
            view = view[len(part) :]
            if len(self._data) == self.end == LENGTH_BYTES:
                try:
                    self.end = header_bytes(bytes(self._data), self._size_bytes)
                except InvalidHeader:
                    return  # `parse` says it

    def parse(self) -> Header:
        """The checked header, when the whole shard went by. Raises InvalidHeader."""
        return parse_header(bytes(self._data), self._size_bytes)


def table_differences(
    key: str, published: Iterable[ManifestTensor], header: Header, elsewhere: Collection[str]
) -> Iterator[BadTensor]:
    """Every tensor of the shard `key` on which manifest and header disagree.

    `elsewhere`: names that the manifest has in any shard. The header may have one of those too: a copy that the
    index did not pick.
    """
    stored = {tensor.name: tensor for tensor in header.tensors}
    for tensor in published:
        found = stored.pop(tensor.name, None)
        wanted = _described(tensor)
        if found is None or _described(found) != wanted:
            yield BadTensor(key, tensor.name, wanted, NOTHING if found is None else _described(found))
    for name, found in stored.items():
        if name not in elsewhere:
            yield BadTensor(key, name, NOTHING, _described(found))


def _described(tensor: ManifestTensor | HeaderTensor) -> str:
    shape = ", ".join(map(str, tensor.shape))
    return f"{tensor.dtype} ({shape}) at [{tensor.start}, {tensor.end})"
