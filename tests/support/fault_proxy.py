"""A proxy in front of a real S3 server that does to single answers what networks and stores do on a bad day.

    with FaultProxy(server.endpoint_url, only(Cut(100))) as proxy:
        ... endpoint_url=proxy.endpoint_url ...
        proxy.struck                   what was done, in order
        proxy.weights_bytes()          bytes of weights that left it, those of broken answers counted

Only ranges of weights meet faults, so manifest, headers and index arrive. `at_bytes` calls something when so many
bytes of weights have passed: there a process is killed.
"""

from __future__ import annotations

import collections
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TypeVar

from tests.support.counting_proxy import Answer, CountingProxy
from tests.support.faults import (
    Asked,
    Before,
    Cut,
    Delay,
    Drop,
    Fault,
    Flip,
    Instead,
    Refuse,
    Rewrite,
    Script,
    Shorten,
    Stall,
    Trickle,
    no_faults,
)

_PIECE_BYTES = 16 << 10
_TRICKLED_S = 0.05  # between two pieces of a slow body

AnyFault = TypeVar("AnyFault", bound=Fault)


class FaultProxy(CountingProxy):
    """`script` may be exchanged at any time; it holds for requests that come after."""

    def __init__(self, upstream_url: str, script: Script = no_faults, address: str = "127.0.0.1") -> None:
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

    def before_request(self, method: str, path: str, byte_range: tuple[int, int] | None) -> None:
        self._current.faults = ()
        if method != "GET" or byte_range is None or not path.endswith(".safetensors") or byte_range[0] == 0:
            return  # (headers are read from byte 0, as no chunk is)
        with self._guard:
            self._number += 1
            self._asked[path, byte_range[1]] += 1
            asked = Asked(path, *byte_range, self._number, self._asked[path, byte_range[1]])
            faults = tuple(self.script(asked))
            self.struck += [(asked, fault) for fault in faults]
        self._current.asked, self._current.faults = asked, faults
        for fault in faults:
            if isinstance(fault, Before):
                fault.call()
            elif isinstance(fault, Delay):
                self._closing.wait(fault.seconds)

    def refusal(self, method: str, path: str, byte_range: tuple[int, int] | None) -> bytes | None:
        refuse = _first(self._current.faults, Refuse)
        if refuse is None:
            return None
        code = f"<Code>{refuse.code}</Code>" if refuse.code else ""
        body = f"<?xml version='1.0'?><Error>{code}<Message>as the test has it</Message></Error>".encode()
        head = f"HTTP/1.1 {refuse.status} {HTTPStatus(refuse.status).phrase}\r\nContent-Type: application/xml\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def passing(self, path: str, size_bytes: int) -> None:
        if not path.endswith(".safetensors") or not hasattr(self._current, "asked"):
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
