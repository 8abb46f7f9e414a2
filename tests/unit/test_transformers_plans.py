"""The families' tables against the plans that transformers itself has for them, module by module.

Both are read as the same thing: which dimension of a linear weight is cut, and into how many matrices side by side it
falls. Where we mean to differ the row is listed with its reason; a row that no longer differs is an error too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.layouts.families import CONFIG_DEFAULTS
from cluster.layouts.mesh import Layout
from cluster.layouts.rules import FAMILIES as TABLES
from cluster.layouts.rules import Rule, experts_of
from tests.support.family_checkpoints import SavedFamily, needs_transformers
from tests.support.hf_models import FAMILIES, MOE_FAMILIES, make_tiny

pytestmark = needs_transformers

COMPARED_WITH = "5.23.0"  # what the reasons below were written for

WHOLE = (None, 1)
Cut = tuple[int | None, int]  # dimension of the matrix, matrices side by side

OURS: dict[Rule, Cut] = {
    Rule.COLUMN: (0, 1),
    Rule.HEADS: (0, 1),
    Rule.KV_HEADS: (0, 1),
    Rule.VOCABULARY: (0, 1),
    Rule.ROW: (1, 1),
    Rule.GATE_UP: (0, 2),
    Rule.QKV: (0, 3),
    Rule.REPLICATE: WHOLE,
    Rule.EXPERTS_COLUMN: (0, 1),
    Rule.EXPERTS_ROW: (1, 1),
    Rule.EXPERTS_GATE_UP: (0, 2),
}

FUSED = "transformers cuts across the fused matrices and gathers what comes out; we cut each, so nothing is gathered"
LATENT = "transformers leaves latent attention whole; it is most of a layer outside its experts: cut by heads, as vLLM"
BY_VOCABULARY = "every engine cuts the embedding by vocabulary; transformers leaves it whole"
DIFFERENCES: dict[tuple[str, str], str] = {
    **{(family, "embed_tokens.weight"): BY_VOCABULARY for family in FAMILIES},
    ("phi3", "layers.*.self_attn.qkv_proj.weight"): FUSED,
    ("phi3", "layers.*.mlp.gate_up_proj.weight"): FUSED,
    ("glm4", "layers.*.mlp.gate_up_proj.weight"): FUSED,
    ("glm4v", "layers.*.mlp.gate_up_proj.weight"): FUSED,
    ("deepseek_v3", "layers.*.self_attn.q_b_proj.weight"): LATENT,
    ("deepseek_v3", "layers.*.self_attn.kv_b_proj.weight"): LATENT,
    ("deepseek_v3", "layers.*.self_attn.o_proj.weight"): LATENT,
}


def their_cut(style: str | None, name: str) -> Cut:
    """Return how a parallel style splits a parameter; see `transformers.distributed.tensor_parallel`."""
    if style is None or style in ("replicated_with_grad_allreduce", "sequence_parallel", "mla_kv_a_proj", "replicate"):
        return WHOLE
    if style in ("colwise", "colwise_rep", "colwise_gather_output"):
        return (0, 1)
    if style == "packed_colwise":
        return (0, 2)
    if style in ("rowwise", "rowwise_rep", "rowwise_split_input"):
        return WHOLE if name.endswith(".bias") else (1, 1)
    raise AssertionError(f"{name}: {style} is new here")


def parameters(family: str) -> list[tuple[str, str]]:
    """(name as transformers' modules have it, name below the decoder) of the language model's parameters, once each."""
    found: dict[str, str] = {}
    for name in make_tiny(family).state_dict():
        below = re.sub(r"^(model\.language_model\.|model\.)", "", name)
        if not below.startswith(("visual.", "vision_tower.", "multi_modal_projector.")):
            found.setdefault(re.sub(r"\.\d+\.", ".*.", below), name)
    return [(name, below) for below, name in found.items()]


def plans(family: str) -> tuple[dict[str, str], dict[str, str]]:
    """The language model's plans: of tensor parallelism (with that of its head), of expert parallelism."""
    import transformers

    tiny = FAMILIES[family]
    config: Any = getattr(transformers, tiny.config_class)().get_text_config()
    head = getattr(transformers, tiny.model_class)._tp_plan or {}
    return {**(config.base_model_tp_plan or {}), **head}, dict(config.base_model_ep_plan or {})


def style_of(below: str, plan: dict[str, str]) -> str | None:
    """A module's entry is for its weight and bias, a bare parameter has its own."""
    return plan.get(below) or plan.get(below.rpartition(".")[0] if below.endswith((".weight", ".bias")) else "")


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_agree_with_transformers_except_where_listed(family: str) -> None:
    plan, expert_plan = plans(family)
    differing = set()
    for name, below in parameters(family):
        rule = TABLES[family].rule_for(name)
        assert rule is not None, name
        if OURS[rule] != their_cut(style_of(below, plan), below):
            differing.add((family, below))
        # Experts are spread over ranks where their plan spreads them, and nowhere else.
        assert (experts_of(rule) == "all") == (expert_plan.get(below) == "grouped_gemm"), name
    assert differing == {row for row in DIFFERENCES if row[0] == family}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_entry_of_their_plan_is_left_out(family: str) -> None:
    """The comparison covers the whole plan, except entries for a module's input or output."""
    plan, _ = plans(family)
    compared = {below for _, below in parameters(family)}
    unseen = [
        module
        for module, style in plan.items()
        if style != "moe_tp_experts" and not compared & {module, f"{module}.weight"}
    ]
    assert unseen == []


@contextlib.contextmanager
def ranks_of_two(rank: int) -> Iterator[Any]:
    """A mesh of two ranks for torch, of which this process is one and the other is made up: enough to cut tensors."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    finally:
        distributed.destroy_process_group()


def cut_by_transformers(style: str, name: str, array: NDArray[np.uint16], mesh: Any) -> NDArray[np.uint16]:
    """Return what the style leaves of a parameter on this rank of the mesh."""
    import torch
    from transformers.distributed import expert_parallel, tensor_parallel  # noqa: F401  # they register their styles
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    module, parameter = torch.nn.Module(), "bias" if name.endswith(".bias") else "weight"
    module.register_parameter(parameter, torch.nn.Parameter(torch.from_numpy(array.copy()).view(torch.bfloat16)))
    ALL_PARALLEL_STYLES[style].shard_param(module, parameter, mesh)
    cut = getattr(module, parameter)
    local = cut.to_local() if hasattr(cut, "to_local") else cut
    found: NDArray[np.uint16] = local.detach().contiguous().view(torch.uint16).numpy()
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_has_the_same_part_as_with_transformers(
    family: str, rank: int, saved_families: dict[tuple[str, str], SavedFamily]
) -> None:
    """The code of transformers splits the same tensors."""
    plan, expert_plan = plans(family)
    saved = saved_families[family, "modules"]
    stored = saved.stored()
    held = saved.load(Layout(2))[1][rank]
    spread = saved.load(Layout(2, expert_parallel_size=2))[1][rank] if family in MOE_FAMILIES else {}
    cut = 0
    with ranks_of_two(rank) as mesh:
        for name, array in stored.items():
            below = re.sub(r"\.\d+\.", ".*.", re.sub(r"^(model\.language_model\.|model\.)", "", name))
            if (family, below) in DIFFERENCES:
                continue
            style = style_of(below, plan)
            expected = array if style is None else cut_by_transformers(style, name, array, mesh)
            assert np.array_equal(held[name], expected), name
            cut += expected.size < array.size
            if (expert_style := expert_plan.get(below)) is not None:
                expected = cut_by_transformers(expert_style, name, array, mesh)
                assert np.array_equal(spread[name], expected), name
                assert len(expected) == len(array) // 2
    assert cut > 0


def test_the_version_compared_with_is_the_pinned_one() -> None:
    root = Path(__file__).resolve().parents[2]
    assert f"transformers=={COMPARED_WITH}\n" in (root / "constraints.txt").read_text()
    assert f"transformers {COMPARED_WITH}" in (root / "docs" / "layouts.md").read_text()


@pytest.mark.parametrize("family", CONFIG_DEFAULTS)
def test_missing_fields_mean_what_the_config_class_says(family: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family).get_text_config()
    assert {name: getattr(config, name) for name in CONFIG_DEFAULTS[family]} == CONFIG_DEFAULTS[family]
