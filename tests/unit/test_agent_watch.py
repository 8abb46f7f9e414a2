"""What the coordinator does with heartbeats of nodes that Ray has given up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import RayError

from actors import agent_watch, nodes
from actors.agent_watch import AgentWatch
from actors.model_record import ModelRecord
from cluster.messages import AgentBeat, ArenaUse, BeatReply, LoadBeat


class Ray:
    """What it says of its nodes, and how often it was asked."""

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
        watch = AgentWatch("coordinator", 60.0, models, nobody, nobody)
        return await asyncio.gather(*map(watch.heard, beats)), watch

    replies, watch = asyncio.run(run())
    return list(replies), watch, models


def test_a_load_is_not_taken_up_by_the_record_of_a_node_that_was_given_up(ray_of: Ray) -> None:
    """A coordinator that was restarted meanwhile knows of no load: the record may be of an attempt before the last."""
    (reply,), watch, models = hear(beat("dead", {"llama-1": b"a record that is older than others"}))
    assert reply.node_dead
    assert not reply.unknown_loads
    assert not models
    assert not watch.node_ids


def test_an_agent_of_a_living_node_is_asked_for_its_record(ray_of: Ray) -> None:
    (reply,), watch, _ = hear(beat("living"))
    assert not reply.node_dead
    assert reply.unknown_loads == ("llama-1",)
    assert watch.node_ids == {"living"}


def test_ray_is_asked_once_for_all_that_begin_to_speak_together(ray_of: Ray) -> None:
    ray_of.living = {str(number) for number in range(100)}
    replies, _, _ = hear(*(beat(str(number)) for number in range(100)), *(beat(str(number)) for number in range(100)))
    assert not any(reply.node_dead for reply in replies)
    assert ray_of.asked == 1


def test_who_was_silent_is_looked_at_again(ray_of: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_watch, "SILENT_S", 0.0)  # every word comes after a silence
    monkeypatch.setattr(agent_watch, "ASKED_S", -1.0)

    async def run() -> tuple[bool, bool, set[str]]:
        watch = AgentWatch("coordinator", 60.0, {}, lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
        first = await watch.heard(beat("living"))
        ray_of.living.clear()
        second = await watch.heard(beat("living"))
        return first.node_dead, second.node_dead, watch.node_ids

    assert asyncio.run(run()) == (False, True, set())


def test_no_node_is_given_up_because_ray_does_not_answer(ray_of: Ray) -> None:
    ray_of.well = False
    (reply,), watch, _ = hear(beat("anybody"))
    assert not reply.node_dead
    assert watch.node_ids == {"anybody"}
