"""Ranks and stores that are killed in a save: the revision before stays whole, and a repeated call continues."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import cluster
from actors.saving.save import _Save
from cluster.publishing import list_saves
from storage.checkpoints.checkpoint_files import INDEX_KEY, parse_weight_map
from storage.checkpoints.replaced_files import BEFORE_KEY
from storage.checkpoints.safetensors_header import parse_header
from storage.publishing.saves import SavesReport
from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.free_ports import free_ports
from tests.support.s3_servers import START_S
from tests.support.save_job import LAST_ROUND, Ended, run_jobs, small_files, small_tensors, step_name

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
SAVE_TIMEOUT_S = 16.0
AWAY, BACK = "store", "store, which comes back"
KEYS = {"access_key_id": "killed-saves", "secret_access_key": "no-secret"}
OPTIONS = {"max_shard_bytes": 6_000_000, "chunk_bytes": 1 << 20}


@dataclass
class Case:
    """A save that meets a fault."""

    number: int
    where: str  # "folder" or "s3"
    who: str  # what is killed
    step: str  # when
    steps: tuple[str, ...]  # all of a save, in order
    job: dict[str, Any]
    uri: str = ""
    root: Path = Path()  # of the objects
    server: EmbeddedS3 | None = None
    ended: list[Ended] = field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        """Return arguments of functions that read or write the checkpoint."""
        if self.server is None:
            return {}
        return {"endpoint_url": self.server.endpoint_url, "region": self.server.region}

    def is_after(self, step: str) -> bool:
        """Return whether the fault comes when that step is done."""
        return self.steps.index(self.step) > self.steps.index(step)

    @property
    def is_new(self) -> bool:
        """Return whether the save's own revision is published after the fault."""
        return self.is_after("commit: manifest") or self.who == BACK

    def __str__(self) -> str:
        return f"{self.where}: {self.who} killed at {self.step}"


def steps_of_a_save(uri: Path) -> tuple[str, ...]:
    """Save to an empty folder, and return the steps of it."""
    names: dict[str, None] = {}
    real = _Save._step

    def step(self: _Save, name: str) -> None:
        names[step_name(name)] = None
        real(self, name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_Save, "_step", step)
        cluster.save(small_tensors(0), uri, extra_files=small_files(0), slots=1, **OPTIONS)
    return tuple(name for name in names if not name.startswith("round "))


def make_cases(steps: tuple[str, ...]) -> list[Case]:
    """Return the cases of the table.

    At every step all ranks are killed, one rank is, and the store is. At every other step all ranks save to a folder
    when they die, and to S3 when one does; at the others it is the reverse. A store that comes back is tried when the
    files are complete, as rclone forgets open uploads.
    """
    found: list[tuple[str, str, str, dict[str, Any]]] = []
    for number, step in enumerate(steps):
        one, other = ("folder", "s3") if number % 2 else ("s3", "folder")
        rank = 0 if step.startswith("commit") else 1 + number % 2  # the others have no part in the commit
        found.append((one, "all ranks", step, {"all_die_at": step}))
        found.append((other, f"rank {rank}", step, {"only": {f"{rank}": {"die_at": step}}}))
        stores = [AWAY] if number <= steps.index("commit: manifest") else []
        stores += [BACK] if number >= steps.index("commit: index") else []
        found += [("s3", store, step, {"only": {"0": {"store_dies_at": step}}}) for store in stores]
    found.append(("folder", "no rank", "write", {"only": {"1": {"raise_at": "write"}}}))
    return [Case(number, where, who, step, steps, job) for number, (where, who, step, job) in enumerate(found)]


def copy(base: Path, to: Path) -> Path:
    """Copy a checkpoint. Shards are linked, as nobody writes to them."""
    return shutil.copytree(base, to, copy_function=lambda a, b: (os.link if "model-" in a else shutil.copyfile)(a, b))


def start_again(server: EmbeddedS3) -> EmbeddedS3:
    """Start a server that was killed, at the same address."""
    port = int(server.endpoint_url.rpartition(":")[2])
    return EmbeddedS3(server.folder, **KEYS, port=port, start_timeout_s=START_S)


@contextlib.contextmanager
def stores(cases: list[Case], base: Path, folder: Path) -> Iterator[None]:
    """Give each case a copy of the checkpoint. Those whose store is killed have a server each."""
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        shared = folder / "shared"
        (shared / "models").mkdir(parents=True)
        for case in cases:
            own = case.who in (AWAY, BACK)
            top = folder / f"s3-{case.number}" if own else shared
            case.root = copy(base, (folder / "local" if case.where == "folder" else top / "models") / f"{case.number}")
        server = stack.enter_context(EmbeddedS3(shared, **KEYS, start_timeout_s=START_S))
        for case in cases:
            case.uri = str(case.root)
            if case.where == "s3":
                case.uri = f"s3://models/{case.number}"
                case.server = server
            if case.who in (AWAY, BACK):
                (port,) = free_ports(1)  # one that nobody takes while the server is away
                case.server = EmbeddedS3(case.root.parent.parent, **KEYS, port=port, start_timeout_s=START_S)
                case.job["store_pid"] = case.server.pid
            if case.who == BACK:
                back = threading.Thread(target=bring_back, args=(case, case.server.pid, over))
                back.start()
                stack.callback(back.join)
        try:
            yield
        finally:
            over.set()
            for case in cases:
                if case.server is not None and case.who in (AWAY, BACK):
                    case.server.close()


