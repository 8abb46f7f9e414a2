"""Files of `torch.save` with a state dict: one, several with an index, or one for each rank of an FSDP job.

    pytorch_model.bin, model.pt                        a state dict
    pytorch_model-00001-of-00002.bin and .index.json   one in several files
    model_world_size_4_rank_0.pt                       a rank's DTensors, as verl writes them; FSDP2, also with TP
    model_rank0.pt, pytorch_model_fsdp_rank0.bin       a rank's DTensors or FSDP1's ShardedTensors

A DTensor names its mesh, the rank's place in it and the placements. `dtensor_region` says which part that is. Ranks
that have the same part are replicas: the first of them is read. A plain tensor does not say whether it is whole. So
those of all ranks are compared: if they are equal, the first is read, and if not, they may be parts, and are refused.
"""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.converting.assembly import copies_of
from cluster.converting.source import Source, SourceTensor, StoredPiece, other_files, read_each
from cluster.converting.torch_files import DTYPES, Global, Opaque, StoredTensor, is_shape, read_torch_file
from cluster.errors import ConvertError
from cluster.layouts.region import MeshCut, dtensor_region
from storage.checkpoints.checkpoint_files import parse_weight_map
from storage.checkpoints.safetensors_header import DTYPE_BITS, MAX_DIMENSIONS
from storage.errors import InvalidIndex
from storage.problems import Problems, quote
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, read_bytes

Copies = tuple[SourceTensor, SourceTensor]
PYTORCH = "PyTorch state dict"
FSDP = "FSDP ranks"
INDEX = "pytorch_model.bin.index.json"
_MAX_INDEX_BYTES = 64 << 20
_MAX_MESH = 1 << 20  # processes
_MAX_PARTS = 256  # of a tensor, that one rank has; more than one after strided cuts, or in a ShardedTensor
_MAX_NESTING = 4  # dicts in dicts around the weights
_READERS = 4  # files whose pickles are read at once, and tensors that are compared
_COMPARED_BYTES = 4 << 20  # of each of two tensors at a time
_TENSOR = "torch.distributed.tensor."
_SHARDED = "torch.distributed._shard."
ALLOWED = (
    f"{_TENSOR}DTensor",
    f"{_TENSOR}api.DTensor",
    f"{_TENSOR}_api.DTensor",
    f"{_TENSOR}_dtensor_spec.DTensorSpec",
    f"{_TENSOR}_dtensor_spec.TensorMeta",
    f"{_TENSOR}_dtensor_spec.ShardOrderEntry",
    *(f"{_TENSOR}placement_types.{name}" for name in ("Shard", "Replicate", "_StridedShard", "Partial", "TensorMeta")),
    "torch.distributed._tensor.api.DTensor",
    "torch.distributed._tensor.placement_types.DTensorSpec",
    *(f"torch.distributed._tensor.placement_types.{name}" for name in ("Shard", "Replicate", "Partial", "TensorMeta")),
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed._mesh_layout._FlatLayout",
    "torch._utils._rebuild_wrapper_subclass",
    f"{_SHARDED}sharded_tensor.api.ShardedTensor",
    f"{_SHARDED}sharded_tensor.api.ShardedTensor.ProcessGroupState",
    f"{_SHARDED}sharded_tensor.shard.Shard",
    f"{_SHARDED}sharded_tensor.metadata.ShardedTensorMetadata",
    f"{_SHARDED}sharded_tensor.metadata.TensorProperties",
    f"{_SHARDED}sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    f"{_SHARDED}metadata.ShardMetadata",
    f"{_SHARDED}sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    f"{_SHARDED}sharding_spec.api.EnumerableShardingSpec",
    "torch.distributed.remote_device._remote_device",
)
# Beside the weights, in checkpoints of training scripts: numbers and settings. They become stubs.
ALLOWED_BESIDE = ("argparse.Namespace", "collections.defaultdict", "builtins.set", "builtins.dict", "builtins.list")

_RANK_FILE = re.compile(r"(.*?)(?:model_world_size_([0-9]{1,6})_rank_|(?<![a-z])rank[_-]?)([0-9]{1,6})\.(?:pt|pth|bin)")
_NO_MODEL = re.compile(
    r"(?:.*/)?(?:optim|extra_state|optimizer|scheduler|rng_state|random_states|scaler|training_args)"
)
_FILE = re.compile(r"[^/]+\.(?:bin|pt|pth)")
_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module")  # that scripts put around a model


