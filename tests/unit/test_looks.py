"""Looks at a cluster: requests, new events, rates, and output while the cluster does not answer."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cluster import client
from cluster.command_line.answers import line_of_event, reader_left
from cluster.command_line.cli import main
from cluster.command_line.watch_view import Happened, JsonWatch, LineWatch, Look, Looks, looks_in_thread, watch_view
from cluster.errors import ClusterLost, ModelNotFound, NoCoordinator
from cluster.layouts.mesh import Layout
from cluster.telemetry import process_logs
from cluster.telemetry.chunk_map import LoadEvent
from cluster.telemetry.process_logs import LogLine
from cluster.telemetry.report import ClusterStatus, LoadProgress, ModelStatus, NodeStatus
from cluster.telemetry.saves import SaveProgress, SaveStatus
from cluster.telemetry.stats import RankStatus


def model(model_id: str, state: str = "loading", placed: int = 0, total: int = 1000, **changes: Any) -> ModelStatus:
    ranks = tuple(RankStatus(rank, "host-a", "loading", 0, 0, 0, 0, "cpu") for rank in range(2))
    progress = LoadProgress(model_id, f"s3://b/{model_id}", state, placed, total, placed, 1, 2, 3.0)
    return replace(ModelStatus(progress, "r1", Layout(2), "cpu", True, 1, ("host-a", "host-a"), ranks=ranks), **changes)


def event(number: int, message: str = "it holds all its slices", kind: str = "rank_ready", **more: Any) -> LoadEvent:
    return LoadEvent(number, 1_700_000_000.0 + number, kind, message, **more)


@dataclass
class Cluster:
    """Stands in for `cluster.client`; a test changes its answers."""

    models: list[ModelStatus] = field(default_factory=list)
    hosts: list[str] = field(default_factory=lambda: ["host-a"])
    logs: dict[str, list[LoadEvent]] = field(default_factory=dict)
    incarnation: str = "c1"
    asked: list[tuple[str, int]] = field(default_factory=list)
    error: Exception | None = None
    saves: list[SaveStatus] = field(default_factory=list)

    def status(self, address: str | None = None) -> ClusterStatus:
        if self.error is not None:
            raise self.error
        nodes = tuple(NodeStatus(host, host, 1 << 30, 1 << 29, 1, 0, 0.3) for host in self.hosts)
        return ClusterStatus("0.1.0", self.incarnation, tuple(self.models), nodes, saves=tuple(self.saves))

    def events(
        self, model_id: str, *, after: int = 0, wait_s: float = 0, address: str | None = None
    ) -> tuple[LoadEvent, ...]:
        self.asked.append((model_id, after))
        if model_id not in self.logs:
            raise ModelNotFound("no such model", model=model_id)
        return tuple(e for e in self.logs[model_id] if e.number > after)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    stand_in = Cluster()
    monkeypatch.setattr(client, "status", stand_in.status)
    monkeypatch.setattr(client, "events", stand_in.events)
    return stand_in


def ticking(step_s: float = 1.0) -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


# looks


def test_an_event_is_shown_once(cluster: Cluster) -> None:
    cluster.models, cluster.logs = [model("a")], {"a": [event(1), event(2)]}
    looks = Looks(None, ticking())
    assert [(h.event.number, h.old) for h in looks.look().events] == [(1, True), (2, True)]
    assert looks.look().events == ()
    cluster.logs["a"].append(event(3))
    assert [(h.event.number, h.old) for h in looks.look().events] == [(3, False)]


def test_a_restarted_coordinator_counts_from_1_again(cluster: Cluster) -> None:
    cluster.models, cluster.logs = [model("a")], {"a": [event(n) for n in range(1, 9)]}
    looks = Looks(None, ticking())
    looks.look()
    cluster.incarnation, cluster.logs = "c2", {"a": [event(1, "after the restart")]}
    assert [h.event.message for h in looks.look().events] == ["after the restart"]


def test_ended_loads_are_requested_once(cluster: Cluster) -> None:
    cluster.models = [model("a", "failed"), model("b"), model("gone", "ready")]
    cluster.logs = {"a": [event(1)], "b": []}
    looks = Looks(None, ticking())
    for _ in range(3):
        looks.look()
    assert [asked for asked, _ in cluster.asked].count("a") == 1
    assert cluster.asked[0][0] == "b"  # under way: first


def test_rates_are_of_the_last_seconds_and_never_negative(cluster: Cluster) -> None:
    looks = Looks(None, ticking())
    cluster.logs = {"a": []}
    rates = []
    for placed in (0, 100, 200, 300, 400, 500, 600, 10_600, 50, 150):
        cluster.models = [model("a", placed=placed)]
        rates.append(looks.look().rates.get("a"))
    assert rates[0] is None
    assert rates[1:7] == [100.0] * 6
    assert rates[7] == pytest.approx(10_400 / 5, rel=0.25)
    assert rates[8:] == [None, 100.0]  # a rank was lost: its bytes are placed again
    cluster.models = [model("a", "ready", 1000)]
    assert looks.look().rates == {}


def test_a_look_that_hangs_does_not_block_the_watch() -> None:
    hang = threading.Event()
    calls = itertools.count()

    def look() -> Any:
        if next(calls) == 2:
            hang.wait(30)
            raise ClusterLost("gone")
        return SimpleNamespace()

    found = looks_in_thread(look, 0.01)
    seen: list[Any] = [next(found), next(found)]
    silence = next(found)
    assert isinstance(silence, float)
    assert not any(isinstance(look, float) for look in seen)
    hang.set()
    with pytest.raises(ClusterLost):
        list(found)


def test_an_error_of_the_first_look_is_raised_at_once() -> None:
    def look() -> Look:
        raise ClusterLost("no coordinator")

    with pytest.raises(ClusterLost):
        next(looks_in_thread(look, 1.0))


def test_a_watch_ends_its_thread() -> None:
    looks: list[int] = []
    before = threading.enumerate()

    def look() -> Any:
        looks.append(len(looks))
        return SimpleNamespace()

    found = looks_in_thread(look, 0.01)
    next(found)
    while isinstance(next(found), float):
        pass
    (thread,) = (t for t in threading.enumerate() if t.name == "longshore-looks" and t not in before)
    give_up_s = time.monotonic() + 60
    while len(looks) < 4:  # two were shown, one is queued, and there is no room for this one
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    found.close()
    thread.join(60)
    assert not thread.is_alive()


# lines and JSON


def lines_of(watch: LineWatch, said: list[str], look: Look) -> list[str]:
    said.clear()
    assert watch.show(look)
    return [line.split(" ", 1)[1] for line in "".join(said).splitlines()]


def test_lines_show_what_changed(cluster: Cluster) -> None:
    said: list[str] = []
    watch = LineWatch(lambda text: not said.append(text), ticking(0.1))  # type: ignore[func-returns-value]
    looks = Looks(None, ticking())
    cluster.models, cluster.logs = [model("a", "planning")], {"a": [event(1)]}
    assert lines_of(watch, said, looks.look()) == [
        "coordinator c1: 1 models, 1 nodes",
        "a planning 0 B of 1.00 kB (0 %), 1/2 ranks",
    ]
    assert lines_of(watch, said, looks.look()) == []
    cluster.models = [model("a", placed=500)]
    cluster.logs["a"] += [
        event(2, "starting -> loading", "state"),
        event(3, "its worker is \x1bgone", "rank_lost", rank=1),
    ]
    cluster.hosts = ["host-b"]
    assert lines_of(watch, said, looks.look()) == [
        "node host-b joined",
        "node host-a is gone",
        "a loading 500 B of 1.00 kB (50 %), 250 B/s, 1/2 ranks",
        "a rank_lost: rank 1: its worker is \\x1bgone",
    ]
    cluster.models = [model("a", "failed", error="chunk 7 could not be had")]
    assert lines_of(watch, said, looks.look())[0].endswith("1/2 ranks, chunk 7 could not be had")
    cluster.models = []
    assert lines_of(watch, said, looks.look()) == ["a is not listed any more"]


def test_silence_is_reported_once(cluster: Cluster) -> None:
    said: list[str] = []
    watch = LineWatch(lambda text: not said.append(text), ticking())  # type: ignore[func-returns-value]
    watch.show(Looks(None, ticking()).look())
    for silent_s in (1.0, 6.0, 7.0, 8.0):
        watch.silence(silent_s)
    assert len(said) == 2
    assert "no answer from the coordinator for 6 s" in said[1]


def test_json_has_one_line_a_look(cluster: Cluster) -> None:
    said: list[str] = []
    watch = JsonWatch(lambda text: not said.append(text))  # type: ignore[func-returns-value]
    looks = Looks(None, ticking())
    cluster.models, cluster.logs = [model("a")], {"a": [event(1)]}
    watch.show(looks.look())
    cluster.models = [model("a", placed=300)]
    cluster.logs["a"].append(event(2))
    watch.show(looks.look())
    first, second = (json.loads(line) for line in said)
    assert (first["events"], second["bytes_per_s"]) == ([], {"a": 300.0})
    assert [(e["model_id"], e["number"]) for e in second["events"]] == [("a", 2)]


# the terminal


def drawn(look: Look, events: list[Happened], silent_s: float = 0.0, lines: int = 24, columns: int = 100) -> list[str]:
    console = Console(width=columns, height=lines, file=io.StringIO(), highlight=False)
    with console.capture() as captured:
        console.print(watch_view(look, events, silent_s, lines, columns))
    return captured.get().splitlines()


def test_the_view_shows_loads_nodes_and_events(cluster: Cluster) -> None:
    looks = Looks(None, ticking())
    cluster.models = [model("old", "ready", 1000), model("new", placed=100)]
    cluster.logs = {"old": [], "new": [event(1, "[bold]\nno markup", rank=1, host="host-a")]}
    looks.look()
    cluster.models[1] = model("new", placed=600)
    look = looks.look()
    happened = [Happened("new", cluster.logs["new"][0], False)]
    text = "\n".join(drawn(look, happened))
    assert text.index("new ") < text.index("old ")  # active loads come first
    assert "600 B of 1.00 kB" in text
    assert "500 B/s" in text
    assert "new: host-a 2 loading" in text
    assert "old: " not in text  # its ranks are ready
    assert "537 MB of 1.07 GB" in text
    assert "rank 1 on host-a: [bold]\\nno markup" in text
    assert "no answer" not in text
    assert "no answer for 4 s" in drawn(look, happened, silent_s=4.0)[0]


def save(save_id: str, state: str = "writing", **changes: Any) -> SaveStatus:
    return SaveStatus(
        SaveProgress(save_id, 3, f"s3://b/{save_id}", state, 4, total_bytes=1000, written_bytes=250, **changes)
    )


def test_a_save_is_watched_like_a_load(cluster: Cluster) -> None:
    cluster.saves = [save("save-a"), save("save-b", "failed")]
    cluster.logs = {each: [event(1, f"{each} has begun", kind="save")] for each in ("save-a", "save-b")}
    looks = Looks(None, ticking())
    look = looks.look()
    text = "\n".join(drawn(look, list(look.events)))
    assert "save-a writing, 250 B of 1.00 kB (25 %), 4 ranks, to s3://b/save-a" in text
    assert "save-b failed" not in text, "what is over has events only"
    assert "save-b has begun" in text
    looks.look()
    assert cluster.asked == [("save-a", 0), ("save-b", 0), ("save-a", 1)], "what is over is asked about once"


@pytest.mark.parametrize(("state", "code"), [("published", 0), ("failed", 1), ("lost", 1)])
def test_following_ends_with_the_save(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    cluster.saves = [save("save-a", state, message="" if state == "published" else "rank 2 died")]
    cluster.logs = {"save-a": [event(1, kind="save")]}
    assert main(["events", "save", "--follow", "--json"]) == code
    out, err = capsys.readouterr()
    assert err == "longshore: the save failed: rank 2 died\n" * code
    assert json.loads(out.splitlines()[-1])["state"] == state


@pytest.mark.parametrize("columns", [40, 60, 79, 80, 120])
def test_narrow_terminals_keep_states_and_progress(cluster: Cluster, columns: int) -> None:
    cluster.models = [
        model("a-long-name-of-a-model-89abcdef", "degraded", placed=500_000_000, total=1_000_000_000),
        model("b", "released"),
    ]
    cluster.hosts, cluster.logs = ["a-long-name-of-a-host-0", "host-b"], {}
    shown = drawn(Looks(None, ticking()).look(), [], 0.0, 24, columns)
    assert max(len(line) for line in shown) <= columns
    (first,) = [line for line in shown if "89abcdef" in line and "degraded" in line]
    assert " 1/2" in first
    assert "50 %" in first or "500 MB of 1.00 GB" in first
    assert any("released" in line and " 1/2" in line for line in shown)
    assert len([line for line in shown if line.rstrip().endswith("0.3 s ago")]) == 2


def test_ended_loads_are_last_and_have_an_age(cluster: Cluster) -> None:
    cluster.models = [model("dead", "failed", ended_age_s=41.7), model("alive", "ready")]
    shown = [
        line for line in drawn(Looks(None, ticking()).look(), [], 0.0, 24, 120) if " 1/2" in line or " 2/2" in line
    ]
    assert [line.split()[:2] for line in shown] == [["alive", "ready"], ["dead", "failed"]]
    assert "failed 42 s ago" in shown[1]


@pytest.mark.parametrize("lines", [24, 50])
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_view_fits_the_terminal(cluster: Cluster, lines: int, columns: int) -> None:
    cluster.models = [model(f"model-{n}", placed=n, error="x\n" * 300) for n in range(64)]
    cluster.hosts = [f"host-{n:03}" for n in range(64)]
    cluster.logs = {m.progress.model_id: [event(n, "y" * 400) for n in range(1, 5)] for m in cluster.models}
    look = Looks(None, ticking()).look()
    shown = drawn(look, list(look.events), 0.0, lines, columns)
    assert len(shown) <= lines
    assert max(len(line) for line in shown) <= columns
    assert any("models more" in line for line in shown)
    assert any("nodes more" in line for line in shown)


# the verbs


def test_status_watch_prints_lines_until_the_cluster_is_lost(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.models, cluster.logs = [model("a")], {"a": []}
    states: Iterator[str] = iter(["starting", "loading", "ready"])
    status = cluster.status

    def next_status(address: str | None = None) -> ClusterStatus:
        if (state := next(states, None)) is None:
            raise ClusterLost("the coordinator is gone and did not come back")
        cluster.models = [model("a", state)]
        return status(address)

    monkeypatch.setattr(client, "status", next_status)
    assert main(["status", "--watch", "0.1"]) == 7
    out, err = capsys.readouterr()
    assert [line.split()[2] for line in out.splitlines() if " a " in line] == ["starting", "loading", "ready"]
    assert err == "longshore: the coordinator is gone and did not come back\n"


def test_ctrl_c_ends_a_watch_with_130(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(address: str | None = None) -> ClusterStatus:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "status", interrupted)
    assert main(["status", "--watch"]) == 130


def test_a_watch_without_a_cluster_fails_at_once(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.error = ClusterLost("no Longshore coordinator runs in this cluster")
    assert main(["status", "--watch", "--json"]) == 7
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ClusterLost"


def test_a_watch_waits_for_a_load_and_ends_at_the_shutdown(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.models, cluster.logs = [model("a", "ready")], {"a": []}
    there = iter([False, False, True, False])
    status = cluster.status

    def next_status(address: str | None = None) -> ClusterStatus:
        if not next(there):
            raise NoCoordinator("no Longshore coordinator runs in this cluster")
        return status(address)

    monkeypatch.setattr(client, "status", next_status)
    assert main(["status", "--watch", "0.1"]) == 7
    out, err = capsys.readouterr()
    assert " a ready " in out
    waiting, over = err.splitlines()
    assert "waiting for the first load" in waiting
    assert over == "longshore: no Longshore coordinator runs in this cluster"


@pytest.mark.parametrize(
    "argv", [("status", "--watch", "0.1"), ("events", "a", "--follow"), ("logs", "--follow")], ids=lambda argv: argv[0]
)
def test_following_ends_when_the_reader_leaves(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    """`longshore status --watch | head -1` does this, beside a cluster in which nothing happens."""
    cluster.models, cluster.logs = [model("a")], {"a": [event(1)]}
    said = [LogLine("2026-01-01T00:00:00.000Z", "host-a", "coordinator", 1, "a line")]
    collector = SimpleNamespace(collect=lambda: [said.pop()] if said else [], silent={})
    monkeypatch.setattr(process_logs, "LogCollector", lambda *_: collector)
    reader, writer = os.pipe()
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert not reader_left()
        leaving = threading.Thread(target=lambda: (os.read(reader, 10), os.close(reader)))
        leaving.start()
        assert main(argv) == 0
        leaving.join()
        assert reader_left()


def test_events_accept_the_beginning_of_an_id(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    over = model("llama-0", "released")
    cluster.models, cluster.logs = [over, model("llama-1"), model("qwen-2", "ready")], {"llama-1": [event(1)]}
    for more in ((), ("--json",)):
        assert main(["events", "llama", *more]) == 0
        assert "it holds all its slices" in capsys.readouterr().out
    cluster.logs["qwen-2"] = [event(1)]
    assert main(["events", "qw", "--follow", "--until", "ready"]) == 0
    for more in ((), ("--follow",)):
        assert main(["events", "gemma", *more]) == 2
    cluster.models.append(model("llama-3"))
    capsys.readouterr()
    assert main(["events", "llama", "--json"]) == 2
    assert "2 loads begin so: llama-1, llama-3" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_release_accepts_the_beginning_of_an_id(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []

    def release(model_id: str, **_: object) -> client.Released:
        released.append(model_id)
        return client.Released(model_id, freed=True, holders=0)

    monkeypatch.setattr(client, "release", release)
    cluster.models = [model("llama-1", "ready"), model("llama-12", "ready"), model("qwen-2", "ready")]
    assert main(["release", "qwen"]) == 0
    assert main(["release", "llama-1"]) == 0  # an id comes before what begins so
    assert main(["release", "llama"]) == 2
    assert released == ["qwen-2", "llama-1"]


def test_events_print_lines_or_one_document(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.logs = {"a": [event(4, "x", rank=2, host="h"), event(5, "planning -> starting", "state")]}
    assert main(["events", "a"]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"{line_of_event(e)}\n" for e in cluster.logs["a"])
    assert out.splitlines()[0] == "2023-11-14T22:13:24.000Z     4 rank_ready    rank 2 on h: x"
    assert "events 1 to 3 are kept no longer" in err
    assert main(["events", "a", "--after", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["model_id"], [e["number"] for e in document["events"]]) == ("a", [5])
    assert main(["events", "other"]) == 2


@pytest.mark.parametrize(
    ("state", "until", "code"),
    [
        ("ready", "ready", 0),
        ("failed", "ready", 1),
        ("failed", "end", 1),
        ("released", "end", 0),
        ("released", "ready", 1),
    ],
)
def test_following_ends_with_the_load(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], state: str, until: str, code: int
) -> None:
    cluster.models = [model("a", state, error="why" if state == "failed" else "")]
    cluster.logs = {"a": [event(1), event(2)]}
    follow = ["--follow"] if until == "end" else []  # implied by any other --until
    assert main(["events", "a", *follow, "--until", until, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == {"failed": "longshore: the load failed: why\n"}.get(
        state, "longshore: the load was released\n" * code
    )
    said = [json.loads(line) for line in out.splitlines()]
    assert [one.get("number") for one in said] == [1, 2, None]
    assert (said[-1]["kind"], said[-1]["state"]) == ("end", state)


def test_following_survives_a_coordinator_restart(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.models, cluster.logs = [model("a")], {"a": [event(1), event(2)]}
    rounds = itertools.count()
    status = cluster.status

    def next_status(address: str | None = None) -> ClusterStatus:
        at = next(rounds)
        if at == 1:
            cluster.incarnation, cluster.logs = "c2", {"a": [event(1, "again")]}
        if at == 3:
            cluster.logs = {}
        return status(address)

    monkeypatch.setattr(client, "status", next_status)
    assert main(["events", "a", "--follow"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines()] == ["1", "2", "1"]
    assert "restarted" in err


IN_A_TERMINAL = """
import sys
from cluster import client
from cluster.command_line.cli import main
from cluster.telemetry.report import ClusterStatus
client.status = lambda address: ClusterStatus("0.1.0", "c1", (), ())
sys.exit(main(["status", "--watch", "0.1"]))
"""


def test_a_terminal_is_drawn_on_and_restored(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    errors = tmp_path / "errors"
    with open(errors, "w") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-c", IN_A_TERMINAL], stdin=theirs, stdout=theirs, stderr=stderr, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        )  # fmt: skip
    os.close(theirs)
    seen = b""
    try:
        while seen.count(b"no models are loaded") < 3:  # drawn again and again
            seen += os.read(ours, 4096)
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # reported by a pty when its other side is closed
            while data := os.read(ours, 4096):
                seen += data
        assert child.wait(30) == 130
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1  # the other screen, and back
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h")  # the cursor
    assert b"no models are loaded" in seen.split(b"\x1b[?1049l")[1]  # the last frame stays
    assert errors.read_text() == "longshore: interrupted\n"
