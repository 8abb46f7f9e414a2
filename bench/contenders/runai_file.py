"""Run:ai's model streamer from local files."""

from __future__ import annotations

from bench import runai
from bench.contender import run_contender
from bench.spec import Spec

TITLE = "Run:ai streamer, files"
CHECKS = False
KEEPS = True
SOURCES = ("file",)
CASES = runai.cases("file")
SETTINGS = [
    {"RUNAI_STREAMER_CONCURRENCY": 2},
    {"RUNAI_STREAMER_CONCURRENCY": 4},
    {"RUNAI_STREAMER_CONCURRENCY": 16},  # its default
    {"RUNAI_STREAMER_CONCURRENCY": 2, "RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"},
    {"RUNAI_STREAMER_CONCURRENCY": 2, "RUNAI_STREAMER_CHUNK_BYTESIZE": 8 << 20},
    {"RUNAI_STREAMER_CONCURRENCY": 2, "RUNAI_STREAMER_MEMORY_LIMIT": 400_000_000},
    {"RUNAI_STREAMER_CONCURRENCY": 2, "RUNAI_STREAMER_MEMORY_LIMIT": 400_000_000, "clone": True},
]


def main(spec: Spec) -> None:
    runai.set_variables(spec.options)
    runai.run(spec, [file.path for file in spec.files])


if __name__ == "__main__":
    run_contender(main)
