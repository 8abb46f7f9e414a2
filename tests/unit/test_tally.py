"""Counters out of heartbeats: whatever happens to agents and messages, they never fall, and lose or double nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.messages import AgentBeat, LoadBeat, RankBeat
from cluster.scheduling.load_state import LoadState, RankLife
from cluster.telemetry import metrics
from cluster.telemetry.counters import Books, Coordinator, Durations, LoadView, Tally, samples
from cluster.telemetry.metrics import BUCKETS_S, FAMILIES, MOST_MODELS, MOST_PAIRS, BoundedLabels, Kind, model_label
from cluster.telemetry.stats import SOURCES, ArenaUse, EndedPart, LoadCounters, NodeMemory, NodeStats, StageTimes
from storage.arena.chunk_cache import CacheStats
from storage.disk.tier import DiskStats
from storage.host.memory import GpuMemory

LABELS = {"node", "rank", "model", "source", "cause", "stage", "reason", "outcome", "error", "state", "tier"}
LABELS |= {"process", "gpu", "version"}
ARENA = ArenaUse(64, 32, 1, 0)
CACHE = CacheStats(
    8, 8, 3, 1, 4, 0, 1, 32, hits=0, misses=0, committed=9, evicted=5, expired=0, duplicates=0, quarantined=2
)


@dataclass
class Agent:
    """One agent's process as the tally hears of it: what it counts, and what is on its way."""

    node: str
    host: str
    incarnation: int = 0
    number: int = 0
    answered: bool = False
    parts: dict[tuple[str, int], Counter[str]] = field(default_factory=dict)
    untold: dict[tuple[str, int], Counter[str]] = field(default_factory=dict)
    evicted: int = 0

    def beat(self) -> AgentBeat:
        self.number += 1
        return AgentBeat(
            self.node,
            self.host,
            f"{self.node}-{self.incarnation}",
            tuple(LoadBeat(*part, 0, None, False, model_of(part), said(of)) for part, of in self.parts.items()),
            (),
            ARENA,
            number=self.number,
            answered=self.answered,
            ended=tuple(EndedPart(*part, model_of(part), said(of)) for part, of in self.untold.items()),
            stats=NodeStats(replace(CACHE, evicted=self.evicted)),
        )


def said(counts: Counter[str]) -> LoadCounters:
    return LoadCounters(
        bytes_by_source={source: counts[source] for source in SOURCES},
        chunks_by_source={source: counts[f"{source} chunks"] for source in SOURCES},
        corrupt_chunks=counts["corrupt"],
        retries={"reset": counts["reset"]} if counts["reset"] else {},
        stages=StageTimes(fetch_s=float(counts["fetch"])),
    )


def model_of(part: tuple[str, int]) -> str:
    return f"model-{part[0][-1]}"


