"""Lines in a log, a bar on a terminal."""

from __future__ import annotations

import asyncio
import builtins
import io
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cluster
from cluster.command_line.progress import (
    LineDisplay,
    Moment,
    StagedDisplay,
    byte_counter,
    display_on,
    line_of,
    load_counter,
    moment_of_load,
    shown_progress,
)
from cluster.telemetry.report import LoadProgress
from tests.support.checkpoints import write_tiny_llama


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Counted:
    done_bytes: int
    total_bytes: int
    key: str


def moments_at(times_s: list[float], states: list[str], interval_s: float = 2.0) -> list[str]:
    clock = iter(times_s)
    stream = io.StringIO()
    display = LineDisplay(stream, interval_s=interval_s, clock=lambda: next(clock))
    for time_s, state in zip(times_s, states, strict=True):
        display.show(Moment(state, 0, 0, time_s))
    return stream.getvalue().splitlines()


def test_lines_are_apart_unless_the_state_changes() -> None:
    lines = moments_at([0, 0.5, 1.0, 1.9, 2.0, 2.1, 3.9, 4.2], ["a", "a", "b", "b", "b", "b", "b", "b"])
    assert [line.split() for line in lines] == [["0.0s", "a"], ["1.0s", "b"], ["3.9s", "b"]]


def test_the_end_is_shown_exactly_once() -> None:
    stream = io.StringIO()
    display = LineDisplay(stream, clock=lambda: 0.0)
    for done in (1, 2, 4, 4, 4):
        display.show(Moment("publish", done, 4, 0.0))
    assert ["(25 %)" in line or "(100 %)" in line for line in stream.getvalue().splitlines()] == [True, True]


def test_an_unread_stream_does_not_block() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with StagedDisplay(Gone()) as display:
        display.say("first")
        display.show(Moment("loading", 1, 2, 0.5))


def test_a_line_shows_progress_and_rate() -> None:
    began = Moment("loading", 112_000_000, 1_024_000_000, 2.0)
    line = line_of(Moment("loading", 512_000_000, 1_024_000_000, 4.0, "1/4 ranks"), began)
    assert line == "    4.0s loading    512 MB of 1.02 GB (50 %), 200 MB/s, 1/4 ranks"


def test_a_line_before_anything_is_known() -> None:
    waiting = Moment("waiting", 0, 0, 1.25, "for 2 GPUs")
    assert line_of(waiting, waiting) == "    1.2s waiting    for 2 GPUs"
    assert line_of(Moment("waiting", 0, 0, 1.25), waiting) == "    1.2s waiting"


def test_a_line_cannot_carry_escape_codes() -> None:
    moment = Moment("verify", 1, 2, 0.0, "\x1b[2Jshard.safetensors")
    assert "\x1b" not in line_of(moment, moment)


def test_a_line_shows_ranks_and_what_the_load_waits_for() -> None:
    progress = LoadProgress("m", "s3://b/m", "waiting", 5, 10, 7_000_000, 1, 4, 2.5, "2 GPUs are held by model x")
    assert moment_of_load(progress) == Moment(
        "waiting", 5, 10, 2.5, "1/4 ranks, 7.00 MB from the store, 2 GPUs are held by model x"
    )


def test_a_terminal_gets_a_bar_that_ends_full() -> None:
    stream = Terminal()
    with display_on(stream) as display:
        display.show(Moment("loading", 10, 100, 1.0, "[not markup]"))
        display.show(Moment("ready", 100, 100, 2.0, "4/4 ranks"))
    shown = stream.getvalue()
    assert "\x1b[" in shown
    assert "100/100 bytes" in shown
    assert "4/4 ranks" in shown


def test_a_file_gets_plain_lines() -> None:
    stream = io.StringIO()
    with display_on(stream) as display:
        display.show(Moment("loading", 10, 100, 1.0))
    assert stream.getvalue() == "    1.0s loading    10 B of 100 B (10 %)\n"


def test_the_bar_stops_when_the_command_fails() -> None:
    stream = Terminal()
    with pytest.raises(RuntimeError, match="broken"), display_on(stream):
        raise RuntimeError("broken")
    assert stream.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_counted_bytes_become_moments() -> None:
    stream = io.StringIO()
    show = byte_counter(LineDisplay(stream, interval_s=0), "publish")
    show(Counted(1_000_000, 4_000_000, "a.safetensors"))
    show(Counted(4_000_000, 4_000_000, "b.safetensors"))
    first, last = stream.getvalue().splitlines()
    assert "publish" in first
    assert "1.00 MB of 4.00 MB (25 %)" in first
    assert "(100 %)" in last
    assert last.endswith("b.safetensors")


