"""`cluster.plan`: shows what a load would put where, and whether it fits. Runs in this process, without a GPU.

manifest, headers, or config.json alone --> index --> plan of the request --weighed on devices--> what fits
                                                                         --rates--> expected time

The node agents of a running cluster report what they hold of the model. Nothing is started, and no weight moves.

joined or named cluster --rooms--> nodes --keys of the model's chunks--> what arenas and disks hold --> ClusterView
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.argument_types import checks_arguments
from cluster.config import Config, TrustPolicy
from cluster.errors import ConfigError, LayoutError, ModelConfigError, NoCoordinator, NotEnoughResources, PlanError
from cluster.fit.needs import room_on
from cluster.fit.options import GivenMap, GivenMemory
from cluster.fit.search import (
    GIVEN,
    IN_CLUSTER,
    SEEN,
    Change,
    Devices,
    GivenDevices,
    PlannedChange,
    check_devices,
    find_fit,
    fit_of_resident,
    fits_on,
    layouts_for,
    parse_host_memory,
    parse_memory,
    rooms_of,
)
from cluster.joining.connection import Connection, connect, joined
from cluster.layouts.mesh import MAX_RANKS, Layout, check_count
from cluster.layouts.model_config import CONFIG_KEY, MAX_CONFIG_BYTES, ModelConfig, parse_model_config
from cluster.layouts.rules import LayoutRules, parse_rules, rules_for
from cluster.model import in_thread
from cluster.options import CheckedOptions, Dtype, LoadOptions, collect
from cluster.planning.chunk_keys import MOST_ASKED, HeldChunks, Holdings, lasting_keys, note_held, sampled_keys
from cluster.planning.make_plan import ReadAmax, amax_reader, plan_changes, plan_model, read_model
from cluster.planning.packed_plan import rank_facts
from cluster.planning.plan import LoadPlan
from cluster.planning.plan_picture import layer_table, tensors_of
from cluster.planning.plan_summary import (
    ExpectedTime,
    NodeSummary,
    PlanSummary,
    Rates,
    expect,
    measured_rates,
    parse_rate,
    spread_evenly,
    summarize_plan,
)
from cluster.precision.written_quantization import precision_notes
from cluster.request import LoadRequest, make_request, with_live_rules
from cluster.scheduling.topology import NodeInfo, assign_gpus, assign_ranks, places_free, resolve_device
from cluster.telemetry.report import LoadReport, ModelStatus
from cluster.units import show_some
from storage.arena.arena_files import window_slots
from storage.checkpoints.model_index import ModelIndex
from storage.errors import LongshoreError, NotACheckpoint, StoreError
from storage.host.memory import gpu_memory
from storage.store_ref import Credentials
from storage.stores.object_store import ByteRange, read_bytes
from storage.stores.open_store import open_store

NAMED = 20  # nodes in one note


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The ranks of a plan on the nodes of a cluster, and what those nodes hold of the model."""

    address: str
    rank_nodes: tuple[int, ...]
    node_names: tuple[str, ...]  # by node index; ranks may be on nodes beyond them, which the cluster has not got yet
    held: Mapping[int, HeldChunks]  # by node index
    arenas: Mapping[str, tuple[int, int]]  # by node name, of agents that have one: (limit, window) in bytes
    resident: ModelStatus | None  # the READY model that a load would be given
    notes: tuple[str, ...]

    def summarize(self, plan: LoadPlan, signed_by: str) -> PlanSummary:
        """Return the summary of `plan` in that cluster. A resident model reads nothing."""
        summary = summarize_plan(plan, self.rank_nodes, self.node_names, signed_by=signed_by, held=self.held)
        sizes = {node.node: self.arenas.get(node.node, (0, 0)) for node in summary.nodes}
        nodes = tuple(
            replace(node, arena_bytes=sizes[node.node][0], window_bytes=sizes[node.node][1]) for node in summary.nodes
        )
        if self.resident is not None:
            nodes = tuple(replace(node, store_bytes=0, cached_bytes=0, disk_bytes=0) for node in nodes)
        resident = "" if self.resident is None else self.resident.progress.model_id
        return replace(summary, nodes=nodes, cluster=self.address, resident=resident, notes=self.notes)


