"""The limit for local files: positioned reads by plain threads, straight into memory that is there."""

from __future__ import annotations

import os

from bench.contender import Case, run_contender
from bench.delivered import check_tensors
from bench.host_buffers import FileBuffers, file_ranges
from bench.in_threads import in_threads
from bench.measure import measured
from bench.spec import Spec

TITLE = "limit: positioned reads"
CHECKS = False
KEEPS = True
SOURCES = ("file",)
CASES = (
    Case("fresh", "into fresh memory", CHECKS, KEEPS, memory="fresh", sources=("file",)),
    Case(
        "recycled",
        "into memory touched before",
        CHECKS,
        KEEPS,
        memory="recycled",
        sources=("file",),
        options={"touched": True},
    ),
)
SETTINGS = [
    {"threads": 2, "range_kib": 1024},
    {"threads": 2, "range_kib": 8192},
    {"threads": 1, "range_kib": 8192},
    {"threads": 4, "range_kib": 1024},
]


def main(spec: Spec) -> None:
    import torch  # noqa: F401

    touched = bool(spec.options.get("touched"))
    buffers = FileBuffers(spec, touched=True) if touched else None
    files = [os.open(file.path, os.O_RDONLY) for file in spec.files]
    ranges = file_ranges(spec, spec.options["range_kib"] << 10)
    with measured(spec, touched_before_bytes=buffers.touched_bytes if buffers else 0):
        buffers = buffers or FileBuffers(spec, touched=False)
        views, todo = buffers.views, iter(ranges)

        def work() -> None:
            for one in todo:
                at = one.start
                while at < one.end:
                    got = os.preadv(files[one.file], [views[one.file][at : one.end]], at)
                    if not got:
                        raise EOFError(f"{spec.files[one.file].path} ends at {at}")
                    at += got

        in_threads(spec.options["threads"], work)
        tensors = buffers.tensors()
    for file in files:
        os.close(file)
    check_tensors(spec, tensors)


if __name__ == "__main__":
    run_contender(main)
