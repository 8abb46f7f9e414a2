"""Processes that mapped a node's arena when its agent was restarted.

Each may have been reading any chunk by the word of the agent before, so every chunk is held for it until it is known to
be done with that. It is when it says so (in a rank's message, or when it checks in: an idle worker keeps its mapping
and has no rank that speaks), when it maps the arena no more, or when it is dead.
"""

from __future__ import annotations

from cluster.messages import Words
from storage.host.processes import ProcessId, may_map, processes_mapping


class Survivors:
    """Those of whom it is not known yet. Not thread-safe."""

    def __init__(self, path: str, agent: str, *, restored: bool) -> None:
        """`agent`: its incarnation. An arena that was not `restored` is new: there are none."""
        self._path, self._agent = path, agent
        self.left = {p for p in processes_mapping(path) if p != ProcessId.current()} if restored else set()

    def settles(self, process: ProcessId, words: Words) -> bool:
        """Whether no rank that said these words goes by what an earlier agent told it; noted then."""
        settled = all(agent == self._agent for path, agent in words if path == self._path)
        if settled:
            self.left.discard(process)
        return settled

    def mapping(self) -> set[ProcessId]:
        """Return the survivors that map the arena, or that the kernel does not show."""
        return {process for process in set(self.left) if may_map(process, self._path)}

    def take_unmapped(self, mapping: set[ProcessId]) -> set[ProcessId]:
        """Those that were not among `mapping`, and are no survivors therefore."""
        gone = self.left - mapping
        self.left -= gone
        return gone
