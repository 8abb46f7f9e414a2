"""Loads of one model by 1 to 8 nodes behind slow links, with and without peers: `python -m bench.peers`.

    store ====.                  .==== node 1: Ray, an agent, a rank that needs the whole model
              +--- a switch -----+==== node 2
    head -----'                  '==== ...         ==== a link of --mbit each way

Every node is a host of its own (`bench.harness.hosts`), and so is the store, a real S3 server. The head has a fast link
and no rank. "Each other" is LONGSHORE_PEER_PORT=0, "the store" is -1: every node reads the store for itself.

Before the clock starts, a load of other bytes from local files starts the workers and uses their memory. So no chunk
is in a cache. The arena has 64 slots of one chunk each, all of them window. A small `--chunk` gives a small model as
many chunks as a large one. Seconds are `LoadReport.load_s`. Bytes out of the store are those that the kernel counts on
its link.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.harness.hosts import Host, Network, start_ray_node, why_not
from bench.harness.measure import tree_cpu_s
from bench.harness.models import write_model
from bench.harness.report import describe_machine, describe_versions, markdown_table
from bench.harness.rounds import REPOSITORY
from bench.harness.run_folder import run_folder
from bench.options import new_parser, output_folder, positive_float, positive_int, size, write_json
from cluster.command_line.demo import sandbox
from cluster.config import Config
from cluster.joining.patience import sigterm_kept
from storage.stores.embedded_s3 import EmbeddedS3

WAYS = {"each other": 0, "the store": -1}  # where nodes read -> peer_port
SLOTS = 64  # of the arena, all of it window: as many as by default
SHM_BYTES = 1 << 30
OBJECT_STORE_BYTES = 80_000_000  # about the least that Ray takes
PLACEHOLDER_BYTES = 1 << 20
START_S, LOAD_S = 240.0, 3600.0
HEAD_RESOURCE = "head"
HEADINGS = (
    *("nodes", "read from", "seconds (min-max)", "of one node's time", "of the link's time"),
    *("store bytes / model", "peer bytes / model", "CPU in use", "by the load"),
)


@dataclass(frozen=True)
class PeerLoad:
    """One measured load."""

    nodes: int
    way: str
    load_s: float
    total_s: float
    store_bytes: int  # on its link
    bytes_by_source: Mapping[str, int]  # as the report has them
    cpu_share: float  # of all cores of the machine that was in use, from the call to its end
    own_cpu_share: float  # of all cores: the store's, Ray's and Longshore's
    retries: Mapping[str, int]
    hedges: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table. Returns the exit code, 0 also where there can be no hosts."""
    parser = new_parser("bench.peers", __doc__)
    parser.add_argument("--nodes", type=_counts, default="1,2,4,8", help="numbers of nodes, with commas")
    parser.add_argument("--mbit", type=positive_float, default=200.0, help="rate of every link, each way")
    parser.add_argument("--size", type=size, default="768MB", help="size of the model, which every node needs")
    parser.add_argument("--chunk", type=size, default="8MiB", help="size of a chunk")
    parser.add_argument("--rounds", type=positive_int, default=3, help="loads of each line")
    parser.add_argument("--folder", type=Path, default="/tmp", help="folder for the model")
    out = str(REPOSITORY / "bench" / "out")
    parser.add_argument("--out", type=output_folder, default=out, help="folder for the results")
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(markdown_table(["nodes that feed each other"], [[f"not run: {reason}"]]))
        return 0
    about = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "command": f"python -m bench.peers {' '.join(sys.argv[1:] if arguments is None else arguments)}".strip(),
        "mbit": options.mbit,
    }
    loads: list[PeerLoad] = []
    with sandbox(), run_folder(options.folder, "longshore-bench-") as folder:
        write_model(folder / "bench" / "model", options.size, 1)
        write_model(folder / "bench" / "twin", options.size, 2)
        write_model(folder / "bench" / "placeholder", PLACEHOLDER_BYTES, 3)
        model_bytes = sum(path.stat().st_size for path in (folder / "bench" / "model").glob("*.safetensors"))
        with PeerCluster(folder, options.mbit, options.chunk) as there:
            for count in options.nodes:
                there.want(count)
                for number in range(options.rounds):
                    # Every other round begins with the other way.
                    for way in list(WAYS)[:: -1 if number % 2 else 1]:
                        loads.append(there.measure(way))
                        print(", ".join(_row([loads[-1]], loads, model_bytes, options.mbit)), flush=True)
                        found = {**about, "model_bytes": model_bytes, "loads": [asdict(load) for load in loads]}
                        write_json(options.out / "peers_loads.json", found)
    print(f"\n{model_bytes / 1e9:.2f} GB, links of {options.mbit:g} Mbit/s; medians of {options.rounds} rounds\n")
    print(table(loads, model_bytes, options.mbit))
    return 0


