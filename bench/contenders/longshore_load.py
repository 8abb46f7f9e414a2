"""Ours, all of it: `cluster.load(device="cpu")` with two ranks, from the call to READY, tensors kept in the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bench.contender import Case, Memory, run_contender, sources_of
from bench.measure import measured
from bench.our_cluster import (
    ARENA_BYTES,
    RANKS,
    main_model,
    model_uri,
    our_cluster,
    our_config,
    settle,
    store_arguments,
)
from bench.process_tree import is_ray_daemon
from bench.sample import SMALL, TWIN, XXH3
from bench.spec import Spec

TITLE = "Longshore, whole load into CPU memory"
CHECKS = True
KEEPS = True
_LIMITS = {"via_arena": "limit_copy", "direct": "limit_direct"}


def _cases() -> Iterator[Case]:
    memories: tuple[Memory, ...] = ("fresh", "recycled")
    for placement, limit in _LIMITS.items():
        for memory in memories:
            for verify in (True, False):
                yield Case(
                    f"{placement}_{memory}" + ("" if verify else "_unverified"),
                    f"{placement}, {'verified' if verify else 'not verified'}",
                    checks=verify,
                    keeps=True,
                    memory=memory,
                    sources=sources_of(memory, verify),
                    options={"placement": placement, "memory": memory, "verify": verify},
                    limit=f"{limit}:{memory}" + ("" if verify else "_unverified"),
                )
    for memory in memories:
        yield Case(
            f"direct_{memory}_xxh3",
            "direct, verified with XXH3-128",
            checks=True,
            keeps=True,
            memory=memory,
            sources=("http", "file"),
            options={"placement": "direct", "memory": memory, "verify": True, "model": XXH3},
            hash_name="xxh3_128",
        )


CASES = tuple(_cases())
SETTINGS: list[dict[str, object]] = [{}]  # what a user gets: requests in flight are found while it loads


def main(spec: Spec) -> None:
    import cluster

    recycled = spec.options["memory"] == "recycled"
    arguments = {
        "fsdp_size": RANKS,
        "device": "cpu",
        "placement": spec.options["placement"],
        "progress": False,
        **store_arguments(spec),
    }
    with our_cluster(spec, our_config(spec)):
        # Starts the workers, which stay warm. The twin touches the memory that is recycled, too; workers keep the arena
        # mapped from their second load on.
        for _ in range(2):
            with cluster.load(model_uri(spec, TWIN if recycled else SMALL), **arguments) as other:
                touched_bytes = other.report.placed_bytes if recycled else 0
        settle()
        with measured(spec, touched_before_bytes=touched_bytes, memory_apart=is_ray_daemon) as m:
            model = cluster.load(main_model(spec), **arguments)
            m.stop()
            report = model.report
            if report.cached_bytes or report.resident:
                raise RuntimeError(f"not from the store: {report.cached_bytes} bytes were in the arena before")
            m.extra |= {
                "ranks": RANKS,
                "arena_bytes": ARENA_BYTES,
                "stream_s": report.load_s,
                "plan_s": report.plan_s,
                "start_s": report.start_s,
                "total_s": report.total_s,
                "stages": dataclasses.asdict(report.stages),
                "store_bytes": report.store_bytes,
                "verified": report.verified,
                "placement": report.placement_mode,
            }
        model.release()


if __name__ == "__main__":
    run_contender(main)
