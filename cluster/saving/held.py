"""The tensors of a save and who holds which part of them, from the tables that the ranks exchange.

    rank's state dict --> RankTable: names, dtypes, shapes, and how each tensor is cut: a few kB, equal on most ranks
    tables of all ranks --merge--> SavedTensor: the regions of each tensor and their holders, or every problem

A tensor that is whole on several ranks is the same tensor on all of them. A tensor that is cut by a mesh has the region
that torch's DTensor gives each place in the mesh. A list of boxes is FSDP1's ShardedTensor.

Ranks that hold the same piece compare digests of samples of it, after the merge. Tables do not have the digests, so
that tables of ranks with other pieces of the same tensors stay equal, and are exchanged once. Ranks first compare one
digest over all pieces that the same ranks hold, and those of each piece only if that differs.

Two names are tied if every rank that holds bytes of them has one memory for both. A checkpoint stores one of them: the
first.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.errors import SaveError
from cluster.layouts.region import MeshCut, Region, dtensor_region, whole
from cluster.saving.shards import TensorSpec
from storage.checkpoints.safetensors_header import DTYPE_BITS, MAX_DIMENSIONS, MAX_ELEMENTS
from storage.problems import Problems, json_values, quote

MAX_TABLE_BYTES = 256 << 20  # of one rank, as JSON
MAX_JSON_VALUES = 20_000_000
Rank = Annotated[int, Field(ge=-1, lt=1 << 20)]  # -1: no rank of this job
Size = Annotated[int, Field(ge=0, le=MAX_ELEMENTS)]
Shape = Annotated[tuple[Size, ...], Field(max_length=MAX_DIMENSIONS)]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cutting(_Entry):
    """A way of sharing a tensor. Without mesh and boxes, every rank that lists the tensor has all of it."""

    mesh: tuple[Size, ...] = ()  # shape of the mesh
    ranks: tuple[Rank, ...] = ()  # of the mesh, in row-major order
    cuts: tuple[tuple[int, int, int], ...] = ()  # (dimension of the mesh, of the tensor, groups), in order
    boxes: tuple[tuple[Rank, Shape, Shape], ...] = ()  # (rank, offsets, sizes)


class RankTable(_Entry):
    """The tensors of one rank, in the order of its state dict. One column for each fact."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]  # in elements of torch
    cuttings: tuple[Cutting, ...]
    cutting_of: tuple[Size, ...]
    ties: tuple[tuple[str, str], ...] = ()  # (name, earlier name with the same memory)
    problems: tuple[str, ...] = ()  # that the rank itself has found
    arguments: dict[str, str] = {}  # must be equal on all ranks

    def facts(self, row: int) -> tuple[str, tuple[int, ...], Cutting]:
        """Return dtype, shape and cutting of one tensor."""
        return self.dtypes[row], self.shapes[row], self.cuttings[self.cutting_of[row]]

    def pack(self) -> bytes:
        """Return the bytes that other ranks receive."""
        return zlib.compress(self.model_dump_json().encode(), 6)

    @classmethod
    def unpack(cls, data: bytes) -> RankTable:
        """Return the table of another rank. Raises SaveError for anything else."""
        try:
            opened = zlib.decompressobj()
            text = opened.decompress(data, MAX_TABLE_BYTES)
            if not opened.eof or json_values(text) > MAX_JSON_VALUES:
                raise SaveError("another rank's table of tensors is cut short or too large")
            table = cls.model_validate_json(text)
        except (zlib.error, ValidationError) as error:
            raise SaveError("another rank's table of tensors cannot be read") from error
        count = len(table.names)
        columns = (table.dtypes, table.shapes, table.cutting_of)
        if any(len(column) != count for column in columns) or any(
            number >= len(table.cuttings) for number in table.cutting_of
        ):
            raise SaveError("another rank's table of tensors contradicts itself")
        return table


