"""`cluster.safe_open`: the interface of `safetensors.safe_open` for a whole model, in any process, with or without Ray.

safe_open(uri) --> index of the model (read from the store, verified) --> OpenModel
get_tensor, get_slice --> ModelReader --> host of the node's arena (`actors.reader.host`) --> store
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from actors.rank.state import RankIdentity
from actors.reader.host import HostLink, host_config
from actors.reader.model_reader import ModelReader
from cluster.argument_types import checks_arguments
from cluster.config import Config, TrustPolicy
from cluster.errors import ConfigError, TensorNotFound
from cluster.fit.needs import min_slots
from cluster.messages import NodeJob
from cluster.options import LoadOptions, collect
from cluster.planning.make_plan import read_index
from cluster.planning.packed_plan import ReaderTables
from cluster.request import LoadRequest, make_request
from cluster.telemetry.metrics import model_label
from cluster.telemetry.report import NodeReport
from storage.arena.arena_files import SHM_DIRECTORY
from storage.checkpoints.model_index import ModelIndex, Tensor
from storage.checkpoints.safetensors_header import parse_header
from storage.host.memory import available_host_bytes, free_bytes
from storage.host.processes import ProcessId
from storage.problems import quote
from storage.store_ref import Credentials
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import open_store

if TYPE_CHECKING:
    import torch

    from actors.devices.cuda_device import PinnedStaging
    from actors.reader.lazy_tensor import LazyTensor

STACK_SHARE = 8  # a stack of experts takes at most this part of the machine's free memory: one in so many
FRAMEWORKS = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np"}


class _Stored:
    """A tensor of an open model, for lazy tensors. A dtype that torch lacks is bytes, packed in the last dimension."""

    def __init__(self, model: OpenModel, tensor: Tensor) -> None:
        from actors.devices.convert import torch_dtype

        self.name = tensor.name
        self.dtype, self.shape = torch_dtype(tensor.dtype, tensor.shape)
        self._model = model
        self._reader = model._reader
        self._tensor = tensor

    def read(
        self,
        shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        target: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `StoredTensor`."""
        import torch

        if target is not None and target.is_cuda:
            if not sizes:
                shape, offsets, sizes = (1,), (0,), (1,)

            def fill(inside: Sequence[int], host: torch.Tensor) -> None:
                self.read(shape, [begin + more for begin, more in zip(offsets, inside, strict=True)], host.shape, host)

            self._model._pinned().copy(target.view(tuple(sizes)), fill)
            return target
        if target is not None:
            self._reader.read(self._tensor, shape, offsets, sizes, target.reshape(-1).view(torch.uint8).numpy())
            return target
        if not math.prod(sizes):
            return torch.empty(tuple(sizes), dtype=self.dtype, device="cpu")
        found = torch.from_numpy(self._reader.read(self._tensor, shape, offsets, sizes))
        return found.view(self.dtype).view(tuple(sizes))

    def read_all(self) -> torch.Tensor:
        """See `StoredTensor`."""
        self._model._whole_reads += 1
        return self.read_on("cpu")

    def read_on(self, device: str) -> torch.Tensor:
        """Return the whole tensor, on a GPU if the device is one, else on the CPU."""
        import torch

        on_gpu = torch.device(device).type == "cuda" and 0 not in self.shape
        target = torch.empty(self.shape, dtype=self.dtype, device=device) if on_gpu else None
        return self.read(self.shape, (0,) * len(self.shape), self.shape, target)


