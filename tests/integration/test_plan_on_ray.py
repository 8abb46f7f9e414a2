"""A plan that asks a running cluster: what it says is what the next load finds, and asking changes nothing there."""

from __future__ import annotations

import pytest

import cluster
from cluster.planning import preview
from tests.support.ray_clusters import Longshore, eventually
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow


@pytest.mark.cluster_settings(empty=True)
def test_bytes_by_source_are_those_of_the_next_load(
    longshore: Longshore, llama: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The nodes claim to have GPUs, which are none.
    monkeypatch.setattr(preview, "resolve_device", lambda infos, device: "cpu")

    def plan() -> cluster.PlanSummary:
        return cluster.plan(llama.uri, address=longshore.address, **llama.options)

    first = plan()
    assert first.bytes_by_source == {"store": first.needed_bytes, "arena": 0, "disk": 0}
    assert "no agent runs there yet" in first.notes[-1]
    assert not longshore.actor_names("agent-")  # none was started for the question
    with cluster.load(llama.uri, device="cpu", **llama.options) as model:
        assert model.report.bytes_by_source["arena"] == 0
        resident = plan()
        assert resident.resident == model.model_id
        assert sum(resident.bytes_by_source.values()) == 0
        assert resident.fit is not None
        assert resident.fit.fits
        other = cluster.plan(llama.uri, fsdp_size=2, **llama.options)  # of the cluster that this process works with
        assert (other.resident, other.cluster) == ("", longshore.address)
    eventually(lambda: not longshore.models(), "the model is still there")
    second = plan()
    assert second.resident == ""
    assert second.bytes_by_source == {"store": 0, "arena": second.needed_bytes, "disk": 0}
    (node,) = longshore.status().nodes
    assert (second.nodes[0].arena_bytes, second.nodes[0].window_bytes) == (node.arena_bytes, node.window_bytes)
    with cluster.load(llama.uri, device="cpu", **llama.options) as again:
        found = again.report.bytes_by_source
        assert (found["arena"], found["store_via_arena"]) == (second.bytes_by_source["arena"], 0)
