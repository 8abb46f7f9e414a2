"""The formats that a conversion reads, recognised by the files that are there.

    listing of the source --> the first format in FORMATS that recognises it --> Source

A format looks at names first and reads no weights. Each is a module of its own. Safetensors files are read here.

    model.safetensors.index.json                          names the files
    model-00001-of-00002.safetensors                      a set without an index: one stem, one total
    shard-00001-model-00001-of-00001.safetensors          the same of torch's HuggingFaceStorageWriter, for each rank
    model.safetensors, or another file that is alone

Other safetensors files beside them may be an optimizer, an adapter or a copy. So they are refused, and those of other
folders are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.converting import dcp, deepspeed, megatron, rank_files
from cluster.converting.source import PinnedStore, Source, SourceTensor, StoredPiece, other_files, read_each
from cluster.errors import ConvertError
from storage.checkpoints.checkpoint_files import (
    HEADERS_KEY,
    INDEX_KEY,
    SINGLE_KEY,
    SUFFIX,
    THREADS,
    parse_weight_map,
)
from storage.checkpoints.safetensors_header import MAX_ELEMENTS, Header, HeaderTensor, read_head
from storage.errors import InvalidIndex
from storage.problems import MAX_LISTED, Problems, quote
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, read_bytes
from storage.stores.requests import RetryPolicy

Listing = Mapping[str, ObjectInfo]
SAFETENSORS = "safetensors"
SHARDING_KEY = "DCP_SHARDING_INFO"  # of torch's HuggingFaceStorageWriter, in the header's metadata
_MAX_INDEX_BYTES = 64 << 20
_ONE_OF_SET = re.compile(r"(?:shard-[0-9]+-)?(.+)-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors")


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    name: str
    looks_like: str  # the files by which it is recognised, for messages
    recognise: Callable[[Listing], bool]
    read: Callable[[ObjectStore, Listing], Source]


def find_source(store: ObjectStore, only_key: str | None = None) -> tuple[Source, dict[str, ObjectInfo]]:
    """Recognise the checkpoint at the root of a store, and describe it.

    Args:
        store: Root of the source.
        only_key: Use this file alone, and copy no others.

    Returns:
        The source, and the objects that were listed, by key.

    Raises:
        ConvertError: No format is recognised, or the checkpoint is not whole. Problems are listed.
        UnsafePickle: A file names code that no checkpoint needs.
        StoreError: The store did not answer, after retries. ObjectChanged: a file was replaced meanwhile.
    """
    store = PinnedStore(store, RetryPolicy())
    infos = store.list() if only_key is None else [store.stat(only_key)]
    listing = {info.key: info for info in infos}
    for one in FORMATS:
        if one.recognise(listing):
            return one.read(store, listing), listing
    known = "; ".join(f"{one.name} ({one.looks_like})" for one in FORMATS)
    raise ConvertError(f"no checkpoint of a known format is at {quote(store.uri)}", hint=f"known are: {known}")


def recognise(listing: Listing) -> bool:
    """Return whether a listing has safetensors files. Those of a subfolder do not hide a state dict in the root."""
    shards = _shards(listing)
    in_root = INDEX_KEY in listing or any("/" not in key for key in shards)
    return bool(shards) and (in_root or not rank_files.recognise_files(listing))


def read(store: ObjectStore, listing: Listing) -> Source:
    """Return safetensors files as a source: whole tensors, or the parts of torch's HuggingFaceStorageWriter.

    Args:
        store: The store, with the folder of the files as its root, or one around it.
        listing: All objects below its root, by key.

    Raises:
        ConvertError: Files are missing, or are not all of one model, or a tensor is in two of them; the message lists
            every problem.
        StoreError: The store did not answer.
    """
    problems = Problems()
    folder = _folder(store, listing)
    wanted: dict[str, str] = {}
    if folder + INDEX_KEY in listing:
        wanted = _weight_map(store, listing, folder)
        keys = sorted(set(wanted.values()))
        for key in keys:
            if key not in listing:
                problems.add(f"the file {quote(key)}, which {INDEX_KEY} names, is missing")
    else:
        keys = _one_set(store, listing, folder, problems)

    def head(key: str) -> tuple[Header, dict[str, tuple[int, ...]]]:
        header = read_head(store, key, listing[key].size_bytes, etag=listing[key].etag)[0]
        return header, _saved_offsets(header, key)

    parts: dict[str, list[tuple[HeaderTensor, StoredPiece]]] = {}
    heads, broken = read_each(head, [key for key in keys if key in listing], problems, THREADS)
    for key, (header, offsets) in heads.items():
        for tensor in header.tensors:
            if not wanted or wanted.get(tensor.name) == key:
                start = offsets.get(tensor.name, (0,) * len(tensor.shape))
                piece = StoredPiece(key, tensor.start, start, tensor.shape)
                parts.setdefault(tensor.name, []).append((tensor, piece))
    for name, key in wanted.items():
        if key in heads and name not in parts:
            problems.add(f"{quote(name)} is not in {quote(key)}, which {INDEX_KEY} names")
    found = [_joined(name, some, problems) for name, some in parts.items()]
    if problems:
        raise rank_files.refused(store, SAFETENSORS, problems, broken)
    return Source(SAFETENSORS, tuple(found), other_files(listing, folder))


def _shards(listing: Listing) -> list[str]:
    return sorted(key for key in listing if key.endswith(SUFFIX) and key != HEADERS_KEY)


def _folder(store: ObjectStore, listing: Listing) -> str:
    """Return the folder of the weights, "" or with a slash at its end: the root, or the only one that has any."""
    folders = sorted({key.rpartition("/")[0] for key in _shards(listing)})
    if INDEX_KEY in listing or folders[0] == "":
        return ""
    if len(folders) > 1:
        choices = ", ".join(map(quote, folders[:MAX_LISTED]))
        raise ConvertError(
            f"{store.uri} has safetensors files in {len(folders)} folders, and none beside them",
            hint=f"name the folder of the weights: {choices}",
        )
    return f"{folders[0]}/"


def _one_set(store: ObjectStore, listing: Listing, folder: str, problems: Problems) -> list[str]:
    """Return the files of the one model that a folder without an index has. Raises ConvertError if they are of several.

    Args:
        store: The store, for messages.
        listing: All objects below its root, by key.
        folder: "" or with a slash at its end.
        problems: Gets a sentence for each file that is missing.
    """
    sets: dict[tuple[str, int], list[str]] = {}
    numbers: dict[tuple[str, int], set[int]] = {}
    for key in _shards(listing):
        name = key.removeprefix(folder)
        if key.startswith(folder) and "/" not in name:
            match = _ONE_OF_SET.fullmatch(name)
            model = (match[1], int(match[3])) if match else (name, 1)
            sets.setdefault(model, []).append(key)
            numbers.setdefault(model, set()).add(int(match[2]) if match else 1)
    whole = [model for model in sets if model[0] == SINGLE_KEY] or [model for model in sets if len(sets[model]) > 1]
    chosen = whole[0] if len(whole) == 1 else next(iter(sets))
    others = [quote(key) for model, keys in sets.items() if model != chosen for key in keys]
    if others:
        raise ConvertError(
            f"{store.uri} has no {INDEX_KEY}, and files that do not belong to {quote(sets[chosen][0])}: "
            f"{Problems(others)}",
            hint="move the files of optimizers, adapters and copies away, or name one file as the source; if all are "
            f"of one model, write {INDEX_KEY}",
            files=len(others),
        )
    missing = chosen[1] - len(numbers[chosen])
    if missing or max(numbers[chosen]) > chosen[1] or 0 in numbers[chosen]:
        problems.add(f"{quote(sets[chosen][0])} is one of {chosen[1]} files, but {len(numbers[chosen])} are there")
    return sets[chosen]


def _weight_map(store: ObjectStore, listing: Listing, folder: str) -> dict[str, str]:
    size_bytes = listing[folder + INDEX_KEY].size_bytes
    if size_bytes > _MAX_INDEX_BYTES:
        raise ConvertError(f"{INDEX_KEY} has {size_bytes} bytes; at most {_MAX_INDEX_BYTES} are read")
    try:
        found = parse_weight_map(read_bytes(store, folder + INDEX_KEY, ByteRange(0, size_bytes)))
        return {name: folder + key for name, key in found.items()}
    except InvalidIndex as error:
        raise ConvertError(f"{INDEX_KEY} is no index: {error.message}", hint=error.hint) from error


def _saved_offsets(header: Header, key: str) -> dict[str, tuple[int, ...]]:
    """Return where the tensors of a file begin in whole ones, if torch's HuggingFaceStorageWriter wrote it."""
    text = (header.metadata or {}).get(SHARDING_KEY)
    if text is None:
        return {}
    dimensions = {tensor.name: len(tensor.shape) for tensor in header.tensors}
    try:
        told: Any = json.loads(text)
        found = {name: tuple(one["saved_offsets"]) for name, one in told.items()}
        for name, start in found.items():
            if len(start) != dimensions.get(name, len(start)) or not all(
                type(one) is int and 0 <= one <= MAX_ELEMENTS for one in start
            ):
                raise ValueError(f"offsets of {name}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConvertError(
            f"{quote(key)} has a malformed {SHARDING_KEY} in its header", hint="copy the file again"
        ) from error
    return found


