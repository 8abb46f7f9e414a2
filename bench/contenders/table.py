"""The table of contenders: the ceiling, the hand-written limits, Longshore and its peers."""

from __future__ import annotations

from typing import Any

from bench.contenders import limits, on_device, ours, s3_clients
from bench.contenders import model_loaders as loaders
from bench.harness.contender import Case, Contender, Memory, Source
from bench.harness.models import XXH3

HTTP: tuple[Source, ...] = ("http",)
FILE: tuple[Source, ...] = ("file",)
ALL: tuple[Source, ...] = ("http", "https", "file")
TORCH = ("torch",)

Setting = dict[str, Any]


def _settings(names: str, *rows: tuple[Any, ...]) -> tuple[Setting, ...]:
    """Return settings as rows of values of these options. Where a row is shorter, the last options are left out."""
    return tuple(dict(zip(names.split(), row, strict=False)) for row in rows)


def _runai(*settings: Setting) -> tuple[Setting, ...]:
    """Return settings of Run:ai's streamer, which are environment variables."""
    return tuple({f"RUNAI_STREAMER_{name}": value for name, value in one.items()} for one in settings)


def _work(
    name: str, title: str, memory: Memory, sources: tuple[Source, ...], limit: str, verify: bool = True, **options: Any
) -> Case:
    """Return a mode of a limit or of ours. `limit`: the contender that bounds it."""
    options |= {"memory": memory, "verify": verify}
    return Case(name, title, memory, sources, verify, memory != "arena", options, limit)


def _arena_cases(limit: str = "", **options: Any) -> tuple[Case, ...]:
    return (
        _work("verified", "verified", "arena", ALL, limit and f"{limit}:verified", **options),
        _work("xxh3", "verified by XXH3-128", "arena", HTTP, limit and f"{limit}:xxh3", model=XXH3, **options),
        _work("unverified", "not verified", "arena", HTTP, limit and f"{limit}:unverified", verify=False, **options),
    )


def _kept_cases(prefix: str = "", title: str = "", limit: str = "", **options: Any) -> tuple[Case, ...]:
    rows: tuple[tuple[str, str, Memory, tuple[Source, ...]], ...] = (
        ("fresh", "verified", "fresh", ALL),
        ("fresh_unverified", "not verified", "fresh", HTTP),
        ("recycled", "verified", "recycled", ("http", "file")),
        ("recycled_unverified", "not verified", "recycled", HTTP),
    )
    found = []
    for name, how, memory, sources in rows:
        bound = limit and f"{limit}:{name}"
        found.append(_work(prefix + name, title + how, memory, sources, bound, how == "verified", **options))
    return tuple(found)


def _xxh3_cases(prefix: str = "", title: str = "", limit: str = "", **options: Any) -> tuple[Case, ...]:
    """Return the verified modes of `_kept_cases`, with the other hash."""
    memories: tuple[Memory, ...] = ("fresh", "recycled")
    return tuple(
        _work(
            f"{prefix}{memory}_xxh3",
            f"{title}verified with XXH3-128",
            memory,
            ("http", "file"),
            limit and f"{limit}:{memory}_xxh3",
            model=XXH3,
            **options,
        )
        for memory in memories
    )


def _peer_cases(
    sources: tuple[Source, ...], first: str, first_title: str, recycled: str, *, option: str = "recycled"
) -> tuple[Case, ...]:
    """Return a mode into fresh memory, and one into recycled memory, which `option` asks for."""
    second = tuple(source for source in sources if source != "https")
    return (
        Case(first, first_title, "fresh", sources),
        Case("recycled", recycled, "recycled", second, options={option: True}),
    )


def _buffer_cases(sources: tuple[Source, ...]) -> tuple[Case, ...]:
    return _peer_cases(sources, "fresh", "into fresh memory", "into memory touched before", option="touched")


def _nothing_kept(name: str, title: str, sources: tuple[Source, ...]) -> Case:
    return Case(name, title, "none", sources, keeps=False, options={name: True})


