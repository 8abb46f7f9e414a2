"""Everything that parses foreign bytes, in one shape: for Hypothesis (tests/unit) and atheris (tests/fuzz) alike."""

from __future__ import annotations

import functools
import io
import json
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import botocore.session
import numpy as np
from botocore.awsrequest import HeadersDict
from botocore.parsers import create_parser

from cluster.converting.assembly import coverage_problems
from cluster.converting.dcp import read, read_tensors
from cluster.converting.rank_files import ALLOWED, join_ranks, state_of
from cluster.converting.torch_files import load_pickle, read_torch_file
from cluster.errors import ConvertError, ModelConfigError
from cluster.layouts.model_config import parse_model_config
from storage.arena.arena import CHECKSUM, GEOMETRY, RECORDS_AT, arena_size_bytes, map_checked, pack_geometry
from storage.arena.slots import COPY_BYTES, SlotRecord, SlotState, pack_copy, unpack_copy
from storage.checkpoints.amax import AmaxBytes, encode_amax
from storage.checkpoints.checkpoint import open_model
from storage.checkpoints.checkpoint_files import INDEX_KEY, parse_weight_map
from storage.checkpoints.manifest import MANIFEST_KEY, parse_manifest
from storage.checkpoints.safetensors_header import parse_header
from storage.checksum import new_hasher
from storage.disk.files import HEADER_BYTES, ChunkHeader, chunk_name, key_of, pack_header, read_chunk, unpack_header
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
from storage.host.processes import ProcessId
from storage.problems import Problems
from storage.publishing.publish import JournalContents, parse_journal, publish
from storage.publishing.signing import SigningKey, parse_signature, sign_manifest
from storage.store_ref import SourceRules, parse_uri
from storage.stores.object_store import ByteRange, MemoryStore, check_key, read_bytes
from storage.stores.requests import RetryPolicy
from storage.stores.s3.answers import (
    asking,
    check_answer,
    checksums_of_head,
    composites_of_head,
    head_of,
    object_info,
    refusal,
)
from storage.stores.s3.session import check_document
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
    geometries = [(1, 4096, 1), (3, 1 << 20, 2), (64, 8192, 64)]
    return [
        pack_geometry(slots, slot_bytes, window_slots, b"epoch!").ljust(RECORDS_AT, b"\0")
        + struct.pack("<Q", arena_size_bytes(slots, slot_bytes, window_slots))
        for slots, slot_bytes, window_slots in geometries
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


CHUNK_KEY = bytes(range(32))
CHUNK = b"what a chunk holds " * 5
_CHECKED_BYTES = struct.calcsize("<8sQ32s16s32s")  # of a header: what its checksum is of


def _disk_file(data: bytes) -> None:
    """A file of the disk tier that claims to be a chunk of CHUNK's size."""
    descriptor = os.memfd_create("longshore-hostile")
    found = bytearray(len(CHUNK))
    try:
        os.write(descriptor, data)
        read_chunk(descriptor, CHUNK_KEY, [memoryview(found)], None)
    finally:
        os.close(descriptor)
    if len(data) != HEADER_BYTES + len(CHUNK) or bytes(found) != data[HEADER_BYTES:]:
        raise ValueError("other bytes than the file's were taken")


def _disk_file_checksummed(data: bytes) -> None:
    """The same with a header whose checksum is right."""
    head = data[:_CHECKED_BYTES].ljust(_CHECKED_BYTES, b"\0")
    _disk_file(head + struct.pack("<I", zlib.crc32(head)) + data[_CHECKED_BYTES + 4 :])


def _disk_header(data: bytes) -> None:
    header = unpack_header(data)
    if unpack_header(pack_header(header)) != header:
        raise ValueError("a header that cannot be written again was taken")


def _disk_seeds() -> list[bytes]:
    found = []
    for name in ("blake3", "xxh3_128"):
        hasher = new_hasher(name)
        hasher.update(CHUNK)
        found.append(pack_header(ChunkHeader(CHUNK_KEY, len(CHUNK), name, hasher.digest())) + CHUNK)
    return found


def _disk_name(data: bytes) -> None:
    name = data.decode("utf-8", "surrogateescape")
    key = key_of(name)
    if key is not None and chunk_name(key) != name:
        raise ValueError("a second name for a chunk was taken")


# {"w": a tensor of 2 x 3 in float32, "n": [1, 2.5, None, (True, "x")]}, as torch.save writes it
PICKLE = (
    b"\x80\x02}q\x00(X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n"
    b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ"
    b"K\x00K\x02K\x03\x86K\x03K\x01\x86\x89ccollections\nOrderedDict\n)RtR"
    b"X\x01\x00\x00\x00n](K\x01G@\x04\x00\x00\x00\x00\x00\x00N\x88X\x01\x00\x00\x00x\x86eu."
)

DOUBLED = b"K\x01\x85" + b"2\x86" * 24  # a tuple that has 2**24 numbers when it is written out or hashed


def _torch_pickle(data: bytes) -> None:
    load_pickle(data, file="file", allowed=("collections.deque",), storages={"0": (64, 24)})


def _torch_file(data: bytes) -> None:
    read_torch_file(MemoryStore({"file": data}), "file")


def _dcp_metadata(data: bytes) -> None:
    store = MemoryStore({".metadata": data, "__0_0.distcp": _torch_file_seeds()[0]})
    listing = {info.key: info for info in store.list()}
    read_tensors(store, listing, "", Problems())
    with suppress(ConvertError):  # its file is missing
        read(store, listing)


def _rank_pickle(data: bytes) -> None:
    state = state_of(load_pickle(data, file="file", allowed=ALLOWED, storages={"0": (64, 24)}), "file")
    problems = Problems()
    for tensor in join_ranks([state, state], ["file", "file"], problems):
        coverage_problems(tensor)
    if problems:
        raise ConvertError(str(problems))


@dataclass(frozen=True, eq=False)
class _Made:
    """An object in a pickle: `name` called with `args`, then given `state`. Without args: made without a call."""

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None

    def pickled(self) -> bytes:
        head = f"c{self.name.rpartition('.')[0]}\n{self.name.rpartition('.')[2]}\n".encode()
        if self.args is not None:
            return head + _opcodes(self.args) + b"R"
        return head if self.state is None else head + b")\x81" + _opcodes(self.state) + b"b"


def _opcodes(value: Any) -> bytes:
    """Return the opcodes that push a value."""
    if isinstance(value, bytes):
        return value  # opcodes already
    if isinstance(value, _Made):
        return value.pickled()
    if isinstance(value, dict):
        return b"}(" + b"".join(_opcodes(one) for pair in value.items() for one in pair) + b"u"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_opcodes, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(_opcodes, value)) + b"e"
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    return b"N" if value is None else b"J" + struct.pack("<i", value)


