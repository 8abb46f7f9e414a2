"""torch.distributed.checkpoint (DCP) with published Hugging Face checkpoints: each rank reads what its shards need.

    dcp.load(state_dict, storage_reader=LongshoreReader(uri))
    dcp.save(state_dict, storage_writer=LongshoreWriter(uri))

    read_metadata        the index of the model, verified ------> names, shapes and dtypes for DCP's planner
    prepare_local_plan   each rank says on which machine it is
    prepare_global_plan  the ranks of one machine become a group of readers
    read_data            the boxes of DCP's plan, in file order --> chunks, from the store once for each machine

DCP's own planner decides which boxes a rank needs, for any placement of DTensors and for plain tensors. The reader
needs no collectives of its own, so it also works with `no_dist=True` and with groups of some ranks.

The writer is `cluster.save`, which makes its own plan of who writes what, and writes a published checkpoint. It takes
the planner's state dict and nothing of its plan. So a planner that changes what is saved is refused.
"""

from __future__ import annotations

import os
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from actors.devices.convert import torch_dtype
from actors.reader.open_model import FoundModel, OpenModel, find_model, open_found
from actors.saving.save import SaveReport, save
from cluster.config import Config
from cluster.errors import ConfigError, LayoutError, SaveRefused
from cluster.options import LoadOptions, collect
from storage.checkpoints.model_index import Tensor
from storage.errors import RevisionMismatch
from storage.host.processes import pid_namespace
from storage.problems import quote
from storage.store_ref import Credentials


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank is, and what it found. Travels in DCP's plan to the coordinator."""

    machine: str
    revision: str


@dataclass(frozen=True, slots=True)
class _Member:
    """A rank's number among the ranks of its machine. Travels in DCP's plan back to the rank."""

    group: str
    member: int
    members: int


