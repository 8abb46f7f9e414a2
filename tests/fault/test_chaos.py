"""A fixed few of the random loads of `make chaos`, and that its cases and its table are what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.telemetry.stats import NodeReport
from tests.chaos.__main__ import in_order, table
from tests.chaos.bench import bench
from tests.chaos.cases import RANKS_PER_NODE, Case, Strike, make_case, world
from tests.chaos.judge import (
    EXACT,
    GIVEN_UP_ERRORS,
    HUNG,
    REFUSED,
    STAYING_ERRORS,
    in_flight_bytes,
    justifies,
    needed_of_store,
    wasted_bytes,
)
from tests.chaos.run_case import CaseRunner, Outcome
from tests.chaos.saves import FAULTS, make_save_case, run_saves
from tests.support.fault_proxy import Asked, Cut, Delay, Drop, Flip, Refuse, Shorten, Stall

TWO = (2, 1, 1)
PLAIN = Case(seed=0, proof="manifest", layouts=(TWO,), placement="via_arena")
PEERS = replace(PLAIN, layouts=((2, 1, 2),), peers=True)  # four ranks on two nodes
CASES = {
    "two-loads-a-worker-killed-and-one-stopped": replace(
        PLAIN, seed=1, layouts=(TWO, (1, 1, 2)), strikes=(Strike("worker", 0.4), Strike("worker", 0.6, 1, 2.0))
    ),
    "agent-and-worker-killed": replace(PLAIN, seed=2, strikes=(Strike("agent", 0.3), Strike("worker", 0.7, 1))),
    "bits-flipped": replace(PLAIN, seed=3, proof="signed", passing=("flip",), share=0.5),
    "bits-flipped-without-digests": replace(
        PLAIN, seed=4, proof="checksums", layouts=((1, 1, 1),), passing=("flip",), share=0.9
    ),
    "credentials-end": replace(PLAIN, seed=5, renewals=(0.3, 0.6)),
    "client-killed": replace(PLAIN, seed=6, strikes=(Strike("client", 0.5),), client_alone=True),
    "cancelled": replace(PLAIN, seed=7, given_up="cancelled", given_up_at=0.3),
    "node-lost": replace(PLAIN, seed=8, layouts=((2, 2, 1),), strikes=(Strike("node", 0.5),)),
    "wrong-credentials-then-loaded-again": replace(PLAIN, seed=10, refused_at=0.4, loaded_again=True),
    "agents-of-another-version": replace(PLAIN, seed=11, layouts=((2, 2, 1),), other_version=True),
    "host-killed-in-the-smallest-arena": replace(PLAIN, seed=12, arena="smallest", host="killed", host_killed_at=0.3),
    "host-without-its-first-thread": replace(PLAIN, seed=13, host="without its first thread", host_killed_at=0.7),
    "a-serving-agent-killed": replace(PEERS, seed=14, strikes=(Strike("agent", 0.3),)),
    "a-serving-agent-stopped": replace(PEERS, seed=15, strikes=(Strike("agent", 0.3, 1, 3.0),)),
    "nodes-send-other-bytes": replace(PEERS, seed=16, peers_damage=True),
    "a-serving-node-lost": replace(PEERS, seed=17, arena="smallest", strikes=(Strike("node", 0.5),)),
    "disk-damaged": replace(PLAIN, seed=9, disk="damaged", arena="smallest"),
}
SAVES = (30, 9, 21, 28)


@pytest.fixture(scope="module")
def runner() -> Iterator[CaseRunner]:
    with bench() as there:
        yield CaseRunner(there)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_loads_under_faults_are_exact_or_end_justified(runner: CaseRunner, name: str) -> None:
    case = CASES[name]
    outcome = runner.run(case)
    assert outcome.kind in (EXACT, REFUSED), f"{outcome.said}: {outcome.case}"
    for strike in case.strikes:
        assert outcome.struck[strike.name]
    if case.host:
        assert outcome.struck[f"host {case.host}"]
    if name == "a-serving-agent-stopped":
        assert outcome.struck["nodes fed each other"]
    if case.peers_damage:
        assert outcome.struck["nodes sent other bytes"]
    if case.refused_at >= 0:
        assert outcome.struck["wrong credentials"]
    if case.renewals:
        assert outcome.struck["store: credentials ended and were renewed"]
    if name == "bits-flipped-without-digests":
        assert (outcome.kind, outcome.said) == (REFUSED, "IntegrityError")
    elif case.other_version:
        assert (outcome.kind, outcome.said) == (REFUSED, "VersionMismatch")
    elif not case.given_up:
        assert outcome.kind == EXACT


@pytest.mark.slow
@pytest.mark.long
def test_saves_under_faults_are_exact_or_end_justified() -> None:
    """The four cases have each fault, in a folder and in S3."""
    cases = [make_save_case(number) for number in SAVES]
    assert {attempt.fault for case in cases for attempt in case.attempts} == set(FAULTS)
    outcomes = run_saves(cases)
    for outcome in outcomes:
        assert outcome.kind in (EXACT, REFUSED), f"{outcome}"
    assert {name for outcome in outcomes for name in outcome.struck} == {f"save: {name}" for name in FAULTS[:-1]}


@given(st.integers(0, 10**9))
def test_the_same_number_is_the_same_case(number: int) -> None:
    case = make_case(number)
    assert case == make_case(number)
    assert not {"flip", "zeros"} & set(case.passing) or case.proof != "nothing"
    if any(strike.who == "node" for strike in case.strikes):
        assert world(case.layouts[0]) > RANKS_PER_NODE


@given(st.integers(0, 10**9))
def test_only_its_own_faults_justify_an_error(number: int) -> None:
    case = make_case(number)
    errors = {
        error for table in (STAYING_ERRORS, GIVEN_UP_ERRORS) for justified in table.values() for error in justified
    }
    own = set(STAYING_ERRORS[case.staying] if case.staying else ())
    own |= set(GIVEN_UP_ERRORS[case.given_up] if case.given_up else ())
    if not case.published and {"flip", "zeros"} & set(case.passing):
        own.add("IntegrityError")
    assert {error for error in errors if justifies(case, error)} == own
    assert not justifies(case, "RankLost")
    assert justifies(case, "VersionMismatch") == case.other_version
    assert case.strikes or not justifies(case, "ClusterLost")
    assert any(strike.who == "node" for strike in case.strikes) or not justifies(case, "NodeLost")


@given(st.lists(st.integers(0, 10**9)))
def test_cases_with_the_same_settings_come_one_after_another(numbers: list[int]) -> None:
    cases = [make_case(number) for number in numbers]
    ordered = in_order(cases)
    assert Counter(ordered) == Counter(cases)
    settings_of = [(case.own_cluster, case.arena, case.peers) for case in ordered]
    changes = sum(a != b for a, b in pairwise(settings_of))
    assert changes <= max(0, len(set(settings_of)) - 1)


def test_interrupted_reads_justify_no_bytes_fetched_again() -> None:
    """Reads go on where they were; only what was damaged, refused by its head or lost with its process counts."""
    asked = Asked("/bucket/key", 100, 1100, 1, 1)
    free = (Refuse(500), Drop(), Delay(0.1), Cut(10), Stall(10))
    assert wasted_bytes([(asked, fault) for fault in free], 1 << 20) == 0
    assert wasted_bytes([(asked, Flip(1))], 1 << 20) == 1 << 20
    assert wasted_bytes([(asked, Shorten(10)), (asked, Cut(10, reset=True))], 1 << 20) == 2000
    assert in_flight_bytes(PLAIN, {"coordinator killed": 3, "client killed": 1}, 2, 100, 10_000) == 0
    assert in_flight_bytes(PLAIN, {"worker killed": 1}, 2, 100, 10_000) == 200
    assert in_flight_bytes(PLAIN, {"agent killed": 2}, 2, 100, 500) == 1000  # all that its ranks were about to read


def test_nodes_that_feed_each_other_need_each_chunk_once() -> None:
    first, second = (NodeReport(name, name, 100, 1000, 52, 520, 0, 0, 0, 0, peer_bytes=480) for name in "ab")
    out, late = (replace(second, retries={cause: 1}) for cause in ("peer_unavailable", "peer_without_chunk"))
    assert needed_of_store(PEERS, [first, second], 10, 1000) == 1000
    assert needed_of_store(PEERS, [first, late], 10, 1000) == 1010
    assert needed_of_store(PEERS, [first, out], 10, 1000) == 1040
    assert needed_of_store(PEERS, [first, replace(second, direct=True)], 10, 1000) == 1040
    for case in (PLAIN, replace(PEERS, strikes=(Strike("agent", 0.3),))):
        assert needed_of_store(case, [first, second], 10, 1000) == 1040


def test_the_table_counts_a_load_under_each_fault_it_had() -> None:
    case = make_case(100006)
    struck = Counter({"agent killed": 1, "store: 500": 7})
    text = table([Outcome(case, EXACT, "", 1.0, 0, struck), Outcome(case, HUNG, "", 9.0, 0, struck)])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 + 1
    assert all(line.endswith("| 2 | 1 | 0 | 0 | 1 | 0 |") for line in rows[2:])
