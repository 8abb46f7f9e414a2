"""What a rank holds, as user code sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from actors.device import Device
from cluster.load_plan import RankPlan, TensorSlice

if TYPE_CHECKING:
    import torch


class RankShard(Mapping[str, "torch.Tensor"]):
    """The tensors of one rank by name, on its device, plus where they belong.

    `shard["model.norm.weight"]` is the rank's own slice. Tensors are views into the rank's memory: what you keep of
    them stays valid after the model is released, and keeps that memory: the whole segment that the tensor is in, a
    layer of the model as a rule.
    """

    def __init__(self, plan: RankPlan, device: Device) -> None:
        self.rank = plan.rank
        self.coords = plan.coords
        self.device = device.name
        self.slices: dict[str, TensorSlice] = {piece.name: piece for piece in plan.slices}
        self._tensors = device.tensors(plan.slices)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"RankShard(rank={self.rank}, tensors={len(self)}, device={self.device!r})"
