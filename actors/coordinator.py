"""The one actor that knows every model of the cluster. It holds no bytes and imports no torch.

    client --load(request)--> model id; then wait() until READY or FAILED, renew() to hold, release()
    agent --heartbeat(beat)--> what it should forget or report again
    LoadRun (one task per load) plans, starts and tends the ranks; this class answers questions and keeps holders

When it is killed, Ray starts it again with nothing: agents hand back the records it left with them in their
heartbeats (`actors.coordination.agent_watch`), and clients renew their holds. Workers notice nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from actors.coordination import nodes, spawn
from actors.coordination.agent_watch import REBUILD_S, AgentWatch, IdleAgents
from actors.coordination.jobs import save
from actors.coordination.load_run import LoadRun
from actors.coordination.model_changes import REPLICAS, Changed
from actors.coordination.model_record import ModelRecord, hosts_by_address, new_model_id
from actors.coordination.planner import Attaching, Planner
from actors.coordination.run_parts import RunParts
from actors.coordination.spawn import OrphanWatch
from actors.coordination.worker_groups import WorkerGroups
from actors.links import ask_agent
from actors.metrics_server import MetricsServer
from cluster.config import Config, TrustPolicy
from cluster.errors import ConfigError, LoadCancelled, ModelNotFound, ScaleRefused, UpdateRefused, VersionMismatch
from cluster.messages import UNVERSIONED, AgentBeat, GroupMember, check_version, pack_message, unpack_message
from cluster.node_settings import NodeSettings
from cluster.planning.chunk_keys import Holdings
from cluster.request import LoadRequest, StoreAccess, UpdateRequest
from cluster.scheduling.holders import Holders
from cluster.scheduling.load_state import Life
from cluster.scheduling.topology import NodeInfo, resolve_device
from cluster.telemetry.chunk_map import ChunkMap, EventLog, LoadEvent, NodeChunks, NodeView, ShardChunks
from cluster.telemetry.logs import RepeatedWork, configure_logs, log_events
from cluster.telemetry.report import ClusterStatus, LoadProgress, LoadReport
from cluster.telemetry.saves import SaveProgress
from longshore.installation import PROTOCOL_VERSION, __version__, check_packages
from storage.errors import LongshoreError
from storage.problems import printable_uri

SAME_S = 0.5  # asked again within this, by whomever, the answer is the same
ANSWER_S = 2.0  # an agent that is well answers at once


async def events_after(
    log: EventLog, changed: asyncio.Condition, number: int, timeout_s: float
) -> tuple[LoadEvent, ...]:
    """Events with a higher number; waits up to `timeout_s` for the first."""
    async with changed:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait_for(lambda: bool(log.after(number))), timeout_s)
    return log.after(number)


class ChunkMaps:
    """The chunks of loads, as their agents see them. However many watch, an agent is asked once in SAME_S."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[float, asyncio.Task[ChunkMap]]] = {}  # model id -> (when, the answer)

    async def of(self, record: ModelRecord, records: Iterable[ModelRecord]) -> ChunkMap:
        """Agents that do not answer, or do not know the load (yet), are in `silent_nodes`.

        `records`: models whose nodes may have sent chunks of the load.
        """
        now_s = time.monotonic()
        self._asked = {model: asked for model, asked in self._asked.items() if now_s - asked[0] < SAME_S}
        if record.model_id not in self._asked:
            asking = _ask(record, hosts_by_address(records))
            self._asked[record.model_id] = now_s, asyncio.get_running_loop().create_task(asking)
        return await asyncio.shield(self._asked[record.model_id][1])


async def _ask(record: ModelRecord, senders: Mapping[str, str]) -> ChunkMap:
    """`senders`: host names by the address at which they serve chunks."""
    hosts = record.nodes
    answers = await asyncio.gather(*(_ask_node(record.model_id, node_id) for node_id in hosts), return_exceptions=True)
    shards: tuple[ShardChunks, ...] = ()
    per_node: list[NodeChunks] = []
    silent: list[str] = []
    for (node_id, host), answer in zip(hosts.items(), answers, strict=True):
        if isinstance(answer, BaseException):
            silent.append(host)
            continue
        shards, runs, traffic = answer
        per_node.append(NodeChunks(node_id, host, runs, traffic.named(senders)))
    return ChunkMap(
        record.model_id, sum(shard.chunk_count for shard in shards), shards, tuple(per_node), tuple(sorted(silent))
    )


