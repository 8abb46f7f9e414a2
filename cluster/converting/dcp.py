"""Checkpoints that torch's distributed checkpoints (DCP) wrote: FSDP, Accelerate, torchtitan, Megatron-Core.

`.metadata` is a pickle that names every tensor with its chunks, and where each chunk is: a range of a `.distcp` file.
The range is a file of torch.save with one tensor. Objects other than tensors are left out.

Names in the files are those of a nested dict of training, which `.metadata` has, too. Without the keys around the model
(`model` in most scripts, and in Accelerate) they are the model's own. What is not part of the model is never read.
If several keys could be the model's, the source is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from cluster.converting.rank_files import MODEL_KEYS, clean_name, refused
from cluster.converting.source import Source, SourceTensor, StoredPiece, other_files
from cluster.converting.torch_files import (
    DTYPES,
    Global,
    Opaque,
    StoredTensor,
    is_shape,
    load_pickle,
    read_torch_file,
)
from cluster.errors import BrokenCheckpointFile, ConvertError
from storage.problems import MAX_LISTED, Problems, quote
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, read_bytes

METADATA_KEY = ".metadata"
MAX_METADATA_BYTES = 256 << 20
_READERS = 16  # chunks whose headers are read at once
_MAX_NAME = 1024  # characters of a path to a file or to a tensor

_METADATA = "torch.distributed.checkpoint.metadata."
_PLANNER = "torch.distributed.checkpoint.planner."
ALLOWED = (
    *(_METADATA + name for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "MetadataIndex")),
    *(_METADATA + name for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(_PLANNER + name for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
)


@dataclass(frozen=True, slots=True)
class _Chunk:
    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    within: ByteRange


def read_metadata(
    store: ObjectStore, listing: Mapping[str, ObjectInfo], folder: str, *, allowed: Collection[str] = ()
) -> Any:
    """Return the objects in `.metadata` of a folder, as stubs.

    Args:
        store: The store of the checkpoint.
        listing: All objects below its root, by key.
        folder: The folder with `.metadata`, "" or with a slash at its end.
        allowed: Names of globals that it may have besides those of torch.

    Raises:
        UnsafePickle: It names code that no checkpoint needs.
        BrokenCheckpointFile: It is not what torch writes.
    """
    key = folder + METADATA_KEY
    size_bytes = listing[key].size_bytes
    if size_bytes > MAX_METADATA_BYTES:
        raise BrokenCheckpointFile(f"{quote(key)} has {size_bytes} bytes; at most {MAX_METADATA_BYTES} are read")
    return load_pickle(
        read_bytes(store, key, ByteRange(0, size_bytes), etag=listing[key].etag), file=key, allowed=(*ALLOWED, *allowed)
    )


def read_tensors(
    store: ObjectStore,
    listing: Mapping[str, ObjectInfo],
    folder: str,
    problems: Problems,
    *,
    wanted: Callable[[str], bool] = lambda name: True,
    allowed: Collection[str] = (),
    metadata: Any = None,
) -> list[SourceTensor]:
    """Return the tensors of a distributed checkpoint.

    Args:
        store: The store of the checkpoint.
        listing: All objects below its root, by key.
        folder: The folder with `.metadata`, "" or with a slash at its end.
        problems: Gets a sentence for each file and chunk that is missing or broken, and each that is not what the
            metadata says.
        wanted: Returns whether a tensor of this name is needed. The others are not looked at.
        allowed: Names of globals that `.metadata` may have besides those of torch.
        metadata: What `read_metadata` returned. None: it is read here.

    Returns:
        The tensors, in the order of the metadata. Offsets of their pieces are in the `.distcp` files.

    Raises:
        UnsafePickle: `.metadata` or a chunk names code that no checkpoint needs.
        BrokenCheckpointFile: `.metadata` is not what torch writes.
        StoreError: The store did not answer.
    """
    key = folder + METADATA_KEY
    if metadata is None:
        metadata = read_metadata(store, listing, folder, allowed=allowed)
    try:
        named, chunks = _parse(metadata, folder, listing, wanted, problems)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as exc:
        problem = f"{quote(key)} is not the metadata of a distributed checkpoint: {quote(str(exc))}"
        raise BrokenCheckpointFile(problem) from exc
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in named}

    def look(chunk: _Chunk) -> Any:
        try:
            return read_torch_file(store, chunk.file, within=chunk.within)
        except BrokenCheckpointFile as error:
            return error

    with ThreadPoolExecutor(_READERS) as pool:
        for chunk, found in zip(chunks, pool.map(look, chunks), strict=True):
            dtype, _ = named[chunk.tensor]
            if isinstance(found, BrokenCheckpointFile):
                problems.add(f"{quote(chunk.tensor)} at {chunk.start} cannot be read: {found.message}")
                continue
            if not isinstance(found, StoredTensor) or (found.dtype, found.shape) != (dtype, chunk.shape):
                have = f"{found.dtype} {found.shape}" if isinstance(found, StoredTensor) else type(found).__name__
                problems.add(f"{quote(chunk.tensor)} at {chunk.start} is {have}, but should be {dtype} {chunk.shape}")
                continue
            piece = StoredPiece(chunk.file, found.offset_bytes, chunk.start, chunk.shape, found.strides)
            pieces[chunk.tensor].append(piece)
    return [SourceTensor(name, dtype, shape, tuple(pieces[name])) for name, (dtype, shape) in named.items()]


def _parse(
    metadata: Any, folder: str, listing: Mapping[str, ObjectInfo], wanted: Callable[[str], bool], problems: Problems
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], list[_Chunk]]:
    """Return (dtype, shape) of each tensor, and the places of all chunks. Raises ValueError and its like."""
    named: dict[str, tuple[str, tuple[int, ...]]] = {}
    expected: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    stored, chunk_count = metadata.state["storage_data"], 0
    for name, entry in metadata.state["state_dict_metadata"].items():
        is_tensor = isinstance(entry, Opaque) and entry.name.endswith(".TensorStorageMetadata")
        if not is_tensor or not isinstance(name, str) or not wanted(name):
            continue
        named[name] = (_dtype(entry.state["properties"]), _box(entry.state["size"]))
        chunk_count += len(entry.state["chunks"])  # tensors may share a list, so not all of them are looked at
        if chunk_count > len(stored) + MAX_LISTED:
            raise ValueError(f"it has more chunks than the {len(stored)} that are stored")
        for chunk in entry.state["chunks"]:
            expected[name, _box(chunk.state["offsets"])] = _box(chunk.state["sizes"])
    chunks = []
    lacking: dict[str, list[str]] = {}  # file that is missing or cut short -> tensors of which it should have a part
    for index, info in stored.items():
        name, offset = index.state["fqn"], index.state.get("offset")  # an object has none
        if not isinstance(name, str) or name not in named:
            continue
        path = info.state["relative_path"]
        if not isinstance(path, str) or len(path) > _MAX_NAME:
            raise ValueError("the path of a file is missing, or too long")
        if info.state.get("transform_descriptors"):
            problems.add(f"{quote(name)} is stored compressed or encrypted, so its numbers have no place in a file")
            expected.pop((name, _box(offset) if offset is not None else (0,) * len(named[name][1])), None)
            continue
        start = _box(offset) if offset is not None else (0,) * len(named[name][1])
        shape = expected.pop((name, start), None)
        file, first, length = folder + path, info.state["offset"], info.state["length"]
        there = listing.get(file)
        inside = type(first) is int and type(length) is int and first >= 0 and length >= 0
        if shape is None:
            problems.add(f"{quote(name)} has a chunk at {start} that its list of chunks lacks, or two")
        elif there is None or not inside or first + length > there.size_bytes:
            lacking.setdefault(file, []).append(name)
        else:
            _check_box(name, start, shape, named[name][1])
            chunks.append(_Chunk(name, start, shape, file, ByteRange(first, first + length)))
    for file, names in lacking.items():
        part = f"part of {quote(names[0])}" + (f" and those of {len(names) - 1} more" if len(names) > 1 else "")
        if file in listing:
            problems.add(f"{quote(file)} has {listing[file].size_bytes} bytes, and the {part} ends beyond them")
        else:
            problems.add(f"{quote(file)} is missing; it has a {part}")
    for (name, start), shape in expected.items():
        problems.add(f"{quote(name)} has no place for its chunk of {shape} at {start}")
    return named, chunks


def _dtype(properties: Opaque) -> str:
    """Return the dtype of a tensor's properties, which pickle as a tuple or by name."""
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(dtype, Global):
        raise ValueError("a dtype is missing")
    return DTYPES[dtype.name.removeprefix("torch.")]


