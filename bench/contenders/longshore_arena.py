"""Ours, from the store into the arena: a real agent, two processes that host ranks, leases, digests; nothing placed."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from bench.contender import Case, run_contender
from bench.measure import measured
from bench.our_cluster import RANKS, main_model, our_cluster, our_config, settle, store_arguments
from bench.process_tree import is_ray_daemon
from bench.sample import XXH3
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

    from actors import launch
    from actors.jobs import fetch_settings
    from bench.arena_rank import start_arena_ranks
    from cluster.fit import min_slots
    from cluster.messages import NodeJob, RankJob
    from cluster.packed_plan import pack_shared
    from cluster.prepare import prepare_plan
    from cluster.request import StoreOptions, make_request

    config = our_config(spec)
    store = store_arguments(spec)
    credentials = store.pop("credentials", None)
    with our_cluster(spec, config):
        request = make_request(
            main_model(spec),
            sizes=(1, RANKS, 1),
            store_options=StoreOptions(**store),
            credentials=credentials,
            layout_rules=None,
            device="cpu",
        )
        _, plan = prepare_plan(request, chunk_bytes=config.chunk_bytes, read_timeout_s=config.read_timeout_s)
        shared, load_id = pack_shared(plan), "bench"
        node_id = ray.get_runtime_context().get_node_id()
        agent: Any = ray.get(launch.ensure_coordinator(config).agent_of.remote(node_id))
        node_job = NodeJob(
            load_id=load_id,
            attempt=1,
            shared=shared,
            store_identity=request.store.ref.identity(),
            ranks=tuple(range(RANKS)),
            done=frozenset(),
            min_slots=min_slots(RANKS),
            chunk_attempts=config.chunk_attempts,
            lease_deadline_s=config.lease_deadline_s,
            record=b"",
        )
        actors = start_arena_ranks(RANKS)
        settings = fetch_settings(config)
        jobs = [RankJob(load_id, 1, rank, 0, shared, request.store, settings) for rank in range(RANKS)]
        ray.get([actor.prepare.remote(node_id, job) for actor, job in zip(actors, jobs, strict=True)])
        settle()
        with measured(spec, memory_apart=is_ray_daemon) as m:
            while not ray.get(agent.begin.remote(node_job)):
                time.sleep(0.01)
            reports = ray.get([actor.run.remote() for actor in actors])
            m.stop()
            node = ray.get(agent.report.remote(load_id))
            if node.cached_bytes:
                raise RuntimeError(f"{node.cached_bytes} bytes were in the arena before")
            stages = sum((report.stages for report in reports[1:]), reports[0].stages)
            m.extra |= {
                "stream_s": max(report.load_s for report in reports),
                "stages": dataclasses.asdict(stages),
                "store_bytes": node.store_bytes,
            }
        ray.get(agent.end.remote(load_id))


if __name__ == "__main__":
    run_contender(main)
