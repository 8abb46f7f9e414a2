"""AWS' common runtime (awscrt): its S3 client, which splits a GET into parts of its own."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.contender import Case, NotRunnable, run_contender
from bench.delivered import check_tensors
from bench.host_buffers import FileBuffers
from bench.measure import measured
from bench.s3_access import ACCESS_KEY, REGION, SECRET_KEY
from bench.spec import Spec

TITLE = "AWS CRT S3 client"
CHECKS = False
KEEPS = True
CASES = (
    Case("fresh", "body handed over in chunks, copied into fresh memory", CHECKS, KEEPS, memory="fresh"),
    Case(
        "recycled",
        "body handed over in chunks, copied into memory touched before",
        CHECKS,
        KEEPS,
        memory="recycled",
        options={"touched": True},
    ),
    Case(
        "file",
        "written by the client into files in memory, mapped",
        CHECKS,
        KEEPS,
        memory="fresh",
        options={"to_file": True},
    ),
)
SETTINGS = [
    {"gbps": 10, "part_mib": 8, "connections": 4, "files": 4},
    {"gbps": 10, "part_mib": 8, "connections": 0, "files": 4},  # its defaults: as many as 10 Gbit/s take
    {"gbps": 100, "part_mib": 8, "connections": 0, "files": 4},
    {"gbps": 10, "part_mib": 8, "connections": 8, "files": 4},
    {"gbps": 10, "part_mib": 8, "connections": 2, "files": 2},
    {"gbps": 10, "part_mib": 16, "connections": 4, "files": 4},
    {"gbps": 10, "part_mib": 8, "connections": 4, "files": 1, "threads": 1},
]


def main(spec: Spec) -> None:
    import torch  # noqa: F401

    if spec.source != "http":
        raise NotRunnable("awscrt's S3 client is measured over plain HTTP only")
    client = _client(spec)
    host = urlsplit(spec.endpoint).netloc
    touched = bool(spec.options.get("touched"))
    buffers = FileBuffers(spec, touched=True) if touched else None
    with measured(spec, touched_before_bytes=buffers.touched_bytes if buffers else 0) as m:
        m.extra["to"] = "file" if spec.options.get("to_file") else "memory"
        if spec.options.get("to_file"):
            buffers = _download(spec, client, host)
        else:
            buffers = buffers or FileBuffers(spec, touched=False)
            _copy(spec, client, host, buffers)
        tensors = buffers.tensors()
    check_tensors(spec, tensors)


def _client(spec: Spec) -> Any:
    from awscrt.auth import AwsCredentialsProvider
    from awscrt.io import ClientBootstrap, DefaultHostResolver, EventLoopGroup
    from awscrt.s3 import S3Client, S3RequestTlsMode, create_default_s3_signing_config

    options = spec.options
    loops = EventLoopGroup(options.get("threads", 0))  # 0: as many as it thinks right
    keys = AwsCredentialsProvider.new_static(ACCESS_KEY, SECRET_KEY)
    return S3Client(
        bootstrap=ClientBootstrap(loops, DefaultHostResolver(loops)),
        region=REGION,
        tls_mode=S3RequestTlsMode.DISABLED,
        signing_config=create_default_s3_signing_config(region=REGION, credential_provider=keys),
        part_size=options["part_mib"] << 20,
        throughput_target_gbps=float(options["gbps"]),
        max_active_connections_override=options["connections"] or None,
    )


def _copy(spec: Spec, client: Any, host: str, buffers: FileBuffers) -> None:
    """`options["files"]` objects at a time, every chunk copied to its place as it is handed over."""

    def body_of(number: int) -> dict[str, Any]:
        base = np.frombuffer(buffers.views[number], np.uint8).ctypes.data

        def on_body(chunk: bytes, offset: int, **_: Any) -> None:
            ctypes.memmove(base + offset, chunk, len(chunk))  # lets go of the GIL, which a slice assignment does not

        return {"on_body": on_body}

    _get_all(spec, client, host, body_of)


def _download(spec: Spec, client: Any, host: str) -> FileBuffers:
    """The client writes each object into a file in memory itself, without Python; the tensors are views of those."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # the pages are there: using them costs nothing more
    descriptors = [os.memfd_create(f"bench-{number}") for number in range(len(spec.files))]
    try:
        _get_all(spec, client, host, lambda number: {"recv_filepath": f"/proc/self/fd/{descriptors[number]}"})
        maps = [mmap.mmap(one, file.size_bytes, flags=flags) for one, file in zip(descriptors, spec.files, strict=True)]
    finally:
        for one in descriptors:
            os.close(one)
    return FileBuffers.over([np.frombuffer(one, np.uint8) for one in maps])


def _get_all(spec: Spec, client: Any, host: str, to: Any) -> None:
    """GET every file, so many at a time. Raises what the first failed one raised."""
    from awscrt.http import HttpHeaders, HttpRequest
    from awscrt.s3 import S3RequestType

    free = threading.BoundedSemaphore(spec.options["files"])
    running = []
    for number, file in enumerate(spec.files):
        free.acquire()
        request = HttpRequest("GET", f"/{spec.bucket}/{file.key}", HttpHeaders([("host", host)]))
        done = client.make_request(
            type=S3RequestType.GET_OBJECT, request=request, on_done=lambda **_: free.release(), **to(number)
        )
        running.append(done)
    for done in running:
        done.finished_future.result()


if __name__ == "__main__":
    run_contender(main)
