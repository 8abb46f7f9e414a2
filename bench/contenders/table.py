"""The table of contenders: Longshore, the hand-written limits and the alternatives; and those of the GPU case."""

from __future__ import annotations

from typing import Any

from bench.contenders import engines, limits, on_device, ours, ranks
from bench.harness.contender import Case, Contender

Setting = dict[str, Any]
B3, X3 = "BLAKE3", "XXH3-128"
UNKEPT_BYTES = 512 << 20  # an arena that is all window, so that no chunk is copied to another place to be kept
WARM = (Case("warm", "", B3), Case("warm_unverified", "not verified"))
UNCHECKED = (Case("cold"), Case("warm"))
LOADS = (
    *(Case("cold", "", B3), Case("cold_unverified", "not verified"), *WARM, Case("warm_xxh3", "", X3)),
    *(Case("part", "", B3), Case("part_unverified", "not verified")),
)


def _settings(names: str, *rows: tuple[Any, ...]) -> tuple[Setting, ...]:
    """Return settings as rows of values of these options. Where a row is shorter, the last options are left out."""
    return tuple(dict(zip(names.split(), row, strict=False)) for row in rows)


def _runai(*settings: Setting) -> tuple[Setting, ...]:
    """Return settings of Run:ai's streamer, which are environment variables."""
    return tuple({f"RUNAI_STREAMER_{name}": value for name, value in one.items()} for one in settings)


# -- settings, tried before the rounds; the first is taken when none is tried ----------------------------------

LIMIT_SETTINGS = _settings("connections piece_bytes", (2, 8 << 20), (2, 512 << 10), (1, 1 << 20), (4, 8 << 20))
RANGE_SETTINGS = _settings("tasks range_mib", (4, 8), (2, 4), (8, 8), (2, 16))
RUNAI_S3_SETTINGS = _runai(
    *({"CONCURRENCY": 4}, {"CONCURRENCY": 2}, {"CONCURRENCY": 16}),
    {"CONCURRENCY": 2, "MEMORY_LIMIT": 400_000_000},
    {"CONCURRENCY": 4, "MEMORY_LIMIT": 400_000_000},
)
# the third: its defaults
RUNAI_FILE_SETTINGS = _runai(
    *({"CONCURRENCY": 2}, {"CONCURRENCY": 4}, {"CONCURRENCY": 16}), {"CONCURRENCY": 2, "MEMORY_LIMIT": 400_000_000}
)

# -- the contenders; `bench.run` says which of them are in a scene ---------------------------------------------

OBSTORE, RUNAI = ("obstore",), ("torch", "runai_model_streamer")
ST, DOWNLOAD = ("torch", "safetensors"), ("torch", "obstore", "safetensors")


def _ours(name: str, title: str, placement: str, **options: Any) -> Contender:
    # One setting, the one that users get.
    return Contender(
        *(f"longshore_{name}", f"Longshore, {title}", ours.load_whole, LOADS),
        needs=("ray",),
        options={"placement": placement, **options},
    )


def _limit(name: str, title: str, arena: bool) -> Contender:
    return Contender(
        *(f"limit_{name}", f"hand-written limit, {title}", limits.load_limits, WARM, LIMIT_SETTINGS),
        options={"arena": arena},
    )


def _alternative(
    name: str, title: str, settings: tuple[Setting, ...], needs: tuple[str, ...], method: str
) -> Contender:
    return Contender(name, title, ranks.load_by_ranks, UNCHECKED, settings, needs, {"method": method})


def _engine(name: str, title: str, method: str, settings: tuple[Setting, ...] = ({},)) -> Contender:
    load, environment = (engines.load_vllm, name) if name == "vllm" else (engines.load_transformers, "")
    cases = (Case("cold", "", B3 if method == "longshore" else ""),)
    needs = (name, *(OBSTORE if method == "download" else ()))
    return Contender(f"{method}_{name}", title, load, cases, settings, needs, {"method": method}, environment)