@dataclass(frozen=True, slots=True)
class AskedCluster:
    """A running cluster, with its connection."""

    connection: Connection
    infos: tuple[NodeInfo, ...]  # of its living nodes

    def view(self, request: LoadRequest, plan: LoadPlan, ranks_per_node: int | None, config: Config) -> ClusterView:
        """Raises ClusterLost."""
        infos = self.infos
        device = resolve_device(infos, request.device)
        asked = replace(request, device=device)
        identity = request.store.ref.identity()

        def holdings(indexes: Sequence[int], keys: bytes) -> Holdings:
            node_ids = [infos[index].node_id for index in indexes]
            found: Holdings = self.connection.call("holdings", asked.identity(), plan.revision, node_ids, keys)
            return found

        if len(infos) > 1 and ranks_per_node is None:  # a load asks them too, before it is placed
            some = holdings(range(min(len(infos), MOST_ASKED)), sampled_keys(plan.shards, plan.chunks, identity)).nodes
            shares = {node: held.share for node, held in some.items() if isinstance(held, HeldChunks)}
            infos = tuple(replace(info, held_share=shares.get(info.node_id, 0.0)) for info in infos)
        placements = place_ranks(infos, asked, ranks_per_node, config.cpu_ranks_per_node)
        there = [index for index in sorted(set(placements)) if index < len(infos)]
        found = holdings(there, lasting_keys(plan.shards, plan.chunks, identity))
        names = node_names(infos)
        answers = {index: found.nodes[infos[index].node_id] for index in there}
        chosen = {names[index]: infos[index].held_share for index in there if infos[index].held_share}
        return ClusterView(
            address=self.connection.address,
            rank_nodes=placements,
            node_names=names,
            held={index: held for index, held in answers.items() if isinstance(held, HeldChunks)},
            arenas={names[index]: (infos[index].arena_bytes, infos[index].window_bytes) for index in there},
            resident=found.resident,
            notes=(
                *((note_held(chosen),) if chosen and len(there) < len(infos) else ()),
                *_notes({names[index]: held for index, held in answers.items()}, len(set(placements)) - len(there)),
            ),
        )


def find_cluster(address: str | None, config: Config) -> AskedCluster | None:
    """Return the cluster at `address`, without one the cluster of this process, or None.

    Raises ClusterLost, as NoCoordinator when none runs at the address.
    """
    if address is None:
        with contextlib.suppress(LongshoreError):  # a plan works without it
            connection = joined(config)
            return None if connection is None else AskedCluster(connection, tuple(connection.call("rooms")))
        return None
    connection = connect(address, config, start=False)
    if connection is None:
        raise NoCoordinator(
            "no Longshore coordinator runs in this cluster", hint='the first load starts one; memory="4x24GB" asks none'
        )
    return AskedCluster(connection, tuple(connection.call("rooms")))


def place_ranks(
    infos: Sequence[NodeInfo], request: LoadRequest, ranks_per_node: int | None, cpu_ranks_per_node: int
) -> tuple[int, ...]:
    """Return the index of each rank's node, as a load would place it. Pure.

    The free GPUs count; when they are too few, all GPUs do. When the nodes are too few, indexes go beyond them.
    `ranks_per_node`: the number that the user asked for.
    """
    if ranks_per_node is not None or not infos:
        return spread_evenly(request.world_size, ranks_per_node or request.world_size)
    emptied = [replace(info, gpus_free=info.gpus_total) for info in infos]
    for nodes in (infos, emptied):
        with contextlib.suppress(NotEnoughResources):
            if request.gpus_per_rank > 1:
                return assign_gpus(nodes, request.gpus_per_rank)
            return assign_ranks(nodes, request.layout, request.device, cpu_ranks_per_node)
    most = max(places_free(info, request.device, cpu_ranks_per_node) for info in emptied)
    return spread_evenly(request.world_size, most or request.world_size)


def node_names(infos: Sequence[NodeInfo]) -> tuple[str, ...]:
    """Return the host of each node, with the beginning of its id where several nodes are on one host."""
    times = Counter(info.host for info in infos)
    return tuple(info.host if times[info.host] == 1 else f"{info.host} {info.node_id[:8]}" for info in infos)


