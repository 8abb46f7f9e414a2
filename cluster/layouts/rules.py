"""Layout rules as data: patterns of tensor names, each with the way that tensor parallelism cuts such a tensor.

A pattern is a dotted tensor name. In it, `*` stands for any characters of one part. `**`, as a whole part, stands for
any number of parts: `model.layers.*.mlp.up_proj.weight`, `**.norm.weight`. The first pattern that matches decides.

The tables of the model families are in `cluster.layouts.families`. A user may pass rules, or name a file with a JSON
object of patterns, each with the name of a rule. The order of the file is the order of precedence.

    {"model.layers.*.mixer.in_proj.weight": "column", "**.norm.weight": "replicate"}

`TensorCut` is what a rule means for one tensor: the dimension that is cut, its parts, and the region of each rank.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import ConfigError
from cluster.layouts.families import TABLES, Rows, nested_rows
from cluster.layouts.families import Rule as Rule
from storage.problems import json_values

if TYPE_CHECKING:
    from cluster.layouts.model_config import ModelConfig
    from storage.checkpoints.model_index import Tensor
import math
from typing import TYPE_CHECKING

from cluster.layouts.mesh import Layout, RankCoords
from cluster.layouts.region import CutsInsideByte, Region, element_bits, find_runs

if TYPE_CHECKING:
    from cluster.layouts.model_config import ModelConfig  # imports pydantic
    from storage.checkpoints.model_index import Tensor


MAX_RULES = 1000  # rules of one request
MAX_PATTERN_CHARS = 256


@dataclass(frozen=True, slots=True)
class Rules:
    """Patterns in order of precedence, each with its rule. Empty rules name no tensor."""

    entries: Rows = ()

    def rule_for(self, name: str) -> Rule | None:
        """Return the rule of the first pattern that matches the whole name, or None."""
        return self.finder()(name)

    def finder(self) -> Callable[[str], Rule | None]:
        """Return a faster `rule_for` for many names.

        Patterns are compiled once. Names that differ only in their numbers are looked up once.
        """
        if not self.entries:
            return lambda name: None
        pattern = _compile_all(self.entries)
        # If no pattern contains a number, a match does not depend on numbers. So layer 7, expert 41 is looked up as
        # layer 0, expert 0. Large models have 100,000 names, but only a dozen that differ in more than numbers.
        numbers_alike = not any(_ASKS_FOR_NUMBER.search(pattern) for pattern, _ in self.entries)
        found: dict[str, Rule | None] = {}

        def find(name: str) -> Rule | None:
            name = _NUMBER.sub("0", name) if numbers_alike else name
            if name not in found:
                match = pattern.fullmatch(name)
                found[name] = self.entries[match.lastindex - 1][1] if match and match.lastindex else None
            return found[name]

        return find

    def then(self, other: Rules) -> Rules:
        """Return these rules, and `other` for the names that these do not match."""
        return Rules(self.entries + other.entries)

    def as_dict(self) -> dict[str, str]:
        """Return plain data that `parse_rules` reads back. The first rule of a pattern counts."""
        plain: dict[str, str] = {}
        for pattern, rule in self.entries:
            plain.setdefault(pattern, str(rule))
        return plain


def parse_rules(data: object) -> Rules:
    """Return rules from a mapping of pattern to rule name. Raises ConfigError listing all problems."""
    if data is None:
        return Rules()
    if not isinstance(data, Mapping):
        raise ConfigError(f"layout_rules must map patterns to rules, not be a {type(data).__name__}", hint=_HINT)
    if len(data) > MAX_RULES:
        raise ConfigError(f"layout_rules has {len(data)} entries, more than {MAX_RULES}", hint=_HINT)
    problems = []
    entries = []
    for pattern, rule in data.items():
        if problem := pattern_problem(pattern):
            problems.append(problem)
        elif not isinstance(rule, str) or rule not in set(Rule):
            problems.append(f"{pattern!r}: no rule is called {rule!r:.40}")
        else:
            entries.append((str(pattern), Rule(rule)))
    if problems:
        raise ConfigError("bad layout_rules: " + "; ".join(problems[:20]), hint=_HINT, problems=len(problems))
    return Rules(tuple(entries))


def rules_for(config: ModelConfig | None, own: Rules | Mapping[str, str] | None = None) -> Rules:
    """Return the user's own rules, followed by those of the model's family if it has a table.

    For a multimodal family without a table, the language model's rules are used if it has one. A mapping is parsed.
    Raises ConfigError for a mapping with bad rules.
    """
    family = None
    if config is not None:
        family = FAMILIES.get(config.model_type or "") or _NESTED.get(config.text_model_type or "")
    return (own if isinstance(own, Rules) else parse_rules(own)).then(family or Rules())


def unmatched(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that match none of the names. The patterns must be valid."""
    names = list(names) if patterns else []
    alike = list(dict.fromkeys(_NUMBER.sub("0", name) for name in names))  # as in `Rules.finder`

    def matches(pattern: str) -> bool:
        compiled = re.compile(_to_regex(pattern), re.DOTALL)
        return any(map(compiled.fullmatch, names if _ASKS_FOR_NUMBER.search(pattern) else alike))

    return [pattern for pattern in patterns if not matches(pattern)]


