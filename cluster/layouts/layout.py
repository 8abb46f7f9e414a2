"""Decides for each tensor which ranks hold it, and how it is cut between them.

Pipeline and expert parallelism decide which ranks have a tensor at all (`Holder`). Tensor parallelism cuts it by rule.
Fully sharded parallelism cuts dim 0 of the result. Data parallelism copies. Here a (4, 6) weight under a `row` rule,
tensor_parallel_size=2, fsdp_size=2 (rank numbers, tp fastest):

    0 0 0 1 1 1
    0 0 0 1 1 1      rank 3 (fsdp 1, tp 1): offsets (2, 3), sizes (2, 3)
    2 2 2 3 3 3
    2 2 2 3 3 3

Pipeline stages keep layers whole and in order, and are balanced by bytes. The first stage has the tensors before the
layers (embedding, a vision tower), and the last stage those after them (last norm, head). A model without a head of its
own uses its embedding as head, so both the first and the last stage have it.

    embed | 0 1 2 | 3 4 5 | 6 7 | norm, head        a large head takes the place of a layer
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from cluster.errors import ConfigError, LayoutError, UnknownFamily
from cluster.layouts.families import OTHER_EMBEDDINGS, TOKEN_EMBEDDINGS, TOWERS
from cluster.layouts.mesh import Layout, RankCoords, sizes_that_do
from cluster.layouts.rules import FAMILIES, Rule, Rules, TensorCut, cut_tensor, experts_of
from cluster.precision.quantized_tensors import Part, cut_part, find_parts, find_rule, why_unnamed
from storage.checkpoints.model_index import Tensor

if TYPE_CHECKING:
    from cluster.layouts.model_config import ModelConfig


Stages = list[tuple[int, ...]]  # for each tensor, the stages that have it

_NUMBERED = re.compile(r"(?P<stack>(?:[^.]+\.)*?(?:layers|h|blocks|block|layer))\.(?P<number>[0-9]{1,7})\.")
_FIRST = frozenset((*TOKEN_EMBEDDINGS, *OTHER_EMBEDDINGS, *TOWERS))
_HEADS = ("lm_head", "output", "embed_out")
# Tensor names of the weight of a module. A quantized weight has several tensors.
_WEIGHT = ("weight", "qweight", "weight_packed")


def decide_stages(tensors: Sequence[Tensor], layout: Layout) -> Stages:
    """Return the stages of each tensor, in order. Raises LayoutError if there are fewer layers than stages."""
    count = layout.pipeline_parallel_size
    if count == 1:
        return [(0,)] * len(tensors)
    stack = _find_stack(tensors)
    layer_of = [_layer(tensor.name, stack) for tensor in tensors]
    layers = sorted({layer for layer in layer_of if layer is not None})
    if len(layers) < count:
        raise LayoutError(
            f"{len(layers)} layers cannot be shared by pipeline_parallel_size={count}",
            hint=(f"pipeline_parallel_size can be 1 to {len(layers)}: " if len(layers) > 1 else "")
            + "a stage has at least one layer; layers are found by names such as model.layers.7.",
            stack=stack or None,
        )
    where = [_end(tensor.name) if layer is None else None for tensor, layer in zip(tensors, layer_of, strict=True)]
    tied = not any(
        layer is None and _is_of(tensor.name, _HEADS, _WEIGHT) for tensor, layer in zip(tensors, layer_of, strict=True)
    )
    sizes = Counter[int]()
    ends = [0, 0]
    for tensor, layer, end in zip(tensors, layer_of, where, strict=True):
        if layer is not None:
            sizes[layer] += tensor.size_bytes
        elif end is not None:
            ends[end] += tensor.size_bytes
            ends[1] += tensor.size_bytes if tied and _is_of(tensor.name, TOKEN_EMBEDDINGS) else 0
    cuts = balance([sizes[layer] for layer in layers], count, ends[0], ends[1])
    stage_of = {layer: bisect_right(cuts, position) for position, layer in enumerate(layers)}
    last = count - 1
    found: Stages = []
    for tensor, layer, end in zip(tensors, layer_of, where, strict=True):
        if layer is not None:
            found.append((stage_of[layer],))
        elif tied and _is_of(tensor.name, TOKEN_EMBEDDINGS):
            found.append((0, last))
        else:
            found.append((last if end else 0,))
    return found


def balance(sizes_bytes: Sequence[int], parts: int, first_bytes: int = 0, last_bytes: int = 0) -> list[int]:
    """Return where parts 1 .. begin, so that the largest of the contiguous parts is as small as possible, none empty.

    `first_bytes` and `last_bytes` are added to the first and the last part. Among the best cuts, the one with the
    largest parts at the front is returned, so the same input gives the same parts.
    """
    low, high = 0, sum(sizes_bytes) + first_bytes + last_bytes
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fill(sizes_bytes, parts, first_bytes, last_bytes, middle) else (middle + 1, high)
    cuts = _fill(sizes_bytes, parts, first_bytes, last_bytes, low)
    return cuts or []


def _fill(sizes: Sequence[int], parts: int, first: int, last: int, most: int) -> list[int] | None:
    """Return where parts 1 .. begin if each in turn is filled up to `most`, or None if that is impossible."""
    cuts: list[int] = []
    at = 0
    for part in range(parts - 1):
        room = most - (first if part == 0 else 0)
        later = parts - 1 - part  # each needs one at least
        end = at
        while end < len(sizes) - later and sizes[end] <= room:
            room -= sizes[end]
            end += 1
        if end == at:
            return None
        cuts.append(end)
        at = end
    return cuts if sum(sizes[at:]) + last <= most else None


def _find_stack(tensors: Sequence[Tensor]) -> str:
    """Return the name before the layer numbers, of the stack with the most bytes that is no tower, or ""."""
    sizes = Counter[str]()
    for tensor in tensors:
        match = _NUMBERED.match(tensor.name)
        if match and not any(part in TOWERS for part in match["stack"].split(".")):
            sizes[match["stack"]] += max(1, tensor.size_bytes)
    return max(sizes, key=lambda stack: sizes[stack], default="")


def _layer(name: str, stack: str) -> int | None:
    match = _NUMBERED.match(name) if stack and name.startswith(f"{stack}.") else None
    return int(match["number"]) if match else None


def _end(name: str) -> int:
    """Return 0 for a tensor before the layers, 1 for one after them."""
    return 1 if _FIRST.isdisjoint(name.split(".")) else 0


def _is_of(name: str, modules: Sequence[str], tensors: Sequence[str] = ()) -> bool:
    """Return whether the tensor belongs to a module of those names, and is one of `tensors` if given."""
    module, _, tensor = name.rpartition(".")
    return module.rpartition(".")[2] in modules and (not tensors or tensor in tensors)


_MAX_TRIES = 20_000  # cuts with other sizes that are tried for a hint
_LISTED_CHARS = 8000  # characters of names in one message, as stored names may be long and many
_NUMBER = re.compile(r"(?<=[.'])[0-9]+(?=[.'])")  # a whole part of a name
_OF_EXPERTS = ("experts", "expert")
_EXPERT = re.compile(r"experts?_([0-9]{1,7})")


@dataclass(frozen=True, slots=True)
class Holder:
    """The ranks that have a tensor, or a slice of it."""

    stages: tuple[int, ...]  # pipeline stages
    expert: int | None = None  # the only expert-parallel rank; None: all

    def has(self, coords: RankCoords) -> bool:
        """Return whether the rank at `coords` has the tensor."""
        return coords.stage in self.stages and self.expert in (None, coords.expert)


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """The cut of a tensor, and its holder."""

    cut: TensorCut
    holder: Holder


def decide_layout(
    tensors: Sequence[Tensor], layout: Layout, rules: Rules, config: ModelConfig | None = None
) -> list[PlacedTensor]:
    """Return the cut and holder of each tensor, in order. Raises one LayoutError for all that cannot be cut."""
    found, parts = _find_rules(tensors, layout, rules, config)
    unnamed = [tensor.name for tensor, rule in zip(tensors, found, strict=True) if rule is None]
    problems: list[str] = []
    cuts: list[TensorCut] = []
    known: dict[tuple[object, ...], TensorCut | str] = {}  # equal tensors get equal cuts
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
    places: dict[tuple[int, tuple[int, ...], int | None], PlacedTensor] = {}  # equal tensors share one object
    placed: list[PlacedTensor] = []
    for one, stage, expert in zip(cuts, stages, experts, strict=True):
        key = id(one), stage, expert
        place = places.get(key)
        if place is None:
            holder = holders.setdefault((stage, expert), Holder(stage, expert))
            place = places[key] = PlacedTensor(one, holder)
        placed.append(place)
    return placed


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
    """Return, as hints, the other sizes of tensor or expert parallelism with which all tensors can be cut.

    `kinds` has one tensor of each kind, refused ones first. `numbers` has the expert numbers of tensors if the experts
    cannot be spread over `expert_parallel_size`, else it is empty.
    """
    experts = max((number for number in numbers if number is not None), default=-1) + 1
    left = _MAX_TRIES

    def does(name: str, size: int) -> bool:
        nonlocal left
        try:
            other = replace(layout, **{name: size})
        except ConfigError:  # the experts do not fit this size
            return False
        if numbers and other.expert_parallel_size > 1 and (not experts or experts % other.expert_parallel_size):
            return False
        for kind in kinds:
            left -= 1
            if left < 0 or isinstance(_cut(*kind, other, config), str):
                return False
        return True

    names = [name for name in ("tensor_parallel_size", "expert_parallel_size") if getattr(layout, name) > 1]
    return [text for name in names if (text := sizes_that_do(name, getattr(layout, name), partial(does, name)))]


def _expert_numbers(tensors: Sequence[Tensor], rules: Sequence[Rule | None]) -> tuple[list[int | None], list[str]]:
    """Return the expert number of each tensor, and the names of expert tensors without a number."""
    own = [rule is not None and experts_of(rule) == "one" for rule in rules]
    numbers = [expert_number(tensor.name) if one else None for tensor, one in zip(tensors, own, strict=True)]
    lost = [f"{t.name!r:.200}" for t, one, number in zip(tensors, own, numbers, strict=True) if one and number is None]
    return numbers, lost


def _expert_places(tensors: Sequence[Tensor], rules: Sequence[Rule | None], layout: Layout) -> list[int | None] | str:
    """Return, for each tensor of one expert, the expert-parallel rank that has it, or a text why there is none.

    Neighbouring experts are together.
    """
    if layout.expert_parallel_size == 1:
        return [None] * len(tensors)
    numbers, lost = _expert_numbers(tensors, rules)
    if lost:
        return f"{_count(lost)} of one expert by rule, but without an expert number in the name: {_patterns(lost)}"
    experts = max((number for number in numbers if number is not None), default=-1) + 1
    if experts % layout.expert_parallel_size:
        return f"{experts} experts cannot be spread over expert_parallel_size={layout.expert_parallel_size}"
    if not experts and None not in rules and not any(rule and experts_of(rule) == "all" for rule in rules):
        return f"no tensor belongs to an expert, so expert_parallel_size must be 1, not {layout.expert_parallel_size}"
    share = experts // layout.expert_parallel_size
    return [None if number is None else number // share for number in numbers]


def expert_number(name: str) -> int | None:
    """Return the expert number in a name: 41 in `model.layers.7.mlp.experts.41.up_proj.weight`; None without one.

    It is the number after a part that names experts. Without such a part, it is the last number after the layer's.
    """
    numbers: list[int] = []
    counted = False  # the part before names experts
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
    """Return the error. `spread` is the problem of the experts as a whole; `sizes` are hints."""
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
        fields = {"family": config.model_type, "text_family": config.text_model_type}
        error.with_details(**{key: name for key, name in fields.items() if name and name.isprintable()})
    return error


def _count(names: list[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _patterns(texts: list[str]) -> str:
    """Return all texts. Those that differ only in numbers become one pattern with their count."""
    counts = Counter(_NUMBER.sub("*", text) for text in texts)
    first = {_NUMBER.sub("*", text): text for text in reversed(texts)}
    named = [first[pattern] if count == 1 else f"{pattern} ({count})" for pattern, count in counts.items()]
    ends = list(accumulate(len(name) + 2 for name in named))
    listed = sum(end <= _LISTED_CHARS for end in ends)
    return ", ".join(named[:listed]) + (f" and {len(named) - listed} more" if listed < len(named) else "")
