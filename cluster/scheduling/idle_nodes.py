"""Which nodes' agents nobody has needed for long: an agent keeps its node from being idle in Ray's eyes. Pure."""

from __future__ import annotations

from collections.abc import Collection


class IdleNodes:
    """Since when each node that has an agent is not needed."""

    def __init__(self, after_s: float) -> None:
        """`after_s`: so long a node is not needed before its agent is to end; 0: it never is."""
        self._after_s = after_s
        self._needed_s: dict[str, float] = {}  # node id -> when it was needed last, or seen first

    def needed(self, node_id: str, now_s: float) -> None:
        """Somebody asked for the node's agent just now."""
        self._needed_s[node_id] = now_s

    def due(self, agents: Collection[str], needed: Collection[str], now_s: float) -> list[str]:
        """Ids of the nodes whose agents are to end. `agents`: nodes that have one; `needed`: nodes that are in use."""
        if not self._after_s:
            return []
        self._needed_s = {node: now_s if node in needed else self._needed_s.get(node, now_s) for node in agents}
        return sorted(node for node, last_s in self._needed_s.items() if now_s - last_s > self._after_s)
