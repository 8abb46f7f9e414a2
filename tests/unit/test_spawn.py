"""Starting a node's agent while Ray still reserves the name for a dying one."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
from ray.exceptions import RayActorError

from actors import agent_actor
from actors.coordination import nodes, spawn
from actors.coordination.model_record import ModelRecord
from actors.coordination.nodes import NodeAgents
from actors.node_agent import NodeAgent
from cluster.config import Config
from cluster.errors import ClusterError, ClusterLost, PackageMissing

TAKEN = ValueError("Failed to look up actor with name 'agent-1'")


def test_a_dying_agents_name_is_asked_for_again() -> None:
    agent = object()
    with patch.object(spawn, "_find_or_make_agent", side_effect=[TAKEN, TAKEN, agent]) as asked:
        assert spawn.start_agent("1", "alpha", Config()) is agent
    assert asked.call_count == 3


def test_a_name_that_stays_taken_is_an_error_that_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "NAME_FREE_S", 0.0)
    with (
        patch.object(spawn, "_find_or_make_agent", side_effect=TAKEN),
        pytest.raises(ClusterLost, match="alpha"),
    ):
        spawn.start_agent("1", "alpha", Config())


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("The actor died because ...\nModuleNotFoundError: No module named 'actors'", PackageMissing),
        ("The actor died because ...\nTypeError: __init__() takes 7 arguments", ClusterError),
    ],
)
def test_an_agent_that_cannot_start_is_made_once(
    said: str, kind: type[ClusterError], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def start_agent(node_id: str, host: str, config: object) -> SimpleNamespace:
        nonlocal made
        made += 1
        return SimpleNamespace(packed=SimpleNamespace(remote=dies))

    async def dies(*_: object) -> None:
        raise RayActorError("id", said, actor_init_failed=True)

    monkeypatch.setattr(spawn, "start_agent", start_agent)
    monkeypatch.setattr(nodes, "living_nodes", lambda: {"1": "alpha"})
    record = cast("ModelRecord", SimpleNamespace(nodes={"1": "alpha"}))
    with pytest.raises(kind, match="alpha") as raised:
        asyncio.run(NodeAgents(record, Config()).ask("1", lambda agent: agent.facts.remote()))
    assert (type(raised.value), made) == (kind, 1)


@pytest.mark.parametrize(
    ("answer", "only_idle", "ended"),
    [
        (True, True, True),
        (False, True, False),
        (TimeoutError(), True, False),  # it may have a load
        (TimeoutError(), False, True),
        (RayActorError("id", "it died"), True, True),
    ],
)
def test_an_agent_that_does_not_answer_is_not_idle(
    answer: bool | Exception, only_idle: bool, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def shutdown(**_: object) -> bool:
        if isinstance(answer, Exception):
            raise answer
        return answer

    agent, killed = SimpleNamespace(shutdown=SimpleNamespace(remote=shutdown)), []
    monkeypatch.setattr(spawn, "find_agent", lambda node_id: agent)
    monkeypatch.setattr(spawn, "end_actor", killed.append)
    assert asyncio.run(spawn.shut_agent("1", only_idle=only_idle)) is ended
    assert killed == [agent] * ended


def test_the_agents_actor_answers_as_the_agent_does() -> None:
    calls = [name for name in vars(agent_actor.NodeAgent) if not name.startswith("_")]
    assert "packed" in calls
    for name in calls:
        assert parameters(agent_actor.NodeAgent, name) == parameters(NodeAgent, name), name


def parameters(actor: type, call: str) -> list[inspect.Parameter]:
    """Return those of one of its methods, without the one that Ray adds to a class that it has made an actor."""
    said = inspect.signature(getattr(actor, call)).parameters
    return [parameter for parameter in said.values() if parameter.name != "_ray_trace_ctx"]
