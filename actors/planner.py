"""The coordinator's line to its planning process.

Planning reads a manifest of up to hundreds of megabytes and builds tables of all tensors: seconds of pure Python that
would freeze the coordinator's event loop and make every worker look dead. So it runs in one child process, kept warm
between requests; the child ends by itself when its pipe closes, also when the coordinator was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import struct
import sys
from typing import Any

from cluster.errors import ClusterError
from cluster.messages import LoadRequest
from cluster.packed_plan import PackedPlan
from storage.errors import LongshoreError

_LENGTH = struct.Struct("<Q")
PLANNING_TIMEOUT_S = 300.0


class Planner:
    """Runs `cluster.planning_process` requests one at a time."""

    def __init__(self, chunk_bytes: int, read_timeout_s: float) -> None:
        self._settings = (chunk_bytes, read_timeout_s)
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def prepare(self, request: LoadRequest) -> PackedPlan:
        """Read the model's index and plan. Raises what that raises: StoreError, ManifestError, PlanError..."""
        plan: PackedPlan = await self._ask("prepare", request)
        return plan

    async def is_current(self, request: LoadRequest, known: str) -> bool:
        """True while the stored model is still the revision `known`; one small request to the store."""
        same: bool = await self._ask("is_current", request, known)
        return same

    async def overfetch_bytes(self, request: LoadRequest, groups: list[tuple[int, ...]]) -> list[int]:
        """Per group of ranks (a node): bytes inside its needed chunks that none of them wants."""
        found: list[int] = await self._ask("overfetch_bytes", request, groups)
        return found

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, verb: str, *args: Any) -> Any:
        async with self._turn:
            try:
                answer = await asyncio.wait_for(self._exchange(verb, args), PLANNING_TIMEOUT_S)
            except (TimeoutError, OSError, EOFError, asyncio.IncompleteReadError) as error:
                await self.close()
                raise ClusterError(
                    "planning did not end", hint="the coordinator may be out of memory", cause=repr(error)
                ) from error
            except asyncio.CancelledError:
                await self.close()  # its answer would be taken for the next request's
                raise
        if isinstance(answer, LongshoreError):
            raise answer
        return answer

    async def _exchange(self, verb: str, args: tuple[Any, ...]) -> Any:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cluster.planning_process",
                *map(str, self._settings),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 20,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise EOFError("the planning process has no pipes")
        data = pickle.dumps((verb, args), protocol=5)
        stdin.write(_LENGTH.pack(len(data)) + data)
        await stdin.drain()
        (size,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
        return pickle.loads(await stdout.readexactly(size))