class LongshoreReader(StorageReader):
    """A storage reader of DCP for a model in a store, every chunk verified.

    The ranks of one machine are a group of readers: each chunk leaves the store once for all of them. A rank reads the
    chunks that its own boxes touch, and no whole tensor is in memory besides what it loads into. Where a tensor of the
    state dict has another dtype than the stored one, it is cast, as torch's `HuggingFaceStorageReader` does.
    """

    def __init__(
        self,
        model_uri: str | os.PathLike[str],
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        anonymous: bool = False,
        credentials: Credentials | None = None,
        trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
        signed_name: str | None = None,
        revision: str | None = None,
        settings: Config | None = None,
    ) -> None:
        """Name a model. Nothing is read yet.

        Args:
            model_uri: As for `load`: a folder with safetensors files, or one such file.
            endpoint_url: As for `load`.
            region: As for `load`.
            profile: As for `load`.
            anonymous: As for `load`.
            credentials: As for `load`.
            trusted_keys: As for `load`.
            signed_name: As for `load`.
            revision: The only revision of the model that is accepted.
            settings: Settings of Longshore; None reads them from the environment.

        Raises:
            ConfigError: An argument is invalid.

        Example:
            ```python
            reader = LongshoreReader("s3://models/llama-8b")
            torch.distributed.checkpoint.load(state_dict, storage_reader=reader)
            print(reader.report["store_bytes"])
            ```
        """
        self._given: dict[str, Any] = {name: value for name, value in locals().items() if name != "self"}
        self._given["device"] = "cpu"
        self._settings = settings
        self._found: FoundModel | None = None
        self._load_id = ""
        self.report: dict[str, Any] = {}  # what the last load has cost, as `OpenModel.report` returns it
        self.reset()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP is to choose this reader for no path by itself. Pass one as `storage_reader`."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load. `checkpoint_id`: URI of another model, or None. Raises ConfigError."""
        self._forget()
        if checkpoint_id is not None:
            self._given["model_uri"] = checkpoint_id
        self._load_id = uuid.uuid4().hex
        collect(LoadOptions, self._given)

    def read_metadata(self) -> Metadata:
        """Return names, shapes and dtypes of the model's tensors.

        Raises:
            StoreError: The store refused access, or has no such model.
            CheckpointError: The model is none that can be read.
            SignatureError: The manifest is not signed by a trusted key.
            RevisionMismatch: The model has another revision than was asked for.
        """
        self._forget()
        self._found = find_model(collect(LoadOptions, self._given), self._settings or Config.from_env())
        tensors = {tensor.name: _metadata_of(tensor) for tensor in self._found.index.tensors}
        places = {MetadataIndex(name, [0] * len(each.size)): name for name, each in tensors.items()}
        return Metadata(dict(tensors), storage_data=places, storage_meta=StorageMeta(load_id=self._load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has found the model."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with the place of this rank."""
        return replace(plan, storage_data=_Place(pid_namespace(), self._model().index.revision))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, each with the group of its rank. Raises RevisionMismatch."""
        # A planner of the user's own may make plans without a place. Their ranks read alone.
        places = {rank: plan.storage_data for rank, plan in enumerate(plans) if isinstance(plan.storage_data, _Place)}
        revisions = sorted({place.revision for place in places.values()})
        if len(revisions) > 1:
            raise RevisionMismatch(
                "ranks have found different revisions of the model, as it was published meanwhile",
                hint="load again, or pass revision=",
                uri=os.fspath(self._given["model_uri"]),
                found=", ".join(revisions),
            )
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, place in places.items():
            ranks[place.machine].append(rank)
        group = f"dcp {uuid.uuid4().hex}"
        numbers = {rank: (member, len(here)) for here in ranks.values() for member, rank in enumerate(here)}
        return [
            replace(plan, storage_data=_Member(group, *numbers[rank])) if rank in numbers else plan
            for rank, plan in enumerate(plans)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of the plan into the planner's tensors. All are read when it returns.

        Raises:
            LayoutError: A tensor cannot be read into the one of the state dict.
            IntegrityError: Bytes are not the published ones.
            LongshoreError: A store or the node's host failed.
        """
        found, self._found = self._model(), None
        member = plan.storage_data if isinstance(plan.storage_data, _Member) else None
        group: dict[str, Any] = {} if member is None else asdict(member)
        stored = {tensor.name: tensor for tensor in found.index.tensors}
        number = {name: place for place, name in enumerate(stored)}
        items = sorted(plan.items, key=lambda item: (number[item.storage_index.fqn], tuple(item.storage_offsets)))
        with open_found(found, cache=False, **group) as opened:
            opened.prefetch([(item.storage_index.fqn, _box(item)) for item in items], only=True)
            for item in items:
                _read(opened, stored[item.storage_index.fqn], item, planner)
            self.report = opened.report()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _model(self) -> FoundModel:
        if self._found is None:
            raise ConfigError(
                "the reader has no model open", hint="use it with torch.distributed.checkpoint.load, once for each load"
            )
        return self._found

    def _forget(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            found.store.close()


# By these a planner decides what is saved, beside `set_up_planner`, which gives it the state dict.
_PLANNING = (
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_data",
    "lookup_object",
    "transform_object",
)


class LongshoreWriter(StorageWriter):
    """A storage writer of DCP that writes a published checkpoint of safetensors files, with `cluster.save`."""

    def __init__(self, uri: str | os.PathLike[str], *, process_group: Any = None, **options: Any) -> None:
        """Name the checkpoint. Nothing is written yet.

        Args:
            uri: As for `cluster.save`: an S3 URI, or a folder that all ranks share.
            process_group: The group that `dcp.save` gets. None: all ranks of torch.distributed, or this process alone.
            options: Passed on to `cluster.save`: `extra_files`, `endpoint_url`, `max_shard_bytes`, ...

        Example:
            ```python
            writer = LongshoreWriter("s3://models/run-7", extra_files=["config.json"])
            torch.distributed.checkpoint.save(model.state_dict(), storage_writer=writer)
            print(writer.report.revision)
            ```
        """
        self._uri: str | os.PathLike[str] = uri
        self._process_group = process_group
        self._options = options
        self.report: SaveReport | None = None  # of the last save

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP is to choose this writer for no path by itself. Pass one as `storage_writer`."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save. `checkpoint_id`: URI of another checkpoint, or None."""
        self.report = None
        if checkpoint_id is not None:
            self._uri = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: every rank takes part in the save."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are. Raises SaveRefused when they are not those of the writer's group."""
        is_alone = not (dist.is_available() and dist.is_initialized())
        size = 1 if is_alone else dist.get_world_size(self._process_group)
        if len(plans) != size:
            raise SaveRefused(
                f"dcp.save has {len(plans)} ranks, and the group of the writer has {max(size, 0)}",
                hint="pass the same process_group to LongshoreWriter and to dcp.save; to save from one rank of a job, "
                "pass a group of that rank alone to both",
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share of the checkpoint, together with all other ranks. It is complete when this returns.

        Raises:
            SaveRefused: The planner changes what is saved, or `cluster.save` refuses the state dict.
            SaveConflict: Another save or publish wrote to the URI meanwhile.
            SaveError: Another rank ended the save or died.
            StoreError: The store cannot be written.
        """
        own = [
            name
            for name in _PLANNING
            if getattr(getattr(planner, name, None), "__func__", None) is not getattr(DefaultSavePlanner, name)
        ]
        state = getattr(planner, "state_dict", None)
        if own or not isinstance(state, dict):
            raise SaveRefused(
                f"{type(planner).__name__} has {', '.join(own) or 'state_dict'} of its own, which would have no effect",
                hint="change the state dict before dcp.save, or in set_up_planner of a DefaultSavePlanner",
            )
        self.report = save(state, self._uri, process_group=self._process_group, **self._options)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: `write_data` has published the checkpoint."""


def _metadata_of(tensor: Tensor) -> TensorStorageMetadata:
    dtype, shape = torch_dtype(tensor.dtype, tensor.shape)
    size = torch.Size(shape)
    chunks = [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _box(item: ReadItem) -> tuple[slice, ...]:
    pairs = zip(item.storage_offsets, item.lengths, strict=True)
    return tuple(slice(offset, offset + length) for offset, length in pairs)


def _read(opened: OpenModel, tensor: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Read one box. Raises LayoutError where the target cannot take it."""
    if item.type != LoadItemType.TENSOR:
        raise LayoutError(f"{quote(tensor.name)} is a tensor in the checkpoint, and no object of Python")
    target = planner.resolve_tensor(item).detach()
    if target.size() != item.lengths:
        raise LayoutError(
            f"{quote(tensor.name)} has a part of shape {list(item.lengths)}, its place has {list(target.size())}",
            hint="see whether the state dict is that of this model",
        )
    stored_dtype, _ = torch_dtype(tensor.dtype, tensor.shape)
    is_packed = stored_dtype == torch.uint8 and tensor.dtype != "U8"
    if is_packed and target.dtype != torch.uint8:
        raise LayoutError(
            f"{quote(tensor.name)} is stored as {tensor.dtype}, which cannot be cast to {target.dtype}",
            hint="pass a tensor of uint8, which gets the packed bytes",
        )
    target.copy_(opened.lazy_tensor(tensor.name)[_box(item)])
    planner.commit_tensor(item, target)