SECOND_LOAD = "second load, freed memory reused"
_KEPT = ("kept", "tensors kept, fresh memory", f"tensors kept, {SECOND_LOAD}")
RAW = (Case("", "", "none", ALL, keeps=False),)
LIMIT = "hand-written limit"
LIMIT_ARENA, COPY = _arena_cases(arena=True), _kept_cases(arena=True)
DIRECT = (*_kept_cases(arena=False), *_xxh3_cases(arena=False))
ARENA = _arena_cases("limit_arena")
INTO_BUFFERS, OBSTORE, READS = _buffer_cases(HTTP), _buffer_cases(("http", "https")), _buffer_cases(FILE)
KEPT_FILES = _peer_cases(FILE, *_KEPT)
RUNAI_FILES = (*KEPT_FILES, _nothing_kept("passing", "tensors not kept", FILE))
RUNAI_S3 = (*_peer_cases(HTTP, *_KEPT), _nothing_kept("passing", "tensors not kept", HTTP))
AWS = (
    *_peer_cases(
        HTTP,
        "fresh",
        "body handed over in chunks, copied into fresh memory",
        "body handed over in chunks, copied into memory touched before",
        option="touched",
    ),
    Case("file", "written by the client into files in memory, mapped", options={"to_file": True}),
)
CLONES = (
    *_peer_cases(FILE, "clone", "safe_open and clone", f"safe_open and clone, {SECOND_LOAD}"),
    _nothing_kept("mapped", "load_file, every page touched, tensors stay views of the file", FILE),
)
LOAD = (
    *_kept_cases("via_arena_", "via_arena, ", "limit_copy", placement="via_arena"),
    *_kept_cases("direct_", "direct, ", "limit_direct", placement="direct"),
    *_xxh3_cases("direct_", "direct, ", "limit_direct", placement="direct"),
)

ON_DEVICE_CASE = Case("", "", "none", FILE)
ON_DEVICE_CHECKED = Case("", "", "none", FILE, checks=True, options={"verify": True})
ON_DEVICE_UNCHECKED = Case("", "", "none", FILE, options={"verify": False})

# -- settings, tried before the rounds; the first is taken when none is tried ----------------------------------

_K512, _K256, _M1, _M8 = 512 << 10, 256 << 10, 1 << 20, 8 << 20
CEILING_SETTINGS = _settings(
    "processes connections piece_bytes",
    *((1, 2, _K256), (1, 2, _M1), (2, 1, _K256), (2, 1, _M1)),
    *((2, 2, _K256), (2, 2, _M1), (2, 4, _K256), (2, 4, _M1)),
)
LIMIT_SETTINGS = _settings("connections piece_bytes", (2, _K512), (2, _M8), (4, _K512), (4, _M8))
# 0 connections: as many as that many Gbit/s take, which is the client's default with 10
AWS_SETTINGS = _settings(
    "gbps part_mib connections files threads",
    *((10, 8, 4, 4), (10, 8, 0, 4), (100, 8, 0, 4), (10, 8, 8, 4), (10, 8, 2, 2), (10, 16, 4, 4), (10, 8, 4, 1, 1)),
)
# the third: its defaults
BOTO3_SETTINGS = _settings(
    "concurrency chunk_mib io_chunk_kib files",
    *((4, 8, 1024, 1), (2, 8, 1024, 1), (10, 8, 256, 1), (4, 32, 1024, 1), (2, 16, 1024, 2)),
)
READ_SETTINGS = _settings("threads range_kib", (2, 1024), (2, 8192), (1, 8192), (4, 1024))
# the fourth: its defaults, but for the block, by which reads are split
FAST_SETTINGS = _settings("threads block_mib", (2, 16), (2, 160), (4, 16), (16, 16), (16, 16 << 10))
OBSTORE_SETTINGS = _settings(
    "call tasks range_mib",
    *(("get_range", 2, 4), ("get_range", 4, 8), ("get_range", 8, 8), ("get_range_async", 8, 8)),
)
# the third: its defaults
RUNAI_FILE_SETTINGS = _runai(
    *({"CONCURRENCY": 2}, {"CONCURRENCY": 4}, {"CONCURRENCY": 16}),
    {"CONCURRENCY": 2, "FS_STRATEGY": "sync_buffered"},
    {"CONCURRENCY": 2, "CHUNK_BYTESIZE": 8 << 20},
    {"CONCURRENCY": 2, "MEMORY_LIMIT": 400_000_000},
)
RUNAI_S3_SETTINGS = _runai(
    *({"CONCURRENCY": 4}, {"CONCURRENCY": 2}, {"CONCURRENCY": 8}, {"CONCURRENCY": 16}),
    {"CONCURRENCY": 4, "CHUNK_BYTESIZE": 5 << 20},
    {"CONCURRENCY": 4, "CHUNK_BYTESIZE": 16 << 20},
    {"CONCURRENCY": 4, "MEMORY_LIMIT": 400_000_000},
)
S3TORCH_SETTINGS = _settings("read_mib part_mib gbps threads", (8, 8, 10, 4), (16, 16, 10, 2), (64, 8, 10, 4))
FETCH_THREADS = ({}, *_settings("fetch_threads", (8,), (16,)))
_THREADS_AND_PIECES = [(threads, piece_mib, 3) for threads in (2, 4, 8, 16) for piece_mib in (4, 16)]
COPY_SETTINGS = _settings("threads piece_mib pieces", *_THREADS_AND_PIECES)
RUNAI_DEVICE_SETTINGS = _runai({"CONCURRENCY": 16}, {"CONCURRENCY": 8}, {"CONCURRENCY": 32})
FAST_DEVICE_SETTINGS = _settings(
    "threads bounce_mib block_mib", (16, 16, 16), (16, 16, 160), (8, 16, 16), (16, 16, 16 << 10)
)