class TensorSlice:
    """A tensor that is read when it is indexed, as safetensors' `PySafeSlice`."""

    def __init__(self, model: OpenModel, tensor: Tensor) -> None:
        self._model = model
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype in safetensors: "F32", "BF16", "F8_E4M3", ..."""
        return self._tensor.dtype

    def __getitem__(self, index: Any) -> Any:
        """Return a part of the tensor. Only the chunks that it touches are read.

        Args:
            index: Integers, slices with or without steps, an ellipsis, None for a new dimension, or a tuple of these.
                A tensor or a list of indices reads the whole tensor.
        """
        from actors.reader.lazy_tensor import read_indexed

        return self._model._hand_out(read_indexed(_Stored(self._model, self._tensor), index))


class OpenModel:
    """A model that `safe_open` has opened. Thread-safe. Use it in a `with` block, or call `close`."""

    def __init__(
        self, index: ModelIndex, reader: ModelReader, link: HostLink, framework: str, device: str | int, uri: str
    ) -> None:
        """Made by `safe_open`."""
        self._index = index
        self._reader = reader
        self._link = link
        self._framework = framework
        self._device = f"cuda:{device}" if isinstance(device, int) else device
        self._uri = uri
        self._tensors = {tensor.name: tensor for tensor in index.tensors}
        self._staging: PinnedStaging | None = None
        self._staging_lock = threading.Lock()
        self._whole_reads = 0
        # A model that nobody closes is closed when it is gone, in a thread, because that may be anywhere.
        self._closing = weakref.finalize(self, _close_later, os.getpid(), link, reader)
        self._closing.atexit = False

    @property
    def revision(self) -> str:
        """Return the revision of the model: the digest of its manifest, or of its objects' names and versions."""
        return self._index.revision

    @property
    def index(self) -> ModelIndex:
        """Return the facts about the model: tensors, chunks and their digests."""
        return self._index

    def keys(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._tensors)

    def offset_keys(self) -> list[str]:
        """Return the names of all tensors in the order in which they are stored: shard by shard, by offset.

        Reading in this order is fastest, because the next chunks are fetched ahead.
        """
        return [tensor.name for tensor in self._index.tensors]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the file's header, as safetensors does: None if there is none.

        A model of several shards has the entries that are equal in all of them. Reads the header of each shard.
        """
        found: dict[str, str] | None = None
        for number in range(len(self._index.shards)):
            own = self._header_metadata(number)
            found = own if found is None else {key: value for key, value in found.items() if own.get(key) == value}
        return found or None

    def get_tensor(self, name: str) -> Any:
        """Return one tensor, whole and verified.

        Args:
            name: Name of the tensor.

        Returns:
            A torch tensor on the device, or a numpy array. Dtypes that torch lacks are bytes (uint8), packed in the
            last dimension.

        Raises:
            TensorNotFound: The model has no such tensor.
            IntegrityError: Its bytes are not the published ones.
            ReaderClosed: The model was closed, or the process was forked since it was opened.
            LongshoreError: A store or the node's host failed.
        """
        import torch

        tensor = self._tensor(name)
        found = _Stored(self, tensor).read_on(self._device)
        packed = getattr(torch, "float4_e2m1fn_x2", None) if tensor.dtype == "F4" else None
        return self._hand_out(found if packed is None else found.view(packed))

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors by name, as `get_tensor` returns each, in the order of storage. Raises as it does."""
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> TensorSlice:
        """Return one tensor without reading it. Index the result to read a part.

        Args:
            name: Name of the tensor.

        Returns:
            The tensor's shape and dtype, and its parts by index.

        Raises:
            TensorNotFound: The model has no such tensor.
        """
        return TensorSlice(self, self._tensor(name))

    def prefetch(self, names: Iterable[str | tuple[str, Sequence[slice]]], *, only: bool = False) -> None:
        """Start to fetch tensors that will be read, in this order. Returns at once.

        A chunk that a later one of them needs again stays, if not more do than are fetched ahead.

        Args:
            names: Names of tensors, or (name, slices with one of each dimension and without steps). What has not been
                read yet is limited, so prefetching all of a large model is no problem.
            only: Nothing else will be read, so other readers of the group need not wait for this one. Other tensors can
                still be read.

        Raises:
            TensorNotFound: The model has no such tensor.
            ConfigError: There are not as many slices as dimensions.
            ReaderClosed: The model was closed, or the process was forked since it was opened.
        """
        boxes = []
        for each in names:
            name, slices = (each, None) if isinstance(each, str) else each
            tensor = self._tensor(name)
            if slices is not None and len(slices) != len(tensor.shape):
                raise ConfigError(f"{quote(name)} has {len(tensor.shape)} dimensions, not {len(slices)}")
            ranges = [one.indices(size)[:2] for one, size in zip(slices or (), tensor.shape, strict=bool(slices))]
            offsets = [start for start, _ in ranges] if slices else [0] * len(tensor.shape)
            sizes = [max(0, end - start) for start, end in ranges] if slices else list(tensor.shape)
            if math.prod(sizes):
                boxes.append((tensor, offsets, sizes))
        self._reader.prefetch(boxes, only=only)

    def lazy_tensor(self, name: str) -> LazyTensor:
        """Return one tensor, or a view of it, that is read when it is copied, for loaders of engines.

        Args:
            name: Name of the tensor.

        Returns:
            The lazy tensor (`actors.reader.lazy_tensor`).

        Raises:
            TensorNotFound: The model has no such tensor.
        """
        return self._lazy(self._tensor(name))

    def lazy_tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Iterate over (name, lazy tensor) in the order of storage, for loaders of engines.

        A lazy tensor is read when it is copied (`actors.reader.lazy_tensor`). When the iteration goes on, this reader
        says that it has passed what it has not read, so other readers of its group wait for it no longer. It can
        still be read later.
        """
        passed = 0
        for tensor in self._index.tensors:
            yield tensor.name, self._lazy(tensor)
            chunk = self._reader.first_chunk_after(tensor)
            if chunk > passed:
                self._reader.pass_by(passed, chunk)
                passed = chunk

    def fetch_first(self) -> None:
        """Start to fetch what `lazy_tensors` begins with, as much as may be fetched ahead. Returns at once.

        For loaders of engines that have other work to do before they read.
        """
        self._reader.fetch_first()

    def report(self) -> dict[str, Any]:
        """Return what reading this model has cost, as plain values.

        Of this process: `host` (pid of the process that has the arena), `shared` (whether other processes may use it),
        `why_private` (why not; empty if they may), `hash` (of the digests that chunks were compared with; empty if the
        model was not published, so that only sizes and versions were checked), `read_bytes` (of tensors, or of parts
        of them), `whole_reads` (lazy tensors that were read whole, because an operation needed their memory).

        Of its group together, as of a node in a load's report: `store_bytes`, `cached_bytes`, `disk_bytes`,
        `refetched_bytes`, `store_chunks`, `retries`.
        """
        node: NodeReport = self._link.report()
        host = self._link.host
        why = "" if host is None else host.why_private
        return {
            "host": host.host.pid if host is not None and host.host is not None else 0,
            "shared": not why,
            "why_private": why,
            "hash": self._index.chunks.hash_name or "",
            "read_bytes": self._reader.delivered_bytes,
            "whole_reads": self._whole_reads,
            "store_bytes": node.store_bytes,
            "store_chunks": node.store_chunks,
            "cached_bytes": node.cached_bytes,
            "disk_bytes": node.disk_bytes,
            "refetched_bytes": node.refetched_bytes,
            "retries": dict(node.retries),
        }

    def close(self) -> None:
        """Give back everything that this reader holds of the arena. Tensors that were returned stay valid."""
        self._closing.detach()
        _close(self._link, self._reader)
        if self._staging is not None:
            self._staging.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenModel({self._uri!r}, tensors={len(self)}, revision={self.revision[:12]!r})"

    def _tensor(self, name: str) -> Tensor:
        found = self._tensors.get(name)
        if found is None:
            raise TensorNotFound(f"the model has no tensor {quote(name)}", uri=self._uri, tensors=len(self))
        return found

    def _lazy(self, tensor: Tensor) -> LazyTensor:
        from actors.reader.lazy_tensor import LazyTensor

        return LazyTensor(_Stored(self, tensor))

    def _pinned(self) -> PinnedStaging:
        from actors.devices.cuda_device import PinnedStaging

        with self._staging_lock:
            self._staging = self._staging or PinnedStaging()
            return self._staging

    def _hand_out(self, tensor: torch.Tensor) -> torch.Tensor | np.ndarray[Any, Any]:
        if self._framework == "pt":
            return tensor.to(self._device)
        try:
            return tensor.numpy()
        except TypeError as error:
            raise ConfigError(
                f"numpy has no dtype {tensor.dtype}", hint='open the model with framework="pt"'
            ) from error

    def _header_metadata(self, shard: int) -> dict[str, str]:
        size_bytes = self._index.shards[shard].size_bytes
        end = min((tensor.start for tensor in self._index.tensors if tensor.shard == shard), default=size_bytes)
        return dict(parse_header(self._reader.read_bytes(shard, end), size_bytes).metadata)


@checks_arguments
def safe_open(
    filename: str | os.PathLike[str],
    framework: str = "pt",
    device: str | int = "cpu",
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    credentials: Credentials | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    signed_name: str | None = None,
    revision: str | None = None,
    group: str | None = None,
    member: int = 0,
    members: int = 1,
    cache: bool = True,
    config: Config | None = None,
) -> OpenModel:
    """Open a model for reading, as `safetensors.safe_open` opens a file. Needs no Ray.

    Only the chunks of what is asked for are read, and no byte is returned before its chunk was verified. All processes
    of the user on this machine share what is read.

    Args:
        filename: URI of the model, as for `load`: a folder with shards, or one safetensors file, in a store or local.
        framework: "pt" (also "torch", "pytorch") for torch tensors, or "numpy" ("np") for numpy arrays.
        device: Device of torch tensors: "cpu", "cuda", "cuda:1", or the number of a GPU.
        endpoint_url: As for `load`.
        region: As for `load`.
        profile: As for `load`.
        anonymous: As for `load`.
        credentials: As for `load`.
        trusted_keys: As for `load`.
        signed_name: As for `load`.
        revision: The only revision of the model that is accepted.
        group: Name that processes pass which read the same model at the same time, such as the ranks of one engine.
            They cause one read of each chunk, in a window of limited size, even if one of them is slower. None: this
            reader is alone. It still finds what others have read while that is in the arena.
        member: Number of this process in its group, from 0.
        members: Number of processes in the group on this machine.
        cache: Whether chunks that were read stay in shared memory for later readers, as far as the machine has memory
            to spare. It counts where this process owns the shared memory, and `LONGSHORE_ARENA_BYTES` is not set.
        config: Settings; None reads them from the environment.

    Returns:
        The open model, which is also a context manager.

    Raises:
        ConfigError: An argument or setting is invalid.
        StoreError: The store refused access, or has no such model.
        CheckpointError: The model is none that can be read.
        SignatureError: The manifest is not signed by a trusted key.

    Reads raise RevisionMismatch when the group reads another revision, which its first reader found.

    Example:
        ```python
        with cluster.safe_open("s3://models/llama-8b") as f:
            norm = f.get_tensor("model.norm.weight")
            half = f.get_slice("lm_head.weight")[:64000]
        ```
    """
    options = collect(LoadOptions, {**locals(), "model_uri": filename, "device": "cpu"})
    if framework not in FRAMEWORKS:
        raise ConfigError(f"framework must be one of {', '.join(FRAMEWORKS)}, not {framework!r:.40}")
    if not 0 <= member < members:
        raise ConfigError(f"a group of {members} has members 0 to {members - 1}, not {member}")
    if FRAMEWORKS[framework] == "np" and device != "cpu":
        raise ConfigError(f"numpy arrays are on the CPU, not on {device!r:.40}")
    found = find_model(options, config or Config.from_env())
    return open_found(found, framework, device, group=group, member=member, members=members, cache=cache)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model whose index was read, and nothing else. `open_found` takes it over; otherwise close its store."""

    request: LoadRequest
    index: ModelIndex
    store: ObjectStore
    settings: Config