def test_messages_between_stages_get_their_own_lines() -> None:
    stream = Terminal()
    with StagedDisplay(stream) as display:
        display.say("first")
        display.show(Moment("loading", 1, 2, 0.5))
        display.say("second")
        display.show(Moment("loading", 2, 2, 0.5))
    shown = stream.getvalue()
    assert shown.startswith("first\n")
    assert "\n\x1b[?25hsecond\n" in shown  # the first bar has ended
    assert shown.count("\x1b[?25h") == 2  # two bars, both ended


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "llama")
    return tmp_path / "llama"


def shown_on_stderr(monkeypatch: pytest.MonkeyPatch, stream: Any) -> Any:
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.mark.parametrize("verb", [cluster.publish, cluster.verify, cluster.convert])
def test_verbs_show_a_bar_lines_or_nothing(verb: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.publish(model, progress=False)
    shown = {}
    for kind in (Terminal, io.StringIO):
        for progress in (None, True, False):
            stream = shown_on_stderr(monkeypatch, kind())
            arguments = {"publish": {"force": True}, "convert": {"dest": model.parent / f"{len(shown)}"}}
            verb(model, progress=progress, **arguments.get(verb.__name__, {}))
            shown[kind, progress] = stream.getvalue()
    assert "\x1b[" in shown[Terminal, None]
    assert "\x1b[" in shown[Terminal, True]
    assert verb.__name__ in shown[io.StringIO, True]
    assert "\x1b[" not in shown[io.StringIO, True]
    assert {shown[io.StringIO, None], shown[Terminal, False], shown[io.StringIO, False]} == {""}


def test_a_function_is_called_and_nothing_is_shown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = shown_on_stderr(monkeypatch, Terminal())
    seen: list[int] = []
    cluster.publish(model, progress=lambda moment: seen.append(moment.done_bytes))
    assert seen
    assert stream.getvalue() == ""


def test_a_stderr_that_is_closed_or_missing_fails_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        shown_on_stderr(monkeypatch, stream)
        for progress in (None, True):
            cluster.publish(model, progress=progress)


def test_what_is_printed_to_a_file_meanwhile_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    terminal = shown_on_stderr(monkeypatch, Terminal())
    with shown_progress(None, load_counter) as show:
        assert show is not None
        show(LoadProgress("m", "s3://b/m", "loading", 5, 10, 7_000_000, 1, 4, 2.5, ""))
        print("a result")
    assert stdout.getvalue() == "a result\n"
    assert "loading" in terminal.getvalue()


def test_two_bars_at_once_share_the_terminal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on_stderr(monkeypatch, Terminal())
    both = threading.Barrier(2)

    def one() -> None:
        with display_on(terminal) as display:
            both.wait(60)
            display.show(Moment("loading", 1, 2, 0.5))
            both.wait(60)

    async def two() -> None:
        await asyncio.gather(asyncio.to_thread(one), asyncio.to_thread(one))

    asyncio.run(two())
    assert terminal.getvalue().count("\x1b[?25l") == 1  # the cursor is hidden once, by the bar that both are in
    assert terminal.getvalue().endswith("\x1b[?25h")


def test_a_notebook_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Output:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...
        def clear_output(self, wait: bool) -> None: ...

    shown: list[Any] = []
    stream = shown_on_stderr(monkeypatch, io.StringIO())
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    widgets = SimpleNamespace(Output=Output, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())  # type: ignore[misc]
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=shown.append))  # type: ignore[misc]
    for installed in (True, False):
        monkeypatch.setitem(sys.modules, "ipywidgets", widgets if installed else None)  # type: ignore[misc]
        shown.clear()
        with shown_progress(True, load_counter) as show:
            assert show is not None
            show(LoadProgress("m", "s3://b/m", "loading", 5, 10, 7_000_000, 1, 4, 2.5, ""))
        assert bool(shown) is installed  # without ipywidgets lines are shown
        assert ("loading" in stream.getvalue()) is not installed
