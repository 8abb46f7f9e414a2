"""A Ray cluster of one node for our own contenders, warm before the clock starts and gone without a trace after it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.process_tree import tree_cpu_s
from bench.sample import MODEL, PLAIN
from bench.spec import Spec
from cluster.config import Config

ARENA_BYTES = 256 << 20  # an eighth of the default model
RANKS = 2
WARM_S = 600.0
_QUIET_CPU = 0.1  # of one core: less than that is a cluster that has nothing to do
_QUIET_AFTER_S = 0.4
_PATIENCE_S = 15.0


def our_config(spec: Spec, **wanted: Any) -> Config:
    """The settings of a run: a small arena, warm workers, and what the options name."""
    values = {"arena_bytes": ARENA_BYTES, "warm_workers_s": WARM_S, **wanted}
    values |= {name: value for name, value in spec.options.items() if name in Config.model_fields}
    return Config(**values)


def store_arguments(spec: Spec) -> dict[str, Any]:
    """How the store is reached. The server looks at no signature, but making one is part of the work."""
    from storage.store_ref import Credentials

    if spec.source == "file":
        return {}
    return {"endpoint_url": spec.endpoint, "region": "us-east-1", "credentials": Credentials("bench", "bench")}


def model_uri(spec: Spec, name: str) -> str:
    """The URI of one of the run's models (`bench.sample`)."""
    if spec.source == "file":
        return (Path(spec.folder).parent / name).as_uri()
    return f"s3://{spec.bucket}/{name}"


def main_model(spec: Spec) -> str:
    """The URI of what is loaded under the clock: published, or the same files without a manifest."""
    return model_uri(spec, main_model_name(spec))


def main_model_name(spec: Spec) -> str:
    """Of that model (`bench.sample`)."""
    return str(spec.options.get("model", MODEL)) if spec.options.get("verify", True) else PLAIN


@contextlib.contextmanager
def our_cluster(spec: Spec, config: Config) -> Iterator[Any]:
    """A local cluster with a coordinator; the connection to it."""
    import ray  # noqa: F401  (missing: said before anything is started)

    from cluster.command_line.demo import sandbox
    from cluster.joining.connection import connect, disconnect

    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # What actors of the benchmark are found by, in workers too.
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    if spec.ca_bundle:
        os.environ["AWS_CA_BUNDLE"] = spec.ca_bundle
    with sandbox():
        connection = connect("local", config)
        try:
            yield connection
        finally:
            disconnect()


def settle() -> None:
    """Wait until the cluster has nothing to do: processes started, arena touched."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up_s:
        before_s, since_s = tree_cpu_s(), time.monotonic()
        time.sleep(_QUIET_AFTER_S)
        if (tree_cpu_s() - before_s) / (time.monotonic() - since_s) < _QUIET_CPU:
            return
