"""Metrics out of heartbeats: whatever happens to agents and messages, counters never fall, lose or double anything."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.node.node_ledger import ModelCounters
from cluster.messages import AgentBeat, LoadBeat, RankBeat
from cluster.scheduling.load_state import LoadState, RankLife
from cluster.telemetry import metrics
from cluster.telemetry.counters import GONE_S, ClusterMetrics, CoordinatorFacts, Durations, Key, LoadView, samples
from cluster.telemetry.metrics import BUCKETS_S, FAMILIES, MOST_MODELS, MOST_PAIRS, BoundedLabels, Kind, model_label
from cluster.telemetry.stats import SOURCES, ArenaUse, LoadCounters, NodeMemory, NodeStats, StageTimes
from storage.arena.chunk_cache import CacheStats
from storage.disk.tier import DiskStats
from storage.host.memory import GpuMemory
from tests.support.cluster_simulation import counters_of

LABELS = {
    "node",
    "incarnation",
    "rank",
    "model",
    "source",
    "cause",
    "stage",
    "reason",
    "outcome",
    "error",
    "state",
    "tier",
}
LABELS |= {"process", "gpu", "version", "region"}
ARENA = ArenaUse(64, 32, 1, 0)
CACHE = CacheStats(
    8, 8, 3, 1, 4, 0, 1, 32, hits=0, misses=0, committed=9, evicted=5, expired=0, duplicates=0, quarantined=2
)


@dataclass(eq=False)
class Load:
    """A load as its agent counts it."""

    model: str
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def job(self) -> Any:
        return SimpleNamespace(model=self.model)

    def counters(self) -> LoadCounters:
        return LoadCounters(
            bytes_by_source={source: self.counts[source] for source in SOURCES},
            chunks_by_source={source: self.counts[f"{source} chunks"] for source in SOURCES},
            corrupt_chunks=self.counts["corrupt"],
            retries={"reset": self.counts["reset"]} if self.counts["reset"] else {},
            stages=StageTimes(fetch_s=self.counts["fetch"] * 0.1).exact(),
        )


class Agent:
    """One agent's process: its loads, and the counters that its heartbeats carry."""

    def __init__(self, node: str, host: str, incarnation: int = 0) -> None:
        self.node, self.host, self.incarnation = node, host, incarnation
        self.name = f"{node}-{incarnation}"
        self.number = 0
        self.counters = ModelCounters()
        self.loads: list[Load] = []
        self.truth: Counter[tuple[str, str]] = Counter()  # by model and what
        self.evicted = 0

    def load(self, model: str, **counts: int) -> Load:
        self.loads.append(Load(model))
        self.count(self.loads[-1], **counts)
        return self.loads[-1]

    def count(self, load: Load, **counts: int) -> None:
        load.counts.update(counts)
        self.truth.update({(load.model, what): value for what, value in counts.items()})

    def end(self, load: Load) -> None:
        self.loads.remove(load)
        self.counters.finish(load)  # type: ignore[arg-type]

    def beat(self) -> AgentBeat:
        self.number += 1
        return AgentBeat(
            self.node,
            self.host,
            self.name,
            (),
            (),
            ARENA,
            number=self.number,
            started_ticks=self.incarnation,
            counters=self.counters.grown(self.loads),  # type: ignore[arg-type]
            counted_by=self.counters.coordinator,
            stats=NodeStats(replace(CACHE, evicted=self.evicted)),
        )


