"""asyncio on a clock that only events move: hours of a cluster in milliseconds, in one thread.

    Clock.after(delay, event) -- one heap of events for everything --> Clock.run(seconds)
    VirtualLoop(clock)        -- asyncio on that clock; several at once, one per process that is simulated

A loop's process can be killed: it takes no further step, and nothing that it would have tidied up is done.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

MOST_ROUNDS = 10_000  # of its loops at one moment


class Clock:
    """A simulated clock with its events. The same seed gives the same run."""

    def __init__(self, seed: int) -> None:
        self.now_s = 1000.0
        self.chance = random.Random(seed)
        self.loops: list[VirtualLoop] = []
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        return self.now_s

    def after(self, delay_s: float, event: Callable[[], object]) -> None:
        self.at(self.now_s + max(0.0, delay_s), event)

    def at(self, when_s: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(when_s, self.now_s), next(self._order), event))

    def soon(self, event: Callable[[], object], most_s: float = 0.1) -> None:
        """Run it after a random delay: a later message may arrive sooner."""
        self.after(self.chance.uniform(0.001, most_s), event)

    def run(self, seconds: float) -> None:
        """Everything that happens within that time, in its order."""
        end_s = self.now_s + seconds
        self._settle()
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            self._settle()
        self.now_s = end_s

    def _settle(self) -> None:
        for _ in range(MOST_ROUNDS):
            if not any(loop.has_work for loop in self.loops):
                return
            for loop in list(self.loops):
                loop.step()
        raise AssertionError(f"a process is busy for ever, and no time passes: {self._busy()}")

    def _busy(self) -> list[str]:
        return [str(task) for loop in self.loops if loop.has_work for task in asyncio.all_tasks(loop)]


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that never waits; its threads are events of the clock too."""

    def __init__(self, clock: Clock, on_error: Callable[[BaseException], None]) -> None:
        self.has_work = False
        self._clock = clock
        super().__init__()
        self.set_exception_handler(lambda _, context: on_error(context.get("exception") or RuntimeError(str(context))))
        clock.loops.append(self)

    def time(self) -> float:
        return self._clock.now_s

    def call_soon(self, *args: Any, **kwargs: Any) -> Any:
        self.has_work = True
        return super().call_soon(*args, **kwargs)

    def call_at(self, when: float, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self._clock.at(when, self._wake)
        return super().call_at(when, *args, **kwargs)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """A thread: its work is done at one moment, a little later."""
        answer: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            if answer.done():
                return
            try:
                answer.set_result(func(*args))
            except Exception as error:
                answer.set_exception(error)

        self._clock.soon(work, 0.02)
        return answer

    def step(self) -> None:
        """Run what is due."""
        if self.has_work:
            self.has_work = False
            super().call_soon(self.stop)
            self.run_forever()

    def kill(self, rounds: int = 50) -> None:
        """Kill the process and drop its coroutines; the caller makes sure that nothing awaits them."""
        self.set_exception_handler(lambda loop, context: None)
        self._clock.loops.remove(self)
        for _ in range(rounds):
            tasks = sorted(asyncio.all_tasks(self), key=lambda task: int(task.get_name().rpartition("-")[2]))
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            for _ in range(20):
                self.step()
        self.close()

    def _wake(self) -> None:
        self.has_work = True
