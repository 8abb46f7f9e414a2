"""boto3's transfer manager: download_fileobj into memory, the way most Python programs read S3."""

from __future__ import annotations

import io
from typing import Any

from bench.contender import Case, run_contender
from bench.delivered import check_tensors
from bench.host_buffers import FileBuffers
from bench.in_threads import in_threads
from bench.measure import measured
from bench.s3_access import ACCESS_KEY, REGION, SECRET_KEY, set_s3_environment
from bench.spec import Spec

TITLE = "boto3 transfer manager"
CHECKS = False
KEEPS = True
CASES = (
    Case("fresh", "into fresh memory", CHECKS, KEEPS, memory="fresh"),
    Case(
        "recycled",
        "into memory touched before",
        CHECKS,
        KEEPS,
        memory="recycled",
        options={"touched": True},
    ),
)
SETTINGS = [
    {"concurrency": 4, "chunk_mib": 8, "io_chunk_kib": 1024, "files": 1},
    {"concurrency": 2, "chunk_mib": 8, "io_chunk_kib": 1024, "files": 1},
    {"concurrency": 10, "chunk_mib": 8, "io_chunk_kib": 256, "files": 1},  # its defaults
    {"concurrency": 4, "chunk_mib": 32, "io_chunk_kib": 1024, "files": 1},
    {"concurrency": 2, "chunk_mib": 16, "io_chunk_kib": 1024, "files": 2},
]


class _Window(io.RawIOBase):
    """A buffer as a seekable file. The transfer manager writes to it from one thread."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        end = self._at + len(data)
        self._view[self._at : end] = data
        self._at = end
        return len(data)


def main(spec: Spec) -> None:
    import boto3
    import torch  # noqa: F401
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    set_s3_environment(spec)
    options = spec.options
    client = boto3.client(
        "s3",
        endpoint_url=spec.endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name=REGION,
        verify=spec.ca_bundle or None,
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
    buffers = FileBuffers(spec, touched=True) if options.get("touched") else None
    with measured(spec, touched_before_bytes=buffers.touched_bytes if buffers else 0):
        buffers = buffers or FileBuffers(spec, touched=False)
        todo = iter(list(zip(spec.files, buffers.views, strict=True)))

        def work() -> None:
            for file, view in todo:
                window: Any = _Window(view)
                client.download_fileobj(spec.bucket, file.key, window, Config=transfer)

        in_threads(options["files"], work)
        tensors = buffers.tensors()
    check_tensors(spec, tensors)


if __name__ == "__main__":
    run_contender(main)
