"""Agents of nodes without a model end when the settings say so, and the next load starts others."""

from __future__ import annotations

import time

import pytest

import cluster
from tests.support.ray_clusters import Longshore, eventually
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow


@pytest.mark.cluster_settings(idle_agent_s=1.0)
def test_an_idle_agent_ends_and_starts_again_with_the_next_model(longshore: Longshore, llama: StoredModel) -> None:
    model = cluster.load(llama.uri, device="cpu", **llama.options)
    time.sleep(2.5)
    assert longshore.actor_names("agent-"), "it has a model"
    model.release()
    eventually(lambda: not longshore.actor_names("agent-"), "an idle agent stays")
    assert not longshore.arenas()
    eventually(lambda: not longshore.status().nodes, "status still shows it")
    again = cluster.load(llama.uri, device="cpu", **llama.options)
    assert (again.report.resident, again.report.cached_bytes) == (False, 0)
    again.release()