_ALL = (
    _limit("arena", "shared memory and a copy", True),
    _limit("direct", "straight into private memory", False),
    _ours("arena", "through the arena", "via_arena"),
    _ours("direct", "direct", "direct"),
    _ours("arena_unkept", "through the arena, nothing kept", "via_arena", arena_bytes=UNKEPT_BYTES),
    _ours("direct_unkept", "direct, nothing kept", "direct", arena_bytes=UNKEPT_BYTES),
    _alternative("runai", "each rank: Run:ai streamer, all files", RUNAI_S3_SETTINGS, RUNAI, "runai"),
    _alternative("obstore_whole", "each rank: obstore, all tensors", RANGE_SETTINGS, OBSTORE, "obstore_whole"),
    _alternative("obstore_rows", "each rank: obstore, only the rows it needs", RANGE_SETTINGS, OBSTORE, "obstore_rows"),
    _alternative(
        *("download", "one download to tmpfs (obstore), then safetensors slices", RANGE_SETTINGS, DOWNLOAD, "download")
    ),
    _alternative("safetensors", "each rank: safetensors slices", ({},), ST, "safetensors"),
    _alternative("runai_file", "each rank: Run:ai streamer, all files", RUNAI_FILE_SETTINGS, RUNAI, "runai"),
    _engine("vllm", "Longshore", "longshore"),
    _engine("vllm", "vLLM's Run:ai streamer", "runai", RUNAI_S3_SETTINGS),
    _engine("vllm", "download to disk (obstore), vLLM's own loader", "download", RANGE_SETTINGS),
    Contender(
        *("update_vllm", "Longshore, a further revision", engines.update_vllm),
        (Case("update", "in place", B3), Case("restart", "into a new engine", B3)),
        needs=("vllm",),
        environment="vllm",
    ),
    _engine("transformers", "Longshore", "longshore"),
    _engine("transformers", "download to disk (obstore), `from_pretrained`", "download", RANGE_SETTINGS),
)
CONTENDERS = {contender.name: contender for contender in _ALL}

# -- the contenders of the GPU case (`bench.gpu`) --------------------------------------------------------------

FETCH_THREADS = ({}, *_settings("fetch_threads", (8,), (16,)))
_THREADS_AND_PIECES = [(threads, piece_mib, 3) for threads in (2, 4, 8, 16) for piece_mib in (4, 16)]
COPY_SETTINGS = _settings("threads piece_mib pieces", *_THREADS_AND_PIECES)
RUNAI_DEVICE_SETTINGS = _runai({"CONCURRENCY": 16}, {"CONCURRENCY": 8}, {"CONCURRENCY": 32})
FAST_DEVICE_SETTINGS = _settings(
    "threads bounce_mib block_mib", (16, 16, 16), (16, 16, 160), (8, 16, 16), (16, 16, 16 << 10)
)
TORCH, FAST, PLAIN = ("torch",), ("torch", "fastsafetensors"), (Case(""),)
_PINNED, _READS = "limit: copies of pinned memory", "limit: positioned reads and copies"
_ON_DEVICE = (
    Contender("pinned_copy", _PINNED, on_device.copy_pinned, PLAIN, needs=TORCH),
    Contender("read_and_copy", _READS, on_device.read_and_copy, PLAIN, COPY_SETTINGS, TORCH),
    Contender(
        *("longshore", "Longshore, verified", on_device.load_longshore, (Case("", "", B3),), FETCH_THREADS, TORCH),
        options={"verify": True},
    ),
    Contender(
        *("longshore_unverified", "Longshore, not verified", on_device.load_longshore, PLAIN, FETCH_THREADS, TORCH),
        options={"verify": False},
    ),
    Contender(
        "longshore_opened", "Longshore's safe_open, verified", on_device.load_opened, (Case("", "", B3),), needs=TORCH
    ),
    Contender("safetensors_device", "safetensors", on_device.load_safetensors, PLAIN, needs=ST),
    Contender("runai_device", "Run:ai streamer", on_device.load_runai, PLAIN, RUNAI_DEVICE_SETTINGS, RUNAI),
    Contender("fastsafetensors", "fastsafetensors", on_device.load_fast, PLAIN, FAST_DEVICE_SETTINGS, FAST),
)
ON_DEVICE = {contender.name: contender for contender in _ON_DEVICE}
