"""New weights for a resident model: updates in place beside loads of everything: `python -m bench.update`.

    store --HTTP--> 2 tensor-parallel ranks that hold a Llama     the next revision: 5 % of the bytes are others, or all
    store --HTTP--> vLLM with 2 ranks on processors               the same, beside an engine that is started anew

Every turn has a revision of its own: for an update 5 % of the bytes are others, or all, and for a load all of them. So
nothing that is read is in the arena. vLLM's arena ends with its processes. nginx counts the bytes. Exit code 0; 1 when
vLLM failed, and not when it is merely absent.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cluster
from bench.contenders.ours import WARM_S, model_uri, our_cluster, store_arguments
from bench.contenders.table import CONTENDERS, UNKEPT_BYTES
from bench.harness.contender import Spec
from bench.harness.measure import fetch_host_pages, settle
from bench.harness.models import BUCKET, write_listing, write_model
from bench.harness.report import markdown_table
from bench.harness.results import Entry
from bench.harness.rounds import run_once, run_rounds
from bench.harness.run_folder import NGINX, run_folder
from bench.harness.store import RangeServer
from bench.options import new_parser, positive_int, size
from cluster.client import release_warm
from storage.checkpoints.safetensors_header import parse_header

RANKS, SHARE, SMALL_BYTES = 2, 0.05, 1 << 20
HEADER_BYTES = 1 << 20  # more than the header of these files has
ALL_NEW = "everything new"
HEADINGS = ("seconds (min-max)", "over update", "store bytes / model", "staged / model")
Way = Callable[[Any, str], tuple[Any, int]]  # from the model and a URI to the model and the bytes that were staged


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table. Returns the exit code."""
    parser = new_parser("bench.update", __doc__)
    parser.add_argument("--size", type=size, default="2GB", help="size of the model")
    parser.add_argument("--rounds", type=positive_int, default=3, help="runs of each line")
    parser.add_argument("--folder", type=Path, default="/dev/shm", help="folder for both revisions")
    options = parser.parse_args(arguments)
    with run_folder(options.folder, "longshore-bench-") as folder:
        bucket = folder / "www" / BUCKET
        write_model(bucket / "r0", options.size, 0)
        cluster.publish(bucket / "r0")
        model_bytes = sum(path.stat().st_size for path in (bucket / "r0").glob("*.safetensors"))
        with RangeServer(folder / "www", folder / NGINX) as server:
            spec = Spec("http", server.endpoint, BUCKET, str(bucket / "r0"), (), model_bytes)
            changed_bytes, rows = measure(spec, Path(server.access_log), options.rounds, options.size)
            engine = measure_engine(spec, server.access_log, options.rounds, options.size)
    rows += engine_rows(engine, spec.model_bytes)
    head = f"{model_bytes / 1e9:.2f} GB, {changed_bytes / model_bytes:.3f} of it new"
    print(f"\n{markdown_table((head, *HEADINGS), rows)}")
    return 1 if engine.failure else 0


def write_next(old: Path, new: Path, seed: int) -> int:
    """Write a revision in which at most `SHARE` of the bytes differ: the largest tensors that fit. Returns their bytes.

    Small tensors stay: a chunk is read whole, and they are in chunks of others.
    """
    shutil.copytree(old, new)
    found = []
    for path in new.glob("*.safetensors"):
        with path.open("rb") as file:
            header = parse_header(file.read(HEADER_BYTES), path.stat().st_size)
        found += [(tensor.end - tensor.start, path, tensor.start) for tensor in header.tensors]
    random, left = np.random.default_rng(seed), int(SHARE * sum(length for length, *_ in found))
    budget = left
    for length, path, start in sorted(found, reverse=True):
        if SMALL_BYTES < length <= left:
            left -= length
            with path.open("r+b") as file:
                file.seek(start)
                file.write(random.bytes(length))
    return budget - left


