"""What can go wrong with one answer of a store, as data; `fault_proxy` does it, scripts say when.

A script is a function from a request to its faults. It sees what is asked and how often the same was asked before,
never a clock or a thread: the same requests meet the same faults, whatever order they come in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for bytes of weights."""

    path: str  # decoded, without the query: "/bucket/key"
    start: int
    end: int
    number: int  # the n-th request for weights of this proxy, from 1
    time: int  # the n-th request for what ends at `end`, from 1: a resumed read counts as the same

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Before:
    """Something happens before the server hears of the request: its object is replaced, a process is killed."""

    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Delay:
    """The answer begins late."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Drop:
    """The connection ends without an answer."""

    reset: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """Another status than success, with S3's error document."""

    status: int
    code: str = ""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A header of the answer says something else."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Shorten:
    """Head and body agree on fewer bytes than were asked for."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of the body is another."""

    bit: int  # of the body; taken modulo its length


@dataclass(frozen=True, slots=True)
class Instead:
    """A body of the right length with other bytes: those of another range, of an older version, zeros."""

    body: Callable[[Asked], bytes]


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection ends after so many bytes of the body."""

    at_bytes: int
    reset: bool = False  # RST instead of a clean end; what the client has not read yet may be lost with it


@dataclass(frozen=True, slots=True)
class Stall:
    """After so many bytes nothing comes for so long, or until the client gives up."""

    at_bytes: int
    seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class Trickle:
    """The body comes at this speed."""

    bytes_per_s: float


Fault = Before | Delay | Drop | Refuse | Rewrite | Shorten | Flip | Instead | Cut | Stall | Trickle
Script = Callable[[Asked], Sequence[Fault]]


def no_faults(asked: Asked) -> Sequence[Fault]:
    return ()


def only(*faults: Fault, where: Callable[[Asked], bool] = lambda asked: asked.number == 1) -> Script:
    """These faults for the requests that `where` picks; the first one when it is not given."""
    return lambda asked: faults if where(asked) else ()


def zeros_from(part: float, data: Callable[[Asked], bytes]) -> Instead:
    """The right bytes up to a part of the answer and zeros behind it: what a half-written object looks like."""

    def body(asked: Asked) -> bytes:
        kept = int(asked.size_bytes * part)
        return data(asked)[:kept] + bytes(asked.size_bytes - kept)

    return Instead(body)


# Faults that end when the same is asked for again. Kind -> (a fault for a body of n bytes, by a random source).
TRANSIENT: dict[str, Callable[[random.Random, int], Fault]] = {
    "500": lambda rng, size: Refuse(500, "InternalError"),
    "503": lambda rng, size: Refuse(503, "SlowDown"),
    "408": lambda rng, size: Refuse(408),
    "425": lambda rng, size: Refuse(425),
    "400": lambda rng, size: Refuse(400, "KMS.ThrottlingException"),
    "429": lambda rng, size: Refuse(429, "TooManyRequests"),
    "drop": lambda rng, size: Drop(),
    "drop-reset": lambda rng, size: Drop(reset=True),
    "delay": lambda rng, size: Delay(rng.uniform(0.01, 0.3)),
    "cut": lambda rng, size: Cut(rng.randrange(size)),
    "reset": lambda rng, size: Cut(rng.randrange(size), reset=True),
    "stall": lambda rng, size: Stall(rng.randrange(size)),
    "trickle": lambda rng, size: Trickle(rng.uniform(1e3, 60e3)),
    "throttle": lambda rng, size: Trickle(rng.uniform(1e6, 10e6)),
    "flip": lambda rng, size: Flip(rng.randrange(8 * size)),
    "zeros": lambda rng, size: Instead(lambda asked: bytes(asked.size_bytes)),
    "shorten": lambda rng, size: Shorten(rng.randrange(size)),
    "wrong-range": lambda rng, size: Rewrite("Content-Range", f"bytes {size}-{2 * size - 1}/*"),
}


def random_faults(seed: int, kinds: Sequence[str], share: float, times: int = 1) -> Script:
    """A share of all reads meets one of these kinds of TRANSIENT, at most the first `times` times each is asked for."""

    def script(asked: Asked) -> Sequence[Fault]:
        rng = random.Random(f"{seed} {asked.path} {asked.end} {asked.time}")
        if asked.time > times or rng.random() >= share:
            return ()
        return (TRANSIENT[rng.choice(sorted(kinds))](rng, asked.size_bytes),)

    return script


def merged(*scripts: Script) -> Script:
    """The faults of all of them."""
    return lambda asked: [fault for script in scripts for fault in script(asked)]
