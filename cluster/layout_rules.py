"""Which way tensor parallelism cuts each tensor, as data: one table of patterns per model family.

A pattern is a dotted tensor name. In it `*` stands for any characters of one part and `**`, as a whole part,
for any number of parts: `model.layers.*.mlp.up_proj.weight`, `**.norm.weight`. The first pattern that matches
decides.

The tables agree with the tensor-parallel plans that transformers ships for these families (colwise is
`column`, rowwise is `row`). Where transformers leaves a tensor out of its plan, engines such as vLLM decide:
embedding and head are cut by vocabulary, and key/value heads are replicated when there are fewer of them than
ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.model_config import ModelConfig  # brings pydantic

MAX_RULES = 1000  # of one request
MAX_PATTERN_CHARS = 256


class Rule(StrEnum):
    """What tensor and expert parallelism do to one tensor; dimensions as stored, a linear weight is (out, in)."""

    COLUMN = "column"  # dim 0 (the outputs) in equal parts
    ROW = "row"  # dim 1 (the inputs) in equal parts
    VOCABULARY = "vocabulary"  # dim 0 (one row per token) in equal parts, the last ones padded with zeros
    HEADS = "heads"  # dim 0 in whole attention heads
    KV_HEADS = "kv_heads"  # dim 0 in whole key/value heads; fewer heads than ranks: neighbours share a head
    QKV = "qkv"  # dim 0 is the heads of q, of k and of v, one after the other; each is cut like q_proj, k_proj, v_proj
    EQUAL_HEADS = "equal_heads"  # QKV with as many heads each, as towers of vision models have
    GATE_UP = "gate_up"  # dim 0 is two matrices of one size, gate and up; each is cut like COLUMN
    REPLICATE = "replicate"  # every rank has all of it
    # One expert's own tensor; the last number in its name is the expert's.
    EXPERT = "expert"  # whole, on the ranks that have the expert
    EXPERT_COLUMN = "expert_column"
    EXPERT_ROW = "expert_row"
    EXPERT_GATE_UP = "expert_gate_up"
    # All experts in one tensor, dim 0: (expert, out, in), and biases (expert, out).
    EXPERTS = "experts"
    EXPERTS_COLUMN = "experts_column"
    EXPERTS_ROW = "experts_row"
    EXPERTS_GATE_UP = "experts_gate_up"


@dataclass(frozen=True, slots=True)
class Rules:
    """Patterns in order of precedence, each with its rule. Empty rules name no tensor."""

    entries: tuple[tuple[str, Rule], ...] = ()

    def rule_for(self, name: str) -> Rule | None:
        """The rule of the first pattern that matches the whole name, or None."""
        return self.finder()(name)

    def finder(self) -> Callable[[str], Rule | None]:
        """`rule_for` for many names: compiled once, and names that differ in their numbers only are looked up once."""
        if not self.entries:
            return lambda name: None
        pattern = _compile_all(self.entries)
        # Where no pattern has a digit, a number matches whatever another number does: layer 7, expert 41 is looked up
        # as layer 0, expert 0. Large models have 100,000 names and a dozen of these.
        numbers_alike = not any(_NUMBER.search(pattern) for pattern, _ in self.entries)
        found: dict[str, Rule | None] = {}

        def find(name: str) -> Rule | None:
            name = _NUMBER.sub("0", name) if numbers_alike else name
            if name not in found:
                match = pattern.fullmatch(name)
                found[name] = self.entries[match.lastindex - 1][1] if match and match.lastindex else None
            return found[name]

        return find

    def then(self, other: Rules) -> Rules:
        """These rules, and `other` for the names that these do not match."""
        return Rules(self.entries + other.entries)

    def as_dict(self) -> dict[str, str]:
        """Plain data that `parse_rules` reads back; a pattern's first rule is the one that counts."""
        plain: dict[str, str] = {}
        for pattern, rule in self.entries:
            plain.setdefault(pattern, str(rule))
        return plain


