"""Lines between actors, over Ray: a rank's to the agent of its node, an agent's to the coordinator."""

from __future__ import annotations

import pickle
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from actors.names import COORDINATOR, NAMESPACE, agent_name
from cluster.errors import ClusterLost
from cluster.joining.remote_errors import unwrapped
from cluster.messages import AgentBeat, BeatReply, JoinReply, Orders, RankHello, RankUpdate, Words
from storage.host.processes import ProcessId

CALL_TIMEOUT_S = 30.0


class _NamedActor:
    """An actor found by name, again after it was restarted or replaced."""

    def __init__(self, name: str, what: str) -> None:
        self._name = name
        self._what = what
        self._handle: Any = None

    def call(self, method: str, *args: Any) -> Any:
        """One answer. Raises ClusterLost when there is none in time, else what the actor raised."""
        try:
            if self._handle is None:
                self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
            return ray.get(getattr(self._handle, method).remote(*args), timeout=CALL_TIMEOUT_S)
        except RayTaskError as error:
            raise unwrapped(error) from None
        except (RayActorError, GetTimeoutError, ValueError) as error:
            self._handle = None
            raise ClusterLost(f"{self._what} does not answer", actor=self._name, cause=type(error).__name__) from error


class RayAgentLink:
    """A rank's line to its agent (`actors.rank.executor.AgentLink`)."""

    def __init__(self, node_id: str) -> None:
        self._actor = _NamedActor(agent_name(node_id), "the node's agent")

    def join(self, hello: RankHello) -> JoinReply:
        reply: JoinReply = self._actor.call("join", hello)
        return reply

    def exchange(self, update: RankUpdate) -> Orders:
        # As bytes: Ray's own pickling in Python costs both sides more than all the rest of the call.
        orders: Orders = pickle.loads(self._actor.call("exchange_packed", pickle.dumps(update, protocol=5)))
        return orders

    def check_in(self, process: ProcessId, words: Words) -> float:
        age_s: float = self._actor.call("check_in", process, words)
        return age_s


class RayCoordinatorLink:
    """An agent's line to the coordinator (`actors.node_agent.CoordinatorLink`)."""

    def __init__(self) -> None:
        self._actor = _NamedActor(COORDINATOR, "the coordinator")

    def heartbeat(self, beat: AgentBeat) -> BeatReply:
        reply: BeatReply = self._actor.call("heartbeat", beat)
        return reply
