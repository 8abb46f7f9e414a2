"""One random load under random faults, from a number: the same number gives the same case. Pure.

Bytes are damaged and connections broken by `faults`, processes and nodes struck when so many bytes of weights have
passed. `tests.chaos.judge` says which errors the faults of a case justify.
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
# Faults of the store that stay.
STAYING = (
    "refuses one chunk",
    "throttles one chunk",
    "denies from now on",
    "has lost one chunk",
    "damages one chunk",
    "stalls one chunk",
    "replaced the object",
    "changed the manifest",
)
LAYOUTS = ((1, 1, 1), (2, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1))  # tensor parallel, fully sharded, copies
WIDE_LAYOUTS = ((2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2))  # more than a node has room for
HOSTS = ("killed", "without its first thread")  # the second goes on in another, and is killed too
RANKS_PER_NODE = 3
BUCKET = "chaos"
PLACEMENTS = ("auto", "via_arena", "via_arena", "direct")
# What READY says of the bytes: digests of a manifest, of a signed one, the store's own checksums, nothing.
PROOFS = ("manifest",) * 5 + ("signed",) + ("checksums",) * 2 + ("nothing",)


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal to a process of Longshore, or the end of a node with all that is on it."""

    who: str  # "worker", "agent", "coordinator", "node", "client" (a process beside this one, that loads the same)
    at: float  # part of the model's bytes that has left the store; below 0: so many seconds after the call, negated
    victim: int = 0  # which of them, modulo how many there are
    stopped_s: float = 0.0  # 0: SIGKILL; else SIGSTOP, and SIGCONT after so long

    @property
    def name(self) -> str:
        if self.who == "node":
            return "node lost"
        return f"{self.who} {'stopped' if self.stopped_s else 'killed'}"

    def __str__(self) -> str:
        when = f"{-self.at:.1f} s after the call" if self.at < 0 else f"at {self.at:.0%}"
        return f"{self.name}{f' for {self.stopped_s:.1f} s' if self.stopped_s else ''} {when}"


@dataclass(frozen=True, slots=True)
class Case:
    """One or two loads of one model, and what befalls them."""

    seed: int
    proof: str  # one of PROOFS
    layouts: tuple[tuple[int, int, int], ...]  # of the loads, which begin together
    placement: str
    passing: tuple[str, ...] = ()  # kinds of `tests.support.fault_proxy.TRANSIENT`
    share: float = 0.0  # of reads that meet one of them
    staying: str = ""  # or one of STAYING
    staying_at: float = 0.0  # where in the load, or in the object, it strikes
    strikes: tuple[Strike, ...] = ()
    replaced: bool = True  # another node comes for one that is lost
    given_up: str = ""  # how the caller of the first load ends it early: "cancelled", "timed out", "released"
    given_up_at: float = 0.0  # as `Strike.at`; seconds for "timed out"
    client_alone: bool = False  # the loads begin when the client that is killed is dead, not beside it
    renewals: tuple[float, ...] = ()  # credentials are those of the nodes, and end at these parts of the bytes
    arena: str = "large"  # "smallest": just the slots without which a load cannot begin
    disk: str = ""  # state of the disk tier at the start: "kept" chunks of an earlier cluster, "damaged" ones, "full"
    refused_at: float = -1.0  # as `Strike.at`: another call asks for the same with wrong credentials; below 0: none
    loaded_again: bool = False  # while it is being released
    other_version: bool = False  # the agents of all nodes but the head's run another Longshore
    peers: bool = False  # nodes feed each other
    peers_damage: bool = False  # and all nodes but the head's damage what they send

    host: str = ""  # one of HOSTS: a process beside the loads hosts their first rank for itself
    host_killed_at: float = 0.0  # as `Strike.at`

    @property
    def uri(self) -> str:
        return f"s3://{BUCKET}/{self.seed}"

    @property
    def published(self) -> bool:
        return self.proof in ("manifest", "signed")

    @property
    def ranks(self) -> int:
        return sum(world(layout) for layout in self.layouts)

    @property
    def own_cluster(self) -> bool:
        """Return whether the case needs agents and arenas that no other case uses."""
        return bool(self.disk) or self.other_version or self.peers_damage

    def __str__(self) -> str:
        loads = " and ".join("x".join(map(str, layout)) for layout in self.layouts)
        store = [f"{self.share:.0%} of reads {'/'.join(self.passing)}"] if self.passing else []
        store += [f"store {self.staying} ({self.staying_at:.0%})"] if self.staying else []
        store += [f"credentials end at {' and '.join(f'{at:.0%}' for at in self.renewals)}"] if self.renewals else []
        store += [f"disk tier {self.disk}"] if self.disk else []
        strikes = [str(strike) for strike in self.strikes]
        if any(strike.who == "client" for strike in self.strikes):
            strikes.append("loaded after it" if self.client_alone else "loaded beside it")
        if any(strike.who == "node" for strike in self.strikes) and not self.replaced:
            strikes.append("no other node comes")
        if self.given_up:
            when = f"after {self.given_up_at:.1f} s" if self.given_up == "timed out" else f"at {self.given_up_at:.0%}"
            strikes.append(f"{self.given_up} {when}")
        strikes += [f"asked for with wrong credentials at {self.refused_at:.0%}"] if self.refused_at >= 0 else []
        strikes += ["loaded again during its release"] if self.loaded_again else []
        strikes += ["agents of another version"] if self.other_version else []
        strikes += [f"a host {self.host}, killed at {self.host_killed_at:.0%}"] if self.host else []
        strikes += ["nodes send other bytes to each other"] if self.peers_damage else []
        arena = ", smallest arena" if self.arena == "smallest" else ""
        peers = ", peers" if self.peers else ""
        return f"{loads} {self.placement}{arena}{peers}, {self.proof}: {'; '.join([*store, *strikes]) or 'no fault'}"


