"""A rank's line to the agent of its node: a handle to an actor in a cluster, an object in a test."""

from __future__ import annotations

from typing import Protocol

from cluster.messages import JoinReply, Orders, RankHello, RankUpdate


class AgentLink(Protocol):
    """How a rank talks to the agent of its node. Raises ClusterLost when the agent does not answer."""

    def join(self, hello: RankHello) -> JoinReply: ...

    def exchange(self, update: RankUpdate) -> Orders: ...

    def coordinator_age_s(self) -> float:
        """Seconds since the agent last heard the coordinator."""
        ...
