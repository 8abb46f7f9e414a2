"""Repeated work of agents and the coordinator goes on after an error, which is logged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from actors.node.node_ledger import NodeLedger
from actors.node_agent import NodeAgent
from cluster.config import Config
from cluster.messages import AgentBeat, BeatReply, RankHello
from cluster.telemetry.logs import RepeatedWork
from storage.host.processes import ProcessId
from tests.support.checkpoints import flat_objects
from tests.support.cluster_simulation import ClusterSimulation
from tests.support.local_node import SLOT_BYTES, local_node, plan_of
from tests.support.node_simulation import SimModel
from tests.support.ray_clusters import eventually


def test_an_error_is_logged_once_until_a_turn_ends_well(caplog: pytest.LogCaptureFixture) -> None:
    work = RepeatedWork(logging.getLogger("longshore.test"))
    for error in (ValueError("a"), ValueError("a"), ValueError("b"), None, ValueError("b")):
        with work.turn("the look"):
            if error is not None:
                raise error
    assert [record.getMessage() for record in caplog.records] == ["the look failed, and is done again"] * 3
    with pytest.raises(KeyboardInterrupt), work.turn("the look"):
        raise KeyboardInterrupt


def test_an_agent_looks_at_processes_again(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    objects = flat_objects(tensors=4)
    plan = plan_of(objects, (1, 1, 1), 1024)
    with local_node(shm_dir, slots=8) as node:
        load_id = node.begin(plan)
        assert node.agent.join(RankHello(load_id, 1, 0, 0, ProcessId.current())).known
        broken = True

        def is_alive(process: ProcessId) -> bool:
            if broken:
                raise UnicodeDecodeError("utf-8", b"", 0, 1, "a fault of the test")
            return False

        monkeypatch.setattr(ProcessId, "is_alive", is_alive)
        eventually(lambda: "the check of deadlines and processes failed" in caplog.text, "nothing is logged")
        broken = False
        ledger = node.agent._ledger
        eventually(lambda: ledger._loads[load_id, 1].ranks[0].lost, "the tick does not go on")


class Coordinator:
    """Answers heartbeats."""

    def __init__(self) -> None:
        self.beats: list[AgentBeat] = []

    def heartbeat(self, beat: AgentBeat) -> BeatReply:
        self.beats.append(beat)
        return BeatReply("coordinator")


def test_an_agent_sends_heartbeats_again(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator, beat, broken = Coordinator(), NodeLedger.beat, True

    def failing(*args: object) -> AgentBeat:
        if broken:
            raise RuntimeError("a fault of the test")
        return beat(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(NodeLedger, "beat", failing)
    config = Config(arena_bytes=4 * SLOT_BYTES, slot_bytes=SLOT_BYTES, heartbeat_s=0.02)
    agent = NodeAgent(config, "cluster", "node", "host", coordinator, str(shm_dir))
    try:
        eventually(lambda: "the heartbeat failed" in caplog.text, "nothing is logged")
        assert not coordinator.beats
        broken = False
        eventually(lambda: coordinator.beats, "no heartbeat comes")
    finally:
        agent.shutdown()


def test_the_coordinator_attends_to_other_models_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterSimulation(5, hosts=2, slots=20, roomy=False)
    cluster.models.update(a=SimModel((1, 2)), b=SimModel((3, 4)))
    try:
        clients = [cluster.load("a", 1, 1), cluster.load("b", 1, 1)]
        cluster.settle()
        coordinator = cluster._coordinator
        assert coordinator is not None
        keep_model = coordinator._keep_model

        async def failing(record: object, now_s: float) -> None:
            if record is cluster.records()[0]:
                raise RuntimeError("a fault of the test")
            await keep_model(record, now_s)  # type: ignore[arg-type]

        monkeypatch.setattr(coordinator, "_keep_model", failing)
        for client in clients:
            client.kill()
        cluster.clock.run(4 * cluster.config.holder_ttl_s)
        assert [record.life.is_over for record in cluster.records()] == [False, True]
        assert "a fault of the test" in cluster.problems[0]
    finally:
        cluster.close()