def _notes(answers: Mapping[str, HeldChunks | str], beyond: int) -> tuple[str, ...]:
    silent: defaultdict[str, list[str]] = defaultdict(list)
    for name, answer in answers.items():
        if isinstance(answer, str):
            silent[answer].append(name)
    if beyond:
        silent["the cluster has not got them yet"].append(f"{beyond} nodes")
    return tuple(
        f"counted as having nothing of the model: {show_some(names, NAMED)} ({why})" for why, names in silent.items()
    )


Rate = str | float | None
Measured = LoadReport | Mapping[str, Any] | str | os.PathLike[str]
MAX_REPORT_BYTES = 256 << 20
_HINT = "`longshore load --json` prints one"


def find_devices(
    memory: GivenDevices | None, nodes: Sequence[NodeInfo] | None, request: LoadRequest, config: Config
) -> Devices | None:
    """Return the devices to fit into: given, those of a cluster's `nodes`, or of this machine; None when unknown.

    Raises ConfigError.
    """
    if memory is not None:
        return Devices(rooms_of(parse_memory(memory), request, config), GIVEN)
    source = SEEN if nodes is None else IN_CLUSTER
    seen = gpu_memory() if nodes is None else [gpu for node in nodes for gpu in node.gpus]
    return Devices(tuple(room_on(gpu, request.fit, config) for gpu in seen), source) if seen else None


def given_rates(store: Rate, network: Rate, disk: Rate, place: Rate) -> Rates:
    """Return the rates as they were given. Raises ConfigError."""
    parsed = [None if rate is None else parse_rate(rate) for rate in (store, network, disk, place)]
    return Rates(parsed[0], parsed[1], parsed[2], parsed[3])


def read_rates(given: Measured) -> Rates:
    """Return the rates of an earlier load, from its report or a file with it. Raises ConfigError."""
    if isinstance(given, LoadReport | Mapping):
        return measured_rates(given)
    path = Path(given)
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise ConfigError(f"{path} is too large for the report of a load")
        return measured_rates(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not the report of a load: {error}", hint=_HINT) from error


def picture_path(given: str | os.PathLike[str]) -> Path:
    """Return the path of the picture. Raises ConfigError for a file that is no SVG or has no folder."""
    path = Path(given)
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"a picture is an SVG file, not {path.name!r:.60}", hint="name it plan.svg")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder for the picture: {path.parent}")
    return path


