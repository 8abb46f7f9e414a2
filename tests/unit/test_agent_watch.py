"""The coordinator's reaction to heartbeats of nodes that Ray has declared dead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from actors.coordination import agent_watch, nodes, spawn
from actors.coordination.agent_watch import AgentWatch
from actors.coordination.jobs import members_of
from actors.coordination.model_record import ModelRecord, Placement
from actors.coordinator import Coordinator
from cluster.errors import VersionMismatch
from cluster.layouts.mesh import Layout
from cluster.messages import AgentBeat, ArenaUse, BeatReply, GroupMember, LoadBeat, RankBeat
from cluster.request import LoadRequest, StoreAccess
from cluster.scheduling.holders import Holders
from cluster.scheduling.load_state import Life, LoadState
from cluster.scheduling.topology import NodeInfo
from cluster.telemetry.stats import NodeStats, RankReport, StageTimes
from storage.arena.chunk_cache import CacheStats
from storage.disk.tier import DiskStats
from storage.errors import ArenaBusy
from storage.host.processes import ProcessId
from storage.peers import Peer
from storage.store_ref import StoreRef


class Ray:
    """Ray's answers about its nodes, and the number of times it was asked."""

    def __init__(self, *living: str) -> None:
        self.living = set(living)
        self.asked = 0
        self.well = True

    def living_nodes(self) -> dict[str, str]:
        self.asked += 1
        if not self.well:
            raise RayError
        return {node: f"host of {node}" for node in self.living}


@pytest.fixture
def ray_of(monkeypatch: pytest.MonkeyPatch) -> Ray:
    there = Ray("living")
    monkeypatch.setattr(nodes, "living_nodes", there.living_nodes)
    return there


def beat(node: str, records: dict[str, bytes] | None = None) -> AgentBeat:
    loads = (LoadBeat("llama-1", 0, 0, None, False),)
    return AgentBeat(node, f"host of {node}", "agent", loads, (), ArenaUse(0, 0, 0, 0), records or {})


def hear(*beats: AgentBeat) -> tuple[list[BeatReply], AgentWatch, dict[str, ModelRecord]]:
    models: dict[str, ModelRecord] = {}

    def nobody(*_: Any) -> Any:
        raise AssertionError("no load is to be gone on with")

    async def run() -> tuple[Sequence[BeatReply], AgentWatch]:
        watch = AgentWatch("coordinator", 60.0, models, nobody, nobody, nobody)
        return await asyncio.gather(*map(watch.receive, beats)), watch

    replies, watch = asyncio.run(run())
    return list(replies), watch, models


def test_a_dead_nodes_record_restores_no_load(ray_of: Ray) -> None:
    """A restarted coordinator knows no loads, and the record may belong to an earlier attempt."""
    (reply,), watch, models = hear(beat("dead", {"llama-1": b"a record that is older than others"}))
    assert reply.node_dead
    assert not reply.unknown_loads
    assert not models
    assert not watch.node_ids


def test_an_agent_of_a_living_node_is_queried_for_its_record(ray_of: Ray) -> None:
    (reply,), watch, _ = hear(beat("living"))
    assert not reply.node_dead
    assert reply.unknown_loads == ("llama-1",)
    assert watch.node_ids == {"living"}


def test_ray_is_asked_once_for_simultaneous_heartbeats(ray_of: Ray) -> None:
    ray_of.living = {str(number) for number in range(100)}
    replies, _, _ = hear(*(beat(str(number)) for number in range(100)), *(beat(str(number)) for number in range(100)))
    assert not any(reply.node_dead for reply in replies)
    assert ray_of.asked == 1


def test_a_node_is_checked_again_after_a_silence(ray_of: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_watch, "SILENT_S", 0.0)  # every heartbeat comes after a silence
    monkeypatch.setattr(agent_watch, "ASKED_S", -1.0)

    async def run() -> tuple[bool, bool, set[str]]:
        watch = AgentWatch("coordinator", 60.0, {}, *[lambda *_: None] * 3)  # type: ignore[arg-type, list-item]
        first = await watch.receive(beat("living"))
        ray_of.living.clear()
        second = await watch.receive(beat("living"))
        return first.node_dead, second.node_dead, watch.node_ids

    assert asyncio.run(run()) == (False, True, set())