def clean_name(name: str) -> str:
    """Return the name of a tensor without the prefixes of wrappers, as `save_pretrained` writes it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True)
class RankFiles:
    """The files of all ranks of a job."""

    folder: str  # "" or with a slash at its end
    world_size: int | None  # None: the names do not say it
    keys: Mapping[int, str]  # rank -> key
    again: tuple[str, ...] = ()  # keys of ranks that have another one, such as rank_00 beside rank_0


def rank_files(keys: Iterable[str]) -> list[RankFiles]:
    """Return the sets of files for each rank that a listing has. Those of optimizers are left out."""
    found: dict[tuple[str, int | None], dict[int, str]] = {}
    again: dict[tuple[str, int | None], list[str]] = {}
    for key in keys:
        match = _RANK_FILE.fullmatch(key)
        if match and not _NO_MODEL.match(key):
            job = match[1], int(match[2]) if match[2] else None
            if found.setdefault(job, {}).setdefault(int(match[3]), key) != key:
                again.setdefault(job, []).append(key)
    return [
        RankFiles(stem.rpartition("/")[0] + "/" if "/" in stem else "", size, ranks, tuple(again.get((stem, size), ())))
        for (stem, size), ranks in sorted(found.items(), key=lambda one: (one[0][0], one[0][1] or 0))
    ]


def recognise_ranks(listing: Mapping[str, ObjectInfo]) -> bool:
    """Return whether a listing has a file for each rank of a job."""
    return bool(rank_files(listing))


def read_ranks(store: ObjectStore, listing: Mapping[str, ObjectInfo]) -> Source:
    """Return the files of the ranks of an FSDP job as a source.

    Args:
        store: The store, with the folder of the files as its root, or one around it.
        listing: All objects below its root, by key.

    Returns:
        The tensors in the order of the first rank.

    Raises:
        ConvertError: Ranks are missing, or do not fit together; the message lists every problem.
        UnsafePickle: A file names code that no checkpoint needs.
        StoreError: The store did not answer.
    """
    sets = rank_files(listing)
    if len(sets) > 1:
        choices = ", ".join(sorted({quote(f"{one.folder}... of {one.world_size or '?'} ranks") for one in sets[:8]}))
        raise ConvertError(
            f"{store.uri} has the files of {len(sets)} jobs: {choices}",
            hint="name the folder of one of them, and remove files of another world size from it",
        )
    files = sets[0]
    size = max(files.keys) + 1 if files.world_size is None else files.world_size
    problems = Problems(f"{quote(key)} is of a rank that another file has, too" for key in files.again)
    for rank in range(min(size, _MAX_MESH)):
        if rank not in files.keys:
            problems.add(f"the file of rank {rank} of {size} is missing")
    for rank, key in sorted(files.keys.items()):
        if rank >= size:
            problems.add(f"{quote(key)} is of a rank that a job of {size} ranks does not have")
    in_order = [files.keys[rank] for rank in sorted(files.keys) if rank < size]
    states, broken = read_each(lambda key: _state_in(store, key), in_order, problems, _READERS)
    copies: list[Copies] = []
    tensors = join_ranks(list(states.values()), list(states), problems, copies)
    with ThreadPoolExecutor(_READERS) as pool:
        for (first, other), same in zip(copies, pool.map(lambda pair: _is_same(store, *pair), copies), strict=True):
            if not same:
                problems.add(
                    f"{quote(other.name)} is a plain tensor with other numbers in {quote(other.pieces[0].file)} than "
                    f"in {quote(first.pieces[0].file)}, and nothing says which part it is; save DTensors, or gather it"
                )
    if problems:
        raise refused(store, FSDP, problems, broken)
    return Source(FSDP, tuple(tensors), other_files(listing, files.folder))


def join_ranks(
    states: Sequence[Mapping[str, Any]],
    files: Sequence[str],
    problems: Problems,
    copies: list[Copies] | None = None,
) -> list[SourceTensor]:
    """Return the tensors that the state dicts of all ranks make together.

    Args:
        states: The state dict of each rank.
        files: The name of the file of each, for messages.
        problems: Gets a sentence for each thing that does not fit.
        copies: Gets plain tensors of other ranks than the first that has them, each after that one. They are whole
            only if both have the same numbers.
    """
    found: dict[str, SourceTensor] = {}
    for state, file in zip(states, files, strict=True):
        for name, value in state.items():
            if isinstance(value, StoredTensor):
                one = whole_tensor(name, value)
            elif isinstance(value, Opaque):
                try:
                    one = _of_parts(name, value)
                except (_Malformed, AttributeError, LookupError, TypeError, ValueError) as error:
                    what = str(error) if isinstance(error, _Malformed) else "it is not as torch writes it"
                    problems.add(f"{quote(file)}: {quote(name)} cannot be read: {what}")
                    continue
            else:
                continue  # a number beside the weights
            if "flat_param" in name.rpartition(".")[2]:
                problems.add(
                    f"{quote(file)}: {quote(name)} is a flat parameter of FSDP1, which does not say what is in it; "
                    "save with StateDictType.SHARDED_STATE_DICT"
                )
                continue
            known = found.get(one.name)
            if known is None:
                found[one.name] = one
            elif (known.dtype, known.shape) != (one.dtype, one.shape):
                problems.add(
                    f"{quote(file)}: {quote(name)} is {one.dtype} {one.shape}, on another rank {known.dtype} "
                    f"{known.shape}"
                )
            else:
                if copies is not None and isinstance(value, StoredTensor) and one.pieces:
                    copies.append((known, one))
                boxes = {(piece.start, piece.shape) for piece in known.pieces}
                more = tuple(piece for piece in one.pieces if (piece.start, piece.shape) not in boxes)
                found[one.name] = SourceTensor(one.name, one.dtype, one.shape, (*known.pieces, *more))
    return list(found.values())


def _is_same(store: ObjectStore, first: SourceTensor, other: SourceTensor) -> bool:
    """Return whether two tensors of one shape have the same bytes. Reads both, a little at a time."""
    if [piece.shape for piece in first.pieces] != [first.shape]:
        return True  # parts, with which a whole one overlaps: that is another problem
    size, width = math.prod(first.shape), DTYPE_BITS[first.dtype] // 8
    step = max(1, _COMPARED_BYTES // width)
    for low in range(0, size, step):
        high = min(low + step, size)
        found = []
        for tensor in (first, other):
            data = np.empty((high - low) * width, np.uint8)
            for copy in copies_of(tensor, low, high, 0, width, _COMPARED_BYTES):
                raw = read_bytes(store, copy.file, ByteRange(copy.offset_bytes, copy.offset_bytes + copy.read_bytes))
                values = np.ndarray(copy.shape, f"V{width}", raw, 0, copy.from_strides)
                np.ndarray(copy.shape, f"V{width}", data.data, copy.to_offset_bytes, copy.to_strides)[...] = values
            found.append(data)
        if not np.array_equal(found[0], found[1]):
            return False
    return True


class _Malformed(Exception):
    """An object of a rank's file is not as torch writes it, or of a kind that cannot be read."""