def shown(cluster: ClusterMetrics) -> dict[str, dict[tuple[str, str], float]]:
    """Return the page's counters of each agent's process, by model and kind."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    families = {metrics.CHUNK_BYTES: "{}", metrics.CHUNKS: "{} chunks", metrics.RETRIES: "{}"}
    for (family, labels), value in counters_of(cluster.snapshot()).items():
        if family in families and value:
            found.setdefault(labels[1], {})[labels[2], families[family].format(labels[3])] = value
        elif family is metrics.CHUNKS_CORRUPT and value:
            found.setdefault(labels[1], {})[labels[2], "corrupt"] = value
        elif family is metrics.STAGE_SECONDS and labels[3] == "fetch" and value:
            found.setdefault(labels[1], {})[labels[2], "fetch"] = round(value * 10)
    return found


WHAT = [*SOURCES, *(f"{source} chunks" for source in SOURCES), "corrupt", "reset", "fetch"]


class MetricsMachine(RuleBasedStateMachine):
    """Agents of two hosts, one of which has two, load, end loads and are killed.

    Their heartbeats get lost, arrive late or twice, and the coordinator is replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.agents = [Agent("n0", "a"), Agent("n1", "a"), Agent("n2", "b")]
        self.cluster, self.coordinator = ClusterMetrics("0"), 0
        self.late: list[tuple[int, AgentBeat]] = []  # with the coordinator that it was sent to
        self.received: dict[
            str, dict[tuple[str, str], float]
        ] = {}  # by agent: its counters at a heartbeat that arrived
        self.seen: dict[Key, float] = {}

    @rule(agent=st.integers(0, 2), what=st.sampled_from(WHAT), amount=st.integers(1, 1000), data=st.data())
    def count(self, agent: int, what: str, amount: int, data: st.DataObject) -> None:
        there = self.agents[agent]
        if there.loads:
            there.count(data.draw(st.sampled_from(there.loads)), **{what: amount})
        there.evicted += 1

    @rule(agents=st.sets(st.integers(0, 2), min_size=1), model=st.sampled_from(["llama", "qwen"]))
    def begin(self, agents: set[int], model: str) -> None:
        for agent in agents:
            self.agents[agent].load(model)

    @rule(agent=st.integers(0, 2), data=st.data())
    def end(self, agent: int, data: st.DataObject) -> None:
        there = self.agents[agent]
        if there.loads:
            there.end(data.draw(st.sampled_from(there.loads)))

    @rule(agent=st.integers(0, 2))
    def restart(self, agent: int) -> None:
        """Unreported counts are lost. The loads continue, and are counted from 0."""
        there = self.agents[agent]
        self.agents[agent] = Agent(there.node, there.host, there.incarnation + 1)
        for load in there.loads:
            self.agents[agent].load(load.model)

    @rule(agent=st.integers(0, 2), fate=st.sampled_from(["arrives", "arrives", "lost", "late", "twice", "unanswered"]))
    def beats(self, agent: int, fate: str) -> None:
        there = self.agents[agent]
        beat = there.beat()
        if fate in ("late", "twice"):
            self.late.append((self.coordinator, beat))
        if fate in ("lost", "late"):
            return
        self.cluster.received(beat, 0.0)
        if fate != "unanswered":
            there.counters.answered(beat.counters, str(self.coordinator))

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def late_beat(self, data: st.DataObject) -> None:
        whose, beat = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        if whose == self.coordinator:
            self.cluster.received(beat, 0.0)

    @rule(agent=st.integers(0, 2))
    def is_received(self, agent: int) -> None:
        """After any losses, two answered heartbeats bring everything that the agent has counted."""
        there = self.agents[agent]
        for _ in range(2):
            beat = there.beat()
            self.cluster.received(beat, 0.0)
            there.counters.answered(beat.counters, str(self.coordinator))
        self.received[there.name] = dict(there.truth)
        assert shown(self.cluster).get(there.name, {}) == there.truth

    @rule()
    def new_coordinator(self) -> None:
        """It starts empty, and shows the same series as its predecessor once their agents have reported."""
        self.coordinator += 1
        self.cluster = ClusterMetrics(str(self.coordinator))

    @invariant()
    def counters_never_fall(self) -> None:
        counters = counters_of(self.cluster.snapshot())
        for key, value in self.seen.items():
            if "incarnation" in key[0].labels:
                assert counters.get(key, value) >= value, key
        self.seen.update(counters)

    @invariant()
    def an_agent_that_was_replaced_keeps_its_counters(self) -> None:
        found = shown(self.cluster)
        for name, before in self.received.items():
            for key, value in before.items() if name in found else ():
                assert found[name].get(key, value) >= value


