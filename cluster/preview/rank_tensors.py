"""Which part of which tensor one rank would have. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.layouts.region import Range
from cluster.layouts.rules import Rules
from cluster.plans.load_plan import LoadPlan


@dataclass(frozen=True, slots=True)
class TensorPart:
    """What the rank holds of one tensor."""

    name: str
    rule: str  # what cuts it, of the layout's rules; "" where none is needed
    shape: tuple[int, ...]  # of all of it
    ranges: tuple[tuple[Range, ...], ...]  # of each dimension: one range, or several that follow each other
    padding: int  # rows of zeros after them
    dtype: str  # safetensors name, as it is held
    size_bytes: int


def tensors_of(plan: LoadPlan, rank: int, rules: Rules) -> tuple[TensorPart, ...]:
    """In the order of the rank's memory. Raises ConfigError for a rank that the layout has not got."""
    plan.cut.layout.rank_coords(rank)
    rule_for = rules.finder() if plan.cut.layout.cuts_tensors else lambda name: None
    return tuple(
        TensorPart(
            piece.name,
            str(rule_for(piece.made_from or piece.name) or ""),
            piece.shape,
            piece.region.ranges,
            piece.region.padding,
            piece.dtype,
            piece.size_bytes,
        )
        for piece in plan.ranks[rank].slices
    )


def show_ranges(part: TensorPart) -> str:
    """`0:4 8:12, all`: of each dimension."""
    said = []
    for size, ranges in zip(part.shape, part.ranges, strict=True):
        whole = ranges == ((0, size),) or not (ranges or size)
        said.append("all" if whole else " ".join(f"{start}:{end}" for start, end in ranges) or "none")
    return ", ".join(said) + (f", and {part.padding} of zeros" if part.padding else "")
