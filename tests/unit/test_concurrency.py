"""Laws of the controller of requests in flight, against simulated stores without a clock or threads."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduling.concurrency import COOL_DOWN_S, FIRST_TRIAL, LEVELS, TRIAL_REQUESTS, RequestLimit, StoreAhead

pytestmark = pytest.mark.slow

CHUNK_BYTES = 8 << 20
MOSTS = st.integers(1, 64)


@dataclass
class Link:
    """A store behind a network.

    Each request gets at most `each` bytes/s, all together `cap`, after `latency_s`. `costs`: what every request above
    one takes off the cap (a busy host). Above `admits` in flight it throttles. `noise`: standard deviation of a
    request's bytes, relative to them.
    """

    each: float
    cap: float
    latency_s: float = 0.0
    costs: float = 0.0
    admits: int = 10**9
    noise: float = 0.0
    seed: int = 0
    now_s: float = 0.0
    finished: int = 0
    throttled: int = 0
    limits: list[int] = field(default_factory=list)  # at each end of a request

    def run(self, control: RequestLimit, requests: int) -> RequestLimit:
        """Keep as many requests in flight as `control` allows until `requests` have succeeded."""
        chance = random.Random(self.seed)
        flying: dict[int, list[float]] = {}  # bytes left, start time
        starting: list[tuple[float, int]] = []  # (when its bytes flow, number)
        waiting: list[float] = []  # when throttled ones try again
        numbers = itertools.count()
        while self.finished < requests:
            while waiting and waiting[0] <= self.now_s:
                heapq.heappop(waiting)
            while len(flying) + len(starting) + len(waiting) < control.limit * control.ranks:
                if len(flying) + len(starting) >= self.admits:
                    self.throttled += 1
                    control.throttled(self.now_s)
                    heapq.heappush(waiting, self.now_s + chance.uniform(0.01, 0.5))
                    continue
                heapq.heappush(starting, (self.now_s + self.latency_s, next(numbers)))
            while starting and starting[0][0] <= self.now_s:
                at_s, number = heapq.heappop(starting)
                flying[number] = [CHUNK_BYTES * max(0.1, chance.gauss(1, self.noise)), at_s - self.latency_s]
            cap = self.cap * max(0.1, 1 - self.costs * (len(flying) - 1))
            rate = min(self.each, cap / max(1, len(flying)))
            events = [*(at_s for at_s, _ in starting[:1]), *waiting[:1]]
            if flying:
                events.append(self.now_s + min(left for left, _ in flying.values()) / rate)
            next_s = min(events)
            elapsed_s, self.now_s = next_s - self.now_s, next_s
            for number in list(flying):
                flying[number][0] -= rate * elapsed_s
                if flying[number][0] <= 1e-3:
                    _, begun_s = flying.pop(number)
                    self.finished += 1
                    control.finished(CHUNK_BYTES, self.now_s - begun_s, self.now_s)
                    self.limits.append(control.limit)
        return control

    def settled(self) -> float:
        """Return the mean limit over the second half."""
        half = self.limits[len(self.limits) // 2 :]
        return sum(half) / len(half)


@settings(max_examples=60, deadline=None)
@given(
    most=st.integers(1, 64), knee=st.integers(1, 40), rate=st.floats(1e6, 1e9), latency=st.just(0.0) | st.floats(0, 0.1)
)
def test_the_limit_settles_near_the_knee(most: int, knee: int, rate: float, latency: float):
    """At the knee more requests bring nothing and fewer bring less; otherwise the limit is at the bound."""
    link = Link(each=rate, cap=rate * knee, latency_s=latency)
    link.run(RequestLimit(most), 3000)
    # While a request waits for its first byte, another one may use the link; how many pay then depends on their order.
    best = min(most, knee * (1 + latency * rate / CHUNK_BYTES))
    assert link.settled() >= 0.6 * best - 1
    if latency * rate < 0.01 * CHUNK_BYTES:
        assert link.settled() <= 1.7 * best + 1


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(1, 8), each=st.integers(1, 12), noise=st.floats(0, 0.2), seed=st.integers(0, 1000))
def test_ranks_that_share_a_link_do_not_outbid_each_other(ranks: int, each: int, noise: float, seed: int):
    link = Link(each=1e8, cap=1e8 * ranks * each, noise=noise, seed=seed)
    control = RequestLimit(64)
    control.ranks = ranks
    link.run(control, 3000 * ranks)
    assert 0.5 * each <= link.settled() <= 2.5 * each + 1


@settings(max_examples=40, deadline=None)
@given(knee=st.sampled_from([2, 4, 8, 12]), noise=st.floats(0.02, 0.3), seed=st.integers(0, 1000))
def test_noise_drives_the_limit_neither_to_the_bound_nor_to_1(knee: int, noise: float, seed: int):
    link = Link(each=1e8, cap=1e8 * knee, noise=noise, seed=seed)
    link.run(RequestLimit(64), 6000)
    assert 0.5 * knee <= link.settled() <= 3 * knee + 1


@settings(max_examples=40, deadline=None)
@given(best=st.integers(1, 3), costs=st.floats(0.05, 0.2), noise=st.floats(0, 0.1), seed=st.integers(0, 1000))
def test_the_limit_stays_low_if_requests_cost_throughput(best: int, costs: float, noise: float, seed: int):
    """Each further request takes processor time of a host that has none to spare."""
    link = Link(each=1e9, cap=best * 1e9, costs=costs, noise=noise, seed=seed)
    link.run(RequestLimit(16), 1000)
    assert link.settled() <= best + 2


@settings(max_examples=40, deadline=None)
@given(admits=st.integers(1, 24), noise=st.floats(0, 0.2), seed=st.integers(0, 1000))
def test_a_store_that_throttles_above_n_gets_about_n_requests(admits: int, noise: float, seed: int):
    link = Link(each=1e8, cap=1e11, admits=admits, noise=noise, seed=seed)
    link.run(RequestLimit(64), 1500)
    assert link.settled() >= 0.5 * admits
    assert link.settled() <= 1.2 * admits
    assert link.throttled <= 0.1 * link.finished


@pytest.mark.parametrize("admits", [1, 2, 5, 11, 30])
def test_few_requests_are_throttled_in_the_long_run(admits: int):
    link = Link(each=1e8, cap=1e11, admits=admits, noise=0.1)
    control = link.run(RequestLimit(64), 1000)
    begun = link.throttled
    link.run(control, 5000)
    assert link.throttled - begun <= 0.01 * 4000


@given(most=MOSTS, burst=st.integers(1, 100))
def test_one_burst_of_throttling_halves_the_limit_once(most: int, burst: int):
    control = RequestLimit(most, start=most)
    for number in range(burst):
        control.throttled(10.0 + number * COOL_DOWN_S / 101)
    level = max([n for n in (*LEVELS, most) if n <= max(1, most // 2)])
    assert control.limit == level
    assert control.throttles == burst


@given(
    most=MOSTS,
    start=MOSTS,
    events=st.lists(
        st.tuples(st.booleans(), st.integers(0, 1 << 30), st.floats(0, 1e6), st.floats(0, 1e6)), max_size=300
    ),
)
def test_the_limit_always_stays_in_its_bounds(most: int, start: int, events: list[tuple[bool, int, float, float]]):
    control, now_s = RequestLimit(most, start), 0.0
    for throttled, size_bytes, request_s, passed_s in events:
        now_s += passed_s
        if throttled:
            control.throttled(now_s)
        else:
            control.finished(size_bytes, request_s, now_s)
        assert 1 <= control.limit <= control.peak <= most


@pytest.mark.parametrize("most", [1, 2, 3, 5, 16, 64])
def test_idle_requests_do_not_move_the_limit(most: int):
    """Leases are short, so throughput falls and rises for reasons unrelated to the limit."""
    control = RequestLimit(most)
    before, now_s = control.limit, 0.0
    for number in range(2000):
        now_s += (passed_s := 0.01 * (1 + number % 7))
        control.finished(CHUNK_BYTES, 0.5 * before * passed_s, now_s)
    assert control.limit == before


def test_the_limit_follows_a_change_of_the_network():
    link = Link(each=1e8, cap=16e8)
    control = link.run(RequestLimit(64), 1000)
    assert link.settled() >= 10
    link.cap = 2e8
    link.limits.clear()
    link.run(control, 3000)
    assert link.settled() <= 5
    link.cap = 16e8
    link.limits.clear()
    link.run(control, 9000)
    assert link.settled() >= 10


@pytest.mark.parametrize("shared", [False, True], ids=["a limit of each connection", "a link that all share"])
def test_the_store_is_read_further_ahead_if_each_request_stays_as_fast(*, shared: bool):
    ahead, allowed = StoreAhead(), []
    for _ in range(5000):
        took_s = 0.1 * (3 if ahead.allowed and shared else 1)
        ahead.note([(1 << 20, took_s, 0.0)])
        allowed.append(ahead.allowed)
    assert not any(allowed[: FIRST_TRIAL - 1])
    assert allowed[FIRST_TRIAL - 1]
    if shared:
        assert sum(allowed) < 4 * TRIAL_REQUESTS  # it is tried less and less often
        assert not allowed[-1]
    else:
        assert all(allowed[FIRST_TRIAL:])


def test_reading_ahead_ends_when_the_link_becomes_full():
    ahead = StoreAhead()
    ahead.note([(1 << 20, 0.1, 0.0)] * (FIRST_TRIAL + 3 * TRIAL_REQUESTS))
    assert ahead.allowed
    ahead.note([(1 << 20, 0.5, 0.0)] * 3 * TRIAL_REQUESTS)
    assert not ahead.allowed
