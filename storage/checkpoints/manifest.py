"""The manifest of a published model: one JSON object beside the shards, used only after `parse_manifest`.

    longshore.manifest.json
      format, version, revision        revision: SHA-256 of the canonical JSON of everything else
      hash, chunk_bytes                one hash for all digests below, written in hex
      shards   path size etag source_etag checked_by digest, chunk_ends [...], chunk_digests [...]     by path
      tensors  name dtype shape shard start end                      by shard, then start, then end, then name
      files    path size etag source_etag checked_by digest                   config, tokenizer, ...   by path

Chunk i of a shard is `[chunk_ends[i-1], chunk_ends[i])`. The first begins at 0 and the last ends with the shard.
ETags are only a hint, because a copied object has another one; the digests decide.

An error about a manifest names every problem, in text that is safe to print.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from json.encoder import encode_basestring
from operator import attrgetter
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from storage.checkpoints.model_index import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    ChunkTable,
    ModelIndex,
    OtherFile,
    Shard,
    Size,
    Tensor,
)
from storage.checkpoints.safetensors_header import (
    DTYPE_BITS,
    MAX_DIMENSIONS,
    Header,
    HeaderTensor,
    tensor_bytes,
)
from storage.checksum import DIGEST_SIZES, digest_of
from storage.errors import InvalidManifest, NewerManifest, StoreError
from storage.problems import Problems, json_values, quote
from storage.stores.object_store import check_key

MANIFEST_VERSION: Literal[1] = 1
MAX_PATH_CHARACTERS = 1024  # S3 allows as many bytes


def is_safe_path(key: str) -> bool:
    """Return whether a manifest may contain the key: printable, not too long, without a scheme or a drive letter."""
    return key.isprintable() and ":" not in key.partition("/")[0] and len(key) <= MAX_PATH_CHARACTERS


def _safe_path(path: str) -> str:
    try:
        check_key(path)
    except StoreError as error:
        raise PydanticCustomError(
            "path", "not a relative path below the model: {path}", {"path": quote(path)}
        ) from error
    if not is_safe_path(path):
        raise PydanticCustomError("path", "unsafe characters in path {path}", {"path": quote(path)})
    return path


Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})+$")]
ETag = Annotated[str, StringConstraints(max_length=1024)] | None
Path = Annotated[str, StringConstraints(max_length=MAX_PATH_CHARACTERS), AfterValidator(_safe_path)]


MAX_ERRORS_LISTED = 100_000  # with more schema errors, only their number is reported


def refusal(problems: Problems) -> InvalidManifest:
    """Return the error that lists the problems of a manifest."""
    return InvalidManifest(
        f"invalid manifest: {problems}",
        hint="publish the model again, with `longshore publish`",
        problems=len(problems),
    )


def newer(version: int) -> NewerManifest:
    """Return the error for a manifest of a later version than this Longshore reads."""
    return NewerManifest(
        f"the manifest has version {version}, this Longshore reads version {MANIFEST_VERSION}",
        hint="update Longshore to read it; a publish with force replaces it",
        version=version,
    )


def schema_problems(error: ValidationError) -> Problems:
    """Return Pydantic's errors as sentences. Another format or version is the only problem worth reporting.

    Raises NewerManifest.
    """
    if error.error_count() > MAX_ERRORS_LISTED:
        return Problems([f"{error.error_count()} entries do not follow the format"])
    found = error.errors(include_url=False, include_context=False)
    for entry in found:
        if entry["type"] == "missing":
            continue
        if entry["loc"] == ("format",):
            return Problems([f"not a Longshore manifest: format is {quote(entry['input'])}"])
        if entry["loc"] == ("version",):
            version = entry["input"]
            if isinstance(version, int) and version > MANIFEST_VERSION:
                raise newer(version)
            return Problems(
                [f"the manifest has version {quote(version)}, this Longshore reads version {MANIFEST_VERSION}"]
            )
    return Problems(
        f"{quote('.'.join(map(str, entry['loc'])))[1:-1]}: {entry['msg']}" if entry["loc"] else entry["msg"]
        for entry in found
    )


MANIFEST_KEY = "longshore.manifest.json"
MAX_MANIFEST_BYTES = 512 << 20
MAX_JSON_VALUES = 10_000_000  # limits the memory of parsing; enough for a million tensors, or five million chunks
# Every version begins like this, so that an older Longshore recognizes it; see `manifest_front`.
_FRONT = re.compile(rb'\s*\{\s*"format"\s*:\s*"longshore\.manifest"\s*,\s*"version"\s*:\s*(\d{1,9})\b')


class ManifestEntry(BaseModel):
    """A part of a manifest: frozen, without unknown fields or type conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ManifestFile(ManifestEntry):
    """One published object, as it was read and checked."""

    path: Path  # relative to the manifest's folder
    size_bytes: Size
    etag: ETag  # of the object beside the manifest when it was published
    source_etag: ETag  # of the object that was read; equal to `etag` if published in place
    checked_by: Annotated[str, StringConstraints(pattern=r"^(written|(read-twice|store:[a-z0-9_]+)(\+read-back)?)$")]
    digest: Hex  # of the whole object; of a shard that a save wrote: see `chunks_digest`


