"""A rank inside a process of the user's own: an actor, an engine's worker, a `torchrun` rank.

    with host_rank("s3://models/llama", rank, tensor_parallel_size=8) as shard:     # every process with its own rank
        norm = shard["model.norm.weight"]                                          # a tensor on this process's device

Each process plans for itself, and all come to the same plan. Ranks on one node share that node's agent and arena, so a
chunk still leaves the store once per node. The coordinator does not know of these ranks: they live and die with the
process, and `cluster.status` does not list them.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors import launch
from actors.agent_link import RayAgentLink
from actors.coordination.jobs import fetch_settings
from actors.coordination.node_limits import own_gpus, own_limits, own_misfit
from actors.devices.device import open_device
from actors.devices.mapped_device import open_mapped_rank
from actors.names import NAMESPACE, agent_name
from actors.rank.executor import RankLoader
from actors.shard import RankShard
from cluster.config import Config
from cluster.device_map.options import GivenMap, GivenMemory
from cluster.errors import ClusterLost, ConfigError
from cluster.fit.needs import min_slots
from cluster.fit.options import STRICT, FitOptions
from cluster.joining.remote_errors import unwrapped
from cluster.layouts.live_rules import with_live_rules
from cluster.layouts.mesh import Layout
from cluster.layouts.rules_file import LayoutRules
from cluster.load_request import LoadRequest
from cluster.messages import JoinReply, NodeFacts, NodeJob, RankHello, RankJob
from cluster.metrics.labels import model_label
from cluster.plans.packed_plan import pack_shared
from cluster.plans.prepare import prepare_plan
from cluster.plans.rank_plans import RankFacts, rank_facts
from cluster.precision.recipes import make_precision
from cluster.request import StoreOptions, make_request
from cluster.trust import TrustPolicy
from storage.store_ref import Credentials

BEGIN_EVERY_S = 0.2  # between two requests for slots that other loads hold
CALL_TIMEOUT_S = 60.0


@contextlib.contextmanager
def host_rank(
    model_uri: str,
    rank: int,
    *,
    tensor_parallel_size: int = 1,
    fsdp_size: int = 1,
    data_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 0,
    vocabulary_multiple: int = 1,
    device: str = "cpu",
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    credentials: Credentials | None = None,
    layout_rules: LayoutRules | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    skip_quantization: Sequence[str] | None = None,
    device_map: GivenMap | None = None,
    max_memory: GivenMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    gpu_memory_utilization: float | None = None,
    reserve_bytes: int | None = None,
    trusted_keys: Sequence[str | os.PathLike[str]] | None = None,
    config: Config | None = None,
) -> Iterator[RankShard]:
    """Load the slices of one rank, verified, into the calling process; blocks until all are there.

    `device`: "cpu", or "cuda" for the first GPU that is visible here; with a `device_map`, "cuda" for all of them. The
    memory is given up at the end of the block; tensors taken out of `shard` stay valid and keep theirs. The process
    must have joined Ray; coordinator and agent are started when there are none. `gpu_memory_utilization`,
    `reserve_bytes`: what stays free, as for `cluster.load`; a rank that does not fit is refused before a byte moves.
    There is no `fit="auto"`: each process decides for its own rank, and all ranks of a model have to hold it alike.
    `trusted_keys` as for `cluster.load`, where the settings of this very process are the cluster's. Raises ConfigError
    for a rank that the layout has not got, DoesNotFit, else as `cluster.load` does.
    """
    config = config or Config.from_env()
    request = make_request(
        model_uri,
        layout=Layout(
            tensor_parallel_size,
            fsdp_size,
            data_parallel_size,
            pipeline_parallel_size,
            expert_parallel_size,
            expert_tensor_parallel_size,
            vocabulary_multiple,
        ),
        store_options=StoreOptions(endpoint_url, region, profile, anonymous),
        credentials=credentials,
        layout_rules=layout_rules,
        device=device,
        trusted_keys=config.public_keys() if trusted_keys is None else trusted_keys,
        precision=make_precision(dtype, quantization, skip_quantization),
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=offload_folder,
        fit=FitOptions(STRICT, gpu_memory_utilization, reserve_bytes),
    )
    if request.device_map is not None:
        limits = own_limits(request.device_map, device, request.fit, config)
        request = replace(request, node_memory=limits)
    if not 0 <= rank < request.world_size:
        raise ConfigError(f"the layout has ranks 0 to {request.world_size - 1}, not {rank}")
    trust = TrustPolicy.of(config)
    chunk_bytes, read_timeout_s = config.chunk_bytes, config.read_timeout_s
    _, plan = with_live_rules(
        request,
        lambda asked: prepare_plan(asked, chunk_bytes=chunk_bytes, read_timeout_s=read_timeout_s, trust=trust),
    )
    shared = pack_shared(plan)
    # One load per rank: what ranks of a node have in common, they share through the arena.
    load_id = f"hosted-{uuid.uuid4().hex[:12]}-{rank}"
    link = _HostedLink(
        ray.get_runtime_context().get_node_id(),
        config,
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
            model=model_label(model_uri),
        ),
    )
    link.check_fit(rank_facts(plan.cut, plan.chunks.largest_bytes)[rank], request)
    job = RankJob(load_id, 1, rank, 0, shared, request.store, fetch_settings(config), request.placement)
    if request.device_map is None:
        memory = open_device(device)
    else:
        memory = open_mapped_rank(plan.ranks[rank], replace(job, offload_folder=request.device_map.offload_folder))
    try:
        try:
            link.begin()
            RankLoader(link, job, memory).run()
        finally:
            link.end()
        yield RankShard(plan.ranks[rank], memory)
    finally:
        memory.free()


class _HostedLink(RayAgentLink):
    """A rank's line to its agent that tells the agent of the load too, as no coordinator does."""

    def __init__(self, node_id: str, config: Config, job: NodeJob) -> None:
        super().__init__(node_id)
        self._node_id = node_id
        self._config = config
        self._job = job

    def check_fit(self, facts: RankFacts, request: LoadRequest) -> None:
        """Returns when the rank fits here. Raises DoesNotFit, ArenaError, ClusterLost."""
        here: NodeFacts = _answer(self._agent().facts.remote())
        (rank,), device = self._job.ranks, request.device
        misfit = own_misfit(rank, facts, own_gpus(device), here.pools, device, request.fit, self._config)
        if misfit is not None:
            raise misfit

    def begin(self) -> None:
        """Returns when the agent has the slots that the load must have. Raises ArenaError, ClusterLost."""
        agent = self._agent()
        while not _answer(agent.begin.remote(self._job)):
            time.sleep(BEGIN_EVERY_S)

    def join(self, hello: RankHello) -> JoinReply:
        reply = super().join(hello)
        if not reply.known and reply.stop is None:  # the agent was restarted
            self.begin()
            reply = super().join(hello)
        return reply

    def _agent(self) -> Any:
        """Of this node; started when there is none."""
        coordinator = launch.ensure_coordinator(self._config)
        return _answer(coordinator.agent_of.remote(self._node_id))

    def end(self) -> None:
        """The agent may forget the load. An agent that is gone has."""
        with contextlib.suppress(RayError, ValueError):
            handle = ray.get_actor(agent_name(self._node_id), namespace=NAMESPACE)
            ray.get(handle.end.remote(self._job.load_id), timeout=CALL_TIMEOUT_S)


def _answer(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=CALL_TIMEOUT_S)
    except RayTaskError as error:
        raise unwrapped(error) from None
    except RayError as error:
        raise ClusterLost("the node's agent does not answer", cause=type(error).__name__) from error
