"""Asks every worker for its tensors all the while that a load runs: none may hand out one that is not verified."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

from cluster.user_values import pack_call, result_of
from storage.errors import LongshoreError
from tests.chaos.bench import KV_HEADS
from tests.chaos.cases import Case
from tests.support.losable_nodes import LosableNodes
from tests.support.reference_slices import fits_no_layout

EVERY_S = 0.2
ANSWER_S = 5.0  # a worker that is stopped does not answer


class EarlyReader:
    """Checks that tensors read at any moment match the published files. The files need digests.

    It asks ranks directly, since the client has no model before all ranks are ready.
    """

    def __init__(self, longshore: LosableNodes, case: Case, folder: Path) -> None:
        self.read = 0  # times that a rank handed its tensors out
        self.wrong: list[str] = []
        self._longshore, self._case, self._folder = longshore, case, folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="early-reader", daemon=True)

    def __enter__(self) -> Self:
        if self._case.published:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop reading; no rank is asked after this returns. Idempotent."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        from ray.exceptions import RayError

        while not self._over.wait(EVERY_S):
            for name in self._longshore.actor_names("worker-"):
                if self._over.is_set():
                    return
                try:
                    different = self._ask(name)
                except (RayError, LongshoreError, ValueError):  # dead, stopped, or it has nothing to hand out
                    continue
                if different is not None:
                    self.read += 1
                    self.wrong += [f"{name} handed out {tensor}" for tensor in different]

    def _ask(self, name: str) -> list[str] | None:
        import ray

        from actors.links import NAMESPACE

        worker = ray.get_actor(name, namespace=NAMESPACE)
        assigned = ray.get(worker.assignment.options(concurrency_group="control").remote(), timeout=ANSWER_S)
        if assigned is None:
            return None
        call = worker.call.options(concurrency_group="call")
        packed = pack_call(fits_no_layout, (str(self._folder), self._case.layouts, KV_HEADS), {})
        return list(result_of(0, ray.get(call.remote(assigned.load_id, packed, "early"), timeout=ANSWER_S)))
