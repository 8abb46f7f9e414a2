"""Tensors that read their bytes when somebody copies them.

An engine's weight loader takes a tensor, cuts out the part that its rank needs, and copies that part to a parameter. A
`LazyTensor` looks like the stored tensor. It records views, and the copy reads only what the view shows:

    weight = LazyTensor(stored)                 # nothing is read
    half = weight.narrow(0, 4096, 4096)         # a view: nothing is read
    parameter.data.copy_(half)                  # reads 4,096 rows

torch describes each view by an offset, a shape and strides, which it computes on a tensor without memory (a "meta"
tensor). `view_window` turns them into the smallest box of the stored tensor that contains the view.

Operations, by what they do to a lazy tensor:

- A view (`narrow`, `t`, `view`, `chunk`, `detach`, ...) returns a lazy tensor.
- Anything else reads the bytes of the view and works on a plain tensor with them. The result is plain.
- A write into a lazy tensor, or a request for its memory (`data_ptr`, `numpy`), reads the whole stored tensor. All lazy
  views of it then share that memory, as the views of a plain tensor do.

Assigning a lazy tensor to `parameter.data` or to a module copies nothing, so nothing would be read. `assignments_read`
replaces such assignments while an engine loads, and `read_assigned` replaces what a module holds afterwards.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

DEVICES = ("cpu", "cuda")  # whose tensors a stored tensor can be read into


class StoredTensor(Protocol):
    """A tensor in a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(
        self,
        shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        target: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a box of the tensor, contiguous, in memory of its own or in that of the target.

        `shape` is the tensor's shape, or (elements,) for a range of its elements in row-major order. `target`: a
        contiguous tensor on one of DEVICES with the dtype and as many elements, which may have another shape. Raises
        LongshoreError.
        """
        ...

    def read_all(self) -> torch.Tensor:
        """Return the whole tensor, because an operation needs more than a part of it. Counted."""
        ...


@dataclass(frozen=True, slots=True)
class ViewWindow:
    """The part of a stored tensor that contains a view, and the view's place in a copy of that part."""

    shape: tuple[int, ...]  # of the stored tensor; (elements,) if the part is a range in row-major order
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    view_offset: int  # in elements, from the start of the contiguous copy
    view_stride: tuple[int, ...]


def view_window(shape: Sequence[int], offset: int, view_shape: Sequence[int], view_stride: Sequence[int]) -> ViewWindow:
    """Return the smallest box of a row-major tensor that contains a view with at least one element.

    Args:
        shape: Shape of the stored tensor.
        offset: First element of the view.
        view_shape: Shape of the view.
        view_stride: Strides of the view, in elements, not negative.

    A view whose steps run across a dimension of the stored tensor (after `flatten`, say) gets the range of elements
    from its first to its last instead of a box.
    """
    strides = _contiguous(shape)
    first, extent, rest = [0] * len(shape), [0] * len(shape), offset
    for dim, stride in enumerate(strides):
        first[dim], rest = divmod(rest, stride)
    steps: list[tuple[int, int]] = []  # for each dimension of the view: dimension of the tensor, indices per step
    for size, stride in zip(view_shape, view_stride, strict=True):
        if size == 1 or stride == 0:
            steps.append((0, 0))
            continue
        # A dimension of size 1 has the stride of the next one, and no room for a step.
        found = next((dim for dim, own in enumerate(strides) if shape[dim] > 1 and own <= stride), None)
        if found is None or stride % strides[found]:
            break
        steps.append((found, stride // strides[found]))
        extent[found] += (size - 1) * steps[-1][1]
    fits = all(start + more < size for start, more, size in zip(first, extent, shape, strict=True))
    if len(steps) < len(view_shape) or not fits:
        end = offset + sum((size - 1) * stride for size, stride in zip(view_shape, view_stride, strict=True)) + 1
        return ViewWindow((math.prod(shape),), (offset,), (end - offset,), 0, tuple(view_stride))
    sizes = tuple(more + 1 for more in extent)
    inside = _contiguous(sizes)
    stride_inside = tuple(count * inside[dim] if count else 0 for dim, count in steps)
    return ViewWindow(tuple(shape), tuple(first), sizes, 0, stride_inside)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


class _Root:
    """One stored tensor behind all lazy views of it."""

    def __init__(self, stored: StoredTensor, whole: torch.Tensor | None = None) -> None:
        self.stored = stored
        self._whole = whole  # set when somebody writes to it, asks for its memory, or assigns other data
        self._lock = threading.Lock()

    def read(self, view: torch.Tensor) -> torch.Tensor:
        """Return the view as a plain tensor. It shares memory with other views only after `memory`."""
        if self._whole is not None:
            return self.memory(view)
        if not view.numel():
            return torch.empty(view.shape, dtype=view.dtype, device="cpu")
        stored, size, offset = self.stored, view.element_size(), int(view.storage_offset())
        if size == stored.dtype.itemsize:
            window = view_window(stored.shape, offset, view.shape, view.stride())
        else:  # elements of another size: bytes from the view's first to its last
            span = sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True)) + 1
            first = offset * size // stored.dtype.itemsize
            end = -(-(offset + span) * size // stored.dtype.itemsize)
            inside = offset - first * stored.dtype.itemsize // size
            window = ViewWindow((math.prod(stored.shape),), (first,), (end - first,), inside, view.stride())
        found = stored.read(window.shape, window.offsets, window.sizes)
        return _view_of(found, view, window.view_offset, window.view_stride)

    def copy_to(self, target: torch.Tensor, view: torch.Tensor) -> bool:
        """Read the view straight into the target, and return True; False where that cannot be done."""
        alike = (target.dtype, target.shape) == (self.stored.dtype, view.shape) and target.device.type in DEVICES
        if not alike or view.dtype != target.dtype or not target.is_contiguous() or self._whole is not None:
            return False
        if not view.numel():
            return True
        window = view_window(self.stored.shape, int(view.storage_offset()), view.shape, view.stride())
        if math.prod(window.sizes) != view.numel() or not _in_order(view.shape, window.view_stride):
            return False
        self.stored.read(window.shape, window.offsets, window.sizes, target.detach())
        return True

    def memory(self, view: torch.Tensor) -> torch.Tensor:
        """Return the view as a plain tensor in memory that all views of the stored tensor share from now on."""
        with self._lock:
            if self._whole is None:
                self._whole = self.stored.read_all()
        return _view_of(self._whole, view, int(view.storage_offset()), view.stride())


def _in_order(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor with these strides is contiguous."""
    pairs = zip(shape, stride, _contiguous(shape), strict=True)
    return all(size == 1 or own == wanted for size, own, wanted in pairs)


def _view_of(memory: torch.Tensor, like: torch.Tensor, offset: int, stride: Sequence[int]) -> torch.Tensor:
    """Return a view of this memory that has the shape and dtype of `like`."""
    return torch.empty(0, dtype=like.dtype, device=memory.device).set_(
        memory.untyped_storage(), offset, tuple(like.shape), tuple(stride)
    )


# Views by a bit of the tensor, which the lazy tensor does not have: they read instead.
_BIT_VIEWS = {torch.ops.aten._conj.default, torch.ops.aten._neg_view.default}

_COPY = torch.ops.aten.copy_.default

# They reach C++ without passing torch's dispatcher.
_NEED_MEMORY = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.data_ptr,
    torch.Tensor.share_memory_,
    torch.Tensor.storage,
    torch.Tensor.untyped_storage,
    torch.Tensor._typed_storage,
}


class LazyTensor(torch.Tensor):
    """A stored tensor, or a view of one, that is read when it is copied. On the CPU, without gradients."""

    _root: _Root
    _meta: torch.Tensor

    @staticmethod
    def __new__(cls, stored: StoredTensor) -> LazyTensor:
        """Return the whole stored tensor. Nothing is read."""
        return cls._of(_Root(stored), torch.empty(stored.shape, dtype=stored.dtype, device="meta"))

    @classmethod
    def _of(cls, root: _Root, meta: torch.Tensor) -> LazyTensor:
        lazy: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls, meta.size(), meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=torch.device("cpu")
        )
        lazy._root, lazy._meta = root, meta
        return lazy

    @property
    def stored(self) -> StoredTensor:
        """Return the stored tensor that this is a view of."""
        return self._root.stored

    def read(self) -> torch.Tensor:
        """Return this tensor as a plain one. Reads its bytes; raises the error of the read."""
        return self._root.read(self._meta)

    def _become(self, value: torch.Tensor) -> None:
        """Be that tensor from now on: `lazy.data = value`. Other views of the stored tensor stay what they are."""
        plain = value.read() if isinstance(value, LazyTensor) else value
        plain = plain.detach()
        self._root = _Root(self.stored, plain)
        elements = plain.untyped_storage().nbytes() // plain.element_size()
        memory = torch.empty(elements, dtype=plain.dtype, device="meta")
        self._meta = memory.as_strided(plain.shape, plain.stride(), plain.storage_offset())
        _SET_DATA(self, LazyTensor._of(self._root, self._meta))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({self.stored.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.read().clone()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func == _SET_DATA and isinstance(args[0], LazyTensor):
                return args[0]._become(args[1])
            if func in _NEED_MEMORY:
                args = tree_map_only(LazyTensor, _in_memory, args)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _COPY and _is_copied(args[0], args[1]):
            return args[0]
        if func is _COPY and args[0].device.type == "meta":  # a rehearsal, which vLLM does to count elements
            return func(args[0], args[1]._meta, *args[2:], **kwargs)
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], LazyTensor):
            return _change_view(func, args[0], args[1:], kwargs)
        if func.is_view and func not in _BIT_VIEWS and isinstance(args[0], LazyTensor):
            root = args[0]._root
            views = func(args[0]._meta, *args[1:], **kwargs)
            return tree_map_only(torch.Tensor, lambda meta: cls._of(root, meta), views)
        written = _written(func, args, kwargs)
        if not written:
            args, kwargs = tree_map_only(LazyTensor, LazyTensor.read, (args, kwargs))
            return func(*args, **kwargs)
        ids = {id(tensor) for tensor in written}

        def plain(tensor: LazyTensor) -> torch.Tensor:
            return _in_memory(tensor) if id(tensor) in ids else tensor.read()

        plain_args, plain_kwargs = tree_map_only(LazyTensor, plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        returns = func._schema.returns
        if len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write:
            return written[0]
        return result


def read_indexed(stored: StoredTensor, index: Any) -> torch.Tensor:
    """Return `stored[index]` as a plain tensor, as a lazy tensor would read it.

    The first operation on a lazy tensor makes torch import `torch.distributed.tensor`, which takes a second.
    """
    parts = index if isinstance(index, tuple) else (index,)
    is_view = all(part is None or part is ... or isinstance(part, slice) or type(part) is int for part in parts)
    if not is_view:
        return stored.read_all()[index]
    return _Root(stored).read(torch.empty(stored.shape, dtype=stored.dtype, device="meta")[index])


def _is_copied(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy a lazy tensor straight into a plain one, and return True; False where that cannot be done."""
    lazy = isinstance(source, LazyTensor) and not isinstance(target, LazyTensor)
    return lazy and source._root.copy_to(target, source._meta)  # type: ignore[attr-defined]


def _in_memory(lazy: LazyTensor) -> torch.Tensor:
    return lazy._root.memory(lazy._meta)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[LazyTensor]:
    """Return the lazy tensors among the arguments that the operation writes to."""
    found: list[LazyTensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            tree_map_only(LazyTensor, found.append, value)
    return found


def _change_view(func: Any, lazy: LazyTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> LazyTensor:
    """Run an operation that changes shape and strides in place, such as `unsqueeze_`."""
    func(lazy._meta, *args, **kwargs)
    with torch._C._DisableTorchDispatch():
        func(lazy, *args, **kwargs)
    return lazy


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class assignments_read(TorchFunctionMode):
    """A context in which `parameter.data = lazy` reads the lazy tensor. It applies to the thread that enters it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_DATA and isinstance(args[1], LazyTensor):
            args = args[0], args[1].read()
        return func(*args, **(kwargs or {}))


def read_assigned(module: torch.nn.Module) -> list[str]:
    """Replace lazy parameters and buffers of a module by plain ones. Return their names, tied ones once."""
    found: dict[int, torch.Tensor] = {}
    names = []
    for prefix, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if not isinstance(tensor, LazyTensor):
                    continue
                if id(tensor) not in found:
                    plain = tensor.read()
                    is_parameter = tensors is part._parameters
                    found[id(tensor)] = torch.nn.Parameter(plain, requires_grad=False) if is_parameter else plain
                    names.append(f"{prefix}.{name}" if prefix else name)
                tensors[name] = found[id(tensor)]
    return names
