"""Amazon's S3 connector for PyTorch: a reader per object, read into memory."""

from __future__ import annotations

from bench.contender import Case, run_contender
from bench.delivered import check_tensors
from bench.host_buffers import FileBuffers
from bench.in_threads import in_threads
from bench.measure import measured
from bench.s3_access import REGION, set_s3_environment
from bench.spec import Spec

TITLE = "s3torchconnector"
CHECKS = False
KEEPS = True
CASES = (
    Case("fresh", "into fresh memory", CHECKS, KEEPS, memory="fresh"),
    Case("recycled", "into memory touched before", CHECKS, KEEPS, memory="recycled", options={"touched": True}),
)
SETTINGS = [
    {"reader": "ranges", "read_mib": 8, "part_mib": 8, "gbps": 10, "threads": 4},
    {"reader": "ranges", "read_mib": 16, "part_mib": 16, "gbps": 10, "threads": 2},
    {"reader": "ranges", "read_mib": 64, "part_mib": 8, "gbps": 10, "threads": 4},
    {"reader": "sequential", "read_mib": 8, "part_mib": 8, "gbps": 10, "threads": 4},  # its default reader
]


def main(spec: Spec) -> None:
    set_s3_environment(spec)
    import torch  # noqa: F401
    from s3torchconnector import S3ClientConfig, S3ReaderConstructor
    from s3torchconnector._s3client import S3Client  # the same that its data sets and checkpoints are made of

    options = spec.options
    client = S3Client(
        region=REGION,
        endpoint=spec.endpoint,
        s3client_config=S3ClientConfig(
            throughput_target_gbps=options["gbps"], part_size=options["part_mib"] << 20, force_path_style=True
        ),
    )
    if options["reader"] == "ranges":
        reader = S3ReaderConstructor.range_based(buffer_size=0)  # straight into what it is given
    else:
        reader = S3ReaderConstructor.sequential()
    step = options["read_mib"] << 20
    client.head_object(spec.bucket, spec.files[0].key)
    buffers = FileBuffers(spec, touched=True) if options.get("touched") else None
    with measured(spec, touched_before_bytes=buffers.touched_bytes if buffers else 0):
        buffers = buffers or FileBuffers(spec, touched=False)
        todo = iter(list(zip(spec.files, buffers.views, strict=True)))

        def work() -> None:
            for file, view in todo:
                at = 0
                with client.get_object(spec.bucket, file.key, reader_constructor=reader) as opened:
                    while at < len(view):
                        got = opened.readinto(view[at : at + step])
                        if not got:
                            raise EOFError(f"{file.key} ends at {at}")
                        at += got

        in_threads(options["threads"], work)
        tensors = buffers.tensors()
    check_tensors(spec, tensors)


if __name__ == "__main__":
    run_contender(main)
