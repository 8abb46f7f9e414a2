"""Readers on several nodes share a model out, with real agents and sockets: the store sends each byte once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.coordination import agent_watch
from actors.coordination.agent_watch import LenderLists
from actors.node import lending
from actors.node.lending import Lending, LendingFacts, Order, model_key
from actors.node.peer_routes import FAN_OUT
from actors.node_agent import NodeAgent
from actors.rank.state import RankIdentity
from actors.reader.model_reader import ModelReader
from cluster.messages import AgentBeat, BeatReply, FetchSettings, Lends
from cluster.planning.packed_plan import SharedTables
from cluster.scheduling.topology import sending_weights
from storage.checkpoints.checkpoint import open_model
from storage.host.processes import ProcessId
from storage.peers import Peer
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import flat_objects
from tests.support.faulty_stores import WrappedStore
from tests.support.local_node import LocalNode, plan_of, run_all

pytestmark = pytest.mark.slow

CHUNK_BYTES = 4096
MODEL = b"model"


class ListKeeper:
    """The coordinator's part: it tells agents which others read the same model, as `AgentWatch` does."""

    def __init__(self) -> None:
        self.lists = LenderLists(1)
        self.agents: dict[str, NodeAgent] = {}
        self._lock = threading.Lock()

    def heartbeat(self, beat: AgentBeat) -> BeatReply:
        with self._lock:
            self.lists.note(beat.node_id, beat.peer, beat.lends)
            news, newer = self.lists.news(), self.lists.newer(beat.lends)
        for node_id, lists in news.items():
            self.agents[node_id].use_lenders(lists)
        return BeatReply("coordinator", lenders=newer)


class Node(LocalNode):
    """A node whose agent has a coordinator."""

    def __init__(self, keeper: ListKeeper, node_id: str, folder: Path, slots: int, **settings: object) -> None:
        self.keeper, self.node_id = keeper, node_id
        super().__init__(folder, slots, peer_port=0, **settings)

    def start_agent(self) -> NodeAgent:
        agent = NodeAgent(self.config, "cluster", self.node_id, coordinator=self.keeper, directory=str(self.folder))
        self.keeper.agents[self.node_id] = agent
        agent.serve_peers("127.0.0.1")
        return agent


class Nodes:
    """Nodes that read one model, each with one reader."""

    def __init__(self, nodes: list[Node], digests: bool) -> None:
        self.nodes, self.objects = nodes, flat_objects(64, 2048)
        self.plan = plan_of(self.objects, (1, 1, 1), CHUNK_BYTES, digests)
        self.tensors = open_model(MemoryStore(self.objects), chunk_bytes=CHUNK_BYTES).tensors
        self.store = WrappedStore(MemoryStore(self.objects))
        self.failed: list[BaseException] = []

    def open(self, node: Node, group_patience_s: float = 5.0) -> ModelReader:
        about = self.plan, f"reader-{node.node_id}"
        load_id = node.begin(*about, on_demand=True, group_patience_s=group_patience_s)
        return ModelReader(
            node.agent,
            SharedTables(self.plan.shards, self.plan.chunks, self.plan.cut),
            self.plan.ranks[0].chunk_ids.tolist(),
            RankIdentity(load_id, 1, 0, 0, ProcessId.current()),
            self.store,
            FetchSettings(4, node.config.fetch_attempts, 5.0, 0.05),
            ahead_bytes=8 << 20,
        )

    def read(self, reader: ModelReader) -> None:
        try:
            for tensor in self.tensors:
                found = reader.read(tensor, tensor.shape, (0,) * len(tensor.shape), tensor.shape)
                data = self.objects[self.plan.shards[tensor.shard].key][tensor.start : tensor.end]
                assert found.tobytes() == data, tensor.name
        except BaseException as error:
            self.failed.append(error)

    def read_all(self) -> None:
        """Let a reader on each node read the whole model, at one time, and check that the store sent it once."""
        readers = [self.open(node) for node in self.nodes]
        work = [threading.Thread(target=self.read, args=(reader,)) for reader in readers]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        reports = [node.agent.report(f"reader-{node.node_id}") for node in self.nodes]
        for reader in readers:
            reader.close()
        assert self.failed == []
        assert self.store.read_bytes == self.read_once_bytes, [report.retries for report in reports]
        assert all(report.peer_bytes > self.read_once_bytes / 5 for report in reports)
        # Their next loads know how fast these nodes send.
        assert all(node.agent.facts().peer_measured_bytes_per_s > 0 for node in self.nodes)

    @property
    def read_once_bytes(self) -> int:
        needed = self.plan.ranks[0].chunk_ids
        return int(self.plan.chunks.sizes_bytes()[needed].sum())


