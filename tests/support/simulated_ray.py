"""The part of Ray that the coordinator uses, simulated: named actors, slow calls, deaths, a list of nodes.

    actors.coordination.spawn, orphans, nodes, plan_source -- ray.get_actor, kill, nodes, ... --> SimRay
    handle.method.options(...).remote(...)   -- Call --> SimActor, later; its answer, later still; or RayActorError

What Ray promises holds (an actor's name is its own; a dead actor's calls fail), and nothing beyond that: how long it
takes to notice a death, and what a node does that it has given up meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError, RayError

from actors.links import NAMESPACE
from tests.support.virtual_time import Clock

CALLS_FAIL_S = 0.3  # after a process died, at most
NODE_DETECTED_S = 5.0  # after a node was cut off or died, at most
NODE_CALLS_FAIL_S = 3.0  # after Ray has declared a node dead, at most


@dataclass(eq=False)
class Host:
    """A machine as Ray sees it."""

    node_id: str
    lives: bool = True  # its processes do
    cut_off: bool = False  # messages wait until that is over
    listed: bool = True  # Ray takes it for living


@dataclass(eq=False)
class Call:
    """One call of an actor's method."""

    method: str
    args: tuple[Any, ...]
    named: dict[str, Any]
    answer: asyncio.Future[Any]

    def give(self, result: Any) -> None:
        if not self.answer.done() and not self.answer.get_loop().is_closed():
            self.answer.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.answer.done() and not self.answer.get_loop().is_closed():
            self.answer.set_exception(error)
            self.answer.exception()  # seen: who asked may be gone


@dataclass(eq=False)
class SimActor:
    """One actor. `process` answers calls by methods of the same names; a method that returns a Future answers later."""

    name: str
    host: Host
    restarts: bool
    process: Any = None  # None: it is not up
    dead: bool = False  # for good, by Ray's word
    pending: dict[Call, None] = field(default_factory=dict)  # in their order