def _with_bombs(make: Callable[..., bytes], **fields: Any) -> list[bytes]:
    """Return a pickle with these fields, and others in which one of them is DOUBLED."""
    return [make(**fields), *(make(**{**fields, name: DOUBLED}) for name in fields)]


def _dcp_seeds() -> list[bytes]:
    path, chunk = ("model", "w"), {"offsets": (0, 0), "sizes": (2, 3)}
    found = _with_bombs(_dcp_pickle, name="w", file="__9_0.distcp", path=path, size=(2, 3), **chunk)
    return [*found, _dcp_pickle("w", "__9_0.distcp", (b"\x8a\xff" + b"\x01" * 255,), (2, 3), (0, 0), (2, 3))]


def _dcp_pickle(name: Any, file: Any, path: Any, size: Any, offsets: Any, sizes: Any) -> bytes:
    metadata, storage = "torch.distributed.checkpoint.metadata.", "torch.distributed.checkpoint.filesystem._StorageInfo"
    chunk = _Made(f"{metadata}ChunkStorageMetadata", state={"offsets": offsets, "sizes": sizes})
    properties = _Made(f"{metadata}TensorProperties", state={"dtype": _Made("torch.float32")})
    tensor = {"properties": properties, "size": size, "chunks": [chunk]}
    index = {"fqn": name, "offset": offsets, "index": 0}
    info = {"relative_path": file, "offset": 0, "length": 9}
    state = {
        "state_dict_metadata": {"w": _Made(f"{metadata}TensorStorageMetadata", state=tensor)},
        "storage_data": {_Made(f"{metadata}MetadataIndex", state=index): _Made(storage, state=info)},
        "planner_data": {"w": path},
    }
    return b"\x80\x02" + _opcodes(_Made(f"{metadata}Metadata", state=state)) + b"."


