"""A load checks its nodes only after errors that the death of a node can cause."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from ray.exceptions import RayError

from actors.coordination.placing import Relocation
from actors.coordination.run_parts import RunParts
from cluster.errors import ClusterLost, NodeLost
from storage.errors import ArenaTooLarge, LongshoreError


class Agents:
    """All of them answer."""

    def __init__(self) -> None:
        self.asked = 0

    async def check_nodes(self) -> None:
        self.asked += 1


class TaskError(RayError):
    """An error as Ray wraps what an actor raised."""

    def __init__(self, cause: LongshoreError) -> None:
        super().__init__("a traceback")
        self.cause = cause


@pytest.mark.parametrize(
    ("error", "needed", "asked"),
    [
        (NodeLost("a node died"), True, 0),
        (TaskError(ArenaTooLarge("no room")), False, 0),  # to ask its agent, which has been ended, would start it anew
        (TaskError(ClusterLost("no agent")), False, 1),
        (RayError("an actor died"), False, 1),
        (TimeoutError(), False, 1),
    ],
)
def test_a_worker_that_answered_gets_no_liveness_check(error: BaseException, needed: bool, asked: int) -> None:
    agents = Agents()
    nothing = cast("Any", None)
    relocation = Relocation(RunParts(nothing, cast("Any", agents), *[nothing] * 6), nothing)
    assert asyncio.run(relocation.is_needed(error)) == needed
    assert agents.asked == asked
