"""Rules as data: patterns, parsing, and the families' tables against those of transformers."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.layouts.model_config import ModelConfig
from cluster.layouts.rules import FAMILIES, MAX_RULES, Rule, Rules, _to_regex, parse_rules, rules_for

# base_model_tp_plan of Llama, Mistral and Qwen2 (one and the same) in huggingface/transformers at 008e574.
TRANSFORMERS_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
CUTS_DIM_0 = {Rule.COLUMN, Rule.VOCABULARY, Rule.HEADS, Rule.KV_HEADS}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_families_agree_with_transformers(family: str, prefix: str) -> None:
    rules = FAMILIES[family]
    for module, style in TRANSFORMERS_PLAN.items():
        name = prefix + module.replace("*", "17")
        weight, bias = rules.rule_for(f"{name}.weight"), rules.rule_for(f"{name}.bias")
        if style == "colwise":
            assert weight in CUTS_DIM_0
            assert bias is weight
        else:
            assert weight is Rule.ROW
            assert bias is Rule.REPLICATE  # added once, after the sum over ranks


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_families_name_what_transformers_leaves_out(family: str) -> None:
    rules = FAMILIES[family]
    assert rules.rule_for("model.embed_tokens.weight") is Rule.VOCABULARY
    assert rules.rule_for("lm_head.weight") is Rule.VOCABULARY
    assert rules.rule_for("model.layers.0.self_attn.q_proj.weight") is Rule.HEADS
    assert rules.rule_for("model.layers.0.self_attn.v_proj.bias") is Rule.KV_HEADS
    for name in ("input_layernorm", "post_attention_layernorm"):
        assert rules.rule_for(f"model.layers.31.{name}.weight") is Rule.REPLICATE
    assert rules.rule_for("model.norm.weight") is Rule.REPLICATE
    assert rules.rule_for("model.layers.3.self_attn.rotary_emb.inv_freq") is Rule.REPLICATE


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.extra.mlp.up_proj.weight",
        "xmodel.norm.weight",
        "model.norm.weight\n",
        "model.layers.0.mlp.up_proj",
        "",
    ],
)
def test_families_have_no_rule_for_unknown_names(name: str) -> None:
    assert FAMILIES["llama"].rule_for(name) is None


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a.*.b", ["a.1.b", "a.xy.b", "a..b"], ["a.b", "a.1.2.b", "a.1.bb"]),
        ("a.x*y", ["a.xy", "a.x1y"], ["a.x.y", "a.xyz"]),
        ("**.b", ["b", "a.b", "a.c.b"], ["ab", "b.a", "a.cb"]),
        ("a.**", ["a", "a.b", "a.b.c"], ["ab", "b.a"]),
        ("a.**.b", ["a.b", "a.x.b", "a.x.y.b"], ["a", "ab", "a.xb"]),
        ("**", ["", "a", "a.b"], []),
        ("a+(b).c", ["a+(b).c"], ["aab.c", "a+(b)xc"]),
        ("模型.*", ["模型.权重"], ["模型"]),
    ],
)
def test_patterns_match_names(pattern: str, matching: list[str], others: list[str]) -> None:
    rules = parse_rules({pattern: "row"})
    assert [name for name in matching if rules.rule_for(name) is not Rule.ROW] == []
    assert [name for name in others if rules.rule_for(name) is not None] == []


_parts = st.text("ab*", min_size=1, max_size=4).filter(lambda part: part == "**" or part.count("*") < 2)


@given(st.lists(_parts, min_size=1, max_size=4), st.lists(st.text("ab", max_size=3), min_size=1, max_size=5))
def test_matching_equals_a_regular_expression(pattern: list[str], name: list[str]) -> None:
    if pattern.count("**") > 1:
        return

    def matches(pattern: list[str], name: list[str]) -> bool:
        if not pattern:
            return not name
        if pattern[0] == "**":
            return any(matches(pattern[1:], name[skipped:]) for skipped in range(len(name) + 1))
        if not name or not re.fullmatch(pattern[0].replace("*", ".*"), name[0]):
            return False
        return matches(pattern[1:], name[1:])

    found = parse_rules({".".join(pattern): "row"}).rule_for(".".join(name))
    assert (found is Rule.ROW) == matches(pattern, name)


_numbered = st.sampled_from(["*", "a", "7", "1*", "*2", "1*2", "w1", "w*", "*w", "w1*", "**"])


@given(st.lists(st.lists(_numbered, min_size=1, max_size=3), min_size=1, max_size=4))
def test_numbered_patterns_match_like_regular_expressions(patterns: list[list[str]]) -> None:
    rules = {".".join(parts): list(Rule)[n] for n, parts in enumerate(patterns) if parts.count("**") < 2}
    names = ["7", "1", "12", "112", "w1", "w2", "7.w1", "8.w1", "a.7", "a.1.w1", "a.41.b.41", "a.12.w2", "12.12"]
    together = parse_rules(rules).finder()
    one_by_one = [(name, parse_rules(rules).finder()(name)) for name in names]
    assert [(name, together(name)) for name in names] == one_by_one
    for name, rule in one_by_one:
        each = (found for pattern, found in rules.items() if _to_regex_match(pattern, name))
        assert rule is next(each, None)


def _to_regex_match(pattern: str, name: str) -> bool:
    return re.fullmatch(_to_regex(pattern), name) is not None


def test_the_first_match_wins_and_own_rules_come_first() -> None:
    rules = parse_rules({"a.b": "row", "a.*": "column"})
    assert (rules.rule_for("a.b"), rules.rule_for("a.c")) == (Rule.ROW, Rule.COLUMN)
    config = ModelConfig(model_type="llama")
    both = rules_for(config, {"lm_head.weight": "replicate"})
    assert both.rule_for("lm_head.weight") is Rule.REPLICATE
    assert both.rule_for("model.embed_tokens.weight") is Rule.VOCABULARY
    assert rules_for(config).rule_for("lm_head.weight") is Rule.VOCABULARY
    assert rules_for(ModelConfig(model_type="none")) == rules_for(None) == Rules()


@pytest.mark.parametrize("rules", [*FAMILIES.values(), Rules(), parse_rules({"**.x": "row", "**": "replicate"})])
def test_rules_survive_json(rules: Rules) -> None:
    again = parse_rules(json.loads(json.dumps(rules.as_dict())))
    assert again == rules
    assert parse_rules({}) == parse_rules(None) == Rules()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (["row"], "must map"),
        ({"a": "rows"}, "no rule is called 'rows'"),
        ({"a": 3}, "no rule is called 3"),
        ({"": "row"}, "not a pattern"),
        ({5: "row"}, "not a pattern"),
        ({"x" * 257: "row"}, "not a pattern"),
        ({"a**b": "row"}, "wildcards"),
        ({"**.a.**": "row"}, "wildcards"),
        ({"*a*": "row"}, "wildcards"),
        ({str(n): "row" for n in range(MAX_RULES + 1)}, "more than"),
    ],
)
def test_bad_rules_are_refused(data: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_rules(data)
    assert "replicate" in caught.value.hint


def test_all_bad_rules_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"'a'.*'b'.*'c\*\*'"):
        parse_rules({"a": "x", "b": "y", "c**": "row"})
