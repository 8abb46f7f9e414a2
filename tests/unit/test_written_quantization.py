"""The quantization_config of a quantized load, as the library reads it."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig
from transformers import BitsAndBytesConfig

from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.precision.recipes import SCHEMES, Precision
from cluster.precision.written_quantization import precision_notes, precision_of, quantization_config
from tests.support.planned_models import as_bf16, llama_shapes, random_arrays, store_arrays
from tests.support.reference_quantized import scheme_args

MODEL = store_arrays(as_bf16(random_arrays(llama_shapes(2, 128, 128, 4, 2, 50))))


@pytest.mark.parametrize("scheme", sorted(SCHEMES.keys() - {"nf4"}))
def test_the_library_reads_the_written_quantization(scheme: str) -> None:
    plan = build_load_plan(MODEL.index, Layout(), None, None, Precision("auto", scheme))
    config = quantization_config(plan.cut)
    assert config is not None
    read = QuantizationConfig.model_validate(config)
    group = read.config_groups["group_0"]
    expected = scheme_args(scheme)
    for field in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic"):
        assert getattr(group.weights, field) == getattr(expected, field)
    # The format is the one that the library itself would choose, so the names of the tensors are what it looks for.
    assert infer_module_format(torch.nn.Linear, group).value == config["format"] == read.format
    assert config["ignore"] == ["model.embed_tokens", "lm_head"]
    assert precision_of(plan.cut) == f"{scheme}: 14 tensors"


@pytest.mark.parametrize("scheme", ["int4", "nf4"])
def test_a_head_that_is_the_embedding_is_ignored(scheme: str) -> None:
    """It is a linear layer of the model, and nothing is stored for it."""
    tied = store_arrays(as_bf16(random_arrays(llama_shapes(1, 128, 128, 4, 2, 50, tied=True))))
    plan = build_load_plan(tied.index, Layout(), None, None, Precision("auto", scheme))
    config = quantization_config(plan.cut)
    assert config is not None
    assert config["llm_int8_skip_modules" if scheme == "nf4" else "ignore"] == ["model.embed_tokens", "lm_head"]


def test_transformers_reads_it_as_nf4_of_bitsandbytes() -> None:
    plan = build_load_plan(MODEL.index, Layout(), None, None, Precision("float16", "nf4"))
    config = quantization_config(plan.cut)
    assert config is not None
    read = BitsAndBytesConfig.from_dict(config)
    assert read.quantization_method() == "nf4"
    assert read.bnb_4bit_compute_dtype is torch.float16
    assert not read.bnb_4bit_use_double_quant
    assert config.items() <= {name.removeprefix("_"): said for name, said in read.to_dict().items()}.items()
    assert config["llm_int8_skip_modules"] == ["model.embed_tokens", "lm_head"]
    assert precision_of(plan.cut) == "cast to F16: 7 tensors, nf4: 14 tensors"


def test_skipped_layers_are_listed_as_ignored() -> None:
    skip = ("default", "**.down_proj.weight")
    plan = build_load_plan(MODEL.index, Layout(), None, None, Precision("float16", "int8", skip))
    config = quantization_config(plan.cut)
    assert config is not None
    assert [name for name in config["ignore"] if "down_proj" in name] == [
        f"model.layers.{n}.mlp.down_proj" for n in (0, 1)
    ]
    assert precision_of(plan.cut) == "cast to F16: 9 tensors, int8: 12 tensors"


def test_an_unquantized_model_has_no_quantization_config() -> None:
    for precision, said in ((Precision(), "as stored"), (Precision("float16"), "cast to F16: 21 tensors")):
        plan = build_load_plan(MODEL.index, Layout(), None, None, precision)
        assert quantization_config(plan.cut) is None
        assert precision_of(plan.cut) == said


def test_experts_in_one_tensor() -> None:
    """No library reads them quantized, so they stay plain unless a list without "default" asks; a plan lists them."""
    shapes = llama_shapes(1, 128, 128, 4, 2, 50) | {"model.layers.0.mlp.experts.gate_up_proj": (4, 256, 128)}
    model = store_arrays(as_bf16(random_arrays(shapes)))
    notes = []
    for scheme in ("fp8", "nf4"):
        for skip in (("default",), ("lm_head.*",)):
            asked = Precision("auto", scheme, skip)
            plan = build_load_plan(model.index, Layout(), None, None, asked)
            assert (quantization_config(plan.cut) is None) is (skip != ("default",))
            held = {piece.name: piece.dtype for piece in plan.ranks[0].slices}
            assert (held["model.layers.0.mlp.experts.gate_up_proj"] == "BF16") is (skip == ("default",))
            notes += precision_notes(model.index.tensors, asked)
    left = "all experts of a layer in one tensor (1 of them) are not quantized, because no library reads such a tensor"
    made = "all experts of a layer in one tensor (1 of them) are quantized under names that no library reads"
    assert [note.startswith((left, made)[n % 2]) for n, note in enumerate(notes)] == [True] * 4
    assert precision_notes(model.index.tensors, Precision()) == ()


def test_embeddings_are_no_linear_layers() -> None:
    plan = build_load_plan(MODEL.index, Layout(), None, None, Precision("auto", "fp8", ()))
    config = quantization_config(plan.cut)
    assert config is not None
    assert config["ignore"] == ["model.embed_tokens"]
    held = {piece.name: piece.dtype for piece in plan.ranks[0].slices}
    assert (held["model.embed_tokens.weight"], held["lm_head.weight"]) == ("BF16", "F8_E4M3")