def spec_of(name: str, dtype: str, shape: Sequence[int]) -> TensorSpec:
    """Return the stored tensor of a tensor of torch, which packs two elements of F4 in one."""
    shape = tuple(shape)
    return TensorSpec(name, dtype, (*shape[:-1], 2 * shape[-1]) if dtype == "F4" and shape else shape)


class Regions:
    """The distinct regions of a tensor and their holders. Positions are bytes of the row-major tensor."""

    def __init__(self, shape: Sequence[int], item_bytes: int, held: Sequence[tuple[Region, tuple[int, ...]]]) -> None:
        """Take regions in elements, each with the ranks that hold it."""
        # Bytes of an element are one more dimension, so that a part may end anywhere.
        self.shape = (*shape, item_bytes)
        self.held = tuple(
            (Region((*region.ranges, ((0, item_bytes),))), holders) for region, holders in held if region.elements
        )
        self.size_bytes = math.prod(self.shape)

    @cached_property
    def holders(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return two columns: number of the region, rank."""
        pairs = [(number, rank) for number, (_, ranks) in enumerate(self.held) for rank in ranks]
        table = np.array(pairs, np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    @cached_property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return first and end index per region and dimension; None if a region has several ranges of one."""
        if any(len(ranges) != 1 for region, _ in self.held for ranges in region.ranges):
            return None
        table = np.array([[ranges[0] for ranges in region.ranges] for region, _ in self.held], np.int64)
        table = table.reshape(len(self.held), len(self.shape), 2)
        return table[:, :, 0], table[:, :, 1]

    def before(self, position: int) -> NDArray[np.int64]:
        """Return, for each region, how many of its bytes come before that byte of the tensor."""
        if self._bounds is None:
            return np.array([bytes_before(self.shape, region, position) for region, _ in self.held], np.int64)
        first, end = self._bounds
        sizes = end - first
        if position >= self.size_bytes:
            counted: NDArray[np.int64] = sizes.prod(axis=1)
            return counted
        after = np.ones(len(self.held), np.int64)
        # From the last dimension: the bytes of a row that come before, of rows that hold the position.
        below = np.zeros(len(self.held), np.int64)
        for dim in range(len(self.shape) - 1, -1, -1):
            position, index = divmod(position, self.shape[dim])
            inside = (first[:, dim] <= index) & (index < end[:, dim])
            below = np.clip(index - first[:, dim], 0, sizes[:, dim]) * after + np.where(inside, below, 0)
            after = after * sizes[:, dim]
        return below


def bytes_before(shape: Sequence[int], region: Region, position: int) -> int:
    """Return how many elements of a region come before that one of its row-major tensor."""
    if position >= math.prod(shape):
        return region.elements
    after, below = 1, 0
    for dim in range(len(shape) - 1, -1, -1):
        position, index = divmod(position, shape[dim])
        ranges = region.ranges[dim]
        passed = sum(min(index, end) - start for start, end in ranges if start < index)
        inside = any(start <= index < end for start, end in ranges)
        below = passed * after + (below if inside else 0)
        after *= sum(end - start for start, end in ranges)
    return below


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the checkpoint, and who holds it."""

    spec: TensorSpec
    regions: Regions


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of `merge`."""

    tensors: tuple[SavedTensor, ...]  # in the order in which they fill the files
    ties: dict[str, str]  # name -> the name under which it is stored
    problems: tuple[str, ...]  # with the ranks that have them; then nothing may be saved


def merge(tables: Sequence[RankTable], table_of: Sequence[int]) -> Merged:
    """Combine the tables of all ranks.

    Args:
        tables: Distinct tables.
        table_of: For each rank, the number of its table.

    Returns:
        The tensors with their holders, and every problem.
    """
    problems = Problems()
    ranks_of = [[rank for rank, number in enumerate(table_of) if number == wanted] for wanted in range(len(tables))]
    for table, ranks in zip(tables, ranks_of, strict=True):
        for problem in table.problems:
            problems.add(f"{_named(ranks)}: {problem}")
        for name in sorted({*table.arguments, *tables[0].arguments}):
            if table.arguments.get(name) != tables[0].arguments.get(name):
                problems.add(f"{_named(ranks)}: {name} differs from that of {_named(ranks_of[0])}")
    listed: dict[str, list[tuple[int, int]]] = {}  # name -> (table, row)
    for number, table in enumerate(tables):
        for row, name in enumerate(table.names):
            listed.setdefault(name, []).append((number, row))
    known: dict[Any, Regions] = {}
    found: dict[str, SavedTensor] = {}
    for name, places in listed.items():
        facts = [tables[number].facts(row) for number, row in places]
        dtype, shape, _ = facts[0]
        if any(other[:2] != (dtype, shape) for other in facts):
            problems.add(f"{quote(name)} has another dtype or shape on some ranks")
            continue
        if dtype not in DTYPE_BITS:
            problems.add(f"{quote(name)} has a dtype that the format lacks: {quote(dtype)}")
            continue
        listing: dict[Cutting, tuple[int, ...]] = {}  # the ranks that list the tensor with each cutting
        for (number, _), (_, _, cutting) in zip(places, facts, strict=True):
            listing[cutting] = tuple(sorted((*listing.get(cutting, ()), *ranks_of[number])))
        key = (shape, dtype, tuple(listing.items()))
        if key not in known:
            try:
                known[key] = _regions(shape, dtype, listing)
            except ValueError as error:
                problems.add(f"{quote(name)}: {error}")
                continue
        found[name] = SavedTensor(spec_of(name, dtype, shape), known[key])
    ties = _ties(tables, table_of, found) if not problems else {}
    return Merged(tuple(one for name, one in found.items() if name not in ties), ties, tuple(_listed(problems)))


def shared_pieces(tensors: Sequence[SavedTensor]) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Return the pieces that several ranks hold, as (tensor, region), by the ranks that hold them."""
    known: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # of regions, which many tensors share
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number, tensor in enumerate(tensors):
        regions = tensor.regions
        if id(regions) not in known:
            known[id(regions)] = [(at, ranks) for at, (_, ranks) in enumerate(regions.held) if len(ranks) > 1]
        for at, ranks in known[id(regions)]:
            found.setdefault(ranks, []).append((number, at))
    return found


def differing(
    holders: Sequence[tuple[int, ...]], answers: Sequence[bytes], digest_bytes: int
) -> dict[int, list[list[int]]]:
    """Compare digests, of which each rank's answer has those that it holds, in order.

    Args:
        holders: The ranks that hold each digest.
        answers: The digests of each rank, one after the other.
        digest_bytes: Size of a digest.

    Returns:
        The numbers of the digests that differ, with the ranks that have the same one.
    """
    used, found = [0] * len(answers), dict[int, list[list[int]]]()
    for number, ranks in enumerate(holders):
        same: dict[bytes, list[int]] = {}
        for rank in ranks:
            same.setdefault(answers[rank][used[rank] : used[rank] + digest_bytes], []).append(rank)
            used[rank] += digest_bytes
        if len(same) > 1:
            found[number] = list(same.values())
    return found


def drifted(name: str, groups: Sequence[Sequence[int]]) -> str:
    """Return the problem of a tensor that is not the same on groups of ranks."""
    more = f" and {len(groups) - 4} more groups" if len(groups) > 4 else ""
    return f"{quote(name)} differs between {' and '.join(map(_named, groups[:4]))}{more}"


def _regions(shape: tuple[int, ...], dtype: str, listing: Mapping[Cutting, tuple[int, ...]]) -> Regions:
    """Return the regions of a tensor. Raises ValueError if they do not make up the tensor.

    Ranks may list several cuttings, such as the meshes of replicas, which have the same regions. If regions differ, the
    cutting that most ranks list is used.
    """
    groups: dict[frozenset[Region], dict[Region, list[int]]] = {}
    for cutting, ranks in listing.items():
        present = set(ranks)
        held = _held(shape, cutting, ranks)
        group = groups.setdefault(frozenset(held), {region: [] for region in held})
        for region, holders in held.items():
            group[region] += [rank for rank in holders if rank in present]
    chosen = max(groups.values(), key=lambda group: sum(map(len, group.values())))
    full = [(region, tuple(sorted(set(holders)))) for region, holders in chosen.items()]
    regions = Regions(shape, max(1, DTYPE_BITS[dtype] // 8), full)
    if lacking := [region for region, holders in full if region.elements and not holders]:
        raise ValueError(f"no rank of this save holds {len(lacking)} of its {len(full)} parts")
    _check_tiling(regions)
    return regions


def _held(shape: tuple[int, ...], cutting: Cutting, ranks: Sequence[int]) -> dict[Region, list[int]]:
    """Return the regions that a cutting makes, and the ranks to which it gives them."""
    held: dict[Region, list[int]] = {}
    if cutting.boxes:
        for rank, offsets, sizes in cutting.boxes:
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise ValueError("its shards have another number of dimensions")
            ranges = tuple(((first, first + size),) for first, size in zip(offsets, sizes, strict=True))
            held.setdefault(Region(ranges), []).append(rank)
    elif cutting.mesh:
        if math.prod(cutting.mesh) != len(cutting.ranks):
            raise ValueError("its mesh contradicts itself")
        for number, rank in enumerate(cutting.ranks):
            here = np.unravel_index(number, cutting.mesh)
            cuts = []
            for mesh_dim, dim, groups in cutting.cuts:
                if not (0 <= mesh_dim < len(cutting.mesh) and 0 <= dim < len(shape) and groups > 0):
                    raise ValueError("its placements contradict its shape")
                cuts.append(MeshCut(dim, cutting.mesh[mesh_dim], int(here[mesh_dim]), groups))
            held.setdefault(dtensor_region(shape, cuts), []).append(rank)
    else:
        held[whole(shape)] = list(ranks)
    return held


def _check_tiling(regions: Regions) -> None:
    boxes = [box for region, _ in regions.held for box, _ in region.boxes()]
    if sum(math.prod(sizes) for _, sizes in boxes) != regions.size_bytes:
        raise ValueError("its parts do not make up the tensor")
    if len(boxes) < 2:
        return
    first = np.array([offsets for offsets, _ in boxes], np.int64)
    end = first + np.array([sizes for _, sizes in boxes], np.int64)
    for number in range(len(boxes) - 1):
        later = slice(number + 1, None)
        apart = (first[later] >= end[number]) | (end[later] <= first[number])
        if not apart.any(axis=1).all():
            raise ValueError("its parts overlap")


def _ties(tables: Sequence[RankTable], table_of: Sequence[int], found: Mapping[str, SavedTensor]) -> dict[str, str]:
    """Return the names that are tied on every rank that holds bytes of them."""
    pairs = {pair for table in tables for pair in table.ties}
    claims = [set(table.ties) for table in tables]
    ties: dict[str, str] = {}
    for name, kept in sorted(pairs):
        if name not in found or kept not in found or found[name].spec.shape != found[kept].spec.shape:
            continue
        if found[name].spec.dtype != found[kept].spec.dtype or found[name].regions is not found[kept].regions:
            continue
        holders = set(found[name].regions.holders[1].tolist())
        if all((name, kept) in claims[table_of[rank]] for rank in holders):
            ties[name] = kept
    return {name: kept for name, kept in ties.items() if kept not in ties}


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def _listed(problems: Problems) -> Iterable[str]:
    more = len(problems) - len(list(problems))
    return [*problems, *([f"and {more} more"] if more else [])]


def arguments_text(**arguments: object) -> dict[str, str]:
    """Return arguments as texts that are equal on two ranks if the arguments are."""
    return {name: json.dumps(value, sort_keys=True) for name, value in arguments.items()}
