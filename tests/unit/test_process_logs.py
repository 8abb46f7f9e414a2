"""Logs of a cluster's processes: which files, which lines, whose they are, and that no secret comes along."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.links import COORDINATOR, agent_name, process_of, worker_name
from cluster.command_line.cli import main
from cluster.errors import ClusterLost
from cluster.telemetry import process_logs
from cluster.telemetry.logs import JsonFormatter, LogFields, TextFormatter
from cluster.telemetry.process_logs import (
    LineReader,
    LogCollector,
    LogFilter,
    LogPiece,
    LogProcess,
    fields_of,
    merged,
    read_logs,
)


def name_of(pid: int, kind: str = "err") -> str:
    return f"worker-{pid:056x}-ffffffff-{pid}.{kind}"


def write_log(folder: Path, pid: int, actor: str, *lines: str, kind: str = "err") -> str:
    path = folder / name_of(pid, kind)
    path.write_text(f":job_id:01000000\n:actor_name:{actor}\n" + "".join(f"{line}\n" for line in lines))
    return path.name


# files


def test_files_of_our_actors_are_read_and_no_others(tmp_path: Path) -> None:
    write_log(tmp_path, 1, "Coordinator", "a")
    write_log(tmp_path, 2, "NodeAgent", "b", kind="out")
    write_log(tmp_path, 3, "SomebodyElse", "c")
    (tmp_path / name_of(4)).write_text("no actor\n")
    # a process that was warned before Ray made it an actor
    (tmp_path / name_of(6)).write_text("careful\n" * 1000 + ":actor_name:Coordinator\n")
    (tmp_path / "raylet.err").write_text(":actor_name:GpuWorker\nd\n")
    (tmp_path / name_of(5)).symlink_to(tmp_path / "gone")
    found = read_logs(str(tmp_path), {})
    assert [(piece.kind, piece.pid, piece.lines) for piece in found] == [
        ("coordinator", 1, ("a",)),
        ("agent", 2, ("b",)),
        ("coordinator", 6, ("careful",) * 1000),
    ]


def test_reading_goes_on_where_it_was_and_hands_out_whole_lines(tmp_path: Path) -> None:
    name = write_log(tmp_path, 1, "GpuWorker", "one")
    (piece,) = read_logs(str(tmp_path), {})
    assert read_logs(str(tmp_path), {name: piece.end}) == []
    with open(tmp_path / name, "a") as file:
        file.write("two\nthr")
    (piece,) = read_logs(str(tmp_path), {name: piece.end})
    assert piece.lines == ("two",)
    with open(tmp_path / name, "a") as file:
        file.write("ee\n")
    (piece,) = read_logs(str(tmp_path), {name: piece.end})
    assert piece.lines == ("three",)


def test_files_that_ray_has_moved_are_read_on(tmp_path: Path) -> None:
    """Ray moves the files of ended processes when there are more than 200."""
    name = write_log(tmp_path, 1, "Coordinator", "one")
    (piece,) = read_logs(str(tmp_path), {})
    with open(tmp_path / name, "a") as file:
        file.write("two\n")
    (tmp_path / "old").mkdir()
    (tmp_path / name).rename(tmp_path / "old" / name)
    (moved,) = read_logs(str(tmp_path), {name: piece.end})
    assert (moved.file, moved.kind, moved.lines) == (name, "coordinator", ("two",))
    assert read_logs(str(tmp_path), {})[0].lines == ("one", "two")


def test_a_long_file_is_read_from_near_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_logs, "MOST_BYTES", 64)
    name = write_log(tmp_path, 1, "GpuWorker", *(f"line {n:04}" for n in range(100)))
    (piece,) = read_logs(str(tmp_path), {})
    assert piece.lines == tuple(f"line {n:04}" for n in range(94, 100))  # the first one was not whole
    with open(tmp_path / name, "a") as file:
        file.write("x" * 200)  # more than is read at once, and no end in sight
    seen, got = {name: piece.end}, ""
    while pieces := read_logs(str(tmp_path), seen):
        got += "".join(pieces[0].lines)
        if pieces[0].end == seen[name]:
            break
        seen[name] = pieces[0].end
    assert got == "x" * 192  # the rest is a line that has not ended


def test_a_node_sends_all_lines_in_bounded_messages(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_logs, "MOST_BYTES", 100)
    monkeypatch.setattr(process_logs, "MOST_NODE_BYTES", 250)
    folder = tmp_path / "many"
    folder.mkdir()
    for pid in range(1, 9):
        write_log(folder, pid, "GpuWorker", f"{pid}" * 19)
    pieces = read_logs(str(folder), {})
    assert sum(piece.read_bytes for piece in pieces) <= 250
    assert process_logs.is_full(pieces)
    assert len(pieces) < 8
    nodes.folders = {"n3": folder, "n4": None}
    nodes.asked.clear()
    said = [line.text for line in LogCollector(None, LogFilter()).collect()]
    assert sorted(said) == [f"{pid}" * 19 for pid in range(1, 9)]
    assert nodes.asked["n3"] > 1
    assert nodes.asked["n4"] == 1, "a node that does not answer is waited for once"


def test_secrets_stay_on_the_node(tmp_path: Path) -> None:
    write_log(tmp_path, 1, "NodeAgent", "GET s3://user:hunter2@host/x?X-Amz-Signature=abcdef", "secret_key=hunter2")
    (piece,) = read_logs(str(tmp_path), {})
    assert "hunter2" not in "".join(piece.lines)
    assert "abcdef" not in "".join(piece.lines)


# lines


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_fields_are_read_from_what_our_loggers_write(formatter: logging.Formatter) -> None:
    def written(message: str, fields: LogFields) -> str:
        record = logging.makeLogRecord(
            {"name": "longshore.rank", "msg": message, "created": 0.5, "levelname": "INFO", **fields.extra}
        )
        record.msecs = 500.0
        return formatter.format(record)

    at = "1970-01-01T00:00:00.500Z"
    assert fields_of(written("said", LogFields("llama-1", 2, 3, chunk=4))) == (at, "llama-1", 3)
    assert fields_of(written("said rank=9: no", LogFields(cause='a " rank=7 d', rank=0))) == (at, None, 0)
    assert fields_of(written("said", LogFields("a:b", node="fd00::1"))) == (at, "a:b", None)
    assert fields_of(written("load=x rank=1", LogFields())) == (at, None, None)
    for other in ("Traceback (most recent call last):", "", '{"a": 1}', "{", "[1]"):
        assert fields_of(other) is None


def line(load: str | None = None, rank: int | None = None, at: int = 0, text: str = "said") -> str:
    fields = f" load={load}" * (load is not None) + f" rank={rank}" * (rank is not None)
    return f"2026-11-22T09:30:{at:02}.000Z INFO longshore.x{fields}: {text}"


def read(wanted: LogFilter, process: LogProcess | None, *lines: str, kind: str = "worker") -> list[str]:
    piece = LogPiece("f", kind, 7, lines, 0)
    return [one.text for one in LineReader(wanted).read("host", piece, process)]


def test_lines_about_a_load() -> None:
    lines = (line("a"), "traceback of a", line("b"), "of b", line())
    coordinator = LogProcess("coordinator")
    assert read(LogFilter(), coordinator, *lines) == list(lines)
    assert read(LogFilter("a"), coordinator, *lines) == [line("a"), "traceback of a"]
    assert read(LogFilter("ab"), coordinator, line("abc"), line("a")) == [line("abc")]  # the beginning of an id
    worker = LogProcess("worker", "a", 3)
    raw = ("killed while it started", line("a", 3), line(), line("b", 3))  # the last: it was taken over by a load
    assert read(LogFilter("a"), worker, *raw) == list(raw[:3])
    assert read(LogFilter("b"), worker, *raw) == [raw[3]]
    assert read(LogFilter("a"), LogProcess("worker", "z", 3), *raw) == [raw[1]]
    assert read(LogFilter("a", 3), worker, *raw) == list(raw[:3])
    assert read(LogFilter("a", 2), worker, *raw) == []
    assert read(LogFilter(rank=3), coordinator, line("a", 3), line("a", 1), line("a")) == [line("a", 3)]


def test_a_piece_goes_on_from_the_last_one() -> None:
    reader = LineReader(LogFilter("a"))
    agent = LogProcess("agent")
    reader.read("h", LogPiece("f", "agent", 7, (line("a", at=5),), 0), agent)
    (found,) = reader.read("h", LogPiece("f", "agent", 7, ("its traceback",), 0), agent)
    assert found.time.endswith(":05.000Z")
    assert reader.read("h", LogPiece("g", "agent", 8, ("of another file",), 0), agent) == []


def test_lines_of_many_processes_are_in_the_order_of_time() -> None:
    reader = LineReader(LogFilter())
    one = reader.read("h1", LogPiece("f", "agent", 7, (line(at=1), "raw", line(at=4)), 0), LogProcess("agent"))
    two = reader.read("h2", LogPiece("g", "worker", 8, (line(at=2), line(at=3)), 0), LogProcess("worker", "a", 0))
    assert [(found.host, found.text[17:19]) for found in merged([*one, *two])] == [
        ("h1", "01"),
        ("h1", ""),
        ("h2", "02"),
        ("h2", "03"),
        ("h1", "04"),
    ]


def test_an_actors_name_gives_its_process_and_rank() -> None:
    assert process_of(COORDINATOR) == LogProcess("coordinator")
    assert process_of(agent_name("ab12")) == LogProcess("agent")
    found = process_of(worker_name("llama-70b-3f9a21c4", 3, 1))
    assert found == LogProcess("worker", "llama-70b-3f9a21c4", 3, 1)
    assert found.label == "rank 3 (worker 2)"
    for other in ("", "somebody", "worker-a-b-c", "worker-1"):
        assert process_of(other) is None


# the verb, with nodes that are folders


class Nodes:
    """Stands in for Ray: two nodes of one machine that share a folder, one with its own, one that does not answer."""

    def __init__(self, folders: dict[str, Path | None]) -> None:
        self.folders = folders
        self.asked: Counter[str] = Counter()
        self.names = {
            ("n1", 1, "coordinator"): LogProcess("coordinator"),
            ("n1", 9, "worker"): LogProcess("worker", "a", 1),  # it ended before a coordinator got its pid
            ("n2", 2, "agent"): LogProcess("agent"),
            ("n3", 3, "worker"): LogProcess("worker", "a", 0),
        }
        self.launch = SimpleNamespace(processes=lambda: self.names)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "NodeManagerHostname": f"host-{node}", "NodeManagerAddress": node, "Alive": True}
            for node in self.folders
        ]

    def on_every_node(self, ray: Any, asked: Any, work: Any, timeout_s: float) -> Any:
        for node, (seen,) in asked:
            self.asked[node["NodeID"]] += 1
            folder = self.folders[node["NodeID"]]
            yield node, TimeoutError("no answer in 30 s") if folder is None else read_logs(str(folder), seen)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    stand_in = Nodes({"n1": shared, "n2": shared, "n3": own, "n4": None})
    write_log(shared, 1, "Coordinator", line("a", at=1, text="begins"))
    write_log(shared, 2, "NodeAgent", line("b", at=2))
    write_log(shared, 9, "Coordinator", line("a", at=0, text="is \x1b[2Jkilled"))
    write_log(own, 3, "GpuWorker", line("a", 0, at=3), "raw")
    monkeypatch.setattr(process_logs, "join_cluster", lambda address: (stand_in, stand_in.launch))
    monkeypatch.setattr(process_logs, "address_of", lambda ray: "head:1")
    monkeypatch.setattr(process_logs, "HeadWatch", lambda *_: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(process_logs, "on_every_node", stand_in.on_every_node)
    return stand_in


def test_logs_of_all_nodes(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs"]) == 0
    out, err = capsys.readouterr()
    assert [said.split(" | ")[0] for said in out.splitlines()] == [
        "host-n1 earlier coordinator",
        "host-n1 coordinator",
        "host-n2 agent",
        "host-n3 rank 0",
        "host-n3 rank 0",
    ]
    assert "\x1b" not in out
    assert err == "longshore: no logs of host-n4: no answer in 30 s\n"
    assert main(["logs", "a", "--tail", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [found["text"] for found in document["lines"]] == [line("a", 0, at=3), "raw"]
    assert document["silent_nodes"] == {"host-n4": "no answer in 30 s"}
    assert main(["logs", "--node", "host-n3", "--rank", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["logs", "--node", "nobody"]) == 2
    assert main(["logs", "nothing-of-the-kind"]) == 0
    assert "nothing that was asked for" in capsys.readouterr().err


def test_logs_are_followed(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cluster.command_line import cluster_commands

    def appears(seconds: float) -> None:
        path = tmp_path / "own" / name_of(3)
        if "new" in path.read_text():
            raise ClusterLost("the head is gone")
        with open(path, "a") as file:
            file.write(line("a", 0, at=9, text="new") + "\n")

    monkeypatch.setattr(cluster_commands.time, "sleep", appears)
    assert main(["logs", "a", "--rank", "0", "--follow", "--json"]) == 7
    out, err = capsys.readouterr()
    texts = [json.loads(said)["text"] for said in out.splitlines() if said.startswith('{"time')]
    assert texts == [line("a", 0, at=3), "raw", line("a", 0, at=9, text="new")]
    assert err.count("host-n4") == 1
