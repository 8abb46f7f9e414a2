"""One node in this process: a real agent over a real arena, ranks in threads, a store in memory. No Ray.

plan_of(objects, sizes) -> LoadPlan
LocalNode(folder, slots) -- begin(plan) --> loaders(plan, store) -- run_all --> reports or errors, by rank
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from actors.devices.cpu_device import CpuDevice
from actors.links import AgentLink
from actors.node.chunk_flow import NO_MEMBERS
from actors.node_agent import NodeAgent
from actors.rank.executor import RankLoader
from actors.rank.loader import PROCESS_ARENAS
from cluster.config import Config
from cluster.errors import AgentEnded, ClusterLost
from cluster.fit.needs import min_slots
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import read_model_config
from cluster.layouts.rules import rules_for
from cluster.messages import (
    ArenaAccess,
    FetchSettings,
    JoinReply,
    Members,
    NodeJob,
    Orders,
    RankHello,
    RankJob,
    RankUpdate,
)
from cluster.planning.make_plan import build_load_plan
from cluster.planning.packed_plan import pack_shared
from cluster.planning.plan import LoadPlan
from cluster.request import StoreAccess
from cluster.telemetry.report import NodeReport, RankReport
from storage.checkpoints.checkpoint import open_model
from storage.checkpoints.model_index import ModelIndex
from storage.checksum import digest_of
from storage.host.processes import ProcessId
from storage.store_ref import StoreRef
from storage.stores.object_store import MemoryStore, ObjectStore

HEARTBEAT_S = 0.05
SLOT_BYTES = 1 << 20


def plan_of(
    objects: Mapping[str, bytes],
    sizes: tuple[int, int, int] = (1, 1, 1),
    chunk_bytes: int = 4096,
    digests: bool = True,
    hash_name: str = "blake3",
) -> LoadPlan:
    """A plan for (tensor parallel, fully sharded, data parallel) `sizes`, its chunks with the digests of `objects`."""
    store = MemoryStore(dict(objects))
    index = open_model(store, chunk_bytes=chunk_bytes)
    if digests:
        index = with_digests(index, objects, hash_name)
    config = read_model_config(store, index) if sizes[0] > 1 else None
    return build_load_plan(index, Layout(*sizes), rules_for(config, None), config)


def with_digests(index: ModelIndex, objects: Mapping[str, bytes], hash_name: str = "blake3") -> ModelIndex:
    """The index with the chunks' digests, as a manifest would have them; chunks may be smaller than a manifest's."""
    chunks = index.chunks
    found = []
    for chunk in range(len(chunks)):
        span = chunks.byte_range(chunk)
        found.append(digest_of(hash_name, objects[index.shards[chunks.shard[chunk]].key][span.start : span.end]))
    table = np.frombuffer(b"".join(found), np.uint8).reshape(len(chunks), -1)
    return replace(index, chunks=replace(chunks, hash_name=hash_name, digests=table))


@dataclass
class Rank:
    """A loader and where its tensors are."""

    loader: RankLoader
    device: CpuDevice
    outcome: RankReport | BaseException | None = None

    def run(self) -> None:
        try:
            self.outcome = self.loader.run()
        except BaseException as error:
            self.outcome = error

    def tensor_bytes(self) -> dict[str, tuple[tuple[int, ...], bytes]]:
        """name -> (shape in elements of the dtype, bytes)."""
        import torch

        tensors = self.device.tensors(self.loader.plan.slices)
        shapes = {piece.name: piece.sizes for piece in self.loader.plan.slices}
        return {
            name: (shapes[name], tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, tensor in tensors.items()
        }


class LocalNode:
    """Settings are those of `Config`; its heartbeat is short, so that nothing waits long."""

    def __init__(
        self, folder: Path, slots: int, placement: str = "via_arena", is_local: bool = False, **settings: object
    ) -> None:
        self.folder = folder
        self.placement, self.is_local = placement, is_local
        values = {
            "arena_bytes": slots * SLOT_BYTES,
            "slot_bytes": SLOT_BYTES,
            "heartbeat_s": HEARTBEAT_S,
            "hedge_factor": 0.0,  # a slow machine is no reason to ask twice, where requests are counted
            **settings,
        }
        self.config = Config.model_validate(values)
        self.agent = self.start_agent()
        self.loads = 0

    def start_agent(self) -> NodeAgent:
        return NodeAgent(self.config, "cluster", "node", directory=str(self.folder))

    def crash(self) -> None:
        """The agent's process is gone between two messages: its mapping with it, the arena's file not."""
        agent = self.agent
        with agent._changed:  # calls under way end in the middle, as they would
            arena, agent._arena = agent._arena, None
            agent._stopped.set()
            agent._changed.notify_all()
        for thread in agent._threads:
            thread.join()
        if arena is not None:
            arena.close()

    def begin(
        self,
        plan: LoadPlan,
        load_id: str = "",
        ranks: Sequence[int] = (),
        done: Sequence[int] = (),
        store_identity: str = "twin",
        members: Members = NO_MEMBERS,
        **fields: object,
    ) -> str:
        """Start a load on the agent and wait for its slots. Return the load's id. `fields`: more of the job."""
        self.loads += not load_id
        load_id = load_id or f"load-{self.loads}"
        ranks = ranks or range(len(plan.ranks))
        job = NodeJob(
            load_id=load_id,
            attempt=1,
            shared=pack_shared(plan),
            store_identity=store_identity,
            ranks=tuple(ranks),
            done=frozenset(done),
            min_slots=min_slots(len(ranks)),
            chunk_attempts=self.config.chunk_attempts,
            lease_deadline_s=self.config.lease_deadline_s,
            record=b"",
            placement=self.placement,
            is_local=self.is_local,
            most_requests=self.config.fetch_threads,
            hedge_factor=self.config.hedge_factor,
            hedge_after_s=self.config.hedge_after_s,
            **fields,  # type: ignore[arg-type]
        )
        while not self.agent.begin(job, members.pack()):
            time.sleep(0.01)
        return load_id

    def job(self, plan: LoadPlan, load_id: str, rank: int, incarnation: int = 0) -> RankJob:
        fetch = FetchSettings(self.config.fetch_threads, self.config.fetch_attempts, 5.0, HEARTBEAT_S)
        access = StoreAccess(StoreRef("file", "", "/nowhere"))
        return RankJob(load_id, 1, rank, incarnation, pack_shared(plan), access, fetch, self.placement)

    def ranks(self, plan: LoadPlan, store: ObjectStore, load_id: str, link: AgentLink | None = None) -> list[Rank]:
        """A loader for every rank of the plan, not yet running."""
        return [self.rank(plan, store, load_id, rank, link=link) for rank in range(len(plan.ranks))]

    def rank(
        self,
        plan: LoadPlan,
        store: ObjectStore,
        load_id: str,
        rank: int,
        *,
        incarnation: int = 0,
        link: AgentLink | None = None,
    ) -> Rank:
        device = CpuDevice()
        job = self.job(plan, load_id, rank, incarnation)
        return Rank(RankLoader(link or self.agent, job, device, store=store), device)

    def load(self, plan: LoadPlan, store: ObjectStore, store_identity: str = "twin") -> tuple[list[Rank], NodeReport]:
        """Begin and run all ranks; raises the first error of any."""
        load_id = self.begin(plan, store_identity=store_identity)
        ranks = self.ranks(plan, store, load_id)
        run_all(ranks)
        for rank in ranks:
            if isinstance(rank.outcome, BaseException):
                raise rank.outcome
        return ranks, self.agent.report(load_id)


