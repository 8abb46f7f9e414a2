"""Conversion rules and plans: every rank's result is its part of the whole tensor's result."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import cluster
from cluster.errors import ConfigError, LayoutError
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.layouts.rules import parse_rules
from cluster.planning.make_plan import build_load_plan, overfetch_bytes
from cluster.planning.packed_plan import rank_facts
from cluster.planning.plan import LoadPlan
from cluster.planning.read_items import ALIGNMENT_BYTES
from cluster.precision.recipes import SCHEMES, Precision, Recipe, decide_recipes, make_precision
from storage.checkpoints.model_index import Tensor
from tests.support.plan_oracle import check_plan
from tests.support.planned_models import NF4_STATE, StoredModel, assemble, carry_out, llama_shapes, store_arrays
from tests.support.reference_quantized import quantized

CONFIG = ModelConfig(model_type="llama", num_attention_heads=8, num_key_value_heads=4, head_dim=32)
WORDS = {torch.bfloat16: np.uint16, torch.float32: np.uint32}


def tensor(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> Tensor:
    width = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8}.get(dtype, 1)
    return Tensor(name, dtype, shape, 0, 0, int(np.prod(shape)) * width)


def random_weights(seed: int = 0, layers: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = llama_shapes(layers, 256, 512, 8, 4, 50)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def stored(weights: dict[str, torch.Tensor], chunk_bytes: int) -> StoredModel:
    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    arrays = {n: (names[w.dtype], w.view(torch.uint8).numpy().view(WORDS[w.dtype])) for n, w in weights.items()}
    return store_arrays(arrays, 2, chunk_bytes)


def whole_results(plan: LoadPlan, model: StoredModel) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    """All ranks' tensors put together again."""
    pieces = []
    for rank in plan.ranks:
        tensors, _ = carry_out(plan, rank, model.files)
        pieces += [(piece, tensors[piece.name]) for piece in rank.slices]
    return assemble(pieces)


def expected_results(weights: dict[str, torch.Tensor], scheme: str) -> dict[str, torch.Tensor]:
    """Return what the library makes of a Llama: only the matrices of its layers are quantized."""
    found = {}
    for name, weight in weights.items():
        if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
            found |= {f"{name}{suffix}": made for suffix, made in quantized(weight, scheme).items()}
        else:
            found[name] = weight
    return found


@given(
    st.sampled_from(sorted(SCHEMES)),
    st.sampled_from([(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 3, 1), (2, 2, 1), (2, 1, 2), (4, 5, 1)]),
    st.sampled_from([1000, 4099, 65536, 1 << 20]),
)
@settings(max_examples=8, deadline=None)
def test_results_match_the_whole_tensor_on_any_number_of_ranks(
    scheme: str, sizes: tuple[int, int, int], chunk_bytes: int
) -> None:
    """Compared with the library over whole tensors; chunks end inside elements."""
    weights = random_weights()
    model = stored(weights, chunk_bytes)
    tp, fsdp, dp = sizes
    layout = Layout(tp, fsdp, dp, vocabulary_multiple=7)
    if scheme == "int4" and tp == 4:  # 256 columns of o_proj: cut by TP only
        layout = Layout(2, fsdp, dp, vocabulary_multiple=7)
    plan = build_load_plan(model.index, layout, None, CONFIG, Precision("auto", scheme))
    assert check_plan(plan) == []
    found = whole_results(plan, model)
    expected = expected_results(weights, scheme)
    if scheme == "nf4":  # flat, here as the rows that its bytes are
        expected = {name: as_rows(name, made, weights) for name, made in expected.items() if NF4_STATE not in name}
    assert found.keys() == expected.keys()
    for name, made in expected.items():
        _, shape, data = found[name]
        assert (shape, data.tobytes()) == (
            tuple(made.shape),
            made.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    check_facts(plan)


def as_rows(name: str, made: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    weight = weights[name.removesuffix(".absmax").removesuffix(".quant_map")]
    return made if made is weight or name.endswith(".quant_map") else made.reshape(len(weight), -1)


def check_facts(plan: LoadPlan) -> None:
    facts = rank_facts(plan.cut)
    for rank, fact in zip(plan.ranks, facts, strict=True):
        padded = sum(-(-piece.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for piece in rank.slices)
        assert (fact.size_bytes, fact.device_bytes) == (rank.size_bytes, rank.device_bytes)
        assert rank.device_bytes == padded
        assert fact.read_bytes == sum(piece.filled_bytes for piece in rank.sources)
        sizes = [staged.source.size_bytes for staged in rank.staged]
        assert fact.staging_bytes == min(sum(sizes), 2 * max(sizes, default=0))
    assert overfetch_bytes(plan, range(len(facts))) >= 0


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 1), (4, 1, 2)])
def test_casts_on_any_number_of_ranks(dtype: str, sizes: tuple[int, int, int]) -> None:
    weights = random_weights() | {"model.norm.weight": torch.randn(256)}
    model = stored(weights, 5001)
    plan = build_load_plan(model.index, Layout(*sizes), None, CONFIG, Precision(dtype))
    assert check_plan(plan) == []
    target = getattr(torch, dtype)
    for name, (_, shape, data) in whole_results(plan, model).items():
        made = weights[name].to(target)
        assert (shape, data.tobytes()) == (tuple(made.shape), made.view(torch.uint8).numpy().tobytes())
    check_facts(plan)
    if dtype == "bfloat16":
        assert {staged.source.name for staged in plan.ranks[0].staged} == {"model.norm.weight"}