LOCAL = PICKLE[PICKLE.index(b"ctorch._utils") : PICKLE.index(b"tR") + 2]


def _rank_seeds() -> list[bytes]:
    shape, placement = {"shape": (4, 3)}, {"dim": 0, "groups": 1}
    flat = _Made("torch.distributed._mesh_layout._FlatLayout", state={"shape": (2,), "stride": (1,)})
    found = _with_bombs(_dtensor_pickle, layout={"axes": (flat,)}, place=(0,), **placement, **shape)
    # a rank with 2**20 strided parts, and meshes that cannot be
    found.append(_dtensor_pickle({"shape": (2,)}, (0,), 0, 1 << 20, (1 << 30, 3)))
    for mesh in (((1 << 20, [0]),), (DOUBLED, 2), ([1 << 30] * 60,), ([[2]] * 70,)):
        found.append(_dtensor_pickle({"shape": mesh}, (0,), 0, 1, (4, 3)))
    found += _with_bombs(_sharded_pickle, offsets=(0, 0), sizes=(2, 3), **shape)
    return [*found, _sharded_pickle((), (), (), shards=())]  # none is a list


def _dtensor_pickle(layout: Any, place: Any, dim: Any, groups: Any, shape: Any) -> bytes:
    tensor = "torch.distributed.tensor."
    mesh = {
        "_layout": _Made("torch.distributed._mesh_layout._MeshLayout", state=layout),
        "_coordinate_on_dim": place,
    }
    spec = {
        "mesh": _Made("torch.distributed.device_mesh.DeviceMesh", state=mesh),
        "placements": (_Made(f"{tensor}placement_types._StridedShard", state={"dim": dim, "split_factor": groups}),),
    }
    fields = {"_local_tensor": LOCAL, "_spec": _Made(f"{tensor}_dtensor_spec.DTensorSpec", state=spec)}
    return _wrapped_pickle(f"{tensor}DTensor", shape, (None, fields))


def _sharded_pickle(offsets: Any, sizes: Any, shape: Any, shards: Any = None) -> bytes:
    sharded = "torch.distributed._shard."
    place = _Made(f"{sharded}metadata.ShardMetadata", state={"shard_offsets": offsets, "shard_sizes": sizes})
    shard = _Made(f"{sharded}sharded_tensor.shard.Shard", state={"tensor": LOCAL, "metadata": place})
    state = ([shard] if shards is None else shards, None)
    return _wrapped_pickle(f"{sharded}sharded_tensor.api.ShardedTensor", shape, state)


def _wrapped_pickle(kind: str, shape: Any, state: Any) -> bytes:
    args = (_Made(kind), _Made("torch.float32"), shape, (3, 1))
    rebuild = (_Made("torch._utils._rebuild_wrapper_subclass"), _Made(kind), args, state)
    return b"\x80\x02" + _opcodes({"w": _Made("torch._tensor._rebuild_from_type_v2", rebuild)}) + b"."


def _torch_pickle_seeds() -> list[bytes]:
    names = (DOUBLED + _opcodes("x") + b"\x93", _opcodes("torch") + DOUBLED + b"\x93")
    storage = _opcodes(("storage", _Made("torch.FloatStorage"), DOUBLED, None, 6)) + b"Q"
    return [PICKLE, *(b"\x80\x04" + one + b"." for one in (*names, storage, b"}" + DOUBLED + b"Ns"))]


def _torch_file_seeds() -> list[bytes]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in (("data.pkl", PICKLE), ("byteorder", b"little"), ("data/0", bytes(24))):
            archive.writestr(f"archive/{name}", content)
    return [buffer.getvalue()]


def _slot_record(data: bytes) -> None:
    found = unpack_copy(data[:COPY_BYTES].ljust(COPY_BYTES, b"\0"))
    if found is not None and found[0] and unpack_copy(pack_copy(*found)) != found:
        raise ValueError("a record that cannot be written again was taken")


def _slot_record_checksummed(data: bytes) -> None:
    body = data[: struct.calcsize("<QQQqQ32sB3x")].ljust(struct.calcsize("<QQQqQ32sB3x"), b"\0")
    _slot_record(body + struct.pack("<I", zlib.crc32(body)))


def _slot_record_seeds() -> list[bytes]:
    holder = ProcessId(4711, 99)
    return [
        pack_copy(1, SlotRecord(SlotState.COMMITTED, 3, 1000, CHUNK_KEY)),
        pack_copy(9, SlotRecord(SlotState.LEASED, 1, 0, CHUNK_KEY, holder)),
        bytes(COPY_BYTES),
    ]


