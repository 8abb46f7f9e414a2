"""The tensors of a checkpoint that an engine's loader writes into each memory, noted while a model is filled.

    load_weights(lazy tensors) --Watch--> memory -> names of tensors, each with the range of bytes where it was written

An operation that replaces bytes counts for the range that it writes. Any other one counts for the whole memory, because
what it leaves depends on what was there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.reader.lazy_tensor import LazyTensor, StoredTensor
from cluster.errors import UpdateRefused
from engines.filling import Weights
from storage.problems import quote

_CONTENTS = "_longshore_contents"  # of a storage: names of the checkpoint's tensors whose contents it has
_REPLACING = (torch.ops.aten.copy_, torch.ops.aten.fill_, torch.ops.aten.zero_)  # they do not depend on what was there


class _Noting:
    """A stored tensor that adds its name to a set when bytes of it are read."""

    def __init__(self, stored: StoredTensor, read: set[str]) -> None:
        self._stored, self._read = stored, read
        self.name, self.shape, self.dtype = stored.name, stored.shape, stored.dtype

    def read(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._read.add(self.name)
        return self._stored.read(*args, **kwargs)

    def read_all(self) -> torch.Tensor:
        self._read.add(self.name)
        return self._stored.read_all()


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes into which memory the tensors of a checkpoint are written, while a model is filled.

    A plain tensor that was made from lazy ones counts for them. A write of anything else counts for the tensor that the
    loader took last, and for the name "" when the loader has taken all. A write into `kept`, which are addresses of
    storages, raises UpdateRefused before it happens.
    """

    def __init__(self, kept: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # address of a storage -> name -> range of bytes in which the tensor's contents were written
        self.written: dict[int, dict[str, tuple[int, int]]] = {}
        self.read: set[str] = set()  # names of tensors of which the loader has read bytes, whatever it did with them
        self._kept = frozenset(kept)
        self._last: str | None = None  # the tensor that the loader works on; None before the first, "" after the last

    def named(self, weights: Weights) -> Weights:
        """Yield the weights, and remember which one the loader works on."""
        try:
            for name, tensor in weights:
                self._last = name
                yield name, LazyTensor(_Noting(tensor.stored, self.read)) if isinstance(tensor, LazyTensor) else tensor
        finally:
            self._last = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names: set[str] = set()  # of the tensors whose contents the operation reads
        written: list[torch.Tensor] = []
        for number, argument in enumerate(func._schema.arguments):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for value in tree_leaves(args[number] if number < len(args) else kwargs.get(argument.name)):
                if not is_written:
                    names |= _contents_of(value)
                elif _is_plain(value) and value.numel():
                    written.append(value)
        if written and not names and self._last is not None:
            names = {self._last}
        addresses = {value.untyped_storage().data_ptr() for value in written}
        if not self._kept.isdisjoint(addresses):
            raise UpdateRefused(
                f"the engine would fill {', '.join(map(quote, sorted(names)))} into weights that are in use",
                hint="start the engine anew",
            )
        result = func(*args, **kwargs)
        for value in written:
            memory = value.untyped_storage()
            start, end = _range_of(value) if func.overloadpacket in _REPLACING else (0, memory.nbytes())
            ranges = self.written.setdefault(memory.data_ptr(), {}) if names else {}
            for name in names:
                first, last = ranges.get(name, (start, end))
                ranges[name] = min(first, start), max(last, end)
        for value in (*written, *tree_leaves(result)) if names else ():
            if _is_plain(value):
                setattr(value.untyped_storage(), _CONTENTS, _contents_of(value) | names)
        return result


def _contents_of(value: Any) -> frozenset[str]:
    """Return the names of the checkpoint's tensors from which a tensor was made."""
    if isinstance(value, LazyTensor):
        return frozenset((value.stored.name,))
    if not _is_plain(value):
        return frozenset()
    found: frozenset[str] = getattr(value.untyped_storage(), _CONTENTS, frozenset())
    return found


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes of its storage from its first element to the end of its last."""
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + spanned(tensor.shape, tensor.stride())) * tensor.itemsize


def spanned(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements in memory from the first of a tensor to its last, both included."""
    return 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))


def _is_plain(value: Any) -> bool:
    """Return whether it is a tensor with memory that others can share."""
    return isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor) and value.layout == torch.strided
