"""An agent ends after its node was unneeded for a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling.topology import READERS_AGENT_S, IdleNodes

looks = st.lists(st.tuples(st.floats(0, 5), st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc"))))


@given(looks)
def test_a_node_is_due_after_it_was_unneeded_for_so_long(found: list[tuple[float, set[str], set[str]]]) -> None:
    nodes, now_s = IdleNodes(4), 0.0
    since: dict[str, float] = {}
    for later_s, agents, needed in found:
        now_s += later_s
        since = {node: now_s if node in needed else since.get(node, now_s) for node in agents}
        assert nodes.due(agents, needed, now_s) == sorted(node for node in since if now_s - since[node] > 4)


def test_a_request_for_an_agent_restarts_its_idle_time() -> None:
    nodes = IdleNodes(4)
    assert nodes.due(["a", "b"], [], 0) == []
    nodes.needed("a", 3)
    assert nodes.due(["a", "b"], [], 5) == ["b"]
    assert nodes.due(["a"], [], 8) == ["a"]


def test_no_node_is_due_when_the_timeout_is_off() -> None:
    nodes = IdleNodes(0)
    nodes.due(["a"], [], 0)
    assert nodes.due(["a"], [], 1e9) == []


def test_an_agent_that_only_readers_used_ends_though_others_stay():
    nodes = IdleNodes(0)
    assert nodes.due({"a", "b"}, {"a"}, 0.0, {"a"}) == []
    assert nodes.due({"a", "b"}, set(), READERS_AGENT_S, {"a"}) == []
    assert nodes.due({"a", "b"}, set(), READERS_AGENT_S + 0.1, {"a"}) == ["a"]
