"""The manifest of a published model: one JSON object beside the shards, believed only after `parse_manifest`.

    longshore.manifest.json
      format, version, revision        revision: SHA-256 of the canonical JSON of everything else
      hash, chunk_bytes                one hash for all digests below, written in hex
      shards   path size etag source_etag checked_by digest, chunk_ends [...], chunk_digests [...]     by path
      tensors  name dtype shape shard start end                      by shard, then start, then end, then name
      files    path size etag source_etag checked_by digest                   config, tokenizer, ...   by path

Chunk i of a shard is `[chunk_ends[i-1], chunk_ends[i])`; the first begins at 0, the last ends with the shard.
ETags are a hint: an object that was copied has another, the digests decide.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from storage.checksum import DIGEST_SIZES
from storage.chunking import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from storage.dtypes import MAX_ELEMENTS
from storage.errors import InvalidManifest, NewerManifest, StoreError
from storage.manifest_tables import table_problems
from storage.model_index import ChunkTable, ModelIndex, OtherFile, Shard, Tensor
from storage.object_store import check_key
from storage.problems import Problems, quote

MANIFEST_KEY = "longshore.manifest.json"
MANIFEST_VERSION: Literal[1] = 1
MAX_MANIFEST_BYTES = 512 << 20
MAX_JSON_VALUES = 10_000_000  # bounds the memory that parsing takes: a million tensors, or five million chunks
MAX_ERRORS_LISTED = 100_000  # schema errors that are turned into sentences at all
MAX_PATH_CHARACTERS = 1024  # what S3 allows in bytes
# Every version begins like this, so that an older one knows it whatever comes after; see `manifest_front`.
_FRONT = re.compile(rb'\s*\{\s*"format"\s*:\s*"longshore\.manifest"\s*,\s*"version"\s*:\s*(\d{1,9})\b')


def is_safe_path(key: str) -> bool:
    """Whether a key may stand in a manifest: no control characters, nothing that looks like a scheme or drive."""
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


_Size = Annotated[int, Field(ge=0, le=MAX_ELEMENTS)]
_Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})+$")]
_ETag = Annotated[str, StringConstraints(max_length=1024)] | None
_Path = Annotated[str, StringConstraints(max_length=MAX_PATH_CHARACTERS), AfterValidator(_safe_path)]


class ManifestEntry(BaseModel):
    """What all parts have in common: frozen, nothing unknown, no conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ManifestFile(ManifestEntry):
    """One published object as it was read and checked."""

    path: _Path  # relative to the manifest's folder
    size_bytes: _Size
    etag: _ETag  # of the object beside the manifest, when it was published
    source_etag: _ETag  # of the object that was read; the same one when published in place
    checked_by: Annotated[str, StringConstraints(pattern=r"^(read-twice|store:[a-z0-9_]+)(\+read-back)?$")]
    digest: _Hex  # of the whole object


class ManifestShard(ManifestFile):
    """One safetensors file and its chunks."""

    chunk_ends: Annotated[tuple[_Size, ...], FailFast()]
    chunk_digests: Annotated[tuple[_Hex, ...], FailFast()]


class ManifestTensor(ManifestEntry):
    """One tensor: bytes `[start, end)` of a shard."""

    name: str
    dtype: str
    shape: tuple[_Size, ...]
    shard: _Size  # index into shards
    start: _Size
    end: _Size


