"""The coordinator's line to its planning processes.

Planning reads a manifest of up to hundreds of megabytes and builds tables of all tensors: seconds of pure Python that
would freeze the coordinator's event loop and make every worker look dead. So it runs in child processes, kept warm
between requests, a few of them so that a store that does not answer holds up nobody else. A child ends by itself when
its pipe closes, also when the coordinator was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import struct
from asyncio.subprocess import Process
from typing import Any

from cluster.config import TrustPolicy
from cluster.errors import ClusterError
from cluster.fit.search import Limits, PlannedChange
from cluster.planning.packed_plan import PackedPlan
from cluster.request import LoadRequest
from storage.errors import LongshoreError, StoreUnavailable
from storage.host.processes import own_module

_LENGTH = struct.Struct("<Q")
PLANNING_TIMEOUT_S = 300.0
MOST_PLANS = 4  # at once
CHECK_TIMEOUT_S = 60.0
MOST_CHECKS = 8  # at once; they are small, and wait for no plan


class Planner:
    """Runs `cluster.planning.process` requests: MOST_PLANS plans and MOST_CHECKS checks at once."""

    def __init__(self, chunk_bytes: int, read_timeout_s: float, trust: TrustPolicy | None = None) -> None:
        self._settings = (chunk_bytes, read_timeout_s)
        self._trust = trust or TrustPolicy()
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        self._plans = asyncio.Semaphore(MOST_PLANS)
        self._checks = asyncio.Semaphore(MOST_CHECKS)

    async def prepare(self, request: LoadRequest) -> PackedPlan:
        """Read the model's index and plan. Raises what that raises: StoreError, ManifestError, PlanError..."""
        plan: PackedPlan = await self._ask("prepare", request, self._trust)
        return plan

    async def changes(self, request: LoadRequest, purpose: str, limits: Limits = ()) -> tuple[str, list[PlannedChange]]:
        """(revision, changes planned): the steps of fit "auto", or ("strict") what a refused load is offered."""
        found: tuple[str, list[PlannedChange]] = await self._ask("changes", request, self._trust, purpose, limits)
        return found

    async def is_current(self, request: LoadRequest, known: str, limit_s: float = CHECK_TIMEOUT_S) -> bool:
        """Return True while the stored model is still the revision `known`; one small request to the store.

        Raises StoreUnavailable when the store does not answer within `limit_s`, from when it is asked.
        """
        async with self._checks:
            try:
                asked = self._run("is_current", request, known, self._trust)
                same: bool = await asyncio.wait_for(asked, limit_s)
            except TimeoutError as error:
                raise StoreUnavailable("the store does not answer", uri=request.uri, waited_s=limit_s) from error
        return same

    async def close(self) -> None:
        """End every child."""
        self._idle.clear()
        for process in list(self._all):
            await self._end(process)

    async def _ask(self, verb: str, *args: Any) -> Any:
        async with self._plans:
            return await self._run(verb, *args)

    async def _run(self, verb: str, *args: Any) -> Any:
        process = None
        try:
            process = self._take_idle() or await self._start()
            answer = await asyncio.wait_for(_exchange(process, verb, args), PLANNING_TIMEOUT_S)
        except (TimeoutError, OSError, EOFError) as error:
            await self._end(process)
            raise ClusterError(
                "planning did not end", hint="the coordinator's node may be out of memory", cause=repr(error)
            ) from error
        except BaseException:
            await self._end(process)  # its answer would be taken for the next request's
            raise
        self._idle.append(process)
        if isinstance(answer, LongshoreError):
            raise answer
        return answer

    def _take_idle(self) -> Process | None:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            self._all.discard(process)  # somebody ended it while it had nothing to do: the kernel, short of memory
        return None

    async def _start(self) -> Process:
        command, environ = own_module("cluster.planning.process", *map(str, self._settings))
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environ
        )
        self._all.add(process)
        return process

    async def _end(self, process: Process | None) -> None:
        if process is None:
            return
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _exchange(process: Process, verb: str, args: tuple[Any, ...]) -> Any:
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise EOFError("the planning process has no pipes")
    data = pickle.dumps((verb, args), protocol=5)
    stdin.write(_LENGTH.pack(len(data)) + data)
    await stdin.drain()
    (size,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
    return pickle.loads(await stdout.readexactly(size))
