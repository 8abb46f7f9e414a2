"""What the coordinator tells those who watch a load: its events as they come, and where its chunks are now."""

from __future__ import annotations

import asyncio
import contextlib
import time

from actors.agent_link import PackedCalls
from actors.coordination import spawn
from actors.coordination.model_record import ModelRecord
from cluster.messages import unpack_message
from cluster.telemetry.chunk_map import ChunkMap, NodeChunks, NodeView, ShardChunks
from cluster.telemetry.event_log import LoadEvent

SAME_S = 0.5  # asked again within this, by whomever, the answer is the same
ANSWER_S = 2.0  # an agent that is well answers at once


async def events_after(record: ModelRecord, number: int, timeout_s: float) -> tuple[LoadEvent, ...]:
    """Events with a higher number; waits up to `timeout_s` for the first."""
    async with record.changed:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(record.changed.wait_for(lambda: bool(record.events.after(number))), timeout_s)
    return record.events.after(number)


class ChunkMaps:
    """The chunks of loads, as their agents see them. However many watch, an agent is asked once in SAME_S."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[float, asyncio.Task[ChunkMap]]] = {}  # model id -> (when, the answer)

    async def of(self, record: ModelRecord) -> ChunkMap:
        """Agents that do not answer, or do not know the load (yet), are in `silent_nodes`."""
        now_s = time.monotonic()
        self._asked = {model: asked for model, asked in self._asked.items() if now_s - asked[0] < SAME_S}
        if record.model_id not in self._asked:
            self._asked[record.model_id] = now_s, asyncio.get_running_loop().create_task(_ask(record))
        return await asyncio.shield(self._asked[record.model_id][1])


async def _ask(record: ModelRecord) -> ChunkMap:
    hosts = record.nodes
    answers = await asyncio.gather(*(_ask_node(record.model_id, node_id) for node_id in hosts), return_exceptions=True)
    shards: tuple[ShardChunks, ...] = ()
    told: list[NodeChunks] = []
    silent: list[str] = []
    for (node_id, host), answer in zip(hosts.items(), answers, strict=True):
        if isinstance(answer, BaseException):
            silent.append(host)
            continue
        shards, runs = answer
        told.append(NodeChunks(node_id, host, runs))
    return ChunkMap(
        record.model_id, sum(shard.chunk_count for shard in shards), shards, tuple(told), tuple(sorted(silent))
    )


async def _ask_node(model_id: str, node_id: str) -> NodeView:
    agent = await asyncio.to_thread(spawn.find_agent, node_id)
    if agent is None:
        raise TimeoutError
    packed = await asyncio.wait_for(PackedCalls(agent).chunks_now.remote(model_id), ANSWER_S)
    answer: NodeView = unpack_message(packed, "a node's agent", "the coordinator")
    return answer
