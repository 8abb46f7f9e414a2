"""The tensors that ranks of FSDP2 would store are those that `save_pretrained` stores of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")

from tests.support.gloo_ranks import run_ranks
from tests.support.hf_models import FAMILIES, make_tiny

pytestmark = pytest.mark.slow
RANKS = 3  # cuts experts and rows unevenly


def test_fsdp_shards_become_what_save_pretrained_writes(tmp_path: Path) -> None:
    run_ranks(RANKS, "tests.support.saving_ranks:write_parts", str(tmp_path), families=list(FAMILIES))
    for family in FAMILIES:
        make_tiny(family).save_pretrained(tmp_path / family)
        expected = {
            name: t for file in (tmp_path / family).glob("*.safetensors") for name, t in load_file(file).items()
        }
        stored = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
        count = dict.fromkeys(expected, 0)
        for file in tmp_path.glob(f"{family}-*.safetensors"):
            for key, values in load_file(file).items():
                name, _, at = key.partition("@")
                start = [int(each) for each in at.split(",") if each]
                stored[name][tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))] = values
                count[name] += values.numel()
        wrong = [name for name in expected if not torch.equal(expected[name], stored[name])]
        assert not wrong, (family, wrong[:5])
        assert count == {name: tensor.numel() for name, tensor in expected.items()}, family