class ManifestShard(ManifestFile):
    """One safetensors file and its chunks."""

    chunk_ends: Annotated[tuple[Size, ...], FailFast()]
    chunk_digests: Annotated[tuple[Hex, ...], FailFast()]


WRITTEN = "written"  # `checked_by` of what a save hashed while it wrote it


def chunks_digest(hash_name: str, chunk_digests: Iterable[str]) -> str:
    """Return the digest of a `WRITTEN` shard: over its chunks' digests, as no process had all its bytes in order."""
    return digest_of(hash_name, bytes.fromhex("".join(chunk_digests))).hex()


class Manifest(ManifestEntry):
    """A whole manifest. `parse_manifest` reads one, `Manifest.build` makes a new one."""

    format: Literal["longshore.manifest"]
    version: Literal[1]
    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    hash: Literal["blake3", "xxh3_128"]
    chunk_bytes: Annotated[int, Field(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    shards: tuple[ManifestShard, ...]  # at least one
    tensors: tuple[Tensor, ...]
    files: tuple[ManifestFile, ...]

    @classmethod
    def build(
        cls,
        *,
        hash_name: str,
        chunk_bytes: int,
        shards: Iterable[ManifestShard],
        tensors: Iterable[Tensor],
        files: Iterable[ManifestFile],
    ) -> Manifest:
        """Return a manifest with its revision, checked like one that was read. Raises InvalidManifest."""
        try:
            draft = cls(
                format="longshore.manifest",
                version=MANIFEST_VERSION,
                revision="0" * 64,
                hash=hash_name,  # type: ignore[arg-type]  # pydantic checks it
                chunk_bytes=chunk_bytes,
                shards=tuple(shards),
                tensors=tuple(tensors),
                files=tuple(files),
            )
        except ValidationError as error:
            raise refusal(schema_problems(error)) from error
        manifest = draft.model_copy(update={"revision": contents_digest(draft)})
        if problems := _contradictions(manifest):
            raise refusal(problems)
        return manifest

    def to_json(self) -> bytes:
        """Return the bytes to store: `manifest_front`, the settings, then the tables."""
        return self.model_dump_json().encode()

    def index(self) -> ModelIndex:
        """Return the index of the model. Its ETags are the published ones."""
        counts = [len(shard.chunk_ends) for shard in self.shards]
        ends = [end for shard in self.shards for end in shard.chunk_ends]
        starts = [start for shard in self.shards for start in (0, *shard.chunk_ends[:-1])]
        digests = bytes.fromhex("".join(text for shard in self.shards for text in shard.chunk_digests))
        table = ChunkTable(
            shard=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            start=np.array(starts, np.int64),
            end=np.array(ends, np.int64),
            hash_name=self.hash,
            digests=np.frombuffer(digests, np.uint8).reshape(len(ends), DIGEST_SIZES[self.hash]),
        )
        return ModelIndex(
            revision=self.revision,
            source="manifest",
            shards=tuple(Shard(shard.path, shard.size_bytes, shard.etag) for shard in self.shards),
            tensors=self.tensors,
            chunks=table,
            files=tuple(OtherFile(file.path, file.size_bytes, f"{self.hash}:{file.digest}") for file in self.files),
        )


def contents_digest(manifest: Manifest) -> str:
    """Return the revision that the manifest must have: the SHA-256 in hex of the canonical JSON of the rest."""
    rest = _canonical(manifest.model_dump(exclude={"revision", "tensors", "version"}))
    digest = hashlib.sha256(f'{rest[:-1]},"tensors":['.encode())
    between = ""
    for first in range(0, len(manifest.tensors), _BATCH):
        texts = _canonical_tensors(manifest.tensors[first : first + _BATCH])
        digest.update(f"{between}{','.join(texts)}".encode())
        between = ","
    digest.update(f'],"version":{manifest.version}}}'.encode())  # "version" is the last key
    return digest.hexdigest()


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _canonical_tensors(tensors: Iterable[Tensor]) -> Iterator[str]:
    """Yield the canonical JSON of each tensor. Dicts of 100,000 tensors would take most of the time and memory."""
    known: dict[tuple[str, tuple[int, ...]], tuple[str, str]] = {}
    for tensor in tensors:
        alike = tensor.dtype, tensor.shape
        if alike not in known:
            known[alike] = _canonical(tensor.dtype), _canonical(tensor.shape)
        dtype, shape = known[alike]
        yield (
            f'{{"dtype":{dtype},"end":{tensor.end},"name":{encode_basestring(tensor.name)},"shape":{shape},'
            f'"shard":{tensor.shard},"start":{tensor.start}}}'
        )


def manifest_front(revision: str) -> bytes:
    """Return the first bytes of every manifest of that revision, so that one small read can recognize it."""
    front = f'{{"format":"longshore.manifest","version":{MANIFEST_VERSION},"revision":"{revision}"'
    return front.encode("utf-8", "replace")


def parse_manifest(data: bytes) -> Manifest:
    """Return a consistent manifest. Raises NewerManifest, or InvalidManifest, which lists every problem found."""
    front = _FRONT.match(data)
    if front is not None and int(front[1]) > MANIFEST_VERSION:
        raise newer(int(front[1]))
    if len(data) > MAX_MANIFEST_BYTES:
        raise InvalidManifest(f"the manifest has {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read")
    values = json_values(data)
    if values > MAX_JSON_VALUES:
        raise InvalidManifest(f"the manifest has some {values} JSON values; at most {MAX_JSON_VALUES} are read")
    try:
        manifest = _validated(data)
    except ValidationError as error:
        raise refusal(schema_problems(error)) from None  # the cause would keep the whole input
    if problems := _contradictions(manifest):
        raise refusal(problems)
    return manifest


_TENSORS, _FILES, _NEXT_TENSOR = b'"tensors":[', b'],"files":[', b'},{"name":'
_BATCH = 4096  # tensors in a piece of text
_PIECE_BYTES = 1 << 20
_TENSOR_TABLE = TypeAdapter(tuple[Tensor, ...])


def _validated(data: bytes) -> Manifest:
    """Return the manifest, of which only the schema was checked. Raises ValidationError.

    Parsed JSON takes several times the memory of its text. So if the text is written as `to_json` writes it, the table
    of tensors is parsed in pieces. The marks between the pieces have quotes that nothing escapes, so they are never
    inside a string. Text that is valid in all pieces is valid, and means the same, as a whole.
    """
    begin = data.find(_TENSORS) + len(_TENSORS)
    end = data.find(_FILES, begin)
    if begin >= len(_TENSORS) and end >= 0 and data.find(_TENSORS, begin) < 0:
        with contextlib.suppress(ValidationError):  # the whole text has better messages
            manifest = Manifest.model_validate_json(data[:begin] + data[end:])
            tensors: list[Tensor] = []
            while begin < end:
                mark = data.find(_NEXT_TENSOR, begin + _PIECE_BYTES, end)
                piece_end = end if mark < 0 else mark + 1
                tensors += _TENSOR_TABLE.validate_json(b"[%b]" % data[begin:piece_end])
                begin = piece_end + 1
            return manifest.model_copy(update={"tensors": tuple(tensors)})
    return Manifest.model_validate_json(data)


def _contradictions(manifest: Manifest) -> Problems:
    """Return the problems that a schema cannot express."""
    problems = _table_problems(manifest)
    if any(entry.path == MANIFEST_KEY for entry in (*manifest.shards, *manifest.files)):
        problems.add("the manifest lists itself")
    if not problems and contents_digest(manifest) != manifest.revision:
        problems.add("the revision does not match the contents, which were changed after they were written")
    return problems


def _table_problems(manifest: Manifest) -> Problems:
    """Return all contradictions between shards, chunks, tensors and files."""
    problems = Problems()
    if not manifest.shards:
        problems.add("no shards")
    _check_paths(manifest, problems)
    for shard in manifest.shards:
        _check_chunks(shard, manifest, problems)
    for file in manifest.files:
        if len(file.digest) != 2 * DIGEST_SIZES[manifest.hash]:
            problems.add(f"{quote(file.path)}: not a {manifest.hash} digest")
    _check_tensors(manifest, problems)
    return problems


def _check_paths(manifest: Manifest, problems: Problems) -> None:
    for kind, entries in (("shards", manifest.shards), ("files", manifest.files)):
        for one, other in pairwise(entry.path for entry in entries):
            if one >= other:
                problems.add(f"{kind} out of order or twice: {quote(one)} before {quote(other)}")
    for path in {shard.path for shard in manifest.shards} & {file.path for file in manifest.files}:
        problems.add(f"both a shard and another file: {quote(path)}")


def _check_chunks(shard: ManifestShard, manifest: Manifest, problems: Problems) -> None:
    label = f"shard {quote(shard.path)}"
    hex_characters = 2 * DIGEST_SIZES[manifest.hash]
    if len(shard.digest) != hex_characters or any(len(d) != hex_characters for d in shard.chunk_digests):
        problems.add(f"{label}: a digest is not a {manifest.hash} digest")
    if len(shard.chunk_ends) != len(shard.chunk_digests):
        problems.add(f"{label}: {len(shard.chunk_ends)} chunks and {len(shard.chunk_digests)} chunk digests")
    sizes = np.diff(np.array((0, *shard.chunk_ends), np.int64))
    if not len(sizes) or sizes.min() <= 0 or shard.chunk_ends[-1] != shard.size_bytes:
        problems.add(f"{label}: chunks do not tile its {shard.size_bytes} bytes")
    elif sizes.max() > manifest.chunk_bytes:
        problems.add(f"{label}: a chunk of {sizes.max()} bytes, more than {manifest.chunk_bytes}")


def _check_tensors(manifest: Manifest, problems: Problems) -> None:
    """Check names, order and overlaps, and that each tensor is inside its shard and as large as dtype and shape say."""
    if _tensors_are_sound(manifest):
        return
    names: set[str] = set()
    sizes = [shard.size_bytes for shard in manifest.shards]
    before: tuple[int, int, int, str] = (0, 0, 0, "")
    for tensor in manifest.tensors:
        label = f"tensor {quote(tensor.name)}"
        if tensor.name in names:
            problems.add(f"{label} twice")
        names.add(tensor.name)
        if tensor.shard >= len(sizes):
            problems.add(f"{label}: shard {tensor.shard} of {len(sizes)}")
        elif not tensor.start <= tensor.end <= sizes[tensor.shard]:
            problems.add(f"{label}: bytes [{tensor.start}, {tensor.end}) of {sizes[tensor.shard]}")
        if expected := _size_problem(tensor):
            problems.add(f"{label}: {expected}")
        place = (tensor.shard, tensor.start, tensor.end, tensor.name)
        if place < before:
            problems.add(f"{label} out of order")
        elif tensor.shard == before[0] and tensor.start < before[2]:
            problems.add(f"{label} overlaps {quote(before[3])}")
        before = place


def _tensors_are_sound(manifest: Manifest) -> bool:
    """Return whether `_check_tensors` has nothing to note, by a tenth of its work."""
    tensors, shards = manifest.tensors, manifest.shards
    if len({tensor.name for tensor in tensors}) != len(tensors):
        return False
    columns = (
        np.fromiter((getter(tensor) for tensor in tensors), np.int64, len(tensors))
        for getter in (attrgetter("shard"), attrgetter("start"), attrgetter("end"))
    )
    shard, start, end = columns
    sizes = np.array([shard.size_bytes for shard in shards], np.int64)
    if (shard >= len(shards)).any() or (start > end).any() or (end > sizes[shard]).any():
        return False
    known: set[tuple[str, tuple[int, ...], int]] = set()  # those of the right size
    for tensor, size_bytes in zip(tensors, (end - start).tolist(), strict=True):
        alike = tensor.dtype, tensor.shape, size_bytes
        if alike not in known:
            if _size_problem(tensor):
                return False
            known.add(alike)
    same = shard[1:] == shard[:-1]
    ties = np.flatnonzero(same & (start[1:] == start[:-1]) & (end[1:] == end[:-1]))
    return not (
        (shard[1:] < shard[:-1]).any()
        or (same & ((start[1:] < end[:-1]) | (start[1:] < start[:-1]))).any()
        or any(tensors[row + 1].name < tensors[row].name for row in ties.tolist())
    )


def _size_problem(tensor: Tensor) -> str:
    if tensor.dtype not in DTYPE_BITS:
        return f"unknown dtype {quote(tensor.dtype)}"
    if len(tensor.shape) > MAX_DIMENSIONS:
        return f"{len(tensor.shape)} dimensions"
    try:
        expected = tensor_bytes(tensor.dtype, tensor.shape)
    except (OverflowError, ValueError) as error:
        return str(error)
    stored = tensor.end - tensor.start
    return "" if stored == expected else f"{stored} bytes stored, {tensor.dtype} {tensor.shape} takes {expected}"


NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class BadTensor:
    """A tensor that the manifest and the stored header describe differently."""

    key: str  # the shard's key
    name: str  # "" if the header as a whole differs
    published: str  # dtype, shape and byte range, or NOTHING
    stored: str  # in the same form


def table_differences(
    key: str, published: Iterable[Tensor], header: Header, elsewhere: Collection[str]
) -> Iterator[BadTensor]:
    """Yield every tensor of the shard `key` for which manifest and header disagree.

    `elsewhere` are the names that the manifest has in any shard. The header may have these too, as copies that the
    index did not pick.
    """
    stored = {tensor.name: tensor for tensor in header.tensors}
    for tensor in published:
        found = stored.pop(tensor.name, None)
        wanted = _described(tensor)
        if found is None or _described(found) != wanted:
            yield BadTensor(key, tensor.name, wanted, NOTHING if found is None else _described(found))
    for name, found in stored.items():
        if name not in elsewhere:
            yield BadTensor(key, name, NOTHING, _described(found))


def _described(tensor: Tensor | HeaderTensor) -> str:
    shape = ", ".join(map(str, tensor.shape))
    return f"{tensor.dtype} ({shape}) at [{tensor.start}, {tensor.end})"
