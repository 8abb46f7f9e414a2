"""Names, shapes and order of the tensors that transformers' `save_pretrained` writes for a model, without a value.

transformers 5 reads `experts.0.gate_proj.weight` and its like into one parameter, and its `revert_weight_conversion`
makes them again. Here that function gets tensors that have a shape and no memory. They record what is done to them as
a `Mosaic`. So nothing is gathered, and no rule of a family is written down here.

    state dict's names, shapes --revert_weight_conversion over traced tensors--> StoredTensor: name, dtype, mosaic
    StoredTensor + a rank's state dict --as_stored--> the same tensors, and boxes of those that are split or joined
"""

from __future__ import annotations

import copy
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.saving.boxed import SourceBoxes, boxed_view
from cluster.errors import SaveRefused
from cluster.saving.names import Mosaic, cat, stored_names
from storage.errors import DependencyChanged
from storage.problems import quote

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")  # the child in a wrapper


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint, and where its values are in the tensors of the state dict."""

    name: str
    dtype: torch.dtype
    mosaic: Mosaic


def stored_tensors(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], model: torch.nn.Module | None = None
) -> tuple[StoredTensor, ...]:
    """Return what `save_pretrained` would write for a state dict, in its order.

    Args:
        shapes: The whole shape and the dtype of each tensor of the state dict, by the names that it has there.
        model: The module that the state dict is of, in any wrapper. Names of tied tensors and conversions come from
            it. Without it, or when it is no model of transformers, only the names of wrappers go.

    Returns:
        The tensors of the checkpoint. Sources of their mosaics are names of `shapes`.

    Raises:
        SaveRefused: Names collide, or the model is one that transformers stores in another way.
        DependencyChanged: transformers does what this module does not know.
    """
    given = {stored: name for name, stored in stored_names(shapes).items()}
    model = None if model is None else unwrapped(model)
    for tied in () if model is None else _tied_names(model, given):
        del given[tied]
    traced = {
        stored: _Traced(Mosaic.of(name, shapes[name][0]), shapes[name][1]) for stored, name in given.items()
    }  # fmt: skip
    if model is not None and hasattr(model, "save_pretrained"):
        for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
            traced.pop(name, None)
        traced = _revert(model, traced)
    return tuple(StoredTensor(name, tensor.dtype, tensor.mosaic) for name, tensor in traced.items())


def as_stored(state: Mapping[str, Any], model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Return a state dict with the names, shapes and order in which `save_pretrained` writes it. Nothing is copied.

    Args:
        state: This rank's state dict: plain tensors, DTensors, or ShardedTensors of FSDP1.
        model: The module that it is of, in any wrapper, or None; see `stored_tensors`.

    Returns:
        Values of `state`, and for tensors that are stored in another shape, views and `BoxedTensor`.

    Raises:
        SaveRefused: See `stored_tensors`. Or a tensor that is split or joined has values that are sums not made yet.
        DependencyChanged: See `stored_tensors`.
    """
    shapes = {name: (tuple(value.size()), value.dtype) for name, value in state.items() if _is_tensor(value)}
    made: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    for tensor in stored_tensors(shapes, model):
        names = list(dict.fromkeys(piece.source for piece in tensor.mosaic.pieces))
        if not names or (len(names) == 1 and tensor.mosaic.is_whole(names[0], shapes[names[0]][0])):
            made[tensor.name] = state[names[0]] if names else torch.empty(tensor.mosaic.shape, dtype=tensor.dtype)
            continue
        for name in names:
            if name not in sources:
                try:
                    sources[name] = SourceBoxes(name, state[name])
                except TypeError:
                    sources[name] = state[name]
        made[tensor.name] = boxed_view(tensor.mosaic, tensor.dtype, sources)
    given = [name for name in state if name not in shapes]
    return made | {stored: state[name] for name, stored in stored_names(given).items()}


def _is_tensor(value: object) -> bool:
    return hasattr(value, "size") and hasattr(value, "dtype")


