"""Quantized modules as their formats define them: packed from random integers, and taken apart again.

Written from the definitions of the formats, with nothing of ours: a rank's parts are dequantized as the whole module
is, knowing no more than the rank does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.layouts.layout import decide_layout
from cluster.layouts.mesh import Layout, RankCoords
from cluster.layouts.model_config import ModelConfig, QuantizationConfig
from cluster.layouts.region import Region
from cluster.layouts.rules import Rules, region_of
from cluster.planning.make_plan import build_load_plan
from storage.checkpoints.model_index import Tensor
from tests.support.plan_oracle import check_plan
from tests.support.planned_models import carry_out, store_arrays

Array = NDArray[Any]
Stored = dict[str, tuple[str, Array]]  # name -> (safetensors dtype, values)
Floats = NDArray[np.float32]

_NUMPY: dict[str, Any] = {"I32": np.int32, "I64": np.int64, "I8": np.int8, "U8": np.uint8, "F8_E4M3": np.uint8}
_NUMPY |= {"F16": np.float16, "F32": np.float32, "BF16": np.uint16}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of the 8 values in a word, from the lowest bits up


def pack(values: NDArray[np.int64], bits: int) -> NDArray[np.int32]:
    """Rows of small integers as a stream of bits, lowest first, in 32-bit words: (n, m) -> (n, ceil(m * bits / 32))."""
    stream = (values[..., None] >> np.arange(bits)) & 1
    stream = stream.reshape(len(values), -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view(np.int32)


def unpack(words: NDArray[np.int32], bits: int, count: int) -> NDArray[np.int64]:
    """The first `count` integers of each row."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    stream = stream[:, : count * bits].reshape(len(words), count, bits)
    values: NDArray[np.int64] = (stream.astype(np.int64) << np.arange(bits)).sum(axis=2)
    return values


