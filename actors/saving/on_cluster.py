"""A conversion whose parts are made on the nodes of a Ray cluster.

    convert(on_cluster=True) --> ClusterParts --begin--> ConvertWorker: an actor on each node, with THREADS threads
                                              --make---> one unit -> PartDone of each part, with its record

A unit is a part, or a file where the store needs its parts in order. A worker has THREADS of them at a time. When it
is lost, with its node or alone, another takes its units and its place.
The actors belong to the process that converts, so Ray ends them when that ends, however it does.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actors.saving.conversion import THREADS, Conversion, PartDone, PartMaker, PartPlace, Place, Unit
from actors.saving.writer import Begun
from cluster.config import Config
from cluster.errors import ClusterLost, ConfigError, SaveError
from cluster.joining.connection import join_cluster
from cluster.joining.node_tasks import living_nodes, only_on, unwrapped
from cluster.joining.patience import HeadWatch, lost_after_s
from cluster.joining.ray_join import address_of
from cluster.messages import pack_message, unpack_message
from storage.checkpoints.checkpoint_files import SAVE_JOURNAL_KEY
from storage.errors import LongshoreError, ObjectNotFound
from storage.stores.object_store import ObjectStore
from storage.stores.requests import RetryPolicy, with_retries

LOOK_S = 1.0  # between checks of the head, while no part is finished
MAX_LOSSES = 3  # of the workers that had the same part, or of those that did not start, one after another


class ConvertWorker:
    """The parts of one actor. Its calls run in THREADS threads."""

    def __init__(self) -> None:
        self._maker: PartMaker | None = None

    def begin(self, places: bytes, plan: bytes, node: str) -> None:
        """Open the stores, and check that this node sees what the process that converts sees.

        Args:
            places: The packed source and result.
            plan: The packed conversion, and what its writers need.
            node: The name of this node, for messages.

        Raises:
            ConfigError: The node does not see a store.
            StoreError: A store does not answer, or refuses.
            VersionMismatch: This node has another version of Longshore.
        """
        source, dest = unpack_message(places, "the process that converts", f"node {node}")
        conversion, begun = unpack_message(plan, "the process that converts", f"node {node}")
        reads, writes = source.open(), dest.open()
        for store, keys in ((reads, sorted(conversion.files)[:1]), (writes, [SAVE_JOURNAL_KEY])):
            _check_seen(store, keys, node)
        self._maker = PartMaker(reads, writes, conversion, begun)

    def make(self, *unit: PartPlace) -> list[PartDone]:
        """Make the parts of one unit. Raises StoreError, SaveError."""
        if self._maker is None:
            raise SaveError("a worker of the conversion has not begun", part=unit[0])
        return [self._maker.make(place) for place in unit]


def _check_seen(store: ObjectStore, keys: Sequence[str], node: str) -> None:
    for key in keys:
        try:
            with_retries(partial(store.stat, key), RetryPolicy())
        except ObjectNotFound as error:
            raise ConfigError(
                f"node {node} does not see {store.uri}, so it cannot convert",
                hint="with on_cluster, source and result are in an object store, or in folders that all nodes share",
                key=key,
            ) from error


@dataclass(eq=False)
class _Worker:
    """An actor as the process that converts sees it."""

    actor: Any
    node: dict[str, Any]
    ready: bool = False
    calls: dict[Any, Unit | None] = field(default_factory=dict)  # reference -> unit; None: `begin`


class ClusterParts:
    """The workers of one conversion: a `RunParts`."""

    def __init__(self, address: str | None, workers: int | None, config: Config) -> None:
        """Join the running cluster.

        Args:
            address: HOST:PORT of its head. None: RAY_ADDRESS, else a cluster that runs on this machine.
            workers: Number of actors, spread over the nodes. None: one for each node.
            config: The settings of this process.

        Raises:
            ClusterLost: There is no cluster, or it does not answer.
        """
        self._ray, self._launch = join_cluster(address)
        self._config = config
        self.workers = workers or len(living_nodes(self._ray))
        self._lost: Counter[str] = Counter()  # by node
        self._failed_starts = 0

    def __call__(
        self,
        source: Place,
        dest: Place,
        conversion: Conversion,
        begun: Begun,
        units: Sequence[Unit],
        finished: Callable[[PartDone], object],
    ) -> None:
        """Make all parts. Workers that are lost are replaced. All end with this call.

        Raises:
            SaveError: A part was lost with MAX_LOSSES workers.
            ConfigError: A node does not see source or result.
            ClusterLost, PackageMissing, VersionMismatch: The cluster cannot run it.
            StoreError: As a worker raised it.
        """
        ray = self._ray
        # Ray keeps large objects in shared memory and may spill them to disk, so the places, with keys, are no object.
        begin = (pack_message((source, dest)), ray.put(pack_message((conversion, begun))))
        waiting = deque(units)
        losses: Counter[Unit] = Counter()
        workers: list[_Worker] = []
        head = HeadWatch(address_of(ray), lost_after_s(self._config.cluster_lost_after_s))
        try:
            for _ in range(min(self.workers, len(units))):
                workers.append(self._start(workers, begin))
            while waiting or any(unit is not None for one in workers for unit in one.calls.values()):
                for worker in workers:
                    while worker.ready and waiting and len(worker.calls) < THREADS:
                        unit = waiting.popleft()
                        worker.calls[worker.actor.make.remote(*unit)] = unit
                calls = {reference: one for one in workers for reference in one.calls}
                answered, _ = ray.wait(list(calls), timeout=LOOK_S)
                if not answered:
                    head.check()
                for reference in answered:
                    worker = calls[reference]
                    if worker not in workers:
                        continue  # it was lost with another of its calls
                    done = self._answer(worker, reference)
                    if isinstance(done, BaseException):
                        workers.remove(worker)
                        back = [unit for unit in worker.calls.values() if unit is not None]
                        waiting.extendleft(reversed(back))
                        losses.update(back)
                        self._give_up(losses, done)
                        workers.append(self._start(workers, begin))
                    else:
                        for part in done:
                            finished(part)
        finally:
            head.close()
            for worker in workers:
                self._end(worker)

    def _start(self, workers: Sequence[_Worker], begin: tuple[Any, ...]) -> _Worker:
        """Start an actor on the node that has the fewest, of those where the fewest were lost."""
        count = Counter(one.node["NodeID"] for one in workers)
        nodes = living_nodes(self._ray)
        if not nodes:
            raise ClusterLost("the Ray cluster has no living node")
        node = min(nodes, key=lambda node: (self._lost[node["NodeID"]], count[node["NodeID"]]))
        actor = (
            self._ray.remote(ConvertWorker)
            .options(num_cpus=0, max_concurrency=THREADS, scheduling_strategy=only_on(node))
            .remote()
        )
        worker = _Worker(actor, node)
        worker.calls[actor.begin.remote(*begin, node["NodeManagerHostname"])] = None
        return worker

    def _answer(self, worker: _Worker, reference: Any) -> list[PartDone] | BaseException:
        """Return what a call has done, nothing for `begin`, or the error with which the worker was lost.

        Raises what the worker raised.
        """
        ray = self._ray
        unit = worker.calls[reference]
        try:
            done: list[PartDone] = ray.get(reference) or []
        except ray.exceptions.RayTaskError as error:
            if unit is None and not isinstance(getattr(error, "cause", None), LongshoreError):
                raise self._launch.diagnosed(error, "a worker of the conversion could not start") from error
            raise unwrapped(error) from None
        except ray.exceptions.RayError as error:
            self._lost[worker.node["NodeID"]] += 1
            self._failed_starts = 0 if worker.ready else self._failed_starts + 1
            self._end(worker)
            lost: BaseException = error
            return lost
        del worker.calls[reference]
        worker.ready = True
        return done

    def _give_up(self, losses: Counter[Unit], error: BaseException) -> None:
        """Raise when it is of no use to go on."""
        if self._failed_starts >= MAX_LOSSES:
            raise self._launch.diagnosed(error, "a worker of the conversion could not start") from error
        if losses and max(losses.values()) >= MAX_LOSSES:
            raise SaveError(
                f"a part was lost with {MAX_LOSSES} workers, maybe for lack of memory",
                hint="run the same command again, with fewer workers; it continues where this one stopped",
                cause=str(error)[:300],
            ) from error

    def _end(self, worker: _Worker) -> None:
        with contextlib.suppress(Exception):  # it has ended, or the cluster has
            self._ray.kill(worker.actor)