@functools.cache
def _operation(name: str) -> Any:
    return botocore.session.get_session().get_service_model("s3").operation_model(name).output_shape


def _s3_listing(data: bytes) -> None:
    """The body of an answer, and what our store makes of it."""
    with warnings.catch_warnings(action="ignore"), asking(uri="s3://bucket/model"):  # of times in odd zones
        check_document(data)
        answer = {"status_code": 200, "headers": {}, "body": data, "context": {"operation_name": "ListObjectsV2"}}
        page = create_parser("rest-xml").parse(answer, _operation("ListObjectsV2"))
        for entry in page.get("Contents", []):
            object_info(entry["Key"], entry["Size"], entry.get("ETag"))


def _s3_listing_seeds() -> list[bytes]:
    entries = b"".join(
        b"<Contents><Key>a%d</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;v&quot;</ETag>"
        b"<Size>%d</Size></Contents>" % (number, number)
        for number in range(3)
    )
    start = b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    return [start + b"<IsTruncated>false</IsTruncated>" + entries + b"</ListBucketResult>", start[:38] + b"<a/>"]


def _s3_head(data: bytes) -> None:
    """One header a line, of an answer to HEAD."""
    lines = (line.partition(b":") for line in data.split(b"\n"))
    pairs = ((name.decode("latin-1"), value.decode("latin-1").strip()) for name, mark, value in lines if mark)
    with warnings.catch_warnings(action="ignore"), asking(uri="s3://bucket/model", key="key"):
        headers = HeadersDict(pairs)
        answer = {"status_code": 200, "headers": headers, "body": b"", "context": {"operation_name": "HeadObject"}}
        head = create_parser("rest-xml").parse(answer, _operation("HeadObject"))
        object_info("key", head["ContentLength"], head.get("ETag"), checksums_of_head(head), composites_of_head(head))


def _s3_head_seeds() -> list[bytes]:
    return [
        b'content-length: 20\netag: "0123456789abcdef0123456789abcdef"\nx-amz-checksum-crc64nvme: AAAAAAAAAAA=\n'
        b"x-amz-checksum-type: FULL_OBJECT\nlast-modified: Sun, 22 Nov 2026 01:00:00 GMT",
        b'content-length: 20\netag: "0123456789abcdef0123456789abcdef-3"\nx-amz-checksum-crc32c: AAAAAA==-3\n'
        b"x-amz-checksum-type: COMPOSITE\nx-amz-meta-a: b",
    ]


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
    Parser("s3_listing", _s3_listing, (StoreError,), _s3_listing_seeds, False),
    Parser("s3_head", _s3_head, (StoreError,), _s3_head_seeds, False),
    Parser("disk_file", _disk_file, (DiskChunkUnusable,), _disk_seeds, False),
    Parser("disk_file_checksummed", _disk_file_checksummed, (DiskChunkUnusable,), _disk_seeds, False),
    Parser("disk_header", _disk_header, (DiskChunkUnusable,), _disk_seeds, False),
    Parser("torch_pickle", _torch_pickle, (ConvertError,), _torch_pickle_seeds, False),
    Parser("dcp_metadata", _dcp_metadata, (ConvertError,), _dcp_seeds, False),
    Parser("rank_pickle", _rank_pickle, (ConvertError,), _rank_seeds, False),
    Parser("torch_file", _torch_file, (ConvertError,), _torch_file_seeds, False),
    Parser("disk_name", _disk_name, (), lambda: [chunk_name(CHUNK_KEY).encode()], False),
    Parser("slot_record", _slot_record, (), _slot_record_seeds, False),
    Parser("slot_record_checksummed", _slot_record_checksummed, (), _slot_record_seeds, False),
    Parser("arena", _arena, (ArenaError,), _arena_seeds, False),
    Parser("arena_checksummed", _arena_checksummed, (ArenaError,), _arena_seeds, False),
    Parser(
        "uri", _uri, (StoreError,), lambda: [b"s3://bucket/a/b", b"file:///m%2e", b"http://host/m", b"gs://b/x"], False
    ),
    Parser("checkpoint", _checkpoint, (LongshoreError,), _checkpoint_seeds, False),
)