@dataclass(frozen=True)
class Grouped:
    """GPTQ or AWQ. In memory of a rank: shapes say the rest."""

    bits: int
    group: int  # inputs; 0: all
    desc_act: bool = False

    def gptq(self, outputs: int, inputs: int, seed: int = 0) -> Stored:
        """A module of random numbers; the fields' names without the module's."""
        values, zeros, scales = self._random(outputs, inputs, seed)
        g_idx = np.arange(inputs) // (self.group or inputs)
        if self.desc_act:
            g_idx = np.random.default_rng(seed + 1).permutation(g_idx)
        return {
            "qweight": ("I32", pack(values.T, self.bits).T.copy()),
            "qzeros": ("I32", pack(np.maximum(zeros, 1) - 1, self.bits)),
            "scales": ("F16", scales),
            "g_idx": ("I32", g_idx.astype(np.int32)),
        }

    def gptq_weight(self, part: Mapping[str, Array]) -> Floats:
        """(out, in) of a module or of a rank's part. Without desc_act g_idx is not asked, as the kernels do not."""
        scales = part["scales"].astype(np.float32)
        inputs = len(part["g_idx"])
        values = unpack(part["qweight"].T, self.bits, inputs).T
        zeros = unpack(part["qzeros"], self.bits, scales.shape[1]) + 1
        groups = part["g_idx"].astype(int) if self.desc_act else np.arange(inputs) // (self.group or inputs)
        weight: Floats = ((values - zeros[groups]).astype(np.float32) * scales[groups]).T
        return weight

    def awq(self, outputs: int, inputs: int, seed: int = 0) -> Stored:
        values, zeros, scales = self._random(outputs, inputs, seed)
        return {
            "qweight": ("I32", pack(self._reorder(values, AWQ_ORDER), self.bits)),
            "qzeros": ("I32", pack(self._reorder(zeros, AWQ_ORDER), self.bits)),
            "scales": ("F16", scales),
        }

    def awq_weight(self, part: Mapping[str, Array]) -> Floats:
        scales = part["scales"].astype(np.float32)
        outputs, inputs = scales.shape[1], len(part["qweight"])
        back = list(np.argsort(AWQ_ORDER))
        values = self._reorder(unpack(part["qweight"], self.bits, outputs), back)
        zeros = self._reorder(unpack(part["qzeros"], self.bits, outputs), back)
        groups = np.arange(inputs) // (self.group or inputs)
        weight: Floats = ((values - zeros[groups]).astype(np.float32) * scales[groups]).T
        return weight

    def _random(self, outputs: int, inputs: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
        random = np.random.default_rng(seed)
        groups = -(-inputs // (self.group or inputs))
        values = random.integers(0, 1 << self.bits, (inputs, outputs))
        zeros = random.integers(0, 1 << self.bits, (groups, outputs))
        return values, zeros, random.uniform(0.01, 1, (groups, outputs)).astype(np.float16)

    @staticmethod
    def _reorder(values: NDArray[np.int64], order: list[int]) -> NDArray[np.int64]:
        return values.reshape(len(values), -1, 8)[:, :, order].reshape(values.shape)


def fp8_table() -> Floats:
    """The number that each byte means as e4m3."""
    import torch

    table: Floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    return table


def fp8_blocks(shape: tuple[int, ...], block: int, seed: int = 0) -> Stored:
    """A weight in blocks of `block` x `block` as DeepSeek stores it; the last ones may be cut short."""
    random = np.random.default_rng(seed)
    counts = (*shape[:-2], -(-shape[-2] // block), -(-shape[-1] // block))
    weight = random.integers(0, 0x7F, shape).astype(np.uint8)
    return {
        "": ("F8_E4M3", weight),
        "_scale_inv": ("F32", random.uniform(0.01, 1, counts).astype(np.float32)),
    }


def fp8_weight(part: Mapping[str, Array], block: int) -> Floats:
    weight = fp8_table()[part[""]]
    scale = part["_scale_inv"].astype(np.float32).repeat(block, axis=-2).repeat(block, axis=-1)
    scaled: Floats = weight * scale[..., : weight.shape[-2], : weight.shape[-1]]
    return scaled


def config_of(quantization: Mapping[str, object], **fields: object) -> ModelConfig:
    """A config.json that says this of its quantization."""
    return ModelConfig(quantization=QuantizationConfig.model_validate(quantization), **fields)


def grouped_config(method: str, kind: Grouped, **fields: object) -> ModelConfig:
    """The same of GPTQ or AWQ."""
    said = {"quant_method": method, "bits": kind.bits, "group_size": kind.group or -1, "desc_act": kind.desc_act}
    return config_of(said, **fields)


def load_parts(
    stored: Stored, layout: Layout, rules: Rules, config: ModelConfig, chunk_bytes: int = 1 << 10
) -> list[dict[str, Array]]:
    """Return what each rank holds in memory after a load, by tensor name."""
    model = store_arrays(stored, shards=2, chunk_bytes=chunk_bytes)
    plan = build_load_plan(model.index, layout, rules, config)
    if problems := check_plan(plan):
        raise ValueError(str(problems))
    ranks = []
    for rank in plan.ranks:
        raw, _ = carry_out(plan, rank, model.files)
        ranks.append({one.name: raw[one.name].view(_NUMPY[one.dtype]).reshape(one.sizes) for one in rank.slices})
    return ranks


def plain_region(
    name: str, shape: tuple[int, ...], coords: RankCoords, layout: Layout, rules: Rules, config: ModelConfig
) -> Region:
    """Return the region that the rank would hold if the weight were not quantized."""
    size = 4 * int(np.prod(shape))
    (placed,) = decide_layout([Tensor(name, "F32", shape, 0, 0, size)], layout, rules, config)
    return region_of(shape, placed.cut, coords, layout)


def take_region(array: Array, region: Region) -> Array:
    """Return that region of an array, padded with zeros."""
    out = np.zeros(region.sizes, array.dtype)
    for (offsets, sizes), places in region.boxes():
        to = tuple(slice(at, at + size) for at, size in zip(places, sizes, strict=True))
        out[to] = array[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
    return out


def named(stored: Stored, name: str) -> Stored:
    """The same with the module's name (`x.`, or that of the weight, `x.weight`) before those of the tensors."""
    return {f"{name}{end}": one for end, one in stored.items()}


def ends_of(part: Mapping[str, Array], name: str) -> dict[str, Array]:
    """The other way round."""
    return {one.removeprefix(name): array for one, array in part.items() if one.startswith(name)}
