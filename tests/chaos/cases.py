"""One random load under random faults, from a number: the same number gives the same case. Pure.

Bytes are damaged and connections broken by `faults`, processes struck when so many bytes of weights have passed. A
case says itself which errors its faults justify: any other outcome than exact bytes is a defect.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# Faults of the store that are over when the same bytes are asked for again.
PASSING = (
    *("500", "503", "429", "drop", "drop-reset", "delay", "cut", "reset", "stall", "trickle", "throttle"),
    *("shorten", "wrong-range"),
)
DAMAGING = ("flip", "zeros")  # found by digests, so only where there are any
# Faults of the store that stay, with the errors that may end a load for them.
STAYING = {
    "refuses one chunk": ("ChunkFailed StoreUnavailable",),
    "throttles one chunk": ("ChunkFailed Throttled",),
    "denies from now on": ("ChunkFailed AccessDenied",),
    "has lost one chunk": ("ChunkFailed ObjectNotFound",),
    "damages one chunk": ("IntegrityError",),
    "stalls one chunk": ("ChunkFailed StoreUnavailable", "ChunkFailed lease_expired"),
    "replaced the object": ("ChunkFailed ObjectChanged", "IntegrityError", "ObjectChanged"),
}
LAYOUTS = ((1, 1, 1), (2, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1))  # tensor parallel, fully sharded, copies
PLACEMENTS = ("auto", "via_arena", "via_arena", "direct")


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal to a process of Longshore."""

    who: str  # "worker", "agent", "coordinator"
    at: float  # part of the model's bytes that has left the store; below 0: so many seconds after the call, negated
    victim: int  # which of them, modulo how many there are
    stopped_s: float = 0.0  # 0: SIGKILL; else SIGSTOP, and SIGCONT after so long

    @property
    def name(self) -> str:
        return f"{self.who} {'stopped' if self.stopped_s else 'killed'}"

    def __str__(self) -> str:
        when = f"{-self.at:.1f} s after the call" if self.at < 0 else f"at {self.at:.0%}"
        return f"{self.name}{f' for {self.stopped_s:.1f} s' if self.stopped_s else ''} {when}"


@dataclass(frozen=True, slots=True)
class Case:
    """One or two loads of one model, and what befalls them."""

    seed: int
    published: bool  # with a manifest, so with digests
    layouts: tuple[tuple[int, int, int], ...]  # of the loads, which begin together
    placement: str
    passing: tuple[str, ...]  # kinds of `tests.support.faults.TRANSIENT`
    share: float  # of reads that meet one of them
    staying: str  # "" or one of STAYING
    staying_at: float  # where in the load, or in the object, it strikes
    strikes: tuple[Strike, ...]

    @property
    def fault_names(self) -> tuple[str, ...]:
        """Rows of the table that this case counts in."""
        store = [f"store: {kind}" for kind in self.passing]
        staying = [f"store {self.staying}"] if self.staying else []
        return (*store, *staying, *sorted({strike.name for strike in self.strikes})) or ("none",)

    def __str__(self) -> str:
        loads = " and ".join("x".join(map(str, layout)) for layout in self.layouts)
        store = [f"{self.share:.0%} of reads {'/'.join(self.passing)}"] if self.passing else []
        staying = [f"store {self.staying} ({self.staying_at:.0%})"] if self.staying else []
        digests = "" if self.published else " without digests"
        what = "; ".join([*store, *staying, *map(str, self.strikes)]) or "no fault"
        return f"{loads} {self.placement}{digests}: {what}"

    def justifies(self, error: str) -> bool:
        """Whether this error (its class, and its cause when it has one) may end a load under these faults."""
        if self.staying and error in STAYING[self.staying]:
            return True
        killed = {strike.who for strike in self.strikes if not strike.stopped_s}
        early = any(strike.who == "coordinator" and strike.at < 0 for strike in self.strikes)
        # Who knows of a load: the coordinator alone until agents were told, then the agents too.
        return error == "ClusterLost" and (early or {"coordinator", "agent"} <= killed)


def make_case(seed: int) -> Case:
    """The case of a number."""
    rng = random.Random(seed)
    published = rng.random() < 0.85
    passing: tuple[str, ...] = ()
    if rng.random() < 0.65:
        kinds = PASSING + (DAMAGING if published else ())
        passing = tuple(sorted(rng.sample(kinds, rng.randint(1, 3))))
    staying = ""
    if rng.random() < 0.2:
        staying = rng.choice(sorted(STAYING if published else set(STAYING) - {"damages one chunk"}))
    strikes = tuple(_make_strike(rng) for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))))
    layouts = tuple(rng.choice(LAYOUTS) for _ in range(rng.choice((1, 1, 1, 2))))
    return Case(
        seed=seed,
        published=published,
        layouts=layouts,
        placement=rng.choice(PLACEMENTS),
        passing=passing,
        share=rng.uniform(0.1, 0.5),
        staying=staying,
        staying_at=rng.random(),
        strikes=strikes,
    )


def _make_strike(rng: random.Random) -> Strike:
    who = rng.choice(("worker", "worker", "agent", "coordinator"))
    at = rng.random() if rng.random() < 0.8 else -rng.uniform(0.0, 2.0)
    stopped_s = 0.0
    if rng.random() < 0.4:
        # A worker longer than it may be silent, too; the others only as a busy host would stop them.
        stopped_s = rng.uniform(0.3, 12.0 if who == "worker" else 3.0)
    return Strike(who, at, rng.randrange(8), stopped_s)