def world(layout: tuple[int, int, int]) -> int:
    """Ranks of a layout."""
    tensor_parallel, fully_sharded, copies = layout
    return tensor_parallel * fully_sharded * copies


def make_case(seed: int) -> Case:
    """The case of a number."""
    rng = random.Random(seed)
    proof = rng.choice(PROOFS)
    node_lost, client_killed = rng.random() < 0.08, rng.random() < 0.08
    layouts = tuple(rng.choice(LAYOUTS) for _ in range(rng.choice((1, 1, 1, 2))))
    peers = rng.random() < 0.7
    if node_lost or (peers and rng.random() < 0.6):
        layouts = (rng.choice(WIDE_LAYOUTS), *layouts[1:])
    strikes = [_make_strike(rng) for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3)))]
    if node_lost:
        strikes = [*strikes[:1], Strike("node", rng.uniform(0.05, 0.95), rng.randrange(8))]
    if client_killed:
        strikes = [*strikes[:1], Strike("client", rng.random())]
    # An agent that damages what it sends is none that Ray starts again.
    peers_damage = peers and rng.random() < 0.1 and all(strike.who in ("worker", "client") for strike in strikes)
    given_up = rng.choice(("cancelled", "timed out", "released")) if rng.random() < 0.12 else ""
    arena = "smallest" if rng.random() < 0.1 else "large"
    disk = rng.choice(("kept", "damaged", "full")) if rng.random() < 0.07 else ""
    return Case(
        seed=seed,
        proof=proof,
        layouts=layouts,
        placement=rng.choice(PLACEMENTS),
        passing=_passing(rng, proof, strikes, layouts),
        share=rng.uniform(0.1, 0.5),
        staying=_staying(rng, proof) if rng.random() < 0.15 else "",
        staying_at=rng.random(),
        strikes=tuple(strikes),
        replaced=rng.random() < 0.7,
        given_up=given_up,
        given_up_at=rng.uniform(0.02, 3.0) if given_up == "timed out" else rng.random(),
        client_alone=rng.random() < 0.5,
        renewals=tuple(sorted(rng.random() for _ in range(rng.randint(1, 2)))) if rng.random() < 0.12 else (),
        arena=arena,
        disk=disk,
        refused_at=rng.random() if rng.random() < 0.12 else -1.0,
        loaded_again=rng.random() < 0.12,
        other_version=rng.random() < 0.04 and not peers_damage,
        peers=peers,
        peers_damage=peers_damage,
        host=rng.choice(HOSTS) if rng.random() < 0.1 else "",
        host_killed_at=rng.random(),
    )


def _passing(
    rng: random.Random, proof: str, strikes: list[Strike], layouts: tuple[tuple[int, int, int], ...]
) -> tuple[str, ...]:
    kinds: tuple[str, ...] = PASSING
    if proof in ("manifest", "signed"):
        kinds += DAMAGING
    # The store's checksum is of a whole object: who has not had all of it cannot say.
    if proof == "checksums" and not strikes and layouts == ((1, 1, 1),):
        kinds = DAMAGING * 4 + PASSING
    if rng.random() >= 0.6:
        return ()
    return tuple(sorted(set(rng.sample(kinds, rng.randint(1, 3)))))


def _staying(rng: random.Random, proof: str) -> str:
    kinds = set(STAYING)
    if proof not in ("manifest", "signed"):
        kinds.discard("damages one chunk")
    if proof != "signed":
        kinds.discard("changed the manifest")
    return rng.choice(sorted(kinds))


def _make_strike(rng: random.Random) -> Strike:
    who = rng.choice(("worker", "worker", "agent", "coordinator"))
    at = rng.random() if rng.random() < 0.8 else -rng.uniform(0.0, 2.0)
    stopped_s = 0.0
    if rng.random() < 0.4:
        # A worker longer than it may be silent, too; the others only as a busy host would stop them.
        stopped_s = rng.uniform(0.3, 12.0 if who == "worker" else 3.0)
    return Strike(who, at, rng.randrange(8), stopped_s)
