"""`cluster.telemetry.chunk_map`: letters and runs of chunks, against a plain implementation."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling.lease_queue import ChunkState, LeaseQueue
from cluster.telemetry.chunk_map import (
    LETTERS,
    NOT_NEEDED,
    ChunkMap,
    NodeChunks,
    ShardChunks,
    least_done,
    letters_of,
    runs_of,
    shards_of,
)
from cluster.telemetry.stats import NodeTraffic
from storage.checkpoints.model_index import ChunkTable, Shard

STATES = st.lists(st.sampled_from([None, *ChunkState]), max_size=60)


def as_text(states: list[ChunkState | None]) -> str:
    return "".join(NOT_NEEDED if state is None else LETTERS[state] for state in states)


def letters(states: list[ChunkState | None]) -> np.ndarray:
    return letters_of(len(states), [(chunk, state) for chunk, state in enumerate(states) if state is not None])


@given(STATES)
def test_runs_cover_every_letter(states: list[ChunkState | None]) -> None:
    runs = runs_of(letters(states))
    assert "".join(letter * count for count, letter in runs) == as_text(states)
    assert all(one[1] != other[1] for one, other in itertools.pairwise(runs))


@given(
    st.integers(0, 30).flatmap(
        lambda n: st.lists(
            st.lists(st.sampled_from([None, *ChunkState]), min_size=n, max_size=n), min_size=1, max_size=3
        )
    )
)
def test_the_least_finished_part_decides_the_letter(parts: list[list[ChunkState | None]]) -> None:
    order = "".join(LETTERS.values()) + NOT_NEEDED
    expected = "".join(min(column, key=order.index) for column in zip(*(as_text(part) for part in parts), strict=True))
    assert bytes(least_done([letters(part) for part in parts])).decode() == expected


def test_a_queue_maps_its_chunks_to_states() -> None:
    queue = LeaseQueue({0: np.array([1, 2, 4]), 1: np.array([2])})
    queue.leased(1, 0)
    queue.leased(2, 0)
    queue.committed(2)
    assert runs_of(letters_of(6, queue.states())) == ((1, "-"), (1, "l"), (1, "c"), (1, "-"), (1, "p"), (1, "-"))
    queue.placed(0, 2)
    queue.placed(1, 2)
    assert bytes(letters_of(6, queue.states())).decode() == "-ld-p-"


def test_shards_are_ranges_of_chunks() -> None:
    table = ChunkTable(np.array([0, 0, 2], np.int32), np.array([0, 5, 0]), np.array([5, 9, 3]), None, None)
    shards = [Shard(key, size, None) for key, size in (("a", 9), ("empty", 0), ("b", 3))]
    assert [(s.key, s.first_chunk, s.chunk_count) for s in shards_of(shards, table)] == [("a", 0, 2), ("b", 2, 1)]


TRAFFIC = NodeTraffic({"peer": 5, "arena": 1}, {"10.0.0.1": 2, "10.0.0.2": 3, "10.0.0.3": 1}, 7)


def test_traffic_adds_up_and_names_hosts() -> None:
    assert TRAFFIC + NodeTraffic({"peer": 1}, {"10.0.0.4": 1}, 1) == NodeTraffic(
        {"peer": 6, "arena": 1}, {**TRAFFIC.peer_bytes_from, "10.0.0.4": 1}, 8
    )
    named = TRAFFIC.named({"10.0.0.1": "gpu-1", "10.0.0.3": "gpu-1"})
    assert list(named.peer_bytes_from.items()) == [("gpu-1", 3), ("10.0.0.2", 3)]


def test_the_json_has_every_field() -> None:
    shards = (ShardChunks("a.safetensors", 30, 0, 3), ShardChunks("b.safetensors", 20, 3, 2))
    found = ChunkMap("m", 5, shards, (NodeChunks("n", "host", ((3, "d"), (2, "p")), TRAFFIC),), ("silent",))
    assert json.loads(json.dumps(found.as_dict())) == json.loads(json.dumps(asdict(found)))
