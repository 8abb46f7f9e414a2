"""Computes what a rank must hold with `safetensors` and slicing alone, without Longshore's rules.

Some of the functions run inside workers (`LoadedModel.call`), so this module imports neither torch nor ours at its top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.local_node import Rank

CUT_BY_ROWS = ("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
CUT_BY_KV_HEADS = ("k_proj", "v_proj")
CUT_BY_COLUMNS = ("o_proj", "down_proj")
TINY_KV_HEADS = 2  # of the tiny Llama
Stored = dict[str, tuple[str, tuple[int, ...], bytes]]  # name -> (dtype, shape, bytes)


def rank_place(rank: int, tp: int, fsdp: int) -> tuple[int, int]:
    """(tensor-parallel rank, fully-sharded rank) of a rank."""
    return rank % tp, rank // tp % fsdp


def differing_slices(
    tensors: Mapping[str, Any], rank: int, folder: str, tp: int, fsdp: int, kv_heads: int
) -> list[str]:
    """Names of tensors that are not, bit for bit, what safetensors and slicing give this rank."""
    import torch
    from safetensors import safe_open

    tp_rank, fsdp_rank = rank_place(rank, tp, fsdp)
    different, seen = [], set()
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                seen.add(name)
                part = file.get_tensor(name)
                if tp > 1:
                    part = tp_part(name, part, tp, tp_rank, kv_heads)
                if fsdp > 1 and part.dim():
                    chunks = part.chunk(fsdp, dim=0)
                    part = chunks[fsdp_rank] if fsdp_rank < len(chunks) else part[:0]
                found = tensors.get(name)
                same = found is not None and found.shape == part.shape and found.dtype == part.dtype
                if not same or not torch.equal(as_bytes(found), as_bytes(part)):
                    different.append(name)
    return different + sorted(set(tensors) ^ seen)


def tp_part(name: str, whole: Any, tp: int, tp_rank: int, kv_heads: int) -> Any:
    """A Llama tensor's share of one tensor-parallel rank."""
    if any(part in name for part in CUT_BY_KV_HEADS):
        rows = len(whole) // kv_heads
        if tp <= kv_heads:
            rows *= kv_heads // tp
            return whole[tp_rank * rows : (tp_rank + 1) * rows]
        head = tp_rank * kv_heads // tp
        return whole[head * rows : (head + 1) * rows]
    if any(part in name for part in CUT_BY_ROWS):
        rows = len(whole) // tp
        return whole[tp_rank * rows : (tp_rank + 1) * rows]
    if any(part in name for part in CUT_BY_COLUMNS):
        columns = whole.shape[1] // tp
        return whole[:, tp_rank * columns : (tp_rank + 1) * columns]
    return whole


def as_bytes(tensor: Any) -> Any:
    """All bytes of a tensor in order: equal NaNs are equal then, and so is nothing else."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)


def shard_differs(shard: Any, folder: str, tp: int, fsdp: int, kv_heads: int) -> list[str]:
    """`differing_slices` beside the tensors, for `LoadedModel.call`."""
    return differing_slices(shard, shard.rank, folder, tp, fsdp, kv_heads)


def fits_no_layout(shard: Any, folder: str, layouts: tuple[tuple[int, int, int], ...], kv_heads: int) -> list[str]:
    """Names of tensors that differ from what this rank holds in the closest of the layouts (tp, fsdp, copies)."""
    return min((shard_differs(shard, folder, tp, fsdp, kv_heads) for tp, fsdp, _ in layouts), key=len)


def stored_bytes(folder: Path) -> Stored:
    """Return every tensor of the safetensors files in a folder."""
    return stored_tensors({path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))})


def stored_tensors(objects: Mapping[str, bytes]) -> Stored:
    """Return every tensor of the safetensors files among the objects."""
    import safetensors

    files = (safetensors.deserialize(data) for key, data in objects.items() if key.endswith(".safetensors"))
    return {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for file in files for name, entry in file
    }


def torch_share(shape: tuple[int, ...], data: bytes, parts: int, rank: int) -> tuple[tuple[int, ...], bytes]:
    """(shape, bytes) of a rank's share of dim 0, as torch.chunk deals rows out."""
    import torch

    if not shape or parts == 1:
        return shape, data
    shares = [len(rows) for rows in torch.arange(shape[0]).chunk(parts)] if shape[0] else [0]
    shares += [0] * (parts - len(shares))
    first, rows = sum(shares[:rank]), max(shape[0], 1)
    end = first + shares[rank]  # multiplied before it is divided: a row of a packed dtype may end inside a byte
    return (shares[rank], *shape[1:]), data[first * len(data) // rows : end * len(data) // rows]


def expected(objects: Mapping[str, bytes], rank: int, tp: int, fsdp: int) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Return what the rank must hold. Tensor parallelism is for 2-byte elements only: the tiny Llama's."""
    import numpy as np

    tp_rank, fsdp_rank = rank_place(rank, tp, fsdp)
    shares = {}
    for name, (_, shape, data) in stored_tensors(objects).items():
        if tp > 1:
            part = tp_part(name, np.frombuffer(data, np.uint16).reshape(shape), tp, tp_rank, TINY_KV_HEADS)
            shape, data = part.shape, np.ascontiguousarray(part).tobytes()
        shares[name] = torch_share(shape, data, fsdp, fsdp_rank)
    return shares


def check_exact(ranks: Sequence[Rank], objects: Mapping[str, bytes], tp: int = 1, fsdp: int = 1) -> None:
    """Raise AssertionError unless every rank of a `LocalNode` holds what it must, in as much memory as was planned."""
    from cluster.telemetry.report import RankReport

    for number, rank in enumerate(ranks):
        assert isinstance(rank.outcome, RankReport), rank.outcome
        assert rank.outcome.device_bytes == sum(rank.loader.plan.segment_bytes), "memory as planned, to the byte"
        assert rank.tensor_bytes() == expected(objects, number, tp, fsdp)


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise AssertionError unless names, dtypes, shapes and bytes of the tensors are the same."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert as_bytes(found[name]).equal(as_bytes(tensor)), name