TestMetrics = MetricsMachine.TestCase


@given(
    st.lists(st.tuples(st.sampled_from(["llama", "qwen"]), st.floats(0, 1000), st.booleans())),
    st.randoms(use_true_random=False),
)
def test_no_order_of_loads_makes_a_counter_fall(happens: list[tuple[str, float, bool]], chance: Random) -> None:
    """Sums of times must not depend on the order in which loads end: Prometheus reads any fall as a restart."""
    counters, loads, before = ModelCounters(), [], {}
    for model, spent_s, ends in happens:
        times = StageTimes(fetch_s=spent_s, wait_slot_s=spent_s / 3).exact()
        loads.append(SimpleNamespace(job=SimpleNamespace(model=model), counters=lambda s=times: LoadCounters(stages=s)))
        if ends:
            counters.finish(loads.pop(chance.randrange(len(loads))))  # type: ignore[arg-type]
        chance.shuffle(loads)
        found = counters.grown(loads)  # type: ignore[arg-type]
        for name, was in before.items():
            assert found[name].stages.fetch_s >= was.stages.fetch_s
            assert found[name].stages.wait_slot_s >= was.stages.wait_slot_s
        before = found


def view(load_id: str, state: LoadState, *, ranks: tuple[RankLife, ...] = (), error: str = "") -> LoadView:
    return LoadView(load_id, "llama", state, ranks, ("a",) * len(ranks), 100, error)


def through(
    cluster: ClusterMetrics, load_id: str, *steps: tuple[float, LoadState], error: str = "", adopted: bool = False
) -> None:
    for at_s, state in steps:
        cluster.load(view(load_id, state, error=error if state is LoadState.FAILED else ""), at_s, adopted=adopted)


S = LoadState


def test_load_durations_are_counted_by_outcome_and_state() -> None:
    cluster = ClusterMetrics()
    through(cluster, "a", (0.0, S.PLANNING), (2.0, S.STARTING), (3.0, S.LOADING), (3.0, S.LOADING), (10.0, S.READY))
    through(cluster, "b", (0.0, S.PLANNING), (70.0, S.FAILED), error="AccessDenied")
    through(cluster, "c", (0.0, S.PLANNING), (1.0, S.RELEASED))
    through(cluster, "a", (20.0, S.DEGRADED), (21.0, S.READY), (30.0, S.FAILED), (31.0, S.PLANNING), error="NodeLost")
    snapshot = cluster.snapshot()
    finished = {labels[1]: value for (of, labels), value in snapshot.totals.items() if of is metrics.LOADS_FINISHED}
    assert finished == {"ready": 1, "failed": 1, "cancelled": 1, "lost": 1}
    failures = {labels[1]: value for (of, labels), value in snapshot.totals.items() if of is metrics.LOAD_FAILURES}
    assert failures == {"AccessDenied": 1, "NodeLost": 1}
    sums = {(of.name, *labels): (sum(d.counts), d.sum_s) for (of, labels), d in snapshot.durations.items()}
    assert sums == {
        ("longshore_load_duration_seconds", "llama", "ready"): (1, 10.0),
        ("longshore_load_duration_seconds", "llama", "failed"): (1, 70.0),
        ("longshore_load_duration_seconds", "llama", "cancelled"): (1, 1.0),
        ("longshore_load_state_duration_seconds", "planning"): (3, 73.0),
        ("longshore_load_state_duration_seconds", "starting"): (1, 1.0),
        ("longshore_load_state_duration_seconds", "loading"): (1, 7.0),
        ("longshore_load_state_duration_seconds", "degraded"): (1, 1.0),
    }


def test_loads_of_an_earlier_coordinator_have_no_durations() -> None:
    cluster = ClusterMetrics()
    through(cluster, "a", (0.0, S.PLANNING), (1.0, S.LOADING), (2.0, S.READY), (9.0, S.FAILED), error="X", adopted=True)
    snapshot = cluster.snapshot()
    assert not snapshot.durations
    finished = {labels[1]: value for (of, labels), value in snapshot.totals.items() if of is metrics.LOADS_FINISHED}
    assert finished == {"ready": 0, "failed": 0, "cancelled": 0, "lost": 1}


