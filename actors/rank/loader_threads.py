"""The threads of one rank's load. What one of them raises ends the load; none of them ends silently."""

from __future__ import annotations

import threading
from collections.abc import Callable

from actors.rank.error_frames import empty_frames
from storage.errors import LongshoreError


class LoaderThreads:
    """Starts them, joins them, and hands the error of any of them to `failed`."""

    def __init__(self, rank: int, failed: Callable[[LongshoreError], None]) -> None:
        self._rank = rank
        self._failed = failed
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._threads)

    def start(self, loop: Callable[[], None], name: str) -> None:
        """One more, which runs until `loop` returns."""
        thread = threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Wait for all; who calls has told them to end."""
        for thread in self._threads:
            thread.join()

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except LongshoreError as error:
            empty_frames(error)
            self._failed(error)
        except BaseException as error:  # a bug or out of memory: the load must end, not hang
            self._failed(LongshoreError(f"{type(error).__name__} in a loader thread: {error}", rank=self._rank))
