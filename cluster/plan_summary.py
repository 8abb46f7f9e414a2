"""A load plan in numbers, for people: what `cluster.plan()` returns and `longshore plan` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.load_plan import LoadPlan, RankPlan
from cluster.planning import needed_bytes, overfetch_bytes
from cluster.topology import ranks_by_node


@dataclass(frozen=True, slots=True)
class RankSummary:
    """What one rank gets."""

    rank: int
    node: str  # name of its node
    tensor: int  # its place in its tensor-parallel group
    fsdp: int  # its place in its fully sharded group
    data: int  # its replica
    tensors: int  # slices with at least one byte
    bytes_by_dtype: dict[str, int]  # safetensors dtype names, sorted
    size_bytes: int  # of its slices
    device_bytes: int  # memory they take, alignment included
    segments: int  # device memory blocks
    chunks: int  # that its slices touch


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """What one node gets from the store."""

    node: str
    ranks: tuple[int, ...]
    needed_chunks: int  # each fetched once, however many ranks want it
    needed_bytes: int
    overfetch_bytes: int  # in those chunks, wanted by no rank of the node


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What would be loaded where. Moves nothing."""

    revision: str
    verified: str  # "blake3" / "xxh3_128": chunks have digests; "transport": they have none
    tensor_parallel_size: int
    fsdp_size: int
    data_parallel_size: int
    shards: int
    tensors: int
    chunks: int  # of the model
    stored_bytes: int  # of the model's shards
    placed_bytes: int  # slices of all ranks
    device_bytes: int  # memory they take
    needed_bytes: int  # leave the store, all nodes together
    overfetch_bytes: int
    ranks: tuple[RankSummary, ...]
    nodes: tuple[NodeSummary, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, ready for `json.dumps`."""
        return asdict(self)


def summarize_plan(
    plan: LoadPlan, rank_nodes: Sequence[int] | None = None, node_names: Sequence[str] = ()
) -> PlanSummary:
    """Numbers of `plan` with rank i on node `rank_nodes[i]`; all on one node when nobody knows the nodes.

    `node_names` by node index; a node without one is called `node <index>`.
    """
    rank_nodes = [0] * len(plan.ranks) if rank_nodes is None else rank_nodes
    names = {node: node_names[node] if node < len(node_names) else f"node {node}" for node in sorted(set(rank_nodes))}
    ranks = tuple(_summarize_rank(rank, names[node]) for rank, node in zip(plan.ranks, rank_nodes, strict=True))
    nodes = tuple(
        NodeSummary(
            node=names[node],
            ranks=here,
            needed_chunks=len(plan.needed_chunks(here)),
            needed_bytes=needed_bytes(plan, here),
            overfetch_bytes=overfetch_bytes(plan, here),
        )
        for node, here in ranks_by_node(rank_nodes).items()
    )
    last = plan.ranks[-1].coords
    return PlanSummary(
        revision=plan.revision,
        verified=plan.chunks.hash_name or "transport",
        tensor_parallel_size=last.tensor + 1,
        fsdp_size=last.fsdp + 1,
        data_parallel_size=last.data + 1,
        shards=len(plan.shards),
        tensors=len(plan.ranks[0].slices),
        chunks=len(plan.chunks),
        stored_bytes=sum(shard.size_bytes for shard in plan.shards),
        placed_bytes=sum(rank.size_bytes for rank in ranks),
        device_bytes=sum(rank.device_bytes for rank in ranks),
        needed_bytes=sum(node.needed_bytes for node in nodes),
        overfetch_bytes=sum(node.overfetch_bytes for node in nodes),
        ranks=ranks,
        nodes=nodes,
    )


def spread_evenly(ranks: int, ranks_per_node: int) -> tuple[int, ...]:
    """Node of each rank when only the number of ranks per node is known: filled one after the other."""
    return tuple(rank // ranks_per_node for rank in range(ranks))


def _summarize_rank(rank: RankPlan, node: str) -> RankSummary:
    by_dtype: Counter[str] = Counter()
    for piece in rank.slices:
        by_dtype[piece.dtype] += piece.size_bytes
    return RankSummary(
        rank=rank.rank,
        node=node,
        tensor=rank.coords.tensor,
        fsdp=rank.coords.fsdp,
        data=rank.coords.data,
        tensors=sum(1 for piece in rank.slices if piece.size_bytes),
        bytes_by_dtype=dict(sorted(by_dtype.items())),
        size_bytes=rank.size_bytes,
        device_bytes=rank.device_bytes,
        segments=len(rank.segment_bytes),
        chunks=len(rank.chunk_ids),
    )
