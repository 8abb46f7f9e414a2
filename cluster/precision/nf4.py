"""bitsandbytes' NF4: which sixteen values, which tensors, and what the one of them says that is no array. Pure.

    x.weight                                  uint8 (n / 2, 1)     two numbers a byte, the first in the high half
    x.weight.absmax                           float32 (n / 64,)    max |w| of 64 weights in a row
    x.weight.quant_map                        float32 (16,)        VALUES
    x.weight.quant_state.bitsandbytes__nf4    uint8                JSON: block size, dtype and shape of the weight

That is how bitsandbytes writes it, and transformers and vLLM read it. Everything is flat, so a rank's slice is an NF4
tensor of its own, of its own shape; its numbers are those of the whole wherever rows are cut between blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

BLOCK = 64  # weights, one after the other, that share an absmax
# Quantiles of the normal distribution, 0 and both ends among them: a constant of the format.
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
ABSMAX, QUANT_MAP, STATE = ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # that weights are made of it again


def packed_state(dtype: str, shape: Sequence[int]) -> bytes:
    """The JSON, byte for byte as bitsandbytes writes it. `dtype`: safetensors name; `shape`: of the rank's weight."""
    said = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": DTYPES[dtype], "shape": list(shape)}
    return json.dumps(said).encode()
