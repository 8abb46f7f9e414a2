"""What modules are called, from model to model: the names by which ends, towers and routers are known. Data.

A name is one part of a dotted tensor name. Pipeline stages, device maps and precision all go by these.
"""

from __future__ import annotations

# One row per token; a head that is not stored is the same tensor.
TOKEN_EMBEDDINGS = ("shared", "embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embeddings")
OTHER_EMBEDDINGS = (
    *("wpe", "embed_positions", "position_embeddings", "position_embedding", "pos_embed"),
    *("embed_tokens_per_layer", "patch_embed", "patch_embedding"),
)
HEADS = ("lm_head", "embed_out", "score", "classifier")
ROUTERS = ("gate", "router", "shared_expert_gate")
# Of other inputs than tokens, with what brings their outputs to the width of the language model.
TOWERS = (
    *("visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector", "mm_projector", "connector"),
    *("embed_vision", "embed_audio", "image_newline"),
)