def test_each_loss_of_a_rank_counts_once() -> None:
    cluster = ClusterMetrics()
    here, gone, new = RankLife(), RankLife(lost=True), RankLife(1, ready=True)
    for ranks in ((here, here), (gone, here), (gone, here), (gone, gone), (new, gone), (new, here), (gone, here)):
        cluster.load(view("x", S.LOADING, ranks=ranks), 0.0)
    assert cluster.snapshot().totals[metrics.RANKS_LOST, ("llama",)] == 3


def now(cluster: ClusterMetrics, now_s: float) -> dict[tuple[str, ...], float]:
    found = samples(cluster.snapshot(), now_s, CoordinatorFacts("head", "1.2", 7))
    assert list(found) == FAMILIES
    return {
        (family.name, *sample.labels): sample.value
        for family, those in found.items()
        for sample in those
        if not isinstance(sample.value, Durations)
    }


def test_gauges_show_the_last_heartbeats() -> None:
    cluster = ClusterMetrics()
    cluster.load(view("x", S.LOADING, ranks=(RankLife(), RankLife(ready=True))), 100.0)
    ranks = (
        RankBeat("x", 1, 0, 0, 11, 30, 0.5, requests=3, allowed_requests=4, own_bytes=1000),
        RankBeat("x", 1, 1, 0, 12, 50, 9.0, done=True, own_bytes=0),
        RankBeat("gone", 1, 1, 0, 12, 50, 9.0),
    )
    memory = NodeMemory(10, 20, 30, 40, 50, (GpuMemory(8, 3), GpuMemory(8)))
    stats = NodeStats(CACHE, DiskStats(100, 60, 3, 5, 2, 1), memory)
    load = LoadBeat("x", 1, 0, None, False, "llama")
    cluster.received(AgentBeat("n", "a", "i", (load,), ranks, ARENA, number=1, stats=stats), 110.0)
    found = now(cluster, 112.0)
    expected = {
        ("longshore_loads", "llama", "loading"): 1,
        ("longshore_load_elapsed_seconds", "llama", "loading"): 12.0,
        ("longshore_load_idle_seconds", "llama", "loading"): 2.0,  # the heartbeat brought bytes
        ("longshore_model_size_bytes", "llama"): 100,
        ("longshore_model_placed_bytes", "llama"): 80,
        ("longshore_ranks", "a", "llama", "loading"): 1,
        ("longshore_ranks", "a", "llama", "ready"): 1,
        ("longshore_rank_placed_bytes", "a", "i", "0", "llama"): 30,
        ("longshore_rank_requests", "a", "i", "0", "llama"): 3,
        ("longshore_rank_allowed_requests", "a", "i", "0", "llama"): 4,
        ("longshore_rank_silent_seconds", "a", "i", "0", "llama"): 2.5,
        ("longshore_heartbeat_age_seconds", "a", "i"): 2.0,
        ("longshore_process_memory_bytes", "a", "i", "rank 0", "llama"): 1000,
        ("longshore_process_memory_bytes", "a", "i", "agent", ""): 50,
        ("longshore_process_memory_bytes", "head", "", "coordinator", ""): 7,
        ("longshore_cache_bytes", "a", "i", "arena"): 32,
        ("longshore_cache_limit_bytes", "a", "i", "disk"): 100,
        ("longshore_disk_files", "a", "i"): 3,
        ("longshore_slots", "a", "i", "evictable"): 3,
        ("longshore_slots", "a", "i", "in_use"): 1,
        ("longshore_host_memory_free_bytes", "a", "i"): 10,
        ("longshore_shm_total_bytes", "a", "i"): 40,
        ("longshore_gpu_memory_free_bytes", "a", "i", "0"): 3,
        ("longshore_gpu_memory_total_bytes", "a", "i", "1"): 8,
        ("longshore_cache_evictions_total", "a", "i", "disk"): 2,
        ("longshore_disk_chunks_unkept_total", "a", "i"): 1,
        ("longshore_slots_quarantined_total", "a", "i"): 2,
        ("longshore_build_info", "1.2"): 1,
    }
    assert {key: found.get(key) for key in expected} == expected
    for absent in (
        ("longshore_gpu_memory_free_bytes", "a", "i", "1"),
        ("longshore_rank_silent_seconds", "a", "i", "1", "llama"),
    ):
        assert absent not in found


