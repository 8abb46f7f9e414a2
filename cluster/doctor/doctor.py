"""`longshore doctor`: what a person would check by hand, each check on its own.

    run_checks -> host_checks    packages, memory, /dev/shm and the arena, GPUs and drivers of this machine
               -> disk_checks    the folder for chunks on disk
               -> cluster_checks Ray, its authentication, every node's packages and versions, resources
                  node_checks    of every node: GPUs, drivers, NCCL, /dev/shm, clock, the store from there
               -> store_checks   the store answers with these credentials, clocks agree

A check returns what it found; one that raises has failed and says why, and the rest still run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from cluster.config import Config
from cluster.doctor import cluster_checks, host_checks, store_checks
from cluster.doctor.check import Check
from cluster.doctor.node_checks import bandwidth_here, judge_bandwidth
from storage.errors import LongshoreError


def run_checks(
    uri: str | None = None, *, address: str | None = None, bandwidth: bool = False, **store_args: Any
) -> list[Check]:
    """Run every check, in the order in which a load would need what they look at. Never raises.

    `uri` is a model or bucket to read from; without it the store is not looked at. `bandwidth`: read from it for
    five seconds, on every node at once, or here where no cluster is. `store_args` are those of `cluster.load`:
    endpoint_url, region, profile, anonymous.
    """
    settings = guarded("settings", partial(host_checks.check_settings, os.environ))
    config = Config.from_env() if settings[0].outcome == "ok" else Config()
    checks: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("packages", host_checks.check_packages_here),
        ("memory", host_checks.check_memory),
        ("/dev/shm", partial(host_checks.check_arena, config)),
        ("stale arenas", host_checks.check_stale_arenas),
        (host_checks.NAME, partial(host_checks.check_disk_tier, config)),
        ("gpu driver", host_checks.check_driver),
        ("torch", host_checks.check_torch),
        ("ray", partial(cluster_checks.check_cluster, address, uri, store_args, bandwidth=bandwidth)),
        ("store", partial(store_checks.check_store, uri, store_args)),
    ]
    found = settings + [check for name, run in checks for check in guarded(name, run)]
    if bandwidth and uri is not None and not any(check.name.startswith("bandwidth") for check in found):
        found += guarded("bandwidth", lambda: [judge_bandwidth("bandwidth", bandwidth_here(uri, store_args))])
    return found


def guarded(name: str, run: Callable[[], Iterable[Check]]) -> list[Check]:
    """What `run` found; when it raises, one failed check called `name` that says why."""
    found: list[Check] = []
    try:
        found.extend(run())
    except LongshoreError as error:
        found.append(Check(name, "fail", str(error)))
    except Exception as error:
        found.append(Check(name, "fail", f"{type(error).__name__}: {error}"))
    return found
