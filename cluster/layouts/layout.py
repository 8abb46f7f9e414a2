"""Which part of which tensor each rank holds: pipeline and expert parallelism say who has a tensor at all
(`Holder`), tensor parallelism cuts it by rule, fully sharded parallelism cuts dim 0 of what is left, data parallelism
copies. A (4, 6) weight under a `row` rule, tensor_parallel_size=2, fsdp_size=2 (rank numbers, tp fastest):

    0 0 0 1 1 1
    0 0 0 1 1 1      rank 3 (fsdp 1, tp 1): offsets (2, 3), sizes (2, 3)
    2 2 2 3 3 3
    2 2 2 3 3 3
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from cluster.errors import ConfigError, LayoutError, UnknownFamily
from cluster.layouts.mesh import Layout, RankCoords, sizes_that_do
from cluster.layouts.rules import FAMILIES, Rule, Rules
from cluster.layouts.stages import decide_stages
from cluster.layouts.tensor_cut import TensorCut, cut_tensor, experts_of
from cluster.precision.quantized_rules import Part, cut_part, find_parts, find_rule, why_unnamed
from storage.checkpoints.model_index import Tensor

if TYPE_CHECKING:
    from cluster.layouts.model_config import ModelConfig  # brings pydantic

_MAX_TRIES = 20_000  # cuts of other sizes than were asked for
_LISTED_CHARS = 8000  # of names in one message: what is stored may be called anything, and be anything much
_NUMBER = re.compile(r"(?<=[.'])[0-9]+(?=[.'])")  # a whole part of a name
_OF_EXPERTS = ("experts", "expert")
_EXPERT = re.compile(r"experts?_([0-9]{1,7})")


@dataclass(frozen=True, slots=True)
class Holder:
    """The ranks that have a tensor, or a part of it, at all."""

    stages: tuple[int, ...]  # of the pipeline
    expert: int | None = None  # the only place among the experts; None: all

    def has(self, coords: RankCoords) -> bool:
        """Whether the rank there does."""
        return coords.stage in self.stages and self.expert in (None, coords.expert)


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """How a tensor is cut, and who has it."""

    cut: TensorCut
    holder: Holder


def decide_layout(
    tensors: Sequence[Tensor], layout: Layout, rules: Rules, config: ModelConfig | None = None
) -> list[PlacedTensor]:
    """Of each tensor, in order. Raises one LayoutError for all that cannot be placed."""
    found, parts = _find_rules(tensors, layout, rules, config)
    unnamed = [tensor.name for tensor, rule in zip(tensors, found, strict=True) if rule is None]
    problems: list[str] = []
    cuts: list[TensorCut] = []
    known: dict[tuple[object, ...], TensorCut | str] = {}  # tensors alike are cut alike
    kinds: dict[bool, list[tuple[Tensor, Rule, Part | None]]] = {True: [], False: []}  # by whether they are refused
    for tensor, rule, part in zip(tensors, found, parts, strict=True):
        if rule is None:
            continue
        alike = (rule, part and part.storage, tensor.dtype, tensor.shape, tensor.size_bytes)
        cut = known.get(alike)
        if cut is None:
            cut = known[alike] = _cut(tensor, rule, part, layout, config)
            kinds[isinstance(cut, str)].append((tensor, rule, part))
        if isinstance(cut, str):
            problems.append(f"{tensor.name!r:.200}: {cut}")
        else:
            cuts.append(cut)
    experts = _expert_places(tensors, found, layout)
    if unnamed or problems or isinstance(experts, str):
        spread = experts if isinstance(experts, str) else ""
        numbers = _expert_numbers(tensors, found)[0] if spread else []
        sizes = _sizes_that_do([*kinds[True], *kinds[False]], numbers, layout, config) if problems or spread else []
        raise _layout_error(unnamed, problems, spread, layout, config, sizes)
    stages = decide_stages(tensors, layout)
    holders: dict[tuple[tuple[int, ...], int | None], Holder] = {}
    return [
        PlacedTensor(cut, holders.setdefault((stage, expert), Holder(stage, expert)))
        for cut, stage, expert in zip(cuts, stages, experts, strict=True)
    ]


def _find_rules(
    tensors: Sequence[Tensor], layout: Layout, rules: Rules, config: ModelConfig | None
) -> tuple[list[Rule | None], list[Part | None]]:
    if not layout.cuts_tensors:
        return [Rule.REPLICATE] * len(tensors), [None] * len(tensors)
    rule_for = rules.finder()
    parts = find_parts(tensors, config.quantization if config is not None else None)
    found = [find_rule(tensor.name, parts.get(number), rule_for) for number, tensor in enumerate(tensors)]
    return [rule for rule, _ in found], [part for _, part in found]


def _cut(tensor: Tensor, rule: Rule, part: Part | None, layout: Layout, config: ModelConfig | None) -> TensorCut | str:
    if part is not None:
        return cut_part(tensor, part.storage, rule, layout, config)
    return cut_tensor(tensor, rule, layout, config)


def _sizes_that_do(
    kinds: Sequence[tuple[Tensor, Rule, Part | None]],
    numbers: Sequence[int | None],
    layout: Layout,
    config: ModelConfig | None,
) -> list[str]:
    """Return which other sizes of tensor or expert parallelism all tensors can be cut with, as hints.

    `kinds`: one tensor of each kind, those that were refused first. `numbers`: of tensors' experts, when they cannot be
    spread as they are.
    """
    experts = max((number for number in numbers if number is not None), default=-1) + 1
    left = _MAX_TRIES

    def does(name: str, size: int) -> bool:
        nonlocal left
        try:
            other = replace(layout, **{name: size})
        except ConfigError:  # the experts do not fit it
            return False
        if numbers and other.expert_parallel_size > 1 and (not experts or experts % other.expert_parallel_size):
            return False
        for kind in kinds:
            left -= 1
            if left < 0 or isinstance(_cut(*kind, other, config), str):
                return False
        return True

    names = [name for name in ("tensor_parallel_size", "expert_parallel_size") if getattr(layout, name) > 1]
    return [said for name in names if (said := sizes_that_do(name, getattr(layout, name), partial(does, name)))]


def _expert_numbers(tensors: Sequence[Tensor], rules: Sequence[Rule | None]) -> tuple[list[int | None], list[str]]:
    """(the number of each tensor's expert, names of one expert's tensors whose names do not say which)."""
    own = [rule is not None and experts_of(rule) == "one" for rule in rules]
    numbers = [expert_number(tensor.name) if one else None for tensor, one in zip(tensors, own, strict=True)]
    lost = [f"{t.name!r:.200}" for t, one, number in zip(tensors, own, numbers, strict=True) if one and number is None]
    return numbers, lost


def _expert_places(tensors: Sequence[Tensor], rules: Sequence[Rule | None], layout: Layout) -> list[int | None] | str:
    """For each tensor of one expert, the place among the experts that has it: neighbouring experts are together.

    Or why there are no such places.
    """
    if layout.expert_parallel_size == 1:
        return [None] * len(tensors)
    numbers, lost = _expert_numbers(tensors, rules)
    if lost:
        return f"{_count(lost)} one expert's by rule, but no name says which expert's: {_patterns(lost)}"
    experts = max((number for number in numbers if number is not None), default=-1) + 1
    if experts % layout.expert_parallel_size:
        return f"{experts} experts cannot be spread over expert_parallel_size={layout.expert_parallel_size}"
    if not experts and None not in rules and not any(rule and experts_of(rule) == "all" for rule in rules):
        return f"no tensor is an expert's, so expert_parallel_size={layout.expert_parallel_size} cannot be meant"
    share = experts // layout.expert_parallel_size
    return [None if number is None else number // share for number in numbers]


def expert_number(name: str) -> int | None:
    """Which expert's tensor it is: 41 of `model.layers.7.mlp.experts.41.up_proj.weight`; None: the name does not say.

    The number after a part that speaks of experts, or else the last one that is not the layer's: the first.
    """
    numbers: list[int] = []
    counted = False  # the part before is what experts are numbered in
    for part in name.split("."):
        if part.isdecimal() and part.isascii() and len(part) < 8:
            if counted:
                return int(part)
            numbers.append(int(part))
        elif match := _EXPERT.fullmatch(part):
            return int(match[1])
        counted = part in _OF_EXPERTS
    return numbers[-1] if len(numbers) > 1 else None


def _layout_error(
    unnamed: list[str], problems: list[str], spread: str, layout: Layout, config: ModelConfig | None, sizes: list[str]
) -> LayoutError:
    """`spread`: what is wrong with the experts as a whole; `sizes`: hints at what would do."""
    parts = []
    hints = [*sizes]
    kind = LayoutError
    why = why_unnamed(unnamed, config.quantization if config else None)
    if unnamed:
        size = (
            f"tensor_parallel_size={layout.tensor_parallel_size}"
            if layout.tensor_parallel_size > 1
            else f"expert_parallel_size={layout.expert_parallel_size}"
        )
        names = [f"{name!r:.200}" for name in unnamed]
        parts.append(f"{_count(unnamed)} named by no rule for {size}: {_patterns(names)}")
        parts += [why] if why else []
        family = config.model_type if config else None
        known = ", ".join(FAMILIES)
        if family not in FAMILIES:
            hints.append(f"Built-in rules exist for {known}; config.json says {family or 'nothing'}")
            kind = UnknownFamily
        hints.append('Name them with layout_rules={"a.pattern.*.of.names": "replicate"} or ' + ", ".join(Rule))
    if problems:
        tensors = "1 tensor" if len(problems) == 1 else f"{len(problems)} tensors"
        parts.append(f"{tensors} cannot be cut: {_patterns(problems)}")
    if spread:
        parts.append(spread)
        hints.append(
            "expert_parallel_size must divide the number of experts; 1 leaves them on every rank. The rules expert... "
            "are for tensors of one expert, such as model.layers.7.mlp.experts.41.up_proj.weight"
        )
    if problems or why:
        hints.append("fsdp_size and pipeline_parallel_size need no rules and take any whole-byte dtype")
    error = kind(
        "; ".join(parts),
        hint=". ".join(hints),
        unnamed=len(unnamed) or None,
        uncuttable=len(problems) or None,
    )
    if kind is UnknownFamily and config is not None:
        said = {"family": config.model_type, "text_family": config.text_model_type}
        error.with_details(**{key: name for key, name in said.items() if name and name.isprintable()})
    return error


def _count(names: list[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _patterns(texts: list[str]) -> str:
    """All of them, those that differ in the numbers of layers and experts only as one pattern with their count."""
    counts = Counter(_NUMBER.sub("*", text) for text in texts)
    first = {_NUMBER.sub("*", text): text for text in reversed(texts)}
    named = [first[pattern] if count == 1 else f"{pattern} ({count})" for pattern, count in counts.items()]
    ends = list(accumulate(len(name) + 2 for name in named))
    listed = sum(end <= _LISTED_CHARS for end in ends)
    return ", ".join(named[:listed]) + (f" and {len(named) - listed} more" if listed < len(named) else "")
