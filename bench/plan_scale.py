"""What planning a very large model costs: CPU time, memory, and bytes of messages. `python -m bench.plan_scale --help`.

The model is a manifest only (`bench.huge_model`); no byte of weights exists. Each part runs in a process of its own, so
that its memory is its own, and does what the part of a load does:

    planning   the planning process: manifest parsed and checked, tensors cut, facts of every rank, tables packed
    agent      one node's agent: tables unpacked, chunks of its ranks found, the load's queue built (`NodeLedger.begin`)
    worker     one rank: tables unpacked, its plan and its read items worked out
    messages   bytes of what the coordinator sends, with the project's own `actors.coordination.jobs`
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.arguments import first_line, output_file, positive_int
from bench.huge_model import MOE_RULES, MoeShape, moe_manifest

DEFAULT_LAYOUTS = ("8x16x8", "8x128x1", "1x1024x1")
MIB = 1 << 20
SLOTS = 256  # of the agent's arena; only their records exist here


class Stages:
    """CPU seconds by name (every part has one thread), and the memory that the process grew by since this was made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._before_bytes = _peak_bytes()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begun_s = time.process_time()
        yield
        self.seconds[name] = time.process_time() - begun_s

    def result(self, **more: Any) -> dict[str, Any]:
        return {"seconds": self.seconds, "grown_bytes": _peak_bytes() - self._before_bytes, **more}


