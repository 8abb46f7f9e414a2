"""Which files of a folder are the model: the Hugging Face layout as it is, decided from names alone.

    model.safetensors.index.json     the shards it names, and for each tensor the shard that counts
    else model.safetensors           that one file
    else *.safetensors in the root   all of them, but for copies of another layout (consolidated*)

What is left out is listed, not guessed at. Names come from a bucket: every path is checked before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from storage.checkpoints.model_index import Tensor
from storage.checkpoints.safetensors_header import Header
from storage.errors import InvalidIndex, NotACheckpoint, PickleRefused, StoreError
from storage.json_bounds import json_values
from storage.object_store import check_key
from storage.problems import Problems, quote

INDEX_KEY = "model.safetensors.index.json"
SINGLE_KEY = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_INDEX_BYTES = 64 << 20
MAX_JSON_VALUES = 2_000_000  # bounds the memory that parsing takes
MAX_SEEN = 10  # names listed when nothing can be loaded
PICKLE_HINT = (
    "pickle files run code when they are opened; convert them once, with `safetensors.torch.save_file` or "
    "the Hugging Face `convert` space, and load the result"
)
_NUMBERED = re.compile(r"(.*)-(\d{5,6})-of-(\d{5,6})\.safetensors")


@dataclass(frozen=True, slots=True)
class Layout:
    """The choice: an index to follow, or the shards themselves."""

    index_key: str | None  # the index that names the shards; None: shard_keys are all there is to know
    shard_keys: tuple[str, ...]  # ascending; empty when an index names them
    skipped: tuple[str, ...]  # safetensors in the root that may not be part of the model, ascending


def choose_layout(keys: Collection[str], *, where: str) -> Layout:
    """What to load of a folder with those keys; `where` is for messages.

    Raises PickleRefused when there is nothing but pickles, NotACheckpoint when there is nothing at all, and
    InvalidIndex when numbered shards are not complete or there are several indexes.
    """
    root = sorted(key for key in keys if "/" not in key)
    files = [key for key in root if key.endswith(SUFFIX)]
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
        raise InvalidIndex(f"shards are missing: {missing}", hint="the upload is not complete", uri=where)
    return Layout(None, tuple(own), tuple(key for key in files if key not in own))


def parse_weight_map(data: bytes) -> dict[str, str]:
    """Tensor name -> shard key, from an index's JSON. Raises InvalidIndex that lists every problem."""
    if len(data) > MAX_INDEX_BYTES:
        raise InvalidIndex(f"index of {len(data)} bytes; at most {MAX_INDEX_BYTES} are read")
    values = json_values(data)
    if values > MAX_JSON_VALUES:
        raise InvalidIndex(f"index has some {values} JSON values; at most {MAX_JSON_VALUES} are read")
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
        elif key not in refused and (problem := _shard_problem(key)):
            refused.add(key)
            problems.add(problem)
    if problems:
        raise InvalidIndex(f"invalid index: {problems}", problems=len(problems))
    return weight_map


def assign_tensors(
    shard_keys: tuple[str, ...], headers: Mapping[str, Header], weight_map: Mapping[str, str] | None
) -> tuple[Tensor, ...]:
    """The model's tensors, by shard, start, end and name; a copy that the index does not pick is left out.

    Raises InvalidIndex that lists tensors that are missing, not in the index, or in two shards.
    """
    problems = Problems()
    picked: dict[str, Tensor] = {}
    for number, key in enumerate(shard_keys):
        for found in headers[key].tensors:
            tensor = Tensor(found.name, found.dtype, found.shape, number, found.start, found.end)
            if weight_map is None:
                if found.name in picked:
                    first = shard_keys[picked[found.name].shard]
                    problems.add(f"tensor {quote(found.name)} is in {quote(first)} and in {quote(key)}")
                picked[found.name] = tensor
            elif found.name not in weight_map:
                problems.add(f"tensor {quote(found.name)} of {quote(key)} is not in the index")
            elif weight_map[found.name] == key:
                picked[found.name] = tensor
    for name, key in (weight_map or {}).items():
        if name not in picked:
            problems.add(f"tensor {quote(name)} is not in {quote(key)}, where the index has it")
    if problems:
        hint = "name one .safetensors file in the URI to load it alone" if weight_map is None else ""
        raise InvalidIndex(f"files and index disagree: {problems}", hint=hint, problems=len(problems))
    return tuple(sorted(picked.values(), key=lambda t: (t.shard, t.start, t.end, t.name)))


def is_pickle(key: str) -> bool:
    """True for a file that may be a pickle, by its name."""
    return key.lower().endswith(PICKLE_SUFFIXES)


def _consolidated(key: str) -> bool:
    """True for the names under which Mistral and Meta store the same weights a second time."""
    return key.startswith("consolidated")


def _shard_problem(key: str) -> str:
    try:
        check_key(key)
    except StoreError:
        return f"hostile path {quote(key)}"
    if is_pickle(key):
        return f"{quote(key)} is a pickle file"
    return "" if key.endswith(SUFFIX) else f"{quote(key)} is not a safetensors file"


def _missing_numbers(files: list[str]) -> str:
    """The numbers of `model-00001-of-00004.safetensors` that are not there, as text for a message."""
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
        return NotACheckpoint("nothing is stored there", hint="check bucket, path and spelling", uri=where)
    seen = ", ".join(map(quote, sorted(keys)[:MAX_SEEN]))
    return NotACheckpoint(f"no safetensors files; {len(keys)} others: {seen}", uri=where)
