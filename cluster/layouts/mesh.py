"""The layout: in how many ways a model is cut and copied, and the coordinates of each rank in that mesh.

Ranks are numbered with tensor parallelism fastest, then fully sharded, pipeline, data: rank =
((data * pipeline_parallel_size + stage) * fsdp_size + fsdp) * tensor_parallel_size + tensor.

Expert parallelism takes no ranks of its own. It lies over the plane of data and tensor ranks, as in Megatron, vLLM and
transformers. With tensor_parallel_size=4 and data_parallel_size=2 the plane has 8 ranks (p = data * 4 + tensor), and

    expert_parallel_size   8            4             2             2
    expert_tensor_...      1 (default)  1 (default)   2 (default)   4 (given)
    expert group of p      0 1 2 3 4.7  0 1 2 3 0..3  0 0 1 1 0011  0 0 0 0 1 1 1 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice

from cluster.errors import ConfigError, ScaleRefused

MAX_RANKS = 1 << 16
MAX_VOCABULARY_MULTIPLE = 1 << 16
MAX_NAMED_SIZES = 6  # sizes that would work, in one message
MAX_TRIED_SIZE = 256
_SIZES = ("tensor_parallel_size", "fsdp_size", "data_parallel_size", "pipeline_parallel_size", "expert_parallel_size")


@dataclass(frozen=True, slots=True)
class RankCoords:
    """The coordinates of a rank in the mesh."""

    data: int
    fsdp: int
    tensor: int
    stage: int = 0  # pipeline stage
    expert: int = 0  # number of its share of the experts
    expert_tensor: int = 0  # number of its slice of each of those experts


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of ways in which a model is cut and copied. Raises ConfigError for invalid sizes."""

    tensor_parallel_size: int = 1
    fsdp_size: int = 1
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 0  # ways each expert is cut; 0: tensor / expert_parallel_size, at least 1
    vocabulary_multiple: int = 1  # the vocabulary is padded with zeros to a multiple of this, and of the ranks

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_count(name, getattr(self, name), 1, MAX_RANKS)
        check_count("expert_tensor_parallel_size", self.expert_tensor_parallel_size, 0, MAX_RANKS)
        check_count("vocabulary_multiple", self.vocabulary_multiple, 1, MAX_VOCABULARY_MULTIPLE)
        if self.ranks > MAX_RANKS:
            raise ConfigError(f"a layout of {self.ranks} ranks is larger than {MAX_RANKS}")
        plane = self.tensor_parallel_size * self.data_parallel_size
        if plane % (self.expert_parallel_size * self.expert_cuts):
            cuts = self.expert_tensor_parallel_size
            fine = sizes_that_do(
                "expert_parallel_size",
                self.expert_parallel_size,
                lambda size: plane % (size * (cuts or max(1, self.tensor_parallel_size // size))) == 0,
            )
            raise ConfigError(
                f"expert_parallel_size={self.expert_parallel_size} with each expert cut {self.expert_cuts} ways does "
                f"not fit {plane} ranks (tensor_parallel_size x data_parallel_size)",
                hint="experts are spread over the ranks of tensor and data parallelism: their product must be a "
                "multiple of expert_parallel_size x expert_tensor_parallel_size" + (f". {fine}" if fine else ""),
            )

    def __str__(self) -> str:
        named = {
            "tp": self.tensor_parallel_size,
            "fsdp": self.fsdp_size,
            "dp": self.data_parallel_size,
            "pp": self.pipeline_parallel_size,
            "ep": self.expert_parallel_size,
        }
        shown = {name: size for name, size in named.items() if size > 1 or name in ("tp", "fsdp", "dp")}
        if self.expert_tensor_parallel_size:
            shown["etp"] = self.expert_tensor_parallel_size
        if self.vocabulary_multiple > 1:
            shown["vocabulary multiple"] = self.vocabulary_multiple
        return ", ".join(f"{name} {size}" for name, size in shown.items())

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.one_replica * self.data_parallel_size

    @property
    def one_replica(self) -> int:
        """Return the number of ranks that hold the model once, experts spread over data ranks aside."""
        return self.tensor_parallel_size * self.fsdp_size * self.pipeline_parallel_size

    @property
    def expert_cuts(self) -> int:
        """Return in how many ways each expert is cut."""
        return self.expert_tensor_parallel_size or max(1, self.tensor_parallel_size // self.expert_parallel_size)

    @property
    def cuts_tensors(self) -> bool:
        """Return whether tensors are cut by rules, so that rules are needed."""
        return any(size > 1 for size in (self.tensor_parallel_size, self.expert_parallel_size, self.expert_cuts)) or (
            self.vocabulary_multiple > 1
        )

    def rank_coords(self, rank: int) -> RankCoords:
        """Return the coordinates of rank 0 .. ranks - 1. The tensor coordinate varies fastest."""
        if not 0 <= rank < self.ranks:
            raise ConfigError(f"no rank {rank} in a layout of {self.ranks} ranks")
        rest, tensor = divmod(rank, self.tensor_parallel_size)
        rest, fsdp = divmod(rest, self.fsdp_size)
        data, stage = divmod(rest, self.pipeline_parallel_size)
        expert, expert_tensor = divmod(data * self.tensor_parallel_size + tensor, self.expert_cuts)
        return RankCoords(data, fsdp, tensor, stage, expert % self.expert_parallel_size, expert_tensor)

    @property
    def replicas_with_all(self) -> int:
        """Return how many replicas together hold every expert: more than one where they share experts out."""
        spread = self.expert_parallel_size * self.expert_cuts
        return math.lcm(spread, self.tensor_parallel_size) // self.tensor_parallel_size

    def place(self, coords: RankCoords) -> RankCoords:
        """Return the coordinates of the first rank that holds the same slices."""
        return replace(coords, data=coords.data % self.replicas_with_all)

    def with_replicas(self, count: int) -> Layout:
        """Return the layout with `count` replicas. Ranks that both layouts have hold the same slices in both.

        Raises ScaleRefused for a count that cannot be.
        """
        shared, most = self.replicas_with_all, MAX_RANKS // self.one_replica
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= most:
            raise ScaleRefused(
                f"data_parallel_size must be a whole number from 1 to {most}, not {count!r:.40}",
                hint="release the model to remove its last replica",
            )
        if count % shared:
            fine = sizes_that_do("data_parallel_size", count, lambda size: size % shared == 0)
            raise ScaleRefused(f"{shared} replicas share the experts out, and come and go together", hint=fine)
        return replace(self, data_parallel_size=count)


def sizes_that_do(name: str, asked: int, does: Callable[[int], bool]) -> str:
    """Return `name can be 2, 4 or 1`, the sizes that `does` accepts, nearest to `asked` first, or ""."""
    near = sorted(range(1, MAX_TRIED_SIZE + 1), key=lambda size: (abs(size - asked), size))
    found = list(islice(filter(does, near), MAX_NAMED_SIZES))
    return f"{name} can be {one_of(found)}" if found else ""


def one_of(values: Iterable[object]) -> str:
    """Return `1, 2 or 4`."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def check_count(name: str, value: object, least: int, most: int) -> None:
    """Raise ConfigError unless `value` is a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {value!r:.40}")
