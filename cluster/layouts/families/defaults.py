"""What a field of config.json means where it is missing, for families whose published files rely on it.

The config.json of Gemma 3's 4B model, for one, does not say how many heads there are. Values are those of the config
classes in transformers. Other families say what they need; where they do not, that is an error and no guess.
"""

from __future__ import annotations

from collections.abc import Mapping

_GEMMA: Mapping[str, int] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}

# `model_type` of the language model
CONFIG_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3_text": _GEMMA,
}
