"""How a model that was quantized on its way in would say so: `quantization_config` of its config.json. Pure.

In the form of compressed-tensors, from which vLLM, SGLang and transformers build the layers that hold such weights;
for nf4 in that of bitsandbytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.layouts.module_names import HEADS
from cluster.plans.cut_model import CutModel
from cluster.precision import nf4
from cluster.precision.recipes import GROUP, SCHEMES, Precision, is_weight, skipper
from storage.checkpoints.amax import is_weight_matrix
from storage.checkpoints.model_index import Tensor

_SHOWN_LENGTHS = 4
# The inputs of fp8 layers are quantized as they come, a scale for each token: kernels multiply fp8 by fp8.
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def quantization_config(cut: CutModel) -> dict[str, Any] | None:
    """For config.json; None when nothing is quantized. `ignore` (nf4: `llm_int8_skip_modules`) names every other
    matrix.
    """
    schemes = [kind.recipe.scheme if kind.recipe else "" for kind in cut.kinds]
    used = next(filter(None, schemes), "")
    if not used:
        return None
    scheme = SCHEMES[used]
    form = "pack-quantized" if scheme.packed else "float-quantized"
    left = [not of and len(kind.shape) == 2 for kind, of in zip(cut.kinds, schemes, strict=True)]
    names = (name for name, kind in zip(cut.names, cut.kind.tolist(), strict=True) if left[kind])
    ignored = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    if not any(part in HEADS for name in cut.names for part in name.split(".")):
        ignored.append(HEADS[0])  # it is the embedding: a layer all the same, which has nothing of its own to read
    if scheme.scale == "block":
        computed = next(kind.recipe.dtype for kind in cut.kinds if kind.recipe is not None and kind.recipe.scheme)
        return _bitsandbytes(nf4.DTYPES[computed], ignored)
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": scheme.bits,
            "type": "int" if scheme.packed else "float",
            "strategy": scheme.scale,
            "group_size": GROUP if scheme.scale == "group" else None,
            "symmetric": True,
            "dynamic": False,
        },
        "input_activations": None if scheme.packed else dict(_TOKENS),
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _bitsandbytes(dtype: str, ignored: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ignored,
        "llm_int8_threshold": 6.0,
    }


def left_for_rows(tensors: Sequence[Tensor], precision: Precision) -> str:
    """For people: how many weight matrices a scheme leaves as they are because of their rows; "" when none."""
    if not precision.quantization:
        return ""
    is_skipped = skipper(precision.skip)
    weights = [tensor for tensor in tensors if is_weight_matrix(tensor) and not is_skipped(tensor.name)]
    left = [tensor for tensor in weights if not is_weight(tensor, precision.quantization)]
    if not left:
        return ""
    lengths = sorted({tensor.shape[-1] for tensor in left})
    more = ", ..." if len(lengths) > _SHOWN_LENGTHS else ""
    unit = SCHEMES[precision.quantization].unit
    return (
        f"{precision.quantization} leaves {len(left)} of {len(weights)} weight matrices as they are: their rows of "
        f"{', '.join(map(str, lengths[:_SHOWN_LENGTHS]))}{more} are no multiple of {unit}"
    )


def precision_of(cut: CutModel) -> str:
    """What tensors become, for people: "cast to BF16: 3 tensors, int4: 224 tensors"."""
    counts = Counter[str]()
    for kind, count in zip(cut.kinds, np.bincount(cut.kind, minlength=len(cut.kinds)).tolist(), strict=True):
        if kind.recipe is not None:
            counts[kind.recipe.scheme or f"cast to {kind.recipe.dtype}"] += count
    return ", ".join(f"{what}: {count} tensors" for what, count in sorted(counts.items())) or "as stored"