def write_picture(path: Path, summary: PlanSummary, uri: str) -> None:
    """Write the picture. Raises ConfigError when it cannot be written."""
    try:
        path.write_text(titled_picture(summary, uri), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the picture cannot be written: {error.strerror}", path=str(path)) from error


def titled_picture(summary: PlanSummary, uri: str) -> str:
    """Return an SVG of ranks against layers."""
    return summary.picture(f"{uri}: {summary.layout}")


OFFERS_S = 20.0  # limit on the time to search for alternatives, which is long for very large models


@checks_arguments
def plan(
    model_uri: str | os.PathLike[str],
    *,
    tensor_parallel_size: int = 1,
    fsdp_size: int = 1,
    data_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 0,
    vocabulary_multiple: int = 1,
    ranks_per_node: int | None = None,
    rank: int | None = None,
    memory: GivenDevices | None = None,
    host_memory: str | int | None = None,
    address: str | None = None,
    fit: str = "strict",
    gpu_memory_utilization: float | None = None,
    reserve_bytes: int | None = None,
    store_rate: str | float | None = None,
    network_rate: str | float | None = None,
    disk_rate: str | float | None = None,
    place_rate: str | float | None = None,
    measured: Measured | None = None,
    picture: str | os.PathLike[str] | None = None,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    credentials: Credentials | None = None,
    layout_rules: LayoutRules | None = None,
    dtype: Dtype = "auto",
    quantization: str | None = None,
    skip_quantization: Sequence[str] | None = None,
    device_map: GivenMap | None = None,
    max_memory: GivenMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    signed_name: str | None = None,
    revision: str | None = None,
    config: Config | None = None,
) -> PlanSummary:
    """Return what a load would place where, what it would read, and whether it fits.

    Moves no weights and needs no cluster.

    Reads the manifest, or the headers. Where there are no weights, `config.json` alone gives an estimate, for which
    transformers makes the shapes.

    Args:
        model_uri: As for `load`.
        tensor_parallel_size: As for `load`.
        fsdp_size: As for `load`.
        data_parallel_size: As for `load`.
        pipeline_parallel_size: As for `load`.
        expert_parallel_size: As for `load`.
        expert_tensor_parallel_size: As for `load`.
        vocabulary_multiple: As for `load`.
        ranks_per_node: Number of ranks on each node, for the stats per node. None: all on one, or as the cluster that
            is asked has room.
        rank: Rank whose part of every tensor is listed in `summary.of_rank`. None: none.
        memory: Memory of the devices: "4x24GB", or a size for each, for rank 0, 1 and so on. None: the GPUs of this
            machine, if it has any. With several devices and no sizes of the layout, the model is spread over all of
            them.
        host_memory: Host memory for offload, of one rank whose GPU is too small: "60GB" or bytes. None: none.
        address: "HOST:PORT" of a Ray cluster, or "auto" for the one that runs here, that is asked what its GPUs have
            free and what its nodes have cached. Nothing is started for it. None: the one that this process works with,
            if any.
        fit: "strict" plans what was asked for, and `summary.fit` says whether it fits and what would. "auto" plans the
            first step of precision that fits.
        gpu_memory_utilization: As for `load`.
        reserve_bytes: As for `load`.
        store_rate: Rate out of the store: "5GB/s", "40Gbit/s" or bytes per second. None: as measured, else unknown.
        network_rate: Rate into a node, like `store_rate`.
        disk_rate: Rate off a node's disk, like `store_rate`.
        place_rate: Rate into a rank's memory, like `store_rate`.
        measured: A LoadReport, or the file that `longshore load --json` printed, for the rates that are not given.
        picture: File for an SVG of ranks against layers. None: none is drawn.
        endpoint_url: As for `load`.
        region: As for `load`.
        profile: As for `load`.
        anonymous: As for `load`.
        credentials: As for `load`.
        layout_rules: As for `load`.
        dtype: As for `load`.
        quantization: As for `load`.
        skip_quantization: As for `load`.
        device_map: As for `load`.
        max_memory: As for `load`.
        offload_folder: As for `load`.
        trusted_keys: As for `load`.
        signed_name: As for `load`.
        revision: As for `load`.
        config: Settings. None: read from the `LONGSHORE_*` variables of the environment.

    Returns:
        The plan: ranks, bytes, layers, whether it fits, and the expected time where rates are known.

    Raises:
        ConfigError: An argument or a setting is wrong.
        LongshoreError: As for `load`, except DoesNotFit.

    Example:
        ```python
        print(cluster.plan("s3://models/llama", tensor_parallel_size=4, memory="4x24GB").fit)
        ```
    """
    given = locals()
    return plan_load(collect(LoadOptions, given), collect(PlanOptions, given), config)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(CheckedOptions):
    """Arguments of `plan` beside the options of the load. Raises ConfigError for wrong types."""

    ranks_per_node: int | None = None
    rank: int | None = None
    memory: GivenDevices | None = None
    host_memory: str | int | None = None
    address: str | None = None
    store_rate: Rate = None
    network_rate: Rate = None
    disk_rate: Rate = None
    place_rate: Rate = None
    measured: Measured | None = None
    picture: str | os.PathLike[str] | None = None

    def rates(self) -> Rates:
        """Return the rates that were given, and the measured ones for the others. Raises ConfigError."""
        given = given_rates(self.store_rate, self.network_rate, self.disk_rate, self.place_rate)
        return given if self.measured is None else given.over(read_rates(self.measured))


def plan_load(options: LoadOptions, ahead: PlanOptions, config: Config | None = None) -> PlanSummary:
    """Plan a load as the options say; the errors are those of `plan`."""
    config = config or Config.from_env()
    request = make_request(replace(options, model_uri=_without_file(options.model_uri)), config.public_keys())
    if ahead.ranks_per_node is not None:
        check_count("ranks_per_node", ahead.ranks_per_node, 1, MAX_RANKS)
    if ahead.rank is not None:
        check_count("rank", ahead.rank, 0, MAX_RANKS - 1)
    target = None if ahead.picture is None else picture_path(ahead.picture)
    rates = ahead.rates()
    if ahead.memory is not None and ahead.address is not None:
        raise ConfigError("memory was given and a cluster to ask for it", hint="leave one of memory and address away")
    there = find_cluster(ahead.address, config)
    devices = find_devices(ahead.memory, there.infos if there and ahead.address is not None else None, request, config)
    host_bytes = 0 if ahead.host_memory is None else parse_host_memory(ahead.host_memory)
    summary = with_live_rules(
        request, lambda asked: _summarize(asked, devices, host_bytes, config, ahead.ranks_per_node, ahead.rank, there)
    )
    summary = replace(summary, expected=_expected(summary, rates))
    if target is not None:
        write_picture(target, summary, request.uri)
    return summary


def draw(request: LoadRequest, config: Config | None = None) -> str:
    """Return an SVG of ranks against layers for a load as it was requested, without a look at memory.

    Reads the manifest, or the headers, with what this process may read. Raises as `plan` does.
    """
    settings = config or Config.from_env()
    summary = with_live_rules(request, lambda asked: _summarize(asked, None, 0, settings, None, None, None))
    return titled_picture(summary, request.uri)


def _expected(summary: PlanSummary, rates: Rates) -> ExpectedTime | None:
    """Return the expected time; None for a resident model, as nothing moves."""
    if summary.resident:
        return None
    node_bytes = max((node.store_bytes for node in summary.nodes), default=0)
    disk_bytes = max((node.disk_bytes for node in summary.nodes), default=0)
    rank_bytes = max((rank.size_bytes for rank in summary.ranks), default=0)
    return expect(summary.bytes_by_source["store"], node_bytes, rank_bytes, rates, disk_bytes)


def _summarize(
    request: LoadRequest,
    devices: Devices | None,
    host_bytes: int,
    config: Config,
    per_node: int | None,
    rank: int | None,
    there: AskedCluster | None,
) -> PlanSummary:
    index, stored = _read(request, config)
    read_amax = amax_reader(request, index, config.read_timeout_s)
    if devices is not None and request.device_map is not None and request.mapping is not None:
        if request.mapping.max_memory is None and not request.mapping.modules:
            on_node = request.mapping.on_node([room.have_bytes for room in devices.rooms], host_bytes)
            request = replace(request, node_memory=on_node.max_memory or ())
    elif devices is not None and devices.source == GIVEN:
        request = _spread(request, index, stored, devices, read_amax)
        check_devices(request.layout, devices)
    load_plan = plan_model(request, index, stored, read_amax)
    facts = rank_facts(load_plan.cut, load_plan.chunks.largest_bytes)
    view = there.view(request, load_plan, per_node, config) if there and index.source != "config" else None
    until_s = time.monotonic() + OFFERS_S

    def planned(changes: Sequence[Change]) -> list[PlannedChange]:
        offers = any(change.kind == "ranks" for change in changes)
        return plan_changes(index, stored, changes, lambda: offers and time.monotonic() > until_s, read_amax)

    if view is not None and view.resident is not None:
        taken, fit = request, fit_of_resident(view.resident.progress.model_id, view.resident.taken, facts)
    else:
        taken, fit = find_fit(request, facts, devices, planned, host_bytes)
    if taken is not request:
        load_plan = plan_model(taken, index, stored, read_amax)
    if view is not None:
        summary = view.summarize(load_plan, index.signed_by)
    else:
        placements = spread_evenly(taken.world_size, per_node or taken.world_size)
        summary = summarize_plan(load_plan, placements, signed_by=index.signed_by)
    nodes = tuple(
        replace(
            node,
            arena_bytes=node.arena_bytes or config.arena_bytes,
            window_bytes=node.window_bytes or config.window_bytes,
        )
        for node in summary.nodes
    )
    device = taken.device if there is None else resolve_device(there.infos, taken.device)
    return replace(
        summary,
        nodes=nodes,
        fit=fit,
        of_rank=() if rank is None else tensors_of(load_plan, rank, rules_for(stored, parse_rules(taken.layout_rules))),
        layers=layer_table(load_plan.cut),
        estimated=index.source == "config",
        notes=(
            *index.notes,
            *precision_notes(index.tensors, taken.precision),
            *(() if summary.resident else _placement_notes(replace(taken, device=device), nodes, config.slot_bytes)),
            *summary.notes,
        ),
    )


def _placement_notes(request: LoadRequest, nodes: Sequence[NodeSummary], slot_bytes: int) -> Iterator[str]:
    """Yield what "auto" takes for ranks in host memory, where that is known: local files, arenas of known sizes."""
    if request.placement != "auto" or request.device != "cpu":
        return
    keeps = True
    for node in nodes:
        window = window_slots(node.arena_bytes, node.window_bytes, slot_bytes=slot_bytes)
        keeps = keeps and node.needed_chunks <= max(window, node.arena_bytes // slot_bytes - window)
    direct = request.is_local or not keeps
    if request.is_local or all(node.arena_bytes for node in nodes):
        how = "what one rank alone wants goes into its memory" if direct else "chunks go through the arena"
        yield f"without a disk tier {how}: {request.placement_reason(direct=direct)}"


def _read(request: LoadRequest, config: Config) -> tuple[ModelIndex, ModelConfig | None]:
    """Return the stored model, or an estimate from config.json alone."""
    trust = TrustPolicy(config.source_rules())  # the request says which keys
    limits = {"chunk_bytes": config.chunk_bytes, "read_timeout_s": config.read_timeout_s}
    try:
        return read_model(request, **limits, trust=trust)  # type: ignore[arg-type]
    except NotACheckpoint as nothing:
        if request.trusted_keys or request.revision or request.only_key is not None:
            raise
        data = _config_alone(request, config)
        if data is None:
            raise
        from cluster.planning.meta_estimate import estimate_index

        try:
            return estimate_index(data, config.chunk_bytes), parse_model_config(data)
        except PlanError as error:
            raise error.with_details(uri=request.uri) from nothing


def _config_alone(request: LoadRequest, config: Config) -> bytes | None:
    ref, credentials = request.store.ref, request.store.credentials
    with closing(open_store(ref, credentials, read_timeout_s=config.read_timeout_s)) as store:
        try:
            size_bytes = store.stat(CONFIG_KEY).size_bytes
        except StoreError:
            return None
        if size_bytes > MAX_CONFIG_BYTES:
            raise ModelConfigError(f"config.json has {size_bytes} bytes, more than {MAX_CONFIG_BYTES}")
        return read_bytes(store, CONFIG_KEY, ByteRange(0, size_bytes))


def _spread(
    request: LoadRequest,
    index: ModelIndex,
    stored: ModelConfig | None,
    devices: Devices,
    read_amax: ReadAmax | None,
) -> LoadRequest:
    """Spread a model without sizes over all devices: by the first layout that fits, else the first possible one."""
    if len(devices.rooms) == 1 or request.layout != Layout(vocabulary_multiple=request.layout.vocabulary_multiple):
        return request
    ways = [
        replace(request, layout=replace(way, vocabulary_multiple=request.layout.vocabulary_multiple))
        for way in layouts_for(len(devices.rooms))
    ]
    changes = [Change(str(way.layout), "ranks", 0, way) for way in ways]
    planned = plan_changes(index, stored, changes, read_amax=read_amax)
    possible = [each for each in planned if not each.problem]
    if not possible:
        raise LayoutError(
            f"the model cannot be spread over {len(devices.rooms)} devices: {planned[0].problem[:300]}",
            hint="say how: tensor_parallel_size, pipeline_parallel_size, fsdp_size",
        )
    return next((each for each in possible if fits_on(each.ranks, devices)), possible[0]).change.request


def _without_file(uri: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the folder for the URI of a config.json, else the URI."""
    text = os.fspath(uri) if isinstance(uri, str | os.PathLike) else ""
    if text == CONFIG_KEY:
        return "."
    return text.removesuffix(f"/{CONFIG_KEY}") if text.endswith(f"/{CONFIG_KEY}") else uri


aplan = in_thread(plan)
