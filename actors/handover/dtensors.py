"""A rank's slices as the local parts of torch's DTensors: no copy, no message between processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cluster.errors import ConfigError, ModuleMismatch
from cluster.layouts.region import MeshCut, Region, dtensor_region, same_part
from cluster.plans.load_plan import TensorSlice

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """The same when it is a DTensor, else None. Imports nothing: where there is one, its module is imported."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return tensor if kind is not None and isinstance(tensor, kind) else None


def wanted_part(tensor: DTensor) -> Region:
    """What this process must hold of a DTensor, by its placements and the process's place in the mesh.

    Raises ConfigError for placements that hold no part of the values, such as Partial, and outside the mesh.
    """
    return place_of(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def place_of(shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]) -> Region:
    """What this process holds of a tensor of that shape. Raises ConfigError as `wanted_part` does."""
    here = mesh.get_coordinate()
    if here is None or len(placements) != mesh.ndim:
        raise ConfigError(f"{len(placements)} placements for a mesh of {mesh.ndim} dimensions: {mesh}")
    cuts = []
    for number, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or not -len(shape) <= dim < len(shape):
            raise ConfigError(f"a tensor of shape {shape} cannot be filled by parts under {placement}")
        groups = int(getattr(placement, "split_factor", 1))  # of _StridedShard
        cuts.append(MeshCut(dim % len(shape), mesh.size(number), here[number], groups))
    return dtensor_region(shape, cuts)


def wrap_local(
    local: torch.Tensor, shape: torch.Size, stride: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """A DTensor of that global shape and stride whose local part is `local` itself."""
    from torch.distributed.tensor import DTensor

    wrapped: DTensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return wrapped


def slice_as_dtensor(
    tensor: torch.Tensor, piece: TensorSlice, mesh: DeviceMesh, placements: Sequence[Placement] | None
) -> DTensor:
    """See `RankShard.dtensor`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import Placement

    if piece.form:
        raise ModuleMismatch(f"{piece.name:.300} is laid out flat in its format: it has no dimension to be cut along")
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"a DTensor is on a DeviceMesh, not on {mesh!r:.60}")
    if placements is not None and (
        not isinstance(placements, Sequence) or not all(isinstance(each, Placement) for each in placements)
    ):
        raise ConfigError(f"placements must be one for each dimension of the mesh, not {placements!r:.60}")
    placements = tuple(placements) if placements is not None else (Shard(0),)
    part = place_of(piece.shape, mesh, placements)
    if not same_part(part, piece.region):
        raise ModuleMismatch(
            f"this process's place in the mesh holds {part.ranges} of {piece.name}, the rank has {piece.region.ranges}",
            hint="the ranks of the load and of the mesh must be the same processes, cut in the same way",
        )
    local = tensor[: part.filled[0]] if piece.region.padding else tensor
    stride = torch.empty(piece.shape, device="meta").stride()
    return wrap_local(local, torch.Size(piece.shape), stride, mesh, placements)