def _of_parts(name: str, value: Opaque) -> SourceTensor:
    """Return the part of a tensor that a DTensor or a ShardedTensor of one rank has."""
    if value.name != "torch._utils._rebuild_wrapper_subclass":
        raise _Malformed(f"it is a {quote(value.name)}")
    kind = value.args[0].name
    shape = _counts(value.args[2], "its shape is none")
    if kind.endswith(".DTensor"):
        return _of_dtensor(name, shape, value.state)
    if kind.endswith(".ShardedTensor"):
        return _of_sharded(name, shape, value.state)
    raise _Malformed(f"it is a {quote(kind)}")


def _of_dtensor(name: str, shape: tuple[int, ...], state: Any) -> SourceTensor:
    fields = _fields(state)
    local, spec = fields["_local_tensor"], _fields(fields["_spec"].state)
    if not isinstance(local, StoredTensor):
        raise _Malformed("its part is no tensor")
    sizes, place = _mesh(_fields(spec["mesh"].state))
    placements = spec["placements"]
    if len(placements) != len(sizes):
        raise _Malformed("it has not one placement for each dimension of its mesh")
    cuts, runs = [], 1
    for placement, parts, part in zip(placements, sizes, place, strict=True):
        kind = placement.name.rpartition(".")[2]
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise _Malformed(
                f"its placement is {quote(kind)}, so it is not the final value; redistribute it before saving"
            )
        told = _fields(placement.state) if placement.state is not None else {}
        dim = told.get("dim", placement.args[0] if placement.args else None)
        groups = told.get("split_factor", 1) if kind == "_StridedShard" else 1
        if type(dim) is not int or type(groups) is not int or not -len(shape) <= dim < len(shape):
            raise _Malformed("its placements are impossible")
        runs *= min(max(groups, 0), _MAX_MESH)
        if not 1 <= runs <= _MAX_PARTS:
            raise _Malformed(f"its placements cut it in other than 1 to {_MAX_PARTS} parts on one rank")
        cuts.append(MeshCut(dim % len(shape), parts, part, groups))
    region = dtensor_region(shape, cuts)
    held: tuple[int, ...] = local.shape
    if region.filled != held and (region.elements or math.prod(held)):
        raise _Malformed(f"its part has the shape {local.shape}, but its placements say {region.filled}")
    pieces = []
    for (start, sizes_), offsets in region.boxes():
        pieces.append(_piece(local, start, sizes_, offsets))
    return SourceTensor(clean_name(name), local.dtype, shape, tuple(pieces))


