"""Clients that share one model: releases during a load, a model that was replaced, credentials that differ.

Coordinator and ledgers are the real ones; Ray, clock and store are simulated (`tests.support.cluster_simulation`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.scheduling.load_state import LoadState
from storage.errors import AccessDenied, RevisionMismatch, StoreUnavailable
from tests.support.cluster_simulation import ClusterSimulation, SimClient
from tests.support.node_simulation import SimModel

pytestmark = pytest.mark.slow

MODEL = SimModel(tuple(range(12)))
SCALE = settings().max_examples // 40  # 1 in the usual profile


def new_cluster(seed: int) -> ClusterSimulation:
    cluster = ClusterSimulation(seed, hosts=2, slots=200, roomy=True)
    cluster.models["a"] = MODEL
    return cluster


@pytest.fixture
def cluster() -> Iterator[ClusterSimulation]:
    cluster = new_cluster(5)
    yield cluster
    try:
        cluster.settle()
        cluster.end()
    finally:
        cluster.close()


def ready(cluster: ClusterSimulation, key: str | None = None, **options: object) -> SimClient:
    client = cluster.load("a", 2, 1, key=key, **options)
    cluster.settle()
    assert client.ready, client.error
    return client


def test_load_during_release_gets_a_model_of_its_own(cluster: ClusterSimulation) -> None:
    for pause_s in (0.0, 0.02, 0.05, 0.1, 0.3, 1.0):
        first = ready(cluster)
        first.release()
        cluster.run(pause_s)
        second = ready(cluster)
        second.release()
        cluster.run(5.0)


@settings(max_examples=60 * SCALE, deadline=None, derandomize=SCALE == 1, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_releases_of_one_client_end_no_load_of_another(seed: int) -> None:
    chance, cluster = random.Random(seed), new_cluster(seed)
    cluster.faults.add("client")
    try:
        for _ in range(20):
            living = [client for client in cluster.clients if not (client.released or client.dead)]
            if living and chance.random() < 0.5:
                chance.choice(living).release()
            elif len(living) < 4:
                cluster.load("a", 2, 1, key=chance.choice([None, "good", "better"]))
            cluster.run(chance.choice([0.0, 0.02, 0.1, 0.5, 2.0]))
        cluster.settle()
        assert all(client.ready for client in cluster.clients if not client.released)
        cluster.end()
    finally:
        cluster.close()


def test_two_loads_of_a_replaced_model_share_one_copy(cluster: ClusterSimulation) -> None:
    old = ready(cluster)
    cluster.revision = "v2"
    second, third = cluster.load("a", 2, 1), cluster.load("a", 2, 1)
    cluster.settle()
    assert second.ready
    assert second.model_id == third.model_id != old.model_id


def test_a_pinned_revision_is_shared_only_with_requests_for_it(cluster: ClusterSimulation) -> None:
    cluster.faults.add("revision")
    old = ready(cluster)
    assert ready(cluster, revision="v1").model_id == old.model_id
    other = cluster.load("a", 2, 1, revision="v2")
    cluster.settle()
    assert isinstance(other.error, RevisionMismatch)
    cluster.revision = "v2"
    new, any_revision, gone = (cluster.load("a", 2, 1, revision=revision) for revision in ("v2", "", "v1"))
    cluster.settle()
    assert new.ready
    assert new.model_id == any_revision.model_id != old.model_id
    assert isinstance(gone.error, RevisionMismatch)
    assert old.error is None


def test_wrong_credentials_get_no_resident_model(cluster: ClusterSimulation) -> None:
    cluster.refused.add("bad")
    cluster.faults.add("access")
    good = ready(cluster, "good")
    bad = cluster.load("a", 2, 1, key="bad")
    cluster.settle()
    assert isinstance(bad.error, AccessDenied)
    replace_a_worker(cluster)
    assert good.error is None


def test_expired_credentials_of_one_client_stop_no_other(cluster: ClusterSimulation) -> None:
    """Neither a second client that attaches, nor the rank that is replaced after that."""
    ready(cluster, "first")
    cluster.refused.add("first")
    second = ready(cluster, "second")
    replace_a_worker(cluster)
    assert second.error is None
    assert len({client.model_id for client in cluster.clients}) == 1


def test_credentials_of_a_client_that_released_are_not_needed(cluster: ClusterSimulation) -> None:
    first, second = ready(cluster, "first"), ready(cluster, "second")
    second.release()
    cluster.run(1.0)
    cluster.refused.add("second")
    replace_a_worker(cluster)
    assert first.error is None


def test_refused_plan_of_one_client_is_not_the_answer_to_another(cluster: ClusterSimulation) -> None:
    """The second load arrives while the first one, with other credentials, is being planned."""
    cluster.refused.add("bad")
    cluster.faults.add("access")
    bad = cluster.load("a", 2, 1, key="bad")
    good = cluster.load("a", 2, 1, key="good")
    cluster.settle()
    assert isinstance(bad.error, AccessDenied)
    assert good.ready


def test_recent_access_attaches_while_the_store_is_away(cluster: ClusterSimulation) -> None:
    cluster.faults.add("away")
    ready(cluster, "good")
    cluster.store_is_away = True
    again = ready(cluster, "good")
    unknown = cluster.load("a", 2, 1, key="never checked")
    cluster.run(10.0)
    assert isinstance(unknown.error, StoreUnavailable)
    cluster.run(cluster.config.access_grace_s)
    late = cluster.load("a", 2, 1, key="good")
    cluster.run(10.0)
    assert isinstance(late.error, StoreUnavailable)
    cluster.store_is_away = False
    assert again.error is None


def test_restarted_coordinator_takes_only_credentials_that_work(cluster: ClusterSimulation) -> None:
    ready(cluster, "first")
    second = ready(cluster, "second")
    cluster.refused.add("first")
    cluster.kill_coordinator()
    cluster.run(3 * cluster.config.holder_ttl_s)
    assert [proof.client_id for proof in cluster.records()[0].access.proofs[-1:]] == [second.request.client_id]
    replace_a_worker(cluster)
    assert second.error is None


def replace_a_worker(cluster: ClusterSimulation) -> None:
    cluster.kill_worker(cluster.workers()[0])
    cluster.run(5.0)
    cluster.settle()
    assert LoadState.FAILED not in [record.life.state for record in cluster.records() if record.placements]
