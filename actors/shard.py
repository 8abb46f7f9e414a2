"""The tensors of one rank, as user code sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
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

    `shard["model.norm.weight"]` is the rank's own slice. Tensors are views into the rank's memory. A tensor that you
    keep stays valid after the model is released. It also keeps its whole segment in memory, usually a layer of the
    model. So does a module that `into` filled.

    Objects that later calls need belong in `kept`, which is released with the model, not in a global. Writing to a
    tensor changes the model that later calls see.
    """

    device_map: dict[str, int | str] | None  # modules and their devices, as in Accelerate; None: all on `device`
    device: str  # "cpu" or "cuda:0"; with a device map, the first device that has a tensor
    revision: str  # of the tensors' contents; it stays for the length of a call

    def __init__(self, plan: RankPlan, device: Device, revision: str = "") -> None:
        self.rank, self.revision = plan.rank, revision
        self.coords = plan.coords
        self.device_map = plan.device_map.as_dict() if plan.device_map else None
        self.device = main_device(plan) or device.name
        self.kept: dict[Any, Any] = {}  # for your objects, such as a module for later calls; released with the model
        self._plan = plan
        self._tensors = device.tensors(plan.slices)

    @cached_property
    def slices(self) -> dict[str, TensorSlice]:
        """The rank's slices by name."""
        return {piece.name: piece for piece in self._plan.slices}

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

        DTensor parameters (`fully_shard`, models that transformers cuts) take the rank's slice as their local part. It
        must be the part that the process's place in the mesh holds. Names that the module ties share one tensor.
        Buffers that no checkpoint has must not be on the meta device. Models of transformers make theirs here.

        Args:
            module: The module to fill.
            prefix: Take only tensors whose names begin with this prefix, and remove it from their names.
            rename: Maps their names to the module's. It is a function, or a mapping of names or of their beginnings up
                to a dot. None for a name leaves the tensor out. Default: names stay.
            convert: Name and stack tensors as transformers' own loader does. Stacked tensors are copies.
            strict: Require every name on both sides. If False, the result lists the names that were not.
            requires_grad: Set for the parameters. Default None: each parameter keeps its own.

        Returns:
            The number of tensors that were put, and the names that are missing, unexpected, tied or copied.

        Raises:
            ModuleMismatch: The module and the tensors do not fit. The module is unchanged.
            ConfigError: An argument has a wrong type or value.
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
        """Return the tensor as a DTensor whose local part is the rank's slice, without a copy.

        Args:
            name: The tensor's name.
            mesh: The device mesh of the DTensor.
            placements: One for each dimension of the mesh. Default: as FSDP2, `Shard(0)` on a mesh of one dimension.

        Raises:
            ModuleMismatch: The rank's slice is not the part that this process's place in the mesh holds.
            ConfigError: An argument has a wrong type or value.
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
    """Return the first GPU of a rank's device map, else the CPU. None without a device map."""
    devices = plan.device_map.devices if plan.device_map else ()
    return None if not devices else (CPU if devices[0] == DISK else device_name(devices[0]))