class TallyMachine(RuleBasedStateMachine):
    """Agents of two hosts, one of which has two, load, end loads and are killed; their heartbeats get lost, come
    late and twice, and the coordinator is replaced. `counted` is what the coordinator must have: all that an agent
    had counted when it made the last heartbeat that arrived.
    """

    def __init__(self) -> None:
        super().__init__()
        self.agents = [Agent("n0", "a"), Agent("n1", "a"), Agent("n2", "b")]
        self.tally = Tally()
        self.due: defaultdict[tuple[str, str, str], float] = defaultdict(float)  # (host, model, what)
        self.told: dict[tuple[str, str, tuple[str, int], str], int] = {}  # by agent's incarnation and part
        self.known: dict[str, tuple[str, int]] = {}  # node -> incarnation and number of the last heartbeat taken in
        self.former: dict[str, list[str]] = {}
        self.late: list[AgentBeat] = []
        self.seen: dict[object, float] = {}
        self.loads = 0

    @rule(
        agent=st.integers(0, 2),
        what=st.sampled_from([*SOURCES, *(f"{source} chunks" for source in SOURCES), "corrupt", "reset", "fetch"]),
        amount=st.integers(1, 1000),
        data=st.data(),
    )
    def count(self, agent: int, what: str, amount: int, data: st.DataObject) -> None:
        parts = self.agents[agent].parts
        if parts:
            parts[data.draw(st.sampled_from(sorted(parts)))][what] += amount
        self.agents[agent].evicted += 1

    @rule(agents=st.sets(st.integers(0, 2), min_size=1))
    def begin(self, agents: set[int]) -> None:
        self.loads += 1
        for agent in agents:
            self.agents[agent].parts[f"load-{self.loads}", 1] = Counter()

    @rule(agent=st.integers(0, 2))
    def end(self, agent: int) -> None:
        there = self.agents[agent]
        if there.parts:
            part = next(iter(there.parts))
            there.untold[part] = there.parts.pop(part)

    @rule(agent=st.integers(0, 2))
    def restart(self, agent: int) -> None:
        """What it had not told is lost; the loads go on."""
        there = self.agents[agent]
        parts = {part: Counter[str]() for part in there.parts}
        self.agents[agent] = Agent(there.node, there.host, there.incarnation + 1, parts=parts)

    @rule(agent=st.integers(0, 2), fate=st.sampled_from(["arrives", "arrives", "lost", "late", "twice", "unanswered"]))
    def beats(self, agent: int, fate: str) -> None:
        there = self.agents[agent]
        beat = there.beat()
        if fate in ("late", "twice"):
            self.late.append(beat)
        if fate in ("lost", "late"):
            return
        self.heard(beat)
        if fate != "unanswered":
            there.answered = True
            for part in beat.ended:
                there.untold.pop((part.load_id, part.attempt), None)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def late_beat(self, data: st.DataObject) -> None:
        self.heard(self.late.pop(data.draw(st.integers(0, len(self.late) - 1))))

    @rule()
    def new_coordinator(self) -> None:
        self.tally, self.due, self.seen, self.told, self.known, self.former = (
            Tally(),
            defaultdict(float),
            {},
            {},
            {},
            {},
        )

    def heard(self, beat: AgentBeat) -> None:
        self.tally.heard(beat, 0.0)
        known, former = self.known, self.former
        was = known.get(beat.node_id)
        if beat.incarnation in former.get(beat.node_id, [])[-8:]:
            return
        if was is not None and was[0] == beat.incarnation and beat.number <= was[1]:
            return
        if was is not None and was[0] != beat.incarnation:
            former.setdefault(beat.node_id, []).append(was[0])
        counts = was is not None or not beat.answered
        known[beat.node_id] = beat.incarnation, beat.number
        told: tuple[LoadBeat | EndedPart, ...] = (*beat.loads, *beat.ended)
        for load in told:
            part = load.load_id, load.attempt
            for what, value in flat(load.counters).items():
                before = self.told.get((beat.node_id, beat.incarnation, part, what), 0)
                self.told[beat.node_id, beat.incarnation, part, what] = value
                self.due[beat.host, load.model, what] += (value - before) if counts else 0

    @invariant()
    def everything_is_counted_once(self) -> None:
        found = {key: value for key, value in flat_books(self.tally.books()).items() if value}
        assert found == {key: value for key, value in self.due.items() if value}

    @invariant()
    def counters_never_fall(self) -> None:
        totals = self.tally.books().totals
        for key, value in self.seen.items():
            assert totals[key] >= value  # type: ignore[index]
        self.seen = dict(totals)


def flat(counters: LoadCounters) -> dict[str, int]:
    return {
        **dict(counters.bytes_by_source),
        **{f"{source} chunks": count for source, count in counters.chunks_by_source.items()},
        "corrupt": counters.corrupt_chunks,
        "reset": counters.retries.get("reset", 0),
        "fetch": int(counters.stages.fetch_s),
    }


def flat_books(books: Books) -> dict[tuple[str, str, str], float]:
    found = {}
    for (family, labels), value in books.totals.items():
        if family is metrics.CHUNK_BYTES:
            found[labels[0], labels[1], labels[2]] = value
        elif family is metrics.CHUNKS:
            found[labels[0], labels[1], f"{labels[2]} chunks"] = value
        elif family is metrics.CHUNKS_CORRUPT:
            found[labels[0], labels[1], "corrupt"] = value
        elif family is metrics.RETRIES:
            found[labels[0], labels[1], labels[2]] = value
        elif family is metrics.STAGE_SECONDS and labels[2] == "fetch":
            found[labels[0], labels[1], "fetch"] = value
    return found


