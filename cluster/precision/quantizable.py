"""Which tensors a quantization takes: matrices of linear layers, and of experts. Pure.

A format says of linear layers how they are quantized, and readers look nowhere else. What is called `x.weight` and is
none (embeddings, routers, which are modules of their own) would be read as plain numbers: it is never taken.
Experts in one tensor (expert, out, in) are taken only where they are asked for: no library reads them quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.errors import ConfigError
from cluster.layouts.module_names import HEADS, OTHER_EMBEDDINGS, ROUTERS, TOKEN_EMBEDDINGS, TOWERS
from cluster.layouts.rules import parse_rules
from storage.checkpoints.amax import is_stacked, is_weight_matrix
from storage.checkpoints.model_index import Tensor

DEFAULT = "default"  # among the patterns to skip: those of the field, see SKIPPED_PARTS
_GATE_OF_ONE = "shared_expert_gate"  # a linear layer with one output
# Tables with a row for each token or place, and routers.
NO_LINEAR_LAYERS = frozenset((*TOKEN_EMBEDDINGS, *OTHER_EMBEDDINGS, *ROUTERS, "relative_attention_bias")) - {
    _GATE_OF_ONE
}
# Besides, a tensor below any module of these names stays as it is: heads, towers of other inputs.
SKIPPED_PARTS = frozenset((*HEADS, *TOWERS, _GATE_OF_ONE))
# model_type -> the module whose weights are (in, out) and not (out, in), as every format has it; "": all
STORED_BY_INPUT = {
    **dict.fromkeys(("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"), ""),
    **dict.fromkeys(("gpt_oss", "llama4", "llama4_text"), "experts"),
}


def is_matrix(tensor: Tensor) -> bool:
    """Whether it can be quantized at all."""
    linear = is_stacked(tensor.name, tensor.shape) or NO_LINEAR_LAYERS.isdisjoint(tensor.name.split("."))
    return linear and is_weight_matrix(tensor)


def skipper(patterns: Sequence[str]) -> Callable[[Tensor], bool]:
    """Whether patterns say of a tensor that it stays as it is."""
    find = parse_rules({pattern: "replicate" for pattern in patterns if pattern != DEFAULT}).finder()
    usual = DEFAULT in patterns

    def is_skipped(tensor: Tensor) -> bool:
        if usual and (is_stacked(tensor.name, tensor.shape) or not SKIPPED_PARTS.isdisjoint(tensor.name.split("."))):
            return True
        return find(tensor.name) is not None

    return is_skipped


def check_rows(tensor: Tensor, family: str) -> None:
    """Rows of a weight are outputs, in every format that is written here; some families store them the other way.

    Raises ConfigError for theirs.
    """
    whose = STORED_BY_INPUT.get(family)
    if whose is not None and (not whose or whose in tensor.name.split(".")):
        raise ConfigError(
            f"{tensor.name!r:.200} cannot be quantized: {family} stores it with a row for each input",
            hint=f'leave it as it is: skip_quantization=["default", "**.{whose}.*"]' if whose else "load it as it is",
        )