def parse_rules(data: object) -> Rules:
    """Rules from a mapping of pattern to rule name. Raises ConfigError listing all problems."""
    if data is None:
        return Rules()
    if not isinstance(data, Mapping):
        raise ConfigError(f"layout_rules must map patterns to rules, not be a {type(data).__name__}", hint=_HINT)
    if len(data) > MAX_RULES:
        raise ConfigError(f"layout_rules has {len(data)} entries, more than {MAX_RULES}", hint=_HINT)
    problems = []
    entries = []
    for pattern, rule in data.items():
        if problem := _pattern_problem(pattern):
            problems.append(problem)
        elif not isinstance(rule, str) or rule not in set(Rule):
            problems.append(f"{pattern!r}: no rule is called {rule!r:.40}")
        else:
            entries.append((str(pattern), Rule(rule)))
    if problems:
        raise ConfigError("bad layout_rules: " + "; ".join(problems[:20]), hint=_HINT, problems=len(problems))
    return Rules(tuple(entries))


def rules_for(config: ModelConfig | None, own: Rules | Mapping[str, str] | None = None) -> Rules:
    """The user's own rules (a mapping is parsed), then those of the model's family when it is one we know.

    Raises ConfigError for a mapping that holds no rules.
    """
    family = FAMILIES.get(config.model_type or "") if config else None
    return (own if isinstance(own, Rules) else parse_rules(own)).then(family or Rules())


_HINT = f"Rules: {', '.join(Rule)}; a pattern may hold one * per part of the name and one part that is **"


def _pattern_problem(pattern: object) -> str | None:
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


_NUMBER = re.compile("[0-9]+")


@lru_cache(maxsize=64)
def _compile_all(entries: tuple[tuple[str, Rule], ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"({_to_regex(pattern)})" for pattern, _ in entries), re.DOTALL)


def _table(base: Iterable[tuple[str, Rule]], head: Iterable[tuple[str, Rule]]) -> Rules:
    """Rules of a family. `base` holds below `model.`, and without it: how a bare base model is saved."""
    rows = tuple(base)
    return Rules((*((f"model.{name}", rule) for name, rule in rows), *rows, *head))


# Llama and the families with the same modules. Which of them have biases differs (Qwen2: q, k, v; Llama: by
# its config), so every bias is named. The bias of a row-parallel layer is replicated on purpose: it is added
# once, after the partial sums of all ranks; an engine adds it on one rank only.
_DENSE_DECODER = _table(
    base=(
        ("embed_tokens.weight", Rule.VOCABULARY),
        ("layers.*.self_attn.q_proj.weight", Rule.HEADS),
        ("layers.*.self_attn.q_proj.bias", Rule.HEADS),
        ("layers.*.self_attn.k_proj.weight", Rule.KV_HEADS),
        ("layers.*.self_attn.k_proj.bias", Rule.KV_HEADS),
        ("layers.*.self_attn.v_proj.weight", Rule.KV_HEADS),
        ("layers.*.self_attn.v_proj.bias", Rule.KV_HEADS),
        ("layers.*.self_attn.o_proj.weight", Rule.ROW),
        ("layers.*.self_attn.o_proj.bias", Rule.REPLICATE),
        ("layers.*.mlp.gate_proj.weight", Rule.COLUMN),
        ("layers.*.mlp.gate_proj.bias", Rule.COLUMN),
        ("layers.*.mlp.up_proj.weight", Rule.COLUMN),
        ("layers.*.mlp.up_proj.bias", Rule.COLUMN),
        ("layers.*.mlp.down_proj.weight", Rule.ROW),
        ("layers.*.mlp.down_proj.bias", Rule.REPLICATE),
        ("layers.*.input_layernorm.weight", Rule.REPLICATE),
        ("layers.*.post_attention_layernorm.weight", Rule.REPLICATE),
        ("norm.weight", Rule.REPLICATE),
        # Buffers that early checkpoints of these families kept, per layer or once.
        ("layers.*.self_attn.rotary_emb.inv_freq", Rule.REPLICATE),
        ("layers.*.self_attn.rotary_emb.cos_cached", Rule.REPLICATE),
        ("layers.*.self_attn.rotary_emb.sin_cached", Rule.REPLICATE),
        ("rotary_emb.inv_freq", Rule.REPLICATE),
    ),
    head=(("lm_head.weight", Rule.VOCABULARY),),
)

# `model_type` of config.json -> rules. A new family is a new row.
FAMILIES: Mapping[str, Rules] = {
    "llama": _DENSE_DECODER,
    "mistral": _DENSE_DECODER,
    "qwen2": _DENSE_DECODER,
}
