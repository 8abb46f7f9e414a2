"""What a checkpoint's files say of themselves: shards by name, headers in parallel, tensors by the index.

Only names, headers and JSON are read; every one of them is checked before it is believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from storage.checkpoints.amax import AMAX_KEY
from storage.checkpoints.hf_layout import (
    INDEX_KEY,
    MAX_INDEX_BYTES,
    SINGLE_KEY,
    SUFFIX,
    assign_tensors,
    choose_layout,
    is_pickle,
    parse_weight_map,
)
from storage.checkpoints.inventory import MAX_LISTED, Inventory, map_threads
from storage.checkpoints.manifest import MANIFEST_KEY
from storage.checkpoints.manifest_fields import is_safe_path
from storage.checkpoints.model_index import Tensor
from storage.checkpoints.safetensors_header import Header, read_head
from storage.errors import InvalidHeader, InvalidIndex, NotACheckpoint
from storage.object_checksum import AskedChecksum, ask_checksum
from storage.object_store import LeavesOut, ObjectInfo, ObjectStore, read_bytes
from storage.problems import Problems, quote
from storage.publishing.signature import SIGNATURE_KEY
from storage.ranges import ByteRange
from storage.retrying import RetryPolicy, with_retries

JOURNAL_KEY = "longshore.publish.json"  # of a publish under way
PROBE_KEY = "longshore.publish.probe"  # tells whether source and destination are one place; there for a moment
OWN_KEYS = frozenset({MANIFEST_KEY, SIGNATURE_KEY, AMAX_KEY, JOURNAL_KEY, PROBE_KEY})
COMMON_FILES = (  # asked for by name where a store cannot list
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as its files describe themselves."""

    shards: tuple[ObjectInfo, ...]  # by key
    headers: tuple[Header, ...]  # one for each shard
    tensors: tuple[Tensor, ...]  # by shard, start, end, name
    files: tuple[ObjectInfo, ...]  # everything else that belongs to the model, by key
    skipped: tuple[str, ...]  # weights that are not part of it, and files with names that no manifest can have
    checksums: tuple[AskedChecksum, ...] = ()  # of each shard, when they were asked for


def scan_checkpoint(
    store: ObjectStore,
    *,
    only_key: str | None = None,
    policy: RetryPolicy | None = None,
    inventory: Inventory | None = None,
    checksum_chunk_bytes: int = 0,
) -> Checkpoint:
    """The checkpoint as the files themselves describe it, whether there is a manifest or not.

    `checksum_chunk_bytes`: ask the store for its own checksums, by which chunks of that size can be checked.
    """
    policy = policy or RetryPolicy()
    inventory = inventory or Inventory(store, policy)
    known = candidates(inventory, only_key)
    weight_map: dict[str, str] | None = None
    if only_key is not None:
        if only_key not in known:
            raise NotACheckpoint("no such file", uri=store.uri, key=only_key)
        keys: tuple[str, ...] = (only_key,)
    else:
        layout = choose_layout(known.keys() - OWN_KEYS, where=store.uri)
        keys = layout.shard_keys
        if layout.index_key is not None:
            weight_map = read_index(store, known[layout.index_key], policy)
            keys = tuple(sorted(set(weight_map.values())))
    shards = _all_there(inventory.find(keys), keys, store.uri)
    headers, checksums = _read_headers(store, shards, policy, checksum_chunk_bytes)
    try:
        tensors = assign_tensors(keys, dict(zip(keys, headers, strict=True)), weight_map)
    except InvalidIndex as error:
        raise error.with_details(uri=store.uri) from None
    others = [info for key, info in known.items() if key not in OWN_KEYS and key not in keys]
    skipped = sorted(
        info.key
        for info in others
        if is_pickle(info.key) or (info.key.endswith(SUFFIX) and "/" not in info.key) or not is_safe_path(info.key)
    )
    files = sorted((i for i in others if i.key not in set(skipped)), key=lambda info: info.key)
    return Checkpoint(shards, headers, tensors, tuple(files), tuple(skipped), checksums)


def candidates(inventory: Inventory, only_key: str | None) -> dict[str, ObjectInfo]:
    """All that is known to be there: the listing, or those of the usual names that exist.

    Raises AccessDenied when nothing may be listed and nothing can be read.
    """
    if inventory.listed is not None:
        return inventory.listed
    found = inventory.find([INDEX_KEY, SINGLE_KEY, *COMMON_FILES, *([only_key] if only_key else [])])
    if not found and inventory.denied is not None:
        raise inventory.denied
    return found


def names_left_out(store: ObjectStore, policy: RetryPolicy) -> tuple[str, ...]:
    """What is below the root and cannot be an object, where the store can tell. Raises StoreError."""
    if not isinstance(store, LeavesOut):
        return ()
    return tuple(sorted(with_retries(lambda: list(islice(store.left_out(), MAX_LISTED)), policy)))


def read_index(store: ObjectStore, info: ObjectInfo, policy: RetryPolicy) -> dict[str, str]:
    """Tensor name -> shard key of the stored index. Raises InvalidIndex."""
    if info.size_bytes > MAX_INDEX_BYTES:
        raise InvalidIndex(
            f"index of {info.size_bytes} bytes; at most {MAX_INDEX_BYTES} are read",
            uri=store.uri,
            key=info.key,
        )
    try:
        return parse_weight_map(read_whole(store, info, policy))
    except InvalidIndex as error:
        raise error.with_details(uri=store.uri, key=info.key) from None


def _all_there(found: Mapping[str, ObjectInfo], keys: Iterable[str], uri: str) -> tuple[ObjectInfo, ...]:
    missing = Problems(quote(key) for key in keys if key not in found)
    if missing:
        raise InvalidIndex(
            f"the index names shards that are not there: {missing}",
            hint="the upload is not complete, or the index is stale",
            uri=uri,
        )
    return tuple(found[key] for key in keys)


def _read_headers(
    store: ObjectStore, shards: Sequence[ObjectInfo], policy: RetryPolicy, checksum_chunk_bytes: int
) -> tuple[tuple[Header, ...], tuple[AskedChecksum, ...]]:
    """Every header, in parallel, and what the store says of each shard, if it is to be asked.

    Raises one InvalidHeader for all that are broken.
    """

    def read(info: ObjectInfo) -> tuple[Header, AskedChecksum | None] | InvalidHeader:
        try:
            header, data = with_retries(lambda: read_head(store, info.key, info.size_bytes, etag=info.etag), policy)
        except InvalidHeader as error:
            return error
        if not checksum_chunk_bytes:
            return header, None
        return header, ask_checksum(store, info, checksum_chunk_bytes, policy).knowing(data)

    results = map_threads(read, shards)
    errors = [result for result in results if isinstance(result, InvalidHeader)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise InvalidHeader(f"{len(errors)} shards: {Problems(map(str, errors))}", uri=store.uri)
    read_well = [result for result in results if not isinstance(result, InvalidHeader)]
    asked = tuple(checksum for _, checksum in read_well if checksum is not None)
    return tuple(header for header, _ in read_well), asked


def read_whole(store: ObjectStore, info: ObjectInfo, policy: RetryPolicy) -> bytes:
    """A small object, of the version that `info` describes."""
    return with_retries(lambda: read_bytes(store, info.key, ByteRange(0, info.size_bytes), etag=info.etag), policy)
