"""Ours, from the store into the arena: a real agent, two processes that host ranks, leases, digests; nothing placed."""

from __future__ import annotations

import dataclasses

from bench.contender import Case, run_contender
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
from bench.sample import TWIN, XXH3
from bench.spec import Spec

TITLE = "Longshore, into the arena"
CHECKS = True
KEEPS = False
CASES = (
    Case(
        "verified",
        "verified",
        checks=True,
        keeps=False,
        memory="arena",
        sources=("http", "https", "file"),
        options={"verify": True},
        limit="limit_arena:verified",
    ),
    Case(
        "xxh3",
        "verified by XXH3-128",
        checks=True,
        keeps=False,
        memory="arena",
        options={"verify": True, "model": XXH3},
        hash_name="xxh3_128",
        limit="limit_arena:xxh3",
    ),
    Case(
        "unverified",
        "not verified",
        checks=False,
        keeps=False,
        memory="arena",
        options={"verify": False},
        limit="limit_arena:unverified",
    ),
)
SETTINGS: list[dict[str, object]] = [{}]  # what a user gets: requests in flight are found while it loads


def main(spec: Spec) -> None:
    import ray

    from bench.arena_rank import ArenaLoad

    config = our_config(spec)
    with our_cluster(spec, config):
        load = ArenaLoad(config, store_arguments(spec))
        load.prepare(model_uri(spec, TWIN))
        load.run()  # so that agent and ranks are warm, and every slot was used
        load.prepare(main_model(spec))
        settle()
        with measured(spec, memory_apart=is_ray_daemon) as m:
            reports = load.run()
            m.stop()
            node = load.node_report()
            if node.cached_bytes:
                raise RuntimeError(f"{node.cached_bytes} bytes were in the arena before")
            stages = sum((report.stages for report in reports[1:]), reports[0].stages)
            m.extra |= {
                "ranks": RANKS,
                "arena_bytes": ARENA_BYTES,
                "stream_s": max(report.load_s for report in reports),
                "stages": dataclasses.asdict(stages),
                "store_bytes": node.store_bytes,
            }
            ray.get(load.agent.end.remote(load.load_id))


if __name__ == "__main__":
    run_contender(main)