@pytest.fixture
def nodes_of(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    with ExitStack() as stack:

        def make(count: int, slots: int, *, digests: bool = True, **settings: object) -> Nodes:
            keeper, nodes = ListKeeper(), []
            for number in range(count):
                (folder := tmp_path / f"node-{number}").mkdir()
                nodes.append(Node(keeper, f"node-{number}", folder, slots, **settings))
                stack.callback(nodes[-1].agent.shutdown)
            return Nodes(nodes, digests)

        yield make


@pytest.mark.parametrize("slots", [24, 300])
@pytest.mark.parametrize("count", [2, 3])
def test_readers_on_several_nodes_read_the_store_once(nodes_of: Callable[..., Nodes], count: int, slots: int):
    nodes_of(count, slots).read_all()


def test_chunks_without_digests_travel_with_one(nodes_of: Callable[..., Nodes]):
    nodes_of(2, 300, digests=False).read_all()


def test_a_reader_that_does_not_read_holds_nobody_up(nodes_of: Callable[..., Nodes]):
    """The second node has opened the model and reads nothing. The first waits for no chunk of it for long."""
    nodes = nodes_of(2, 24)
    first, second = (nodes.open(node, group_patience_s=1.0) for node in nodes.nodes)
    nodes.read(first)
    assert nodes.failed == []
    second.close()
    first.close()


def test_a_node_whose_readers_were_stopped_is_not_waited_for(
    nodes_of: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
):
    """The second node's reader says nothing. Not even a reader to which nothing has come yet waits for it for ever."""
    monkeypatch.setattr(lending, "SILENT_S", 0.2)
    nodes = nodes_of(2, 24)
    nodes.nodes[1].begin(nodes.plan, "reader-node-1", on_demand=True)
    first = nodes.open(nodes.nodes[0])
    nodes.read(first)
    first.close()
    assert nodes.failed == []
    assert nodes.store.read_bytes == nodes.read_once_bytes


def test_a_node_that_has_read_all_still_lends(nodes_of: Callable[..., Nodes]):
    nodes = nodes_of(2, 1000)
    first, second = (nodes.open(node) for node in nodes.nodes)
    nodes.read(first)
    first.close()
    nodes.read(second)
    second.close()
    assert nodes.failed == []
    assert nodes.store.read_bytes == nodes.read_once_bytes


def test_hosted_ranks_on_two_nodes_read_the_store_once(nodes_of: Callable[..., Nodes]):
    """Each is a load of its own, which no coordinator has planned."""
    nodes = nodes_of(2, 1000)
    ranks = []
    for node in nodes.nodes:
        load_id = node.begin(nodes.plan, f"hosted-{node.node_id}", process=ProcessId.current())
        ranks.append(node.rank(nodes.plan, nodes.store, load_id, 0))
    run_all(ranks)
    assert not [rank.outcome for rank in ranks if isinstance(rank.outcome, BaseException)]
    assert ranks[0].tensor_bytes() == ranks[1].tensor_bytes()
    assert nodes.store.read_bytes == nodes.read_once_bytes


def test_a_node_that_ends_is_left_for_the_store(nodes_of: Callable[..., Nodes]):
    nodes = nodes_of(3, 24)
    readers = [nodes.open(node) for node in nodes.nodes]
    server = nodes.nodes[2].agent._chunk_server
    assert server is not None
    work = [threading.Thread(target=nodes.read, args=(reader,)) for reader in readers]
    for thread in work:
        thread.start()
    while not server.sent_bytes and any(thread.is_alive() for thread in work):
        threading.Event().wait(0.001)
    server.close()
    for thread in work:
        thread.join()
    for reader in readers:
        reader.close()
    assert nodes.failed == []
    assert nodes.store.read_bytes < 3 * nodes.read_once_bytes


# --- the pure parts ------------------------------------------------------------------------------------------

weights = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=4), st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=12
)


@given(weights, st.integers(0, 10_000), st.data())
def test_nodes_never_wait_for_each_other_in_a_circle(all_weights: dict[str, float], chunk: int, data: st.DataObject):
    """Each node knows some of the others, and has left some out: it asks only nodes before it in the one order."""
    whole = Order(min(all_weights), MODEL)
    whole.use(all_weights)
    order = whole.of(chunk)
    for node in all_weights:
        known = data.draw(st.sets(st.sampled_from(sorted(all_weights)))) | {node}
        mine = Order(node, MODEL)
        mine.use({each: all_weights[each] for each in known})
        out = data.draw(st.sets(st.sampled_from(sorted(all_weights)))) - {node}
        asked = mine.before(chunk, out)
        assert all(order.index(each) < order.index(node) for each in asked)
        assert all(mine.is_before(each, chunk) for each in asked)
        assert not set(asked) & out
        assert all(order.index(each) > order.index(node) for each in mine.after(chunk, out))
        assert len(mine.after(chunk, set())) <= FAN_OUT


