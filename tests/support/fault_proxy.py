"""A proxy in front of a real S3 server that damages, delays or refuses single answers, as a script says.

    with FaultProxy(server.endpoint_url, only(Cut(100))) as proxy:
        ... endpoint_url=proxy.endpoint_url ...
        proxy.struck                   what was done, in order
        proxy.weights_bytes()          bytes of weights that left it, those of broken answers counted

A fault is data. A script is a function from a request to its faults: it sees what is asked and how often the same was
asked before, never a clock or a thread, so the same requests meet the same faults in whatever order they come.

Only ranges of weights meet faults, so manifest, headers and index arrive. `at_bytes` calls something when so many
bytes of weights have passed: there a process is killed.
"""

from __future__ import annotations

import collections
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tests.support.counting_proxy import Answer, CountingProxy, Request, s3_refusal

_PIECE_BYTES = 16 << 10
_TRICKLED_S = 0.05  # between two pieces of a slow body


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
    """Something happens before the server gets the request: its object is replaced, a process is killed."""

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
    """Sends so many bytes, then nothing for so long or until the client disconnects."""

    at_bytes: int
    seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class Trickle:
    """The body comes at this speed."""

    bytes_per_s: float


Fault = Before | Delay | Drop | Refuse | Rewrite | Shorten | Flip | Instead | Cut | Stall | Trickle
Script = Callable[[Asked], Sequence[Fault]]


def only(*faults: Fault, where: Callable[[Asked], bool] = lambda asked: asked.number == 1) -> Script:
    """These faults for the requests that `where` picks; the first one when it is not given."""
    return lambda asked: faults if where(asked) else ()


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


AnyFault = TypeVar("AnyFault", bound=Fault)


class FaultProxy(CountingProxy):
    """`script` may be exchanged at any time; it holds for requests that come after."""

    def __init__(self, upstream_url: str, script: Script = lambda asked: (), address: str = "127.0.0.1") -> None:
        self.script = script
        self.struck: list[tuple[Asked, Fault]] = []
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._asked: collections.Counter[tuple[str, int]] = collections.Counter()
        self._number = 0
        self._passed_bytes = 0
        self._calls: list[tuple[int, Callable[[], object]]] = []
        self._current = threading.local()  # a connection is a thread
        super().__init__(upstream_url, address)

    def at_bytes(self, passed_bytes: int, call: Callable[[], object]) -> None:
        """Call, once, in the thread that passes the byte of weights with this number (counted from 0)."""
        with self._guard:
            self._calls.append((passed_bytes, call))

    def weights_bytes(self) -> int:
        """Bytes of weights given to clients; some of the last of them may have been lost on the way."""
        with self._guard:
            return self._passed_bytes

    def close(self) -> None:
        self._closing.set()
        super().close()

    # -- what the base asks ------------------------------------------------------------------------------------

    def before_request(self, request: Request) -> None:
        self._current.faults = ()
        if request.range is None or not request.is_weights or request.range[0] == 0:
            return  # (headers are read from byte 0, as no chunk is)
        same = (request.path, request.range[1])
        with self._guard:
            self._number += 1
            self._asked[same] += 1
            asked = Asked(request.path, *request.range, self._number, self._asked[same])
            faults = tuple(self.script(asked))
            self.struck += [(asked, fault) for fault in faults]
        self._current.asked, self._current.faults = asked, faults
        for fault in faults:
            if isinstance(fault, Before):
                fault.call()
            elif isinstance(fault, Delay):
                self._closing.wait(fault.seconds)

    def refusal(self, request: Request) -> bytes | None:
        refuse = _first(self._current.faults, Refuse)
        return refuse and s3_refusal(refuse.status, refuse.code)

    def passing(self, request: Request, size_bytes: int) -> None:
        if not request.path.endswith(".safetensors") or not hasattr(self._current, "asked"):
            return
        with self._guard:
            self._passed_bytes += size_bytes
            due = [call for at, call in self._calls if at < self._passed_bytes]
            self._calls = [(at, call) for at, call in self._calls if at >= self._passed_bytes]
        for call in due:
            call()

    def pass_answer(self, answer: Answer, client: socket.socket, count: Callable[[int], None]) -> None:
        faults = self._current.faults
        if drop := _first(faults, Drop):
            _hang_up(client, drop.reset)
        if not faults or answer.fields.get("content-length") is None:
            super().pass_answer(answer, client, count)
            return
        asked: Asked = self._current.asked
        head, body = answer.head, bytearray(answer.stream.read(int(answer.fields["content-length"])))
        for fault in faults:
            if isinstance(fault, Instead):
                body[:] = fault.body(asked)
            elif isinstance(fault, Flip):
                body[fault.bit // 8 % len(body)] ^= 1 << fault.bit % 8
            elif isinstance(fault, Shorten):
                del body[fault.size_bytes :]
                head = _with_header(head, "Content-Length", str(len(body)))
                head = _with_header(head, "Content-Range", f"bytes {asked.start}-{asked.start + len(body) - 1}/*")
            elif isinstance(fault, Rewrite):
                head = _with_header(head, fault.name, fault.value)
        client.sendall(head)
        self._send(client, memoryview(body), faults, count)

    # -- inside ------------------------------------------------------------------------------------------------

    def _send(
        self, client: socket.socket, body: memoryview, faults: Sequence[Fault], count: Callable[[int], None]
    ) -> None:
        cut, stall, trickle = _first(faults, Cut), _first(faults, Stall), _first(faults, Trickle)
        stalls_at = stall.at_bytes if stall else -1
        end = min(len(body), cut.at_bytes) if cut else len(body)
        at, piece_bytes = 0, _PIECE_BYTES
        if trickle:
            piece_bytes = max(1, int(trickle.bytes_per_s * _TRICKLED_S))
        while True:
            if at == stalls_at and stall:
                self._wait(client, stall.seconds)
            if at >= end:
                break
            stop = min(end, at + piece_bytes)
            if at < stalls_at < stop:
                stop = stalls_at
            count(stop - at)
            client.sendall(body[at:stop])
            at = stop
            if trickle and at < end:
                self._wait(client, _TRICKLED_S)
        if cut:
            _hang_up(client, cut.reset)

    def _wait(self, client: socket.socket, seconds: float) -> None:
        """Return after `seconds`; EOFError when the client or this proxy ends meanwhile."""
        give_up_s = time.monotonic() + seconds
        while (left_s := give_up_s - time.monotonic()) > 0:
            if self._closing.is_set():
                raise EOFError
            client.settimeout(min(left_s, 0.05))
            try:
                if not client.recv(1, socket.MSG_PEEK):
                    raise EOFError
                time.sleep(min(left_s, 0.05))  # it sent something: nothing that ends this
            except TimeoutError:
                pass
            finally:
                client.settimeout(None)


def _first(faults: Sequence[Fault], kind: type[AnyFault]) -> AnyFault | None:
    return next((fault for fault in faults if isinstance(fault, kind)), None)


def _hang_up(client: socket.socket, reset: bool) -> None:
    """End a connection, with an RST or cleanly; always EOFError."""
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # in fact when the last file over it is closed, which is before anybody shuts it down
    raise EOFError


def _with_header(head: bytes, name: str, value: str) -> bytes:
    """The head with this header, and no other of this name."""
    rest = re.sub(rb"(?im)^%s:[^\r]*\r\n" % re.escape(name.encode()), b"", head)
    return rest[:-2] + f"{name}: {value}\r\n\r\n".encode()
