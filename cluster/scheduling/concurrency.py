"""Requests in flight: the limit of each rank, and duplicate requests for slow chunks. Pure; time is passed in.

`RequestLimit` finds how many requests each rank of a node keeps in flight, from throughput and throttling.

    levels     1 2 3 4 6 8 12 16 ...            each at least a quarter above the one below
    measure    a window of requests at one level -> bytes/s; a mean per level that forgets slowly
    choose     the lowest level whose throughput equals the best one's within the noise
    explore    the level above it, then the one below, if unmeasured; the neighbours again later, less and less often
    throttled  half, once per burst; levels from the throttled one up are barred for a while that doubles each time

Levels lie far apart, so that one step below the best level costs more throughput than the noise of a window. A window
counts only if the requests really were in flight. When leases are short, throughput says nothing about the limit.

All ranks of a load on a node share one limit, measured by their common throughput. A rank that searched alone would
always find that more requests bring more bytes, because it takes them from the other ranks on the same link.

`Hedges` decides when a chunk is requested a second time, because its fetch is far slower than others.

    begun, ended   every fetch of a load on its node; the fetches that succeeded give the median duration
    due            the oldest fetch, once it has taken `factor` times the median, and at least `after_s`

The second fetch has a slot of its own. Whichever fetch succeeds first ends the other. A chunk is hedged once, because a
third request does not help when the store stays slow. Deadlines and budgets (`cluster.scheduling.retry`) still apply.

`PeerPatience` decides how long a rank waits for a chunk that another node is about to read from the store. `SlowStore`
tells a node that the store is slow for it alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable
from statistics import median

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
START = 3
MARGIN = 0.05  # smaller relative differences in throughput always count as noise
MOST_MARGIN = 0.2  # larger relative differences never count as noise
WINDOW_REQUESTS = 6
WINDOW_S = 0.03
FULL = 0.75  # a window counts if at least this fraction of the allowed requests was in flight
MEMORY = 4  # windows that a level's mean covers
CHANGED = 0.5  # a window below this fraction of its level's mean, or above the inverse, makes the measurements outdated
FULL_GAIN = 0.7  # if a step brings this fraction of the ideal gain, the next step is a doubling
REST_WINDOWS = 8  # windows before neighbours are measured again; doubles up to MOST_REST_WINDOWS
MOST_REST_WINDOWS = 64
TRIAL_REQUESTS = 8  # of `StoreAhead`: with which it decides
FIRST_TRIAL = 32  # requests before it; 8 times as many before the next one, each time that nothing was won
MOST_TRIAL_REST = 4096
SAME_RATE = 0.7  # a request that keeps this part of its rate does not share a link with more of them
NEWEST_SHARE = 0.25  # of the newest request in a mean
COOL_DOWN_S = 1.0  # throttled answers within this time of a halving belong to the same burst
BAR_S = 5.0  # a throttled level is not tried again for this time; doubles up to MOST_BAR_S
MOST_BAR_S = 120.0


class RequestLimit:
    """The number of requests of each rank, between 1 and `most`. Not thread-safe; the caller holds a lock."""

    def __init__(self, most: int, start: int = START) -> None:
        self.ranks = 1  # ranks that share the limit now; may be set at any time
        self._levels = [level for level in LEVELS if level < most] + [most]
        self._at = self._floor(start)
        self.peak = self.limit
        self.throttles = 0
        # Measurements, by index of level.
        self._rates: dict[int, float] = {}  # mean bytes/s
        self._windows: dict[int, int] = {}  # how many windows are in that mean
        self._noise = MARGIN  # relative scatter of the windows of one level
        # The current window.
        self._unsettled = self._together  # requests that still belong to the level before
        self._begun_s = 0.0
        self._count = self._bytes = 0
        self._request_s = 0.0
        # The search.
        self._came_from = self._at
        self._rest = self._rest_after = REST_WINDOWS
        self._look_up = True
        self._cool_until_s = self._barred_until_s = float("-inf")
        self._barred: int | None = None  # the level that was throttled
        self._bar_s = BAR_S

    @property
    def limit(self) -> int:
        """Return how many requests each rank may have in flight now."""
        return self._levels[self._at]

    @property
    def _together(self) -> int:
        return self.limit * max(1, self.ranks)

    def finished(self, size_bytes: int, request_s: float, now_s: float) -> None:
        """Record a request that took `request_s` and brought `size_bytes`."""
        if self._unsettled > 0:
            self._unsettled -= 1
            self._begun_s = now_s
            return
        self._count += 1
        self._bytes += size_bytes
        self._request_s += request_s
        # Count whole rounds, because requests that share a link end together in bursts.
        if self._count % self._together or self._count < max(WINDOW_REQUESTS, 2 * self._together):
            return
        elapsed_s = now_s - self._begun_s
        if elapsed_s < WINDOW_S:
            return
        rate, full = self._bytes / elapsed_s, self._request_s >= FULL * self._together * elapsed_s
        self._begin_window(0, now_s)
        if full:
            self._measured(rate)
            self._go(self._choice(now_s), now_s)

    def note(self, requests: Iterable[tuple[int, float, float]], throttled: int, now_s: float) -> None:
        """Record the requests and throttled answers of a rank's report (see RankUpdate)."""
        for size_bytes, took_s, ago_s in requests:
            self.finished(size_bytes, took_s, now_s - ago_s)
        if throttled > 0:
            self.throttled(now_s, throttled)

    def throttled(self, now_s: float, times: int = 1) -> None:
        """Record that the store asked for fewer requests, in one burst of so many answers."""
        self.throttles += times
        self._begin_window(self._together, now_s)  # a window with a throttled answer measures nothing
        if now_s < self._cool_until_s:
            return
        self._cool_until_s = now_s + COOL_DOWN_S
        self._bar_s = min(2 * self._bar_s, MOST_BAR_S) if self._barred == self._at else BAR_S
        self._barred, self._barred_until_s = self._at, now_s + self._bar_s
        for index in [index for index in self._rates if index >= self._at]:
            del self._rates[index]
        self._go(self._floor(self.limit // 2), now_s)

    # -- inside --------------------------------------------------------------------------------------------------

    def _measured(self, rate: float) -> None:
        at, known = self._at, self._rates.get(self._at)
        if known is None:
            self._rates[at], self._windows[at] = rate, 1
        elif CHANGED < rate / known < 1 / CHANGED:
            self._noise += (abs(rate / known - 1) - self._noise) / MEMORY
            self._windows[at] = min(self._windows[at] + 1, MEMORY)
            self._rates[at] = known + (rate - known) / self._windows[at]
        else:
            self._rates, self._windows = {at: rate}, {at: 1}
            self._rest = self._rest_after = REST_WINDOWS

    def _choice(self, now_s: float) -> int:
        """Return the level for the next window."""
        rates, top = self._rates, self._top(now_s)
        enough = max(rates.values()) * (1 - min(max(self._noise, MARGIN), MOST_MARGIN))
        good = min(index for index, rate in rates.items() if rate >= enough)
        good = min(good, top)
        up, down = min(good + 1, top), max(good - 1, 0)
        if up not in rates:
            return min(self._floor(2 * self._levels[good]), top) if self._paid_in_full(good) else up
        if down not in rates:
            return down
        if self._at != good:
            return good
        self._rest -= 1
        if self._rest > 0:
            return good
        self._rest = self._rest_after = min(2 * self._rest_after, MOST_REST_WINDOWS)
        self._look_up = not self._look_up
        return down if self._look_up else up

    def _top(self, now_s: float) -> int:
        """Return the highest level that may be tried."""
        if now_s < self._cool_until_s:
            return self._at
        if self._barred is not None and now_s < self._barred_until_s:
            return max(self._barred - 1, 0)
        return len(self._levels) - 1

    def _paid_in_full(self, index: int) -> bool:
        """Return whether the step to this level raised throughput nearly in proportion to the requests."""
        before = self._came_from
        if before >= index or before not in self._rates or self._barred is not None:
            return False
        more = self._levels[index] / self._levels[before] - 1
        return self._rates[index] / self._rates[before] - 1 >= FULL_GAIN * more

    def _floor(self, requests: int) -> int:
        """Return the index of the highest level with at most `requests`, or else of the lowest level."""
        return max((index for index, level in enumerate(self._levels) if level <= requests), default=0)

    def _go(self, index: int, now_s: float) -> None:
        if index == self._at:
            return
        before, self._came_from, self._at = self._together, self._at, index
        self.peak = max(self.peak, self.limit)
        self._begin_window(max(before, self._together), now_s)

    def _begin_window(self, unsettled: int, now_s: float) -> None:
        self._unsettled, self._begun_s = unsettled, now_s
        self._count = self._bytes = 0
        self._request_s = 0.0


RECENT = 64  # successful fetches that the median is taken from
ENOUGH = 4  # with fewer fetches there is no median


class StoreAhead:
    """Finds out whether nodes that feed each other should read the store further ahead than they ask each other.

    If each request to the store is as fast with more of them, then more bring more: the store limits each connection.
    If they become slower, they share a link, and the first chunks, which all nodes wait for, come late. So it is tried.
    """

    def __init__(self) -> None:
        self.allowed = False
        self._rates = {False: 0.0, True: 0.0}  # bytes/s of one request without and with it; 0.0: not measured
        self._left = self._rest = FIRST_TRIAL  # requests until the next decision

    def note(self, requests: Iterable[tuple[int, float, float]]) -> None:
        """Record requests that a rank reports (see RankUpdate)."""
        for size_bytes, took_s, _ in requests:
            self._left -= 1
            if self.allowed and self._left >= TRIAL_REQUESTS // 2:
                continue  # it began before
            rate, before = size_bytes / max(took_s, 1e-6), self._rates[self.allowed]
            self._rates[self.allowed] = rate if not before else before + NEWEST_SHARE * (rate - before)
            if self._left <= 0:
                self._decide()

    def _decide(self) -> None:
        slower = self._rates[True] < SAME_RATE * self._rates[False]
        if self.allowed and slower:
            self.allowed, self._rest = False, min(8 * self._rest, MOST_TRIAL_REST)
        elif not self.allowed:
            self.allowed, self._rates[True] = True, 0.0
        self._left = TRIAL_REQUESTS if self.allowed else self._rest


PATIENT_FOR = 4  # times that a chunk takes
LEAST_PATIENCE_S = 20.0  # many chunks may share a slow link, and a process may get no processor for a while
SLOW_FOR = 3  # times that the store takes elsewhere: the home says that it is slow before the others lose patience
LEAST_SLOW_S = 15.0
KNOWN_S = 600.0  # a store that was slow for a node may have recovered after this
MOST_ASKED = 1024  # chunks that are remembered with the nodes that were asked for them


class StoreTimes:
    """Seconds that chunks take from the store. Time is passed in."""

    def __init__(self) -> None:
        self._took: deque[tuple[float, float]] = deque(maxlen=RECENT)  # (when it ended, seconds)
        self._running: dict[str, float] = {}  # lease -> when it began

    def begun(self, lease_id: str, now_s: float) -> None:
        """Record that a chunk is read from the store now."""
        self._running.setdefault(lease_id, now_s)

    def ended(self, lease_id: str, now_s: float, *, came: bool) -> bool:
        """Record the end of a lease. Return whether it read the store. `came`: it has brought its chunk."""
        begun_s = self._running.pop(lease_id, None)
        # A slow read that was ended would have taken longer still.
        if begun_s is not None and (came or now_s - begun_s > LEAST_SLOW_S):
            self._took.append((now_s, now_s - begun_s))
        return begun_s is not None

    def usual_s(self, now_s: float, *, needs_one: bool = False) -> float | None:
        """Return the median of the last reads, or of the ages of those under way if that is more. None: none is known.

        `needs_one`: None unless one has ended.
        """
        took_s = [took_s for ended_s, took_s in self._took if now_s - ended_s < KNOWN_S]
        ages_s = [now_s - begun_s for begun_s in self._running.values()]
        if needs_one and not took_s:
            return None
        return max((median(times_s) for times_s in (took_s, ages_s) if times_s), default=None)


class SlowStore:
    """Tells a node whether the store is slow for it, and not for the nodes that ask it for chunks.

    Then other nodes read its chunks in its place: it *hands them over*. All know the order in which they do.
    """

    def __init__(self) -> None:
        self._own_s: dict[int, float] = {}  # rank -> seconds that it needs for a chunk from the store
        self._slow_s: dict[str, float] = {}  # node -> seconds from which on the store is slow, in its eyes

    def reported(self, rank: int, store_s: float | None) -> None:
        """Record the time that chunks from the store take a rank of this node. None: it is not known."""
        if store_s is None:
            self._own_s.pop(rank, None)
        else:
            self._own_s[rank] = store_s

    def heard(self, node_id: str, slow_store_s: float | None) -> None:
        """Record what another node calls slow (see `PeerPatience.slow_store_s`). None: it does not say."""
        if slow_store_s is None:
            self._slow_s.pop(node_id, None)
        else:
            self._slow_s[node_id] = slow_store_s

    @property
    def own_s(self) -> float:
        """Seconds that a chunk from the store takes here. 0.0: it is not known."""
        return min(self._own_s.values(), default=0.0)

    @property
    def is_slow(self) -> bool:
        """True when another node gets chunks from the store far faster than every rank of this one."""
        return self.own_s > min(self._slow_s.values(), default=math.inf)


class PeerPatience:
    """The patience of one rank with nodes that get chunks from the store. Not thread-safe; the caller holds a lock.

    It waits PATIENT_FOR times as long as chunks take, its own or those of others, and LEAST_PATIENCE_S at least. So
    where the store is slow for all nodes, they wait for each other, and no chunk is read twice. It waits twice as long
    for a node that waits for a third one: that node's patience has to end before.
    """

    def __init__(self) -> None:
        self._store = StoreTimes()
        self._took_s: deque[float] = deque(maxlen=RECENT)  # of chunks that other nodes sent
        self._asked: dict[int, dict[Hashable, float]] = {}  # chunk -> nodes that were asked for it, and when first

    def reads_store(self, lease_id: str, now_s: float) -> None:
        """Record that a chunk is read from the store now."""
        self._store.begun(lease_id, now_s)

    def ended(self, lease_id: str, chunk: int, now_s: float, *, came: bool, peer: Hashable = None) -> None:
        """Record the end of a lease.

        Args:
            came: It has brought its chunk.
            peer: The node that sent it. None: no node did.
        """
        self._store.ended(lease_id, now_s, came=came)
        asked = self._asked.pop(chunk, {}) if came else {}
        if peer in asked:
            self._took_s.append(now_s - asked[peer])

    def asked(self, chunk: int, peer: Hashable, now_s: float) -> None:
        """Record that another node is asked for the chunk."""
        self._asked.setdefault(chunk, {}).setdefault(peer, now_s)
        if len(self._asked) > MOST_ASKED:  # other ranks have brought the chunks of the oldest
            del self._asked[next(iter(self._asked))]

    def waits_on(self, chunk: int, peer: Hashable, cause: str, now_s: float) -> bool:
        """Return whether to ask again a node that does not have the chunk yet.

        Args:
            cause: "peer_late" if it reads the store, "peer_waits" if it waits for a third node.
        """
        asked_s = self._asked.get(chunk, {}).get(peer)
        if cause not in ("peer_late", "peer_waits") or asked_s is None:
            return False
        usual_s = self._usual_s(now_s)
        patience_s = max(LEAST_PATIENCE_S, PATIENT_FOR * (usual_s or 0.0))
        return usual_s is None or now_s - asked_s < (patience_s if cause == "peer_late" else 2 * patience_s)

    def store_s(self, now_s: float) -> float | None:
        """Return the time that a chunk from the store takes this rank. None: it is not known."""
        return self._store.usual_s(now_s)

    def slow_store_s(self, now_s: float) -> float | None:
        """Return how long a chunk takes from a store that is far slower than this rank's. None: it is not known."""
        usual_s = self._store.usual_s(now_s, needs_one=True)
        return None if usual_s is None else max(LEAST_SLOW_S, SLOW_FOR * usual_s)

    def _usual_s(self, now_s: float) -> float | None:
        """Return the time that a chunk takes. None: nothing has come, so nobody is known to be faster."""
        store_s, took_s = self._store.usual_s(now_s), self._took_s
        return max(store_s or 0.0, median(took_s)) if took_s else store_s


class Hedges:
    """The fetches of one load on one node, by lease id. With `factor` 0 no chunk is ever due."""

    def __init__(self, factor: float, after_s: float) -> None:
        self.count = 0  # chunks that were fetched a second time
        self.won = 0  # how often the second fetch succeeded first
        self._factor = factor
        self._after_s = after_s
        self._running: dict[str, tuple[int, float]] = {}  # lease -> (chunk, begin); the oldest first
        self._hedged: set[int] = set()  # chunks
        self._seconds: set[str] = set()  # leases that are second fetches
        self._took_s: deque[float] = deque(maxlen=RECENT)

    def begun(self, lease_id: str, chunk: int, now_s: float, *, second: bool = False) -> None:
        """Record the begin of a fetch. `second` means that another fetch of the same chunk is running."""
        if second:
            self._hedged.add(chunk)
            self._seconds.add(lease_id)
            self.count += 1
        self._running[lease_id] = chunk, now_s

    def ended(self, lease_id: str, now_s: float, *, brought: bool = False) -> None:
        """Record the end of a fetch. `brought` means that it put the chunk into the arena. Ignore unknown leases."""
        chunk, since_s = self._running.pop(lease_id, (None, 0.0))
        second = lease_id in self._seconds
        self._seconds.discard(lease_id)
        if chunk is not None and brought:
            self._took_s.append(now_s - since_s)
            self.won += second

    def hedged(self, chunk: int) -> bool:
        """Return whether the chunk was ever requested a second time."""
        return chunk in self._hedged

    def due(self, now_s: float) -> int | None:
        """Return the chunk to fetch a second time now, if any."""
        if not self._factor or len(self._took_s) < ENOUGH:
            return None
        for chunk, since_s in self._running.values():
            if chunk not in self._hedged:
                # This fetch is the oldest, so no other one is due if it is not.
                return chunk if now_s - since_s >= max(self._after_s, self._factor * median(self._took_s)) else None
        return None