@contextmanager
def local_node(folder: Path, slots: int, **settings: object) -> Iterator[LocalNode]:
    """A node that is shut down at the end."""
    node = LocalNode(folder, slots, **settings)
    try:
        yield node
    finally:
        node.agent.shutdown()


def start_all(ranks: Sequence[Rank]) -> list[threading.Thread]:
    threads = [threading.Thread(target=rank.run) for rank in ranks]
    for thread in threads:
        thread.start()
    return threads


def run_all(ranks: Sequence[Rank]) -> None:
    """Every rank in a thread, until all have ended."""
    for thread in start_all(ranks):
        thread.join()


@dataclass
class SwitchedLink:
    """A link to an agent that can be cut, and later leads to another agent."""

    agent: NodeAgent
    cut: threading.Event = field(default_factory=threading.Event)
    calls: int = 0
    lose_answer: int = 0  # so many answers of exchanges get lost after the agent has acted on the message

    def join(self, hello: RankHello) -> JoinReply:
        self._check()
        return self.agent.join(hello)

    def exchange(self, update: RankUpdate) -> Orders:
        self._check()
        self.calls += 1
        try:
            orders = self.agent.exchange(update)
        except AgentEnded as error:
            raise ClusterLost("the agent is gone") from error
        if self.lose_answer > 0:
            self.lose_answer -= 1
            raise ClusterLost("the answer got lost")
        return orders

    def check_in(self, process: ProcessId, access: ArenaAccess) -> float:
        self._check()
        return self.agent.check_in(process, access)

    def _check(self) -> None:
        if self.cut.is_set():
            raise ClusterLost("the link is cut")


ENDED_S = 5.0  # by then a thread that has ended has let go of what its frames held


class Belongings:
    """Threads, open files and mapped arenas of this process, to be compared after a test."""

    def __init__(self) -> None:
        self.threads = {thread.ident for thread in threading.enumerate()}
        self.files = _open_files()
        self.arenas = _mapped_arenas()

    def check(self) -> None:
        """Raise AssertionError with whatever is left and was not there before."""
        threads = [thread.name for thread in threading.enumerate() if thread.ident not in self.threads]
        assert not threads, f"threads left: {threads}"
        PROCESS_ARENAS.keep(False)  # what a warm process keeps is no leak
        give_up_s = time.monotonic() + ENDED_S
        while (_open_files() - self.files or _mapped_arenas() > self.arenas) and time.monotonic() < give_up_s:
            gc.collect()
            time.sleep(0.01)
        files = _open_files() - self.files
        assert not files, f"files left open: {files}"
        assert _mapped_arenas() <= self.arenas


def _open_files() -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{entry}").partition(":[")[0]] += 1
    return found


def _mapped_arenas() -> int:
    return sum("longshore-arena" in line for line in Path("/proc/self/maps").read_text().splitlines())