TestTally = TallyMachine.TestCase


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(SOURCES),
            st.integers(1, 99),
            st.sampled_from(["arrives", "lost", "twice"]),
        )
    ),
    st.randoms(use_true_random=False),
)
def test_totals_are_the_sums_of_the_final_stats(happens: list[tuple[int, str, int, str]], chance: Random) -> None:
    """Whatever was lost or came twice on the way, loads that ended in between included."""
    tally, whole = Tally(), Counter[tuple[str, str, str]]()
    agents = [Agent("n0", "a"), Agent("n1", "a"), Agent("n2", "b")]
    for number, (which, source, size_bytes, fate) in enumerate(happens):
        agent = agents[which]
        part = f"load-{number % 4}", number // 4 + 1
        agent.parts.setdefault(part, Counter())[source] += size_bytes
        whole[agent.host, model_of(part), source] += size_bytes
        if len(agent.parts) > 2:
            ended = chance.choice(sorted(agent.parts))
            agent.untold[ended] = agent.parts.pop(ended)
        beat = agent.beat()
        for _ in range({"arrives": 1, "lost": 0, "twice": 2}[fate]):
            tally.heard(beat, 0.0)
            agent.untold.clear()
    for agent in agents:
        tally.heard(agent.beat(), 0.0)
    totals = {labels: value for (of, labels), value in tally.books().totals.items() if of is metrics.CHUNK_BYTES}
    assert {labels: value for labels, value in totals.items() if value} == dict(whole)


def view(load_id: str, state: LoadState, *, ranks: tuple[RankLife, ...] = (), error: str = "") -> LoadView:
    return LoadView(load_id, "llama", state, ranks, ("a",) * len(ranks), 100, error)


def through(
    tally: Tally, load_id: str, *steps: tuple[float, LoadState], error: str = "", adopted: bool = False
) -> None:
    for at_s, state in steps:
        tally.load(view(load_id, state, error=error if state is LoadState.FAILED else ""), at_s, adopted=adopted)


S = LoadState


def test_how_long_loads_took_by_outcome_and_state() -> None:
    tally = Tally()
    through(tally, "a", (0.0, S.PLANNING), (2.0, S.STARTING), (3.0, S.LOADING), (3.0, S.LOADING), (10.0, S.READY))
    through(tally, "b", (0.0, S.PLANNING), (70.0, S.FAILED), error="AccessDenied")
    through(tally, "c", (0.0, S.PLANNING), (1.0, S.RELEASED))
    through(tally, "a", (20.0, S.DEGRADED), (21.0, S.READY), (30.0, S.FAILED), (31.0, S.PLANNING), error="NodeLost")
    books = tally.books()
    finished = {labels[1]: value for (of, labels), value in books.totals.items() if of is metrics.LOADS_FINISHED}
    assert finished == {"ready": 1, "failed": 1, "cancelled": 1, "lost": 1}
    failures = {labels[1]: value for (of, labels), value in books.totals.items() if of is metrics.LOAD_FAILURES}
    assert failures == {"AccessDenied": 1, "NodeLost": 1}
    sums = {(of.name, *labels): (sum(d.counts), d.sum_s) for (of, labels), d in books.durations.items()}
    assert sums == {
        ("longshore_load_duration_seconds", "llama", "ready"): (1, 10.0),
        ("longshore_load_duration_seconds", "llama", "failed"): (1, 70.0),
        ("longshore_load_duration_seconds", "llama", "cancelled"): (1, 1.0),
        ("longshore_load_state_duration_seconds", "planning"): (3, 73.0),
        ("longshore_load_state_duration_seconds", "starting"): (1, 1.0),
        ("longshore_load_state_duration_seconds", "loading"): (1, 7.0),
        ("longshore_load_state_duration_seconds", "degraded"): (1, 1.0),
    }


def test_a_load_that_an_earlier_coordinator_began_has_no_durations_here() -> None:
    tally = Tally()
    through(tally, "a", (0.0, S.PLANNING), (1.0, S.LOADING), (2.0, S.READY), (9.0, S.FAILED), error="X", adopted=True)
    books = tally.books()
    assert not books.durations
    finished = {labels[1]: value for (of, labels), value in books.totals.items() if of is metrics.LOADS_FINISHED}
    assert finished == {"ready": 0, "failed": 0, "cancelled": 0, "lost": 1}


