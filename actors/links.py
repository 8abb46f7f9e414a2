"""The links between actors: their names, and the calls from rank to agent and from agent to coordinator."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from cluster.errors import AgentEnded, ClusterLost
from cluster.joining.node_tasks import unwrapped
from cluster.messages import (
    UNVERSIONED,
    AgentBeat,
    ArenaAccess,
    BeatReply,
    JoinReply,
    Orders,
    RankHello,
    RankUpdate,
    check_version,
    pack_message,
    unpack_message,
)
from storage.host.processes import ProcessId

if TYPE_CHECKING:
    from cluster.telemetry.process_logs import LogProcess


class AgentLink(Protocol):
    """A rank's calls to the agent of its node. They raise ClusterLost when the agent does not answer."""

    def join(self, hello: RankHello) -> JoinReply:
        """Introduce the rank to the agent."""
        ...

    def exchange(self, update: RankUpdate) -> Orders:
        """Report the rank's progress, and return the agent's orders."""
        ...

    def check_in(self, process: ProcessId, access: ArenaAccess) -> float:
        """Return seconds since the coordinator last answered the agent.

        `access`: for all ranks of the process, as in `RankHello.others`.
        """
        ...


class CoordinatorLink(Protocol):
    """An agent's calls to the coordinator. They raise ClusterLost when it does not answer."""

    def heartbeat(self, beat: AgentBeat) -> BeatReply:
        """Send a heartbeat, and return the coordinator's reply."""
        ...


NAMESPACE = "longshore"
COORDINATOR = "coordinator"


def agent_name(node_id: str) -> str:
    """Return the name of a node's agent actor."""
    return f"agent-{node_id}"


def worker_name(worker_group_id: str, rank: int, incarnation: int) -> str:
    """Return the name of a worker's actor.

    A replacement has its own name, so a late message to its predecessor cannot reach it. A worker group is the workers
    of one load, and of later loads that take them over. Its id is that of the first load.
    """
    return f"worker-{worker_group_id}-{rank}-{incarnation}"


def group_of_worker(name: str) -> str | None:
    """Return the worker group that a worker's name belongs to, or None for other names."""
    parts = name.removeprefix("worker-").rsplit("-", 2)
    return parts[0] if name.startswith("worker-") and len(parts) == 3 else None


def group_name(worker_group_id: str, number: int) -> str:
    """Return the name of a placement group of a worker group, which may have several."""
    return f"group-{worker_group_id}.{number}"


def worker_group_of(name: str) -> str | None:
    """Return the worker group that a placement group's name belongs to, or None for other names."""
    worker_group_id, dot, _ = name.removeprefix("group-").rpartition(".")
    return worker_group_id if name.startswith("group-") and dot else None


def process_of(name: str) -> LogProcess | None:
    """Return the process type behind an actor's name, or None for names that are not ours."""
    from cluster.telemetry.process_logs import LogProcess  # not at the top: every worker imports this module

    if name == COORDINATOR:
        return LogProcess("coordinator")
    if name.startswith(agent_name("")):
        return LogProcess("agent")
    worker_group_id = group_of_worker(name)
    numbers = name.rsplit("-", 2)[1:]
    if worker_group_id is None or not all(number.isdecimal() for number in numbers):
        return None
    return LogProcess("worker", worker_group_id, int(numbers[0]), int(numbers[1]))


CALL_TIMEOUT_S = 30.0


class _NamedActor:
    """An actor found by name. It is found again after it was restarted or replaced."""

    def __init__(self, name: str, what: str) -> None:
        self._name = name
        self._what = what
        self._handle: Any = None

    def call(self, method: str, *args: Any) -> Any:
        """Return the actor's answer to one call.

        Raises ClusterLost when no answer comes in time or the agent ends, else the actor's own exception.
        """
        import ray  # not at the top: ranks without Ray import this module for `AgentLink`
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            if self._handle is None:
                self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
            return ray.get(getattr(self._handle, method).remote(*args), timeout=CALL_TIMEOUT_S)
        except RayTaskError as error:
            raised = unwrapped(error)
            if not isinstance(raised, AgentEnded):
                raise raised from None
            self._handle = None  # another one may start soon
            raise ClusterLost(f"{self._what} was shut down", actor=self._name) from None
        except (RayActorError, GetTimeoutError, ValueError) as error:
            self._handle = None
            raise ClusterLost(f"{self._what} does not answer", actor=self._name, cause=type(error).__name__) from error


class PackedCalls:
    """The calls of an agent, each sent with this process's version. The caller unpacks answers (`NodeAgent.packed`)."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, call: str) -> _PackedCall:
        return _PackedCall(self._agent, call)


class _PackedCall:
    def __init__(self, agent: Any, call: str) -> None:
        self._agent = agent
        self._call = call

    def remote(self, *arguments: Any) -> Any:
        """Return Ray's reference for the call. Raises VersionMismatch for an agent too old to send its version."""
        import ray

        packed: Any = getattr(self._agent, "packed", None)
        if packed is None:
            check_version(UNVERSIONED, "a node's agent", "this process")
        beside = [argument for argument in arguments if isinstance(argument, ray.ObjectRef)]  # the last ones
        return packed.remote(self._call, pack_message(arguments[: len(arguments) - len(beside)]), *beside)


async def ask_agent(agent: Any, timeout_s: float, who: str, call: str, *arguments: Any) -> Any:
    """Return an agent's answer to the coordinator. Raises TimeoutError, VersionMismatch, or the agent's exception.

    `who`: the agent's name in error messages.
    """
    packed = await asyncio.wait_for(getattr(PackedCalls(agent), call).remote(*arguments), timeout_s)
    return unpack_message(packed, who, "the coordinator")


class RayAgentLink:
    """An `AgentLink` over Ray."""

    def __init__(self, node_id: str) -> None:
        self._actor = _NamedActor(agent_name(node_id), "the node's agent")

    def join(self, hello: RankHello) -> JoinReply:
        reply: JoinReply = self._ask("join", hello)
        return reply

    def exchange(self, update: RankUpdate) -> Orders:
        orders: Orders = self._ask("exchange", update)
        return orders

    def check_in(self, process: ProcessId, access: ArenaAccess) -> float:
        age_s: float = self._ask("check_in", process, access)
        return age_s

    def _ask(self, call: str, *arguments: object) -> Any:
        # Bytes are also cheaper: Ray's own pickling in Python costs both sides more than the rest of the call.
        answer = self._actor.call("packed", call, pack_message(arguments))
        return unpack_message(answer, "the node's agent", "the rank's process")


class RayCoordinatorLink:
    """A `CoordinatorLink` over Ray."""

    def __init__(self) -> None:
        self._actor = _NamedActor(COORDINATOR, "the coordinator")

    def heartbeat(self, beat: AgentBeat) -> BeatReply:
        packed = self._actor.call("heartbeat_packed", beat.node_id, pack_message(beat))
        reply: BeatReply = unpack_message(packed, "the coordinator", "the agent")
        return reply
