"""The files of a checkpoint: the listing of a folder, the choice of its shards, and their headers.

Only names, headers and JSON are read. Each is checked before it is used, because all of it comes from a bucket.

The Hugging Face layout decides by names alone which files of a folder are the model:

    model.safetensors.index.json     the shards it names, and for each tensor the shard that counts
    else model.safetensors           that one file
    else *.safetensors in the root   all of them, except copies in another layout (consolidated*)

Files that are left out are reported.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from storage.checkpoints.amax import AMAX_KEY
from storage.checkpoints.manifest import MANIFEST_KEY, is_safe_path
from storage.checkpoints.model_index import Tensor
from storage.checkpoints.replaced_files import BEFORE_KEY
from storage.checkpoints.safetensors_header import Header, read_head
from storage.checksum import AskedChecksum, ask_checksum
from storage.errors import (
    AccessDenied,
    InvalidHeader,
    InvalidIndex,
    NotACheckpoint,
    ObjectNotFound,
    PickleRefused,
    StoreError,
    UnsupportedStore,
)
from storage.problems import Problems, json_values, quote
from storage.publishing.signing import SIGNATURE_KEY
from storage.stores.object_store import ByteRange, LeavesOut, ObjectInfo, ObjectStore, check_key, read_bytes
from storage.stores.requests import RetryPolicy, with_retries

INDEX_KEY = "model.safetensors.index.json"
SINGLE_KEY = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_INDEX_BYTES = 64 << 20
MAX_JSON_VALUES = 2_000_000  # limits the memory of parsing
MAX_SEEN = 10  # names in the message when nothing can be loaded
PICKLE_HINT = (
    "pickle files run code when they are opened; convert them once, with `safetensors.torch.save_file` or "
    "the Hugging Face `convert` space, and load the result"
)
_NUMBERED = re.compile(r"(.*)-(\d{5,6})-of-(\d{5,6})\.safetensors")


@dataclass(frozen=True, slots=True)
class Layout:
    """The choice of shards: an index that names them, or their keys."""

    index_key: str | None  # the index that names the shards; None if there is none
    shard_keys: tuple[str, ...]  # ascending; empty when an index names them
    skipped: tuple[str, ...]  # safetensors files in the root that are not (or may not be) part of the model, ascending


def choose_layout(keys: Collection[str], *, where: str) -> Layout:
    """Choose what to load of a folder with those keys. `where` is for messages.

    Raises PickleRefused if there are only pickles, NotACheckpoint if there is nothing to load, and InvalidIndex if
    numbered shards are missing or there are several indexes.
    """
    root = sorted(key for key in keys if "/" not in key)
    files = [key for key in root if key.endswith(SUFFIX) and key != HEADERS_KEY]
    indexes = [key for key in root if key.endswith(INDEX_SUFFIX) and not _consolidated(key)]
    if INDEX_KEY in indexes:
        return Layout(INDEX_KEY, (), tuple(files))
    if SINGLE_KEY in files:
        return Layout(None, (SINGLE_KEY,), tuple(key for key in files if key != SINGLE_KEY))
    if len(indexes) == 1:
        return Layout(indexes[0], (), tuple(files))
    if indexes:
        raise InvalidIndex(
            f"several indexes, none of them {INDEX_KEY}: {', '.join(map(quote, indexes[:MAX_SEEN]))}",
            hint="name one .safetensors file in the URI, or keep one variant in the folder",
            uri=where,
        )
    if not files:
        raise _nothing_to_load(keys, where)
    own = [key for key in files if not _consolidated(key)] or files
    if missing := _missing_numbers(own):
        raise InvalidIndex(f"shards are missing: {missing}", hint="upload the missing files", uri=where)
    return Layout(None, tuple(own), tuple(key for key in files if key not in own))


def parse_weight_map(data: bytes, *, pickles: bool = False) -> dict[str, str]:
    """Return {tensor name: shard key} from the JSON of an index. `pickles`: it is one of pickle files.

    Raises InvalidIndex, which lists every problem.
    """
    if len(data) > MAX_INDEX_BYTES:
        raise InvalidIndex(f"the index has {len(data)} bytes; at most {MAX_INDEX_BYTES} are read")
    values = json_values(data)
    if values > MAX_JSON_VALUES:
        raise InvalidIndex(f"the index has some {values} JSON values; at most {MAX_JSON_VALUES} are read")
    problems = Problems()

    def refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                problems.add(f"duplicate name {quote(name)}")
            seen.add(name)
        return dict(pairs)

    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=refuse_duplicates)
    except RecursionError:
        raise InvalidIndex("index is nested too deep") from None
    except ValueError as error:
        raise InvalidIndex(f"index is not JSON: {quote(str(error))}") from error
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidIndex("index has no weight_map")
    refused: set[str] = set()
    for name, key in weight_map.items():
        if not isinstance(key, str):
            problems.add(f"tensor {quote(name)}: file is not a string: {quote(key)}")
        elif key not in refused and (problem := _shard_problem(key, pickles)):
            refused.add(key)
            problems.add(problem)
    if problems:
        raise InvalidIndex(f"invalid index: {problems}", problems=len(problems))
    return weight_map


def assign_tensors(
    shard_keys: tuple[str, ...], headers: Mapping[str, Header], weight_map: Mapping[str, str] | None
) -> tuple[Tensor, ...]:
    """Return the model's tensors, ordered by shard, start, end and name, without copies that the index does not pick.

    Raises InvalidIndex, which lists tensors that are missing, not in the index, or in two shards.
    """
    problems = Problems()
    picked: dict[str, Tensor] = {}
    for number, key in enumerate(shard_keys):
        for found in headers[key].tensors:
            name, dtype, shape, start, end = found
            if weight_map is None:
                if name in picked:
                    first = shard_keys[picked[name].shard]
                    problems.add(f"tensor {quote(name)} is in {quote(first)} and in {quote(key)}")
            elif name not in weight_map:
                problems.add(f"tensor {quote(name)} of {quote(key)} is not in the index")
                continue
            elif weight_map[name] != key:
                continue
            picked[name] = Tensor(name, dtype, shape, number, start, end)
    for name, key in (weight_map or {}).items():
        if name not in picked:
            problems.add(f"tensor {quote(name)} is not in {quote(key)}, although the index says so")
    if problems:
        hint = "name one .safetensors file in the URI to load it alone" if weight_map is None else ""
        raise InvalidIndex(f"files and index disagree: {problems}", hint=hint, problems=len(problems))
    return tuple(picked.values())  # in order, because the tensors of each header are


def is_pickle(key: str) -> bool:
    """Return whether the name is that of a pickle file."""
    return key.lower().endswith(PICKLE_SUFFIXES)


def _consolidated(key: str) -> bool:
    """Return whether the name is one under which Mistral and Meta store the same weights a second time."""
    return key.startswith("consolidated")


def _shard_problem(key: str, pickles: bool) -> str:
    try:
        check_key(key)
    except StoreError:
        return f"hostile path {quote(key)}"
    if pickles or is_pickle(key):
        return "" if pickles else f"{quote(key)} is a pickle file"
    return "" if key.endswith(SUFFIX) else f"{quote(key)} is not a safetensors file"


def _missing_numbers(files: list[str]) -> str:
    """Return a text that counts the missing files of sets like `model-00001-of-00004.safetensors`; "" if complete."""
    groups: dict[tuple[str, int], set[int]] = {}
    for key in files:
        if match := _NUMBERED.fullmatch(key):
            groups.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    problems = Problems(
        f"{quote(stem)} has {len(numbers)} of {count}"
        for (stem, count), numbers in groups.items()
        if len(numbers) < count
    )
    return str(problems)


def _nothing_to_load(keys: Collection[str], where: str) -> NotACheckpoint | PickleRefused:
    pickles = sorted(filter(is_pickle, keys))
    nested = sorted({key.rpartition("/")[0] for key in keys if key.endswith(SUFFIX)})
    if nested:
        return NotACheckpoint(
            f"no safetensors files in the folder itself, but in {', '.join(map(quote, nested[:MAX_SEEN]))}",
            hint="name that folder in the URI",
            uri=where,
        )
    if pickles:
        seen = ", ".join(map(quote, pickles[:MAX_SEEN]))
        return PickleRefused(f"only pickle files: {seen}", hint=PICKLE_HINT, uri=where)
    if not keys:
        return NotACheckpoint("nothing is stored there", hint="check the bucket and the path", uri=where)
    seen = ", ".join(map(quote, sorted(keys)[:MAX_SEEN]))
    return NotACheckpoint(f"no safetensors files; {len(keys)} others: {seen}", uri=where)


MAX_LISTED = 20_000  # a root with more objects is not a model, so its keys are looked up one by one
THREADS = 16

T = TypeVar("T")
R = TypeVar("R")


class Inventory:
    """The objects below a store's root, by listing or by single look-ups."""

    def __init__(self, store: ObjectStore, policy: RetryPolicy) -> None:
        self._store = store
        self._policy = policy
        self.denied: AccessDenied | None = None  # the error if the root may not be listed
        self._lock = threading.Lock()
        self._listing: list[dict[str, ObjectInfo] | None] = []  # has one element once the root was listed

    @property
    def listed(self) -> dict[str, ObjectInfo] | None:
        """Return all objects by key, as the first listing had them; None if the root cannot be listed.

        Raises ObjectNotFound if the root does not exist, StoreUnavailable.
        """
        with self._lock:
            if not self._listing:
                self._listing.append(with_retries(self._list, self._policy))
            return self._listing[0]

    def find(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        """Return those of `keys` that exist, from one listing if the store allows it."""
        if self.listed is not None:
            return {key: self.listed[key] for key in keys if key in self.listed}
        return self.look_up(keys)

    def look_up(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        """Return those of `keys` that exist now, each looked up by name.

        The root is listed only if a key is refused, because S3 also refuses missing keys if listing is not allowed.
        """
        infos = map_threads(self._stat, list(keys))
        return {info.key: info for info in infos if info is not None}

    def _list(self) -> dict[str, ObjectInfo] | None:
        try:
            infos = list(islice(self._store.list(), MAX_LISTED + 1))
        except UnsupportedStore:
            return None
        except AccessDenied as error:
            self.denied = error.with_traceback(None)  # credentials that may read a bucket often may not list it
            return None
        return {info.key: info for info in infos} if len(infos) <= MAX_LISTED else None

    def _stat(self, key: str) -> ObjectInfo | None:
        try:
            return with_retries(lambda: self._store.stat(key), self._policy)
        except ObjectNotFound:
            return None
        except AccessDenied:
            if self.listed is None and self.denied is not None:
                return None  # treated as missing, because without listing nobody can tell
            if self.listed is not None and key not in self.listed:
                return None
            raise


def map_threads(function: Callable[[T], R], items: Sequence[T], threads: int = THREADS) -> list[R]:
    """Return `function(item)` for every item, in order, computed in several threads. Raises the first error."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="longshore-open") as executor:
        futures = [executor.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


JOURNAL_KEY = "longshore.publish.json"  # exists while a publish is running
PROBE_KEY = "longshore.publish.probe"  # shows whether source and destination are one place; exists for a moment
SAVE_JOURNAL_KEY = "longshore.save.json"  # exists while a save is running, and after one that was interrupted
HISTORY_KEY = "longshore.saves.json"  # the saves that published here, in their order
OWN_KEYS = frozenset(
    {MANIFEST_KEY, SIGNATURE_KEY, AMAX_KEY, JOURNAL_KEY, PROBE_KEY, SAVE_JOURNAL_KEY, HISTORY_KEY, BEFORE_KEY}
)
HEADERS_KEY = "longshore-headers.safetensors"  # headers alone, in a folder that stands for a model in a store
COMMON_FILES = (  # looked up by name if a store cannot list
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
    """A checkpoint as its files describe it."""

    shards: tuple[ObjectInfo, ...]  # ordered by key
    headers: tuple[Header, ...]  # one for each shard
    tensors: tuple[Tensor, ...]  # ordered by shard, start, end, name
    files: tuple[ObjectInfo, ...]  # all other files of the model, ordered by key
    skipped: tuple[str, ...]  # weights that are not part of the model, and files whose names no manifest can have
    checksums: tuple[AskedChecksum, ...] = ()  # of each shard, if they were requested


def scan_checkpoint(
    store: ObjectStore,
    *,
    only_key: str | None = None,
    policy: RetryPolicy | None = None,
    inventory: Inventory | None = None,
    checksum_chunk_bytes: int = 0,
) -> Checkpoint:
    """Return the checkpoint as its files describe it, whether there is a manifest or not.

    If `checksum_chunk_bytes` is not 0, ask the store for checksums that can verify chunks of that size.
    """
    policy = policy or RetryPolicy()
    inventory = inventory or Inventory(store, policy)
    known = candidates(inventory, only_key)
    weight_map: dict[str, str] | None = None
    if only_key is not None:
        if only_key not in known:
            raise NotACheckpoint("no such file", hint="check the URI's last part", uri=store.uri, key=only_key)
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
    """Return all objects known to exist: the listing, or those of the usual names that exist.

    Raises AccessDenied if listing is not allowed and none of them can be read.
    """
    if inventory.listed is not None:
        return inventory.listed
    found = inventory.find([INDEX_KEY, SINGLE_KEY, *COMMON_FILES, *([only_key] if only_key else [])])
    if not found and inventory.denied is not None:
        raise inventory.denied
    return found


def names_left_out(store: ObjectStore, policy: RetryPolicy) -> tuple[str, ...]:
    """Return the names below the root that cannot be objects, if the store can tell. Raises StoreError."""
    if not isinstance(store, LeavesOut):
        return ()
    return tuple(sorted(with_retries(lambda: list(islice(store.left_out(), MAX_LISTED)), policy)))


def read_index(store: ObjectStore, info: ObjectInfo, policy: RetryPolicy) -> dict[str, str]:
    """Return {tensor name: shard key} of the stored index. Raises InvalidIndex."""
    if info.size_bytes > MAX_INDEX_BYTES:
        raise InvalidIndex(
            f"the index has {info.size_bytes} bytes; at most {MAX_INDEX_BYTES} are read",
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
            f"the index names shards that do not exist: {missing}",
            hint="upload the missing files, or an index of the files that are there",
            uri=uri,
        )
    return tuple(found[key] for key in keys)


def _read_headers(
    store: ObjectStore, shards: Sequence[ObjectInfo], policy: RetryPolicy, checksum_chunk_bytes: int
) -> tuple[tuple[Header, ...], tuple[AskedChecksum, ...]]:
    """Read every header in parallel, and ask for the store's checksum of each shard if `checksum_chunk_bytes` is not 0.

    Raises one InvalidHeader for all broken headers.
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
        raise InvalidHeader(f"{len(errors)} shards have broken headers: {Problems(map(str, errors))}", uri=store.uri)
    read_well = [result for result in results if not isinstance(result, InvalidHeader)]
    asked = tuple(checksum for _, checksum in read_well if checksum is not None)
    return tuple(header for header, _ in read_well), asked


def read_whole(store: ObjectStore, info: ObjectInfo, policy: RetryPolicy) -> bytes:
    """Read a small object whole, in the version that `info` describes."""
    return with_retries(lambda: read_bytes(store, info.key, ByteRange(0, info.size_bytes), etag=info.etag), policy)
