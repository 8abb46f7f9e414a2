"""A store with limits: so many requests of weights at a time, so many bytes a second, all together."""

from __future__ import annotations

import threading
import time

from tests.support.counting_proxy import CountingProxy

_BODY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n" % len(_BODY) + _BODY
)


class LimitedProxy(CountingProxy):
    """Answers 503 SlowDown to ranges of weights above `admits` at a time; passes `bytes_per_s` (0: all there are)."""

    def __init__(self, upstream_url: str, *, admits: int = 1 << 30, bytes_per_s: float = 0) -> None:
        self._admits = admits
        self._bytes_per_s = bytes_per_s
        self._gate = threading.Lock()
        self._under_way = 0
        self._free_s = 0.0  # when the link has passed on what was given to it
        self.peak = 0  # requests of weights at a time, the refused ones not counted
        super().__init__(upstream_url)

    def refusal(self, method: str, path: str, byte_range: tuple[int, int] | None) -> bytes | None:
        if not _of_weights(method, path, byte_range):
            return None
        with self._gate:
            if self._under_way >= self._admits:
                return SLOW_DOWN
            self._under_way += 1
            self.peak = max(self.peak, self._under_way)
        return None

    def after_request(self, method: str, path: str, byte_range: tuple[int, int] | None) -> None:
        if _of_weights(method, path, byte_range):
            with self._gate:
                self._under_way -= 1

    def passing(self, path: str, size_bytes: int) -> None:
        if not self._bytes_per_s:
            return
        with self._gate:
            self._free_s = max(self._free_s, time.monotonic()) + size_bytes / self._bytes_per_s
            wait_s = self._free_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


def _of_weights(method: str, path: str, byte_range: tuple[int, int] | None) -> bool:
    return method == "GET" and byte_range is not None and path.endswith(".safetensors")