BOTO3, STORE, S3TORCH = ("torch", "boto3"), ("torch", "obstore"), ("torch", "s3torchconnector")
RUNAI, FAST, ST = ("torch", "runai_model_streamer"), ("torch", "fastsafetensors"), ("torch", "safetensors")

# Name, what it measures, function that does one load, modes, settings, needed modules. They run in this order.
_ALL = (
    Contender("ceiling_raw", "ceiling: raw range reads into warm memory", limits.load_ceiling, RAW, CEILING_SETTINGS),
    Contender("limit_arena", f"{LIMIT}, into the arena", limits.load_limit, LIMIT_ARENA, LIMIT_SETTINGS),
    Contender("limit_copy", f"{LIMIT}, arena and a copy into private memory", limits.load_limit, COPY, LIMIT_SETTINGS),
    Contender("limit_direct", f"{LIMIT}, straight into private memory", limits.load_limit, DIRECT, LIMIT_SETTINGS),
    # Ours has one setting, the one that users get: it finds the number of requests in flight while it loads.
    Contender("longshore_arena", "Longshore, into the arena", ours.load_into_arena, ARENA, needs=("ray",)),
    Contender("longshore_load", "Longshore, whole load into CPU memory", ours.load_whole, LOAD, needs=("ray",)),
    Contender("aws_crt", "AWS CRT S3 client", s3_clients.load_aws_crt, AWS, AWS_SETTINGS, ("torch", "awscrt")),
    Contender("boto3_transfer", "boto3 transfer manager", s3_clients.load_boto3, INTO_BUFFERS, BOTO3_SETTINGS, BOTO3),
    Contender("ceiling_file", "limit: positioned reads", limits.load_positioned_reads, READS, READ_SETTINGS, TORCH),
    Contender("fastsafetensors_file", "fastsafetensors, files", loaders.load_fast, KEPT_FILES, FAST_SETTINGS, FAST),
    Contender(
        "obstore_ranges", "obstore, ranges and a copy", s3_clients.load_obstore, OBSTORE, OBSTORE_SETTINGS, STORE
    ),
    Contender(
        "runai_file", "Run:ai streamer, files", loaders.load_runai_files, RUNAI_FILES, RUNAI_FILE_SETTINGS, RUNAI
    ),
    Contender("runai_s3", "Run:ai streamer, S3", loaders.load_runai_s3, RUNAI_S3, RUNAI_S3_SETTINGS, RUNAI),
    Contender("s3torch", "s3torchconnector", s3_clients.load_s3torch, INTO_BUFFERS, S3TORCH_SETTINGS, S3TORCH),
    Contender(
        "safetensors_clone", "safetensors", loaders.load_safetensors, CLONES, _settings("threads", (1,), (2,)), ST
    ),
)
CONTENDERS = {contender.name: contender for contender in _ALL}

# The contenders of the GPU case (`bench.gpu`).
_PINNED, _READS = "limit: copies of pinned memory", "limit: positioned reads and copies"
_ON_DEVICE = (
    Contender("pinned_copy", _PINNED, on_device.copy_pinned, (ON_DEVICE_CASE,), needs=TORCH),
    Contender("read_and_copy", _READS, on_device.read_and_copy, (ON_DEVICE_CASE,), COPY_SETTINGS, TORCH),
    Contender("longshore", "Longshore, verified", on_device.load_longshore, (ON_DEVICE_CHECKED,), FETCH_THREADS, TORCH),
    Contender(
        *("longshore_unverified", "Longshore, not verified", on_device.load_longshore),
        *((ON_DEVICE_UNCHECKED,), FETCH_THREADS, TORCH),
    ),
    Contender("safetensors", "safetensors", on_device.load_safetensors, (ON_DEVICE_CASE,), needs=ST),
    Contender("runai", "Run:ai streamer", on_device.load_runai, (ON_DEVICE_CASE,), RUNAI_DEVICE_SETTINGS, RUNAI),
    Contender("fastsafetensors", "fastsafetensors", on_device.load_fast, (ON_DEVICE_CASE,), FAST_DEVICE_SETTINGS, FAST),
)
ON_DEVICE = {contender.name: contender for contender in _ON_DEVICE}
