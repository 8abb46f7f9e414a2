"""The child process in which the coordinator plans.

    python -m cluster.planning.process CHUNK_BYTES READ_TIMEOUT_S

It reads requests from standard input and writes answers to standard output. Each message is a length and a pickle; both
ends are our own processes. It ends at end of input, and imports neither ray nor torch.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, BinaryIO

from cluster.config import TrustPolicy
from cluster.fit.options import AUTO
from cluster.fit.search import Limits, PlannedChange, changes_to_offer, steps_of_auto
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import prepare_changes, prepare_plan, still_current
from cluster.planning.packed_plan import (
    PackedPlan,
    RankFacts,
    pack_shared,
    rank_facts,
    unpack_shared,
    with_layout,
)
from cluster.planning.update_plan import PackedUpdate, check_update, find_changes, update_tables
from cluster.precision.written_quantization import quantization_config
from cluster.request import LoadRequest
from cluster.telemetry.report import ProcessMemory
from storage.errors import LongshoreError
from storage.host.memory import high_water_bytes, own_bytes, reset_high_water, without_collector

CHANGES_S = 10.0  # time limit for planning the changes that a refused load is offered
_LENGTH = struct.Struct("<Q")


class PlanningServer:
    """The planner of the child process, which answers one request at a time."""

    def __init__(self, chunk_bytes: int, read_timeout_s: float) -> None:
        self._chunk_bytes = chunk_bytes
        self._read_timeout_s = read_timeout_s

    def prepare(self, request: LoadRequest, trust: TrustPolicy) -> PackedPlan:
        """Return the packed plan of a request, with the memory that planning took."""
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
        # The process shares no memory, so the kernel's high-water mark is exact.
        memory = ProcessMemory("planning", socket.gethostname(), baseline_bytes, high_water_bytes())
        return replace(packed, memory=memory)

    def changes(
        self, request: LoadRequest, trust: TrustPolicy, purpose: str, limits: Limits
    ) -> tuple[str, list[PlannedChange]]:
        """Return the revision and the planned changes: the steps of fit="auto", or offers for a refused load."""
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

    def update(self, request: LoadRequest, trust: TrustPolicy, old: bytes, all_changed: bool) -> PackedUpdate:
        """Return what of the request's model differs from the one with the packed tables `old`.

        `all_changed`: trust nothing that ranks hold. Raises as `prepare_plan` does, and UpdateRefused.
        """
        packed = self.prepare(request, trust)
        with without_collector():
            before, after = with_layout(unpack_shared(old), request.layout), unpack_shared(packed.shared)
            check_update(before, after)
            changes = find_changes(before, after, all_changed=all_changed)
            tables = update_tables(after, changes)
            return PackedUpdate(
                plan=packed,
                shared=pickle.dumps(tables, protocol=5) if len(changes.tensors) else b"",
                ranks=rank_facts(tables.cut, tables.chunks.largest_bytes),
                tensors=len(after.cut),
                changed_tensors=len(changes.tensors),
                changed_bytes=int(tables.chunks.sizes_bytes().sum()),
            )

    def scaled(self, shared: bytes, layout: Layout) -> tuple[tuple[RankFacts, ...], bytes]:
        """Return the facts of all ranks and the packed tables of a model with another number of replicas."""
        with without_collector():
            tables = with_layout(unpack_shared(shared), layout)
            return rank_facts(tables.cut, tables.chunks.largest_bytes), pickle.dumps(tables, protocol=5)

    def is_current(self, request: LoadRequest, revision: str, trust: TrustPolicy) -> bool:
        """Return whether the store still has that revision."""
        return still_current(request, revision, self._read_timeout_s, trust)

    def answer(self, verb: str, args: tuple[Any, ...]) -> Any:
        """Return the result of the method that `verb` names, or its error as a LongshoreError."""
        verbs: dict[str, Callable[..., Any]] = {
            "prepare": self.prepare,
            "changes": self.changes,
            "is_current": self.is_current,
            "update": self.update,
            "scaled": self.scaled,
        }
        try:
            return verbs[verb](*args)
        except LongshoreError as error:
            return error
        except Exception as error:  # the coordinator must get an answer to every request
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
    """Serve requests of the coordinator on standard input and output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # text that a library prints must not mix with the answers
    serve(PlanningServer(int(sys.argv[1]), float(sys.argv[2])), sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
