"""What a rank holds, as user code sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actors.devices.device import Device
from cluster.fit.device_map import CPU, DISK, device_name
from cluster.planning.plan import RankPlan, TensorSlice

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    from actors.handover.module_places import Rename
    from actors.handover.modules import Filled


class RankShard(Mapping[str, "torch.Tensor"]):
    """The tensors of one rank by name, on its device, plus where they belong.

    `shard["model.norm.weight"]` is the rank's own slice. Tensors are views into the rank's memory: what you keep of
    them stays valid after the model is released, and keeps that memory: the whole segment that the tensor is in, a
    layer of the model as a rule. So does a module that `into` filled: what is to stay between calls belongs in `kept`,
    which is given up with the model, not in a global. Whoever writes to tensors writes to the model that later calls
    see.
    """

    device_map: dict[str, int | str] | None  # modules and their devices, as Accelerate has it; None: all on `device`
    device: str  # "cpu" or "cuda:0": with a device map, the first one that has something

    def __init__(self, plan: RankPlan, device: Device) -> None:
        self.rank = plan.rank
        self.coords = plan.coords
        self.device_map = plan.device_map.as_dict() if plan.device_map else None
        self.device = main_device(plan) or device.name
        self.slices: dict[str, TensorSlice] = {piece.name: piece for piece in plan.slices}
        self.kept: dict[Any, Any] = {}  # yours: what a call makes for later ones, such as a module; goes with the model
        self._tensors = device.tensors(plan.slices)

    def into(
        self,
        module: torch.nn.Module,
        *,
        prefix: str = "",
        rename: Rename = None,
        convert: bool = False,
        strict: bool = True,
        requires_grad: bool | None = None,
    ) -> Filled:
        """Fill a module made on the meta device: its parameters and saved buffers become the rank's tensors, no copy.

        DTensor parameters (`fully_shard`, models that transformers cuts) take the rank's slice as their local part; it
        must be the part that the process's place in the mesh holds. Names that the module ties share one tensor.
        Buffers that no checkpoint has must be there for real, but for models of transformers, which make theirs here.

        `prefix`: only tensors whose names begin so, without it. `rename`: their names -> the module's, a function or a
        mapping of names or of what they begin with; None leaves a tensor out. `convert`: names and stacking as
        transformers' own loader does them; what is stacked is copied. `strict`: every name must be on both sides;
        otherwise the result says which were not. `requires_grad`: of the parameters; None: as they have it. Raises
        ModuleMismatch, with the module as it was; ConfigError for arguments that cannot be meant.
        """
        from actors.handover.modules import fill_module

        return fill_module(
            module,
            self._tensors,
            self.slices,
            device=self.device,
            prefix=prefix,
            rename=rename,
            convert=convert,
            strict=strict,
            requires_grad=requires_grad,
        )

    def dtensor(self, name: str, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> DTensor:
        """The tensor as a DTensor whose local part is the rank's slice, no copy.

        `placements`: by default those of FSDP2, `Shard(0)` on a mesh of one dimension. Raises ModuleMismatch when the
        rank's slice is not what this process's place in the mesh holds.
        """
        from actors.handover.modules import slice_as_dtensor

        return slice_as_dtensor(self._tensors[name], self.slices[name], mesh, placements)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"RankShard(rank={self.rank}, tensors={len(self)}, device={self.device!r})"


def main_device(plan: RankPlan) -> str | None:
    """Of a rank with a device map, where it begins: its first GPU, else the CPU."""
    devices = plan.device_map.devices if plan.device_map else ()
    return None if not devices else (CPU if devices[0] == DISK else device_name(devices[0]))
