"""One rank inside a process of the user: an actor, an engine's worker, a `torchrun` rank.

    with cluster.host_rank("s3://models/llama", rank, tensor_parallel_size=8, group="run-7") as shard:
        norm = shard["model.norm.weight"]  # a tensor on this process's device

Each process plans for itself, and all of a group come to the same plan. Ranks on one node share that node's agent and
arena, so a chunk still leaves the store once per node. The coordinator knows only which revision a group loads: the
ranks live and die with the process, and `cluster.status` does not list them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from actors import launch
from actors.coordination.fit import own_device, own_gpus, own_limits, own_misfit
from actors.coordination.jobs import slots_taken
from actors.devices.device import open_device
from actors.devices.mapped_device import open_mapped_rank
from actors.links import NAMESPACE, PackedCalls, RayAgentLink, agent_name
from actors.rank.executor import RankLoader
from actors.shard import RankShard
from cluster.argument_types import checks_arguments
from cluster.config import Config, TrustPolicy
from cluster.errors import AgentEnded, ClusterLost, ConfigError, LoadTimeout
from cluster.fit.needs import host_bytes, min_slots
from cluster.fit.options import GivenMap, GivenMemory
from cluster.joining.node_tasks import unwrapped
from cluster.joining.patience import LOOK_S, Patience, checked_timeout, in_thread
from cluster.joining.ray_private import started_here
from cluster.layouts.rules import LayoutRules
from cluster.messages import GroupMember, JoinReply, NodeFacts, NodeJob, RankHello, RankJob, unpack_message
from cluster.options import Dtype, LoadOptions, collect
from cluster.planning.make_plan import prepare_plan
from cluster.planning.packed_plan import RankFacts, pack_shared, rank_facts
from cluster.request import LoadRequest, make_request, with_live_rules
from cluster.telemetry.metrics import model_label
from storage.errors import RevisionMismatch
from storage.host.processes import ProcessId
from storage.store_ref import Credentials

T = TypeVar("T")

BEGIN_EVERY_S = 0.2  # between the first two requests for slots that other loads hold; each later pause is twice as long
BEGIN_AT_LEAST_EVERY_S = 2.0
CALL_TIMEOUT_S = 60.0
TELL_S = 5.0  # a rank that ends waits no longer for an agent that does not answer


@checks_arguments
@contextlib.contextmanager
def host_rank(
    model_uri: str | os.PathLike[str],
    rank: int,
    *,
    tensor_parallel_size: int = 1,
    fsdp_size: int = 1,
    data_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 0,
    vocabulary_multiple: int = 1,
    device: str = "auto",
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
    gpu_memory_utilization: float | None = None,
    reserve_bytes: int | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    signed_name: str | None = None,
    revision: str | None = None,
    group: str | None = None,
    timeout_s: float | None = None,
    config: Config | None = None,
) -> Iterator[RankShard]:
    """Load the slices of one rank, verified, into the calling process; blocks until all are there.

    The process must have joined Ray; coordinator and agent are started when there are none. The memory is freed at the
    end of the block; tensors taken out of `shard` stay valid and keep theirs. There is no `fit="auto"`: each process
    decides for its own rank, and all ranks of a model have to hold it alike.

    Args:
        model_uri: As for `load`.
        rank: Rank of the layout, from 0. Each process hosts its own.
        tensor_parallel_size: As for `load`.
        fsdp_size: As for `load`.
        data_parallel_size: As for `load`.
        pipeline_parallel_size: As for `load`.
        expert_parallel_size: As for `load`.
        expert_tensor_parallel_size: As for `load`.
        vocabulary_multiple: As for `load`.
        device: "cpu", or "cuda" for the first GPU that is visible here (with a `device_map`, for all of them). "auto",
            the default, is "cuda" where the process sees a GPU, else "cpu".
        endpoint_url: As for `load`.
        region: As for `load`.
        profile: As for `load`.
        anonymous: As for `load`.
        credentials: As for `load`.
        layout_rules: As for `load`.
        dtype: As for `load`.
        quantization: As for `load`.
        skip_quantization: As for `load`.
        device_map: As for `load`.
        max_memory: As for `load`.
        offload_folder: As for `load`.
        gpu_memory_utilization: As for `load`.
        reserve_bytes: As for `load`.
        trusted_keys: As for `load`.
        signed_name: As for `load`.
        revision: The only revision of the model that is accepted.
        group: A name that all processes which belong together pass, and no others: a run's or job's id. The first
            process's revision binds the others for as long as any of them is in its block. Processes that share a model
            pass this or `revision`, or they could load two revisions when one is published meanwhile.
        timeout_s: Seconds until LoadTimeout; None waits as long as it takes.
        config: Settings of this process, which only narrow those of the cluster; None reads them from the environment.

    Returns:
        A context manager that gives the rank's shard, a mapping of tensor names to tensors.

    Raises:
        ConfigError: The layout has no such rank, or it has several and neither `group` nor `revision` is given.
        RevisionMismatch: The store has another revision than the group's processes load, or than `revision`.
        DoesNotFit: The rank does not fit into this process's device or host.
        ArenaBusy: Other loads held the node's arena slots for longer than `LONGSHORE_SLOTS_WAIT_S`; it names them.
        LoadTimeout: `timeout_s` has passed.
        LongshoreError: As for `load`.

    Example:
        ```python
        with cluster.host_rank("s3://models/llama", rank, tensor_parallel_size=4, group=job_id) as shard:
            shard.into(module)
        ```
    """
    options = collect(LoadOptions, locals())
    timeout_s = checked_timeout(timeout_s)
    patience = Patience(None if timeout_s is None else time.monotonic() + timeout_s)
    device = own_device(options.device)
    own = config or Config.from_env()
    request = make_request(replace(options, device=device), own.public_keys())
    if not 0 <= rank < request.world_size:
        raise ConfigError(f"the layout has ranks 0 to {request.world_size - 1}, not {rank}")
    if request.world_size > 1 and not group and revision is None:
        raise ConfigError(
            f"the {request.world_size} processes of this layout could load two revisions of the model",
            hint='pass the same group="..." to all of them (the id of your run), or revision=',
        )
    own.source_rules().check(request.store.ref, options.credentials)
    given = own if started_here() else None
    config = _settings_in_force(given, patience)
    if request.device_map is not None:
        limits = own_limits(request.device_map, device, request.fit, config)
        request = replace(request, node_memory=limits)
    trust = TrustPolicy.of(config)
    chunk_bytes, read_timeout_s = config.chunk_bytes, config.read_timeout_s
    _, plan = _within(
        patience,
        lambda: with_live_rules(
            request,
            lambda asked: prepare_plan(asked, chunk_bytes=chunk_bytes, read_timeout_s=read_timeout_s, trust=trust),
        ),
    )
    shared = pack_shared(plan)
    facts = rank_facts(plan.cut, plan.chunks.largest_bytes)[rank]
    # One load per rank: what ranks of a node have in common, they share through the arena.
    load_id = f"hosted-{uuid.uuid4().hex[:12]}-{rank}"
    link = _HostedLink(
        ray.get_runtime_context().get_node_id(),
        config,
        given,
        patience,
        NodeJob(
            load_id=load_id,
            attempt=1,
            shared=shared,
            store_identity=request.store.ref.identity(),
            ranks=(rank,),
            done=frozenset(),
            min_slots=min_slots(1),
            chunk_attempts=config.chunk_attempts,
            lease_deadline_s=config.lease_deadline_s,
            record=b"",
            placement=request.placement,
            most_requests=config.fetch_threads,
            hedge_factor=config.hedge_factor,
            hedge_after_s=config.hedge_after_s,
            model=model_label(request.uri),
            host_bytes=host_bytes(facts, device),
            process=ProcessId.current(),
            group=GroupMember(load_id, group, request.uri, plan.revision, ProcessId.current()) if group else None,
        ),
    )
    link.check_fit(facts, request)
    link.bind_group()
    job = RankJob(load_id, 1, rank, 0, shared, request.store, config.fetch_settings(), request.placement)
    if request.device_map is None:
        memory = open_device(device)
    else:
        memory = open_mapped_rank(plan.ranks[rank], replace(job, offload_folder=request.device_map.offload_folder))
    try:
        try:
            link.begin()
            _load(RankLoader(link, job, memory), patience)
        finally:
            link.end()
        yield RankShard(plan.ranks[rank], memory)
    finally:
        memory.free()
        link.leave()


def _load(loader: RankLoader, patience: Patience) -> None:
    """Run the loader. Raises LoadTimeout when the caller's timeout passes first."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(patience.left_s(LOOK_S)):
            try:
                patience.check()
            except LoadTimeout as error:
                loader.cancel(error)
                return

    watcher = threading.Thread(target=watch, name="timeout", daemon=True)
    watcher.start()
    try:
        loader.run()
    finally:
        over.set()
        watcher.join()


