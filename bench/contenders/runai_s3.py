"""Run:ai's model streamer from S3."""

from __future__ import annotations

from bench import runai
from bench.contender import run_contender
from bench.s3_access import s3_uris, set_s3_environment
from bench.spec import Spec

TITLE = "Run:ai streamer, S3"
CHECKS = False
KEEPS = True
CASES = runai.cases("http")
SETTINGS = [
    {"RUNAI_STREAMER_CONCURRENCY": 4},
    {"RUNAI_STREAMER_CONCURRENCY": 2},
    {"RUNAI_STREAMER_CONCURRENCY": 8},  # its default
    {"RUNAI_STREAMER_CONCURRENCY": 16},
    {"RUNAI_STREAMER_CONCURRENCY": 4, "RUNAI_STREAMER_CHUNK_BYTESIZE": 5 << 20},
    {"RUNAI_STREAMER_CONCURRENCY": 4, "RUNAI_STREAMER_CHUNK_BYTESIZE": 16 << 20},
    {"RUNAI_STREAMER_CONCURRENCY": 4, "RUNAI_STREAMER_MEMORY_LIMIT": 400_000_000},
    {"RUNAI_STREAMER_CONCURRENCY": 4, "RUNAI_STREAMER_MEMORY_LIMIT": 400_000_000, "clone": True},
]


def main(spec: Spec) -> None:
    set_s3_environment(spec)
    runai.set_variables({"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": 0, **spec.options})
    runai.run(spec, s3_uris(spec))


if __name__ == "__main__":
    run_contender(main)