_HINT = f"Rules: {', '.join(Rule)}; a pattern may hold one * per part of the name and one part that is **"


def pattern_problem(pattern: object) -> str | None:
    """Return why `pattern` is not a pattern of names, or None if it is one."""
    # One wildcard per part and one ** keep matching quadratic at worst, whatever names a bucket holds.
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        return f"{pattern!r:.60} is not a pattern of 1 to {MAX_PATTERN_CHARS} characters"
    parts = pattern.split(".")
    if parts.count("**") > 1 or any(part.count("*") > 1 for part in parts if part != "**"):
        return f"{pattern!r} has more wildcards than one per part and one **"
    return None


def _to_regex(pattern: str) -> str:
    parts = pattern.split(".")
    if "**" not in parts:
        return r"\.".join(_part_regex(part) for part in parts)
    at = parts.index("**")
    before, after = (r"\.".join(map(_part_regex, side)) for side in (parts[:at], parts[at + 1 :]))
    if not after:
        return (before + r"(?:\.[^.]*)*") if before else r".*"
    return (before + r"\." if before else "") + r"(?:[^.]*\.)*" + after


def _part_regex(part: str) -> str:
    return re.escape(part).replace(r"\*", "[^.]*")


_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a whole part of a name
_ASKS_FOR_NUMBER = re.compile(r"(?<![^.])[*]?[0-9]+[*]?[0-9]*(?![^.])")  # 7, 7*, *7, 7*7; w1 and fc* do not


@lru_cache(maxsize=64)
def _compile_all(entries: Rows) -> re.Pattern[str]:
    return re.compile("|".join(f"({_to_regex(pattern)})" for pattern, _ in entries), re.DOTALL)


# `model_type` of config.json -> rules.
FAMILIES: Mapping[str, Rules] = {family: Rules(rows) for family, rows in TABLES.items()}
_NESTED: Mapping[str, Rules] = {family: Rules(nested_rows(rows)) for family, rows in TABLES.items()}


LayoutRules = Mapping[str, str] | str | os.PathLike[str]  # the rules, or a file with them

MAX_RULES_FILE_BYTES = 16 * MAX_RULES * MAX_PATTERN_CHARS  # room for every character as an escape


def read_rules(rules: LayoutRules | None) -> dict[str, str] | None:
    """Return checked rules from a mapping or from the named file. Raises ConfigError for either."""
    if rules is None:
        return None
    if rules == "":
        raise ConfigError("layout_rules is an empty string; it must be a mapping or the name of a file")
    if isinstance(rules, str | os.PathLike):
        return _read_file(Path(rules))
    return parse_rules(rules).as_dict()


def _read_file(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RULES_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ConfigError(f"layout rules cannot be read from {str(path)!r:.200}: {error}") from error
    try:
        if len(data) > MAX_RULES_FILE_BYTES or json_values(data) > 8 * MAX_RULES:
            raise ConfigError(f"the file is larger than {MAX_RULES} rules can be")
        rules = json.loads(data, object_pairs_hook=_unique)
        if rules is None:
            raise ConfigError("the file must map patterns to rules, not be null")
        return parse_rules(rules).as_dict()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"layout rules in {str(path)!r:.200}: not JSON: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"layout rules in {str(path)!r:.200}: {error.message}", hint=error.hint) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigError(f"{name!r:.80} appears twice")
        found[name] = value
    return found


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
