"""When an agent that nobody needs is to end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling.warm_pool import IdleNodes

looks = st.lists(st.tuples(st.floats(0, 5), st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc"))))


@given(looks)
def test_only_a_node_that_was_not_needed_for_so_long_is_due(found: list[tuple[float, set[str], set[str]]]) -> None:
    nodes, now_s = IdleNodes(4), 0.0
    since: dict[str, float] = {}
    for later_s, agents, needed in found:
        now_s += later_s
        since = {node: now_s if node in needed else since.get(node, now_s) for node in agents}
        assert nodes.due(agents, needed, now_s) == sorted(node for node in since if now_s - since[node] > 4)


def test_who_asks_for_an_agent_finds_it_at_work() -> None:
    nodes = IdleNodes(4)
    assert nodes.due(["a", "b"], [], 0) == []
    nodes.needed("a", 3)
    assert nodes.due(["a", "b"], [], 5) == ["b"]
    assert nodes.due(["a"], [], 8) == ["a"]


def test_off_is_never() -> None:
    nodes = IdleNodes(0)
    nodes.due(["a"], [], 0)
    assert nodes.due(["a"], [], 1e9) == []