def test_no_node_is_abandoned_because_ray_does_not_answer(ray_of: Ray) -> None:
    ray_of.well = False
    (reply,), watch, _ = hear(beat("anybody"))
    assert not reply.node_dead
    assert watch.node_ids == {"anybody"}


def test_status_has_both_tiers_of_the_cache(ray_of: Ray) -> None:
    cache = CacheStats(*range(15))
    disk = DiskStats(budget_bytes=100, used_bytes=60, files=6, written_chunks=9, evicted_chunks=3, unkept_chunks=2)
    arena = ArenaUse(64, 32, 1, 0, disk_unkept_chunks=2)
    with_disk = replace(beat("living"), arena=arena, stats=NodeStats(cache, disk))
    (node,) = hear(with_disk)[1].status()
    assert (node.arena_bytes, node.used_bytes, node.evicted_chunks) == (64, 32, cache.evicted)
    assert (node.disk_budget_bytes, node.disk_used_bytes, node.disk_files) == (100, 60, 6)
    assert (node.disk_evicted_chunks, node.disk_unkept_chunks) == (3, 2)
    (without,) = hear(replace(with_disk, stats=NodeStats(cache)))[1].status()
    assert (without.disk_budget_bytes, without.disk_used_bytes) == (0, 0)


REQUEST = LoadRequest(
    uri="s3://models/llama",
    store=StoreAccess(StoreRef("s3", "models", "llama")),
    only_key=None,
    layout=Layout(),
    device="cpu",
    layout_rules=None,
    keep=False,
    client_id="me",
    wait_for_resources_s=0.0,
)
RANK = RankBeat("llama-1", 1, 0, 0, pid=7, placed_bytes=0, silent_s=0.0)


