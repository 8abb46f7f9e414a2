"""The agent's actor class, apart from the agent, because finding an actor by its name imports the actor's class.

Every worker finds its agent before its first byte. So this module imports the agent only in the agent's own process.
"""

from __future__ import annotations

from typing import Any


class NodeAgent:
    """The actor: `actors.node_agent.NodeAgent` behind the calls that other processes make to it."""

    def __init__(self, *arguments: Any) -> None:
        import ray

        from actors.node_agent import NodeAgent
        from actors.reader.door import agent_door

        self._agent = NodeAgent(*arguments)
        self._agent.open_door(agent_door)
        self._agent.serve_peers(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def packed(self, call: str, arguments: bytes, *beside: bytes) -> bytes:
        """Run any call of the agent, for a caller with a version."""
        return self._agent.packed(call, arguments, *beside)

    def keep_record(self, load_id: str, record: bytes) -> None:
        """See the agent."""
        self._agent.keep_record(load_id, record)

    def end(self, load_id: str, attempt: int = 0) -> None:
        """See the agent."""
        self._agent.end(load_id, attempt)

    def leave(self, load_id: str) -> None:
        """See the agent."""
        self._agent.leave(load_id)

    def shutdown(self, *, only_idle: bool = False) -> bool:
        """See the agent."""
        return self._agent.shutdown(only_idle=only_idle)