def test_changes_of_resident_models_are_a_gauge_while_they_run() -> None:
    cluster = ClusterMetrics()
    for load_id, change in (("x", "staging"), ("y", "scaling"), ("z", "staging")):
        cluster.load(replace(view(load_id, S.READY), change=change), 1.0)
    changes = ("longshore_changes", "llama")
    found = {key[2]: value for key, value in now(cluster, 2.0).items() if key[:2] == changes}
    assert found == {"staging": 2, "scaling": 1}
    cluster.load(replace(view("x", S.READY), change="exchanging"), 3.0)
    for load_id in "yz":
        cluster.load(view(load_id, S.READY), 3.0)
    found = {key[2]: value for key, value in now(cluster, 4.0).items() if key[:2] == changes}
    assert found == {"exchanging": 1}


def test_series_of_a_lost_agent_stay_only_for_a_while() -> None:
    cluster = ClusterMetrics()
    agents = [Agent("n1", "a"), Agent("n2", "a"), Agent("n3", "b")]
    for agent in agents:
        agent.load("llama", disk=10)
        cluster.received(agent.beat(), 0.0)
    cluster.keep({"n2", "n3"}, (), 1.0)
    assert set(shown(cluster)) == {"n1-0", "n2-0", "n3-0"}  # a scrape may have missed its last counts
    gauges = {key[2] for key in now(cluster, 1.0) if key[0] == "longshore_cache_bytes"}
    assert gauges == {"n2-0", "n3-0"}
    cluster.keep({"n3"}, (), GONE_S + 2.0)
    assert set(shown(cluster)) == {"n2-0", "n3-0"}
    cluster.keep({"n3"}, (), 3 * GONE_S)
    assert not [key for key in now(cluster, 0.0) if "a" in key[1:]]


def test_a_restarted_agent_gets_its_own_series() -> None:
    cluster, agent, again = ClusterMetrics(), Agent("n", "a"), Agent("n", "a", 1)
    agent.load("llama", disk=10)
    again.load("llama", disk=3)
    first = agent.beat()
    cluster.received(first, 0.0)
    cluster.received(again.beat(), 1.0)
    cluster.received(agent.beat(), 2.0)  # late
    assert {name: found["llama", "disk"] for name, found in shown(cluster).items()} == {"n-0": 10, "n-1": 3}
    assert {key[2] for key in now(cluster, 2.0) if key[0] == "longshore_heartbeat_age_seconds"} == {"n-1"}
    assert now(cluster, 2.0)["longshore_agent_restarts_total", "a"] == 1
    cluster.keep({"n"}, (), 2 * GONE_S)
    assert set(shown(cluster)) == {"n-1"}
    cluster.received(agent.beat(), 2 * GONE_S)  # so late that nobody knows it any more
    again.load("llama", disk=2)
    cluster.received(again.beat(), 2 * GONE_S)
    assert shown(cluster) == {"n-1": {("llama", "disk"): 5}}
    assert now(cluster, 2.0)["longshore_agent_restarts_total", "a"] == 1