def find_model(options: LoadOptions, settings: Config) -> FoundModel:
    """Read the index of a model, verified. Raises as `safe_open`."""
    request = make_request(options, settings.public_keys())
    settings.source_rules().check(request.store.ref, options.credentials)
    store = open_store(request.store.ref, request.store.credentials, read_timeout_s=settings.read_timeout_s)
    try:
        index = read_index(store, request, chunk_bytes=settings.chunk_bytes, trust=TrustPolicy.of(settings))
        return FoundModel(request, index, store, settings)
    except BaseException:
        store.close()
        raise


def open_found(
    found: FoundModel,
    framework: str = "pt",
    device: str | int = "cpu",
    *,
    group: str | None = None,
    member: int = 0,
    members: int = 1,
    cache: bool = True,
) -> OpenModel:
    """Open a model that was found. Arguments and errors are those of `safe_open`."""
    request, index, store, own = found.request, found.index, found.store, found.settings
    try:
        tables = ReaderTables.of(index.shards, index.chunks)
        load_id = f"reader-{uuid.uuid4().hex[:12]}" if group is None else _group_id(group, request.uri)
        job = NodeJob(
            load_id=load_id,
            attempt=1,
            shared=b"",
            store_identity=request.store.ref.identity(),
            ranks=tuple(range(members)),
            done=frozenset(),
            min_slots=min_slots(members),
            chunk_attempts=own.chunk_attempts,
            lease_deadline_s=own.lease_deadline_s,
            record=b"",
            most_requests=own.fetch_threads,
            hedge_factor=own.hedge_factor,
            hedge_after_s=own.hedge_after_s,
            model=model_label(request.uri),
            on_demand=True,
            # Chunks without digests are as large as this reader's settings say.
            revision=index.revision if index.chunks.hash_name else f"{index.revision} {own.chunk_bytes}",
            group_patience_s=own.group_patience_s,
        )
        sizes_are_set = own.arena_bytes or own.window_bytes
        least_bytes = job.min_slots * own.slot_bytes + (0 if cache or sizes_are_set else _stack_bytes(index))
        link = HostLink(host_config(own, least_bytes, cache=cache), job, tables)
        # Later opens of the same member have larger numbers, in whatever process: they take its place.
        identity = RankIdentity(load_id, 1, member, time.monotonic_ns(), ProcessId.current())
        reader = ModelReader(link, tables, _with_tensors(index), identity, store, own.fetch_settings(), readers=members)
        return OpenModel(index, reader, link, FRAMEWORKS[framework], device, request.uri)
    except BaseException:
        store.close()
        raise