def test_each_loss_of_a_rank_counts_once() -> None:
    tally = Tally()
    here, gone, new = RankLife(), RankLife(lost=True), RankLife(1, ready=True)
    for ranks in ((here, here), (gone, here), (gone, here), (gone, gone), (new, gone), (new, here), (gone, here)):
        tally.load(view("x", S.LOADING, ranks=ranks), 0.0)
    assert tally.books().totals[metrics.RANKS_LOST, ("llama",)] == 3


def now(tally: Tally, now_s: float) -> dict[tuple[str, ...], float]:
    found = samples(tally.books(), now_s, Coordinator("head", "1.2", 7))
    assert list(found) == FAMILIES
    return {
        (family.name, *sample.labels): sample.value
        for family, those in found.items()
        for sample in those
        if not isinstance(sample.value, Durations)
    }


def test_gauges_are_of_the_last_heartbeats() -> None:
    tally = Tally()
    tally.load(view("x", S.LOADING, ranks=(RankLife(), RankLife(ready=True))), 100.0)
    ranks = (
        RankBeat("x", 1, 0, 0, 11, 30, 0.5, requests=3, allowed_requests=4, own_bytes=1000),
        RankBeat("x", 1, 1, 0, 12, 50, 9.0, done=True, own_bytes=0),
        RankBeat("gone", 1, 1, 0, 12, 50, 9.0),
    )
    memory = NodeMemory(10, 20, 30, 40, 50, (GpuMemory(8, 3), GpuMemory(8)))
    stats = NodeStats(CACHE, DiskStats(100, 60, 3, 5, 2, 1), memory)
    load = LoadBeat("x", 1, 0, None, False, "llama", LoadCounters())
    tally.heard(AgentBeat("n", "a", "i", (load,), ranks, ARENA, number=1, stats=stats), 110.0)
    found = now(tally, 112.0)
    expected = {
        ("longshore_loads", "llama", "loading"): 1,
        ("longshore_load_elapsed_seconds", "llama", "loading"): 12.0,
        ("longshore_load_idle_seconds", "llama", "loading"): 2.0,  # the heartbeat brought bytes
        ("longshore_model_size_bytes", "llama"): 100,
        ("longshore_model_placed_bytes", "llama"): 80,
        ("longshore_ranks", "a", "llama", "loading"): 1,
        ("longshore_ranks", "a", "llama", "ready"): 1,
        ("longshore_rank_placed_bytes", "a", "0", "llama"): 30,
        ("longshore_rank_requests", "a", "0", "llama"): 3,
        ("longshore_rank_allowed_requests", "a", "0", "llama"): 4,
        ("longshore_rank_silent_seconds", "a", "0", "llama"): 2.5,
        ("longshore_heartbeat_age_seconds", "a"): 2.0,
        ("longshore_process_memory_bytes", "a", "rank 0", "llama"): 1000,
        ("longshore_process_memory_bytes", "a", "agent", ""): 50,
        ("longshore_process_memory_bytes", "head", "coordinator", ""): 7,
        ("longshore_cache_bytes", "a", "arena"): 32,
        ("longshore_cache_limit_bytes", "a", "disk"): 100,
        ("longshore_disk_files", "a"): 3,
        ("longshore_slots", "a", "evictable"): 3,
        ("longshore_slots", "a", "in_use"): 1,
        ("longshore_host_memory_free_bytes", "a"): 10,
        ("longshore_shm_total_bytes", "a"): 40,
        ("longshore_gpu_memory_free_bytes", "a", "0"): 3,
        ("longshore_gpu_memory_total_bytes", "a", "1"): 8,
        ("longshore_cache_evictions_total", "a", "disk"): 2,
        ("longshore_disk_chunks_unkept_total", "a"): 1,
        ("longshore_slots_quarantined_total", "a"): 2,
        ("longshore_build_info", "1.2"): 1,
    }
    assert {key: found.get(key) for key in expected} == expected
    for absent in (("longshore_gpu_memory_free_bytes", "a", "1"), ("longshore_rank_silent_seconds", "a", "1", "llama")):
        assert absent not in found


