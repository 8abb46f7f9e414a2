"""The functions of the Python client. `a` before a name makes its asyncio twin.

    load --LoadOptions--> load_model --LoadRequest--> coordinator; wait for READY and show progress --> LoadedModel

Functions for checkpoints in stores are in `cluster.publishing`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cluster.argument_types import checks_arguments
from cluster.command_line.progress import load_counter, shown_progress
from cluster.config import Config
from cluster.errors import ClusterLost, LoadCancelled, LoadForgotten, LoadTimeout, ModelNotFound, NoCoordinator
from cluster.fit.options import GivenMap, GivenMemory
from cluster.joining.connection import Connection, connect
from cluster.joining.patience import Patience, checked_timeout
from cluster.joining.ray_join import import_ray
from cluster.layouts.rules import LayoutRules
from cluster.model import GIVEN_UP, LoadedModel, give_up_handles, in_thread, load_in_thread
from cluster.options import Dtype, LoadOptions, PlacementGroup, collect
from cluster.request import LoadRequest, StoreOptions, make_request, with_live_rules
from cluster.telemetry.chunk_map import ChunkMap, LoadEvent
from cluster.telemetry.report import ClusterStatus, LoadProgress, LoadReport
from cluster.telemetry.scale_report import ScaleReport
from cluster.telemetry.stats import Jsonable
from cluster.telemetry.tracing import load_trace
from cluster.telemetry.update_report import UpdateReport
from cluster.updating import UpdateOptions, scale_on, update_on
from storage.errors import LongshoreError
from storage.store_ref import Credentials

if TYPE_CHECKING:
    pass


EARLY = ("", "planning", "waiting", "starting")  # no byte has moved: asking again costs nothing
TRIES = 5  # requests for a load that coordinators forgot
REBUILD_GRACE_S = 20.0  # by then every agent has reported to a restarted coordinator
RELEASED_S = 2.0  # how long a caller that was interrupted waits until its hold is released


def load_on(
    connection: Connection,
    request: LoadRequest,
    progress: Callable[[LoadProgress], None] | None,
    patience: Patience,
    *,
    called_s: float,
) -> tuple[str, LoadReport]:
    """Request a load, wait until it is ready, and return the model's id and the report. This client then holds it.

    `called_s`: when the user called, on the monotonic clock. Raises as `wait_until_ready` does, after it has released
    the model. A KeyboardInterrupt gets a note about what continues in the cluster.
    """
    connect_s = time.monotonic() - called_s
    request = replace(request, client_id=connection.client_id)
    tries_left = TRIES
    while True:
        tries_left -= 1
        try:
            model_id, shared = connection.call("load", request, patience=patience)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(_what_goes_on(connection, request, ""))
            raise
        connection.hold(model_id, request.store)
        try:
            report, waited = wait_until_ready(connection, model_id, progress, patience)
            total_s = time.monotonic() - called_s
            return model_id, report.as_seen(total_s, connect_s, shared=shared, waited=waited)
        except LoadForgotten:  # by a coordinator that was killed before any agent knew of it
            connection.drop(model_id)
            if not tries_left:
                raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                error.add_note(_what_goes_on(connection, request, model_id))
            if connection.drop(model_id):
                with contextlib.suppress(LongshoreError):  # unheard, the hold lapses by itself
                    soon = Patience(time.monotonic() + RELEASED_S)
                    connection.call("release", model_id, connection.client_id, patience=soon)
            raise


def _what_goes_on(connection: Connection, request: LoadRequest, model_id: str) -> str:
    """Return what becomes of an interrupted load. `model_id`: empty while the coordinator has not answered."""
    if connection.local:
        return "the local cluster that was started for the load ends with this process, and the load with it"
    how = f"`longshore status` shows it, `longshore release {model_id or 'MODEL_ID'}` ends it"
    if request.keep:
        begun = "the load goes on in the cluster" if model_id else "a load that the cluster has begun goes on there"
        return f"{begun}: {how}"
    if model_id:
        return "the load ends in the cluster, unless another process wants it"
    return f"a load that the cluster has begun ends there within a minute: {how} at once"


def wait_until_ready(
    connection: Connection,
    model_id: str,
    progress: Callable[[LoadProgress], None] | None,
    patience: Patience,
) -> tuple[LoadReport, bool]:
    """Return the report, and whether the load was not ready at once.

    Raises the load's error; LoadTimeout and LoadCancelled as `patience` decides; ClusterLost; LoadForgotten when the
    coordinator was lost before a byte moved.
    """
    seen, waited, state = -1, False, ""
    details: dict[str, Any] = {"model": model_id}
    unknown_since_s: float | None = None
    while True:
        try:
            seen, now, report, error = connection.call("wait", model_id, seen, patience.left_s(1.0), patience=patience)
            unknown_since_s = None
        except (LoadTimeout, LoadCancelled) as error:
            raise error.with_details(**details) from None
        except ModelNotFound as error:
            # A restarted coordinator does not know the load before the agents have reported it.
            if state in EARLY:
                raise LoadForgotten(
                    "the coordinator was lost before the load had begun, and again when it was asked anew",
                    hint="see the coordinator's log in Ray's session folder; out of memory is the usual cause",
                    model=model_id,
                ) from error
            unknown_since_s = unknown_since_s or time.monotonic()
            if time.monotonic() - unknown_since_s > REBUILD_GRACE_S:
                raise ClusterLost(
                    "the cluster has forgotten the load: its coordinator and its agents were lost together",
                    hint="load again; chunks that the arena still has are not fetched again",
                    model=model_id,
                ) from error
            patience.sleep(0.2)
            continue
        state = now.state
        if progress is not None and (report is not None or now.state != "ready"):  # else its stats are not all in
            progress(now)
        if error is not None:
            raise error
        if report is not None and now.state == "ready":
            return report, waited
        waited = True
        details.update(state=now.state, placed_bytes=now.placed_bytes, total_bytes=now.total_bytes)


@checks_arguments
def load(
    model_uri: str | os.PathLike[str],
    *,
    tensor_parallel_size: int = 1,
    fsdp_size: int = 1,
    data_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 0,
    vocabulary_multiple: int = 1,
    device: str = "auto",
    keep: bool = False,
    address: str | None = None,
    wait_for_resources_s: float = 0,
    placement: str = "auto",
    placement_group: PlacementGroup | None = None,
    progress: bool | Callable[[LoadProgress], None] | None = None,
    timeout_s: float | None = None,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    credentials: Credentials | None = None,
    layout_rules: LayoutRules | None = None,
    dtype: Dtype = "auto",
    quantization: str | None = None,
    skip_quantization: Sequence[str] | None = None,
    device_map: GivenMap | None = None,
    max_memory: GivenMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    fit: str = "strict",
    gpu_memory_utilization: float | None = None,
    reserve_bytes: int | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    signed_name: str | None = None,
    revision: str | None = None,
    config: Config | None = None,
) -> LoadedModel:
    """Load a model into the cluster's devices, every chunk verified; return when every rank has its slices.

    The layout needs `tensor_parallel_size` x `fsdp_size` x `pipeline_parallel_size` x `data_parallel_size` ranks, with
    one worker each. A second load of the same model with the same options returns the resident one.

    Args:
        model_uri: Folder of the checkpoint: "s3://bucket/model", "file:///models/llama", an http(s) URL, or a path.
        tensor_parallel_size: Number of ranks that each weight matrix is cut over.
        fsdp_size: Number of ranks that rows of each tensor are spread over, as torch FSDP2 does.
        data_parallel_size: Number of copies of the model.
        pipeline_parallel_size: Number of stages that the layers are divided into.
        expert_parallel_size: Number of parts that the experts are spread in, over tensor and data ranks.
        expert_tensor_parallel_size: Number of ranks that each expert is cut over. 0: as many as are left.
        vocabulary_multiple: Embedding and head get rows of zeros up to a multiple of this.
        device: "cuda" (one GPU per rank), "cpu" (host memory) or "auto" ("cuda" when the cluster has GPUs).
        keep: Leave the model resident when nobody holds it any more.
        address: "HOST:PORT" of the Ray cluster. "local" starts one for this process. None: the one that this process
            has joined, else RAY_ADDRESS, else one that runs on this machine, else a local one.
        wait_for_resources_s: Seconds that a placement group stays pending for GPUs, to which Ray's node autoscaler
            reacts. 0: refuse within seconds when too few are free.
        placement: "via_arena" (chunks stay cached on the node), "direct" (what one rank alone wants goes into its host
            memory without a copy, uncached) or "auto" ("direct" for local files, which the kernel caches, and on a node
            that shares chunks with no other, when its arena cannot keep its share and it has no disk tier).
        placement_group: A Ray placement group of yours. Rank i takes bundle i.
        progress: True shows a bar on stderr, in a terminal or a notebook, and lines elsewhere. False shows nothing. A
            function is called from this thread with every change. None: a bar in a terminal, nothing elsewhere.
        timeout_s: Seconds until LoadTimeout. None: no limit.
        endpoint_url: URL of an S3-compatible server. None: as the AWS configuration says, else the provider's own.
        region: Region of the bucket. None: as the environment of each node says.
        profile: Name of a profile in the AWS configuration.
        anonymous: Send unsigned requests, for public buckets.
        credentials: Keys for the store, a `storage.store_ref.Credentials`. None: those of each node.
        layout_rules: Patterns of tensor names and a rule for each, or a JSON file of that. They come before the rules
            of the model's family (docs/layouts.md).
        dtype: What floating-point tensors are cast to: "bfloat16" or "bf16", "float16", "float32", or a torch.dtype.
            "auto": as stored.
        quantization: "fp8" (a scale per row), "fp8_tensor", "int8", "int4" or "nf4" for linear layers and experts,
            while they are loaded. None: as stored.
        skip_quantization: Patterns of names of tensors that are not quantized. "default" among them stands for heads,
            towers and experts in one tensor. None: "default" alone.
        device_map: Devices of one rank, as in Accelerate: "auto", "balanced", "balanced_low_0", "sequential", one
            device, or a dict of modules and devices. GPUs are filled first, then "cpu", then "disk"
            (docs/device_map.md).
        max_memory: Limit of each device: `{0: "20GB", "cpu": "60GB"}`. Without a `device_map` it means "auto" within
            that.
        offload_folder: Folder on the node for what goes to disk. Without a `device_map` it means "auto".
        fit: "strict" refuses what does not fit before a byte moves, and names a change that would. "auto" takes the
            first of as given, bfloat16, fp8, int8 and int4 that fits (`report.taken`).
        gpu_memory_utilization: Part of each GPU's memory, 0 to 1, that may be in use in all. None: no such limit.
        reserve_bytes: Bytes that stay free on each GPU, or on each host for CPU ranks. None: as the settings say.
        trusted_keys: Public keys, base64 or files, of which one must have signed the manifest. `KEY:NAME` trusts a key
            for that name alone. None: as the settings say.
        signed_name: Name under which the manifest must be signed. None: the path of the URI without scheme and bucket.
        revision: The only revision that is accepted (`report.revision`). None: the one that is stored.
        config: Settings of this client, and of the cluster where this call starts it. None: read from the `LONGSHORE_*`
            variables of the environment.

    Returns:
        The model, held by this process until `release` or the end of its `with` block.

    Raises:
        ConfigError: An argument or a setting is wrong.
        StoreError: The store cannot be read. SourceRefused: the settings do not allow that place.
        CheckpointError: No loadable checkpoint is there.
        SignatureError: The manifest is unsigned, signed by another key or as another model, or was changed.
        RevisionMismatch: The store has another revision than `revision`.
        ManifestError: The manifest cannot be used for another reason.
        LayoutError: The model cannot be cut like that.
        DoesNotFit: It does not fit, with a change that would.
        PlanError: It cannot be planned for another reason.
        NotEnoughResources: The cluster has too few GPUs, or too little shared memory.
        IntegrityError: Bytes differ from what was published.
        ChunkFailed: A chunk could not be fetched by any worker.
        RankLost: A worker died more often than it is replaced.
        LoadTimeout: `timeout_s` has passed.
        ClusterLost: No Ray cluster answers.
        VersionMismatch: The cluster runs another version of Longshore.

    Example:
        ```python
        with cluster.load("s3://models/llama", tensor_parallel_size=4) as model:
            norms = model.call(lambda shard: float(shard["model.norm.weight"].float().norm()))
        ```
    """
    return load_model(
        collect(LoadOptions, locals()), address=address, progress=progress, timeout_s=timeout_s, config=config
    )


def load_model(
    options: LoadOptions,
    *,
    address: str | None = None,
    progress: bool | Callable[[LoadProgress], None] | None = None,
    timeout_s: float | None = None,
    config: Config | None = None,
) -> LoadedModel:
    """Load a model as the options say; the arguments and errors are those of `load`."""
    started_s, deadline_s = time.monotonic(), checked_timeout(timeout_s)
    config = config or Config.from_env()
    request = make_request(options, config.public_keys())
    config.source_rules().check(request.store.ref, options.credentials)
    patience = Patience(None if deadline_s is None else started_s + deadline_s, GIVEN_UP.get())
    connection = connect(address, config, patience=patience)
    if connection is None:
        raise ClusterLost("no cluster could be joined or started")
    with load_trace(request.uri, started_s) as done, shown_progress(progress, load_counter) as show:
        model_id, report = with_live_rules(
            request,
            lambda asked: load_on(connection, asked, show, patience, called_s=started_s),
        )
        done(report)
    model = LoadedModel(connection, model_id, report)
    if not connection.holds(model_id):
        raise LoadCancelled("this process released the model while it was loaded", model=model_id)
    return model


aload = load_in_thread(load)
aload_model = load_in_thread(load_model)


LONGEST_WAIT_S = 30.0  # for events, in one call


@checks_arguments
def status(address: str | None = None) -> ClusterStatus:
    """Return the cluster's models, ranks, nodes and arenas.

    Args:
        address: "HOST:PORT" of the Ray cluster. None: as for `load`, but none is started.

    Returns:
        One moment of the cluster.

    Raises:
        ClusterLost: No Ray cluster answers.
        NoCoordinator: A Ray cluster runs, and Longshore does not run on it.

    Example:
        ```python
        print([model.model_id for model in cluster.status().models])
        ```
    """
    found: ClusterStatus = _running(address).call("status")
    return found


@checks_arguments
def events(model_id: str, *, after: int = 0, wait_s: float = 0.0, address: str | None = None) -> tuple[LoadEvent, ...]:
    """Return the events of a load, model or save after number `after`, oldest first; wait up to `wait_s` for the first.

    The last 1000 of a load are kept, until five minutes after its end. Raises ModelNotFound, ClusterLost.
    """
    found: tuple[LoadEvent, ...] = _running(address).call("events", model_id, after, min(wait_s, LONGEST_WAIT_S))
    return found


@checks_arguments
def chunk_map(model_id: str, *, address: str | None = None) -> ChunkMap:
    """Return where each chunk of a load is, on every node that has ranks of it, and where each node had its bytes from.

    Raises ModelNotFound, ClusterLost.
    """
    found: ChunkMap = _running(address).call("chunks", model_id)
    return found


@checks_arguments
def request_of(model_id: str, *, address: str | None = None) -> LoadRequest:
    """Return the request that a model was loaded with, without credentials. Raises ModelNotFound, ClusterLost."""
    found: LoadRequest = _running(address).call("request_of", model_id)
    return found


@checks_arguments
def update(
    model: LoadedModel | str,
    uri: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    streaming: bool = False,
    signed_name: str | None = None,
    timeout_s: float | None = None,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool | None = None,
    credentials: Credentials | None = None,
    address: str | None = None,
) -> UpdateReport:
    """Give a resident model the contents of another revision, in place. Only chunks that differ are read.

    Args:
        model: What `load` returned, or the model's id. It need not be held by this process.
        uri: Folder of the new revision. None: the model's own, as it is stored now.
        revision: The only revision that is accepted. None: the one that is stored.
        streaming: Read into the tensors themselves. Nothing is staged, calls wait for the whole update, and a failure
            leaves contents of two revisions: the model is broken until it is updated again or released.
        signed_name: Name under which the manifest must be signed. None: the path of the URI.
        timeout_s: Seconds until LoadTimeout; the update goes on in the cluster. None: no limit.
        endpoint_url: URL of an S3-compatible server. None: that of the model.
        region: Region of the bucket. None: that of the model.
        profile: Name of a profile in the AWS configuration. None: that of the model.
        anonymous: Send unsigned requests, for public buckets. None: as for the model, and False with a profile or
            credentials.
        credentials: Keys for the store. None: in the model's own bucket those of its load, else each node's.
        address: Of the Ray cluster, where this process has not joined it.

    Returns:
        What changed, what was read, and how each rank came to the new revision.

    Raises:
        LongshoreError: As for `LoadedModel.update`.
        ModelNotFound: There is no such model.
        ClusterLost: No cluster or no coordinator answers.

    Example:
        ```python
        report = cluster.update("llama-3f9a21c4", "s3://models/llama/step-2000")
        print(report.changed_tensors, report.read_bytes)
        ```
    """
    store = {"endpoint_url": endpoint_url, "region": region, "profile": profile, "anonymous": anonymous}
    about = {"revision": revision, "streaming": streaming, "signed_name": signed_name, "credentials": credentials}
    if isinstance(model, LoadedModel):
        return model.update(uri, timeout_s=timeout_s, **store, **about)  # type: ignore[arg-type]
    limit_s = checked_timeout(timeout_s)
    patience = Patience(None if limit_s is None else time.monotonic() + limit_s, GIVEN_UP.get())
    options = UpdateOptions(uri, store=StoreOptions(**store), **about)  # type: ignore[arg-type]
    return update_on(_running(address), model, options, patience)


@checks_arguments
def scale(
    model: LoadedModel | str, data_parallel_size: int, *, timeout_s: float | None = None, address: str | None = None
) -> ScaleReport:
    """Give a resident model another number of replicas, while its other ranks serve.

    Args:
        model: What `load` returned, or the model's id. It need not be held by this process.
        data_parallel_size: Number of copies of the model, 1 or more.
        timeout_s: Seconds until LoadTimeout; the change goes on in the cluster. None: no limit.
        address: Of the Ray cluster, where this process has not joined it.

    Returns:
        The ranks that were added or removed, and where the bytes of those added came from.

    Raises:
        LongshoreError: As for `LoadedModel.scale`.
        ModelNotFound: There is no such model.
        ClusterLost: No cluster or no coordinator answers.

    Example:
        ```python
        report = cluster.scale("llama-3f9a21c4", 2)
        print(report.ranks, report.store_bytes)
        ```
    """
    if isinstance(model, LoadedModel):
        return model.scale(data_parallel_size, timeout_s=timeout_s)
    limit_s = checked_timeout(timeout_s)
    patience = Patience(None if limit_s is None else time.monotonic() + limit_s, GIVEN_UP.get())
    return scale_on(_running(address), model, data_parallel_size, patience)


@dataclass(frozen=True, slots=True)
class Released(Jsonable):
    """The result of `release`."""

    model_id: str
    freed: bool  # the model's memory is free
    holders: int  # other processes that still hold the model; 0 when it was freed

    def __str__(self) -> str:
        if self.freed:
            return f"{self.model_id} is freed"
        others = "another process holds" if self.holders == 1 else f"{self.holders} other processes hold"
        return f"{self.model_id} is not kept any more, but {others} it"


@checks_arguments
def release(model: LoadedModel | str, *, force: bool = False, address: str | None = None) -> Released:
    """Give up every hold of this process on a model, and its keep flag: unless another process holds it, it is freed.

    With `keep=True` a model stays when nobody holds it; `LoadedModel.release` gives up one hold and leaves the flag.

    Args:
        model: What `load` returned, or the model's id. Every LoadedModel of this process that holds it is released, and
            its `with` block ends as usual.
        force: Free it whoever holds it; their calls fail.
        address: Of the Ray cluster, where this process has not joined it.

    Returns:
        Whether the memory is free now, else how many other processes still hold the model.

    Raises:
        ConfigError: `model` is neither a LoadedModel nor an id.
        ModelNotFound: There is no such model.
        ClusterLost: No cluster or no coordinator answers.
    """
    model_id = model.model_id if isinstance(model, LoadedModel) else model
    connection = _running(address)
    give_up_handles(model_id)
    connection.drop_all(model_id)
    if force:
        connection.call("release", model_id, None, force=True)
        return Released(model_id, True, 0)
    holders: int = connection.call("unkeep", model_id, connection.client_id)
    return Released(model_id, not holders, holders)


@checks_arguments
def release_warm(*, address: str | None = None) -> int:
    """End the idle workers of released models, and return of how many models they were. Raises ClusterLost.

    A load that needs their place ends them by itself. This frees the GPUs for other programs.
    """
    ended: int = _running(address).call("release_warm")
    return ended


@checks_arguments
def shutdown(address: str | None = None) -> None:
    """End every model, agent and arena, and the coordinator. The Ray cluster stays. Raises ClusterLost."""
    connection = _running(address, any_version=True)  # it is how one gets rid of another version
    connection.call("shutdown")
    connection.end_coordinator()


def _running(address: str | None, *, any_version: bool = False) -> Connection:
    connection = connect(address, Config.from_env(), start=False, any_version=any_version)
    if connection is None and not import_ray().is_initialized():
        raise ClusterLost(
            "no Ray cluster runs here",
            hint="ray start --head starts one; --address or RAY_ADDRESS says which cluster elsewhere is meant",
        )
    if connection is None:
        raise NoCoordinator(
            "no Longshore coordinator runs in this cluster",
            hint="the first load starts one; --address or RAY_ADDRESS says which cluster is meant",
        )
    return connection


astatus = in_thread(status)
aupdate = in_thread(update)
ascale = in_thread(scale)
arelease = in_thread(release)