def test_a_scale_that_needs_the_whole_tensor_is_read_for() -> None:
    """A row cut with a scale per row reads whole rows, a scale per tensor all of it; groups and casts only what is
    held."""
    weights = random_weights()
    model = stored(weights, 1 << 20)
    held = {}
    for precision in ("fp8", "fp8_tensor", "int4", "nf4", ""):
        plan = build_load_plan(model.index, Layout(2), None, CONFIG, Precision("float16", precision))
        held[precision] = {staged.source.name: staged.source.sizes for staged in plan.ranks[1].staged}
    down, up = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"
    assert [held[precision][down] for precision in held] == [(256, 512), (256, 512), *[(256, 256)] * 3]
    assert [held[precision][up] for precision in held] == [(256, 256), (512, 256), *[(256, 256)] * 3]


@pytest.mark.parametrize(("scheme", "ranks", "keeps", "cut"), [("int4", 8, 128, 64), ("nf4", 16, 64, 32)])
def test_groups_are_not_cut(scheme: str, ranks: int, keeps: int, cut: int) -> None:
    model = stored(random_weights(), 1 << 20)
    says = rf"down_proj.*{scheme} keeps {keeps} weights of a row together.*cut at {cut}"
    with pytest.raises(LayoutError, match=says) as caught:
        build_load_plan(
            model.index,
            Layout(ranks),
            parse_rules({"**.down_proj.weight": "row", "**": "replicate"}),
            CONFIG,
            Precision(quantization=scheme),
        )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_only_linear_layers_are_quantized() -> None:
    names = {
        "model.embed_tokens.weight": (100, 128),
        "model.layers.0.self_attn.q_proj.weight": (64, 128),
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.0.input_layernorm.weight": (128,),
        "model.layers.0.mlp.gate.weight": (8, 128),
        "model.layers.0.mlp.gate_proj.weight": (64, 128),
        "model.layers.0.mlp.odd_proj.weight": (64, 100),  # no multiple of 128
        "model.layers.0.mlp.experts.3.down_proj.weight": (64, 128),
        "model.layers.0.mlp.experts.gate_up_proj": (8, 64, 128),
        "model.layers.0.mlp.experts.gate_up_proj_bias": (8, 128),
        "model.layers.0.mixer.conv1d.weight": (64, 1, 128),
        "model.layers.0.mlp.nothing.weight": (0, 128),
        "model.visual.blocks.0.mlp.fc1.weight": (64, 128),
        "lm_head.weight": (100, 128),
    }
    tensors = [tensor(name, shape) for name, shape in names.items()] + [tensor("model.ids.weight", (4, 128), "I64")]

    def chosen(precision: Precision) -> set[str]:
        recipes = decide_recipes(tensors, precision)
        return {each.name for each, recipe in zip(tensors, recipes, strict=True) if recipe and recipe.scheme}

    usual = {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.experts.3.down_proj.weight",
    }
    assert chosen(Precision(quantization="int4")) == usual
    assert chosen(Precision(quantization="nf4")) == usual
    assert chosen(Precision(quantization="fp8")) == usual | {"model.layers.0.mlp.odd_proj.weight"}
    assert chosen(Precision(quantization="int4", skip=("default", "**.q_proj.weight"))) == usual - {
        "model.layers.0.self_attn.q_proj.weight"
    }
    everything = chosen(Precision(quantization="int4", skip=()))
    assert everything - usual == {
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.visual.blocks.0.mlp.fc1.weight",
        "lm_head.weight",
    }  # embeddings and routers are no linear layers
    with pytest.raises(ConfigError, match="applies to no weight"):
        chosen(Precision(quantization="int4", skip=("**",)))


def test_only_plain_floating_point_weights_are_cast() -> None:
    tensors = [
        tensor("a.weight", (2, 2), "F32"),
        tensor("b.weight", (2, 2), "F64"),
        tensor("c.weight", (2, 2), "F8_E4M3"),
        tensor("d.weight", (2, 2), "BF16"),
        tensor("e.position_ids", (2, 2), "I64"),
        tensor("f.e_score_correction_bias", (4,), "F32"),
    ]
    as_bf16 = [Recipe("BF16"), Recipe("BF16"), Recipe("BF16"), None, None, None]
    assert decide_recipes(tensors, Precision("bfloat16")) == as_bf16
    assert decide_recipes(tensors, Precision()) == [None] * 6
    # Of a quantized checkpoint, numbers that mean nothing without their scales stay as they are, and so do the scales.
    names = ("c.weight_scale", "c.weight_scale_2", "c.input_scale", "attn.k_scale", "experts.up_proj_activation_scale")
    scales = [tensor(name, (1,), "F32") for name in names]
    assert decide_recipes([*tensors, *scales], Precision("bfloat16")) == [Recipe("BF16"), Recipe("BF16"), *[None] * 9]