def _within(patience: Patience, work: Callable[[], T]) -> T:
    """Run `work` in a thread, and return or raise what it does. Raises LoadTimeout; `work` then runs to its end."""
    done = in_thread(work, "plan")
    while not wait([done], patience.left_s(LOOK_S)).done:
        patience.check()
    return done.result()


class _HostedLink(RayAgentLink):
    """A rank's link to its agent, over which it also begins and ends the load, as there is no coordinator for it."""

    def __init__(self, node_id: str, config: Config, given: Config | None, patience: Patience, job: NodeJob) -> None:
        """`given`: see `launch.ensure_coordinator`."""
        super().__init__(node_id)
        self._node_id = node_id
        self._config = config
        self._given = given
        self._patience = patience
        self._job = job

    def bind_group(self) -> None:
        """Return when the group's processes load the planned revision. Raises RevisionMismatch, ClusterLost."""
        group = self._job.group
        if group is None:
            return
        bound = self._again(lambda: _answer(self._coordinator().bind_group.remote(group), self._patience))
        if bound != group.revision:
            raise RevisionMismatch(
                f"the processes of the group {group.group!r} load another revision of the model",
                hint="it was published again meanwhile: end the group's processes and start them all again. Copies "
                "that are not published have a revision each: publish one and copy that to the nodes",
                uri=group.uri,
                expected=bound,
                found=group.revision,
            )

    def check_fit(self, facts: RankFacts, request: LoadRequest) -> None:
        """Return when the rank fits here. Raises DoesNotFit, ArenaError, ClusterLost."""
        here: NodeFacts = self._again(lambda: self._ask_agent("facts"))
        (rank,), device = self._job.ranks, request.device
        misfit = own_misfit(rank, facts, own_gpus(device), here.pools, device, request.fit, self._config)
        if misfit is not None:
            raise misfit

    def begin(self) -> None:
        """Return when the agent has the minimum of slots for the load. Raises ArenaError, ClusterLost, LoadTimeout."""
        began_s = time.monotonic()
        pause_s = BEGIN_EVERY_S
        while not self._again(lambda: self._ask_agent("begin", self._job)):
            waited_s = time.monotonic() - began_s
            if waited_s > self._config.slots_wait_s:
                holders = self._again(lambda: self._ask_agent("slot_holders"))
                raise slots_taken(self._job, socket.gethostname(), waited_s, holders)
            self._patience.sleep(pause_s)
            pause_s = min(2 * pause_s, BEGIN_AT_LEAST_EVERY_S)  # the whole job is sent each time

    def join(self, hello: RankHello) -> JoinReply:
        try:
            reply = super().join(hello)
            if not reply.known and reply.stop is None:  # the agent was restarted
                self.begin()
                reply = super().join(hello)
        except ClusterLost:
            self._agent()  # after an agent that was shut down there is none, until the coordinator starts another
            raise
        return reply

    def end(self) -> None:
        """Notify the agent that the load is over. An agent that has ended needs no message."""
        self._tell("end")

    def leave(self) -> None:
        """Notify the agent that this process leaves its group."""
        if self._job.group is not None:
            self._tell("leave")

    def _tell(self, call: str) -> None:
        with contextlib.suppress(RayError, ValueError):
            handle = ray.get_actor(agent_name(self._node_id), namespace=NAMESPACE)
            ray.get(getattr(handle, call).remote(self._job.load_id), timeout=TELL_S)

    def _again(self, ask: Callable[[], T]) -> T:
        """Return an answer. Ask again while an agent or the coordinator is replaced."""
        give_up_s = time.monotonic() + CALL_TIMEOUT_S
        while True:
            self._patience.check()
            try:
                return ask()
            except (AgentEnded, ClusterLost):
                if time.monotonic() > give_up_s:
                    raise
            self._patience.sleep(BEGIN_EVERY_S)

    def _agent(self) -> Any:
        """Return this node's agent. It is started when there is none."""
        return PackedCalls(_answer(self._coordinator().agent_of.remote(self._node_id), self._patience))

    def _coordinator(self) -> Any:
        return launch.ensure_coordinator(self._given, self._patience)

    def _ask_agent(self, call: str, *arguments: object) -> Any:
        answer = _answer(getattr(self._agent(), call).remote(*arguments), self._patience)
        return unpack_message(answer, "the node's agent", "this process")


def _settings_in_force(given: Config | None, patience: Patience) -> Config:
    """Return the cluster's settings, which apply to this process too; `given`: see `launch.ensure_coordinator`."""
    hello = _answer(launch.ensure_coordinator(given, patience).ping.remote(), patience)
    if hello["problem"] is not None:
        raise hello["problem"]
    return Config(**hello["settings"])


def _answer(reference: Any, patience: Patience) -> Any:
    try:
        return ray.get(reference, timeout=patience.left_s(CALL_TIMEOUT_S))
    except RayTaskError as error:
        raise unwrapped(error) from None
    except RayError as error:
        patience.check()
        raise ClusterLost("the node's agent does not answer", cause=type(error).__name__) from error
