"""One Ray task on every node, and what Ray says of nodes. `ray` is the module, joined."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from cluster.errors import ClusterError
from storage.errors import LongshoreError


def unwrapped(error: BaseException) -> LongshoreError:
    """The typed error in what a remote call raised; what nobody foresaw becomes a ClusterError that names it."""
    # The cause first: Ray's own wrapper is of the cause's class too, says a traceback and does not pickle.
    for found in (getattr(error, "cause", None), error):
        if isinstance(found, LongshoreError):
            return found
    cause = getattr(error, "cause", None) or error
    return ClusterError("a remote call failed", cause=f"{type(cause).__name__}: {cause}"[:500])


T = TypeVar("T")
Node = dict[str, Any]  # of `ray.nodes()`

UNEXPECTED = 2  # reason of a node's death, as Ray numbers them; others: it was drained, or ended in order
_GONE = ("TaskUnschedulableError", "NodeDiedError", "LocalRayletDiedError")  # Ray's, while it gives a node up


def living_nodes(ray: Any) -> list[Node]:
    """In the order of their hosts."""
    nodes: list[Node] = [node for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))


def lost_nodes(ray: Any) -> list[Node]:
    """Those that ended unasked, and whose hosts have no living one."""
    nodes: list[Node] = ray.nodes()
    living = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    lost = [node for node in nodes if not node["Alive"] and node.get("DeathReason") == UNEXPECTED]
    return [node for node in lost if node["NodeManagerAddress"] not in living]


def why_no_answer(error: BaseException) -> str:
    """In one line: what `on_every_node` had instead of an answer."""
    if type(error).__name__ in _GONE:
        return "Ray can run nothing there: the node is about to be given up"
    typed = unwrapped(error)
    if isinstance(getattr(error, "cause", error), LongshoreError):
        return str(typed).replace("\n", " ")
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def on_every_node(
    ray: Any, asked: Iterable[tuple[Node, tuple[Any, ...]]], work: Callable[..., T], timeout_s: float
) -> Iterator[tuple[Node, T | BaseException]]:
    """Run `work` with its arguments on each node, all at once; its answer, or why there is none, in the nodes' order.

    The tasks take no resource, so they run on a busy node too. A node that does not answer within `timeout_s` answers
    with a TimeoutError, and its task is cancelled.
    """
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    task = ray.remote(num_cpus=0, max_retries=0)(work)
    begun = {}
    for node, arguments in asked:
        only_there = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        begun[task.options(scheduling_strategy=only_there).remote(*arguments)] = node
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
