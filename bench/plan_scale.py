"""The cost of planning a very large model: CPU time, memory, bytes of messages. `python -m bench.plan_scale --help`.

The model is a manifest only (`bench.huge_model`); no byte of weights exists. Each part runs in a process of its own, so
that its memory is its own, and runs the project's code for that part of a load:

    planning   the planning process: parse and check the manifest, cut the tensors, compute each rank's facts, pack
    agent      one node's agent: unpack the tables, find the chunks of its ranks, build the queue (`NodeLedger.begin`);
               find out which chunks the other nodes need, and the trees of all that this node needs (`PeerRoutes`)
    worker     one rank: unpack the tables, compute its plan and its read items
    messages   the bytes that the coordinator sends (`actors.coordination.jobs`)

With `--tensors N` the model is N tensors of 1 kB that do exist, with and without a manifest. The parts are the same.
Its worker also copies every chunk to its place and makes the tensors. The table has the cost of one tensor. Each part
runs several times for its processor time, of which the table has medians, and once more under `tracemalloc`.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.harness.report import markdown_table
from bench.huge_model import MOE_RULES, SMALL_RULES, MoeShape, moe_manifest, node_job, write_small_tensors
from bench.options import new_parser, positive_int
from cluster.layouts.mesh import Layout
from cluster.layouts.rules import parse_rules
from cluster.planning.make_plan import build_load_plan
from storage.host.memory import high_water_bytes, without_collector

if TYPE_CHECKING:
    from cluster.messages import Members
    from cluster.planning.packed_plan import SharedTables

DEFAULT_LAYOUTS = ("8x16x8", "8x128x1", "1x1024x1")
SMALL_LAYOUTS = ("1x1x1", "1x4x1", "4x1x1")  # of the model of many small tensors
RUNS = 3  # of each part, for its processor time
SLOTS = 256  # of the agent's arena; only their records exist here


class Stages:
    """CPU seconds by name (every part has one thread), and the growth of the process's memory."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}  # that Python held, by name of the stage; when `tracemalloc` traces
        self._before_bytes = high_water_bytes()
        self._traced_bytes = tracemalloc.get_traced_memory()[0]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        tracemalloc.reset_peak()
        begun_s = time.process_time()
        yield
        self.seconds[name] = time.process_time() - begun_s
        self.peak_bytes[name] = tracemalloc.get_traced_memory()[1] - self._traced_bytes

    def result(self, *, tensors_bytes: int = 0, **more: Any) -> dict[str, Any]:
        """Return the measurements. The memory of the tensors themselves does not count."""
        grown_bytes = high_water_bytes() - self._before_bytes - tensors_bytes
        return {"seconds": self.seconds, "peak_bytes": self.peak_bytes, "grown_bytes": grown_bytes, **more}


def planning(folder: Path, layout: str, _: int) -> dict[str, Any]:
    from cluster.layouts.model_config import ModelConfig
    from cluster.planning.packed_plan import PackedPlan, pack_shared, rank_facts
    from storage.checkpoints.checkpoint import open_model
    from storage.checkpoints.manifest import parse_manifest
    from storage.stores.local import LocalStore

    manifest = folder / "manifest.json"
    is_huge = manifest.exists()
    config = ModelConfig.model_validate_json((folder / "config.json").read_text())
    rules = parse_rules(MOE_RULES if is_huge else SMALL_RULES)
    stages = Stages()
    with without_collector():
        with stages.stage("read and check the index"):
            index = parse_manifest(manifest.read_bytes()).index() if is_huge else open_model(LocalStore(folder))
        with stages.stage("cut the tensors, check the chunks"):
            plan = build_load_plan(index, Layout(*_sizes(layout)), rules, config)
        with stages.stage("facts of every rank"):
            facts = rank_facts(plan.cut, plan.chunks.largest_bytes)
        with stages.stage("pack"):
            packed = PackedPlan(plan.revision, "blake3", index.size_bytes, facts, pack_shared(plan))
            data = pickle.dumps(packed, protocol=5)
    _plan_file(folder, layout).write_bytes(data)
    counts = {"ranks": len(facts), "kinds": len(plan.cut.kinds), "tensors": len(plan.cut), "chunks": len(plan.chunks)}
    return stages.result(**counts, pipe_bytes=len(data))


