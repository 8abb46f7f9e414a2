"""Which box of which tensor each rank holds.

Tensor parallelism cuts first, by rule; fully sharded parallelism then cuts dim 0 of what is left; data
parallelism copies. A (4, 6) weight under a `row` rule, tensor_parallel_size=2, fsdp_size=2 (rank numbers, tp
fastest):

    0 0 0 1 1 1
    0 0 0 1 1 1      rank 3 (fsdp 1, tp 1): offsets (2, 3), sizes (2, 3)
    2 2 2 3 3 3
    2 2 2 3 3 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.box import CutsInsideByte, element_bits, find_runs
from cluster.errors import ConfigError, LayoutError
from cluster.layout_rules import FAMILIES, Rule, Rules
from storage.model_index import Tensor

if TYPE_CHECKING:
    from cluster.model_config import ModelConfig  # brings pydantic

MAX_RANKS = 1 << 16
_LISTED = 20  # tensors that one message names


@dataclass(frozen=True, slots=True)
class RankCoords:
    """Where a rank stands in the mesh. Ranks count with tp fastest: ((data * fsdp_size) + fsdp) * tp_size + tp."""

    data: int
    fsdp: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ways a model is cut and copied. Raises ConfigError for sizes that cannot be meant."""

    tensor_parallel_size: int = 1
    fsdp_size: int = 1
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "fsdp_size", "data_parallel_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANKS:
                raise ConfigError(f"{name} must be a whole number from 1 to {MAX_RANKS}, not {value!r:.40}")
        if self.ranks > MAX_RANKS:
            raise ConfigError(f"a layout of {self.ranks} ranks is larger than {MAX_RANKS}")

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size * self.fsdp_size * self.data_parallel_size

    def rank_coords(self, rank: int) -> RankCoords:
        """Where rank 0 .. ranks - 1 stands in the mesh; tp varies fastest."""
        if not 0 <= rank < self.ranks:
            raise ConfigError(f"no rank {rank} in a layout of {self.ranks} ranks")
        rest, tensor = divmod(rank, self.tensor_parallel_size)
        data, fsdp = divmod(rest, self.fsdp_size)
        return RankCoords(data=data, fsdp=fsdp, tensor=tensor)


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How tensor parallelism cuts one tensor: `dim` into `parts` parts of `part_size`; None: not at all.

    With fewer parts than ranks, neighbouring ranks share one: rank r has part r * parts //
    tensor_parallel_size.
    """

    dim: int | None = None
    parts: int = 1
    part_size: int = 0


Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes)

WHOLE = TensorCut()
_RULE_DIM = {Rule.COLUMN: 0, Rule.VOCABULARY: 0, Rule.HEADS: 0, Rule.KV_HEADS: 0, Rule.ROW: 1}


def decide_cuts(
    tensors: Sequence[Tensor], layout: Layout, rules: Rules, config: ModelConfig | None = None
) -> list[TensorCut]:
    """The tensor-parallel cut of each tensor, in order. Raises one LayoutError for all it cannot cut."""
    cuts: list[TensorCut] = []
    unnamed: list[str] = []
    problems: list[str] = []
    rule_for = rules.finder()
    known: dict[tuple[object, ...], TensorCut | str] = {}  # tensors alike are cut alike
    for tensor in tensors:
        rule = rule_for(tensor.name) if layout.tensor_parallel_size > 1 else Rule.REPLICATE
        if rule is None:
            unnamed.append(tensor.name)
            continue
        alike = (rule, tensor.dtype, tensor.shape, tensor.size_bytes)
        cut = known.get(alike)
        if cut is None:
            cut = known[alike] = _cut_or_problem(tensor, rule, layout, config)
        if isinstance(cut, str):
            problems.append(f"{tensor.name!r:.200}: {cut}")
        else:
            cuts.append(cut)
    if unnamed or problems:
        raise _layout_error(unnamed, problems, layout, config)
    return cuts


def cut_box(shape: tuple[int, ...], cut: TensorCut, coords: RankCoords, layout: Layout) -> Box:
    """(offsets, sizes) of one rank's box: the tensor-parallel part, then a share of dim 0 of that.

    Shares follow torch.chunk: all of ceil(n / fsdp_size) rows but the last ones, which have fewer, down to
    none.
    """
    offsets = [0] * len(shape)
    sizes = list(shape)
    if cut.dim is not None:
        part = coords.tensor * cut.parts // layout.tensor_parallel_size
        offsets[cut.dim] = part * cut.part_size
        sizes[cut.dim] = cut.part_size
    if shape and layout.fsdp_size > 1:
        rows = sizes[0]
        share = -(-rows // layout.fsdp_size)
        first = min(coords.fsdp * share, rows)
        offsets[0] += first
        sizes[0] = min(first + share, rows) - first
    return tuple(offsets), tuple(sizes)


def slice_box(
    tensor: Tensor, coords: RankCoords, layout: Layout, rules: Rules, config: ModelConfig | None = None
) -> Box:
    """(offsets, sizes) of the box of one tensor that the rank at `coords` holds. Raises LayoutError."""
    (cut,) = decide_cuts([tensor], layout, rules, config)
    return cut_box(tensor.shape, cut, coords, layout)


def _cut_or_problem(tensor: Tensor, rule: Rule, layout: Layout, config: ModelConfig | None) -> TensorCut | str:
    cut = _cut_by_rule(tensor, rule, layout.tensor_parallel_size, config)
    return cut if isinstance(cut, str) else _check_bytes(tensor, cut, layout) or cut


def _cut_by_rule(tensor: Tensor, rule: Rule, tp_size: int, config: ModelConfig | None) -> TensorCut | str:
    """The cut, or why there is none."""
    if rule is Rule.REPLICATE:
        return WHOLE
    dim = _RULE_DIM[rule]
    if dim >= len(tensor.shape):
        return f"the rule {rule} cuts dim {dim}, but the shape is {tensor.shape}"
    size = tensor.shape[dim]
    if rule in (Rule.HEADS, Rule.KV_HEADS):
        return _cut_by_heads(size, rule, tp_size, config)
    if size % tp_size:
        return f"dim {dim} of size {size} is not divisible by tensor_parallel_size={tp_size}"
    return TensorCut(dim, tp_size, size // tp_size)


def _cut_by_heads(rows: int, rule: Rule, tp_size: int, config: ModelConfig | None) -> TensorCut | str:
    field = "num_attention_heads" if rule is Rule.HEADS else "num_key_value_heads"
    heads = None
    if config is not None:
        heads = config.num_attention_heads if rule is Rule.HEADS else config.kv_heads
    if config is None or heads is None:
        return f"the rule {rule} needs {field} from config.json"
    if rows != heads * config.head_rows if config.head_rows else rows % heads:
        per_head = config.head_rows or "equal"
        return f"dim 0 has {rows} rows, but config.json says {heads} heads of {per_head} rows ({field})"
    if heads % tp_size == 0:
        return TensorCut(0, tp_size, rows // tp_size)
    if rule is Rule.KV_HEADS and tp_size % heads == 0:
        return TensorCut(0, heads, rows // heads)
    return f"{heads} heads ({field}) cannot be shared evenly by tensor_parallel_size={tp_size}"


def _check_bytes(tensor: Tensor, cut: TensorCut, layout: Layout) -> str | None:
    """Why the cut does not fall on whole bytes, if so: only possible for packed types (F4, F6)."""
    bits = element_bits(tensor.shape, tensor.size_bytes)
    if bits is None:
        return f"{tensor.size_bytes} bytes do not fit the shape {tensor.shape} and {tensor.dtype}"
    if bits % 8 == 0:
        return None
    for fsdp in range(layout.fsdp_size):
        for tp in range(layout.tensor_parallel_size):
            offsets, sizes = cut_box(tensor.shape, cut, RankCoords(0, fsdp, tp), layout)
            try:
                find_runs(tensor.shape, offsets, sizes, bits)
            except CutsInsideByte:
                return f"{tensor.dtype} of shape {tensor.shape} would be cut inside a byte at {offsets}, {sizes}"
    return None


def _layout_error(unnamed: list[str], problems: list[str], layout: Layout, config: ModelConfig | None) -> LayoutError:
    tp_size = layout.tensor_parallel_size
    parts = []
    hints = []
    if unnamed:
        names = [f"{name!r:.200}" for name in unnamed]
        parts.append(f"{len(unnamed)} tensors are named by no rule for tensor_parallel_size={tp_size}: {_some(names)}")
        family = config.model_type if config else None
        known = ", ".join(FAMILIES)
        if family not in FAMILIES:
            hints.append(f"Built-in rules exist for {known}; config.json says {family or 'nothing'}")
        hints.append('Name them with layout_rules={"a.pattern.*.of.names": "replicate"} or ' + ", ".join(Rule))
    if problems:
        parts.append(f"{len(problems)} tensors cannot be cut: {_some(problems)}")
        hints.append("fsdp_size takes any number and any whole-byte dtype")
    return LayoutError(
        "; ".join(parts),
        hint=". ".join(hints),
        unnamed=len(unnamed) or None,
        uncuttable=len(problems) or None,
    )


def _some(texts: list[str]) -> str:
    more = len(texts) - _LISTED
    return ", ".join(texts[:_LISTED]) + (f" and {more} more" if more > 0 else "")