def table(loads: Sequence[PeerLoad], model_bytes: int, mbit: float) -> str:
    """Return the medians of each number of nodes and way, in Markdown."""
    lines = dict.fromkeys((load.nodes, load.way) for load in loads)
    same = ([load for load in loads if (load.nodes, load.way) == line] for line in lines)
    return markdown_table(HEADINGS, (_row(each, loads, model_bytes, mbit) for each in same))


def _row(same: Sequence[PeerLoad], loads: Sequence[PeerLoad], model_bytes: int, mbit: float) -> tuple[str, ...]:
    times = [load.load_s for load in same]
    middle_s = statistics.median(times)
    alone = [load.load_s for load in loads if load.nodes == 1]
    return (
        str(same[0].nodes),
        same[0].way,
        f"{middle_s:.1f} ({min(times):.1f}-{max(times):.1f})",
        f"{middle_s / statistics.median(alone):.2f}" if alone else "-",
        f"{middle_s / (model_bytes * 8 / (mbit * 1e6)):.2f}",
        f"{statistics.median(load.store_bytes for load in same) / model_bytes:.2f}",
        f"{statistics.median(load.bytes_by_source['peer'] for load in same) / model_bytes:.2f}",
        f"{statistics.median(load.cpu_share for load in same):.0%}",
        f"{statistics.median(load.own_cpu_share for load in same):.0%}",
    )


