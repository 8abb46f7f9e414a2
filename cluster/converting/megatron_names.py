"""Megatron-Core's tensors as those that Hugging Face has: other names, split and cut. Pure.

    embedding.word_embeddings.weight             model.embed_tokens.weight, without the rows of padding
    decoder.layers.self_attention.linear_qkv     q_proj, k_proj and v_proj; a group has its queries, a key and a value
    decoder.layers.mlp.linear_fc1                gate_proj in the first half of the rows, up_proj in the second
    decoder.layers.mlp.experts.experts.linear_fc1   the same for each expert
    decoder.final_layernorm.weight               model.norm.weight

A tensor of `decoder.layers.` has the layers as its first axis. One of experts has the experts as its second. A
checkpoint saved with `non_homogeneous_layers` or `singleton_local_shards` has the numbers in the names instead, and the
halves of `linear_fc1` as `weight_w` and `weight_v`. The rules are those of `sharded_state_dict` in Megatron-Core 0.16
(transformer/transformer_block.py, mlp.py, moe/experts.py), and of its `SelfAttention` for the groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.converting.reshaping import cut, join, unstack
from cluster.converting.source import SourceTensor
from storage.problems import Problems, quote

# model_type of config.json: all have the same names
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")

_LAYER = re.compile(r"decoder\.layers\.(?:([0-9]{1,6})\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:([0-9]{1,6})\.)?(linear_fc[12]\..+)")
_WRAPPERS = ("module.", "model.")
# Not weights of the model: what training needs to go on.
_OTHER_STATE = re.compile(
    r".*\._extra_state(/.*)?|(chained_[0-9]+\.)?optimizer\..*|optimizer_state.*|param_state.*|rng_state.*"
    r"|rerun_state_machine_state.*|opt_param_scheduler.*"
)
_SAME = {  # in a layer, without any change
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
_BLOCKS = {"mlp.": "mlp.", "mlp.shared_experts.": "mlp.shared_expert."}  # feed-forward blocks besides the experts


@dataclass(frozen=True)
class Shape:
    """The numbers of a model's config.json that the names do not tell."""

    layers: int
    heads: int
    groups: int  # of heads that share a key and a value
    head_rows: int
    vocabulary: int
    experts: int = 0
    tied: bool = False  # the head is the embedding


def is_weight(name: str) -> bool:
    """Return whether a name of a Megatron checkpoint is of a weight, not of the optimizer or another state."""
    return not _OTHER_STATE.fullmatch(name)


def to_hugging_face(tensors: Sequence[SourceTensor], shape: Shape, problems: Problems) -> list[SourceTensor]:
    """Return a model's tensors as Hugging Face names and shapes them.

    Args:
        tensors: The tensors of the checkpoint, with Megatron's names. Those that are no weights are left out.
        shape: The numbers of the model's config.json.
        problems: Gets a sentence for each tensor that has no counterpart, does not suit `shape`, or is missing.

    Returns:
        The tensors, in the order of their layers.
    """
    found: dict[str, SourceTensor] = {}
    for tensor in _by_layer(tensors, shape, problems):
        for made in _translated(tensor, shape, problems):
            if made.name in found:
                problems.add(f"{quote(made.name)} comes from more than one tensor of the checkpoint")
            found[made.name] = made
    _check_complete(found, shape, problems)
    return list(found.values())


def _by_layer(tensors: Sequence[SourceTensor], shape: Shape, problems: Problems) -> Iterator[SourceTensor]:
    """Yield the weights one by one: with the numbers of layers and experts in the names, without their axes."""
    for tensor in tensors:
        if not is_weight(tensor.name):
            continue
        name = tensor.name
        while name.startswith(_WRAPPERS):
            name = name.partition(".")[2]
        tensor = replace(tensor, name=name)
        match = _LAYER.fullmatch(name)
        if match is None:
            yield tensor
        elif match[1] is not None:
            yield from _by_expert(tensor, int(match[1]), match[2], shape, problems)
        elif tensor.shape[:1] != (shape.layers,):
            problems.add(f"{quote(name)} has shape {tensor.shape}, but config.json says {shape.layers} layers")
        else:
            for number, one in enumerate(unstack(tensor)):
                yield from _by_expert(one, number, match[2], shape, problems)


def _by_expert(tensor: SourceTensor, layer: int, rest: str, shape: Shape, problems: Problems) -> Iterator[SourceTensor]:
    match = _EXPERT.fullmatch(rest)
    if match is None:
        yield replace(tensor, name=f"decoder.layers.{layer}.{rest}")
        return
    prefix = f"decoder.layers.{layer}.mlp.experts.experts"
    if match[1] is not None:
        yield replace(tensor, name=f"{prefix}.{int(match[1])}.{match[2]}")
    elif tensor.shape[:1] != (shape.experts,):
        problems.add(
            f"{quote(tensor.name)} has {tensor.shape} in a layer, but config.json says {shape.experts} experts"
        )
    else:
        for number, one in enumerate(unstack(tensor)):
            yield replace(one, name=f"{prefix}.{number}.{match[2]}")


