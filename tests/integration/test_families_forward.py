"""Models of transformers filled from Longshore's slices compute what `from_pretrained`'s do, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.layouts.mesh import Layout
from tests.support.hf_models import FAMILIES, MOE_FAMILIES, save_tiny
from tests.support.shards import shards_of

pytestmark = pytest.mark.slow


_TOWERS = ("visual", "vision_tower", "multi_modal_projector")
_LAYER = re.compile(r"layers\.([0-9]+)\.")


class Skip(torch.nn.Module):
    """Replaces the layers of another stage: returns its input."""

    def forward(self, first: Any = None, *_: Any, **named: Any) -> Any:
        return named["hidden_states"] if first is None else first


def cut_to_stage(model: Any, names: Iterable[str], *, first: bool) -> Any:
    """A causal language model, maybe inside a multimodal one, cut down to the stage that has these checkpoint names."""
    text = getattr(model.model, "language_model", model.model)
    mine = [name for name in names if not any(tower in name for tower in _TOWERS)]
    here = {int(match[1]) for name in mine if (match := _LAYER.search(name))}
    for number in range(len(text.layers)):
        if number not in here:
            text.layers[number] = Skip()
    if first:
        text.norm, model.lm_head = Skip(), Skip()
        model.all_tied_weights_keys = {}
        return model
    if not model.all_tied_weights_keys:  # else the embedding is the head
        text.embed_tokens = Skip()
    for tower in _TOWERS:
        if hasattr(model.model, tower):
            setattr(model.model, tower, Skip())
    return model


def chained_logits(stages: Sequence[Any], ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of two stages: the first one's hidden states are the second's embeddings."""
    first, last = stages
    with torch.no_grad():
        hidden = first.model(input_ids=ids).last_hidden_state
        logits: torch.Tensor = last(inputs_embeds=hidden).logits
    return logits


IDS = torch.arange(3, 19)[None]


def classes(family: str) -> tuple[Any, Any]:
    """(of the config, of the model)."""
    import transformers

    return getattr(transformers, FAMILIES[family].config_class), getattr(transformers, FAMILIES[family].model_class)


def on_meta(family: str, folder: Path) -> Any:
    config_class, model_class = classes(family)
    with torch.device("meta"):
        return model_class._from_config(config_class.from_pretrained(folder)).eval()


@pytest.fixture(params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Any]:
    """(family, folder with the checkpoint as the hub has it, the model that `from_pretrained` makes of it)."""
    save_tiny(request.param, tmp_path)
    return request.param, tmp_path, classes(request.param)[1].from_pretrained(tmp_path).eval()


def test_logits_of_one_rank_and_of_two_stages(saved: tuple[str, Path, Any]) -> None:
    family, folder, wanted = saved
    with torch.no_grad():
        expected = wanted(input_ids=IDS).logits
    (shard,) = shards_of(folder)
    model = on_meta(family, folder)
    done = shard.into(model, convert=True)
    own = {tensor.untyped_storage().data_ptr() for tensor in shard.values()}
    copied = {name for name, tensor in model.state_dict().items() if tensor.untyped_storage().data_ptr() not in own}
    assert copied == set(done.copied)
    assert bool(copied) == (family in MOE_FAMILIES)  # experts that transformers stacks
    assert all("experts" in name or name.endswith("e_score_correction_bias") for name in copied)  # float32 to it
    for of in (torch.nn.Module.named_parameters, torch.nn.Module.named_buffers):  # a tower's too, and rotary ones
        found, there = dict(of(model)), dict(of(wanted))
        assert found.keys() == there.keys()
        assert not [name for name in there if not torch.equal(found[name], there[name])]
        assert not [name for name in there if found[name].dtype != there[name].dtype]
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, expected)

    stages = []
    for rank in shards_of(folder, Layout(pipeline_parallel_size=2)):
        stage = cut_to_stage(on_meta(family, folder), rank, first=rank.coords.stage == 0)
        rank.into(stage, convert=True)  # strict: a stage has all that its part of the model needs, and no more
        stages.append(stage)
    assert torch.equal(chained_logits(stages, IDS), expected)