def config_files(model: torch.nn.Module | None) -> dict[str, bytes]:
    """Return config.json and generation_config.json of a model of transformers, as `save_pretrained` writes them.

    Args:
        model: The module, in any wrapper. Without a config of transformers there are no files.
    """
    inner: Any = None if model is None else unwrapped(model)
    config: Any = getattr(inner, "config", None)
    if not hasattr(inner, "save_pretrained") or not hasattr(config, "save_pretrained"):
        return {}
    config = copy.deepcopy(config)
    config.architectures = [_own_class(inner).__name__]
    config.dtype = str(inner.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        if getattr(inner, "generation_config", None) is not None and inner.can_generate():
            inner.generation_config.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix == ".json"}


def _own_class(model: Any) -> Any:
    """Return the class of a module without the one that `fully_shard` has put before it."""
    bases = type(model).__bases__
    return bases[-1] if bases[0].__module__.startswith("torch.distributed") else type(model)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DDP, FSDP1, torch.compile, activation checkpointing and DeepSpeed's engine."""
    while not hasattr(type(model), "save_pretrained"):  # FSDP1 and torch.compile forward attributes of the inner one
        inner = next((model._modules[name] for name in _WRAPPED if name in model._modules), None)
        if inner is None or len(model._modules) != 1:
            break
        model = inner
    return model


def _tied_names(model: torch.nn.Module, names: Mapping[str, str]) -> list[str]:
    """Return the names that are not stored, because another name is for the same parameter.

    Identity of parameters decides, not of memory: empty shards of different tensors have the same address.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    short = stored_names(name for name, _ in named)
    same: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in named:
        if short[name] in names:
            same[id(tensor)].append(short[name])
    patterns = [
        re.compile(f"{name}.{pattern}" if name else pattern)
        for name, module in model.named_modules()
        for pattern in getattr(module, "_tied_weights_keys", None) or ()
    ]
    gone = []
    for several in same.values():
        if len(several) > 1:
            declared = [name for name in sorted(several) if any(pattern.search(name) for pattern in patterns)]
            rest = [name for name in several if name not in declared]
            gone += (declared + rest[1:]) if rest else declared[:-1]
    return gone


def _revert(model: Any, traced: dict[str, _Traced]) -> dict[str, _Traced]:
    """Return what transformers makes of the tensors when it saves the model."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise SaveRefused("the model has adapters of PEFT", hint="pass the adapters' own state dict, without model=")
    if getattr(model, "hf_quantizer", None) is not None:
        raise SaveRefused("the model is quantized by transformers", hint="save it with save_pretrained, then publish")
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 converts nothing
        return traced
    try:
        result: dict[str, _Traced] = revert_weight_conversion(_without_fsdp_classes(model), dict(traced))
    except (SaveRefused, DependencyChanged):
        raise
    except Exception as error:
        raise SaveRefused(f"transformers cannot split the tensors of {type(model).__name__}: {error}") from error
    for name, tensor in result.items():
        if not isinstance(tensor, _Traced):
            raise DependencyChanged(f"transformers made a tensor of its own for {quote(name)}")
    return result


def _without_fsdp_classes(model: Any) -> Any:
    """Return the model, or one without memory whose classes have the names that transformers looks up.

    `fully_shard` gives a module a new class, `FSDPLlamaForCausalLM`, so transformers finds no conversions by its name.
    A model that `from_pretrained` made has them with it.
    """
    own = _own_class(model)
    if getattr(model, "_weight_conversions", None) is not None or own is type(model):
        return model
    with torch.device("meta"):
        return own(copy.deepcopy(model.config))


class _Traced(torch.Tensor):
    """A tensor without memory, whose operations change its mosaic. It always claims to be dense."""

    mosaic: Mosaic

    @staticmethod
    def __new__(cls, mosaic: Mosaic, dtype: torch.dtype) -> _Traced:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: _Traced = make(cls, mosaic.shape, dtype=dtype, device="cpu")
        made.mosaic = mosaic
        return made

    def __init__(self, mosaic: Mosaic, dtype: torch.dtype) -> None:
        """Accept what `__new__` was given."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Return shape and dtype; there are no values to print."""
        return f"_Traced({self.mosaic.shape}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the result of an operation that moves values, or raise DependencyChanged."""
        change = _MOVES.get(func.overloadpacket._qualified_op_name)
        if change is None:
            raise DependencyChanged(f"transformers calls {func} to save a model, which is not known here")
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        named = {argument.name: argument.default_value for argument in func._schema.arguments} | named | (kwargs or {})
        first: Any = named["self"] if "self" in named else named["tensors"]
        dtype = first[0].dtype if isinstance(first, list | tuple) else first.dtype
        result = change(named)
        return [cls(one, dtype) for one in result] if isinstance(result, list) else cls(result, dtype)