async def _ask_node(model_id: str, node_id: str) -> NodeView:
    agent = await asyncio.to_thread(spawn.find_agent, node_id)
    if agent is None:
        raise TimeoutError
    answer: NodeView = await ask_agent(agent, ANSWER_S, "a node's agent", "chunks_now", model_id)
    return answer


_LOG = logging.getLogger("longshore.coordinator")
ENDED_KEPT_S = 300.0  # a failed or released model stays listed for this long, so that its error can be read


class Coordinator:
    """Plain class; `actors.launch` makes the actor."""

    def __init__(self, given: Config | None = None) -> None:
        """`given`: settings of the program that started the cluster. None: those of this node's environment count.

        Settings that cannot be meant are raised from calls, not from here: Ray would lose the error's type.
        """
        check_packages()
        self._given = given
        self._problem: ConfigError | None = None
        try:
            self._settings = NodeSettings.here(nodes.this_node() if given is None else "", given)
        except ConfigError as error:
            self._problem, self._settings = error, NodeSettings(Config(), "")
        config = self._config = self._settings.config
        configure_logs(config.logs)
        self._trust = TrustPolicy.of(config)
        self._incarnation = uuid.uuid4().hex[:12]
        self._planner = Planner(config.chunk_bytes, config.read_timeout_s, self._trust)
        self._models: dict[str, ModelRecord] = {}
        self._attaching = Attaching(self._models, self._planner, config.access_grace_s)
        self._agents = AgentWatch(
            self._incarnation, config.stuck_after_s, self._models, self._run, self._load_run, self._end
        )
        self._metrics = MetricsServer(config, self._agents.metrics)
        self._worker_groups = WorkerGroups(config.warm_workers_s)
        self._admission = asyncio.Lock()  # who takes which rank places is decided one load at a time
        self._idle_agents = IdleAgents(config, self._agents, self._worker_groups, self._models, self._admission)
        self._chunk_maps = ChunkMaps()
        self._saves = self._agents.metrics.saves
        self._saves_changed = asyncio.Condition()
        self._keeper: asyncio.Task[None] | None = None
        self._rebuilding: asyncio.Task[None] | None = None

    # -- clients -----------------------------------------------------------------------------------------------

    async def ping(self) -> dict[str, Any]:
        """Return this coordinator's versions. Clients compare them with their own and raise its `problem`, if any."""
        self._start_keeper()
        return {
            "problem": self._problem,
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
            "incarnation": self._incarnation,
            "holder_ttl_s": self._config.holder_ttl_s,
            "settings": self._config.model_dump(),
        }

    async def load(self, request: LoadRequest) -> tuple[str, bool]:
        """(model id, True when it was resident or under way already). The caller holds it from now on.

        Waits for the store when a model of that identity is there: the caller's own access is checked.
        """
        self._check_settings()
        self._trust.sources.check(request.store.ref, request.store.credentials)
        await self._ready()
        if request.device == "auto":
            infos = await asyncio.to_thread(nodes.cluster_nodes, (), self._config.cpu_ranks_per_node)
            request = replace(request, device=resolve_device(infos, "auto"))
        request.fit.check_device(request.device)
        for model_id in [record.model_id for record in self._models.values() if record.is_answered_by(request)]:
            del self._models[model_id]
        record = await self._attaching.attach(request)
        if record is not None:
            await self._hold(record, request)
            return record.model_id, True
        record = ModelRecord(
            model_id=new_model_id(request),
            request=request,
            life=Life.new(request.world_size),
            holders=Holders().hold(request.client_id, time.monotonic(), keep=request.keep),
        )
        self._models[record.model_id] = record
        self._run(record)
        return record.model_id, False

    async def wait(
        self, model_id: str, seen: int, timeout_s: float
    ) -> tuple[int, LoadProgress, LoadReport | None, LongshoreError | None]:
        """The model's state as soon as it differs from version `seen`, or after `timeout_s`."""
        record = await self._record(model_id)
        async with record.changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(record.changed.wait_for(lambda: record.version != seen), timeout=timeout_s)
        return record.version, record.progress(), record.report, record.error

    async def workers(self, model_id: str) -> list[Any]:
        """Handles of a model's workers, by rank. Raises RankLost while one is replaced, else why it cannot be used."""
        record = await self._record(model_id)
        async with record.changed:
            with contextlib.suppress(TimeoutError):  # who asks has had it ready
                await asyncio.wait_for(record.changed.wait_for(lambda: record.is_found), REBUILD_S)
            # A call that begins after the decision sees the new revision on every rank.
            await record.changed.wait_for(lambda: not record.changes.exchanges or record.life.is_over)
        return record.workers()

    async def renew(self, client_id: str, model_ids: list[str]) -> list[str]:
        """Extend a client's holds. Return the models for which it must supply its credentials again."""
        found = [record for model_id in model_ids if (record := self._models.get(model_id)) is not None]
        for record in found:
            record.hold(client_id)
        return [record.model_id for record in found if record.restored and not record.access.has(client_id)]

    async def supply(self, model_id: str, client_id: str, access: StoreAccess) -> None:
        """Take a holder's access again, which an earlier incarnation of this actor knew and did not save.

        It is kept once the store has accepted it. The caller renews its holds in between, so a model that is known
        does not wait until all agents have reported theirs.
        """
        record = self._models.get(model_id) or await self._record(model_id)
        self._attaching.supply(record, client_id, access)

    async def update(
        self, model_id: str, asked: UpdateRequest, timeout_s: float
    ) -> tuple[str, Changed | None, LongshoreError | None]:
        """Begin an update in place, unless it was begun. Return what it does, its report or its error.

        Waits up to `timeout_s` for the end. Raises UpdateRefused while another change is under way, and ModelNotFound.
        """
        record = await self._found_record(model_id)
        if record.changes.has_not_begun(asked.update_id):
            if record.changes.is_running:
                raise UpdateRefused("another change of the model is under way", **record.changes.doing())
            if asked.store is not None:
                self._trust.sources.check(asked.store.ref, asked.store.credentials)
            record.changes.lead(asked.update_id, self._load_run(record).update(asked))
        return await record.changes.outcome_of(asked.update_id, timeout_s)

    async def scale(
        self, model_id: str, scale_id: str, data_parallel_size: int, timeout_s: float
    ) -> tuple[str, Changed | None, LongshoreError | None]:
        """Begin to give a model that many replicas, unless that was begun. Return what it does, its report or error.

        Waits up to `timeout_s` for the end. Raises ScaleRefused while another change is under way, and ModelNotFound.
        """
        record = await self._found_record(model_id)
        if record.changes.has_not_begun(scale_id):
            if record.changes.is_running:
                raise ScaleRefused("another change of the model is under way", **record.changes.doing())
            record.changes.lead(scale_id, self._load_run(record).scale(data_parallel_size), REPLICAS)
        return await record.changes.outcome_of(scale_id, timeout_s)

    async def release(self, model_id: str, client_id: str | None, *, force: bool = False) -> bool:
        """Drop one hold, or with `force` all of them and `keep`. True when the memory is being freed."""
        record = await self._record(model_id)
        if force:
            record.drop_all()
        elif client_id is not None:
            record.drop(client_id)
        if record.holders.wanted:
            return False
        await self._end(record, LoadCancelled("the model was released", model=model_id))
        return True

    async def unkeep(self, model_id: str, client_id: str) -> int:
        """Drop the keep flag and a client's hold; end the model when nobody holds it. Return how many clients do."""
        record = await self._record(model_id)
        record.unkeep(client_id)
        if not await self.release(model_id, None):
            await save(record)
        return len(record.holders)

    async def release_warm(self) -> int:
        """End the workers that wait for a load; how many worker groups there were."""
        return await self._worker_groups.end_all()

    async def status(self) -> ClusterStatus:
        """Return the status of the cluster, once all agents have reported their loads."""
        await self._ready()
        models = [record.status() for record in self._models.values() if not record.life.is_over]
        ended = [record.status() for record in self._models.values() if record.life.is_over]
        nodes_now, worker_groups, url = self._agents.status(), self._worker_groups.status(), self._metrics.url
        settings = self._settings.of_coordinator()
        return ClusterStatus(
            __version__,
            self._incarnation,
            tuple(models),
            nodes_now,
            worker_groups,
            url,
            tuple(ended),
            settings,
            self._saves.status(time.monotonic()),
        )

    async def events(self, model_id: str, after: int, timeout_s: float) -> tuple[LoadEvent, ...]:
        """Return a load's or a save's events after number `after`; wait up to `timeout_s` for the first."""
        if (save_now := self._saves.find(model_id)) is not None:
            return await events_after(save_now.log, self._saves_changed, after, timeout_s)
        record = await self._record(model_id)
        return await events_after(record.events, record.changed, after, timeout_s)

    async def chunks(self, model_id: str) -> ChunkMap:
        """Return the place of every chunk of a load, and where each node had its bytes from."""
        return await self._chunk_maps.of(await self._record(model_id), self._models.values())

    async def revision_of(self, model_id: str) -> str:
        """Return the revision that a model has; that of an update from its decision on."""
        return (await self._record(model_id)).revision

    async def request_of(self, model_id: str) -> LoadRequest:
        """Return the request that loaded a model, without credentials."""
        return (await self._record(model_id)).as_asked()

    async def rooms(self) -> list[NodeInfo]:
        """Return the memory that each node has for a load, as its agent sees it now."""
        return await nodes.rooms(self._config.cpu_ranks_per_node)

    async def holdings(self, identity: str, revision: str, node_ids: list[str], keys: bytes) -> Holdings:
        """Return what the nodes hold of a model, by its chunks' keys, and whether a load would attach to one."""
        await self._ready()
        found = await nodes.held_on(node_ids, keys)
        same = (each for each in self._models.values() if each.is_at_hand(identity, revision))
        return Holdings(found, next((each.status() for each in same), None))

    async def shutdown(self) -> None:
        """End every model and agent. For a cluster that is about to stop; the caller then ends this actor."""
        if self._problem is None:
            await self._ready()
        await self._worker_groups.close()
        ends = [
            self._end(record, LoadCancelled("the cluster is shut down", model=record.model_id))
            for record in list(self._models.values())
        ]
        await asyncio.gather(*ends, return_exceptions=True)  # one that does not end delays no other
        agents = await asyncio.to_thread(spawn.agent_node_ids) | self._agents.node_ids
        await asyncio.gather(*(spawn.shut_agent(node_id) for node_id in agents), return_exceptions=True)
        if self._keeper is not None:
            self._keeper.cancel()
        await self._planner.close()
        await asyncio.to_thread(self._metrics.close)

    async def save_progress(self, packed: bytes) -> None:
        """Take a report of a save, which is in the message that `pack_message` made. Raises VersionMismatch."""
        self._start_keeper()
        progress: SaveProgress = unpack_message(packed, "a rank that saves", "the coordinator")
        await self._tell_save(progress, self._saves.received(progress, time.monotonic(), time.time()))

    async def agent_of(self, node_id: str, by_reader: bool = False) -> Any:
        """Handle of a node's agent, with this cluster's settings; started when there is none."""
        self._check_settings()
        self._idle_agents.needed(node_id, by_reader=by_reader)
        return await asyncio.to_thread(spawn.start_agent, node_id, "", self._given)

    async def bind_group(self, member: GroupMember) -> str:
        """The revision of the model that the group's processes load, the one that asks among them from now on."""
        await self._ready()
        return self._agents.bind(member)

    # -- agents ------------------------------------------------------------------------------------------------

    async def heartbeat_packed(self, node_id: str, packed: bytes) -> bytes:
        """An agent lives; progress of its ranks is in the message. Takes and returns what `pack_message` made.

        Raises VersionMismatch when the agent runs another Longshore.
        """
        self._start_keeper()
        try:
            beat: AgentBeat = unpack_message(packed, f"the agent of node {node_id}", "the coordinator")
        except VersionMismatch as error:
            await self._agents.refuse(node_id, error)
            raise
        self._check_settings()
        return pack_message(await self._agents.receive(beat))

    async def heartbeat(self, beat: Any) -> None:
        """Refuse an agent of a Longshore before protocol 5, which calls this. Raises VersionMismatch."""
        self._start_keeper()
        node_id = str(getattr(beat, "node_id", ""))
        try:
            check_version(UNVERSIONED, f"the agent of node {node_id}", "the coordinator")
        except VersionMismatch as error:
            await self._agents.refuse(node_id, error)
            raise

    def _check_settings(self) -> None:
        if self._problem is not None:
            raise self._problem

    async def _ready(self) -> None:
        self._check_settings()
        self._start_keeper()
        await self._agents.rebuilt.wait()

    # -- inside ------------------------------------------------------------------------------------------------

    async def _record(self, model_id: str) -> ModelRecord:
        await self._ready()
        record = self._models.get(model_id)
        if record is None:
            raise ModelNotFound(
                "no such model",
                hint="longshore status lists the models of this cluster",
                model=printable_uri(model_id)[:200],
            )
        return record

    async def _found_record(self, model_id: str) -> ModelRecord:
        """Return a record whose ranks are known: a restarted coordinator may be about to go on with a change of it."""
        record = await self._record(model_id)
        async with record.changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(record.changed.wait_for(lambda: record.is_found), REBUILD_S)
        return record

    async def _hold(self, record: ModelRecord, request: LoadRequest) -> None:
        """One more client wants the model."""
        if record.hold(request.client_id, keep=request.keep):
            await save(record)
        await record.touch()  # its access may be what somebody waits for

    def _run(self, record: ModelRecord, incarnations: dict[int, int] | None = None) -> None:
        record.count_in(self._agents.metrics, adopted=incarnations is not None)
        run = self._load_run(record)
        record.lead(run.run() if incarnations is None else run.resume(incarnations))

    def _load_run(self, record: ModelRecord) -> LoadRun:
        shared = self._planner, self._config, self._models, self._admission, self._worker_groups
        return LoadRun(RunParts.of(record, *shared, self._given))

    async def _end(self, record: ModelRecord, error: LongshoreError) -> None:
        """Free everything a model has. No load is given it from now on."""
        await record.free(self._free(record, error))

    async def _free(self, record: ModelRecord, error: LongshoreError) -> None:
        await record.stop_task()
        await self._load_run(record).end(error)

    async def _tell_save(self, progress: SaveProgress, events: Sequence[LoadEvent]) -> None:
        """Log the events of a save, note them at the model that saves itself, and wake whoever waits."""
        if not events:
            return
        log_events(_LOG, progress.save_id, None, events)
        group = progress.worker_group
        for record in [each for each in self._models.values() if group and each.worker_group_id == group]:
            if record.is_usable:
                await record.note_save(progress.save_id, events)
        async with self._saves_changed:
            self._saves_changed.notify_all()

    def _start_keeper(self) -> None:
        if self._problem is not None:
            return
        if self._rebuilding is None:
            self._metrics.start()
            self._rebuilding = asyncio.get_running_loop().create_task(self._agents.rebuild())
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep_house())

    async def _keep_house(self) -> None:
        """Lapsed holders, ended models that nobody asked about for long, and what is left of unknown ones."""
        orphans, work = OrphanWatch(self._config.orphan_after_s), RepeatedWork(_LOG)
        while True:
            await asyncio.sleep(min(1.0, self._config.holder_ttl_s / 4))
            now_s = time.monotonic()
            with work.turn("the look at agents"), contextlib.suppress(RayError):
                await self._agents.forget_dead_nodes()
                await self._idle_agents.look()
            with work.turn("the look at saves"):
                for progress, event in self._saves.look(now_s, time.time()):
                    await self._tell_save(progress, [event])
            if orphans.is_due(now_s):
                known = {record.worker_group_id for record in self._models.values() if not record.life.is_over}
                with work.turn("the look for orphans"):
                    await orphans.look(known | self._worker_groups.ids)
            for record in list(self._models.values()):
                with work.turn(f"the look at {record.model_id}"):
                    await self._keep_model(record, now_s)

    async def _keep_model(self, record: ModelRecord, now_s: float) -> None:
        if record.life.is_over:
            if now_s - record.ended_s > ENDED_KEPT_S:
                self._models.pop(record.model_id, None)
            return
        record.forget_lapsed(now_s, self._config.holder_ttl_s, self._config.access_grace_s)
        if not record.holders.wanted:
            await self._end(record, LoadCancelled("every client that wanted it is gone", model=record.model_id))
