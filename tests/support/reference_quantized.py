"""Whole tensors as compressed-tensors quantizes them, to compare slices with that were quantized on their way in."""

from __future__ import annotations

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


def scheme_args(scheme: str) -> QuantizationArgs:
    return QuantizationArgs.model_validate({**ARGS[scheme], "symmetric": True, "dynamic": False})


def quantized(weight: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """One (out, in) matrix as the library compresses it, by the suffix of each tensor's name."""
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


def restored(tensors: dict[str, torch.Tensor], scheme: str, name: str = "weight") -> torch.Tensor:
    """The weight that the library's own compressor makes of them again."""
    from compressed_tensors.compressors import BaseCompressor

    plain = QuantizationScheme(targets=["Linear"], weights=scheme_args(scheme))
    kind = "pack-quantized" if scheme.startswith("int") else "naive-quantized"
    state = {f"{name}{suffix}": tensor for suffix, tensor in tensors.items()}
    result: torch.Tensor = BaseCompressor.get_value_from_registry(kind).decompress(state, plain)[name]
    return result