def _box(counts: Any) -> tuple[int, ...]:
    if not is_shape(counts):
        raise ValueError("a shape is missing, or too large")
    return tuple(counts)


def _check_box(name: str, start: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """Raise ValueError unless a box is inside a tensor."""
    inside = len(start) == len(shape) == len(whole)
    if not inside or any(one + size > end for one, size, end in zip(start, shape, whole, strict=True)):
        raise ValueError(f"{quote(name)} of shape {whole} has a chunk of {shape} at {start}")


# The model in it

DCP = "torch DCP"
_MAX_PATH = 64  # keys around a tensor
# Where the checkpoint was written. Nobody needs it.
_PATHS_ALLOWED = (
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
)
_AROUND = ("app", "state")  # keys that scripts put around model and optimizer
_OTHER = re.compile(
    r"(?:.*_)?optim(?:izers?)?(?:_.*|[0-9]*)|(?:lr_)?schedulers?|dataloader|train_state|ema|rng", re.IGNORECASE
)
_MODEL_FOLDER = re.compile(r"(?:.*/)?(?:pytorch_model_fsdp_[0-9]+|model|pytorch_model)/")


def folders(listing: Mapping[str, ObjectInfo]) -> list[str]:
    """Return the folders with a `.metadata`, each "" or with a slash at its end."""
    return sorted(
        key.removesuffix(METADATA_KEY) for key in listing if key == METADATA_KEY or key.endswith(f"/{METADATA_KEY}")
    )


def recognise(listing: Mapping[str, ObjectInfo]) -> bool:
    """Return whether a listing has a folder of DCP."""
    return bool(folders(listing))


def read(store: ObjectStore, listing: Mapping[str, ObjectInfo]) -> Source:
    """Return a folder of DCP as a source.

    Args:
        store: The store, with the folder as its root, or one around it (as Accelerate writes it).
        listing: All objects below its root, by key.

    Returns:
        The model's tensors.

    Raises:
        ConvertError: The folder is not complete, or several keys could be the model's; the message lists every problem.
        UnsafePickle: A pickle names code that no checkpoint needs.
        StoreError: The store did not answer.
    """
    folder = _choose(store, listing)
    metadata = read_metadata(store, listing, folder, allowed=_PATHS_ALLOWED)
    names = model_names(_paths(metadata, folder + METADATA_KEY))
    if not names:
        raise ConvertError(f"{store.uri} has no tensors of a model", hint="name the folder with the model's weights")
    problems = Problems()
    found: dict[str, SourceTensor] = {}
    for tensor in read_tensors(store, listing, folder, problems, wanted=names.__contains__, metadata=metadata):
        name = names[tensor.name]
        if name in found:
            problems.add(f"{quote(name)} is there under two keys")
        found[name] = replace(tensor, name=name)
    if problems:
        raise refused(store, DCP, problems)
    return Source(DCP, tuple(found.values()), other_files(listing, folder))


def _choose(store: ObjectStore, listing: Mapping[str, ObjectInfo]) -> str:
    found = folders(listing)
    if "" in found:
        return ""
    models = [folder for folder in found if _MODEL_FOLDER.fullmatch(folder)] if len(found) > 1 else found
    if len(models) == 1:
        return models[0]
    choices = ", ".join(quote(folder.rstrip("/")) for folder in found[:8])
    raise ConvertError(f"{store.uri} has {len(found)} checkpoints of torch DCP", hint=f"name one of: {choices}")


def _paths(metadata: Any, key: str) -> dict[str, tuple[str, ...]]:
    """Return the keys in the nested dict of training for each tensor. Raises BrokenCheckpointFile."""
    try:
        entries, planned = metadata.state["state_dict_metadata"], metadata.state.get("planner_data")
        found = {}
        for name, entry in entries.items():
            if isinstance(entry, Opaque) and entry.name.endswith(".TensorStorageMetadata") and isinstance(name, str):
                path = planned.get(name) if isinstance(planned, dict) else None
                keys = path if isinstance(path, tuple) and len(path) <= _MAX_PATH else ()
                good = bool(keys) and all(isinstance(one, str) or type(one) is int for one in keys)
                good = good and sum(len(one) if isinstance(one, str) else one.bit_length() for one in keys) <= _MAX_NAME
                found[name] = tuple(map(str, keys)) if good else (name,)
    except (AttributeError, KeyError, TypeError) as exc:
        raise BrokenCheckpointFile(f"{quote(key)} is not the metadata of a distributed checkpoint") from exc
    return found


def model_names(paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the name in the model for each tensor of the checkpoint that belongs to it.

    A key around the model goes: one that is usual for models, or the only one that is not of another state.

    Args:
        paths: Name in the checkpoint -> keys in the nested dict, or the name alone where the checkpoint has no others.

    Raises:
        ConvertError: Several keys could be the model's. The message names them.
    """
    usual = False  # the keys that are gone end with one that is usual for models
    while True:
        paths = {
            name: path
            for name, path in paths.items()
            if (usual and len(path) == 1) or not _OTHER.fullmatch(path[0].partition(".")[0])
        }
        keys = {path[0] for path in paths.values() if len(path) > 1}
        flat = [name for name, path in paths.items() if len(path) == 1]
        known = [key for key in MODEL_KEYS if key in keys]
        known = known or sorted(
            {path[0] for path in paths.values() if len(path) > 2 and path[0] in _AROUND and path[1] in MODEL_KEYS}
        )
        if not keys or (usual and (flat or not known)):
            return {name: clean_name(".".join(path)) for name, path in paths.items()}
        chosen = known or sorted(keys)
        if len(chosen) > 1 or (flat and not known):
            found = [*map(quote, chosen), *([f"none ({quote(flat[0])}...)"] if flat and not known else [])]
            raise ConvertError(
                f"tensors are under several keys, and any of them could be the model's: {Problems(found)}",
                hint=f"save the model alone or under the key {quote(MODEL_KEYS[0])}, or make a file of it: "
                "dcp_to_torch_save(FOLDER, 'all.pt'), then torch.save(torch.load('all.pt')[KEY], 'model.pt')",
            )
        usual = chosen[0] in MODEL_KEYS
        paths = {name: path[1:] for name, path in paths.items() if len(path) > 1 and path[0] == chosen[0]}
