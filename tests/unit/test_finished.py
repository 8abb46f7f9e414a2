"""`actors.coordination.spawn`: a creating step is never interrupted, however often it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from actors.coordination.model_record import stopped
from actors.coordination.spawn import alongside, finished


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


def test_results_and_errors_are_passed_on() -> None:
    async def works() -> int:
        await asyncio.sleep(0)
        return 7

    async def fails() -> None:
        raise ValueError("no")

    assert asyncio.run(finished(works())) == 7
    with pytest.raises(ValueError, match="no"):
        asyncio.run(finished(fails()))


def test_a_failure_after_the_cancellation_is_a_cancellation() -> None:
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


def test_alongside_ends_every_step_before_it_raises() -> None:
    ended: list[str] = []

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise ZeroDivisionError

    async def makes() -> None:
        try:
            await finished(asyncio.sleep(0.05))
        finally:
            ended.append("made")

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waited")

    with pytest.raises(ZeroDivisionError):
        asyncio.run(alongside(makes(), fails(), waits()))
    assert sorted(ended) == ["made", "waited"]
    asyncio.run(alongside(makes()))
    assert len(ended) == 3


@pytest.mark.parametrize("cancellations", [1, 3])
def test_a_cancelled_alongside_leaves_after_its_steps(cancellations: int) -> None:
    async def scene() -> tuple[bool, bool]:
        made: list[str] = []

        async def makes() -> None:
            await finished(note())

        async def note() -> None:
            await asyncio.sleep(0.05)
            made.append("worker")

        caller = asyncio.create_task(alongside(makes(), asyncio.sleep(60)))
        for _ in range(cancellations):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            caller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await caller
        return caller.cancelled(), made == ["worker"]

    assert asyncio.run(scene()) == (True, True)


def test_a_task_that_loses_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that came at the same moment takes its place, and the task goes on."""
    monkeypatch.setattr("actors.coordination.model_record.CANCEL_AGAIN_S", 0.01)
    lost: list[int] = []

    async def forgetful() -> None:
        for number in range(3):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost.append(number)
        await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(forgetful())
        await asyncio.sleep(0)
        await stopped([task])
        assert task.cancelled()

    asyncio.run(main())
    assert lost == [0, 1, 2]