def _close(link: HostLink, reader: ModelReader) -> None:
    link.give_up()
    reader.close()
    link.close()


def _close_later(pid: int, link: HostLink, reader: ModelReader) -> None:
    if os.getpid() == pid:  # else everything belongs to the parent
        threading.Thread(target=_close, args=(link, reader), name="close-model", daemon=True).start()


def _stack_bytes(index: ModelIndex) -> int:
    """Return what the window needs to have the largest stack of experts at once, if the machine has memory for it.

    Engines copy parts of each expert in several passes over the whole stack.
    """
    largest_bytes = max((tensor.size_bytes for tensor in index.tensors if len(tensor.shape) > 2), default=0)
    try:
        most_bytes = min(available_host_bytes() // STACK_SHARE, free_bytes(SHM_DIRECTORY) // 2)
    except OSError:
        return 0
    return min(largest_bytes * 5 // 4, most_bytes)


def _with_tensors(index: ModelIndex) -> list[int]:
    """Return the ids of the chunks that have bytes of tensors, ascending."""
    first = np.full(len(index.shards), np.iinfo(np.int64).max)
    for tensor in index.tensors:
        first[tensor.shard] = min(first[tensor.shard], tensor.start)
    chunks = index.chunks
    found: list[int] = np.flatnonzero(chunks.end > first[chunks.shard]).tolist() if len(chunks) else []
    return found


def _group_id(group: str, uri: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in (group, uri):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"readers-{digest.hexdigest()}"