def _joined(name: str, parts: list[tuple[HeaderTensor, StoredPiece]], problems: Problems) -> SourceTensor:
    """Return the tensor that has these parts. Only their ends say how large it is."""
    first = parts[0][0]
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], StoredPiece] = {}
    for tensor, piece in parts:
        if (tensor.dtype, len(tensor.shape)) != (first.dtype, len(first.shape)):
            problems.add(f"{quote(name)} is {tensor.dtype} in {quote(piece.file)}, elsewhere {first.dtype}")
            return SourceTensor(name, first.dtype, first.shape, ())
        if (piece.start, piece.shape) in boxes:
            other = boxes[piece.start, piece.shape].file
            problems.add(f"{quote(name)} is in {quote(other)} and in {quote(piece.file)}")
        boxes[piece.start, piece.shape] = piece
    shape = tuple(
        max(piece.start[dim] + piece.shape[dim] for piece in boxes.values()) for dim in range(len(first.shape))
    )
    return SourceTensor(name, first.dtype, shape, tuple(boxes.values()))


# Those with files of a kind of their own come first: their folders may have other formats' files, too.
FORMATS: tuple[Format, ...] = (
    Format("DeepSpeed", "*_optim_states.pt, or zero/*/fp32.pt", deepspeed.recognise, deepspeed.read),
    Format(megatron.FORMAT, "metadata.json, common.pt and .metadata", megatron.recognise, megatron.read),
    Format(
        rank_files.FSDP,
        "model_world_size_4_rank_0.pt, *_rank0.bin",
        rank_files.recognise_ranks,
        rank_files.read_ranks,
    ),
    Format(dcp.DCP, ".metadata and __0_0.distcp", dcp.recognise, dcp.read),
    Format(SAFETENSORS, "*.safetensors", recognise, read),
    Format(
        rank_files.PYTORCH, "pytorch_model.bin, *.bin, *.pt, *.pth", rank_files.recognise_files, rank_files.read_files
    ),
)
