"""Write real checkpoints of Megatron-Core (`torch_dist`), and the Hugging Face models that they hold.

Runs in an environment that has Megatron-Core: `python make_megatron_checkpoints.py FOLDER`. Every model gets
`FOLDER/NAME/hf/` with config and weights, and `FOLDER/NAME/megatron/`, which two ranks save. They are tensor parallel,
or what the last word of the name says (`LAYOUTS`). Before that, the logits are compared with those of transformers, so
that each weight is known to be in the right place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(OMP_NUM_THREADS="1", NVTE_DISABLE_TRITON_AUTOTUNING="1")

import torch
import torch.multiprocessing as mp
import transformers

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
CASES: dict[
    str, tuple[str, dict[str, Any], dict[str, Any]]
] = {  # class of transformers, its config, metadata of Megatron
    "llama": ("Llama", {}, {}),
    "llama-by-layer": ("Llama", {"tie_word_embeddings": True}, {"non_homogeneous_layers": True}),
    "qwen2": ("Qwen2", {}, {"singleton_local_shards": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}, {}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}, {}),
    "qwen3-moe-singleton": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}, {"singleton_local_shards": True}),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 40, "norm_topk_prob": True}, {}),
    "llama-pipeline": ("Llama", {}, {}),
    "qwen3-pipeline": ("Qwen3", {"tie_word_embeddings": True}, {"non_homogeneous_layers": True}),
    "qwen3-moe-experts": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}, {}),
    "qwen2-moe-experts": (
        "Qwen2Moe",
        {**MOE, "shared_expert_intermediate_size": 40, "norm_topk_prob": True},
        {"singleton_local_shards": True},
    ),
}


Cut = Callable[[torch.Tensor, int], torch.Tensor]


class Layout(NamedTuple):
    """The numbers of ranks that divide tensors, layers and experts. Their product is 2."""

    tensor: int = 1
    pipeline: int = 1
    experts: int = 1


LAYOUTS = {"pipeline": Layout(pipeline=2), "experts": Layout(experts=2)}
FIRST_STAGE = 1  # layers in the first of two pipeline stages; the second has the others
PADDED_VOCABULARY = 128
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 92, 65, 35]])


def layout_of(name: str) -> Layout:
    return LAYOUTS.get(name.rpartition("-")[2], Layout(tensor=2))


def layers_of(config: Any, layout: Layout, rank: int) -> range:
    """Return the layers that a rank has."""
    if layout.pipeline == 1:
        return range(config.num_hidden_layers)
    return range(FIRST_STAGE) if rank == 0 else range(FIRST_STAGE, config.num_hidden_layers)


def build(config: Any, layout: Layout, rank: int) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    family = config.model_type
    experts = getattr(config, "num_experts", None)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    made = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=family.startswith("qwen2"),
        qk_layernorm=family.startswith("qwen3"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.experts,
        num_layers_in_first_pipeline_stage=FIRST_STAGE if layout.pipeline > 1 else None,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        num_moe_experts=experts,
        moe_router_topk=2,
        moe_ffn_hidden_size=getattr(config, "moe_intermediate_size", None),
        moe_shared_expert_intermediate_size=shared,
        moe_shared_expert_gate=shared is not None,
        moe_router_load_balancing_type="none",
        sequence_parallel=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        config=made,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=experts, qk_layernorm=made.qk_layernorm, normalization="RMSNorm"
        ),
        vocab_size=PADDED_VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=int(config.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        pre_process=layout.pipeline == 1 or rank == 0,
        post_process=layout.pipeline == 1 or rank == 1,
    )


def gated(weights: dict[str, torch.Tensor], prefix: str, cut: Cut) -> dict[str, torch.Tensor]:
    """Return both matrices of a SwiGLU block, as a rank has them."""
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return {"linear_fc1.weight": torch.cat([cut(gate, 0), cut(up, 0)]), "linear_fc2.weight": cut(down, 1)}


def of_rank(weights: dict[str, torch.Tensor], config: Any, layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """Return the state dict of Megatron's model on one rank, from the weights of transformers."""

    def cut(whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.chunk(layout.tensor, dim)[rank % layout.tensor]

    padding = torch.full((PADDED_VOCABULARY - config.vocab_size, config.hidden_size), 7.0)
    first, last = (layout.pipeline == 1 or rank == stage for stage in range(2))
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    found = {}
    if first:
        embedding = torch.cat([weights["model.embed_tokens.weight"], padding])
        found["embedding.word_embeddings.weight"] = cut(embedding, 0)
    if last:
        found["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
    if last and not (first and config.tie_word_embeddings):  # a last stage has a copy of a tied embedding
        found["output_layer.weight"] = cut(torch.cat([weights[f"{head}.weight"], padding]), 0)
    groups = config.num_key_value_heads
    for place, number in enumerate(layers_of(config, layout, rank)):
        theirs, ours = f"model.layers.{number}", f"decoder.layers.{place}"
        for kind in ("weight", "bias"):
            parts = [weights.get(f"{theirs}.self_attn.{which}_proj.{kind}") for which in "qkv"]
            if parts[0] is not None:
                split = [one.reshape(groups, -1, *one.shape[1:]) for one in parts]
                fused = torch.cat(split, 1).flatten(0, 1)
                found[f"{ours}.self_attention.linear_qkv.{kind}"] = cut(fused, 0)
        found[f"{ours}.self_attention.linear_proj.weight"] = cut(weights[f"{theirs}.self_attn.o_proj.weight"], 1)
        found[f"{ours}.input_layernorm.weight"] = weights[f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.pre_mlp_layernorm.weight"] = weights[f"{theirs}.post_attention_layernorm.weight"]
        for which in "qk":
            if f"{theirs}.self_attn.{which}_norm.weight" in weights:
                norm = weights[f"{theirs}.self_attn.{which}_norm.weight"]
                found[f"{ours}.self_attention.{which}_layernorm.weight"] = norm
        blocks = {f"{theirs}.mlp": f"{ours}.mlp"}
        if f"{theirs}.mlp.gate.weight" in weights:
            found[f"{ours}.mlp.router.weight"] = weights[f"{theirs}.mlp.gate.weight"]
            share = config.num_experts // layout.experts
            start = rank % layout.experts * share
            blocks = {
                f"{theirs}.mlp.experts.{start + one}": f"{ours}.mlp.experts.local_experts.{one}" for one in range(share)
            }
        if f"{theirs}.mlp.shared_expert_gate.weight" in weights:
            found[f"{ours}.mlp.shared_experts.gate_weight"] = weights[f"{theirs}.mlp.shared_expert_gate.weight"]
            blocks[f"{theirs}.mlp.shared_expert"] = f"{ours}.mlp.shared_experts"
        for source, target in blocks.items():
            found |= {f"{target}.{name}": value for name, value in gated(weights, source, cut).items()}
    return found


def make_reference(name: str, folder: Path) -> None:
    """Write the model of transformers with random weights, and the logits that it has for some tokens."""
    kind, options, _ = CASES[name]
    torch.manual_seed(11)
    config = getattr(transformers, f"{kind}Config")(**COMMON, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_((torch.randn_like(one) * (0.2 if one.dim() > 1 else 1.0)).bfloat16())
        logits = model(TOKENS).logits
    model.save_pretrained(folder / name / "hf")
    torch.save(logits, folder / name / "logits.pt")


def logits_of(model: Any, layout: Layout, rank: int) -> torch.Tensor | None:
    """Return all logits for `TOKENS`, or None on a stage that does not have them."""
    mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)[None, None]
    if layout.pipeline > 1:
        hidden = torch.empty(8, 1, model.config.hidden_size)
        if rank == 1:
            torch.distributed.recv(hidden, 0)
            model.set_input_tensor(hidden)
        made = model(TOKENS, torch.arange(8)[None], mask)
        if rank == 0:
            torch.distributed.send(made, 1)
        return made if rank == 1 else None
    logits = model(TOKENS, torch.arange(8)[None], mask)
    if layout.tensor == 1:
        return logits
    pieces = [torch.empty_like(logits) for _ in range(2)]
    torch.distributed.all_gather(pieces, logits.contiguous())
    return torch.cat(pieces, -1)


def train(rank: int, port: int, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # Megatron asks for it, with and without a device
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.distributed.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils
    from safetensors.torch import load_file

    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    moe_utils.te_general_gemm = None  # without Transformer Engine the name is missing
    for name, (_, _, metadata) in CASES.items():
        layout = layout_of(name)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.experts,
            create_gloo_process_groups=False,
        )
        config = transformers.AutoConfig.from_pretrained(folder / name / "hf")
        model = build(config, layout, rank).eval()
        weights = load_file(folder / name / "hf" / "model.safetensors")
        wanted = of_rank(weights, config, layout, rank)
        state = {key: value for key, value in model.state_dict().items() if value is not None}
        if missing := wanted.keys() ^ state.keys():
            raise RuntimeError(f"{name}: {sorted(missing)}")
        model.load_state_dict(wanted, strict=False)
        with torch.no_grad():
            logits = logits_of(model, layout, rank)
        if logits is not None:
            expected = torch.load(folder / name / "logits.pt")
            torch.testing.assert_close(logits[..., : config.vocab_size], expected, atol=2e-3, rtol=2e-3)
        target = folder / name / "megatron" / "iter_0000007"
        if rank == 0:
            target.mkdir(parents=True)
        torch.distributed.barrier()
        state = {
            "model": model.bfloat16().sharded_state_dict(metadata=metadata),
            "iteration": 7,
            "checkpoint_version": 3.0,
            "args": Namespace(num_layers=config.num_hidden_layers, padded_vocab_size=PADDED_VOCABULARY),
        }
        dist_checkpointing.save(state, str(target))
        if rank == 0:
            (target.parent / "latest_checkpointed_iteration.txt").write_text("7")
            shutil.copy(folder / name / "hf" / "config.json", target.parent / "config.json")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    import socket

    output = Path(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    for case in CASES:
        make_reference(case, output)
    mp.spawn(train, args=(free_port, output), nprocs=2)
