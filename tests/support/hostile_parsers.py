"""Everything that parses foreign bytes, in one shape: for Hypothesis (tests/unit) and atheris (tests/fuzz) alike."""

from __future__ import annotations

import functools
import json
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from cluster.errors import ModelConfigError
from cluster.layouts.model_config import parse_model_config
from storage.arena.arena import CHECKSUM, GEOMETRY, RECORDS_AT, arena_size_bytes, map_checked, pack_geometry
from storage.checkpoints.amax import AmaxBytes, encode_amax
from storage.checkpoints.checkpoint import open_model
from storage.checkpoints.checkpoint_files import INDEX_KEY, parse_weight_map
from storage.checkpoints.manifest import MANIFEST_KEY, parse_manifest
from storage.checkpoints.safetensors_header import parse_header
from storage.disk.files import chunk_name
from storage.errors import (
    ArenaError,
    BadSignature,
    DiskChunkUnusable,
    InvalidAmax,
    InvalidHeader,
    InvalidIndex,
    InvalidManifest,
    LongshoreError,
    SourceRefused,
    StoreError,
)
from storage.publishing.publish import JournalContents, parse_journal, publish
from storage.publishing.signing import SigningKey, parse_signature, sign_manifest
from storage.store_ref import SourceRules, parse_uri
from storage.stores.object_store import ByteRange, MemoryStore, check_key, read_bytes
from storage.stores.requests import RetryPolicy
from storage.stores.s3.answers import check_answer, head_of, refusal
from tests.support import hostile_files as files
from tests.support.checkpoints import flat_objects, odd_objects

MAX_MESSAGE_CHARACTERS = 10_000
ONCE = RetryPolicy(attempts=1)


@dataclass(frozen=True)
class Parser:
    """One way in: what it takes, what it may raise, and examples that it takes."""

    name: str
    parse: Callable[[bytes], object]
    errors: tuple[type[LongshoreError], ...]
    seeds: Callable[[], list[bytes]]
    is_json: bool = True

    def check(self, data: bytes) -> bool:
        """Whether it was taken. Anything but a typed, short, printable refusal comes through."""
        try:
            self.parse(data)
        except self.errors as error:
            text = str(error)
            if len(text) > MAX_MESSAGE_CHARACTERS or not text.isprintable():
                raise ValueError(f"{self.name}: a message of {len(text)} characters, or not printable") from error
            return False
        return True


@functools.cache
def _published() -> dict[str, bytes]:
    store = MemoryStore(odd_objects())
    publish(store, chunk_bytes=1 << 20)
    return {i.key: read_bytes(store, i.key, ByteRange(0, i.size_bytes)) for i in store.list()}


def _manifest(data: bytes) -> None:
    index = parse_manifest(data).index()
    for entry in (*index.shards, *index.files):
        check_key(entry.key)
    if len(index.chunks) and int(index.chunks.end.max()) > max(shard.size_bytes for shard in index.shards):
        raise ValueError("a chunk behind its shard's end")


def _journal(data: bytes) -> None:
    if parse_journal(data) is None:
        raise InvalidManifest("no journal")


def _journal_seeds() -> list[bytes]:
    manifest = parse_manifest(_published()[MANIFEST_KEY])
    contents = JournalContents(
        format="longshore.publish",
        version=1,
        hash=manifest.hash,
        chunk_bytes=manifest.chunk_bytes,
        shards=manifest.shards,
        files=manifest.files,
    )
    return [contents.model_dump_json().encode()]


def _header(data: bytes) -> None:
    header = parse_header(data, len(data))
    at = header.data_start
    for tensor in header.tensors:
        if not at == tensor.start <= tensor.end <= len(data):
            raise ValueError("tensors do not tile the file")
        at = tensor.end


AMAX_WEIGHTS = {"0.weight": (3, 64), "experts.down": (2, 5, 32)}


def _amax(data: bytes) -> None:
    """In two pieces, as it would come."""
    recorded = AmaxBytes(len(data), AMAX_WEIGHTS)
    recorded.add(memoryview(data)[:100])
    recorded.add(memoryview(data)[100:])
    for name, rows in recorded.rows().items():
        if rows.shape != AMAX_WEIGHTS[name][:-1]:
            raise ValueError("maxima of another shape")


def _amax_seeds() -> list[bytes]:
    rows = {name: np.full(shape[:-1], 1.5, np.float32) for name, shape in AMAX_WEIGHTS.items()}
    return [encode_amax(rows.items()), encode_amax([*rows.items(), ("other", np.ones(9, np.float32))])]


def _index(data: bytes) -> None:
    for key in parse_weight_map(data).values():
        check_key(key)


def _config(data: bytes) -> None:
    config = parse_model_config(data)
    _ = config.kv_heads, config.head_rows, config.quantization and config.quantization.trouble


def _config_seeds() -> list[bytes]:
    numbers = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "head_dim": 128}
    nested = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **numbers}}
    grouped = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "dynamic": {"x": {"bits": 8}}}
    weights = {"num_bits": 8, "strategy": "block", "block_structure": [128, 128], "group_size": None}
    schemes = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}}
    fields = [
        {"model_type": "llama", **numbers},
        nested,
        {**numbers, "quantization_config": grouped},
        {"text_config": {**numbers, "quantization_config": schemes}},
    ]
    return [json.dumps(each).encode() for each in fields]


def _s3_error(data: bytes) -> None:
    """First two bytes: the status; then the body."""
    status = 300 + int.from_bytes(data[:2], "little") % 300
    raise refusal(status, {"x-amz-bucket-region": repr(data[2:40])}, data[2:], None, uri="s3://bucket/model", key="key")


