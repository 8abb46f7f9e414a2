"""S3 clients that read objects and leave the memory to their user: obstore, awscrt, boto3, s3torchconnector.

They check nothing. The range server checks no signature, so any keys do.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.contenders.buffers import Buffer, check_tensors, file_ranges, fill_buffers, in_threads, tensors_of
from bench.harness.contender import BenchFile, NotRunnable, Spec
from bench.harness.measure import measured

ACCESS_KEY = SECRET_KEY = "bench"
REGION = "us-east-1"


def set_s3_environment(spec: Spec) -> None:
    """Set endpoint, keys and region for clients that read the environment, instead of those of the user."""
    os.environ.update(
        AWS_ENDPOINT_URL=spec.endpoint,
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
        AWS_REGION=REGION,
        AWS_DEFAULT_REGION=REGION,
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    if spec.ca_bundle:
        os.environ["AWS_CA_BUNDLE"] = spec.ca_bundle


def load_obstore(spec: Spec) -> None:
    """Read ranges with obstore (Rust's object_store) and copy each answer into the buffer of its file."""
    import obstore
    from obstore.store import S3Store

    set_s3_environment(spec)
    options = spec.options
    client_options: Any = {"allow_http": True}
    if spec.ca_bundle:
        # Its TLS takes no self-signed certificate. Checking one costs nothing beside the weights.
        client_options["allow_invalid_certificates"] = True
    store = S3Store(spec.bucket, virtual_hosted_style_request=False, client_options=client_options)
    obstore.head(store, spec.files[0].key)
    ranges = file_ranges(spec, options["range_mib"] << 20)

    def fill(views: list[memoryview]) -> None:
        todo = iter(ranges)  # next() of a list's iterator is atomic under the GIL

        def work() -> None:
            for one in todo:
                data = obstore.get_range(store, spec.files[one.file].key, start=one.start, end=one.end)
                views[one.file][one.start : one.end] = memoryview(data)

        async def work_async() -> None:
            for one in todo:
                data = await obstore.get_range_async(store, spec.files[one.file].key, start=one.start, end=one.end)
                views[one.file][one.start : one.end] = memoryview(data)

        async def all_tasks() -> None:
            await asyncio.gather(*(work_async() for _ in range(options["tasks"])))

        if options["call"] == "get_range_async":
            asyncio.run(all_tasks())
        else:
            in_threads(options["tasks"], work)

    fill_buffers(spec, fill)


def load_aws_crt(spec: Spec) -> None:
    """Read objects with the S3 client of AWS' common runtime, which splits a GET into parts of its own.

    With the option "to_file" the client writes each object into a file in memory itself, without Python.
    """
    if spec.source != "http":
        raise NotRunnable("awscrt's S3 client is measured over plain HTTP only")
    client = _crt_client(spec)
    if spec.options.get("to_file"):
        import torch  # noqa: F401  # before the clock starts

        with measured(spec):
            tensors = tensors_of(_download(spec, client))
        check_tensors(spec, tensors)
        return

    def fill(views: list[memoryview]) -> None:
        def body_of(number: int) -> dict[str, Any]:
            base = np.frombuffer(views[number], np.uint8).ctypes.data

            def on_body(chunk: bytes, offset: int, **_: Any) -> None:
                ctypes.memmove(base + offset, chunk, len(chunk))  # releases the GIL, unlike a slice assignment

            return {"on_body": on_body}

        _crt_get_all(spec, client, body_of)

    fill_buffers(spec, fill)


def _crt_client(spec: Spec) -> Any:
    from awscrt.auth import AwsCredentialsProvider
    from awscrt.io import ClientBootstrap, DefaultHostResolver, EventLoopGroup
    from awscrt.s3 import S3Client, S3RequestTlsMode, create_default_s3_signing_config

    options = spec.options
    loops = EventLoopGroup(options.get("threads", 0))  # 0: awscrt decides
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


def _download(spec: Spec, client: Any) -> list[Buffer]:
    """Let the client write every object into a file in memory, and map those files."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # the pages exist: using them costs nothing more
    descriptors = [os.memfd_create(f"bench-{number}") for number in range(len(spec.files))]
    try:
        _crt_get_all(spec, client, lambda number: {"recv_filepath": f"/proc/self/fd/{descriptors[number]}"})
        maps = [mmap.mmap(one, file.size_bytes, flags=flags) for one, file in zip(descriptors, spec.files, strict=True)]
    finally:
        for one in descriptors:
            os.close(one)
    return [np.frombuffer(one, np.uint8) for one in maps]


def _crt_get_all(spec: Spec, client: Any, target_of: Any) -> None:
    """GET every file, `options["files"]` at a time. Raises the error of the first that failed."""
    from awscrt.http import HttpHeaders, HttpRequest
    from awscrt.s3 import S3RequestType

    host = urlsplit(spec.endpoint).netloc
    free = threading.BoundedSemaphore(spec.options["files"])
    running = []
    for number, file in enumerate(spec.files):
        free.acquire()
        request = HttpRequest("GET", f"/{spec.bucket}/{file.key}", HttpHeaders([("host", host)]))
        done = client.make_request(
            type=S3RequestType.GET_OBJECT, request=request, on_done=lambda **_: free.release(), **target_of(number)
        )
        running.append(done)
    for done in running:
        done.finished_future.result()


class _Window:
    """A buffer as the part of a file that the transfer manager uses, from one thread."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (self._at if whence else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: bytes) -> None:
        self._view[self._at : self._at + len(data)] = data
        self._at += len(data)


def load_boto3(spec: Spec) -> None:
    """Download with boto3's transfer manager into memory, the way most Python programs read S3."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    set_s3_environment(spec)
    options = spec.options
    client = boto3.client(
        "s3",
        config=Config(
            s3={"addressing_style": "path"},
            max_pool_connections=options["concurrency"] * options["files"] + 2,
            response_checksum_validation="when_required",
            request_checksum_calculation="when_required",
        ),
    )
    transfer = TransferConfig(
        multipart_threshold=options["chunk_mib"] << 20,
        multipart_chunksize=options["chunk_mib"] << 20,
        max_concurrency=options["concurrency"],
        io_chunksize=options["io_chunk_kib"] << 10,
        preferred_transfer_client="classic",
    )
    client.head_object(Bucket=spec.bucket, Key=spec.files[0].key)

    def read(file: BenchFile, view: memoryview) -> None:
        window: Any = _Window(view)
        client.download_fileobj(spec.bucket, file.key, window, Config=transfer)

    _fill_by_file(spec, options["files"], read)


def load_s3torch(spec: Spec) -> None:
    """Read with Amazon's S3 connector for PyTorch: a reader per object, read into memory."""
    set_s3_environment(spec)
    from s3torchconnector import S3ClientConfig, S3ReaderConstructor
    from s3torchconnector._s3client import S3Client  # the client of its data sets and checkpoints

    options = spec.options
    config = S3ClientConfig(
        throughput_target_gbps=options["gbps"], part_size=options["part_mib"] << 20, force_path_style=True
    )
    client = S3Client(region=REGION, endpoint=spec.endpoint, s3client_config=config)
    reader = S3ReaderConstructor.range_based(buffer_size=0)  # straight into the memory that it is given
    step = options["read_mib"] << 20
    client.head_object(spec.bucket, spec.files[0].key)

    def read(file: BenchFile, view: memoryview) -> None:
        at = 0
        with client.get_object(spec.bucket, file.key, reader_constructor=reader) as opened:
            while at < len(view):
                count = opened.readinto(view[at : at + step])
                if not count:
                    raise EOFError(f"{file.key} ends at {at}")
                at += count

    _fill_by_file(spec, options["threads"], read)


def _fill_by_file(spec: Spec, threads: int, read: Callable[[BenchFile, memoryview], None]) -> None:
    """Measure threads that each read the next whole file, until none is left."""

    def fill(views: list[memoryview]) -> None:
        todo = iter(list(zip(spec.files, views, strict=True)))

        def work() -> None:
            for file, view in todo:
                read(file, view)

        in_threads(threads, work)

    fill_buffers(spec, fill)
