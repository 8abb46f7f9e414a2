"""The layout of a checkpoint before any byte of it exists: files, headers, offsets, chunks and parts.

    specs (name, dtype, shape) --lay_out--> shards, each with its whole header, so that every offset is final

    model-<revision>-00001-of-00002.safetensors
    [header][ tensor ][ tensor ][   tensor   ][ tensor ]       tensors: ordered as safetensors' `save_file` orders them
    | chunk | chunk    | chunk   | chunk | chunk       |       chunks: `chunk_bounds`, as a publish makes them
    | part 1           | part 2          | part 3      |       parts: merged chunks, the unit that is sent

File names contain the revision, so a new revision never touches the files of another. Specs are put into files in the
order of the specs, as `save_pretrained` does. A part has at least 5 MiB except the last of its file, and a file has at
most 10,000, which are the limits of S3's multipart uploads. The header is in the first part.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from cluster.errors import SaveRefused
from storage.checkpoints.model_index import DEFAULT_CHUNK_BYTES, Tensor, chunk_bounds
from storage.checkpoints.safetensors_header import (
    DTYPE_BITS,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    Header,
    HeaderTensor,
    encode_header,
    tensor_bytes,
)
from storage.problems import Problems, quote
from storage.stores.object_store import ByteRange
from storage.stores.parts import MAX_PARTS, MIN_PART_BYTES

DEFAULT_SHARD_BYTES = 5_000_000_000  # as save_pretrained
MIN_SHARD_BYTES = 1 << 20
MAX_SHARDS = 99_999  # five digits in a file name
METADATA = {"format": "pt"}  # transformers refuses files without it
_REVISION = re.compile(r"[0-9a-z]{1,64}")
_SHARD_FILE = re.compile(r"model-([0-9a-z]{1,64})-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be stored: its name, safetensors' name of its dtype, and its shape."""

    name: str
    dtype: str  # "BF16", "F32", "F8_E4M3"...
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return the number of its bytes. Raises what `tensor_bytes` raises."""
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class ShardLayout:
    """One file of the checkpoint, laid out to the last byte."""

    file: str
    header: bytes  # the first bytes of the file: length and JSON
    tensors: tuple[HeaderTensor, ...]  # in the order of their bytes, offsets from the start of the file
    size_bytes: int
    chunk_ends: tuple[int, ...]  # chunk i is [ends[i - 1], ends[i])
    part_ends: tuple[int, ...]  # each is the end of a chunk

    @cached_property
    def parts(self) -> tuple[ByteRange, ...]:
        """Return the byte ranges of the parts, in order."""
        return tuple(ByteRange(start, end) for start, end in pairwise((0, *self.part_ends)))

    @cached_property
    def _part_at(self) -> dict[int, int]:
        return {part.start: number for number, part in enumerate(self.parts)}

    def part_starting_at(self, start: int) -> int | None:
        """Return the number of the part that begins at that byte, or None."""
        return self._part_at.get(start)

    def part_holding(self, byte: int) -> int:
        """Return the number of the part that contains that byte of the file."""
        return bisect_right(self.part_ends, byte)

    def chunks_of(self, part: ByteRange) -> list[ByteRange]:
        """Return the chunks that make up a part."""
        first = bisect_right(self.chunk_ends, part.start)
        edges = [part.start, *self.chunk_ends[first : bisect_right(self.chunk_ends, part.end)]]
        return [ByteRange(start, end) for start, end in pairwise(edges)]


def lay_out(
    specs: Iterable[TensorSpec],
    *,
    revision: str,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> tuple[ShardLayout, ...]:
    """Return the files of a checkpoint with those tensors.

    Args:
        specs: The tensors, in the order in which they fill the files. Names are unique.
        revision: Lower-case letters and digits that are part of every file name.
        max_shard_bytes: Most bytes of tensors in a file. A larger tensor has a file of its own.
        chunk_bytes: Most bytes of a chunk.

    Returns:
        At least one shard. The same specs have the same layouts, whatever the revision.

    Raises:
        SaveRefused: Specs cannot be stored; the message lists every problem.
    """
    if not _REVISION.fullmatch(revision):
        raise SaveRefused(f"a revision has lower-case letters and digits only, not {quote(revision)}")
    specs = tuple(specs)
    if problems := spec_problems(specs):
        raise SaveRefused(f"these tensors cannot be stored: {problems}", problems=len(problems))
    groups = _fill(specs, max_shard_bytes)
    if len(groups) > MAX_SHARDS:
        raise SaveRefused(
            f"{len(groups)} files are needed; at most {MAX_SHARDS} are possible", hint="raise max_shard_bytes"
        )
    return tuple(
        _shard(_file_name(revision, number, len(groups)), group, chunk_bytes) for number, group in enumerate(groups, 1)
    )


def new_revision() -> str:
    """Return a random revision for file names. It says nothing about the contents."""
    return secrets.token_hex(8)


def renamed(layouts: Sequence[ShardLayout], revision: str) -> tuple[ShardLayout, ...]:
    """Return the same layouts as files of another revision."""
    count = len(layouts)
    return tuple(replace(layout, file=_file_name(revision, number, count)) for number, layout in enumerate(layouts, 1))


def spec_problems(specs: Sequence[TensorSpec]) -> Problems:
    """Return every reason why these tensors cannot be stored in one checkpoint."""
    problems = Problems()
    if not specs:
        problems.add("there is no tensor")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            problems.add(f"{quote(spec.name)} twice")
        seen.add(spec.name)
        if not spec.name or spec.name == METADATA_KEY or not _is_text(spec.name):
            problems.add(f"{quote(spec.name)} is no name that the format allows")
        if spec.dtype not in DTYPE_BITS:
            problems.add(f"{quote(spec.name)} has a dtype that the format lacks: {quote(spec.dtype)}")
            continue
        if len(spec.shape) > MAX_DIMENSIONS:
            problems.add(f"{quote(spec.name)} has {len(spec.shape)} dimensions; at most {MAX_DIMENSIONS} are possible")
            continue
        try:
            tensor_bytes(spec.dtype, spec.shape)
        except (OverflowError, ValueError) as error:
            problems.add(f"{quote(spec.name)}: {error}")
    return problems


def revision_of_file(file: str) -> str | None:
    """Return the revision in the name of a file that a save wrote, or None for another file."""
    found = _SHARD_FILE.fullmatch(file)
    return found[1] if found else None


def fingerprint(layouts: Sequence[ShardLayout], hash_name: str, contents: str = "") -> str:
    """Return a digest of the layout in hex. It is equal for two saves whose parts can replace each other.

    `contents` names what the bytes are made from, if that is known before they are read.
    """
    digest = hashlib.sha256(f"{hash_name}{contents}".encode())
    for layout in layouts:
        digest.update(layout.header)
        digest.update(json.dumps([layout.size_bytes, layout.chunk_ends, layout.part_ends]).encode())
    return digest.hexdigest()


def weight_index(layouts: Sequence[ShardLayout]) -> bytes:
    """Return `model.safetensors.index.json`, as `save_pretrained` formats it."""
    total = sum(tensor.end - tensor.start for layout in layouts for tensor in layout.tensors)
    names = {tensor.name: layout.file for layout in layouts for tensor in layout.tensors}
    document = {"metadata": {"total_size": total}, "weight_map": names}
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def manifest_tensors(layouts: Sequence[ShardLayout]) -> tuple[Tensor, ...]:
    """Return the tensors as a manifest lists them: by shard, then by place."""
    return tuple(
        Tensor(tensor.name, tensor.dtype, tensor.shape, number, tensor.start, tensor.end)
        for number, layout in enumerate(layouts)
        for tensor in layout.tensors
    )


def part_bounds(chunk_ends: Sequence[int], data_start: int) -> tuple[int, ...]:
    """Return the ends of the parts of a file. Each part is a run of chunks; the header is in the first."""
    size_bytes = chunk_ends[-1]
    least = max(MIN_PART_BYTES, -(-size_bytes // (MAX_PARTS - 1)))
    ends: list[int] = []
    start = 0
    for end in chunk_ends:
        if end - start >= least and end > data_start:
            ends.append(end)
            start = end
    if start < size_bytes:
        ends.append(size_bytes)
    return tuple(ends)


def _file_name(revision: str, number: int, count: int) -> str:
    return f"model-{revision}-{number:05d}-of-{count:05d}.safetensors"


def _fill(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Return the specs of each file. A file is full when the next tensor would make it too large."""
    groups: list[list[TensorSpec]] = []
    free_bytes = -1
    for spec in specs:
        if spec.size_bytes > free_bytes or not groups:
            groups.append([])
            free_bytes = max_shard_bytes
        groups[-1].append(spec)
        free_bytes -= spec.size_bytes
    return groups


_DTYPE_ORDER = {name: number for number, name in enumerate(DTYPE_BITS)}


def _shard(file: str, specs: Sequence[TensorSpec], chunk_bytes: int) -> ShardLayout:
    # The order of safetensors' `save_file`: wide dtypes first, which aligns them, then by name.
    ordered = sorted(specs, key=lambda spec: (-_DTYPE_ORDER[spec.dtype], spec.name))
    header = encode_header([(spec.name, spec.dtype, spec.shape) for spec in ordered], METADATA)
    if len(header) > MAX_HEADER_BYTES:
        raise SaveRefused(f"the header of {file} would have {len(header)} bytes", hint="lower max_shard_bytes")
    tensors: list[HeaderTensor] = []
    at = len(header)
    for spec in ordered:
        tensors.append(HeaderTensor(spec.name, spec.dtype, spec.shape, at, at + spec.size_bytes))
        at += spec.size_bytes
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end, tensor.name))  # as the header's reader and a manifest
    ends = tuple(chunk_bounds(Header(tuple(tensors), METADATA, len(header)), at, chunk_bytes))
    return ShardLayout(file, header, tuple(tensors), at, ends, part_bounds(ends, len(header)))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
