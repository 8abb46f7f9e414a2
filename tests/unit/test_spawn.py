"""A node's agent while Ray gives its name to nobody: neither to the one that dies nor to a new one."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from actors.coordination import spawn
from cluster.config import Config
from cluster.errors import ClusterLost

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
