"""Folders of torch's distributed checkpoint (DCP), as FSDP, Accelerate and torchtitan write them.

    .metadata              a pickle: name, dtype, shape and boxes of each tensor, and where each box is stored
    __0_0.distcp           items one after another, each a file of `torch.save` of its own

Names in the files are those of a nested dict of training. Without the keys around the model (`model`, which Accelerate
and most scripts use, `app`), they are the model's. What is not part of the model is left out and never read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cluster.converting.rank_files import clean_name, refused
from cluster.converting.source import Source, SourceTensor, StoredPiece, other_files
from cluster.converting.torch_files import DTYPES, Global, Opaque, StoredTensor, load_pickle, read_torch_file
from cluster.errors import BrokenCheckpointFile, ConvertError
from storage.checkpoints.safetensors_header import MAX_DIMENSIONS, MAX_ELEMENTS
from storage.errors import StoreError
from storage.problems import Problems, quote
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, check_key, read_bytes

DCP = "torch DCP"
METADATA = ".metadata"
MAX_METADATA_BYTES = 256 << 20
_READERS = 16  # items whose pickles are read at once
_M = "torch.distributed.checkpoint.metadata."
ALLOWED = (
    *(
        f"{_M}{name}"
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "builtins.getattr",
    "__builtin__.getattr",
)
_AROUND = ("app", "state")  # keys that scripts put around model and optimizer
_MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")
_OTHERS = ("optimizer", "optim", "lr_scheduler", "scheduler", "dataloader", "train_state", "optimizers", "ema")
_FOLDER = re.compile(r"(?:.*/)?(?:pytorch_model_fsdp_[0-9]+|model|pytorch_model)/")


@dataclass(frozen=True)
class Item:
    """A box of a tensor and the item of a file that has it."""

    name: str  # in the checkpoint
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    place: ByteRange


@dataclass(frozen=True)
class Described:
    """A tensor as `.metadata` describes it."""

    name: str  # in the checkpoint
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # (start, shape)


def folders(listing: Mapping[str, ObjectInfo]) -> list[str]:
    """Return the folders with a `.metadata`, each "" or with a slash at its end."""
    return sorted(key.removesuffix(METADATA) for key in listing if key == METADATA or key.endswith("/" + METADATA))


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
        ConvertError: The folder is not complete; the message lists every problem.
        UnsafePickle: A pickle names code that no checkpoint needs.
        StoreError: The store did not answer.
    """
    folder = _choose(store, listing)
    problems = Problems()
    described, items, paths = read_metadata(store, listing, folder, problems)
    if problems:
        raise refused(store, DCP, problems)
    names = model_names({name: paths.get(name) for name in described})
    if not names:
        raise ConvertError(f"{store.uri} has no tensors of a model", hint=f"it has {len(described)} tensors of others")
    wanted = [item for item in items if item.name in names]
    tensors = {name: described[name] for name in names}
    pieces = open_items(store, wanted, tensors, problems)
    found: dict[str, SourceTensor] = {}
    for name, short in names.items():
        if short in found:
            problems.add(f"{quote(short)} is there under two keys")
        one = tensors[name]
        found[short] = SourceTensor(short, one.dtype, one.shape, tuple(pieces[name]))
    if problems:
        raise refused(store, DCP, problems)
    return Source(DCP, tuple(found.values()), other_files(listing, folder))


def _choose(store: ObjectStore, listing: Mapping[str, ObjectInfo]) -> str:
    found = folders(listing)
    if "" in found:
        return ""
    models = [folder for folder in found if _FOLDER.fullmatch(folder)] if len(found) > 1 else found
    if len(models) == 1:
        return models[0]
    choices = ", ".join(quote(folder.rstrip("/")) for folder in found[:8])
    raise ConvertError(f"{store.uri} has {len(found)} checkpoints of torch DCP", hint=f"name one of: {choices}")


def read_metadata(
    store: ObjectStore,
    listing: Mapping[str, ObjectInfo],
    folder: str,
    problems: Problems,
    *,
    allowed: Sequence[str] = (),
) -> tuple[dict[str, Described], list[Item], Mapping[str, tuple[Any, ...]]]:
    """Return what `.metadata` of a folder says.

    Args:
        store: The store.
        listing: All objects below its root, by key.
        folder: The folder, "" or with a slash at its end.
        problems: Gets a sentence for each thing that is missing or malformed.
        allowed: Further names of globals that may be in the pickle.

    Returns:
        The tensors by name, the items of their boxes, and the path in the nested dict for each name.

    Raises:
        BrokenCheckpointFile: The file is not a `.metadata` of torch.
        UnsafePickle: It names code that no checkpoint needs.
    """
    key = f"{folder}{METADATA}"
    size_bytes = listing[key].size_bytes
    if size_bytes > MAX_METADATA_BYTES:
        raise ConvertError(f"{quote(key)} has {size_bytes} bytes; at most {MAX_METADATA_BYTES} are read")
    data = read_bytes(store, key, ByteRange(0, size_bytes))
    found = load_pickle(data, file=key, allowed=(*ALLOWED, *allowed))
    try:
        fields = _state(found, "Metadata")
        described = {
            name: _described(name, one)
            for name, one in fields["state_dict_metadata"].items()
            if isinstance(name, str) and isinstance(one, Opaque) and one.name.endswith(".TensorStorageMetadata")
        }
        boxes = {name: dict(one.boxes) for name, one in described.items()}
        items = []
        for index, info in fields["storage_data"].items():
            place = _state(index, "MetadataIndex")
            if place["fqn"] in described:
                items.append(_item(place, _state(info, "_StorageInfo"), boxes[place["fqn"]], folder))
        planned = fields.get("planner_data")
    except (KeyError, TypeError, AttributeError, ValueError, StoreError) as error:
        raise BrokenCheckpointFile(
            f"{quote(key)} is not as torch writes it: {quote(str(error))}", hint="copy the folder again"
        ) from error
    _check_items(items, described, listing, problems)
    paths = planned if isinstance(planned, dict) else {}
    return described, items, {name: path for name, path in paths.items() if isinstance(path, tuple)}


