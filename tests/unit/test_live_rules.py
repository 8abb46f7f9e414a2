"""Families without a table get rules from the plan of the transformers version that the caller has installed."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import request
from cluster.errors import LayoutError, UnknownFamily
from cluster.layouts.families import rows_of_plan
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.layouts.rules import FAMILIES as TABLES
from cluster.layouts.rules import MAX_RULES, Rule, Rules, parse_rules, rules_for
from cluster.options import LoadOptions
from cluster.planning import preview
from cluster.request import LoadRequest, live_rows, make_request, with_live_rules
from tests.support.family_checkpoints import SavedFamily, needs_transformers, reassemble
from tests.support.hf_models import DENSE_SIZES, TinyFamily, save_model

UNLISTED = {
    # Queries and keys are normed over all heads together.
    "olmo2": TinyFamily("Olmo2Config", "Olmo2ForCausalLM", DENSE_SIZES),
    # Biases everywhere, an MLP of two layers with names of its own, norms with biases.
    "starcoder2": TinyFamily("Starcoder2Config", "Starcoder2ForCausalLM", DENSE_SIZES),
    # Experts, latent attention.
    "deepseek_v2": TinyFamily(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        DENSE_SIZES
        | {"num_key_value_heads": 8, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1}
        | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
    # A tower, and a language model of a family that has no table either.
    "qwen3_vl_moe": TinyFamily(
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "num_heads": 4,
                "patch_size": 4,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            }
        },
        DENSE_SIZES
        | {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    ),
}


def ask(folder: Path, layout: Layout, **other: Any) -> LoadRequest:
    return make_request(LoadOptions(str(folder), **asdict(layout), **other))


@dataclass
class Planner:
    """Answers like the cluster's planner: through a pickle, and with its own tables."""

    saved: SavedFamily
    requests: list[LoadRequest]

    def __call__(self, request: LoadRequest) -> SavedFamily:
        self.requests.append(request)
        saved = SavedFamily.open(self.saved.folder, request.layout_rules)
        try:
            saved.plan(request.layout)
        except LayoutError as error:
            raise pickle.loads(pickle.dumps(error)) from None
        return saved


@needs_transformers
@pytest.mark.parametrize("naming", ["hub", "modules"])
@pytest.mark.parametrize("family", UNLISTED)
def test_a_family_without_a_table_loads(family: str, naming: str, tmp_path: Path) -> None:
    assert family not in TABLES
    saved = SavedFamily.open(save_model(UNLISTED[family], tmp_path, hub_names=naming == "hub"))
    layouts = [Layout(2), Layout(4), Layout(2, pipeline_parallel_size=2)]
    if family == "deepseek_v2":
        layouts.append(Layout(2, expert_parallel_size=2))
    for layout in layouts:
        planner = Planner(saved, [])
        ruled = with_live_rules(ask(tmp_path, layout), planner)
        assert [request.layout_rules is None for request in planner.requests] == [True, False]
        plan, loaded = ruled.load(layout)
        whole = reassemble(plan, loaded)
        assert all(np.array_equal(whole[name], array) for name, array in ruled.stored().items())
        of_stage = {(rank.coords.stage, rank.size_bytes) for rank in plan.ranks}
        assert len(of_stage) == layout.pipeline_parallel_size
        assert sum(rank.size_bytes for rank in plan.ranks[: layout.one_replica]) < 1.9 * saved.index.size_bytes


@needs_transformers
def test_a_plan_of_transformers_becomes_rules() -> None:
    rules = Rules(live_rows("starcoder2"))
    assert rules.rule_for("model.layers.0.mlp.c_fc.weight") is Rule.COLUMN
    assert rules.rule_for("model.layers.0.mlp.c_fc.bias") is Rule.COLUMN
    assert rules.rule_for("model.layers.0.mlp.c_proj.weight") is Rule.ROW
    assert rules.rule_for("model.layers.0.mlp.c_proj.bias") is Rule.REPLICATE
    assert rules.rule_for("model.layers.0.self_attn.k_proj.bias") is Rule.KV_HEADS
    assert rules.rule_for("model.layers.0.input_layernorm.bias") is Rule.REPLICATE
    assert rules.rule_for("model.embed_tokens.weight") is Rule.VOCABULARY
    assert rules.rule_for("model.layers.0.mlp.surprise.weight") is None


@needs_transformers
@pytest.mark.parametrize("family", ["", "no_such_family", "../evil", "gpt_neo", "bert", "x" * 101, "llama.evil"])
def test_unknown_or_hostile_family_names_give_no_rules(family: str) -> None:
    assert live_rows(family) == ()


@needs_transformers
def test_plans_of_the_library_make_rules_that_can_be_sent() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    made = 0
    for family in sorted(CONFIG_MAPPING_NAMES)[::5]:
        rows = live_rows(family)
        rules = parse_rules({pattern: str(rule) for pattern, rule in rows})
        assert rules.entries == rows
        assert len(rows) < MAX_RULES // 2
        made += bool(rows)
    assert made > 10


def test_unknown_styles_cut_nothing() -> None:
    rows = Rules(rows_of_plan({"layers.*.mlp.a": "diagonal", "layers.*.experts.w": "packed_rowwise"}, {}, nested=False))
    assert rows.rule_for("model.layers.0.mlp.a.weight") is None
    assert rows.rule_for("model.layers.0.experts.w") is None