@pytest.mark.slow
def test_series_are_bounded_for_any_number_of_models_and_nodes() -> None:
    """The scraper waits for the series, and the coordinator does little else meanwhile."""
    cluster, agents = ClusterMetrics(), [Agent(f"n{number}", f"host-{number}") for number in range(24)]
    for number in range(MOST_MODELS):
        for agent in agents:
            agent.end(agent.load(f"m{number}", disk=5))
            beat = agent.beat()
            cluster.received(beat, 0.0)
            agent.counters.answered(beat.counters, "")
            assert set(beat.counters) == {f"m{number}"}  # and heartbeats do not grow with ended loads
    kept = [labels for of, labels in counters_of(cluster.snapshot()) if of is metrics.CHUNKS_VERIFIED]
    assert MOST_PAIRS // 2 < len(kept) <= MOST_PAIRS
    newest = f"m{MOST_MODELS - 1}"
    assert {host for host, _, model in kept if model == newest} == {agent.host for agent in agents}
    agents[0].load("m0", disk=2)  # again, after it was no longer shown
    cluster.received(agents[0].beat(), 0.0)
    assert shown(cluster)["n0-0"]["m0", "disk"] == 7
    assert len([of for of, _ in counters_of(cluster.snapshot()) if of is metrics.CHUNKS_VERIFIED]) <= MOST_PAIRS


def test_an_agent_bounds_the_models_it_counts() -> None:
    agent = Agent("n", "a")
    for number in range(MOST_MODELS + 50):
        agent.end(agent.load(f"m{number}", corrupt=1))
    counters = agent.beat().counters
    assert len(counters) == MOST_MODELS + 1
    assert counters["other"].corrupt_chunks == 50
    labels = BoundedLabels(1)
    assert [labels(value) for value in "aba"] == ["a", "other", "a"]


def test_hits_and_misses_are_counted_by_tier() -> None:
    cluster, agent = ClusterMetrics(), Agent("n", "a")
    agent.load("llama", **{"arena chunks": 4, "disk chunks": 3, "store_via_arena chunks": 2})
    agent.load("qwen", **{"arena chunks": 1, "store_direct chunks": 1})
    cluster.received(replace(agent.beat(), stats=NodeStats(CACHE, DiskStats(9, 9, 1, 0, 0, 0))), 0.0)
    found = now(cluster, 0.0)
    for tier, hits, misses in (("arena", 5, 6), ("disk", 3, 3)):
        assert found["longshore_cache_hits_total", "a", "n-0", tier] == hits
        assert found["longshore_cache_misses_total", "a", "n-0", tier] == misses


@pytest.mark.parametrize(
    ("uri", "label"),
    [
        ("s3://models/llama-70b", "llama-70b"),
        ("s3://models/llama-70b/", "llama-70b"),
        ("https://host/a/Qwen2.5-7B?X-Amz-Signature=0123#frag", "Qwen2.5-7B"),
        ("/mnt/models/my model\n", "my-model"),
        ("s3://key:secret@bucket", "bucket"),
        ("s3://bucket", "bucket"),
        ("file:///", "model"),
        ("", "model"),
        ("s3://b/" + "x" * 500, "x" * 64),
        ("http://[broken/llama?token=1", "llama"),
        ("s3://b/../..", "model"),
    ],
)
def test_a_model_label_is_derived_from_its_uri(uri: str, label: str) -> None:
    assert model_label(uri) == label


@given(st.text())
def test_a_model_label_is_plain_text_for_any_uri(uri: str) -> None:
    label = model_label(uri)
    assert 0 < len(label) <= 64
    assert label.isascii()
    assert not set(label) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


@given(st.lists(st.floats(0, 4000)))
def test_histograms_count_each_duration_in_its_bucket(durations: list[float]) -> None:
    found = Durations()
    for duration_s in durations:
        found = found.plus(duration_s)
    below = 0
    for bound, count in zip(BUCKETS_S, found.counts, strict=False):
        below += count
        assert below == sum(duration_s <= bound for duration_s in durations)
    assert sum(found.counts) == len(durations)
    assert found.sum_s == pytest.approx(sum(durations))


def test_every_metric_follows_the_naming_conventions() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert family.name.startswith("longshore_")
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
        assert family.help.endswith((".", ")")) or family is metrics.BUILD_INFO
        assert set(family.labels) <= LABELS
        unit = family.name.removesuffix("_total").rpartition("_")[2]
        assert unit not in ("s", "ms", "mb", "byte", "second")
