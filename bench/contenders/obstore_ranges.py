"""obstore (Rust's object_store): range GETs, each answer copied into the buffer of its file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from bench.contender import Case, run_contender
from bench.delivered import check_tensors
from bench.host_buffers import FileBuffers, FileRange, file_ranges, keep_freed_memory
from bench.in_threads import in_threads
from bench.measure import measured
from bench.s3_access import ACCESS_KEY, REGION, SECRET_KEY
from bench.spec import Spec

TITLE = "obstore, ranges and a copy"
CHECKS = False
KEEPS = True
CASES = (
    Case("fresh", "into fresh memory", CHECKS, KEEPS, memory="fresh", sources=("http", "https")),
    Case("recycled", "into memory touched before", CHECKS, KEEPS, memory="recycled", options={"touched": True}),
)
SETTINGS = [
    {"call": "stream", "tasks": 2, "range_mib": 32},
    {"call": "get_range", "tasks": 2, "range_mib": 4},
    {"call": "get_range", "tasks": 4, "range_mib": 8},
    {"call": "get_range", "tasks": 8, "range_mib": 8},
    {"call": "get_range", "tasks": 4, "range_mib": 8, "keep_freed": True},
    {"call": "get_ranges", "tasks": 2, "range_mib": 4},
    {"call": "get_range_async", "tasks": 8, "range_mib": 8},
]
_GROUP = 4  # ranges in one call of get_ranges
_STREAM_CHUNK_BYTES = 1 << 20


def main(spec: Spec) -> None:
    import obstore
    import torch  # noqa: F401
    from obstore.store import S3Store

    options = spec.options
    if options.get("keep_freed"):
        keep_freed_memory()
    client_options: Any = {"allow_http": True}
    if spec.ca_bundle:
        # Its TLS takes no certificate that signs itself. Checking one costs nothing beside the weights.
        client_options["allow_invalid_certificates"] = True
    store = S3Store(
        spec.bucket,
        endpoint=spec.endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region=REGION,
        virtual_hosted_style_request=False,
        client_options=client_options,
    )
    obstore.head(store, spec.files[0].key)
    ranges = file_ranges(spec, options["range_mib"] << 20)
    tasks = options["tasks"]
    touched = bool(options.get("touched"))
    buffers = FileBuffers(spec, touched=touched) if touched else None
    with measured(spec, touched_before_bytes=buffers.touched_bytes if buffers else 0) as m:
        buffers = buffers or FileBuffers(spec, touched=False)
        if options["call"] == "get_range_async":
            asyncio.run(_read_async(obstore, store, spec, ranges, buffers.views, tasks))
        else:
            _read_in_threads(_READERS[options["call"]], obstore, store, spec, ranges, buffers.views, tasks)
        tensors = buffers.tensors()
        m.extra["requests"] = len(ranges)
    check_tensors(spec, tensors)


def _by_range(obstore: Any, store: Any, spec: Spec, ranges: Iterator[FileRange], views: list[memoryview]) -> None:
    for one in ranges:
        data = obstore.get_range(store, spec.files[one.file].key, start=one.start, end=one.end)
        views[one.file][one.start : one.end] = memoryview(data)


def _by_ranges(obstore: Any, store: Any, spec: Spec, ranges: Iterator[FileRange], views: list[memoryview]) -> None:
    """Several ranges of one file per call, not merged, so that they are asked for side by side."""
    for first in ranges:
        group = [first]
        for one in ranges:
            group.append(one)
            if len(group) == _GROUP:
                break
        for number in {one.file for one in group}:
            same = [one for one in group if one.file == number]
            starts, ends = [one.start for one in same], [one.end for one in same]
            answers = obstore.get_ranges(store, spec.files[number].key, starts=starts, ends=ends, coalesce=0)
            for one, data in zip(same, answers, strict=True):
                views[number][one.start : one.end] = memoryview(data)


def _by_stream(obstore: Any, store: Any, spec: Spec, ranges: Iterator[FileRange], views: list[memoryview]) -> None:
    for one in ranges:
        at = one.start
        answer = obstore.get(store, spec.files[one.file].key, options={"range": (one.start, one.end)})
        for chunk in answer.stream(min_chunk_size=_STREAM_CHUNK_BYTES):
            piece = memoryview(chunk)
            views[one.file][at : at + len(piece)] = piece
            at += len(piece)


_READERS: dict[str, Callable[..., None]] = {"get_range": _by_range, "get_ranges": _by_ranges, "stream": _by_stream}


def _read_in_threads(
    read: Callable[..., None],
    obstore: Any,
    store: Any,
    spec: Spec,
    ranges: list[FileRange],
    views: list[memoryview],
    threads: int,
) -> None:
    """Each thread takes the next range until none is left. Raises what any of them raised."""
    todo = iter(ranges)  # next() of a list's iterator is atomic under the GIL

    def work() -> None:
        read(obstore, store, spec, todo, views)

    in_threads(threads, work)


async def _read_async(
    obstore: Any, store: Any, spec: Spec, ranges: list[FileRange], views: list[memoryview], tasks: int
) -> None:
    todo = iter(ranges)

    async def work() -> None:
        for one in todo:
            data = await obstore.get_range_async(store, spec.files[one.file].key, start=one.start, end=one.end)
            views[one.file][one.start : one.end] = memoryview(data)

    await asyncio.gather(*(work() for _ in range(tasks)))


if __name__ == "__main__":
    run_contender(main)
