"""A load plan in numbers, for people: what `cluster.plan()` returns and `longshore plan` prints. Pure.

It also estimates how long a load takes, from given or measured bandwidths:

    store    bytes that leave the store, all nodes together   at the store's rate
    network  the most that one node fetches of them           at the rate of a node's link
    disk     the most that one node has on its disk           at the rate of reading there
    place    the most that one rank has                       at the rate into a device

Stages overlap, so the slowest stage determines the time and is the limit. A stage without a rate is left out, and the
estimate lists it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ConfigError
from cluster.fit.device_map import device_name
from cluster.fit.search import PlanFit
from cluster.layouts.mesh import Layout, RankCoords
from cluster.planning.chunk_keys import HeldChunks, node_sources
from cluster.planning.cut_model import KindSlice
from cluster.planning.packed_plan import memory_map, rank_chunks, rank_facts
from cluster.planning.plan import LoadPlan
from cluster.planning.plan_picture import NOT_KNOWN, LayerTable, TensorPart, Verdict, draw_plan
from cluster.precision.written_quantization import precision_of, quantization_config
from cluster.scheduling.topology import ranks_by_node
from cluster.telemetry.stats import ONLY_PART, ObjectCheck, join_checks, verified_by
from cluster.units import parse_bytes
from storage.checksum import NO_CHECKSUM

if TYPE_CHECKING:
    from cluster.telemetry.report import LoadReport


STAGES = ("store", "network", "disk", "place")
_HINT = 'write it like "5GB/s" or "40Gbit/s"; a number is bytes per second'


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of the stages of a load, in bytes per second. None: not known."""

    store: float | None = None  # from the store, all nodes together
    network: float | None = None  # into one node
    disk: float | None = None  # from the disk of one node
    place: float | None = None  # into the memory of one rank, verified
    start_s: float = 0.0  # before the first byte: planning, starting workers
    source: str = "given"  # "measured": by an earlier load

    @property
    def known(self) -> bool:
        """Return whether the rate of any stage is known."""
        return any(getattr(self, stage) is not None for stage in STAGES)

    def over(self, measured: Rates) -> Rates:
        """Return these rates, with measured ones where these are not known."""
        rates = {stage: getattr(self, stage) or getattr(measured, stage) for stage in STAGES}
        mixed = "given and measured" if self.known else measured.source
        return Rates(**rates, start_s=self.start_s or measured.start_s, source=mixed)


@dataclass(frozen=True, slots=True)
class ExpectedTime:
    """The estimated time of a load."""

    total_s: float
    start_s: float
    limit: str  # the stage that takes longest
    stages_s: dict[str, float]  # seconds of each stage whose rate is known
    source: str  # where the rates come from: "given", "measured"
    unknown: tuple[str, ...]  # stages that move bytes but have no known rate

    @property
    def sentence(self) -> str:
        """Return the estimate as a sentence for people."""
        stages = ", ".join(f"{stage} {seconds:.3g} s" for stage, seconds in self.stages_s.items())
        start = f", {self.start_s:.3g} s before the first byte" if self.start_s else ""
        without = f"; no rate of {' and '.join(self.unknown)} is known" if self.unknown else ""
        return f"{self.total_s:.3g} s, limit: {self.limit} ({stages}{start}; rates {self.source}{without})"


def expect(
    store_bytes: int, node_bytes: int, rank_bytes: int, rates: Rates, disk_bytes: int = 0
) -> ExpectedTime | None:
    """Return the estimated time, or None when no rate is known.

    `store_bytes` leave the store in all. The others are maxima: of one node from the store (`node_bytes`), of one
    node's disk (`disk_bytes`), and of one rank (`rank_bytes`).
    """
    amounts = {"store": store_bytes, "network": node_bytes, "disk": disk_bytes, "place": rank_bytes}
    stages = {stage: amounts[stage] / rate for stage in STAGES if (rate := getattr(rates, stage)) is not None}
    if not stages:
        return None
    limit = max(stages, key=lambda stage: stages[stage])
    unknown = tuple(stage for stage in STAGES if stage not in stages and amounts[stage])
    return ExpectedTime(stages[limit] + rates.start_s, rates.start_s, limit, stages, rates.source, unknown)


