"""From a rule to the cut of one tensor, and from the cut to the region that a rank holds. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.layouts.mesh import Layout, RankCoords
from cluster.layouts.region import CutsInsideByte, Region, element_bits, find_runs
from cluster.layouts.rules import Rule
from storage.checkpoints.model_index import Tensor

if TYPE_CHECKING:
    from cluster.layouts.model_config import ModelConfig  # imports pydantic


@dataclass(frozen=True, slots=True)
class Block:
    """Indices start .. start + size - 1 of the cut dimension, in `parts` of `part_size`. The last may be smaller.

    With fewer parts than ranks, neighbouring ranks share one: rank r of n has part r * parts // n.
    """

    start: int
    size: int
    parts: int
    part_size: int


@dataclass(frozen=True, slots=True)
class TensorCut:
    """The cut of one tensor along `dim`, block by block. None: it is not cut.

    `experts` is "one" for a tensor of one expert, and "all" for a tensor whose dim 0 is the experts. The rank's number
    among the expert ranks cuts those.
    """

    dim: int | None = None
    blocks: tuple[Block, ...] = ()
    experts: str = ""


WHOLE = TensorCut()
_OUT, _IN = 0, 1  # dimensions of a linear weight
_EXPERT_RULES = {
    Rule.EXPERT: ("one", Rule.REPLICATE),
    Rule.EXPERT_COLUMN: ("one", Rule.COLUMN),
    Rule.EXPERT_ROW: ("one", Rule.ROW),
    Rule.EXPERT_GATE_UP: ("one", Rule.GATE_UP),
    Rule.EXPERTS: ("all", Rule.REPLICATE),
    Rule.EXPERTS_COLUMN: ("all", Rule.COLUMN),
    Rule.EXPERTS_ROW: ("all", Rule.ROW),
    Rule.EXPERTS_GATE_UP: ("all", Rule.GATE_UP),
}


def experts_of(rule: Rule) -> str:
    """Return "one" for a tensor of one expert, "all" for a tensor of all experts, else ""."""
    return _EXPERT_RULES.get(rule, ("",))[0]


def region_of(shape: tuple[int, ...], cut: TensorCut, coords: RankCoords, layout: Layout) -> Region:
    """Return the region of one rank: its experts, then its tensor-parallel slice, then its share of dim 0 of that."""
    ranges = [[(0, size)] for size in shape]
    padding = 0
    number, ranks = coords.tensor, layout.tensor_parallel_size
    if cut.experts:
        number, ranks = coords.expert_tensor, layout.expert_cuts
    if cut.experts == "all":
        share = shape[0] // layout.expert_parallel_size
        ranges[0] = [(coords.expert * share, (coords.expert + 1) * share)]
    if cut.dim is not None:
        ranges[cut.dim] = []
        for block in cut.blocks:
            first = block.part_size * (number * block.parts // ranks)
            start, end = min(first, block.size), min(first + block.part_size, block.size)
            ranges[cut.dim].append((block.start + start, block.start + end))
            padding += block.part_size - (end - start)
    region = Region(tuple(map(tuple, ranges)), padding)
    return region.share(coords.fsdp, layout.fsdp_size)


def cut_tensor(tensor: Tensor, rule: Rule, layout: Layout, config: ModelConfig | None) -> TensorCut | str:
    """Return the cut of one tensor, or a text why it cannot be cut."""
    cut = cut_shape(tensor.shape, rule, layout, config)
    return cut if isinstance(cut, str) else byte_problem(tensor, cut, layout) or cut


def cut_shape(shape: tuple[int, ...], rule: Rule, layout: Layout, config: ModelConfig | None) -> TensorCut | str:
    """Return the cut of a tensor of that shape, or why it has none. Element sizes are not checked."""
    experts, plain = _EXPERT_RULES.get(rule, ("", rule))
    ways = layout.expert_cuts if experts else layout.tensor_parallel_size
    first = 1 if experts == "all" else 0
    if experts == "all" and (not shape or shape[0] % layout.expert_parallel_size):
        return (
            f"the rule {rule} spreads dim 0 over expert_parallel_size={layout.expert_parallel_size}, "
            f"but the shape is {shape}"
        )
    cut = _cut_by_rule(shape, plain, first, ways, layout, config)
    return cut if isinstance(cut, str) else TensorCut(cut.dim, cut.blocks, experts)


def _cut_by_rule(
    shape: tuple[int, ...], rule: Rule, first: int, ways: int, layout: Layout, config: ModelConfig | None
) -> TensorCut | str:
    """Return the cut by a rule. The linear weight's own dimensions begin at `first`."""
    if rule is Rule.REPLICATE or (ways == 1 and rule is not Rule.VOCABULARY):
        return WHOLE
    dim = first + (_IN if rule is Rule.ROW else _OUT)
    if dim >= len(shape):
        return f"the rule {rule} cuts dim {dim}, but the shape is {shape}"
    size = shape[dim]
    if rule is Rule.VOCABULARY:
        return _vocabulary_cut(size, ways, layout.vocabulary_multiple)
    if rule in (Rule.COLUMN, Rule.ROW):
        sizes = [size]
    elif rule in (Rule.GATE_UP, Rule.EQUAL_HEADS):
        count = 2 if rule is Rule.GATE_UP else 3
        if size % count:
            return f"dim {dim} of size {size} is not {count} matrices side by side"
        sizes = [size // count] * count
        if rule is Rule.EQUAL_HEADS and config is not None and config.vision_heads and config.vision_heads % ways:
            return f"{config.vision_heads} heads (vision_config) cannot be shared by tensor_parallel_size={ways}"
    else:
        return _cut_by_heads(size, rule, ways, config)
    if any(one % ways for one in sizes):
        return f"dim {dim} of size {size} is not divisible by {_ways_text(ways, first, layout)}"
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return TensorCut(dim, tuple(Block(start, one, ways, one // ways) for start, one in zip(starts, sizes, strict=True)))


def _ways_text(ways: int, first: int, layout: Layout) -> str:
    if ways == layout.tensor_parallel_size and not first:
        return f"tensor_parallel_size={ways}"
    return f"{ways}, the ways in which an expert is cut (expert_tensor_parallel_size)"


def _vocabulary_cut(rows: int, ways: int, multiple: int) -> TensorCut:
    """Return equal parts of the vocabulary padded to a multiple of both, like vLLM's vocab_parallel_embedding."""
    multiple = math.lcm(multiple, ways)
    padded = -(-rows // multiple) * multiple
    return TensorCut(0, (Block(0, rows, ways, padded // ways),)) if ways > 1 or padded > rows else WHOLE


def _cut_by_heads(rows: int, rule: Rule, ways: int, config: ModelConfig | None) -> TensorCut | str:
    heads, kv_heads = (config.num_attention_heads, config.kv_heads) if config is not None else (None, None)
    needed = {Rule.HEADS: [heads], Rule.KV_HEADS: [kv_heads], Rule.QKV: [heads, kv_heads, kv_heads]}[rule]
    counts = [count for count in needed if count is not None]
    if config is None or len(counts) < len(needed):
        return f"the rule {rule} needs {_FIELDS[rule]} from config.json"
    total = sum(counts)
    per_head = config.head_rows
    if rows != total * per_head if per_head else rows % total:
        return (
            f"dim 0 has {rows} rows, but config.json says {total} heads of {per_head or 'equal'} rows ({_FIELDS[rule]})"
        )
    per_head = rows // total
    blocks = []
    start = 0
    for number, count in enumerate(counts):
        shared = rule is Rule.KV_HEADS or number > 0
        parts = count if shared and count < ways and ways % count == 0 else ways
        if count % parts:
            return f"{count} heads ({_FIELDS[rule]}) cannot be shared evenly by tensor_parallel_size={ways}"
        blocks.append(Block(start, count * per_head, parts, count // parts * per_head))
        start += count * per_head
    return TensorCut(0, tuple(blocks))


_FIELDS = {
    Rule.HEADS: "num_attention_heads",
    Rule.KV_HEADS: "num_key_value_heads",
    Rule.QKV: "num_attention_heads and num_key_value_heads",
}


def byte_problem(tensor: Tensor, cut: TensorCut, layout: Layout) -> str | None:
    """Return why the cut does not fall on whole bytes, or None. Only packed types (F4, F6) can fail."""
    bits = element_bits(tensor.shape, tensor.size_bytes)
    if bits is None:
        return f"{tensor.size_bytes} bytes do not fit the shape {tensor.shape} and {tensor.dtype}"
    if bits % 8 == 0:
        return None
    for coords in {layout.place(layout.rank_coords(rank)) for rank in range(layout.ranks)}:
        region = region_of(tensor.shape, cut, coords, layout)
        for (offsets, sizes), place in region.boxes():
            try:
                find_runs(tensor.shape, offsets, sizes, bits, region.sizes, place)
            except CutsInsideByte:
                return f"{tensor.dtype} of shape {tensor.shape} would be cut inside a byte at {offsets}, {sizes}"
    return None
