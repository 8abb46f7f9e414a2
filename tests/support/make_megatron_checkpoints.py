"""Write real checkpoints of Megatron-Core (`torch_dist`), and the Hugging Face models that they hold.

Runs in an environment that has Megatron-Core: `python make_megatron_checkpoints.py FOLDER`. Every model gets
`FOLDER/NAME/hf/` with config and weights, and `FOLDER/NAME/megatron/`, which two tensor parallel ranks save. Before
that, the logits are compared with those of transformers, so that each weight is known to be in the right place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

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
}
PADDED_VOCABULARY = 128
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 92, 65, 35]])


def build(config: Any) -> Any:
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
        tensor_model_parallel_size=2,
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
    )


def cut(whole: torch.Tensor, rank: int, dim: int = 0) -> torch.Tensor:
    return whole.chunk(2, dim)[rank]


def gated(weights: dict[str, torch.Tensor], prefix: str, rank: int) -> dict[str, torch.Tensor]:
    """Return both matrices of a SwiGLU block, as a rank has them."""
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return {"linear_fc1.weight": torch.cat([cut(gate, rank), cut(up, rank)]), "linear_fc2.weight": cut(down, rank, 1)}


def of_rank(weights: dict[str, torch.Tensor], config: Any, rank: int) -> dict[str, torch.Tensor]:
    """Return the state dict of Megatron's model on one rank, from the weights of transformers."""
    padding = torch.full((PADDED_VOCABULARY - config.vocab_size, config.hidden_size), 7.0)
    found = {
        "embedding.word_embeddings.weight": cut(torch.cat([weights["model.embed_tokens.weight"], padding]), rank),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        found["output_layer.weight"] = cut(torch.cat([weights["lm_head.weight"], padding]), rank)
    groups = config.num_key_value_heads
    for number in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{number}", f"decoder.layers.{number}"
        for kind in ("weight", "bias"):
            parts = [weights.get(f"{theirs}.self_attn.{which}_proj.{kind}") for which in "qkv"]
            if parts[0] is not None:
                split = [one.reshape(groups, -1, *one.shape[1:]) for one in parts]
                fused = torch.cat(split, 1).flatten(0, 1)
                found[f"{ours}.self_attention.linear_qkv.{kind}"] = cut(fused, rank)
        found[f"{ours}.self_attention.linear_proj.weight"] = cut(weights[f"{theirs}.self_attn.o_proj.weight"], rank, 1)
        found[f"{ours}.input_layernorm.weight"] = weights[f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.pre_mlp_layernorm.weight"] = weights[f"{theirs}.post_attention_layernorm.weight"]
        for which in "qk":
            if f"{theirs}.self_attn.{which}_norm.weight" in weights:
                norm = weights[f"{theirs}.self_attn.{which}_norm.weight"]
                found[f"{ours}.self_attention.{which}_layernorm.weight"] = norm
        blocks = {f"{theirs}.mlp": f"{ours}.mlp"}
        if f"{theirs}.mlp.gate.weight" in weights:
            found[f"{ours}.mlp.router.weight"] = weights[f"{theirs}.mlp.gate.weight"]
            experts = range(config.num_experts)
            blocks = {f"{theirs}.mlp.experts.{one}": f"{ours}.mlp.experts.local_experts.{one}" for one in experts}
        if f"{theirs}.mlp.shared_expert_gate.weight" in weights:
            found[f"{ours}.mlp.shared_experts.gate_weight"] = weights[f"{theirs}.mlp.shared_expert_gate.weight"]
            blocks[f"{theirs}.mlp.shared_expert"] = f"{ours}.mlp.shared_experts"
        for source, target in blocks.items():
            found |= {f"{target}.{name}": value for name, value in gated(weights, source, rank).items()}
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


def train(rank: int, port: int, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # Megatron asks for it, with and without a device
    torch.cuda.synchronize = lambda *_: None
    torch.distributed.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils
    from safetensors.torch import load_file

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    moe_utils.te_general_gemm = None  # without Transformer Engine the name is missing
    for name, (_, _, metadata) in CASES.items():
        config = transformers.AutoConfig.from_pretrained(folder / name / "hf")
        model = build(config).eval()
        weights = load_file(folder / name / "hf" / "model.safetensors")
        wanted = of_rank(weights, config, rank)
        state = {key: value for key, value in model.state_dict().items() if value is not None}
        if missing := wanted.keys() ^ state.keys():
            raise RuntimeError(f"{name}: {sorted(missing)}")
        model.load_state_dict(wanted, strict=False)
        with torch.no_grad():
            mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)[None, None]
            logits = model(TOKENS, torch.arange(8)[None], mask)
        pieces = [torch.empty_like(logits) for _ in range(2)]
        torch.distributed.all_gather(pieces, logits.contiguous())
        torch.testing.assert_close(
            torch.cat(pieces, -1)[..., : config.vocab_size],
            torch.load(folder / name / "logits.pt"),
            atol=2e-3,
            rtol=2e-3,
        )
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
