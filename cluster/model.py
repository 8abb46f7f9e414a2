"""A loaded model, as a client holds it, and calls of functions on its ranks.

A call waits for all ranks at once, with one time limit. The first failure ends the wait, whatever the other ranks do:
they may wait forever in a collective for the rank that failed. Then Ray is asked to cancel the remaining calls, and
their workers are asked never to begin them: Ray does not say when a cancellation has reached a worker.

`load_in_thread` and `in_thread` make the asyncio twins of public functions:

    aload = load_in_thread(load)
    async with aload("s3://b/m") as model: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.errors import (
    CallTimeout,
    ClusterLost,
    ConfigError,
    LoadTimeout,
    ModelNotFound,
    RankLost,
    RankRemoved,
    RemoteCallFailed,
)
from cluster.joining.connection import LOOK_S, Connection
from cluster.joining.node_tasks import unwrapped
from cluster.joining.patience import Patience, checked_timeout
from cluster.request import StoreOptions
from cluster.telemetry.report import LoadReport
from cluster.telemetry.scale_report import ScaleReport
from cluster.telemetry.update_report import UpdateReport
from cluster.updating import UpdateOptions, scale_on, update_on
from cluster.user_values import BATCH_BYTES, Cursor, Packed, TensorBatch, pack_call, result_of, tensors
from storage.errors import LongshoreError
from storage.store_ref import Credentials

if TYPE_CHECKING:
    import torch
import functools
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import ParamSpec

IN_MESSAGE_BYTES = 100_000  # Ray puts larger arguments into its object store, for each call anew
CAUSE_S = 1.0  # wait after an error for the death of another rank, which may be its cause
REMOVED_S = 2.0  # wait for the coordinator to say which ranks the model has, after one has died
WITHDRAW_S = 1.0  # wait for the workers to have noted that a call must not begin


class RankCalls:
    """Calls of one model's workers. `timeout_s` limits the total time that is spent in its methods."""

    def __init__(
        self, connection: Connection, model_id: str, timeout_s: float | None, cancelled: threading.Event | None = None
    ) -> None:
        """`timeout_s` None means no limit. `cancelled` is set when the caller no longer waits."""
        self._connection = connection
        self._model_id = model_id
        self._timeout_s = timeout_s
        self._left_s = timeout_s
        self._cancelled = cancelled

    def workers(self) -> list[Any]:
        """Return the handles of the model's workers, by rank. Raises what the coordinator raises; CallTimeout."""
        with self._timed() as patience:
            try:
                found: list[Any] = self._connection.call("workers", self._model_id, patience=patience)
            except LoadTimeout as error:
                raise self._timeout("the coordinator has not answered") from error
            return found

    def answers(
        self,
        asked: Iterable[tuple[int, Any]],
        read: Callable[[int, Any], Any] | None = None,
        never: Callable[[int], Any] | None = None,
    ) -> list[Any]:
        """Return the answers to (rank, Ray's reference) in their order, each as `read(rank, answer)` makes it.

        After a failure, `never(rank)` asks the worker of a rank that has not answered never to begin the call.

        Raises the first failure: RankLost when a worker died, else what the worker or `read` raised, with its rank.
        CallTimeout names the ranks that have not answered. ClusterLost when the head of the cluster is lost.
        """
        waiting: dict[Any, int] = {}  # reference -> rank
        found: dict[Any, Any] = {}
        order = []
        try:
            for rank, reference in asked:
                waiting[reference] = rank
                order.append(reference)
            with self._timed() as patience:
                while waiting:
                    reference = self._first(waiting, patience)
                    try:
                        found[reference] = self._answer(waiting.pop(reference), reference, read)
                    except RemoteCallFailed as error:
                        lost = self._death(waiting, patience)
                        if lost is None:
                            raise
                        raise lost from error
            return [found[reference] for reference in order]
        finally:
            for reference in waiting:
                withdraw(reference)
            if never is not None and waiting:
                _wait_for((never(rank) for rank in waiting.values()), WITHDRAW_S)

    def _first(self, waiting: dict[Any, int], patience: Patience) -> Any:
        """Wait for an answer and return its reference."""
        import ray

        while True:
            ready, _ = ray.wait(list(waiting), timeout=patience.left_s(LOOK_S))
            if ready:
                return ready[0]
            self._connection.head.check()
            try:
                patience.check()
            except LoadTimeout as error:
                missing = ", ".join(map(str, sorted(waiting.values())))
                raise self._timeout(f"{len(waiting)} ranks have not answered", ranks=missing) from error

    def _answer(self, rank: int, reference: Any, read: Callable[[int, Any], Any] | None) -> Any:
        """Return the answer of a rank that has arrived."""
        import ray
        from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

        try:
            answer = ray.get(reference)
        except RayTaskError as error:
            failure = unwrapped(error)
            removed = self._removed(rank) if isinstance(failure, ModelNotFound) else None
            raise removed or failure.with_details(rank=rank) from None
        except (RayActorError, ObjectLostError) as error:
            raise self._removed(rank) or RankLost(
                f"rank {rank} died during the call",
                hint="longshore status shows whether it has been replaced",
                rank=rank,
                model=self._model_id,
                cause=(str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:300],
            ) from error
        except RayError as error:
            raise ClusterLost("Ray failed under the call", rank=rank, cause=str(error)[:300]) from error
        return answer if read is None else read(rank, answer)

    def _removed(self, rank: int) -> RankRemoved | None:
        """Return the error of a rank that the model has no more. None while it has it, or the coordinator is silent."""
        patience = Patience(time.monotonic() + REMOVED_S, self._cancelled)
        with contextlib.suppress(LongshoreError):
            ranks = len(self._connection.call("workers", self._model_id, patience=patience))
            if rank >= ranks:
                return RankRemoved(
                    f"rank {rank} went with its replica: the model has ranks 0 to {ranks - 1} now",
                    hint="call a rank that is left, or add replicas again with `scale`",
                    rank=rank,
                    model=self._model_id,
                )
        return None

    def _death(self, waiting: dict[Any, int], patience: Patience) -> RankLost | None:
        """Return the death of another rank, if it is known soon. It may explain why a function raised."""
        import ray

        give_up_s = time.monotonic() + patience.left_s(CAUSE_S)
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=max(0.0, give_up_s - time.monotonic()))
            if not ready:
                break
            try:
                self._answer(waiting.pop(ready[0]), ready[0], None)
            except RankLost as lost:
                return lost
            except Exception:
                continue
        return None

    def _timeout(self, what: str, **details: Any) -> CallTimeout:
        return CallTimeout(
            f"{what} within {self._timeout_s:g} s",
            hint="a function that runs there goes on, and later calls of the rank wait for it; "
            "cluster.release(model, force=True) ends it",
            **details,
            model=self._model_id,
        )

    @contextlib.contextmanager
    def _timed(self) -> Iterator[Patience]:
        """Limit the block to the remaining time, and subtract the time that it takes."""
        began_s = time.monotonic()
        try:
            yield Patience(None if self._left_s is None else began_s + self._left_s, self._cancelled)
        finally:
            if self._left_s is not None:
                self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))


