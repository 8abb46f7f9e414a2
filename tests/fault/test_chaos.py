"""A fixed few of the random loads of `make chaos`, and that its cases and its table are what they say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.embedded_s3 import EmbeddedS3
from tests.chaos.__main__ import table
from tests.chaos.cases import STAYING, make_case
from tests.chaos.run_case import EXACT, HUNG, REFUSED, Bench, Outcome
from tests.support.ray_clusters import Longshore

# A number, and what is in it.
CASES = {
    "two loads, a worker killed and one stopped": 100006,
    "agent and worker killed": 100000,
    "a worker killed": 100002,
    "bits flipped in half of the reads": 100003,
}


@pytest.fixture(scope="module")
def bench(connected: Longshore, s3_server: EmbeddedS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(connected, s3_server, tmp_path_factory.mktemp("chaos"))
    connected.end_longshore()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_load_under_faults_is_exact_or_rightly_refused_and_leaves_nothing(bench: Bench, name: str) -> None:
    outcome = bench.run(make_case(CASES[name]))
    assert outcome.kind in (EXACT, REFUSED), f"{outcome.said}: {outcome.case}"


@given(st.integers(0, 10**9))
def test_the_same_number_is_the_same_case(number: int) -> None:
    case = make_case(number)
    assert case == make_case(number)
    assert case.fault_names
    assert case.published or not {"flip", "zeros"} & set(case.passing)


@given(st.integers(0, 10**9))
def test_only_its_own_faults_justify_an_error(number: int) -> None:
    case = make_case(number)
    errors = {error for justified in STAYING.values() for error in justified}
    own = set(STAYING[case.staying]) if case.staying else set()
    assert {error for error in errors if case.justifies(error)} == own
    assert not case.justifies("RankLost")
    assert not case.justifies("LoadTimeout")
    assert case.strikes or not case.justifies("ClusterLost")


def test_the_table_counts_a_load_in_the_row_of_each_of_its_faults() -> None:
    case = make_case(100006)
    text = table([Outcome(case, EXACT, "", 1.0, 3, 0), Outcome(case, HUNG, "", 9.0, 3, 0)])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(case.fault_names) + 1
    assert all(line.endswith("| 2 | 1 | 0 | 0 | 1 | 0 |") for line in rows[2:])