def _dim(named: Mapping[str, Any], name: str = "dim", more: int = 0) -> int:
    dims = len(named["self"].shape) + more
    return int(named[name]) % dims if dims else 0


def _slice(named: Mapping[str, Any]) -> Mosaic:
    mosaic, dim = named["self"].mosaic, _dim(named)
    first, end, step = slice(named["start"], named["end"], named["step"]).indices(mosaic.shape[dim])
    return mosaic.narrow(dim, first, max(first, end), step)  # type: ignore[no-any-return]


def _split(named: Mapping[str, Any]) -> list[Mosaic]:
    mosaic, dim = named["self"].mosaic, _dim(named)
    sizes = named.get("split_size", named.get("split_sizes"))
    if not isinstance(sizes, list | tuple):
        total = mosaic.shape[dim]
        sizes = [min(sizes, total - low) for low in range(0, total, sizes)] if total else [0]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [mosaic.narrow(dim, end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _unbind(named: Mapping[str, Any]) -> list[Mosaic]:
    mosaic, dim = named["self"].mosaic, _dim(named)
    return [mosaic.select(dim, index) for index in range(mosaic.shape[dim])]


def _squeeze(named: Mapping[str, Any]) -> Mosaic:
    mosaic = named["self"].mosaic
    dims = named.get("dim", range(len(mosaic.shape)))
    dims = [dims] if isinstance(dims, int) else dims
    for dim in sorted((dim % len(mosaic.shape) for dim in dims), reverse=True):
        mosaic = mosaic.squeeze(dim) if mosaic.shape[dim] == 1 else mosaic
    return mosaic  # type: ignore[no-any-return]


def _view(named: Mapping[str, Any]) -> Mosaic:
    mosaic, size = named["self"].mosaic, [int(each) for each in named["size"]]
    if -1 in size:
        known = math.prod(each for each in size if each != -1)
        size[size.index(-1)] = math.prod(mosaic.shape) // known if known else 0
    return mosaic.view(size)  # type: ignore[no-any-return]


def _swap(named: Mapping[str, Any], a: int, b: int) -> Mosaic:
    order = list(range(len(named["self"].shape)))
    order[a], order[b] = order[b], order[a]
    return named["self"].mosaic.permute(order)  # type: ignore[no-any-return]


def _stack(named: Mapping[str, Any]) -> Mosaic:
    dim = int(named["dim"]) % (len(named["tensors"][0].shape) + 1)
    return cat([each.mosaic.unsqueeze(dim) for each in named["tensors"]], dim)


def _same(named: Mapping[str, Any]) -> Mosaic:
    return named["self"].mosaic  # type: ignore[no-any-return]


_MOVES: dict[str, Callable[[dict[str, Any]], Mosaic | list[Mosaic]]] = {
    "aten::alias": _same,
    "aten::cat": lambda named: cat(
        [each.mosaic for each in named["tensors"]], int(named["dim"]) % len(named["tensors"][0].shape)
    ),
    "aten::clone": _same,
    "aten::detach": _same,
    "aten::permute": lambda named: named["self"].mosaic.permute([d % len(named["dims"]) for d in named["dims"]]),
    "aten::select": lambda named: named["self"].mosaic.select(
        _dim(named), int(named["index"]) % named["self"].shape[_dim(named)]
    ),
    "aten::slice": _slice,
    "aten::split": _split,
    "aten::split_with_sizes": _split,
    "aten::squeeze": _squeeze,
    "aten::stack": _stack,
    "aten::t": lambda named: _swap(named, 0, -1),
    "aten::transpose": lambda named: _swap(named, _dim(named, "dim0"), _dim(named, "dim1")),
    "aten::unbind": _unbind,
    "aten::unsqueeze": lambda named: named["self"].mosaic.unsqueeze(_dim(named, more=1)),
    "aten::view": _view,
    "aten::_unsafe_view": _view,
}