def test_quantization_uses_the_requested_or_the_stored_dtype() -> None:
    tensors = [tensor(f"{dtype}.weight", (2, 2), dtype) for dtype in ("BF16", "F16", "F32", "F64")]
    stored_so = decide_recipes(tensors, Precision(quantization="fp8"))
    assert [recipe and recipe.dtype for recipe in stored_so] == ["BF16", "F16", "F32", "F32"]
    asked = decide_recipes(tensors, Precision("float16", "fp8"))
    assert [recipe and recipe.dtype for recipe in asked] == ["F16"] * 4


@pytest.mark.parametrize(
    "name",
    ["a.qweight", "a.weight_scale", "a.weight_scale_inv", "a.weight_packed", "experts.gate_up_proj_blocks", "a.SCB"],
)
def test_a_quantized_model_is_not_quantized_again(name: str) -> None:
    tensors = [tensor("b.weight", (2, 128)), tensor(name, (2,), "F32")]
    with pytest.raises(ConfigError, match=r"already quantized: it has .*" + name.replace(".", r"\.")):
        decide_recipes(tensors, Precision(quantization="int8"))
    with pytest.raises(ConfigError, match="already quantized"):
        decide_recipes([tensor("b.weight", (2, 128), "F8_E4M3")], Precision(quantization="int8"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp32", "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.float32, "float32"),
    ],
)
def test_other_names_of_a_dtype(name: Any, meant: str, tmp_path: Path) -> None:
    assert make_precision(name, None, None) == Precision(meant)
    save_file({"a.weight": torch.zeros(4, 4, dtype=torch.float64)}, tmp_path / "model.safetensors")
    assert cluster.plan(tmp_path, dtype=name) == cluster.plan(tmp_path, dtype=meant)
    with pytest.raises(ConfigError, match=r"plan: dtype must be a str or a torch.dtype, not type"):
        cluster.plan(tmp_path, dtype=float)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((torch.int8, None, None), "dtype must be one of auto, bfloat16, .*, not 'torch.int8'"),
        (
            ("int3", None, None),
            "dtype must be one of auto, bfloat16, float16, float32, bf16, fp16, fp32 or a torch.dtype, not 'int3'",
        ),
        (("auto", "int3", None), "quantization must be one of fp8, fp8_tensor, int8, int4, nf4, not 'int3'"),
        (("float32", "nf4", None), "contradict each other"),
        (("float32", "int4", None), "contradict each other"),
        (("auto", "fp8", ["*a*b*"]), "bad skip_quantization: .* more wildcards"),
        (("auto", "fp8", [["a"]]), "bad skip_quantization: .* is not a pattern"),
        (("auto", "fp8", ["a"] * 1001), "more than 1000 patterns"),
    ],
)
def test_invalid_precisions_are_refused(arguments: tuple[Any, Any, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        make_precision(*arguments)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_problems_of_a_plan_of_converted_tensors_are_found() -> None:
    plan = build_load_plan(stored(random_weights(), 4096).index, Layout(), None, CONFIG, Precision(quantization="int8"))
    rank = plan.ranks[0]
    made = next(number for number, piece in enumerate(rank.slices) if piece.made_from)
    for change in ({"size_bytes": rank.slices[made].size_bytes - 1}, {"filled_bytes": 4}):
        slices = (*rank.slices[:made], replace(rank.slices[made], **change), *rank.slices[made + 1 :])
        assert any(
            "bytes for" in problem for problem in check_plan(replace(plan, ranks=[replace(rank, slices=slices)]))
        )
    source = replace(rank.staged[0].source, filled_bytes=2)
    staged = (replace(rank.staged[0], source=source), *rank.staged[1:])
    assert check_plan(replace(plan, ranks=[replace(rank, staged=staged)]))


@pytest.mark.parametrize(
    ("family", "name", "skip", "says"),
    [
        ("gpt2", "h.0.attn.c_attn.weight", (), "a row for each input"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", (), "a row for each input"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", ("**.experts.*",), ""),
        ("llama", "model.layers.0.self_attn.q_proj.weight", (), ""),
    ],
)
def test_weights_stored_by_input_are_refused_unless_skipped(
    family: str, name: str, skip: tuple[str, ...], says: str
) -> None:
    shape = (2, 256, 128) if "experts" in name else (256, 128)
    tensors = [tensor(name, shape), tensor("model.layers.0.self_attn.o_proj.weight", (128, 128))]
    tensors = tensors[:1] if family == "gpt2" else tensors
    precision = Precision(quantization="fp8", skip=skip)
    if says:
        with pytest.raises(ConfigError, match=says):
            decide_recipes(tensors, precision, family)
    else:
        decide_recipes(tensors, precision, family)