def _s3_error_seeds() -> list[bytes]:
    body = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>It is &amp; was so</Message></Error>"
    codes = (b"SlowDown", b"NoSuchKey", b"AccessDenied", b"PermanentRedirect", b"InvalidRange")
    return [struct.pack("<H", 100 + n) + body % code for n, code in enumerate(codes)]


def _s3_answer(data: bytes) -> None:
    """One header a line; the first line is the status."""
    lines = data.decode("latin-1").split("\n")
    status = int(lines[0]) if lines[0].isascii() and lines[0].isdigit() and len(lines[0]) == 3 else 206
    pairs = [(name, value) for name, mark, value in (line.partition(":") for line in lines[1:]) if mark]
    found = check_answer(status, head_of(pairs), ByteRange(10, 30), "v1")
    if found != "v1":
        raise ValueError("an answer without the pinned version was taken")


def _s3_answer_seeds() -> list[bytes]:
    good = 'content-length: 20\netag: "v1"'
    heads = [f"206\n{good}\ncontent-range: bytes 10-29/100", f"200\n{good}\ncontent-range: bytes 10-29/*"]
    return [head.encode() for head in (*heads, "206\netag: W/v1\ncontent-encoding: gzip\ntransfer-encoding: chunked")]


def _arena(data: bytes) -> None:
    """A file with that header and of the size that the last eight bytes say, sparse, at most 64 MiB."""
    body, tail = data[:-8], data[-8:].ljust(8, b"\0")
    descriptor = os.memfd_create("longshore-hostile")
    try:
        os.write(descriptor, body)
        os.ftruncate(descriptor, int.from_bytes(tail, "little") % (64 << 20))
        map_checked("a hostile file", descriptor).close()
    finally:
        os.close(descriptor)


def _arena_checksummed(data: bytes) -> None:
    """The same with a checksum that is right, so that what stands behind it is reached."""
    head = data[: GEOMETRY.size].ljust(GEOMETRY.size, b"\0")
    _arena(head + CHECKSUM.pack(zlib.crc32(head)) + data[GEOMETRY.size + CHECKSUM.size :])


def _arena_seeds() -> list[bytes]:
    geometries = [(1, 4096), (3, 1 << 20), (64, 8192)]
    return [
        pack_geometry(slots, slot_bytes, b"epoch!").ljust(RECORDS_AT, b"\0")
        + struct.pack("<Q", arena_size_bytes(slots, slot_bytes))
        for slots, slot_bytes in geometries
    ]


def _uri(data: bytes) -> None:
    ref = parse_uri(data.decode("utf-8", "replace"), environ={})
    if any(part == ".." for part in ref.prefix.split("/")):
        raise ValueError("a place above the root")
    with suppress(SourceRefused):
        SourceRules.parse("s3,file,http", "http://host", "bucket").check(ref)
    parse_uri("s3://bucket/m", endpoint_url=data.decode("utf-8", "replace") or "x", environ={})


def _checkpoint(data: bytes) -> None:
    """A folder whose index and whose one shard are the two halves of the input."""
    index, _, shard = data.partition(b"\0\0\0\n")
    open_model(MemoryStore({INDEX_KEY: index, "model.safetensors": shard}), policy=ONCE)


def _checkpoint_seeds() -> list[bytes]:
    shard = flat_objects(tensors=3, rows=2)["model.safetensors"]
    weight_map = {f"layers.{number}.weight": "model.safetensors" for number in range(3)}
    return [json.dumps({"weight_map": weight_map}).encode() + b"\0\0\0\n" + shard]


PARSERS = (
    Parser("manifest", _manifest, (InvalidManifest,), lambda: [_published()[MANIFEST_KEY]]),
    Parser(
        "signature",
        parse_signature,
        (BadSignature,),
        lambda: [sign_manifest(b"manifest", SigningKey.generate(), "llama")],
    ),
    Parser("amax", _amax, (InvalidAmax,), _amax_seeds, False),
    Parser("journal", _journal, (InvalidManifest,), _journal_seeds),
    Parser("index", _index, (InvalidIndex,), lambda: [odd_objects()[INDEX_KEY]]),
    Parser("config", _config, (ModelConfigError,), _config_seeds),
    Parser("header", _header, (InvalidHeader,), lambda: [flat_objects(tensors=3, rows=2)["model.safetensors"]], False),
    Parser("s3_error", _s3_error, (StoreError,), _s3_error_seeds, False),
    Parser("s3_answer", _s3_answer, (StoreError,), _s3_answer_seeds, False),
    Parser("s3_listing", files.s3_listing, (StoreError,), files.s3_listing_seeds, False),
    Parser("s3_head", files.s3_head, (StoreError,), files.s3_head_seeds, False),
    Parser("disk_file", files.disk_file, (DiskChunkUnusable,), files.disk_seeds, False),
    Parser("disk_file_checksummed", files.disk_file_checksummed, (DiskChunkUnusable,), files.disk_seeds, False),
    Parser("disk_header", files.disk_header, (DiskChunkUnusable,), files.disk_seeds, False),
    Parser("disk_name", files.disk_name, (), lambda: [chunk_name(files.KEY).encode()], False),
    Parser("slot_record", files.slot_record, (), files.slot_record_seeds, False),
    Parser("slot_record_checksummed", files.slot_record_checksummed, (), files.slot_record_seeds, False),
    Parser("arena", _arena, (ArenaError,), _arena_seeds, False),
    Parser("arena_checksummed", _arena_checksummed, (ArenaError,), _arena_seeds, False),
    Parser(
        "uri", _uri, (StoreError,), lambda: [b"s3://bucket/a/b", b"file:///m%2e", b"http://host/m", b"gs://b/x"], False
    ),
    Parser("checkpoint", _checkpoint, (LongshoreError,), _checkpoint_seeds, False),
)