def model_names(paths: Mapping[str, tuple[Any, ...] | None]) -> dict[str, str]:
    """Return the name in the model for each tensor of the checkpoint that belongs to it.

    Args:
        paths: Name in the checkpoint -> path in the nested dict; None: the checkpoint does not say it.
    """
    known: dict[str, tuple[str, ...]] = {}
    for name, path in paths.items():
        parts = tuple(str(one) for one in path) if path else (name,)
        known[name] = parts[1:] if len(parts) > 2 and parts[0] in _AROUND else parts
    keys = {parts[0] for parts in known.values() if len(parts) > 1}
    model = next((key for key in _MODEL_KEYS if key in keys), None)
    found = {}
    for name, parts in known.items():
        if model is not None:
            if len(parts) > 1 and parts[0] == model:
                found[name] = clean_name(".".join(parts[1:]))
        elif parts[0].partition(".")[0] not in _OTHERS:
            found[name] = clean_name(".".join(parts))
    return found


def _state(made: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(made, Opaque) or not made.name.endswith(f".{kind}"):
        raise ValueError(f"there is no {kind}")
    state = made.state
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = state[1]
    if not isinstance(state, dict):
        raise ValueError(f"a {kind} without fields")
    return state


def _shape(value: Any) -> tuple[int, ...]:
    shape = tuple(value)
    total = 1
    for one in shape:
        if type(one) is not int or one < 0:
            raise ValueError("a shape of what are no sizes")
        total *= max(one, 1)
    if len(shape) > MAX_DIMENSIONS or total > MAX_ELEMENTS:
        raise ValueError("a shape that is too large")
    return shape


def _described(name: str, one: Opaque) -> Described:
    fields = _state(one, "TensorStorageMetadata")
    properties = fields["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, Global):
        raise ValueError("a tensor without a dtype")
    whole = _shape(fields["size"])
    boxes = []
    for chunk in fields["chunks"]:
        box = _state(chunk, "ChunkStorageMetadata")
        start, shape = _shape(box["offsets"]), _shape(box["sizes"])
        inside = len(start) == len(shape) == len(whole)
        if not inside or any(at + size > end for at, size, end in zip(start, shape, whole, strict=True)):
            raise ValueError(f"a box of {name} outside its shape {whole}")
        boxes.append((start, shape))
    return Described(name, DTYPES[dtype.name.removeprefix("torch.")], whole, tuple(boxes))


def _item(
    index: Mapping[str, Any], info: Mapping[str, Any], boxes: Mapping[tuple[int, ...], tuple[int, ...]], folder: str
) -> Item:
    if info.get("transform_descriptors"):
        raise ValueError("items that are compressed or encrypted, which cannot be read in ranges")
    offset = index.get("offset")
    start = _shape(offset) if offset is not None else next(iter(boxes), ())  # without offset: one box
    if start not in boxes:
        raise ValueError(f"an item of {index['fqn']} at {start}, where no box begins")
    relative, first, length = info["relative_path"], info["offset"], info["length"]
    if not isinstance(relative, str) or type(first) is not int or type(length) is not int or min(first, length) < 0:
        raise ValueError("an item without a place")
    return Item(index["fqn"], start, boxes[start], check_key(f"{folder}{relative}"), ByteRange(first, first + length))


def _check_items(
    items: Sequence[Item], described: Mapping[str, Described], listing: Mapping[str, ObjectInfo], problems: Problems
) -> None:
    missing = sorted({item.file for item in items if item.file not in listing})
    for file in missing:
        problems.add(f"the file {quote(file)} is missing")
    for item in items:
        if item.file in listing and item.place.end > listing[item.file].size_bytes:
            problems.add(f"{quote(item.file)} is cut short: {quote(item.name)} is at {item.place}")
    stored = {(item.name, item.start) for item in items}
    for one in described.values():
        for start, shape in one.boxes:
            if 0 not in shape and (one.name, start) not in stored:
                problems.add(f"no file has the part of {quote(one.name)} at {start}")


def open_items(
    store: ObjectStore, items: Sequence[Item], tensors: Mapping[str, Described], problems: Problems
) -> dict[str, list[StoredPiece]]:
    """Return the pieces of each tensor, after the pickle of every item was read.

    Args:
        store: The store.
        items: The items to read. Of several with the same box of a tensor the first counts.
        tensors: The tensors that they belong to, by name.
        problems: Gets a sentence for each item that is not what the metadata says.
    """

    def unpickled(item: Item) -> Any:
        return read_torch_file(store, item.file, within=item.place)

    pieces: dict[str, list[StoredPiece]] = {name: [] for name in tensors}
    seen: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
    wanted = []
    for item in items:
        box = (item.name, item.start, item.shape)
        if 0 not in item.shape and box not in seen:  # replicas are stored once
            seen.add(box)
            wanted.append(item)
    with ThreadPoolExecutor(_READERS) as pool:
        for item, tensor in zip(wanted, pool.map(unpickled, wanted), strict=True):
            expected = tensors[item.name]
            if not isinstance(tensor, StoredTensor) or (tensor.dtype, tensor.shape) != (expected.dtype, item.shape):
                problems.add(f"{quote(item.file)} at {item.place} has not the part of {quote(item.name)}")
                continue
            pieces[item.name].append(
                StoredPiece(item.file, tensor.offset_bytes, item.start, item.shape, tensor.strides)
            )
    return pieces
