"""Progress of commands and client verbs, on stderr: a bar on a terminal, plain lines in a log.

LoadProgress         --load_counter--> Moment --> BarDisplay | LineDisplay
publish's, verify's  --byte_counter-->
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

from cluster.units import printable, show_bytes, show_rate

if TYPE_CHECKING:
    from cluster.telemetry.report import LoadProgress

LINE_INTERVAL_S = 2.0

T = TypeVar("T")
GivenProgress = bool | Callable[[T], None] | None


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of any long command."""

    state: str  # what it does now; a change is always shown
    done_bytes: int
    total_bytes: int  # 0 while nobody knows
    elapsed_s: float
    note: str = ""  # counts, or what it waits for


class Display(Protocol):
    """Shows moments; called from any thread."""

    def show(self, moment: Moment) -> None:
        """Show this moment of the work."""
        ...


def moment_of_load(progress: LoadProgress) -> Moment:
    """A load's moment: bytes placed of bytes wanted, ranks ready of ranks."""
    ranks = f"{progress.ranks_ready}/{progress.ranks_total} ranks" if progress.ranks_total else ""
    store = f"{show_bytes(progress.store_bytes)} from the store" if progress.store_bytes else ""
    note = ", ".join(part for part in (ranks, store, progress.message) if part)
    return Moment(progress.state, progress.placed_bytes, progress.total_bytes, progress.elapsed_s, note)


class LineDisplay:
    """A line at each change of state, one when all bytes are done, and at most one every `interval_s` in between."""

    def __init__(
        self,
        stream: TextIO,
        *,
        interval_s: float = LINE_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began: Moment | None = None  # first moment of the state that lasts
        self._shown_at_s = 0.0
        self._complete = False  # all bytes of this state have been shown

    def show(self, moment: Moment) -> None:
        with self._lock:
            now_s = self._clock()
            complete = 0 < moment.total_bytes <= moment.done_bytes
            if self._began is None or moment.state != self._began.state:
                self._began = moment
            elif complete and not self._complete:
                pass
            elif now_s - self._shown_at_s < self._interval_s:
                return
            self._shown_at_s = now_s
            self._complete = complete
            write_line(self._stream, line_of(moment, self._began))


def line_of(moment: Moment, began: Moment) -> str:
    """`   4.1s loading  512 MB of 1.02 GB (50 %), 125 MB/s, 1/4 ranks`; the rate is that since the state `began`."""
    parts = []
    if moment.total_bytes:
        share = 100 * moment.done_bytes / moment.total_bytes
        parts.append(f"{show_bytes(moment.done_bytes)} of {show_bytes(moment.total_bytes)} ({share:.0f} %)")
    elif moment.done_bytes:
        parts.append(show_bytes(moment.done_bytes))
    if moment.done_bytes > began.done_bytes:
        parts.append(show_rate(moment.done_bytes - began.done_bytes, moment.elapsed_s - began.elapsed_s))
    if moment.note:
        parts.append(moment.note)
    return printable(f"{moment.elapsed_s:7.1f}s {moment.state:<10} {', '.join(parts)}".rstrip())


class BarDisplay:
    """A bar that fills, for a terminal or a notebook. Use as a context manager so that the cursor comes back.

    Displays that are open on one stream at the same time share it, a bar each; alone they would overwrite each other.
    """

    _shared: dict[TextIO, tuple[Any, int]] = {}  # noqa: RUF012  # stream -> rich's Progress, open displays
    _lock = threading.Lock()

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, moment: Moment) -> None:
        self._bars.update(
            self._task,
            description=printable(moment.state),
            completed=moment.done_bytes,
            total=moment.total_bytes or None,
            note=printable(moment.note),
            visible=True,
        )

    def __enter__(self) -> BarDisplay:
        with self._lock:
            self._bars, users = self._shared.get(self._stream) or (_bars_on(self._stream), 0)
            self._shared[self._stream] = (self._bars, users + 1)
            self._task = self._bars.add_task("", total=None, note="", visible=False)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            _, users = self._shared.pop(self._stream)
            if users > 1:
                self._shared[self._stream] = (self._bars, users - 1)
            else:
                self._bars.stop()


def _bars_on(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description:<10}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(file=stream),
        redirect_stdout=_is_terminal(sys.stdout),  # what goes to a file or a pipe stays there
    )


class _Counted(Protocol):
    """The progress that `storage.publishing.publish` and `storage.publishing.verify` report."""

    @property
    def done_bytes(self) -> int: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def key(self) -> str: ...


def load_counter(display: Display) -> Callable[[LoadProgress], None]:
    """A callback that shows a load's progress."""
    return lambda progress: display.show(moment_of_load(progress))


def byte_counter(display: Display, state: str) -> Callable[[_Counted], None]:
    """A callback that shows counted bytes under the name `state`. Time counts from its first call."""
    started_s: float | None = None

    def show(progress: _Counted) -> None:
        nonlocal started_s
        now_s = time.monotonic()
        started_s = now_s if started_s is None else started_s
        display.show(Moment(state, progress.done_bytes, progress.total_bytes, now_s - started_s, progress.key))

    return show


class StagedDisplay:
    """A display for a command of several stages: a line said between them ends one bar, the next moment begins one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stack = ExitStack()
        self._display: Display | None = None

    def show(self, moment: Moment) -> None:
        if self._display is None:
            self._display = self._stack.enter_context(display_on(self._stream))
        self._display.show(moment)

    def say(self, line: str) -> None:
        """Write a line that stays, and end the stage before it."""
        self._end_stage()
        write_line(self._stream, line)

    def _end_stage(self) -> None:
        self._display = None
        self._stack.close()

    def __enter__(self) -> StagedDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_stage()


def write_line(stream: TextIO, line: str) -> None:
    """One line, control characters written out. Whoever reads it may be gone, or the disk of the log full: the line
    is lost then, and the command goes on, since what it does and the code it ends with count for more."""
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        stream.write(printable(line) + "\n")
        stream.flush()


@contextmanager
def display_on(stream: TextIO) -> Iterator[Display]:
    """The display that suits the stream."""
    if _is_terminal(stream) or _in_notebook():
        with BarDisplay(stream) as bar:
            yield bar
    else:
        yield LineDisplay(stream)


@contextmanager
def shown_progress(
    given: GivenProgress[T], counter: Callable[[Display], Callable[[T], None]]
) -> Iterator[Callable[[T], None] | None]:
    """Return the callable for a verb's progress: the given `progress`, or one that shows it on stderr.

    True: a bar on a terminal and in a notebook, lines elsewhere. None: a bar on a terminal only. False: nothing.
    """
    if given is None:
        given = _is_terminal(sys.stderr)
    if not isinstance(given, bool):
        yield given
    elif given and sys.stderr is not None:
        with display_on(sys.stderr) as display:
            yield counter(display)
    else:
        yield None


def _is_terminal(stream: TextIO | None) -> bool:
    """Return whether the stream is a terminal. It may be missing (pythonw) or closed (a daemon)."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def _in_notebook() -> bool:
    """Return whether a notebook can show a bar: rich needs ipywidgets for one that moves."""
    if "IPython" not in sys.modules or find_spec("ipywidgets") is None:
        return False
    from rich.console import Console

    return Console().is_jupyter