def test_a_known_inner_language_model_needs_no_transformers() -> None:
    config = ModelConfig(model_type="llava", text_model_type="llama")
    for prefix in ("model.language_model.", "language_model.model."):
        assert rules_for(config).rule_for(f"{prefix}layers.0.mlp.down_proj.weight") is Rule.ROW
    assert rules_for(config).rule_for("vision_tower.encoder.layers.0.mlp.fc1.weight") is Rule.REPLICATE
    assert rules_for(config).rule_for("language_model.lm_head.weight") is Rule.VOCABULARY
    assert rules_for(config).rule_for("image_newline") is Rule.REPLICATE
    assert rules_for(config).rule_for("no_part_that_is_known.weight") is None


LLAVA = TinyFamily(
    "LlavaConfig",
    "LlavaForConditionalGeneration",
    {
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        }
    },
    DENSE_SIZES | {"model_type": "llama"},
)


@needs_transformers
@pytest.mark.parametrize("naming", ["hub", "modules"])
def test_a_vision_tower_around_llama_loads(naming: str, tmp_path: Path) -> None:
    saved = SavedFamily.open(save_model(LLAVA, tmp_path, hub_names=naming == "hub"))
    assert saved.config.model_type == "llava"
    plan, loaded = saved.load(Layout(4))
    stored = saved.stored()
    assert all(np.array_equal(array, stored[name]) for name, array in reassemble(plan, loaded).items())
    (down,) = (name for name in stored if name.endswith("layers.3.mlp.down_proj.weight"))
    assert loaded[1][down].shape == (64, 24)


def unknown(folder: Path, family: str) -> Path:
    """Return a checkpoint of one matrix, of that family."""
    from tests.support.checkpoints import safetensors_bytes

    (folder / "model.safetensors").write_bytes(safetensors_bytes([("blocks.0.proj.weight", "BF16", (4, 4))]))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return folder


def test_without_transformers_the_error_names_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "find_spec", lambda name: None)
    before = set(sys.modules)
    with pytest.raises(UnknownFamily) as caught:
        preview.plan(unknown(tmp_path, "olmo2"), tensor_parallel_size=2)
    assert "pip install transformers" in caught.value.hint
    assert "layout_rules={" in caught.value.hint
    assert caught.value.details["family"] == "olmo2"
    assert "blocks.0.proj.weight" in caught.value.message
    assert "transformers" not in set(sys.modules) - before


def test_a_broken_transformers_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*names: str) -> None:
        raise ImportError("tokenizers is too old")

    monkeypatch.setattr(request, "find_spec", lambda name: True)
    monkeypatch.setattr(request, "live_rows", broken)
    with pytest.raises(UnknownFamily, match=r"cannot be read \(ImportError: tokenizers is too old"):
        preview.plan(unknown(tmp_path, "olmo2"), tensor_parallel_size=2)


def test_unprintable_family_names_are_not_shown(tmp_path: Path) -> None:
    with pytest.raises(UnknownFamily) as caught:
        preview.plan(unknown(tmp_path, "\x1b[2Jolmo2"), tensor_parallel_size=2)
    assert "family" not in caught.value.details


@needs_transformers
@pytest.mark.parametrize(
    ("family", "says"), [("olmo2", "does not name these"), ("made_up", "has no tensor-parallel plan")]
)
def test_a_family_unknown_to_transformers_is_refused(family: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownFamily, match=says) as caught:
        preview.plan(unknown(tmp_path, family), tensor_parallel_size=2)
    assert "blocks.0.proj.weight" in caught.value.message
    plan = preview.plan(tmp_path, tensor_parallel_size=2, layout_rules={"blocks.*.proj.weight": "row"})
    assert len(plan.ranks) == 2


@needs_transformers
def test_own_rules_override_those_of_transformers(tmp_path: Path) -> None:
    folder = save_model(UNLISTED["starcoder2"], tmp_path)
    planner = Planner(SavedFamily.open(folder), [])
    own = {"model.layers.*.mlp.c_fc.weight": "replicate", "**.c_fc.bias": "replicate"}
    with_live_rules(ask(folder, Layout(2), layout_rules=own), planner)
    sent = planner.requests[-1].layout_rules
    assert sent is not None
    assert list(sent)[:2] == list(own)
    assert Rules(parse_rules(sent).entries).rule_for("model.layers.0.mlp.c_fc.weight") is Rule.REPLICATE
    assert Rules(parse_rules(sent).entries).rule_for("model.layers.0.mlp.c_proj.weight") is Rule.ROW


def test_errors_of_known_families_are_unchanged(tmp_path: Path) -> None:
    calls = []

    def do(request: LoadRequest) -> None:
        calls.append(request)
        raise LayoutError("cannot be cut")

    with pytest.raises(LayoutError, match="cannot be cut"):
        with_live_rules(ask(tmp_path, Layout(2)), do)
    assert len(calls) == 1


@needs_transformers
def test_no_code_of_the_model_repository_runs(tmp_path: Path) -> None:
    folder = unknown(tmp_path, "made_up")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "made_up", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}})
    )
    (folder / "evil.py").write_text("import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()")
    with pytest.raises(UnknownFamily):
        preview.plan(folder, tensor_parallel_size=2)
    assert not (folder / "evil.ran").exists()