def parse_rate(given: str | float) -> float:
    """Return the bytes per second of `5GB/s`, `40Gbit/s` or a number. Raises ConfigError."""
    rate = 0.0
    if isinstance(given, int | float) and not isinstance(given, bool):
        rate = float(given)
    elif isinstance(given, str):
        bits = re.fullmatch(r"\s*(.+?)\s*(?:bit/s|bps|b/s)\s*", given) if "B/s" not in given else None
        text = bits[1] if bits else re.sub(r"\s*/\s*s\s*\Z", "", given)
        try:
            rate = parse_bytes(text) / (8 if bits else 1)
        except ConfigError:
            rate = 0.0
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"not a rate: {given!r:.60}", hint=_HINT)
    return rate


def measured_rates(report: LoadReport | Mapping[str, Any]) -> Rates:
    """Return the rates of a load's stages, from its report or the JSON of one.

    Each rate is what the stage would reach alone. A stage that was busy for half of the load time could have moved
    twice as much. Raises ConfigError for a load that moved nothing, and for something that is not a report.
    """
    try:
        document = report if isinstance(report, Mapping) else report.as_dict()
        load_s, ranks = float(document["load_s"]), len(document["ranks"])
        shares = {stage: float(share) for stage, share in document["limit"]["shares"].items()}
        moved = float(sum(document["bytes_by_source"][source] for source in ("store_via_arena", "store_direct")))
        placed = float(document["placed_bytes"])
        read = float(document["bytes_by_source"].get("disk", 0)) / max(1, len(document.get("nodes", ())))
        start_s = float(document["plan_s"]) + float(document["start_s"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            "not the report of a load", hint="`longshore load --json` prints one; LoadedModel.report is one"
        ) from error
    if not (0 < load_s < math.inf) or not ranks or moved + placed <= 0 or document.get("resident"):
        raise ConfigError("the report is of a load that moved no bytes", hint="measure with a load from the store")
    into = sum(shares.get(stage, 0.0) for stage in ("verify", "memory", "place", "device"))
    return Rates(
        store=_alone(moved / load_s, shares.get("store", 0.0)),
        disk=_alone(read / load_s, shares.get("disk", 0.0)),
        place=_alone(placed / ranks / load_s, min(1.0, into)),
        start_s=start_s,
        source="measured",
    )


def _alone(rate: float, share: float) -> float | None:
    """Return the rate of the stage alone, or None if it was too little busy to show that."""
    return rate / share if rate > 0 and share >= 0.05 else None


NOTHING_HELD: Mapping[int, HeldChunks] = {}


@dataclass(frozen=True, slots=True)
class RankSummary:
    """The share of one rank in a plan."""

    rank: int
    node: str  # name of its node
    tensor: int  # its number in its tensor-parallel group
    stage: int  # its pipeline stage
    expert: int  # its number among the expert-parallel ranks
    fsdp: int  # its number in its fully sharded group
    data: int  # number of its replica
    tensors: int  # slices with at least one byte
    bytes_by_dtype: dict[str, int]  # safetensors dtype names, sorted
    size_bytes: int  # bytes of its slices
    device_bytes: int  # memory they take, alignment included
    staging_bytes: int  # peak memory beside them, for tensors that are still to be converted
    segments: int  # device memory blocks
    chunks: int  # chunks that its slices touch
    bytes_by_device: dict[str, int] = field(
        default_factory=dict
    )  # share of device_bytes of each device, with a device map
    read_bytes: int = 0  # bytes it copies from chunks; not size_bytes if tensors are converted


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """The share of one node in a plan."""

    node: str
    ranks: tuple[int, ...]
    needed_chunks: int  # each fetched once, however many ranks need it
    needed_bytes: int
    overfetch_bytes: int  # bytes in those chunks that no rank of the node needs
    # needed_bytes by source; all 0 when the model is resident
    store_bytes: int = 0
    cached_bytes: int = 0  # in the node's arena
    disk_bytes: int = 0
    # Limit of its arena, as it is or as set. 0: a quarter of the free space of /dev/shm, at most 8 GiB. Beyond its
    # window it takes memory only for chunks that it keeps, while the host has some to spare.
    arena_bytes: int = 0
    window_bytes: int = 0  # of that, taken at once. 0: 512 MiB, or all of an arena up to 1 GiB


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """The result of `cluster.plan()`: which bytes would be loaded where. No byte was moved."""

    revision: str
    # "blake3" or "xxh3_128": chunks have digests. Without digests, "store:crc64nvme" means that every object has a
    # checksum kept by the store, and "transport" that some objects have none (see `objects`).
    verified: str
    signed_by: str  # id of the trusted key that signed the manifest; "" if no key is trusted
    layout: Layout
    shards: int
    tensors: int
    chunks: int  # chunks of the model
    stored_bytes: int  # bytes of the model's shards
    placed_bytes: int  # bytes of the slices of all ranks
    device_bytes: int  # memory they take, alignment included
    needed_bytes: int  # bytes of the chunks that nodes need, all nodes together
    overfetch_bytes: int
    ranks: tuple[RankSummary, ...]
    nodes: tuple[NodeSummary, ...]
    precision: str = ""  # the dtype or quantization that tensors are converted to
    quantization_config: dict[str, Any] | None = (
        None  # field of config.json for an engine that uses the quantized weights
    )
    objects: tuple[ObjectCheck, ...] = ()  # no manifest: how each object is checked, or why not
    device_map: dict[str, int | str] | None = None  # modules and their devices, if the one rank has several devices
    fit: PlanFit | None = None
    expected: ExpectedTime | None = None  # if any rate is known
    layers: LayerTable | None = None  # bytes of each layer on each rank
    cluster: str = ""  # address of the cluster that was asked for its chunks; "": none was
    resident: str = ""  # id of the resident model that a load would attach to; nothing would move
    estimated: bool = False  # made from config.json alone, without weights
    of_rank: tuple[TensorPart, ...] = ()  # slices of the rank that was named
    notes: tuple[str, ...] = ()  # remarks for people, such as what is skipped or estimated

    def __str__(self) -> str:
        """Return the tables that `longshore plan` prints."""
        from cluster.command_line.tables import as_text, plan_table

        return as_text(plan_table(self))

    def __repr__(self) -> str:
        return f"PlanSummary({self.revision!r}, ranks={len(self.ranks)}, placed_bytes={self.placed_bytes})"

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and strings, ready for `json.dumps`."""
        return {**asdict(self), "bytes_by_source": self.bytes_by_source}

    @property
    def bytes_by_source(self) -> dict[str, int]:
        """Return the bytes of needed chunks by source. Without a cluster all come from the store."""
        return {
            "store": sum(node.store_bytes for node in self.nodes),
            "arena": sum(node.cached_bytes for node in self.nodes),
            "disk": sum(node.disk_bytes for node in self.nodes),
        }

    def picture(self, title: str = "a load plan") -> str:
        """Return an SVG picture of ranks against layers, coloured by dtype, with a line saying if the plan fits.

        Args:
            title: Title of the picture.

        Returns:
            The document, as text.
        """
        return draw_plan(self.layers or LayerTable((), ()), title, self.verdict)

    @property
    def verdict(self) -> Verdict:
        """Return whether the plan fits, for people. Empty if the memory is not known."""
        if self.fit is None or self.fit.fits is None:
            return NOT_KNOWN
        # A rank with several devices has no bar of its own.
        alone = {device.rank: None if device.device else device for device in self.fit.devices}
        of_rank = [alone.get(rank.rank) for rank in self.ranks]
        return Verdict(
            self.fit.sentence,
            self.fit.fits,
            tuple(device.have_bytes if device else None for device in of_rank),
            tuple(device.need_bytes if device else None for device in of_rank),
        )


def summarize_plan(
    plan: LoadPlan,
    rank_nodes: Sequence[int] | None = None,
    node_names: Sequence[str] = (),
    *,
    signed_by: str = "",
    held: Mapping[int, HeldChunks] = NOTHING_HELD,
) -> PlanSummary:
    """Return the numbers of `plan` with rank i on node `rank_nodes[i]`, or all ranks on one node without it.

    `node_names` is indexed by node; a node without a name is called `node <index>`. `held` has the chunks of the model
    that each node already holds.
    """
    rank_nodes = [0] * len(plan.ranks) if rank_nodes is None else rank_nodes
    names = {node: node_names[node] if node < len(node_names) else f"node {node}" for node in sorted(set(rank_nodes))}
    touched = _TouchedChunks(plan)
    summarize_rank = _RankSummaries(plan, touched)
    here = ranks_by_node(rank_nodes)
    nodes = tuple(
        _summarize_node(plan, names[node], here[node], touched.of_node(here[node]), held.get(node)) for node in here
    )
    ranks = tuple(summarize_rank(rank, names[node]) for rank, node in enumerate(rank_nodes))
    objects = join_checks(check for some in here.values() for check in _planned_checks(plan, touched.of_node(some)))
    return PlanSummary(
        revision=plan.revision,
        verified=plan.chunks.hash_name or verified_by(objects),
        signed_by=signed_by,
        layout=plan.cut.layout,
        shards=len(plan.shards),
        tensors=len(plan.cut),
        chunks=len(plan.chunks),
        stored_bytes=sum(shard.size_bytes for shard in plan.shards),
        placed_bytes=sum(rank.size_bytes for rank in ranks),
        device_bytes=sum(rank.device_bytes for rank in ranks),
        needed_bytes=sum(node.needed_bytes for node in nodes),
        overfetch_bytes=sum(node.overfetch_bytes for node in nodes),
        ranks=ranks,
        nodes=nodes,
        precision=precision_of(plan.cut),
        quantization_config=quantization_config(plan.cut),
        objects=objects,
        device_map=plan.cut.device_map.as_dict() if plan.cut.device_map else None,
    )


def spread_evenly(ranks: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return the node of each rank when nodes of `ranks_per_node` ranks are filled one after the other."""
    return tuple(rank // ranks_per_node for rank in range(ranks))


def _planned_checks(plan: LoadPlan, chunks: NDArray[np.int64]) -> Iterator[ObjectCheck]:
    """Return how a node with these chunks can check each of their objects, if chunks have no digests."""
    if plan.chunks.hash_name is not None:
        return
    needed = np.bincount(plan.chunks.shard[chunks], minlength=len(plan.shards))
    whole = np.bincount(plan.chunks.shard, minlength=len(plan.shards))
    for shard, here, all_chunks in zip(plan.shards, needed, whole, strict=True):
        if not here:
            continue
        if shard.checksum is None:
            yield ObjectCheck(shard.key, reason=shard.unchecked or NO_CHECKSUM)
        elif here < all_chunks:
            yield ObjectCheck(shard.key, reason=ONLY_PART)
        else:
            yield ObjectCheck(shard.key, shard.checksum.hash_name)


def _summarize_node(
    plan: LoadPlan, name: str, ranks: tuple[int, ...], needed: NDArray[np.int64], held: HeldChunks | None
) -> NodeSummary:
    sources = node_sources(needed, plan.chunks.sizes_bytes(), held)
    needed_bytes = int(plan.chunks.sizes_bytes()[needed].sum())
    return NodeSummary(
        node=name,
        ranks=ranks,
        needed_chunks=len(needed),
        needed_bytes=needed_bytes,
        overfetch_bytes=needed_bytes - plan.cut.wanted_bytes(ranks),
        store_bytes=sources.store_bytes,
        cached_bytes=sources.cached_bytes,
        disk_bytes=sources.disk_bytes,
    )


class _TouchedChunks:
    """The chunks that ranks and nodes touch, computed once for all ranks or nodes that hold the same."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._of_node: dict[frozenset[RankCoords], NDArray[np.int64]] = {}
        self._count: dict[RankCoords, int] = {}

    def of_node(self, ranks: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the ids of chunks that any of `ranks` touches, ascending."""
        places = frozenset(self._plan.cut.places(ranks))
        if places not in self._of_node:
            needed = np.zeros(len(self._plan.chunks), bool)
            for place in places:
                ids = rank_chunks(self._plan.cut, self._plan.chunks, place)
                needed[ids] = True
                self._count[place] = len(ids)
            self._of_node[places] = np.flatnonzero(needed)
        return self._of_node[places]

    def count(self, place: RankCoords) -> int:
        """Return how many chunks the rank touches, after `of_node` was called for its node."""
        return self._count[place]


class _RankSummaries:
    """The summaries of ranks, from the cut model. No rank's plan is made for them."""

    def __init__(self, plan: LoadPlan, touched: _TouchedChunks) -> None:
        self._plan = plan
        self._touched = touched
        self._segments: dict[tuple[object, ...], int] = {}
        self._facts = rank_facts(plan.cut, plan.chunks.largest_bytes)
        self._of_place: dict[RankCoords, RankSummary] = {}

    def __call__(self, rank: int, node: str) -> RankSummary:
        layout = self._plan.cut.layout
        coords = layout.rank_coords(rank)
        place = layout.place(coords)
        if place not in self._of_place:
            self._of_place[place] = self._summarize(rank, place)
        return replace(self._of_place[place], rank=rank, node=node, data=coords.data)

    def _summarize(self, rank: int, coords: RankCoords) -> RankSummary:
        cut = self._plan.cut
        counts = cut.kind_counts(coords)
        pieces = cut.slices(coords)
        by_dtype: Counter[str] = Counter()
        tensors = 0
        for piece, count in zip(pieces, counts, strict=True):
            for output, size_bytes in zip(piece.outputs, piece.sizes_bytes, strict=True):
                by_dtype[output.dtype] += size_bytes * count
                tensors += count if size_bytes else 0
        return RankSummary(
            rank=rank,
            node="",
            tensor=coords.tensor,
            stage=coords.stage,
            expert=coords.expert,
            fsdp=coords.fsdp,
            data=coords.data,
            tensors=tensors,
            bytes_by_dtype={dtype: size_bytes for dtype, size_bytes in sorted(by_dtype.items()) if size_bytes},
            size_bytes=self._facts[rank].size_bytes,
            device_bytes=self._facts[rank].device_bytes,
            staging_bytes=self._facts[rank].staging_bytes,
            segments=self._count_segments(coords, pieces, counts),
            chunks=self._touched.count(coords),
            bytes_by_device={device_name(device): size for device, size in self._facts[rank].devices},
            read_bytes=self._facts[rank].read_bytes,
        )

    def _count_segments(self, coords: RankCoords, pieces: Sequence[KindSlice], counts: Sequence[int]) -> int:
        """Return the number of segments, computed once for ranks with the same tensors and slice sizes."""
        cut = self._plan.cut
        who = tuple(holder.has(coords) for holder in cut.holders)
        sizes = tuple(piece.sizes_bytes if count else () for piece, count in zip(pieces, counts, strict=True))
        if (who, sizes) not in self._segments:
            self._segments[who, sizes] = len(memory_map(cut, coords, pieces).segment_bytes)
        return self._segments[who, sizes]