def test_each_node_is_the_home_of_its_share():
    homes = Order("a", MODEL)
    homes.use({"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.0})
    count = {node: sum(homes.of(chunk)[0] == node for chunk in range(5000)) for node in "abcd"}
    assert 0.37 < count["a"] / 5000 < 0.43
    assert 0.17 < count["c"] / 5000 < 0.23
    assert count["d"] == 0


def test_lists_name_the_nodes_that_read_a_model_and_change_when_these_do():
    lists, rates = LenderLists(1), {"a": 8e9, "b": 1e9, "c": 0.0}
    peers = {node: Peer("10.0.0.1", 1, node) for node in "abc"}
    lends = {node: (Lends(f"load-{node}", MODEL, node.encode(), (rate, 0.0)),) for node, rate in rates.items()}
    lists.note("a", peers["a"], lends["a"])
    lists.note("b", peers["b"], lends["b"])
    told = lists.news()
    (found,) = told["a"]
    assert [(each.node_id, each.weight) for each in found.lenders] == [("a", 1.0), ("b", 0.0)]  # b only receives
    assert lists.newer(lends["b"]) == (found,)
    lists.note("b", peers["b"], lends["b"])
    assert not lists.has_news
    assert lists.news() == {}
    lists.note("c", peers["c"], lends["c"])
    assert set(lists.news()) == {"a", "b", "c"}
    lists.keep(["a", "b"])
    (found,) = lists.newer(lends["a"])
    assert [each.node_id for each in found.lenders] == ["a", "b"]


def a_lending() -> Lending:
    """Return the part of a node `a` that has nothing yet."""
    nothing: Any = None
    return Lending(
        LendingFacts("a", MODEL, b"key", (0.0, 0.0)),
        ("load-a", 0),
        nothing,
        nothing,
        nothing,
        needs_digest=False,
        fetch=lambda _: False,
        heard_s=lambda: 0.0,
    )


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans(), st.booleans()), max_size=60), st.data())
@settings(max_examples=200, deadline=None)
def test_a_node_that_gets_only_changes_has_the_whole_list(steps: list[tuple[str, bool, bool]], data: st.DataObject):
    """Lists come late, twice, or not at all; in between there is a new coordinator; few gone nodes are remembered."""
    lists, lending, late = LenderLists(1), a_lending(), []
    there: dict[str, Lends] = {}
    with mock.patch.object(agent_watch, "_MOST_GONE", 2):
        for number, (node, reads, is_there) in enumerate([*steps, ("a", True, True)]):
            if is_there:
                there[node] = Lends(f"load-{node}", MODEL, b"key", reads=reads)
            else:
                there.pop(node, None)
            if data.draw(st.integers(0, 9)) == 0:
                lists = LenderLists(1000 * (number + 1))
                for each, lends in there.items():
                    lists.note(each, Peer("10.0.0.1", 1, each), (lends,))
            lists.note(node, Peer("10.0.0.1", 1, node), (there[node],) if is_there else ())
            late += lists.newer([replace(there["a"], version=lending.version)]) if "a" in there else []
            for found in data.draw(st.permutations(late[-3:])):
                if data.draw(st.booleans()):
                    lending.use_lenders(found)
        for found in lists.newer([replace(there["a"], version=lending.version)]):
            lending.use_lenders(found)
    reading = [each for each, lends in there.items() if lends.reads]
    assert sorted(lending._order.of(0)) == sorted(reading)
    assert lending._lenders.keys() == there.keys() - {"a"}


def test_one_node_that_comes_costs_the_others_one_line():
    """A thousand nodes know each other; one more comes, and each of them gets it alone."""
    lists = LenderLists(1)
    for number in range(1000):
        lists.note(f"n{number}", Peer("10.0.0.1", 1, f"n{number}"), (Lends("load", MODEL, b"key"),))
    version = lists.newer([Lends("load", MODEL, b"key")])[0].version
    lists.note("next", Peer("10.0.0.1", 1, "next"), (Lends("load", MODEL, b"key"),))
    (found,) = lists.newer([Lends("load", MODEL, b"key", version=version)])
    assert [each.node_id for each in found.lenders] == ["next"]


def test_a_node_that_was_measured_to_be_slow_only_receives_in_the_next_load():
    """Measured rates change no weight otherwise, and a rate that is set is the user's word."""
    measured = {"a": 4e9, "b": 0.9e9, "c": 3.9e9, "d": 0.0, "e": 1.1e9, "f": 4.1e9}
    rates = {node: (0.0, rate) for node, rate in measured.items()}
    assert sending_weights(rates) == {"a": 1.0, "b": 0.0, "c": 1.0, "d": 1.0, "e": 1.0, "f": 1.0}
    assert sending_weights({**rates, "b": (1e9, 0.9e9)})["b"] == 1.0
    lists, found = LenderLists(1), {}
    for node, pair in rates.items():
        lists.note(node, Peer("10.0.0.1", 1, node), (Lends(f"load-{node}", MODEL, b"key", pair),))
        found = lists.news()
    assert {each.node_id for each in found["a"][0].lenders if not each.weight} == {"b"}


def test_only_loads_of_the_same_bytes_share_a_key():
    objects = flat_objects(8, 64)
    plans = [plan_of(objects, (1, 1, 1), size) for size in (4096, 4096, 512)]
    first, same, other = (SharedTables(plan.shards, plan.chunks, plan.cut) for plan in plans)
    assert model_key(first, "store") == model_key(same, "store")
    assert len({model_key(first, "store"), model_key(first, "another"), model_key(other, "store")}) == 3