class Manifest(ManifestEntry):
    """A whole manifest. `parse_manifest` is the way in, `Manifest.build` the way to a new one."""

    format: Literal["longshore.manifest"]
    version: Literal[1]
    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    hash: Literal["blake3", "xxh3_128"]
    chunk_bytes: Annotated[int, Field(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    shards: tuple[ManifestShard, ...]  # at least one
    tensors: tuple[ManifestTensor, ...]
    files: tuple[ManifestFile, ...]

    @classmethod
    def build(
        cls,
        *,
        hash_name: str,
        chunk_bytes: int,
        shards: Iterable[ManifestShard],
        tensors: Iterable[ManifestTensor],
        files: Iterable[ManifestFile],
    ) -> Manifest:
        """A manifest with its revision, checked like one that was read. Raises InvalidManifest."""
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
            raise _refusal(_schema_problems(error)) from error
        manifest = draft.model_copy(update={"revision": contents_digest(draft)})
        if problems := _contradictions(manifest):
            raise _refusal(problems)
        return manifest

    def to_json(self) -> bytes:
        """The bytes that are stored: `manifest_front`, the settings, then the tables."""
        return self.model_dump_json().encode()

    def index(self) -> ModelIndex:
        """The model as plans see it. ETags are the published ones."""
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
            tensors=tuple(Tensor(t.name, t.dtype, t.shape, t.shard, t.start, t.end) for t in self.tensors),
            chunks=table,
            files=tuple(OtherFile(file.path, file.size_bytes, f"{self.hash}:{file.digest}") for file in self.files),
        )


def contents_digest(manifest: Manifest) -> str:
    """The revision that the manifest ought to have: SHA-256, in hex, of the canonical JSON of the rest."""
    rest = manifest.model_dump(exclude={"revision"})
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def manifest_front(revision: str) -> bytes:
    """How every manifest of that revision begins: enough to tell it from others, in one small read."""
    front = f'{{"format":"longshore.manifest","version":{MANIFEST_VERSION},"revision":"{revision}"'
    return front.encode("utf-8", "replace")


def parse_manifest(data: bytes) -> Manifest:
    """A manifest that holds together. Raises InvalidManifest that lists every problem found, NewerManifest."""
    front = _FRONT.match(data)
    if front is not None and int(front[1]) > MANIFEST_VERSION:
        raise _newer(int(front[1]))
    if len(data) > MAX_MANIFEST_BYTES:
        raise InvalidManifest(f"manifest of {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read")
    values = data.count(b",") + data.count(b"{") + data.count(b"[")
    if values > MAX_JSON_VALUES:
        raise InvalidManifest(f"manifest has some {values} JSON values; at most {MAX_JSON_VALUES} are read")
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise _refusal(_schema_problems(error)) from None  # the cause would carry the whole input along
    if problems := _contradictions(manifest):
        raise _refusal(problems)
    return manifest


def _refusal(problems: Problems) -> InvalidManifest:
    return InvalidManifest(
        f"invalid manifest: {problems}",
        hint="publish the model again, with `longshore publish`",
        problems=len(problems),
    )


def _newer(version: int) -> NewerManifest:
    return NewerManifest(
        f"manifest version {version}, this Longshore reads version {MANIFEST_VERSION}",
        hint="update Longshore to read it; a publish with force replaces it",
        version=version,
    )


def _schema_problems(error: ValidationError) -> Problems:
    """Pydantic's findings as sentences; another format or version is the only one worth telling.

    Raises NewerManifest.
    """
    if error.error_count() > MAX_ERRORS_LISTED:
        return Problems([f"{error.error_count()} entries are not what the format asks for"])
    found = error.errors(include_url=False, include_context=False)
    for entry in found:
        if entry["type"] == "missing":
            continue
        if entry["loc"] == ("format",):
            return Problems([f"not a Longshore manifest: format is {quote(entry['input'])}"])
        if entry["loc"] == ("version",):
            version = entry["input"]
            if isinstance(version, int) and version > MANIFEST_VERSION:
                raise _newer(version)
            return Problems([f"manifest version {quote(version)}, this Longshore reads version {MANIFEST_VERSION}"])
    return Problems(
        f"{quote('.'.join(map(str, entry['loc'])))[1:-1]}: {entry['msg']}" if entry["loc"] else entry["msg"]
        for entry in found
    )


def _contradictions(manifest: Manifest) -> Problems:
    """What no schema can say."""
    problems = table_problems(manifest)
    if any(entry.path == MANIFEST_KEY for entry in (*manifest.shards, *manifest.files)):
        problems.add("the manifest names itself")
    if not problems and contents_digest(manifest) != manifest.revision:
        problems.add("the revision is not that of the contents: changed after it was written")
    return problems
