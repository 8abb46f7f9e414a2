"""The agent's threads that give an arena its memory, slot by slot, and tell of each as it becomes usable."""

from __future__ import annotations

import threading

from actors.node.node_ledger import NodeLedger
from actors.node.node_resources import room_for_slots
from cluster.config import Config
from storage.arena.arena import Arena
from storage.errors import LongshoreError

LOOK_S = 0.01


class ArenaFilling:
    """Ends when every slot has its memory, or with `error` when the host has no more to give."""

    def __init__(
        self, config: Config, arena: Arena, ledger: NodeLedger, lock: threading.Condition, stopped: threading.Event
    ) -> None:
        """`lock`: the agent's, around the ledger; notified when slots are ready, and when there will be no more."""
        self.error: LongshoreError | None = None
        self._config = config
        self._arena = arena
        self._ledger = ledger
        self._lock = lock
        self._stopped = stopped

    def touch(self) -> None:
        """A thread's work, named as the thread is: memory for slot after slot. They are usable as they are ready."""
        try:
            self._arena.reserve(self._stopped.is_set, room_for_slots(self._config))
        except LongshoreError as error:
            self.error = error
            with self._lock:
                self._ledger.fail_all(error)
                self._lock.notify_all()

    def announce_ready(self) -> None:
        """A thread's work, named as the thread is: the ledger hears of slots as they get their memory."""
        announced = -1
        while not self._stopped.is_set() and announced < self._arena.slot_count and self.error is None:
            ready = self._arena.ready_slots
            if ready != announced:
                announced = ready
                with self._lock:
                    self._ledger.add_ready(ready)
                    self._lock.notify_all()
            self._stopped.wait(LOOK_S)