def _peak_bytes() -> int:
    """Largest resident set so far; not `ru_maxrss`, which a child inherits from who started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def planning(folder: Path, layout: str, _: int) -> dict[str, Any]:
    from cluster.layouts.mesh import Layout
    from cluster.layouts.model_config import ModelConfig
    from cluster.layouts.rules import parse_rules
    from cluster.planning.make_plan import build_load_plan
    from cluster.planning.packed_plan import PackedPlan, pack_shared
    from cluster.planning.process import without_collector
    from cluster.planning.rank_plans import rank_facts
    from storage.checkpoints.manifest import parse_manifest

    config = ModelConfig.model_validate(json.loads((folder / "config.json").read_text()))
    stages = Stages()
    with without_collector():
        with stages.stage("read and check the manifest"):
            index = parse_manifest((folder / "manifest.json").read_bytes()).index()
        with stages.stage("cut the tensors, check the chunks"):
            plan = build_load_plan(index, Layout(*_sizes(layout)), parse_rules(MOE_RULES), config)
        with stages.stage("facts of every rank"):
            facts = rank_facts(plan.cut, plan.chunks.largest_bytes)
        with stages.stage("pack"):
            packed = PackedPlan(plan.revision, "blake3", index.size_bytes, facts, pack_shared(plan))
            data = pickle.dumps(packed, protocol=5)
    (folder / f"plan-{layout}").write_bytes(data)
    return stages.result(
        ranks=len(facts),
        kinds=len(plan.cut.kinds),
        tensors=len(plan.cut),
        chunks=len(plan.chunks),
        pipe_bytes=len(data),
    )


def agent(folder: Path, layout: str, ranks_per_node: int) -> dict[str, Any]:
    from actors.node.node_ledger import NodeLedger
    from cluster.fit.needs import min_slots
    from cluster.messages import NodeJob
    from storage.arena.chunk_cache import ChunkCache

    packed = _packed(folder, layout)
    ranks = tuple(range(min(ranks_per_node, len(packed.ranks))))
    stages = Stages()
    job = NodeJob(
        load_id="load",
        attempt=1,
        shared=packed.shared,
        store_identity="made up",
        ranks=tuple(ranks),
        done=frozenset(),
        min_slots=min_slots(len(ranks)),
        chunk_attempts=3,
        lease_deadline_s=3600.0,
        record=b"",
    )
    ledger = NodeLedger(ChunkCache(max(SLOTS, job.min_slots)), 16 * MIB)
    with stages.stage("begin"):
        ledger.begin(job, 0.0)
    report = ledger.report("load", "node", "host")
    return stages.result(
        needed_chunks=report.needed_chunks,
        needed_bytes=report.needed_bytes,
        overfetch_bytes=report.overfetch_bytes,
        heartbeat_bytes=len(pickle.dumps(ledger.beat(f"{0:056x}", "host-000", "incarnation0", 0.0, ()))),
    )


def worker(folder: Path, layout: str, _: int) -> dict[str, Any]:
    from cluster.planning.packed_plan import unpack_shared
    from cluster.planning.read_items import expand_read_items

    packed = _packed(folder, layout)
    stages = Stages()
    with stages.stage("unpack"):
        tables = unpack_shared(packed.shared)
    with stages.stage("plan"):
        plan = tables.rank_plan(len(packed.ranks) - 1)
    with stages.stage("read items"):
        items = expand_read_items(plan.slices, tables.chunks)
    return stages.result(slices=len(plan.slices), chunks=len(plan.chunk_ids), read_items=len(items))


def messages(folder: Path, layout: str, ranks_per_node: int) -> dict[str, Any]:
    from actors.coordination.jobs import node_job, rank_job
    from actors.coordination.model_record import ModelRecord, Placement
    from cluster.config import Config
    from cluster.layouts.mesh import Layout
    from cluster.request import StoreOptions, make_request
    from cluster.scheduling.holders import Holders
    from cluster.scheduling.load_state import Life

    packed = _packed(folder, layout)
    request = make_request(
        str(folder),
        layout=Layout(*_sizes(layout)),
        store_options=StoreOptions(),
        credentials=None,
        layout_rules=MOE_RULES,
        device="cuda",
    )
    record = ModelRecord("load", request, Life.new(request.world_size), Holders())
    nodes = [(f"{node:056x}", f"host-{node:03}") for node in range(-(-request.world_size // ranks_per_node))]
    for rank in range(request.world_size):
        record.placements[rank] = Placement(rank, *nodes[rank // ranks_per_node], None)
    node_id = record.placements[0].node_id
    sizes = {
        "shared_bytes": len(packed.shared),
        "node_job_bytes": len(pickle.dumps(node_job(record, node_id, record.life.attempt, Config()))),
        "rank_job_bytes": len(pickle.dumps(rank_job(record, record.placements[0], Config()))),
        "nodes": len(record.nodes),
    }
    through = sizes["nodes"] * sizes["node_job_bytes"] + request.world_size * sizes["rank_job_bytes"]
    return {**sizes, "coordinator_sends_bytes": through, "coordinator_puts_bytes": sizes["shared_bytes"]}


PARTS: dict[str, Callable[[Path, str, int], dict[str, Any]]] = {
    "planning": planning,
    "agent": agent,
    "worker": worker,
    "messages": messages,
}


def _packed(folder: Path, layout: str) -> Any:
    return pickle.loads((folder / f"plan-{layout}").read_bytes())  # written by this program


def _sizes(layout: str) -> tuple[int, int, int]:
    tensor, fsdp, data = (int(part) for part in layout.split("x"))
    return tensor, fsdp, data


def measure(folder: Path, layouts: list[str], ranks_per_node: int) -> dict[str, Any]:
    """Every part for every layout, each in its own process."""
    found: dict[str, Any] = {}
    for layout in layouts:
        found[layout] = {}
        for part in PARTS:
            command = [sys.executable, "-m", "bench.plan_scale", "--part", part, "--folder", str(folder)]
            command += ["--layout", layout, "--ranks-per-node", str(ranks_per_node)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found[layout][part] = json.loads(done.stdout)
    return found


def table(found: dict[str, Any]) -> str:
    """The stats, as Markdown."""
    rows = [["", *(f"tp x fsdp x dp = {layout}" for layout in found)]]

    def add(label: str, show: Callable[[dict[str, Any]], str]) -> None:
        rows.append([label, *(show(parts) for parts in found.values())])

    for part in ("planning", "agent", "worker"):
        for stage in next(iter(found.values()))[part]["seconds"]:
            add(f"{part}: {stage}", lambda p, part=part, stage=stage: f"{p[part]['seconds'][stage]:.2f} s")  # type: ignore[misc]
        add(f"{part}: memory beyond imports", lambda p, part=part: f"{p[part]['grown_bytes'] / 1e6:.0f} MB")  # type: ignore[misc]
    add("chunks that a node needs", lambda p: f"{p['agent']['needed_chunks']:,}")
    add("of their bytes wanted by the node", lambda p: f"{_wanted_share(p['agent']):.1%}")
    add("shared tables, to each node once", lambda p: f"{p['messages']['shared_bytes'] / 1e6:.1f} MB")
    add("job of a node", lambda p: f"{p['messages']['node_job_bytes'] / 1e3:.1f} kB")
    add("job of a rank", lambda p: f"{p['messages']['rank_job_bytes'] / 1e3:.1f} kB")
    add("heartbeat of a node", lambda p: f"{p['agent']['heartbeat_bytes'] / 1e3:.1f} kB")
    add("all jobs together", lambda p: f"{p['messages']['coordinator_sends_bytes'] / 1e6:.1f} MB")
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _wanted_share(agent_part: dict[str, Any]) -> float:
    return 1 - float(agent_part["overfetch_bytes"]) / max(float(agent_part["needed_bytes"]), 1.0)


def check_layout(text: str) -> None:
    """TPxFSDPxDP, by which a model of that shape can be cut. Raises argparse.ArgumentTypeError."""
    from cluster.errors import ConfigError, PlanError
    from cluster.layouts.mesh import Layout
    from cluster.layouts.model_config import ModelConfig
    from cluster.layouts.rules import parse_rules
    from cluster.planning.make_plan import build_load_plan

    if re.fullmatch(r"\d{1,6}x\d{1,6}x\d{1,6}", text, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"not TPxFSDPxDP, as in 8x16x8: {text!r}")
    shape = MoeShape(layers=1, experts=1, shards=1)  # every tensor of the whole has its like here, but for the router
    config = ModelConfig.model_validate(shape.config())
    try:
        build_load_plan(moe_manifest(shape).index(), Layout(*_sizes(text)), parse_rules(MOE_RULES), config)
    except (ConfigError, PlanError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {first_line(error)}") from None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.plan_scale", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--layout", action="append", help="tp x fsdp x dp, as in 8x16x8; may be repeated")
    parser.add_argument("--ranks-per-node", type=positive_int, default=8)
    parser.add_argument("--layers", type=positive_int, default=MoeShape.layers, help="fewer make a smaller model")
    parser.add_argument("--shards", type=positive_int, default=MoeShape.shards)
    parser.add_argument("--chunk-mib", type=positive_int, default=16)
    parser.add_argument("--json", type=output_file, help="write the stats to this file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    layouts = args.layout or list(DEFAULT_LAYOUTS)
    if args.part:
        print(json.dumps(PARTS[args.part](args.folder, layouts[0], args.ranks_per_node)))
        return
    for layout in layouts:  # not by a part: it would count what this imports
        try:
            check_layout(layout)
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --layout: {error}")
    shape = MoeShape(layers=args.layers, shards=args.shards)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = moe_manifest(shape, chunk_bytes=args.chunk_mib * MIB)
        (folder / "manifest.json").write_bytes(manifest.to_json())
        (folder / "config.json").write_text(json.dumps(shape.config()))
        model = {
            "tensors": len(manifest.tensors),
            "shards": len(manifest.shards),
            "chunks": sum(len(shard.chunk_ends) for shard in manifest.shards),
            "bytes": sum(shard.size_bytes for shard in manifest.shards),
            "manifest_bytes": (folder / "manifest.json").stat().st_size,
        }
        found = measure(folder, layouts, args.ranks_per_node)
    print(
        f"{model['tensors']:,} tensors, {model['shards']:,} shards, {model['chunks']:,} chunks, "
        f"{model['bytes'] / 1e12:.2f} TB; manifest of {model['manifest_bytes'] / 1e6:.0f} MB; "
        f"{args.ranks_per_node} ranks per node\n"
    )
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps({"model": model, "layouts": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