def measure(spec: Spec, access_log: Path, rounds: int, size_bytes: int) -> tuple[int, list[tuple[str, ...]]]:
    """Return the bytes that an update changes, and the rows of the table."""
    arguments = {"device": "cpu", "progress": False, "tensor_parallel_size": RANKS, **store_arguments(spec)}

    def update(model: Any, uri: str, streaming: bool = False) -> tuple[Any, int]:
        return model, model.update(uri, streaming=streaming).staged_bytes

    def load_anew(model: Any, uri: str) -> tuple[Any, int]:
        model.release()
        return cluster.load(uri, **arguments), 0

    def restart(model: Any, uri: str) -> tuple[Any, int]:
        model.release()
        release_warm()
        return cluster.load(uri, **arguments), 0

    ways: dict[str, Way] = {
        "`model.update`": update,
        "`model.update`, streaming": lambda model, uri: update(model, uri, True),
        f"`model.update`, {ALL_NEW}": update,
        "release and load, by the same workers": load_anew,
        "release and load, by new workers": restart,
    }
    found: dict[str, list[tuple[float, int, int]]] = {title: [] for title in ways}
    folder, seed, changed_bytes = Path(spec.folder), 0, 0
    fetch_host_pages(spec.model_bytes)
    with our_cluster(spec, cluster.Config(warm_workers_s=WARM_S, arena_bytes=UNKEPT_BYTES)):
        model: Any = cluster.load(model_uri(spec, folder.name), **arguments)
        for number in range(rounds):
            for title, way in ways.items():
                seed += 1
                new = folder.with_name(f"r{seed}")
                if "update" in title and ALL_NEW not in title:
                    changed_bytes = write_next(folder, new, seed)
                else:
                    write_model(new, size_bytes, seed)  # no byte is in the arena
                cluster.publish(new)
                settle()
                sent_bytes, begun_s = sum(map(int, access_log.read_text().split())), time.monotonic()
                model, staged_bytes = way(model, model_uri(spec, new.name))
                took_s = time.monotonic() - begun_s
                settle()  # nginx writes a line when an answer has ended
                read_bytes = sum(map(int, access_log.read_text().split())) - sent_bytes
                shutil.rmtree(folder)
                folder = new
                found[title].append((took_s, read_bytes, staged_bytes))
                print(f"{number + 1}  {title:40} {took_s:7.2f} s  {read_bytes / spec.model_bytes:6.3f}", flush=True)
        model.release()
    return changed_bytes, table_rows(found, spec.model_bytes)


def table_rows(found: Mapping[str, Sequence[tuple[float, ...]]], model_bytes: int) -> list[tuple[str, ...]]:
    """Return the medians of runs by title. A run is its seconds and bytes. The first title is the measure of time."""
    first_s = statistics.median(took_s for took_s, *_ in next(iter(found.values())))
    rows = []
    for title, runs in found.items():
        times, *counts = zip(*runs, strict=True)
        middle_s = statistics.median(times)
        shares = (f"{statistics.median(each) / model_bytes:.3f}" for each in counts)
        span = f"{middle_s:.2f} ({min(times):.2f}-{max(times):.2f})"
        rows.append((title, span, f"{middle_s / first_s:.2f}", *shares))
    return rows


ENGINE_TITLES = {
    "update": "vLLM: `engines.vllm_updates.update`",
    "everything": f"vLLM: `engines.vllm_updates.update`, {ALL_NEW}",
    "restart": "vLLM: a new engine",
}


def measure_engine(spec: Spec, access_log: str, rounds: int, size_bytes: int) -> Entry:
    """Return the runs of vLLM: two updates, and a new engine with a further revision."""
    bucket, revisions = Path(spec.folder).parent, ("engine-0", "engine-1", "engine-2", "engine-3")
    for number, name in enumerate(revisions):
        if number % 2:
            write_next(bucket / revisions[number - 1], bucket / name, number)
        else:
            write_model(bucket / name, size_bytes, number)
        cluster.publish(bucket / name)
    for name in revisions:
        write_listing(bucket, name)
    given = spec.with_options(ranks=RANKS, revisions=revisions, access_log=access_log, until_idle=True)
    entry = Entry(CONTENDERS["update_vllm"], "vllm2/http")
    run_rounds([entry], rounds, lambda each, setting: run_once(each, setting, given))
    return entry


def engine_rows(entry: Entry, model_bytes: int) -> list[tuple[str, ...]]:
    """Return the rows of vLLM, or why there are none. What it stages is not known here."""
    if reason := entry.failure or entry.absent:
        why = f"{'failed' if entry.failure else 'not run'}: {reason}".replace("|", "/")
        return [(title, why, "-", "-", "-") for title in ENGINE_TITLES.values()]
    found: dict[str, list[tuple[float, ...]]] = {title: [] for title in ENGINE_TITLES.values()}
    for run in entry.runs:
        found[ENGINE_TITLES[run.case]].append((run.wall_s, run.store_bytes))
    return [(*row, "-") for row in table_rows(found, model_bytes)]


if __name__ == "__main__":
    raise SystemExit(main())
