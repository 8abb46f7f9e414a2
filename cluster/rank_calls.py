"""Asks workers of a model and waits for all of their answers at once, with one time limit.

The first failure ends the wait, whatever the other ranks do: they may wait in a collective for the rank that failed,
for ever. Ray is asked to cancel what is not waited for any more: a function that has not begun never begins.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cluster.connection import Connection
from cluster.errors import CallTimeout, ClusterLost, LoadTimeout, RankLost, RemoteCallFailed
from cluster.joining.coordinator_line import LOOK_S
from cluster.joining.patience import Patience
from cluster.joining.remote_errors import unwrapped
from cluster.user_values import Packed

IN_MESSAGE_BYTES = 100_000  # Ray puts larger arguments into its object store, for each call anew
CAUSE_S = 1.0  # a function that raised waits so long for the death of another rank, which may be why it did


class RankCalls:
    """Calls of one model's workers. `timeout_s` limits the time that is spent in its methods, all of them together."""

    def __init__(
        self, connection: Connection, model_id: str, timeout_s: float | None, cancelled: threading.Event | None = None
    ) -> None:
        """`timeout_s` None: no limit. `cancelled`: nobody wants the answers any more."""
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

    def answers(self, asked: Iterable[tuple[int, Any]], read: Callable[[int, Any], Any] | None = None) -> list[Any]:
        """Return the answers to (rank, Ray's reference) in their order, each as `read(rank, answer)` makes it.

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

    def _first(self, waiting: dict[Any, int], patience: Patience) -> Any:
        """Return a reference whose answer is there."""
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
        """Return an answer that is there."""
        import ray
        from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

        try:
            answer = ray.get(reference)
        except RayTaskError as error:
            raise unwrapped(error).with_details(rank=rank) from None
        except (RayActorError, ObjectLostError) as error:
            raise RankLost(
                f"rank {rank} died during the call",
                hint="longshore status shows whether it has been replaced",
                rank=rank,
                model=self._model_id,
                cause=(str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:300],
            ) from error
        except RayError as error:
            raise ClusterLost("Ray failed under the call", rank=rank, cause=str(error)[:300]) from error
        return answer if read is None else read(rank, answer)

    def _death(self, waiting: dict[Any, int], patience: Patience) -> RankLost | None:
        """Return the death of a rank that is waited for, if it is known soon: it explains why a function raised."""
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
        """Give the block the time that is left, and take what it needs off that."""
        began_s = time.monotonic()
        try:
            yield Patience(None if self._left_s is None else began_s + self._left_s, self._cancelled)
        finally:
            if self._left_s is not None:
                self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))


def share(value: Packed, times: int) -> Any:
    """Return what to pass to so many workers: the value, or a reference to it when it is large."""
    import ray

    return ray.put(value) if times > 1 and value.size_bytes > IN_MESSAGE_BYTES else value


def withdraw(reference: Any) -> None:
    """Ask Ray to cancel a call: one that has not begun never begins; `is_canceled()` is true in one that runs."""
    import ray

    with contextlib.suppress(Exception):
        ray.cancel(reference, recursive=False)  # what a function that runs has asked of others goes on