def agent(folder: Path, layout: str, ranks_per_node: int) -> dict[str, Any]:
    from actors.node.node_ledger import NodeLedger
    from actors.node.peer_routes import PeerRoutes
    from cluster.planning.packed_plan import unpack_shared
    from storage.arena.chunk_cache import ChunkCache

    packed = _packed(folder, layout)
    ranks = tuple(range(min(ranks_per_node, len(packed.ranks))))
    stages = Stages()
    job = node_job(packed.shared, ranks)
    ledger = NodeLedger(ChunkCache(max(SLOTS, job.min_slots)), 16 << 20)
    with stages.stage("begin"):
        ledger.begin(job, 0.0)
    report = ledger.report("load", "node", "host")
    members, tables = _members(len(packed.ranks), ranks_per_node), unpack_shared(packed.shared)
    chunks = sorted({chunk for rank in ranks for chunk in tables.chunk_ids(rank).tolist()})
    with stages.stage("what other nodes need"):
        routes = PeerRoutes(members, "load", members.nodes[0].node_id, tables)
    with stages.stage("trees of its chunks"):
        for chunk in chunks:
            routes.sources(chunk)
            routes.askers(chunk)
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


def placing_worker(folder: Path, layout: str, _: int) -> dict[str, Any]:
    """Do all that one rank's worker does for a load, except for its requests."""
    import torch

    from actors.devices.cpu_device import CpuDevice
    from actors.rank.chunk_placer import ChunkPlacer
    from actors.shard import RankShard
    from cluster.planning.packed_plan import unpack_shared

    packed = _packed(folder, layout)
    shards = {path.name: memoryview(path.read_bytes()) for path in folder.glob("*.safetensors")}
    torch.zeros(1)
    stages = Stages()
    with stages.stage("unpack"):
        tables = unpack_shared(packed.shared)
    with stages.stage("plan"):
        plan = tables.rank_plan(len(packed.ranks) - 1)
    device = CpuDevice()
    with stages.stage("read items"):
        placer = ChunkPlacer(device, plan, tables)
        placer.direct_chunks()
    slots: Any = _Slots(tables, shards)
    device.allocate(plan.segment_bytes)
    with stages.stage("copy to their places"):
        placer.place(slots, [(chunk, chunk) for chunk in plan.chunk_ids.tolist()], placer.clock())
        placer.finish()
    del slots, placer, tables  # a load ends before the first call makes the tensors
    with stages.stage("make the tensors"):
        shard = RankShard(plan, device)
    with stages.stage("hand them out by name"):
        counts = {"slices": sum(1 for _ in shard.items()), "chunks": len(plan.chunk_ids)}
    return stages.result(tensors_bytes=plan.device_bytes, **counts)


class _Slots:
    """An arena's slots, numbered as their chunks are."""

    def __init__(self, tables: SharedTables, shards: Mapping[str, memoryview]) -> None:
        self._tables = tables
        self._shards = shards

    def slot(self, chunk: int) -> memoryview:
        span = self._tables.chunks.byte_range(chunk)
        return self._shards[self._tables.shards[self._tables.chunks.shard[chunk]].key][span.start : span.end]