def _mesh(fields: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of a mesh, and the place of the rank that wrote it."""
    sizes: tuple[int, ...]
    layout, mesh = fields.get("_layout"), fields.get("mesh", fields.get("_mesh"))
    if isinstance(mesh, StoredTensor):  # torch before 2.10
        sizes = mesh.shape
    elif isinstance(layout, Opaque):
        told = _fields(layout.state)
        axes = _few(told["axes"] if "axes" in told else told["shape"])
        shapes = (_few(_fields(one.state)["shape"] if "axes" in told else one) for one in axes)
        sizes = tuple(math.prod(_counts(one, "its mesh has no sizes")) for one in shapes)
    else:
        raise _Malformed("its mesh is of a version of torch that is not known")
    place = _counts(fields.get("_coordinate_on_dim"), "the rank that wrote it has no place in its mesh")
    if len(place) != len(sizes) or not all(a < b for a, b in zip(place, sizes, strict=True)):
        raise _Malformed("the rank that wrote it has no place in its mesh")
    if math.prod(sizes) > _MAX_MESH:
        raise _Malformed(f"its mesh has more than {_MAX_MESH} processes")
    return sizes, place


def _of_sharded(name: str, shape: tuple[int, ...], state: Any) -> SourceTensor:
    """Return the parts that a rank has of FSDP1's ShardedTensor."""
    state = _few(state)
    shards = next((one for one in state if isinstance(one, list)), None)
    if shards is None or len(shards) > _MAX_PARTS:
        raise _Malformed(f"it does not have at most {_MAX_PARTS} shards on one rank")
    pieces, dtype = [], ""
    for shard in shards:
        fields = _fields(shard.state)
        local, place = fields["tensor"], _fields(fields["metadata"].state)
        start = _counts(place["shard_offsets"], "a shard has no place")
        sizes = _counts(place["shard_sizes"], "a shard has no size")
        if not isinstance(local, StoredTensor) or local.shape != sizes:
            raise _Malformed("a shard is not as large as its metadata says")
        dtype = local.dtype
        if math.prod(sizes):
            pieces.append(_piece(local, start, sizes, (0,) * len(sizes)))
    if not dtype:  # a rank without a part does not name the dtype in a tensor
        metadata = [one for one in state if isinstance(one, Opaque) and "Metadata" in one.name]
        dtype = _dtype_of(_fields(metadata[0].state)["tensor_properties"])
    return SourceTensor(clean_name(name), dtype, shape, tuple(pieces))


def _dtype_of(properties: Any) -> str:
    state = properties.state
    told = state.get("dtype") if isinstance(state, dict) else _few(state)[0]
    if not isinstance(told, Global):
        raise _Malformed("its dtype is missing")
    return DTYPES[told.name.removeprefix("torch.")]


def _piece(local: StoredTensor, start: Sequence[int], shape: Sequence[int], offsets: Sequence[int]) -> StoredPiece:
    skipped = sum(offset * stride for offset, stride in zip(offsets, local.strides, strict=True))
    at = local.offset_bytes + skipped * DTYPE_BITS[local.dtype] // 8
    return StoredPiece(local.file, at, tuple(start), tuple(shape), local.strides)


def _fields(state: Any) -> Mapping[str, Any]:
    """Return the attributes in the state of a pickled object: a dict, or (None, dict) for one with slots."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        return ChainMap(state[1], state[0]) if isinstance(state[0], dict) else state[1]  # many may share one: no copy
    if not isinstance(state, dict):
        raise _Malformed("it has no attributes")
    return state


def _few(value: Any) -> tuple[Any, ...]:
    """Return a value, or those of a short sequence, as a tuple."""
    if not isinstance(value, tuple | list):
        return (value,)
    if len(value) > MAX_DIMENSIONS:
        raise _Malformed("it is not as torch writes it")
    return tuple(value)


def _counts(value: Any, problem: str) -> tuple[int, ...]:
    """Return a shape, or raise _Malformed with a problem."""
    if not is_shape(value):
        raise _Malformed(problem)
    return tuple(value)


def whole_tensor(name: str, tensor: StoredTensor) -> SourceTensor:
    """Return a tensor that one file has whole."""
    piece = StoredPiece(tensor.file, tensor.offset_bytes, (0,) * len(tensor.shape), tensor.shape, tensor.strides)
    return SourceTensor(clean_name(name), tensor.dtype, tensor.shape, (piece,) if math.prod(tensor.shape) else ())


def state_of(found: Any, file: str) -> Mapping[str, Any]:
    """Return the state dict in what a file contains: itself, or the value of one of `MODEL_KEYS`.

    Raises ConvertError when there is none.
    """
    for _ in range(_MAX_NESTING):
        if not isinstance(found, dict):
            break
        inner = [found[key] for key in MODEL_KEYS if isinstance(found.get(key), dict)]
        if not inner:
            if any(isinstance(value, StoredTensor | Opaque) for value in found.values()):
                return {name: value for name, value in found.items() if isinstance(name, str)}
            break
        found = inner[0]
    raise ConvertError(
        f"{quote(file)} has no state dict",
        hint=f"a state dict has names and tensors; it may be the value of {', '.join(MODEL_KEYS)}",
    )


def _state_in(store: ObjectStore, key: str) -> Mapping[str, Any]:
    return state_of(read_torch_file(store, key, allowed=(*ALLOWED, *ALLOWED_BESIDE)), key)


def torch_keys(listing: Mapping[str, ObjectInfo]) -> list[str]:
    """Return the files with a state dict in the root of a listing."""
    return sorted(key for key in listing if _FILE.fullmatch(key) and not _NO_MODEL.match(key))


def recognise_files(listing: Mapping[str, ObjectInfo]) -> bool:
    """Return whether a listing has files of `torch.save` in its root."""
    return INDEX in listing or bool(torch_keys(listing))


def read_files(store: ObjectStore, listing: Mapping[str, ObjectInfo]) -> Source:
    """Return `.bin` or `.pt` files with a state dict as a source.

    Args:
        store: The store, with the folder of the files as its root.
        listing: All objects below its root, by key.

    Returns:
        The tensors, in the order of files and of each dict.

    Raises:
        ConvertError: Files are missing, or tensors are there twice; the message lists every problem.
        UnsafePickle: A file names code that no checkpoint needs.
        StoreError: The store did not answer.
    """
    problems = Problems()
    wanted: Mapping[str, str] | None = None
    keys = torch_keys(listing)
    if INDEX in listing:
        if listing[INDEX].size_bytes > _MAX_INDEX_BYTES:
            raise ConvertError(f"{INDEX} has {listing[INDEX].size_bytes} bytes; at most {_MAX_INDEX_BYTES} are read")
        try:
            wanted = parse_weight_map(read_bytes(store, INDEX, ByteRange(0, listing[INDEX].size_bytes)), pickles=True)
        except InvalidIndex as error:
            raise ConvertError(f"{INDEX} is no index: {error.message}", hint=error.hint) from error
        keys = sorted(set(wanted.values()))
        for key in keys:
            if key not in listing:
                problems.add(f"the file {quote(key)}, which {INDEX} names, is missing")
        keys = [key for key in keys if key in listing]
    states, broken = read_each(lambda key: _state_in(store, key), keys, problems, _READERS)
    found: dict[str, SourceTensor] = {}
    for key, state in states.items():
        for name, value in state.items():
            if isinstance(value, Opaque):
                problems.add(f"{quote(key)}: {quote(name)} is a part of a tensor; the files of other ranks are missing")
            if not isinstance(value, StoredTensor):
                continue
            if wanted is not None and wanted.get(name) != key:
                continue
            one = whole_tensor(name, value)
            if one.name in found:
                problems.add(f"{quote(one.name)} is in {quote(key)} and in another file")
            found[one.name] = one
    for name, key in (wanted or {}).items():
        if key in states and clean_name(name) not in found:
            problems.add(f"{quote(name)} is not in {quote(key)}, which {INDEX} names")
    if problems:
        raise refused(store, PYTORCH, problems, broken)
    return Source(PYTORCH, tuple(found.values()), other_files(listing))


def refused(
    store: ObjectStore, kind: str, problems: Problems, error: type[ConvertError] = ConvertError
) -> ConvertError:
    """Return the error that lists every problem of a source."""
    return error(
        f"{store.uri} cannot be converted ({kind}): {problems}",
        hint="copy the files of all ranks of one save into one folder, and convert it again",
        problems=len(problems),
    )
