"""Ranges of files into memory with nothing in between: the reader of the ceiling and of the hand-written limits.

Only what the wire needs: one request, the head of its answer, the body in pieces straight to where it goes. No
retries, no pinning, no checks but the status and the length.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

from bench.spec import BenchFile, Spec

_HEAD_BYTES = 512  # of the first receive: the head of nginx's answer, and little of the body, which is copied
_MAX_HEAD_BYTES = 8192

Sink = Callable[[memoryview], object]  # is given each piece as soon as it is there


class RawReader(Protocol):
    """One connection, or the open files of one thread."""

    def read(self, file: BenchFile, start: int, target: memoryview, piece_bytes: int, sink: Sink | None) -> None:
        """Fill `target` from byte `start` of `file`. Raises OSError."""
        ...

    def close(self) -> None: ...


def open_reader(spec: Spec) -> RawReader:
    """A reader for one thread, connected."""
    return _FileReader(spec) if spec.source == "file" else _HttpReader(spec)


class _HttpReader:
    """One kept-alive connection."""

    def __init__(self, spec: Spec) -> None:
        parts = urlsplit(spec.endpoint)
        self._host, self._bucket = parts.netloc, spec.bucket
        self._head = bytearray(_MAX_HEAD_BYTES)
        # No timeout: with one, Python would poll before every receive and could not wait for whole pieces.
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._whole_pieces = int(socket.MSG_WAITALL)
        if spec.source == "https":
            context = ssl.create_default_context(cafile=spec.ca_bundle)
            self._socket = context.wrap_socket(self._socket, server_hostname=parts.hostname)
            self._whole_pieces = 0  # TLS gives one record at a time

    def read(self, file: BenchFile, start: int, target: memoryview, piece_bytes: int, sink: Sink | None) -> None:
        end = start + len(target)
        lines = [f"GET /{self._bucket}/{file.key} HTTP/1.1", f"Host: {self._host}", f"Range: bytes={start}-{end - 1}"]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        received = self._receive_head(target)
        given = 0
        while received < len(target):
            upto = min(given + piece_bytes, len(target))
            count = self._socket.recv_into(target[received:upto], upto - received, self._whole_pieces)
            if not count:
                raise ConnectionError("the answer ended early")
            received += count
            if received == upto:
                if sink is not None:
                    sink(target[given:upto])
                given = upto
        if sink is not None and given < len(target):
            sink(target[given:])

    def _receive_head(self, target: memoryview) -> int:
        """Read the head of the answer; how many bytes of the body came with it, now in `target`."""
        filled = 0
        with memoryview(self._head) as head:
            while (end := self._head.find(b"\r\n\r\n", 0, filled)) < 0:
                if filled == len(head):
                    raise ConnectionError("no end of the answer's head")
                count = self._socket.recv_into(head[filled : filled + _HEAD_BYTES])
                if not count:
                    raise ConnectionError("no answer")
                filled += count
            said = bytes(head[:end]).decode("latin-1")
            if not said.startswith("HTTP/1.1 206 ") or f"content-length: {len(target)}\r" not in said.lower() + "\r":
                raise ConnectionError(f"not the range: {said.splitlines()[0]}")
            body = filled - end - 4
            target[:body] = head[end + 4 : filled]
            return body

    def close(self) -> None:
        self._socket.close()


class _FileReader:
    """Positioned reads."""

    def __init__(self, spec: Spec) -> None:
        self._files = {file.key: os.open(file.path, os.O_RDONLY) for file in spec.files}

    def read(self, file: BenchFile, start: int, target: memoryview, piece_bytes: int, sink: Sink | None) -> None:
        fd, at = self._files[file.key], 0
        while at < len(target):
            count = os.preadv(fd, [target[at : at + piece_bytes]], start + at)
            if not count:
                raise ConnectionError("the file ended early")
            if sink is not None:
                sink(target[at : at + count])
            at += count

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