def bring_back(case: Case, pid: int, over: threading.Event) -> None:
    """Start the server of a case again when it was killed."""
    with contextlib.suppress(ProcessLookupError):
        while not over.wait(0.05):
            os.kill(pid, 0)
    if not over.is_set():
        assert case.server is not None
        case.server = start_again(case.server)


def check_contents(case: Case, seed: int, folder: Path) -> str:
    """Compare all that is published, and what a reader without Longshore finds. Return the revision."""
    with cluster.safe_open(case.uri, **case.options) as opened:  # verified by the manifest
        for name, tensor in small_tensors(seed).items():
            assert opened.get_tensor(name).equal(tensor), (case, name)
    made = Path(cluster.config_folder(case.uri, folder, **case.options))
    for name, data in small_files(seed).items():
        assert (made / name).read_bytes() == data, (case, name)
    report = cluster.verify(case.uri, progress=False, **case.options)
    assert report.ok, (case, report)
    weight_map = parse_weight_map((case.root / INDEX_KEY).read_bytes())
    assert set(weight_map) == set(small_tensors(seed))
    for file in set(weight_map.values()):
        data = (case.root / file).read_bytes()
        assert parse_header(data, len(data)).tensors, (case, file)
    return report.revision


def check_end(case: Case) -> None:
    """Every rank that lives has ended in time, with an error that names the one at fault."""
    lost = next(iter(case.job.get("only", {})), "")
    for rank, one in enumerate(case.ended):
        assert one.document.get("took_s", 0.0) < 1.5 * SAVE_TIMEOUT_S + 5, (case, one)
        if case.who == "all ranks":
            assert one.code == -9, (case, one)
        elif case.who == BACK:
            assert one.code == 0, (case, one)
        elif case.who == AWAY:
            assert one.code == 3, (case, one)
            assert one.error == ("StoreUnavailable" if one.document["rank"] is None else "SaveError"), (case, one)
        elif f"{rank}" == lost:
            assert one.code == (4 if case.who == "no rank" else -9), (case, one)
        else:
            assert (one.code, one.error, one.document["rank"]) == (3, "SaveError", int(lost)), (case, one)
    assert case.who != AWAY or any(one.error == "StoreUnavailable" for one in case.ended), case


def check_leftovers(case: Case, left: SavesReport) -> None:
    """All that the interrupted save wrote is listed."""
    kinds = {item.kind for item in left.leftovers}
    if not case.is_after("plan"):
        assert not kinds, case
    elif case.is_after("begin") and not case.is_new:
        assert "journal" in kinds, case
        assert ("upload" in kinds) == (not case.is_after("commit: shards") and case.who != AWAY), (case, kinds)
        assert ("replaced" in kinds) == (BEFORE_KEY in {path.name for path in case.root.iterdir()}), case


def test_the_revision_before_stays_and_the_next_save_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    base = tmp_path / "base"
    cases = make_cases(steps_of_a_save(base))
    before = cluster.verify(base, progress=False).revision
    common = {"case": "small", "world": 3, "slots": 1, "seed": 1, "save_timeout_s": SAVE_TIMEOUT_S}
    common["max_shard_bytes"] = OPTIONS["max_shard_bytes"]
    with stores(cases, base, tmp_path):
        jobs = []
        for case in cases:
            where = {} if case.server is None else {"endpoint_url": case.server.endpoint_url}
            jobs.append({**common, **where, "uri": case.uri, **case.job})
        for case, ended in zip(cases, run_jobs(tmp_path / "jobs", jobs, at_once=6, timeout_s=600), strict=True):
            case.ended = ended
        rows = []
        for case in cases:
            check_end(case)
            if case.who == AWAY and case.server is not None:
                case.server = start_again(case.server)
            found = check_contents(case, int(case.is_new), tmp_path / f"old-{case.number}")
            assert (found == before) != case.is_new, case
            left = list_saves(case.uri, **case.options)
            if case.who != BACK:
                check_leftovers(case, left)
            if case.step == LAST_ROUND and case.who == "all ranks":  # nobody continues it
                list_saves(case.uri, clean=True, **case.options)
                assert list_saves(case.uri, **case.options).leftovers == (), case
                assert check_contents(case, 0, tmp_path / f"cleaned-{case.number}") == before, case
                continue
            report = cluster.save(small_tensors(1), case.uri, extra_files=small_files(1), **OPTIONS, **case.options)
            assert check_contents(case, 1, tmp_path / f"new-{case.number}") == report.revision, case
            assert report.written_bytes + report.reused_bytes + report.copied_bytes == report.size_bytes, case
            # rclone forgets open uploads when it ends
            if case.is_after("commit: shards" if case.who == AWAY else "commit: journal") and not case.is_new:
                assert report.reused_bytes == report.size_bytes, (case, report)
            elif case.step == "write" and case.who not in ("all ranks", AWAY):
                # A rank has written its part of the first round before that of the second.
                assert report.reused_bytes >= report.size_bytes // 4, (case, report)
            assert {item.kind for item in list_saves(case.uri, **case.options).leftovers} <= {"file"}, case
            rows.append((f"{case}", report.written_bytes, report.reused_bytes))
    for row in rows:
        print(*row, sep=" | ")