def share(value: Packed, times: int) -> Any:
    """Return what to pass to `times` workers: the value, or a reference to it if it is large."""
    import ray

    return ray.put(value) if times > 1 and value.size_bytes > IN_MESSAGE_BYTES else value


def withdraw(reference: Any) -> None:
    """Ask Ray to cancel a call. It never begins if it has not, and `is_canceled()` is true in a running one."""
    import ray

    with contextlib.suppress(Exception):
        ray.cancel(reference, recursive=False)  # tasks that a running function has started go on


def _wait_for(asked: Iterable[Any], seconds: float) -> None:
    """Ask, and wait that long for the answers, whatever they are."""
    import ray

    with contextlib.suppress(Exception):
        references = list(asked)
        ray.wait(references, num_returns=len(references), timeout=seconds)


T = TypeVar("T")

_handles: weakref.WeakSet[LoadedModel] = weakref.WeakSet()  # all handles of this process
_handles_lock = threading.Lock()


class LoadedModel:
    """Holds a resident model until `release`, the end of the `with` block, or the end of the process.

    with cluster.load("s3://models/llama", tensor_parallel_size=4) as model:
        norms = model.call(lambda shard: float(shard["model.norm.weight"].float().norm()))
    """

    def __init__(self, connection: Connection, model_id: str, report: LoadReport) -> None:
        self.model_id = model_id
        self.report = report
        self._connection = connection
        self._released = False
        with _handles_lock:
            _handles.add(self)

    @property
    def ends_with_process(self) -> bool:
        """Return whether this process started the Ray cluster. Then the model ends with it, kept or not."""
        return self._connection.local

    @property
    def ranks(self) -> range:
        """Return the rank numbers, 0 .. world size - 1."""
        report = self.report
        return range(report.layout.ranks)

    def call(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(shard, *args, **kwargs)` inside the workers, on all ranks at once, and return the results by rank.

        `shard` maps tensor names to the rank's own tensors on its device, and has `.rank`, `.coords`, `.slices`.
        `shard.into(module)` fills a torch module with them; what is to stay for later calls goes into `shard.kept`.
        A coroutine function is awaited. A generator, or any other iterator, comes back as a list of all its items.

        A rank runs one function at a time: a second call waits for the first one there. The first failure ends the
        call, whatever the other ranks do. Their functions are not ended: one that has not begun never begins, one that
        runs goes on, and can see in `ray.get_runtime_context().is_canceled()` that nobody waits for it. One that is
        stuck, in a collective with a rank that died say, ends only with its worker: `cluster.release(model,
        force=True)` ends it within half a minute, and so does `release` when nobody else holds the model.

        Args:
            fn: A function of the shard. It is pickled, like its arguments and its result.
            *args: Arguments for it.
            ranks: Ranks to run it on; the results have their order. None: all ranks.
            timeout_s: Seconds that the whole call may take, waiting for earlier calls included. None: no limit.
            **kwargs: Named arguments for it; `ranks` and `timeout_s` are not among them.

        Returns:
            One result for each rank, in order.

        Raises:
            ConfigError: `ranks`, `timeout_s` or `fn` are of a wrong type, or an argument cannot be pickled.
            RemoteCallFailed: The function raised, and `details["rank"]` says where; or its result cannot be pickled. A
                LongshoreError comes back as it is. A function that raised waits one second for the death of another
                rank, which comes first.
            RankLost: A worker died during the call, or is being replaced after it died in an earlier one.
            RankRemoved: The rank went with its replica (`scale`).
            CallTimeout: Not all ranks have answered in time; `details["ranks"]` names those.
            ClusterLost: The cluster's head or its coordinator is gone.
            LoadCancelled: The model was released.
        """
        return self._call(None, fn, args, kwargs, ranks, timeout_s)

    async def acall(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `call` without blocking the event loop. Cancelling the task ends the wait, as a failure does."""
        return await _until_cancelled(self._call, fn, args, kwargs, ranks, timeout_s)

    def iter_tensors(self, rank: int, *, timeout_s: float | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU copy) of each of a rank's tensors, in the rank's order.

        They are copied in batches of 8 MiB, one ahead of the caller, so memory is bounded by that and the largest
        tensor. Functions that a call runs on the rank are waited for.

        Args:
            rank: The rank, from 0.
            timeout_s: Seconds to wait for the rank, in all. None: no limit.

        Returns:
            An iterator; it raises as `call` does.

        Raises:
            ConfigError: There is no such rank, or `timeout_s` is of a wrong type.
        """
        return self._tensors(None, self._number(rank), checked_timeout(timeout_s))

    def state_dict(self, rank: int, *, timeout_s: float | None = None) -> dict[str, torch.Tensor]:
        """Return CPU copies of all of a rank's tensors, for inspection and tests, not for serving.

        Args:
            rank: The rank, from 0.
            timeout_s: Seconds to wait for the rank, in all. None: no limit.

        Returns:
            Names and tensors, in the rank's order.

        Raises:
            LongshoreError: As for `call`.
        """
        return dict(self.iter_tensors(rank, timeout_s=timeout_s))

    async def astate_dict(self, rank: int, *, timeout_s: float | None = None) -> dict[str, torch.Tensor]:
        """Run `state_dict` without blocking the event loop. Cancelling the task ends the wait."""
        rank, timeout_s = self._number(rank), checked_timeout(timeout_s)
        return await _until_cancelled(lambda cancelled: dict(self._tensors(cancelled, rank, timeout_s)))

    @property
    def revision(self) -> str:
        """The revision that the model has now, as the cluster says; `report.revision` is that of this process's load.

        Raises ModelNotFound, ClusterLost.
        """
        found: str = self._connection.call("revision_of", self.model_id)
        return found

    def current_report(self) -> LoadReport:
        """Return the report of the load, with the place and the revision that the model has now, whoever updated it.

        Raises ModelNotFound, ClusterLost.
        """
        found: LoadReport | None
        _, _, found, _ = self._connection.call("wait", self.model_id, -1, 0.0)
        return found or self.report

    def update(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        streaming: bool = False,
        signed_name: str | None = None,
        timeout_s: float | None = None,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        anonymous: bool | None = None,
        credentials: Credentials | None = None,
    ) -> UpdateReport:
        """Give the model's tensors the contents of another revision, in place. Only chunks that differ are read.

        All ranks have the new revision when this returns. Tensors, modules that they fill and what is tied stay the
        same objects. Nothing is touched until every rank has read and verified what changed. A failure before that
        leaves the old revision. A call of a function that begins meanwhile sees one revision on each rank.

        Args:
            uri: Folder of the new revision. None: the model's own, as it is stored now.
            revision: The only revision that is accepted. None: the one that is stored.
            streaming: Read into the tensors themselves. Nothing is staged, calls wait for the whole update, and a
                failure leaves contents of two revisions: the model is broken until it is updated again or released.
            signed_name: Name under which the manifest must be signed. None: the path of the URI.
            timeout_s: Seconds until LoadTimeout; the update goes on in the cluster. None: no limit.
            endpoint_url: URL of an S3-compatible server. None: that of the model.
            region: Region of the bucket. None: that of the model.
            profile: Name of a profile in the AWS configuration. None: that of the model.
            anonymous: Send unsigned requests, for public buckets. None: as for the model, and False with a profile or
                credentials.
            credentials: Keys for the store. None: in the model's own bucket those of its load, else each node's.

        Returns:
            What changed, what was read, and how each rank came to the new revision.

        Raises:
            UpdateRefused: The revision differs in more than contents, the model is not ready, or another change of it
                is under way. Nothing was touched.
            DoesNotFit: A host lacks the memory to stage what changed. Nothing was touched.
            UpdateFailed: The update ended before its exchange. Every rank has the old revision.
            ModelBroken: A streaming update failed.
            LongshoreError: As for `load`, while the new revision is planned.
        """
        store = StoreOptions(endpoint_url, region, profile, anonymous)
        options = UpdateOptions(uri, revision, streaming, signed_name, store, credentials)
        limit_s = checked_timeout(timeout_s)
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        report = update_on(self._connection, self.model_id, options, Patience(deadline_s, GIVEN_UP.get()))
        self.report = replace(self.report, uri=report.uri, revision=report.revision, signed_by=report.signed_by)
        return report

    async def aupdate(self, uri: str | os.PathLike[str] | None = None, **options: Any) -> UpdateReport:
        """Run `update` without blocking the event loop. Cancelling the task ends the wait, not the update."""
        twin: Callable[..., Coroutine[Any, Any, UpdateReport]] = in_thread(self.update)
        return await twin(uri, **options)

    def scale(self, data_parallel_size: int, *, timeout_s: float | None = None) -> ScaleReport:
        """Give the model another number of replicas, while its other ranks serve.

        Further replicas get the next rank numbers. They read what nodes of the model have in their arenas and on disk,
        and the rest from the store. They belong to the model when all of them are ready, and then calls see them.
        Fewer replicas: the last ones go when the calls that they run have ended.

        Args:
            data_parallel_size: Number of copies of the model, 1 or more.
            timeout_s: Seconds until LoadTimeout; the change goes on in the cluster. None: no limit.

        Returns:
            The ranks that were added or removed, and where the bytes of those added came from.

        Raises:
            ScaleRefused: The model cannot have that many replicas, Longshore does not place its ranks, it is not ready,
                or another change of it is under way. Nothing was touched.
            NotEnoughResources: There are too few free GPUs or places for CPU ranks. Nothing was touched.
            DoesNotFit: A device or host lacks the memory. Nothing was touched.
            ScaleFailed: Further replicas could not be filled. The model is as it was.
        """
        limit_s = checked_timeout(timeout_s)
        patience = Patience(None if limit_s is None else time.monotonic() + limit_s, GIVEN_UP.get())
        report = scale_on(self._connection, self.model_id, data_parallel_size, patience)
        self.report = replace(self.report, layout=report.layout)
        return report

    async def ascale(self, data_parallel_size: int, *, timeout_s: float | None = None) -> ScaleReport:
        """Run `scale` without blocking the event loop. Cancelling the task ends the wait, not the change."""
        twin: Callable[..., Coroutine[Any, Any, ScaleReport]] = in_thread(self.scale)
        return await twin(data_parallel_size, timeout_s=timeout_s)

    def save(self, uri: str | os.PathLike[str], **options: Any) -> Any:
        """Save the model as its ranks hold it, as one published checkpoint. See `save_loaded`.

        Args:
            uri: Folder of the checkpoint, in a store or on a file system that the nodes share.
            **options: Keyword arguments of `save_loaded`.

        Returns:
            A `SaveReport`: what was written.
        """
        from cluster import save_loaded

        return save_loaded(self, uri, **options)

    def release(self) -> None:
        """Release this hold. Memory is freed when no other client holds the model and it is not kept. Idempotent."""
        if self._released:
            return
        self._released = True
        if self._connection.drop(self.model_id):
            self._connection.call("release", self.model_id, self._connection.client_id)

    async def arelease(self) -> None:
        """Run `release` without blocking the event loop."""
        await asyncio.to_thread(self.release)

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error inside the block, that error is more important.
        with contextlib.suppress(*(() if kind is None else (LongshoreError,))):
            self.release()

    async def __aenter__(self) -> LoadedModel:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*(() if kind is None else (LongshoreError,))):
            await self.arelease()

    def __repr__(self) -> str:
        return f"LoadedModel({self.model_id!r}, ranks={len(self.ranks)})"

    # -- inside ------------------------------------------------------------------------------------------------

    def _call(
        self,
        cancelled: threading.Event | None,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: Sequence[int] | None,
        timeout_s: float | None,
    ) -> list[Any]:
        if not callable(fn):
            raise ConfigError(f"call takes a function of the shard, not {fn!r:.60}")
        numbers = self._numbers(ranks)
        calls = RankCalls(self._connection, self.model_id, checked_timeout(timeout_s), cancelled)
        packed = pack_call(fn, args, kwargs)
        workers = self._workers(calls)
        wanted = list(self.ranks) if numbers is None else [self._present(rank) for rank in numbers]
        sent = share(packed, len(wanted))
        call_id = uuid.uuid4().hex
        asked = ((rank, self._method(workers[rank], "call").remote(self.model_id, sent, call_id)) for rank in wanted)

        def never(rank: int) -> Any:
            return self._method(workers[rank], "withdraw", "control").remote(call_id)

        return calls.answers(asked, result_of, never)

    def _tensors(
        self, cancelled: threading.Event | None, rank: int, timeout_s: float | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        calls = RankCalls(self._connection, self.model_id, timeout_s, cancelled)
        ask = self._method(self._workers(calls)[self._present(rank)], "tensor_batch").remote

        def batches() -> Iterator[TensorBatch]:
            asked: Any = ask(self.model_id, Cursor(), BATCH_BYTES)
            try:
                while asked is not None:
                    batch: TensorBatch
                    (batch,) = calls.answers([(rank, asked)])
                    asked = None if batch.after is None else ask(self.model_id, batch.after, BATCH_BYTES)
                    yield batch
            finally:
                if asked is not None:
                    withdraw(asked)

        return tensors(batches())

    def _workers(self, calls: RankCalls) -> list[Any]:
        """Return the workers by rank. Another process may have changed the number of replicas (`scale`)."""
        workers = calls.workers()
        layout = self.report.layout
        if len(workers) != layout.ranks:
            layout = layout.with_replicas(len(workers) // layout.one_replica)
            self.report = replace(self.report, layout=layout)
        return workers

    def _method(self, worker: Any, name: str, group: str = "call") -> Any:
        """Return a method of a worker, in a group of calls. Those of "call" run one at a time."""
        return getattr(worker, name).options(concurrency_group=group)

    def _numbers(self, ranks: Iterable[int] | None) -> list[int] | None:
        """Return what the caller passes as ranks. It is not known yet whether there are these ranks."""
        if ranks is None:
            return None
        if isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable):
            one = f"ranks=[{ranks}]" if isinstance(ranks, int) else f"ranks=[0] to ranks=[{len(self.ranks) - 1}]"
            raise ConfigError(f"ranks is a list of rank numbers, not {ranks!r:.40}", hint=f"{one} means one rank")
        return [self._number(rank) for rank in ranks]

    def _number(self, rank: int) -> int:
        with contextlib.suppress(TypeError):  # numpy's integers are ranks too
            if not isinstance(rank, bool) and operator.index(rank) >= 0:
                return operator.index(rank)
        raise self._no_rank(rank)

    def _present(self, rank: int) -> int:
        """Return a rank that the model has. Ask for its workers before: another process may have added the rank."""
        if rank not in self.ranks:
            raise self._no_rank(rank)
        return rank

    def _no_rank(self, rank: int) -> ConfigError:
        return ConfigError(f"there is no rank {rank!r:.40}: the model has ranks 0 to {len(self.ranks) - 1}")


def give_up_handles(model_id: str) -> None:
    """Mark every LoadedModel of this process that holds the model as released."""
    with _handles_lock:
        for handle in _handles:
            if handle.model_id == model_id:
                handle._released = True


async def _until_cancelled(work: Callable[..., T], *args: Any) -> T:
    """Run `work(cancelled, *args)` in a thread, which notices within a second that the task was cancelled."""
    cancelled = threading.Event()
    try:
        return await asyncio.to_thread(work, cancelled, *args)
    finally:
        cancelled.set()


P = ParamSpec("P")

# Set while a verb runs for a task: whether that task was cancelled.
GIVEN_UP: ContextVar[threading.Event | None] = ContextVar("given_up", default=None)


def in_thread(verb: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The async twin of a verb."""

    @functools.wraps(verb)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        given_up = threading.Event()
        token = GIVEN_UP.set(given_up)  # the thread runs in a copy of this context
        task = asyncio.ensure_future(asyncio.to_thread(verb, *args, **kwargs))
        GIVEN_UP.reset(token)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            given_up.set()
            with contextlib.suppress(LongshoreError, asyncio.CancelledError):
                result = await task
                if isinstance(result, LoadedModel):  # it was ready in the same moment
                    await result.arelease()
            raise

    twin.__doc__ = f"`{verb.__name__}`, without blocking the event loop. Cancelling the task gives it up."
    return twin


class Loading(Coroutine[Any, Any, LoadedModel]):
    """A load that has not begun: `await` it for the model, or use it in `async with`, which releases the model."""

    def __init__(self, load: Coroutine[Any, Any, LoadedModel]) -> None:
        self._load = load
        self._model: LoadedModel | None = None

    def send(self, value: Any, /) -> Any:
        return self._load.send(value)

    def throw(self, *error: Any) -> Any:
        return self._load.throw(*error)

    def close(self) -> None:
        self._load.close()

    def __await__(self) -> Generator[Any, Any, LoadedModel]:
        return self._load.__await__()

    async def __aenter__(self) -> LoadedModel:
        self._model = await self._load
        return await self._model.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._model is not None:
            await self._model.__aexit__(kind, error, trace)


def load_in_thread(load: Callable[P, LoadedModel]) -> Callable[P, Loading]:
    """The async twin of `load`."""
    twin = in_thread(load)

    @functools.wraps(twin)
    def begun(*args: P.args, **kwargs: P.kwargs) -> Loading:
        return Loading(twin(*args, **kwargs))

    begun.__doc__ = f"{twin.__doc__} `async with` takes what it returns, with `await` before it or without."
    return begun
