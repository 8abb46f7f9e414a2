"""Ray tasks and actors on every node, and Ray's list of nodes. `ray` is the module, already connected."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar

from cluster.errors import ClusterError
from storage.errors import LongshoreError


def unwrapped(error: BaseException) -> LongshoreError:
    """Return the typed error in the exception of a remote call. An unexpected one becomes a ClusterError."""
    # Check the cause first. Ray's wrapper is of the cause's class too, but has a traceback in it and does not pickle.
    for found in (getattr(error, "cause", None), error):
        if isinstance(found, LongshoreError):
            return found
    cause = getattr(error, "cause", None) or error
    return ClusterError("a remote call failed", cause=f"{type(cause).__name__}: {cause}"[:500])


T = TypeVar("T")
Node = dict[str, Any]  # an entry of `ray.nodes()`

UNEXPECTED = 2  # Ray's number for an unexpected death; others mean a drain or an orderly end
# Errors that Ray raises while it declares a node dead.
_GONE = ("TaskUnschedulableError", "NodeDiedError", "LocalRayletDiedError")


def living_nodes(ray: Any) -> list[Node]:
    """Return the living nodes, in the order of their hosts."""
    nodes: list[Node] = [node for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))


def lost_nodes(ray: Any) -> list[Node]:
    """Return the nodes that ended unexpectedly, and whose hosts have no living node."""
    nodes: list[Node] = ray.nodes()
    living = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    lost = [node for node in nodes if not node["Alive"] and node.get("DeathReason") == UNEXPECTED]
    return [node for node in lost if node["NodeManagerAddress"] not in living]


def why_no_answer(error: BaseException) -> str:
    """Return in one line why `on_every_node` got no answer."""
    if type(error).__name__ in _GONE:
        return "Ray cannot run tasks on the node; it will soon declare the node dead"
    typed = unwrapped(error)
    if isinstance(getattr(error, "cause", error), LongshoreError):
        return str(typed).replace("\n", " ")
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def on_every_node(
    ray: Any, asked: Iterable[tuple[Node, tuple[Any, ...]]], work: Callable[..., T], timeout_s: float
) -> Iterator[tuple[Node, T | BaseException]]:
    """Run `work` with its arguments on each node, all at once. Yield its answers or exceptions in the nodes' order.

    The tasks take no resource, so they run on a busy node too. A node that does not answer within `timeout_s` answers
    with a TimeoutError, and its task is cancelled.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(work)
    begun = {task.options(scheduling_strategy=only_on(node)).remote(*arguments): node for node, arguments in asked}
    yield from _answers(ray, begun, timeout_s)


class NodeActors:
    """One actor on each node, for work of several calls. A context manager: the actors end with it.

    The actors take no resource, so they run on a busy node too.
    """

    def __init__(self, ray: Any, nodes: Iterable[Node], actor_class: type) -> None:
        """`actor_class`: made without arguments on each node."""
        self._ray = ray
        actor = ray.remote(num_cpus=0)(actor_class)
        self._actors = {node["NodeID"]: actor.options(scheduling_strategy=only_on(node)).remote() for node in nodes}

    def call(
        self, method: str, asked: Iterable[tuple[Node, tuple[Any, ...]]], timeout_s: float
    ) -> Iterator[tuple[Node, Any]]:
        """Call the method with its arguments on each node, as `on_every_node` runs a function."""
        begun = {getattr(self._actors[node["NodeID"]], method).remote(*arguments): node for node, arguments in asked}
        yield from _answers(self._ray, begun, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                self._ray.kill(actor)


def only_on(node: Node) -> Any:
    """Return the scheduling strategy of what runs on this node or nowhere."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def _answers(ray: Any, begun: Mapping[Any, Node], timeout_s: float) -> Iterator[tuple[Node, Any]]:
    if not begun:
        return
    answered, _ = ray.wait(list(begun), num_returns=len(begun), timeout=timeout_s)
    for reference, node in begun.items():
        if reference not in answered:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)
            yield node, TimeoutError(f"no answer in {timeout_s:.0f} s")
            continue
        try:
            answer = ray.get(reference)
        except Exception as error:
            yield node, error
        else:
            yield node, answer