class Run:
    """Stands in for the LoadRun of the model."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    async def begin_on(self, node_id: str) -> None:
        self.begun.append(node_id)


def hear_of(rank: RankBeat, monkeypatch: pytest.MonkeyPatch, **placement: Any) -> tuple[list[Any], list[str]]:
    """Return the workers that were ended and the nodes that got the load again after an agent reported this rank."""
    ended: list[Any] = []
    monkeypatch.setattr(spawn, "end_actor", ended.append)
    run = Run()

    async def end(record: ModelRecord, error: Exception) -> None:
        raise error

    async def listen() -> None:
        record = ModelRecord("llama-1", REQUEST, replace(Life.new(1), state=LoadState.LOADING), Holders())
        record.placements = {0: Placement(0, "living", "host", None, worker="its worker", started=True, **placement)}
        watch = AgentWatch("coordinator", 60.0, {"llama-1": record}, *[lambda *_: None, lambda _: run, end])  # type: ignore[arg-type, list-item]
        loads = (LoadBeat("llama-1", 1, 0, None, rank.done),)
        await watch.receive(AgentBeat("living", "host", "agent", loads, (rank,), ArenaUse(0, 0, 0, 0)))
        await asyncio.sleep(0)

    asyncio.run(listen())
    return ended, run.begun


@pytest.mark.parametrize(
    ("silent_s", "asked_before_s", "report", "ended"),
    [
        (100.0, 100.0, None, True),
        (100.0, 10.0, None, False),  # by a coordinator that has just restarted
        (10.0, 100.0, None, False),
        (100.0, 100.0, "it said so", False),  # the model is ready: no rank waits
    ],
)
def test_a_worker_that_stops_before_its_report_is_replaced(
    ray_of: Ray,
    monkeypatch: pytest.MonkeyPatch,
    silent_s: float,
    asked_before_s: float,
    report: Any,
    ended: bool,
) -> None:
    """Its agent expects nothing more from it."""
    done = replace(RANK, silent_s=silent_s, done=True)
    asked_s = time.monotonic() - asked_before_s
    assert hear_of(done, monkeypatch, report=report, asked_s=asked_s) == (["its worker"] * ended, [])


def test_a_finished_rank_is_not_replaced_for_silence(ray_of: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hear_of(replace(RANK, silent_s=100.0, done=True), monkeypatch) == ([], [])


@pytest.mark.parametrize(
    ("pid", "done", "incarnation", "report", "told"),
    [
        (0, False, 0, "it said so", True),
        (0, False, 0, None, False),  # it has not reported yet
        (7, False, 0, "it said so", False),  # it is there and will report
        (0, True, 0, "it said so", False),
        (0, False, 1, "of another one", False),
    ],
)
def test_an_agent_waiting_for_a_finished_rank_is_notified(
    ray_of: Ray, monkeypatch: pytest.MonkeyPatch, pid: int, done: bool, incarnation: int, report: Any, told: bool
) -> None:
    """It restarted after the rank had ended, and got the load before the coordinator knew of the end."""
    rank = replace(RANK, pid=pid, done=done, incarnation=incarnation)
    assert hear_of(rank, monkeypatch, report=report) == ([], ["living"] * told)


def test_a_node_that_others_leave_out_is_one_event(ray_of: Ray) -> None:
    """However many nodes leave it out, and for how long. When all ask it again, its next failure is another event."""
    peers = {name: Peer(f"10.0.0.{at}", 9465, f"agent {name}") for at, name in enumerate(("a", "b", "c", "d"))}
    ray_of.living |= peers.keys()

    async def run() -> ModelRecord:
        record = ModelRecord("llama-1", REQUEST, replace(Life.new(3), state=LoadState.LOADING), Holders())
        record.placements = {rank: Placement(rank, node, f"gpu-{node}", None) for rank, node in enumerate("abc")}
        record.peers |= {node: peers[node] for node in "abc"}
        begun = Run()
        watch = AgentWatch(
            "coordinator", 60.0, {"llama-1": record}, *[lambda *_: None, lambda _: begun, lambda *_: None]
        )  # type: ignore[arg-type, list-item]

        async def says(node: str, *left_out: str) -> None:
            load = LoadBeat("llama-1", 1, 0, None, False, left_out=tuple(peers[name] for name in left_out))
            await watch.receive(replace(beat(node), loads=(load,), peer=peers[node]))

        await says("a", "c")
        await says("a", "c")
        await says("b", "c")
        await says("a")
        await says("b", "c", "d")
        await says("b")
        await says("a", "c")
        return record

    events = asyncio.run(run()).events.after(0)
    assert [(event.kind, event.host, event.details["others"]) for event in events] == [
        ("peer_left_out", "gpu-a", ["gpu-c"]),
        ("peer_left_out", "gpu-b", ["10.0.0.3"]),  # of a load that is not known here
        ("peer_left_out", "gpu-a", ["gpu-c"]),
    ]
    assert events[0].message.startswith("gpu-a reads nothing from gpu-c for a while")


def test_a_node_that_serves_nothing_is_one_event() -> None:
    record = ModelRecord("llama-1", REQUEST, Life.new(2), Holders())
    record.placements = {rank: Placement(rank, node, f"gpu-{node}", None) for rank, node in enumerate("ab")}
    record.note_ports()  # where no node serves any, that is a setting
    record.peers["a"] = Peer("10.0.0.1", 9465, "agent a")
    for _ in range(2):
        record.note_ports()
    (event,) = record.events.after(0)
    assert (event.kind, event.host, event.details["others"]) == ("peer_left_out", "gpu-b", [])


def test_a_node_that_is_known_to_be_slow_only_receives() -> None:
    peers = {name: Peer("10.0.0.1", 9465, f"agent {name}") for name in "abc"}
    record = ModelRecord("llama-1", REQUEST, Life.new(3), Holders())
    record.placements = {rank: Placement(rank, node, f"gpu-{node}", None) for rank, node in enumerate("abc")}
    rates = {"a": 4e9, "b": 0.5e9, "c": 0.0}  # of c it is not known
    record.note_peers(NodeInfo(node, node, peer=peers[node], peer_bytes_per_s=rate) for node, rate in rates.items())
    assert {node.node_id: node.peer for node in members_of(record).nodes} == {**peers, "b": None}

    measured = {"a": 4e9, "b": 0.5e9, "c": 2.2e9}  # in an earlier load
    record.note_peers(
        NodeInfo(node, node, peer=peers[node], peer_measured_bytes_per_s=rate) for node, rate in measured.items()
    )
    assert {node.node_id: node.peer for node in members_of(record).nodes} == {**peers, "b": None}


def test_members_are_listed_by_the_attempt_that_brought_their_ranks() -> None:
    """Ranks 0 and 1 are complete, rank 2 joins, rank 3 was moved to a node that has one already."""
    record = ModelRecord("llama-1", REQUEST, Life.new(4), Holders())
    places = enumerate([("a", 1), ("b", 1), ("c", 2), ("b", 2)])
    record.placements = {rank: Placement(rank, node, f"gpu-{node}", None, attempt) for rank, (node, attempt) in places}
    record.note_peers(NodeInfo(node, node, peer=Peer("10.0.0.1", 9465, node)) for node in "abc")
    for rank in (0, 1):
        record.placements[rank].report = RankReport(rank, "a", "a", 1, "cpu", 0, 1, 1, StageTimes(), 1, 0.0, 0.0)
    found = [(node.node_id, node.ranks, node.attempt, node.filled) for node in members_of(record).nodes]
    assert found == [("a", (0,), 1, True), ("b", (1,), 1, True), ("b", (3,), 2, False), ("c", (2,), 2, False)]
    together = [
        (node.node_id, node.ranks, node.attempt, node.filled) for node in members_of(record, together=True).nodes
    ]
    assert together == [("a", (0,), 1, False), ("b", (1, 3), 1, False), ("c", (2,), 1, False)]


def test_all_nodes_of_older_loads_lend() -> None:
    def record_on(model_id: str, nodes: list[str], created_s: float, revision: str = "r1") -> ModelRecord:
        record = ModelRecord(model_id, REQUEST, Life.new(len(nodes)), Holders(), created_s=created_s)
        record.revision = revision
        record.placements = {rank: Placement(rank, node, f"gpu-{node}", None) for rank, node in enumerate(nodes)}
        record.note_peers(NodeInfo(node, node, peer=Peer("10.0.0.1", 9465, node)) for node in nodes)
        return record

    wide = [f"{at:02}" for at in range(40)]
    older = record_on("older", ["mine", *wide], 1.0)
    others = [record_on("later", ["x"], 3.0), older, record_on("another", ["y"], 1.0, "r2")]
    members = members_of(record_on("mine", ["mine"], 2.0), others)
    assert [(each.load_id, each.key) for each in members.older] == [("older", older.peer_key)]
    assert [node.node_id for node in members.older[0].nodes] == wide


def test_status_omits_agents_that_were_ended(ray_of: Ray) -> None:
    ray_of.living |= {"busy", "idle"}
    _, watch, _ = hear(beat("busy"), replace(beat("idle"), loads=()))
    assert (watch.node_ids, watch.busy_node_ids) == ({"busy", "idle"}, {"busy"})
    watch.ended(["idle"])
    assert [node.node for node in watch.status()] == ["busy"]


def test_a_group_keeps_one_revision_while_a_member_lives(ray_of: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    def member(number: int, revision: str, group: str = "run") -> GroupMember:
        return GroupMember(f"hosted-{number}", group, "s3://m", revision, ProcessId(1, 1))

    async def run() -> list[str]:
        watch = AgentWatch("coordinator", 60.0, {}, *[lambda *_: None] * 3)  # type: ignore[arg-type, list-item]
        found = [watch.bind(member(0, "r1")), watch.bind(member(1, "r2")), watch.bind(member(2, "r2", "other"))]
        quiet = replace(beat("living"), loads=())
        await watch.receive(replace(quiet, members=(member(0, "r1"),)))
        assert watch.busy_node_ids == {"living"}
        monkeypatch.setattr(agent_watch, "BIND_S", -1.0)  # forgotten: it never registered
        found.append(watch.bind(member(3, "r2")))
        await watch.receive(quiet)
        assert watch.busy_node_ids == set()
        found.append(watch.bind(member(4, "r2")))
        return found

    assert asyncio.run(run()) == ["r1", "r1", "r2", "r1", "r2"]


def test_a_new_agent_learns_the_processes_of_its_predecessor(ray_of: Ray) -> None:
    """They bind their group until the new agent has reported them itself."""
    member = GroupMember("hosted-0", "run", "s3://m", "r1", ProcessId(1, 1))
    quiet = replace(beat("living"), loads=())

    async def run() -> list[tuple[GroupMember, ...]]:
        watch = AgentWatch("coordinator", 60.0, {}, *[lambda *_: None] * 3)  # type: ignore[arg-type, list-item]
        told = [(await watch.receive(replace(quiet, members=(member,)))).members]
        told.append((await watch.receive(replace(quiet, incarnation="another"))).members)
        assert watch.bind(replace(member, load_id="hosted-1", revision="r2")) == "r1"
        told.append((await watch.receive(replace(quiet, incarnation="another", members=(member,)))).members)
        told.append((await watch.receive(replace(quiet, incarnation="another"))).members)
        assert watch.busy_node_ids == set()
        return told

    assert asyncio.run(run()) == [(), (member,), (), ()]


@pytest.mark.parametrize("state", [LoadState.LOADING, LoadState.READY])
def test_a_load_ends_when_a_new_agent_has_no_slots_for_it(ray_of: Ray, state: LoadState) -> None:
    """A load that is ready needs no slots, and is sent to the agent again."""
    ended: list[str] = []

    class Refused:
        async def begin_on(self, node_id: str) -> None:
            raise ArenaBusy("other loads hold them", host=node_id)

    async def end(record: ModelRecord, error: Exception) -> None:
        ended.append(f"{record.model_id}: {error}")

    async def listen() -> None:
        record = ModelRecord("llama-1", REQUEST, replace(Life.new(1), state=state), Holders())
        record.placements = {0: Placement(0, "living", "host", None, worker="its worker", started=True)}
        rest: Any = (lambda *_: None, lambda _: Refused(), end)
        watch = AgentWatch("coordinator", 60.0, {"llama-1": record}, *rest)
        await watch.receive(replace(beat("living"), loads=()))
        await asyncio.sleep(0.01)

    asyncio.run(listen())
    assert ended == ["llama-1: other loads hold them (host=living)"] * (state is LoadState.LOADING)


def test_an_agent_from_before_protocol_5_is_refused(ray_of: Ray) -> None:
    """It sends its heartbeat as an object, to a method that no agent of this version calls."""

    async def run() -> AgentWatch:
        watch = AgentWatch("coordinator", 60.0, {}, *[lambda *_: None] * 3)  # type: ignore[arg-type, list-item]
        coordinator: Any = SimpleNamespace(_agents=watch, _start_keeper=lambda: None)
        with pytest.raises(VersionMismatch, match="the agent of node living runs longshore an earlier version"):
            await Coordinator.heartbeat(coordinator, beat("living"))
        return watch

    assert asyncio.run(run()).node_ids == set()


@pytest.mark.parametrize("state", [LoadState.LOADING, LoadState.READY])
def test_a_stuck_load_ends_when_its_agent_has_another_version(state: LoadState) -> None:
    """A rank that runs finds out by itself; one that is stopped would keep its load in LOADING for ever."""
    ended: list[str] = []

    async def end(record: ModelRecord, error: Exception) -> None:
        ended.append(f"{record.model_id}: {error}")

    async def run() -> None:
        record = ModelRecord("llama-1", REQUEST, replace(Life.new(1), state=state), Holders())
        record.placements = {0: Placement(0, "living", "host", None, worker="its worker", started=True)}
        watch = AgentWatch("coordinator", 0.02, {"llama-1": record}, lambda *_: None, lambda *_: None, end)  # type: ignore[arg-type, return-value]
        await watch.refuse("living", VersionMismatch("another version"))
        await watch.refuse("elsewhere", VersionMismatch("another version"))
        assert not ended
        await asyncio.sleep(0.03)
        await watch.refuse("elsewhere", VersionMismatch("another version"))
        assert not ended
        await watch.refuse("living", VersionMismatch("another version"))

    asyncio.run(run())
    assert ended == ["llama-1: another version"] * (state is LoadState.LOADING)


def test_an_agent_ends_the_share_of_ranks_that_were_removed(ray_of: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not told in time, or began the share after it was told."""
    told: list[Any] = []

    async def tell(*what: Any) -> None:
        told.append(what)

    monkeypatch.setattr(agent_watch, "_tell", tell)
    run = Run()

    async def listen() -> None:
        record = ModelRecord("llama-1", REQUEST, replace(Life.new(1), state=LoadState.READY, attempt=3), Holders())
        record.placements = {0: Placement(0, "living", "host", None, report="it said so")}  # type: ignore[arg-type]
        rest: Any = (lambda *_: None, lambda _: run, lambda *_: None)
        watch = AgentWatch("coordinator", 60.0, {"llama-1": record}, *rest)
        share = LoadBeat("llama-1", 1, 0, None, True)
        await watch.receive(replace(beat("living"), loads=(share, replace(share, attempt=3))))
        removed = replace(RANK, rank=1, pid=0)
        await watch.receive(replace(beat("living"), loads=(share,), ranks=(replace(RANK, done=True), removed)))
        await asyncio.sleep(0)

    asyncio.run(listen())
    assert told == [("living", "end", "llama-1", 3)]
    assert run.begun == ["living"]  # without the removed one
