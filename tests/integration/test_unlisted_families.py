"""A cluster loads an unknown family with rules that the caller reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cluster
from tests.support.family_checkpoints import SavedFamily, needs_transformers
from tests.support.hf_models import DENSE_SIZES, TinyFamily, save_model
from tests.support.ray_clusters import Longshore

pytestmark = [pytest.mark.slow, needs_transformers]


def test_rules_travel_with_the_request(longshore: Longshore, tmp_path: Path) -> None:
    import torch

    folder = save_model(TinyFamily("Starcoder2Config", "Starcoder2ForCausalLM", DENSE_SIZES), tmp_path)
    stored = SavedFamily.open(folder).stored()
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with cluster.load(folder, **sizes, device="cpu", address=longshore.address) as model:
        held = [
            {name: tensor.view(torch.uint16).numpy() for name, tensor in model.state_dict(rank).items()}
            for rank in model.ranks
        ]
        with cluster.load(folder, **sizes, device="cpu", address=longshore.address) as again:
            assert again.model_id == model.model_id  # the same rules, so the same model
        states = [m.progress.state for m in longshore.status().listed if m.progress.uri.endswith(str(folder))]
        assert states == ["ready"]  # what was refused for want of rules, and asked for again with them, is no failure
    for stage in (0, 1):
        first, second = held[2 * stage : 2 * stage + 2]
        assert first.keys() == second.keys()
        assert len(first) > 20
    for name, array in stored.items():
        first, second = next(pair for pair in (held[:2], held[2:]) if name in pair[0])
        if first[name].shape == array.shape:
            assert np.array_equal(first[name], array)
            assert np.array_equal(second[name], array)
            assert "norm" in name or name.endswith(("o_proj.bias", "c_proj.bias"))
        else:
            axis = 1 if name.endswith(("o_proj.weight", "c_proj.weight")) else 0
            assert np.array_equal(np.concatenate([first[name], second[name]], axis), array)


def test_tensors_without_a_rule_are_refused(longshore: Longshore, tmp_path: Path) -> None:
    folder = save_model(TinyFamily("Starcoder2Config", "Starcoder2ForCausalLM", DENSE_SIZES), tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"starcoder2"', '"made_up"'))
    with pytest.raises(cluster.UnknownFamily, match="made_up") as caught:
        cluster.load(folder, tensor_parallel_size=2, device="cpu", address=longshore.address)
    assert "layout_rules={" in caught.value.hint
    (refused,) = [model for model in longshore.status().ended if model.progress.uri.endswith(str(folder))]
    assert (refused.progress.state, refused.rank_hosts, refused.holders) == ("failed", (), 0)
    assert "made_up" in refused.error
