"""transformers models as stages of a pipeline, and the logits of stages that hand hidden states to each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_TOWERS = ("visual", "vision_tower", "multi_modal_projector")
_LAYER = re.compile(r"layers\.([0-9]+)\.")


class Skip(torch.nn.Module):
    """In place of what another stage has: hands on what it is given."""

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
    """Of two stages: the first one's hidden states go into the second as its embeddings."""
    first, last = stages
    with torch.no_grad():
        hidden = first.model(input_ids=ids).last_hidden_state
        logits: torch.Tensor = last(inputs_embeds=hidden).logits
    return logits
