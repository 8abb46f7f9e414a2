"""A proxy that stops a load in its middle, for as long as a test wants."""

from __future__ import annotations

import contextlib
import threading

import psutil

from tests.support.counting_proxy import CountingProxy, Request


class GatedProxy(CountingProxy):
    """Lets `ranges` ranges of weights pass, then holds every further one until `open`.

    with GatedProxy(server.endpoint_url, ranges=10) as proxy:
        ... start a load with endpoint_url=proxy.endpoint_url ...
        proxy.wait_until_held()
        ... kill a process ...
        proxy.open()
    """

    def __init__(self, upstream_url: str, ranges: int) -> None:
        self._gate = threading.Condition()
        self._left = ranges
        self._held = 0
        self._ports: set[int] = set()  # of the clients whose requests have come to the gate
        self._open = False
        self._all = False
        super().__init__(upstream_url)

    def before_request(self, request: Request) -> None:
        # Headers, the manifest and the index pass: only weights are held, unless all is.
        if request.method != "GET" or not (request.is_weights or self._all):
            return
        with self._gate:
            if self._left > 0 or self._open:
                self._left -= 1
                return
            self.wait_at_gate(request)

    def wait_at_gate(self, request: Request) -> None:
        """Stand still until `open`. With the gate's lock, which waiting gives back."""
        self._held += 1
        self._ports.add(request.client_port)
        self._gate.notify_all()
        self._gate.wait_for(lambda: self._open)

    def holds_for(self, pid: int) -> bool:
        """Return whether a request of this process waits at the closed gate."""
        with contextlib.suppress(psutil.NoSuchProcess):
            mine = {connection.laddr.port for connection in psutil.Process(pid).net_connections("tcp")}
            with self._gate:
                return not self._open and bool(self._ports & mine)
        return False

    def wait_until_held(self, requests: int = 1, timeout_s: float = 120.0) -> None:
        """Wait until this many requests wait at the gate. AssertionError when they do not come."""
        with self._gate:
            if not self._gate.wait_for(lambda: self._held >= requests, timeout_s):
                raise AssertionError(f"only {self._held} of {requests} requests came to the gate")

    def hold_all(self) -> None:
        """Hold every object from now on, the manifest too, until `open`."""
        with self._gate:
            self._open, self._all, self._left, self._held = False, True, 0, 0
            self._ports.clear()

    def open(self) -> None:
        """Everything passes from here on."""
        with self._gate:
            self._open = True
            self._gate.notify_all()

    def close(self) -> None:
        self.open()
        super().close()