def _translated(tensor: SourceTensor, shape: Shape, problems: Problems) -> list[SourceTensor]:
    """Return the tensors of Hugging Face that one tensor has."""
    if tensor.name == "decoder.final_layernorm.weight":
        return [replace(tensor, name="model.norm.weight")]
    if tensor.name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if tensor.shape[0] < shape.vocabulary:
            rows = f"{tensor.shape[0]} rows, but config.json says vocab_size {shape.vocabulary}"
            problems.add(f"{quote(tensor.name)} has {rows}")
            return []
        if tensor.name == "output_layer.weight" and shape.tied:
            return []
        name = "model.embed_tokens.weight" if tensor.name.startswith("embedding") else "lm_head.weight"
        return [replace(cut(tensor, 0, 0, shape.vocabulary), name=name)]
    match = _LAYER.fullmatch(tensor.name)
    if match is not None:
        prefix, rest = f"model.layers.{match[1]}.", match[2]
        if rest in _SAME:
            return [replace(tensor, name=prefix + _SAME[rest])]
        if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            return _split_attention(tensor, prefix, rest.rpartition(".")[2], shape, problems)
        expert = _EXPERT.fullmatch(rest)
        blocks = _BLOCKS if expert is None else {f"mlp.experts.experts.{expert[1]}.": f"mlp.experts.{expert[1]}."}
        for theirs, ours in blocks.items():
            if rest.startswith(theirs) and (split := _FEED_FORWARD.get(rest.removeprefix(theirs))):
                return split(tensor, prefix + ours, problems)
    problems.add(f"{quote(tensor.name)} has no counterpart in the families {', '.join(FAMILIES)}")
    return []


def _split_attention(
    tensor: SourceTensor, prefix: str, kind: str, shape: Shape, problems: Problems
) -> list[SourceTensor]:
    """Return query, key and value. A group of rows has the queries of its heads, then a key and a value."""
    queries = shape.heads // shape.groups * shape.head_rows
    group = queries + 2 * shape.head_rows
    if tensor.shape[:1] != (shape.groups * group,):
        heads = f"{shape.heads} heads of {shape.head_rows} in {shape.groups} groups make {shape.groups * group} rows"
        problems.add(f"{quote(tensor.name)} has shape {tensor.shape}, but config.json's {heads}")
        return []
    bounds = {"q": (0, queries), "k": (queries, queries + shape.head_rows), "v": (queries + shape.head_rows, group)}
    made = []
    for which, (start, end) in bounds.items():
        rows = (number * group for number in range(shape.groups))
        parts = (cut(tensor, 0, first + start, first + end) for first in rows)
        made.append(join(f"{prefix}self_attn.{which}_proj.{kind}", parts))
    return made


def _halves(tensor: SourceTensor, prefix: str, problems: Problems) -> list[SourceTensor]:
    rows = tensor.shape[0] if tensor.shape else 1
    if rows % 2:
        problems.add(f"{quote(tensor.name)} has {rows} rows; those of a gate and of a projection are equally many")
        return []
    kind = tensor.name.rpartition(".")[2]
    gate, up = cut(tensor, 0, 0, rows // 2), cut(tensor, 0, rows // 2, rows)
    return [replace(gate, name=f"{prefix}gate_proj.{kind}"), replace(up, name=f"{prefix}up_proj.{kind}")]


def _renamed(name: str) -> Callable[[SourceTensor, str, Problems], list[SourceTensor]]:
    return lambda tensor, prefix, _: [replace(tensor, name=prefix + name)]


_FEED_FORWARD: Mapping[str, Callable[[SourceTensor, str, Problems], list[SourceTensor]]] = {
    "linear_fc1.weight": _halves,
    "linear_fc1.bias": _halves,
    "linear_fc1.weight_w": _renamed("gate_proj.weight"),
    "linear_fc1.weight_v": _renamed("up_proj.weight"),
    "linear_fc1.bias_w": _renamed("gate_proj.bias"),
    "linear_fc1.bias_v": _renamed("up_proj.bias"),
    "linear_fc2.weight": _renamed("down_proj.weight"),
    "linear_fc2.bias": _renamed("down_proj.bias"),
}


def _check_complete(found: Mapping[str, SourceTensor], shape: Shape, problems: Problems) -> None:
    """Add a problem for each weight that every model has and this one lacks."""
    wanted = ["model.embed_tokens.weight", "model.norm.weight", *([] if shape.tied else ["lm_head.weight"])]
    in_layers = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{one}_proj" for one in "qkvo"))
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        wanted += (f"{prefix}{name}.weight" for name in in_layers)
        if f"{prefix}mlp.gate.weight" in found:
            blocks = [f"{prefix}mlp.experts.{number}" for number in range(shape.experts)]
        else:
            blocks = [f"{prefix}mlp"]
        wanted += (f"{block}.{name}_proj.weight" for block in blocks for name in ("gate", "up", "down"))
    missing = [name for name in wanted if name not in found]
    for name in missing:
        problems.add(f"{quote(name)} is missing: no tensor of the checkpoint has it")
    for name in found:
        match = re.match(r"model\.layers\.([0-9]+)\.", name)
        if match and int(match[1]) >= shape.layers:
            problems.add(f"{quote(name)} is of a layer beyond the {shape.layers} of config.json")
