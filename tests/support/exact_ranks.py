"""What ranks of a local node must hold, by the safetensors library and slicing alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import safetensors

from cluster.telemetry.report import RankReport
from tests.support.local_node import Rank
from tests.support.reference_slices import torch_share, tp_part

KV_HEADS = 2  # of the tiny Llama


def stored_tensors(objects: Mapping[str, bytes]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (dtype, shape, bytes), read by the safetensors library."""
    found = {}
    for key, data in objects.items():
        if key.endswith(".safetensors"):
            for name, entry in safetensors.deserialize(data):
                found[name] = (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    return found


def expected(objects: Mapping[str, bytes], rank: int, tp: int, fsdp: int) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """What the rank must hold. Tensor parallelism is for 2-byte elements only: the tiny Llama's."""
    shares = {}
    for name, (_, shape, data) in stored_tensors(objects).items():
        if tp > 1:
            part = tp_part(name, np.frombuffer(data, np.uint16).reshape(shape), tp, rank % tp, KV_HEADS)
            shape, data = part.shape, np.ascontiguousarray(part).tobytes()
        shares[name] = torch_share(shape, data, fsdp, rank // tp % fsdp)
    return shares


def check_exact(ranks: Sequence[Rank], objects: Mapping[str, bytes], tp: int = 1, fsdp: int = 1) -> None:
    for number, rank in enumerate(ranks):
        assert isinstance(rank.outcome, RankReport), rank.outcome
        assert rank.outcome.device_bytes == sum(rank.loader.plan.segment_bytes), "memory as planned, to the byte"
        assert rank.tensor_bytes() == expected(objects, number, tp, fsdp)
