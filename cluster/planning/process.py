"""The child process in which the coordinator plans.

    python -m cluster.planning.process CHUNK_BYTES READ_TIMEOUT_S

Reads requests from its standard input and writes answers to its standard output, each a length and a pickle; both
ends are ours. Ends at end of input. Imports neither ray nor torch.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

from cluster.config import TrustPolicy
from cluster.fit.options import AUTO
from cluster.fit.search import Limits, PlannedChange, changes_to_offer, steps_of_auto
from cluster.planning.make_plan import prepare_changes, prepare_plan, still_current
from cluster.planning.packed_plan import PackedPlan, pack_shared
from cluster.planning.rank_plans import rank_facts
from cluster.precision.written_quantization import quantization_config
from cluster.request import LoadRequest
from cluster.telemetry.report import ProcessMemory
from storage.errors import LongshoreError
from storage.host.memory import high_water_bytes, own_bytes, reset_high_water

CHANGES_S = 10.0  # a refusal does not wait longer for what else could be offered
_LENGTH = struct.Struct("<Q")


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Large manifests are hundreds of thousands of objects, none of them garbage: looking for it takes a third more."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class PlanningServer:
    """Answers one request at a time."""

    def __init__(self, chunk_bytes: int, read_timeout_s: float) -> None:
        self._chunk_bytes = chunk_bytes
        self._read_timeout_s = read_timeout_s

    def prepare(self, request: LoadRequest, trust: TrustPolicy) -> PackedPlan:
        reset_high_water()
        baseline_bytes = own_bytes()
        with without_collector():
            index, plan = prepare_plan(
                request, chunk_bytes=self._chunk_bytes, read_timeout_s=self._read_timeout_s, trust=trust
            )
            packed = PackedPlan(
                revision=plan.revision,
                verified=plan.chunks.hash_name or "transport",
                model_bytes=index.size_bytes,
                ranks=rank_facts(plan.cut, plan.chunks.largest_bytes),
                shared=pack_shared(plan),
                signed_by=index.signed_by,
                quantization_config=quantization_config(plan.cut),
            )
        # It shares no memory, so the kernel's own mark will do.
        memory = ProcessMemory("planning", socket.gethostname(), baseline_bytes, high_water_bytes())
        return replace(packed, memory=memory)

    def changes(
        self, request: LoadRequest, trust: TrustPolicy, purpose: str, limits: Limits
    ) -> tuple[str, list[PlannedChange]]:
        """(revision, changes planned): the steps of fit="auto", or what a refused load is offered."""
        wanted = steps_of_auto(request, limits)[1:] if purpose == AUTO else changes_to_offer(request, limits)
        until_s = time.monotonic() + CHANGES_S
        with without_collector():
            return prepare_changes(
                request,
                wanted,
                chunk_bytes=self._chunk_bytes,
                read_timeout_s=self._read_timeout_s,
                trust=trust,
                enough=lambda: purpose != AUTO and time.monotonic() > until_s,
            )

    def is_current(self, request: LoadRequest, revision: str, trust: TrustPolicy) -> bool:
        return still_current(request, revision, self._read_timeout_s, trust)

    def answer(self, verb: str, args: tuple[Any, ...]) -> Any:
        verbs = {"prepare": self.prepare, "changes": self.changes, "is_current": self.is_current}
        try:
            return verbs[verb](*args)  # type: ignore[operator]
        except LongshoreError as error:
            return error
        except Exception as error:  # the coordinator must get an answer, whatever it is
            return LongshoreError(f"{type(error).__name__} while planning: {error}")


def serve(server: PlanningServer, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the input ends."""
    while len(head := requests.read(_LENGTH.size)) == _LENGTH.size:
        (size,) = _LENGTH.unpack(head)
        verb, args = pickle.loads(requests.read(size))
        data = pickle.dumps(server.answer(verb, args), protocol=5)
        answers.write(_LENGTH.pack(len(data)) + data)
        answers.flush()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    serve(PlanningServer(int(sys.argv[1]), float(sys.argv[2])), sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