class PeerCluster:
    """A store, a Ray cluster with a head here and its nodes on hosts, and Longshore on it."""

    def __init__(self, folder: Path, mbit: float, chunk_bytes: int) -> None:
        """`folder`: has the bucket `bench`, with `model`, `placeholder` and a `twin` of other bytes."""
        self._folder, self._mbit, self._chunk_bytes = folder, mbit, chunk_bytes
        self._stack = contextlib.ExitStack()
        self._hosts: list[Host] = []

    def __enter__(self) -> PeerCluster:
        import ray

        import cluster

        with contextlib.ExitStack() as stack:
            for name in ("model", "twin", "placeholder"):
                cluster.publish(str(self._folder / "bench" / name), chunk_bytes=self._chunk_bytes)
            self._environ = stack.enter_context(_environment())
            self._network = stack.enter_context(Network())
            self._store = self._network.add_host("store", [self._folder])
            self._store.limit(self._mbit)
            with self._store.network():
                server = EmbeddedS3(self._folder, host=self._store.address)
            self._server = stack.enter_context(server)
            logs = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="lb-", dir="/tmp", ignore_cleanup_errors=True)
            )
            self._logs = Path(logs)
            stack.callback(ray.shutdown)
            with sigterm_kept():
                ray.init(
                    num_cpus=1,
                    num_gpus=0,
                    resources={HEAD_RESOURCE: 1},
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    _node_ip_address=self._network.address,
                    _temp_dir=logs,
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def want(self, count: int) -> None:
        """Add nodes until there are this many. Raises RuntimeError when one does not come up."""
        import ray

        head = ray.get_runtime_context().gcs_address
        while len(self._hosts) < count:
            host = self._network.add_host(f"node{len(self._hosts)}", [self._folder], SHM_BYTES)
            host.limit(self._mbit)
            self._hosts.append(host)
            log = self._logs / f"{host.name}.log"
            started = start_ray_node(host, head, self._environ, log, {}, OBJECT_STORE_BYTES)
            give_up_s = time.monotonic() + START_S
            while sum(node["Alive"] for node in ray.nodes()) <= len(self._hosts):  # type: ignore[no-untyped-call]
                if started.poll() is not None or time.monotonic() > give_up_s:
                    raise RuntimeError(f"no node came up on {host.name}: {log.read_text()[-2000:]}")
                time.sleep(0.2)

    def measure(self, way: str) -> PeerLoad:
        """Load the model once on all nodes."""
        import cluster

        options: dict[str, Any] = {"data_parallel_size": len(self._hosts), "device": "cpu", "progress": False}
        store: dict[str, Any] = {
            "endpoint_url": self._server.endpoint_url,
            "region": self._server.region,
            "credentials": self._server.credentials(),
        }
        with self._longshore(WAYS[way]):
            twin = str(self._folder / "bench" / "twin")
            cluster.load(twin, placement="via_arena", timeout_s=LOAD_S, **options).release()
            sent_bytes, begun_s = self._store.sent_bytes, time.monotonic()
            busy_s, own_s = _busy_s(), tree_cpu_s()
            model = cluster.load("s3://bench/model", timeout_s=LOAD_S, **options, **store)
            busy_s, own_s = _busy_s() - busy_s, tree_cpu_s() - own_s
            have_s = (time.monotonic() - begun_s) * len(os.sched_getaffinity(0))
            sent_bytes = self._store.sent_bytes - sent_bytes
            report = model.report
            model.release()
        if report.cached_bytes or len(report.nodes) != len(self._hosts):
            raise RuntimeError(f"{report.cached_bytes} bytes were cached, {len(report.nodes)} nodes took part")
        return PeerLoad(
            len(self._hosts),
            way,
            report.load_s,
            report.total_s,
            sent_bytes,
            report.bytes_by_source,
            busy_s / have_s,
            own_s / have_s,
            report.retries,
            report.hedges,
        )

    @contextlib.contextmanager
    def _longshore(self, peer_port: int) -> Iterator[None]:
        """Run a coordinator with that setting, and a model that takes the head's only place for a rank."""
        import ray
        from ray.util import placement_group, remove_placement_group

        import cluster
        from actors.launch import ensure_coordinator
        from cluster import client
        from cluster.joining.connection import disconnect
        from cluster.joining.patience import Patience

        config = Config(
            peer_port=peer_port,
            slot_bytes=self._chunk_bytes,
            arena_bytes=SLOTS * self._chunk_bytes,
            cpu_ranks_per_node=1,
            warm_workers_s=LOAD_S,
            metrics_port=-1,
        )
        ensure_coordinator(config, Patience(time.monotonic() + START_S))
        group = placement_group([{HEAD_RESOURCE: 1}])
        try:
            placeholder = str(self._folder / "bench" / "placeholder")
            with cluster.load(placeholder, device="cpu", placement_group=group, progress=False):
                yield
        finally:
            client.shutdown(ray.get_runtime_context().gcs_address)
            disconnect()
            remove_placement_group(group)


@contextlib.contextmanager
def _environment() -> Iterator[dict[str, str]]:
    """Set the environment of all processes of the cluster. Yields it."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("LONGSHORE_", "AWS_", "RAY_")) or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
    # Workers import the code from there.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), before.get("PYTHONPATH")]))
    try:
        yield dict(os.environ)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _busy_s() -> float:
    """Return the seconds that the processors of this machine have worked."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)


def _counts(text: str) -> list[int]:
    """Return numbers of nodes, ascending."""
    try:
        return sorted({positive_int(word) for word in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"not numbers from 1, with commas: {text!r:.40}") from None


if __name__ == "__main__":
    raise SystemExit(main())