class SimRay:
    """A simulated Ray. `make_worker` and `make_agent` make the processes of a host."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.hosts: dict[str, Host] = {}
        self.actors: dict[str, SimActor] = {}
        self.silent = False  # the caller is dead by now
        self.util = SimpleNamespace(list_named_actors=self.list_named_actors)

    # -- what `import ray` gives -------------------------------------------------------------------------------

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        self._check_heard()
        return [{"name": actor.name, "namespace": NAMESPACE} for actor in self.actors.values() if not actor.dead]

    def get_actor(self, name: str, namespace: str) -> Handle:
        self._check_heard()
        actor = self.actors.get(name)
        if actor is None or actor.dead:
            raise ValueError(f"no actor {name}")
        return Handle(self, actor)

    def kill(self, handle: Handle, no_restart: bool) -> None:
        """Kill the actor without waiting. Until it is dead, it works and is found by its name."""
        self._check_heard()
        self.clock.soon(lambda: self.end(handle.actor), 2.0)

    def nodes(self) -> list[dict[str, Any]]:
        self._check_heard()
        return [
            {
                "NodeID": host.node_id,
                "NodeManagerHostname": f"host-{host.node_id}",
                "Alive": host.listed,
                "Resources": {},
            }
            for host in self.hosts.values()
        ]

    def put(self, value: Any) -> Any:
        return value

    # -- actors ------------------------------------------------------------------------------------------------

    def create(self, name: str, node_id: str, make: Callable[[], Any], *, restarts: bool) -> Handle:
        """A new actor whose process comes up after a while. Raises ValueError for a name that is taken."""
        self._check_heard()
        if name in self.actors and not self.actors[name].dead:
            raise ValueError(f"the name {name} is taken")
        actor = self.actors[name] = SimActor(name, self.hosts[node_id], restarts)
        self.start(actor, make)
        return Handle(self, actor)

    def start(self, actor: SimActor, make: Callable[[], Any]) -> None:
        def up() -> None:
            if not actor.dead and actor.host.lives and actor.process is None:
                actor.process = make()

        if not actor.host.listed:
            actor.dead = True
        self.clock.soon(up, 1.0)

    def end(self, actor: SimActor) -> None:
        """Cut the actor off; its process dies when it notices."""
        actor.dead = True
        self.fail_calls(actor)
        process, hears_s = actor.process, self.clock.now_s + self.clock.chance.choice([0.0, 0.0, 2.0, 40.0])

        def reached() -> None:
            # A process that is stopped, or busy, does not end by Ray's word at once.
            if actor.process is process and process is not None and process.stopped and self.clock.now_s < hears_s:
                self.clock.after(0.5, reached)
            else:
                self._end_process(actor)

        self._when_reached(actor.host, reached)

    def died(self, actor: SimActor) -> None:
        """Its process did, by itself. Of one that ended with its node, Ray learns that with the death of the node."""
        actor.process = None
        if not actor.host.lives:
            return
        if not actor.restarts:
            actor.dead = True
        self.fail_calls(actor)

    def fail_calls(self, actor: SimActor, most_s: float = CALLS_FAIL_S) -> None:
        calls, actor.pending = actor.pending, {}
        for call in calls:
            self.clock.soon(lambda call=call: call.fail(RayActorError()), most_s)  # type: ignore[misc]

    def call(self, actor: SimActor, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> asyncio.Future[Any]:
        call = Call(method, args, named, asyncio.get_running_loop().create_future())
        if self.silent:
            call.fail(RayActorError())
            return call.answer
        actor.pending[call] = None
        self.clock.soon(lambda: self._deliver(actor, call))
        return call.answer

    def lose_host(self, host: Host) -> None:
        """Ray takes the node for dead from now on: what was on it is of no use to anybody."""
        if host.listed:
            host.listed = False
            for actor in [actor for actor in self.actors.values() if actor.host is host]:
                actor.dead = True
                self.fail_calls(actor, NODE_CALLS_FAIL_S)

    # -- inside ------------------------------------------------------------------------------------------------

    def _check_heard(self) -> None:
        if self.silent:
            raise RayError("the process that asked is dead")

    def _end_process(self, actor: SimActor) -> None:
        process, actor.process = actor.process, None
        if process is not None:
            process.killed()

    def _when_reached(self, host: Host, event: Callable[[], object]) -> None:
        def arrive() -> None:
            if host.cut_off:
                self.clock.after(0.5, arrive)
            else:
                event()

        self.clock.soon(arrive)

    def _deliver(self, actor: SimActor, call: Call) -> None:
        if call not in actor.pending:
            return
        if actor.dead:
            del actor.pending[call]
            call.fail(RayActorError())
            return
        process = actor.process
        if actor.host.cut_off or process is None or process.stopped:
            self.clock.after(0.2, lambda: self._deliver(actor, call))
            return
        try:
            answer = getattr(process, call.method)(*call.args, **call.named)
        except AssertionError:
            raise  # what must always hold does not
        except Exception as raised:
            error = raised
            self._answer(actor, call, lambda: call.fail(error))
            return
        if isinstance(answer, Later):
            answer.when_known(lambda give: self._answer(actor, call, lambda: give(call)))
        else:
            self._answer(actor, call, lambda: call.give(answer))

    def _answer(self, actor: SimActor, call: Call, give: Callable[[], None]) -> None:
        def arrive() -> None:
            if call in actor.pending:
                if actor.host.cut_off:
                    self.clock.after(0.5, arrive)
                    return
                del actor.pending[call]
                give()

        self.clock.soon(arrive)


class Later:
    """An answer that is not known yet."""

    def __init__(self) -> None:
        self._give: Callable[[Call], None] | None = None
        self._waiting: list[Callable[[Callable[[Call], None]], None]] = []

    def when_known(self, answer: Callable[[Callable[[Call], None]], None]) -> None:
        if self._give is not None:
            answer(self._give)
        else:
            self._waiting.append(answer)

    def known(self, result: Any) -> None:
        """A result, or an error to raise. Only the first counts."""
        if self._give is None:
            failed = isinstance(result, BaseException)
            give = self._give = lambda call: call.fail(result) if failed else call.give(result)
            for answer in self._waiting:
                answer(give)


class Handle:
    """A handle as `ray.get_actor` returns it."""

    def __init__(self, ray: SimRay, actor: SimActor) -> None:
        self._ray = ray
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = SimpleNamespace(remote=lambda *args, **named: self._ray.call(self.actor, name, args, named))
        method.options = lambda **_: method
        return method
