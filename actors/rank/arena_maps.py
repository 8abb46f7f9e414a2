"""The arenas that this process has mapped, and the ranks in it that use them.

A mapping is shared by the ranks of the process. Mapping the pages of an arena anew costs 0.1 CPU s per GB, so a process
that is kept warm keeps its mapping too.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from cluster.messages import Words
from storage.arena.arena import Arena


@dataclass(slots=True)
class _Mapping:
    arena: Arena
    users: int = 0


class ArenaMaps:
    """Thread-safe. A user is a rank's loader, by any number that tells it from the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keeps = False
        self._mappings: dict[str, _Mapping] = {}  # by epoch
        self._claims: dict[int, tuple[str, str]] = {}  # user -> (arena path, agent by whose word)

    def keep(self, keeps: bool) -> None:
        """From now on leave an arena mapped that nobody uses, or not."""
        with self._lock:
            self._keeps = keeps
            if not keeps:
                self._close_unused()

    def open(self, path: str, epoch: str) -> Arena:
        """The arena at `path`, which the agent says is of this epoch. Raises ArenaError."""
        with self._lock:
            self._close_unused(but=epoch)  # one that was replaced gives its memory back only when nobody maps it
            mapping = self._mappings.get(epoch)
            if mapping is None:
                arena = Arena.open(path)
                mapping = self._mappings.setdefault(arena.epoch, _Mapping(arena))
                if mapping.arena is not arena:
                    arena.close()
            mapping.users += 1
            return mapping.arena

    def close(self, arena: Arena) -> None:
        """One user less; as many times as it was opened."""
        with self._lock:
            self._mappings[arena.epoch].users -= 1
            if not self._keeps:
                self._close_unused()

    def _close_unused(self, but: str = "") -> None:
        for epoch, mapping in list(self._mappings.items()):
            if not mapping.users and epoch != but:
                del self._mappings[epoch]
                mapping.arena.close()

    # -- who uses them -----------------------------------------------------------------------------------------

    def claim(self, user: int, path: str, agent: str) -> None:
        """The user may read and write the arena, by this agent's word."""
        self._claims[user] = (path, agent)

    def let_go(self, user: int) -> None:
        """The user touches no arena any more."""
        self._claims.pop(user, None)

    def words(self, but: int | None = None) -> Words:
        """(arena path, agent) of the users in this process, `but` that one."""
        return tuple(claim for key, claim in list(self._claims.items()) if key != but)


PROCESS_ARENAS = ArenaMaps()