def test_a_node_that_is_gone_takes_its_series_along_and_no_others() -> None:
    tally = Tally()
    for node, host in (("n1", "a"), ("n2", "a"), ("n3", "b")):
        agent = Agent(node, host, parts={("load-1", 1): Counter(disk=10)})
        tally.heard(agent.beat(), 0.0)
    tally.keep({"n2", "n3"}, ())
    total = metrics.CHUNK_BYTES, ("a", "model-1", "disk")
    assert tally.books().totals[total] == 20  # the other agent of the host is there: no counter may fall
    assert ("longshore_cache_bytes", "a", "arena") in now(tally, 0.0)
    tally.keep({"n3"}, ())
    assert {key[1] for key in now(tally, 0.0) if key[0] == "longshore_chunk_bytes_total"} == {"b"}
    assert not [key for key in now(tally, 0.0) if "a" in key[1:]]


def test_series_are_bounded_however_many_models_and_nodes_there_were() -> None:
    """Whoever scrapes waits for them, and the coordinator does little else meanwhile."""
    tally, agents = Tally(), [Agent(f"n{number}", f"host-{number}") for number in range(24)]

    def loaded(number: int, *, again: int = 0) -> None:
        for agent in agents:
            agent.parts = {(f"load-{number}", 1): Counter(disk=5 + again)}
            beat = agent.beat()
            named = replace(beat.loads[0], model=f"m{number}")
            tally.heard(replace(beat, loads=(named,)), 0.0)

    for number in range(MOST_MODELS):
        loaded(number)
    totals = tally.books().totals
    kept = [labels for of, labels in totals if of is metrics.CHUNKS_VERIFIED]
    assert MOST_PAIRS // 2 < len(kept) <= MOST_PAIRS
    assert len({model for _, model in kept}) < MOST_MODELS
    newest = f"m{MOST_MODELS - 1}"
    assert {host for host, model in kept if model == newest} == {agent.host for agent in agents}
    loaded(MOST_MODELS - 1, again=2)
    assert tally.books().totals[metrics.CHUNK_BYTES, ("host-0", newest, "disk")] == 7
    assert totals[metrics.AGENT_RESTARTS, ("host-0",)] == 0
    tally.keep([agents[0].node], [])
    hosts = {labels[0] for of, labels in tally.books().totals if of.labels[:1] == ("node",)}
    assert hosts == {"host-0"}


def test_hits_and_misses_by_tier() -> None:
    tally = Tally()
    counts = Counter({"arena chunks": 5, "disk chunks": 3, "store_via_arena chunks": 2, "store_direct chunks": 1})
    beat = Agent("n", "a", parts={("load-1", 1): counts}).beat()
    tally.heard(replace(beat, stats=NodeStats(CACHE, DiskStats(9, 9, 1, 0, 0, 0))), 0.0)
    found = now(tally, 0.0)
    for tier, hits, misses in (("arena", 5, 6), ("disk", 3, 3)):
        assert found["longshore_cache_hits_total", "a", tier] == hits
        assert found["longshore_cache_misses_total", "a", tier] == misses


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
def test_the_label_of_a_model(uri: str, label: str) -> None:
    assert model_label(uri) == label


@given(st.text())
def test_a_label_is_plain_whatever_the_uri(uri: str) -> None:
    label = model_label(uri)
    assert 0 < len(label) <= 64
    assert label.isascii()
    assert not set(label) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def test_labels_are_bounded() -> None:
    tally = Tally()
    for number in range(MOST_MODELS + 50):
        load = LoadBeat(f"l{number}", 1, 0, None, False, f"m{number}", LoadCounters(verified_chunks=1))
        rank = RankBeat(f"l{number}", 1, 0, 0, 1, 1, 0.0)
        tally.heard(AgentBeat("n", "a", "i", (load,), (rank,), ARENA, number=number + 1), 0.0)
    verified = {labels: v for (of, labels), v in tally.books().totals.items() if of is metrics.CHUNKS_VERIFIED}
    assert len(verified) == MOST_MODELS + 1
    assert verified["a", "other"] == 50
    assert ("longshore_rank_placed_bytes", "a", "0", "other") in now(tally, 0.0)
    labels = BoundedLabels(1)
    assert [labels(value) for value in "aba"] == ["a", "other", "a"]


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


def test_every_metric_keeps_the_conventions() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert family.name.startswith("longshore_")
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
        assert family.help.endswith((".", ")")) or family is metrics.BUILD_INFO
        assert set(family.labels) <= LABELS
        unit = family.name.removesuffix("_total").rpartition("_")[2]
        assert unit not in ("s", "ms", "mb", "byte", "second")
