"""Whole tensors as the library compressed-tensors quantizes them: the reference for slices quantized during a load.

NF4 is bitsandbytes', which is not everywhere: here it is written out, and `tests/unit/test_nf4.py` compares the two.
"""

from __future__ import annotations

import json

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams

ARGS = {
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8_tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
}


NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def scheme_args(scheme: str) -> QuantizationArgs:
    return QuantizationArgs.model_validate({**ARGS[scheme], "symmetric": True, "dynamic": False})


def quantized(weight: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """One (out, in) matrix as the library compresses it, by the suffix of each tensor's name."""
    if scheme == "nf4":
        return nf4(weight)
    args = scheme_args(scheme)
    if scheme == "fp8_tensor":
        least, most = torch.aminmax(weight)
    elif scheme == "int4":
        groups = weight.unflatten(-1, (-1, 128))
        least, most = groups.amin(-1), groups.amax(-1)
    else:
        least, most = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    scale, zero_point = calculate_qparams(least, most, args)
    dtype = args.pytorch_dtype()
    values = quantize(weight, scale, zero_point, args, dtype=dtype)
    if dtype is not torch.int8:
        return {"": values, "_scale": scale}
    packed = pack_to_int32(values, args.num_bits)
    return {"_packed": packed, "_scale": scale, "_shape": torch.tensor(weight.shape)}


def nf4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each weight the nearest of sixteen values times the largest of its block; of two as near, the less."""
    blocks = weight.float().reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    scaled = blocks * (1.0 / absmax.clamp(min=1e-38))[:, None]
    values = torch.tensor(NF4_VALUES)
    middles = (values[:-1] + values[1:]) / 2
    numbers = (scaled.unsqueeze(-1) > middles).sum(-1).reshape(-1, 2)
    said = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    return {
        "": (numbers[:, :1] * 16 + numbers[:, 1:]).to(torch.uint8),
        ".absmax": absmax,
        ".quant_map": values,
        ".quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
    }


def restored_nf4(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight again."""
    said = json.loads(bytes(tensors[".quant_state.bitsandbytes__nf4"].tolist()))
    numbers = torch.cat((tensors[""] >> 4, tensors[""] & 15), 1).long()
    blocks = tensors[".quant_map"][numbers].reshape(-1, said["blocksize"]) * tensors[".absmax"][:, None]
    return blocks.reshape(said["shape"]).to(getattr(torch, said["dtype"]))


def restored(tensors: dict[str, torch.Tensor], scheme: str, name: str = "weight") -> torch.Tensor:
    """The weight that the library's own compressor makes of them again."""
    if scheme == "nf4":
        return restored_nf4(tensors)
    from compressed_tensors.compressors import BaseCompressor

    plain = QuantizationScheme(targets=["Linear"], weights=scheme_args(scheme))
    kind = "pack-quantized" if scheme.startswith("int") else "naive-quantized"
    state = {f"{name}{suffix}": tensor for suffix, tensor in tensors.items()}
    result: torch.Tensor = BaseCompressor.get_value_from_registry(kind).decompress(state, plain)[name]
    return result
