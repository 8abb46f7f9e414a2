"""`actors.finished`: a step that makes something is not cut in two, however often its caller is cancelled."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from actors.finished import finished


@pytest.mark.parametrize("cancellations", [1, 2, 3])
def test_a_cancelled_caller_leaves_after_the_step(cancellations: int) -> None:
    async def scene() -> list[str]:
        made: list[str] = []
        gate = asyncio.Event()

        async def step() -> None:
            await gate.wait()
            made.append("worker")

        caller = asyncio.create_task(finished(step()))
        for _ in range(cancellations):
            await asyncio.sleep(0)
            caller.cancel()
        await asyncio.sleep(0.01)
        assert not caller.done()
        gate.set()
        with contextlib.suppress(asyncio.CancelledError):
            await caller
        assert caller.cancelled()
        return made

    assert asyncio.run(scene()) == ["worker"]


def test_result_and_error_come_out() -> None:
    async def works() -> int:
        await asyncio.sleep(0)
        return 7

    async def fails() -> None:
        raise ValueError("no")

    assert asyncio.run(finished(works())) == 7
    with pytest.raises(ValueError, match="no"):
        asyncio.run(finished(fails()))


def test_a_step_that_fails_after_the_cancellation_is_a_cancellation() -> None:
    async def scene() -> None:
        gate = asyncio.Event()

        async def step() -> None:
            await gate.wait()
            raise ValueError("too late")

        caller = asyncio.create_task(finished(step()))
        await asyncio.sleep(0)
        caller.cancel()
        gate.set()
        await caller

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scene())
