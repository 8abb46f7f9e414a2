"""Concurrent callers share one request, and never get an answer from before their call."""

from __future__ import annotations

import asyncio

import pytest

from serving.service import SharedAnswer


class Source:
    """Counts questions. Once the gate opens, each is answered with the `now` of when it was asked."""

    def __init__(self) -> None:
        self.now = 0
        self.asked = 0
        self.at_once = 0
        self.most_at_once = 0
        self.gate = asyncio.Event()

    async def ask(self) -> int:
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        found = self.now
        try:
            await self.gate.wait()
        finally:
            self.at_once -= 1
        if found < 0:
            raise ValueError(found)
        return found


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_concurrent_callers_share_one_answer_that_is_not_kept() -> None:
    async def run() -> None:
        source = Source()
        shared = SharedAnswer(source.ask)
        first = asyncio.create_task(shared())
        await settle()
        source.now = 1
        later = [asyncio.create_task(shared()) for _ in range(50)]
        await settle()
        assert source.asked == 1, "the second question waits for the first"
        source.gate.set()
        assert await first == 0
        assert await asyncio.gather(*later) == [1] * 50
        assert (source.asked, source.most_at_once) == (2, 1)

    asyncio.run(run())


def test_a_caller_that_cancels_leaves_the_others_their_answer() -> None:
    async def run() -> None:
        source = Source()
        shared = SharedAnswer(source.ask)
        impatient, patient = asyncio.create_task(shared()), asyncio.create_task(shared())
        await settle()
        impatient.cancel()
        source.gate.set()
        assert await patient == 0
        assert impatient.cancelled()

    asyncio.run(run())


def test_an_error_reaches_all_callers_and_is_not_kept() -> None:
    async def run() -> None:
        source = Source()
        source.now = -1
        source.gate.set()
        shared = SharedAnswer(source.ask)
        heard = await asyncio.gather(shared(), shared(), return_exceptions=True)
        assert [type(each) for each in heard] == [ValueError, ValueError]
        source.now = 5
        assert await shared() == 5

    asyncio.run(run())


def test_an_error_without_a_waiting_caller_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        source = Source()
        source.now = -1
        shared = SharedAnswer(source.ask)
        asker = asyncio.create_task(shared())
        await settle()
        asker.cancel()
        source.gate.set()
        await settle()

    asyncio.run(run())
    assert not caplog.records