def messages(folder: Path, layout: str, ranks_per_node: int) -> dict[str, Any]:
    from actors.coordination import jobs
    from actors.coordination.model_record import ModelRecord, Placement
    from cluster.config import Config
    from cluster.options import LoadOptions
    from cluster.request import make_request
    from cluster.scheduling.holders import Holders
    from cluster.scheduling.load_state import Life

    packed = _packed(folder, layout)
    options = LoadOptions(str(folder), **asdict(Layout(*_sizes(layout))), layout_rules=MOE_RULES, device="cuda")
    request = make_request(options)
    record = ModelRecord("load", request, Life.new(request.world_size), Holders())
    nodes = [(f"{node:056x}", f"host-{node:03}") for node in range(-(-request.world_size // ranks_per_node))]
    for rank in range(request.world_size):
        record.placements[rank] = Placement(rank, *nodes[rank // ranks_per_node], None)
    record.peers = {node.node_id: node.peer for node in _members(request.world_size, ranks_per_node).nodes}
    node_id = record.placements[0].node_id
    sizes = {
        "shared_bytes": len(packed.shared),
        "node_job_bytes": len(pickle.dumps(jobs.node_job(record, node_id, record.life.attempt, Config()))),
        "rank_job_bytes": len(pickle.dumps(jobs.rank_job(record, record.placements[0], Config()))),
        "members_bytes": len(jobs.members_of(record).pack()),
        "nodes": len(record.nodes),
    }
    through = sizes["nodes"] * sizes["node_job_bytes"] + request.world_size * sizes["rank_job_bytes"]
    return {**sizes, "coordinator_sends_bytes": through}


def _members(ranks: int, ranks_per_node: int) -> Members:
    """Return nodes that have so many ranks and all serve chunks. Ids are as long as Ray's, and alike in `messages`."""
    from cluster.messages import Members, NodePeer
    from storage.peers import Peer

    nodes = []
    for node in range(-(-ranks // ranks_per_node)):
        of_node = tuple(range(node * ranks_per_node, min(ranks, (node + 1) * ranks_per_node)))
        peer = Peer(f"10.0.{node // 256}.{node % 256}", 9465, f"{node:012x}")
        nodes.append(NodePeer(f"{node:056x}", of_node, peer))
    return Members(tuple(nodes), bytes(32))


PARTS: dict[str, Callable[[Path, str, int], dict[str, Any]]]
PARTS = {"planning": planning, "agent": agent, "worker": worker, "messages": messages}
SMALL_PARTS = {"planning": planning, "agent": agent, "worker": placing_worker}


def _plan_file(folder: Path, layout: str) -> Path:
    return folder.with_name(f"{folder.name}-plan-{layout}")  # beside the model, which a load may list


def _packed(folder: Path, layout: str) -> Any:
    return pickle.loads(_plan_file(folder, layout).read_bytes())  # written by this program


def layout_text(text: str) -> str:
    """Return TPxFSDPxDP. Raises ValueError."""
    if min(_sizes(text)) < 1:
        raise ValueError(text)
    return text


def _sizes(layout: str) -> tuple[int, int, int]:
    tensor, fsdp, data = (int(part) for part in layout.split("x"))
    return tensor, fsdp, data


def measure(folder: Path, layouts: list[str], ranks_per_node: int) -> dict[str, Any]:
    """Run every part for every layout, each in a new process."""
    found: dict[str, Any] = {layout: {} for layout in layouts}
    for layout, parts in found.items():
        for part in PARTS:
            parts[part] = _alone(PARTS[part], folder, layout, ranks_per_node)
    return found


def measure_small(folder: Path, tensors: int, layouts: list[str]) -> dict[str, Any]:
    """Run every part of a load of many small tensors, with and without a manifest."""
    found: dict[str, Any] = {}
    for index in ("manifest", "headers"):
        model = folder / index
        write_small_tensors(model, tensors, published=index == "manifest")
        for layout in layouts:
            parts = found[f"{index}, {layout}"] = {}
            for name in SMALL_PARTS:
                timed = [_alone(_small_part, name, model, layout, False) for _ in range(RUNS)]
                parts[name] = _alone(_small_part, name, model, layout, True)
                parts[name]["grown_bytes"] = median(run["grown_bytes"] for run in timed)
                stages = parts[name]["seconds"]
                parts[name]["seconds"] = {each: median(run["seconds"][each] for run in timed) for each in stages}
    return found


def _small_part(name: str, model: Path, layout: str, traced: bool) -> dict[str, Any]:
    if traced:
        tracemalloc.start()
    return SMALL_PARTS[name](model, layout, Layout(*_sizes(layout)).ranks)


def _alone(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Call the function in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def small_table(found: dict[str, Any], tensors: int) -> str:
    """Return microseconds and bytes of one tensor in Markdown."""
    columns: list[dict[str, str]] = []
    for parts in found.values():
        column: dict[str, str] = {}
        total_s = 0.0
        for part, measured in parts.items():
            for stage, seconds in measured["seconds"].items():
                held_bytes = measured["peak_bytes"][stage] / tensors
                column[f"{part}: {stage}"] = f"{seconds / tensors * 1e6:.2f} us, {held_bytes:,.0f} B"
            part_s = sum(measured["seconds"].values())
            grown_bytes = measured["grown_bytes"] / tensors
            column[f"**{part}**"] = f"**{part_s / tensors * 1e6:.2f} us, {grown_bytes:,.0f} B**"
            total_s += part_s
        column["**all three**"] = f"**{total_s / tensors * 1e6:.2f} us**"
        column["plan that travels"] = f"{parts['planning']['pipe_bytes'] / tensors:,.0f} B"
        columns.append(column)
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    return markdown_table(["", *found], rows)


def table(found: dict[str, Any]) -> str:
    """Return the measurements in Markdown."""
    columns: list[dict[str, str]] = []
    for parts in found.values():
        column: dict[str, str] = {}
        for part in ("planning", "agent", "worker"):
            column |= {f"{part}: {stage}": f"{seconds:.2f} s" for stage, seconds in parts[part]["seconds"].items()}
            column[f"{part}: memory beyond imports"] = f"{parts[part]['grown_bytes'] / 1e6:.0f} MB"
        node, sent = parts["agent"], parts["messages"]
        column["chunks that a node needs"] = f"{node['needed_chunks']:,}"
        wanted = 1 - node["overfetch_bytes"] / max(node["needed_bytes"], 1)
        column["of their bytes wanted by the node"] = f"{wanted:.1%}"
        column["shared tables, to each node once"] = f"{sent['shared_bytes'] / 1e6:.1f} MB"
        column["job of a node"] = f"{sent['node_job_bytes'] / 1e3:.1f} kB"
        column["job of a rank"] = f"{sent['rank_job_bytes'] / 1e3:.1f} kB"
        column["members, to each node once"] = f"{sent['members_bytes'] / 1e3:.1f} kB"
        column["heartbeat of a node"] = f"{node['heartbeat_bytes'] / 1e3:.1f} kB"
        column["all jobs together"] = f"{sent['coordinator_sends_bytes'] / 1e6:.1f} MB"
        columns.append(column)
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    return markdown_table(["", *(f"tp x fsdp x dp = {layout}" for layout in found)], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = new_parser("bench.plan_scale", __doc__)
    parser.add_argument("--layout", action="append", type=layout_text, help="as in 8x16x8; may be repeated")
    parser.add_argument("--ranks-per-node", type=positive_int, default=8, help="of the agent's node")
    parser.add_argument("--layers", type=positive_int, default=MoeShape.layers, help="fewer make a smaller model")
    parser.add_argument("--shards", type=positive_int, default=MoeShape.shards, help="files of the model")
    parser.add_argument("--tensors", type=positive_int, help="measure a model of so many tensors of 1 kB instead")
    args = parser.parse_args(arguments)
    if args.tensors:
        with tempfile.TemporaryDirectory() as name:
            small = measure_small(Path(name), args.tensors, args.layout or list(SMALL_LAYOUTS))
        print(f"{args.tensors:,} tensors of 1 kB; of one tensor and rank: processor time, peak memory\n")
        print(small_table(small, args.tensors))
        return
    layouts = args.layout or list(DEFAULT_LAYOUTS)
    shape = MoeShape(layers=args.layers, shards=args.shards)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = moe_manifest(shape)
        (folder / "manifest.json").write_bytes(manifest.to_json())
        (folder / "config.json").write_text(shape.config().model_dump_json())
        model = {"tensors": len(manifest.tensors), "shards": len(manifest.shards)}
        model["chunks"] = sum(len(shard.chunk_ends) for shard in manifest.shards)
        model["bytes"] = sum(shard.size_bytes for shard in manifest.shards)
        model["manifest_bytes"] = (folder / "manifest.json").stat().st_size
        found = measure(folder, layouts, args.ranks_per_node)
    print(
        f"{model['tensors']:,} tensors, {model['shards']:,} shards, {model['chunks']:,} chunks, "
        f"{model['bytes'] / 1e12:.2f} TB; manifest of {model['manifest_bytes'] / 1e6:.0f} MB; "
        f"{args.ranks_per_node} ranks per node\n"
    )
    print(table(found))


if __name__ == "__main__":
    main()
