"""A rank's line to the agent of its node, and an agent's to the coordinator: actors in a cluster, objects in a test."""

from __future__ import annotations

from typing import Protocol

from cluster.messages import AgentBeat, BeatReply, JoinReply, Orders, RankHello, RankUpdate, Words
from storage.host.processes import ProcessId


class AgentLink(Protocol):
    """How a rank talks to the agent of its node. Raises ClusterLost when the agent does not answer."""

    def join(self, hello: RankHello) -> JoinReply: ...

    def exchange(self, update: RankUpdate) -> Orders: ...

    def check_in(self, process: ProcessId, words: Words) -> float:
        """Seconds since the agent last heard the coordinator. `words`: as in `RankHello.others`, of all ranks."""
        ...


class CoordinatorLink(Protocol):
    """How an agent reaches the coordinator. Raises ClusterLost when nobody answers."""

    def heartbeat(self, beat: AgentBeat) -> BeatReply: ...
